# SPDX-License-Identifier: Apache-2.0
"""A conversation whose blocks vLLM's `OffloadingConnector` copies out of the cache and back, on a GPU and on a CPU.

The connector, its scheduler and the store of blocks are vLLM's own. On a CPU, where vLLM has no copy from cache to
host, `HostOffloadingSpec` copies from one host tensor to another, at once.
"""

from dataclasses import replace
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

from nwor.settings import Settings
from nwor_lab.engines.engine import EngineSpec
from nwor_lab.machine import on_cpu
from tests.engines import Outcome
from tests.nwor.specs import with_connector

BLOCK = 32
FIRST, OTHERS = ([[(7 * i + 13 * j + seed) % 250 + 3 for j in range(BLOCK)] for i in range(4)] for seed in (0, 1))


def offloading(spec: EngineSpec, offload: int = 64) -> EngineSpec:
    """A cache that holds one of the calls below, and no two; blocks go to `offload` MiB of host memory, if any."""
    spec = replace(spec, batch=4, block_size=BLOCK, num_blocks=20, prefix_caching=True, k=6)
    options: dict[str, Any] = {"cpu_bytes_to_use": offload << 20, "offload_prompt_only": False}
    if on_cpu():
        options |= {"spec_name": "HostOffloadingSpec", "spec_module_path": __name__}
    return with_connector(spec, "OffloadingConnector", options) if offload else spec


def converse(
    engines, spec: EngineSpec, mode: str, answers: list[list[int]], fault=None, logprobs: int = 0, **others
) -> Outcome:
    """Prompts whose answers end with a block; others, for which these are evicted; and the first ones' next turn.

    others: settings that differ; the audit is on, and a mode compares what it commits with the scheduler's counts.
    """
    again = [prompt + answer + [9, 8, 7] for prompt, answer in zip(FIRST, answers, strict=True)]
    calls = [{"prompts": prompts} for prompts in (FIRST, OTHERS, again)]
    settings = Settings(**{"mode": mode, "audit": True, "debug_sync": mode != "off", **others})
    return engines.run(spec, settings, fault, calls, max_tokens=2 * BLOCK, logprobs=logprobs)


def first_answers(engines, spec: EngineSpec) -> list[list[int]]:
    return engines.run(spec, Settings(), prompts=FIRST, max_tokens=2 * BLOCK).tokens


def assert_shipped_and_served(outcome: Outcome, mode: str) -> None:
    """Blocks have left and come back, no dirty slot among them, and the mode has served all along."""
    audit, [rank] = outcome.audit, outcome.ranks
    layers = audit["layer_steps"] // audit["steps"]
    assert outcome.metrics["external_prefix_cache_hits"] >= len(FIRST) * BLOCK
    assert audit["shipped_slots"] >= len(FIRST) * 2 * BLOCK * layers
    assert audit["shipped_rejected"] == audit["shipped_unwritten"] == 0
    assert audit["stray_slots"] == audit["wrong_rows"] == audit["unwritten_rows"] == 0, rank["dirty_examples"]
    assert (audit["dirty_slots"] > 0) == (mode == "off")
    if mode != "off":
        assert rank["serving"] == mode, rank["reason"]
        assert rank["counters"]["windows"] > 0 == rank["counters"]["fallbacks"]


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
