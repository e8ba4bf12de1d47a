# SPDX-License-Identifier: Apache-2.0
"""Blocks that vLLM's `OffloadingConnector` copies out of the cache and back, on a GPU and on a CPU.

The connector, its scheduler and the store of blocks are vLLM's own. On a CPU, where vLLM has no copy from cache to
host, `HostOffloadingSpec` copies from one host tensor to another, at once.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.kv_offload.base import (
    BlockIDsLoadStoreSpec,
    CanonicalKVCaches,
    GPULoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec


class HostOffloadingSpec(CPUOffloadingSpec):
    """vLLM's offloading to host memory, of a cache that lies in host memory."""

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        if self.blocks_per_chunk != 1:
            raise ValueError(f"blocks_per_chunk must be 1 on a CPU, got {self.blocks_per_chunk}")
        return HostWorker(kv_caches, self.num_chunks)


class HostWorker(OffloadingWorker):
    """Copies blocks between the cache and as many `chunks` of the same size; what is asked for is done at once."""

    def __init__(self, caches: CanonicalKVCaches, num_chunks: int) -> None:
        self.blocks = [cache.tensor for cache in caches.tensors]
        self.chunks = [tensor.new_zeros(num_chunks, *tensor.shape[1:]) for tensor in self.blocks]
        self.of_group = [sorted({ref.tensor_idx for ref in refs}) for refs in caches.group_data_refs]
        self.finished: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: BlockIDsLoadStoreSpec) -> bool:
        return self._copy(job_id, src_spec, dst_spec, store=True)

    def submit_load(self, job_id: int, src_spec: BlockIDsLoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        return self._copy(job_id, dst_spec, src_spec, store=False)

    def _copy(self, job_id: int, of_cache: GPULoadStoreSpec, of_host: BlockIDsLoadStoreSpec, store: bool) -> bool:
        sizes = list(of_cache.group_sizes)
        blocks, chunks = (torch.as_tensor(ids.block_ids).long().split(sizes) for ids in (of_cache, of_host))
        for group, tensors in enumerate(self.of_group):
            for index in tensors:
                cache, host = self.blocks[index], self.chunks[index]
                if store:
                    host[chunks[group]] = cache[blocks[group]]
                else:
                    cache[blocks[group]] = host[chunks[group]]
        self.finished.append(TransferResult(job_id, success=True))
        return True

    def get_finished(self) -> list[TransferResult]:
        finished, self.finished = self.finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        """Nothing is under way."""


def ship_last_slots(scheduler: Any) -> None:
    """Let this scheduler's connector offload a request's last block as it did before vLLM's pull request 54288.

    It then took the token sampled last for one whose keys and values are in the cache. Where an answer ends with a
    block, that block was shipped with whatever its last slot held: a rejected draft's row, say.
    """
    of_connector = scheduler.connector.connector_scheduler
    offloadable = of_connector._calc_num_offloadable_tokens

    def with_last(req_status: Any, num_computed_tokens: int) -> int:
        return offloadable(req_status, num_computed_tokens + int(req_status.req.is_finished()))

    of_connector._calc_num_offloadable_tokens = with_last
