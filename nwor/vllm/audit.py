# SPDX-License-Identifier: Apache-2.0
"""Patch of the V1 runner for `VLLM_NWOR_AUDIT=1`: copy the target caches before each forward, compare after sampling.

Why: the proof must not share code with what it proves, and must hold vanilla vLLM to the same rule.
How: wrapped around `nwor.vllm.runner_v1`, whose window opens and closes inside; rows and rejections are worked out
here from vLLM's own batch.
When it can go: never; it costs nothing unless asked for.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from nwor.audit import CacheAudit
from nwor.vllm.patch import wrap
from nwor.vllm.runner_v1 import rejected, target_layers, target_slot_mapping


def install() -> None:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    wrap(
        GPUModelRunner,
        "initialize_kv_cache",
        ("self", "kv_cache_config", "is_profiling", "kv_cache_allocation_context"),
        _make_initialize,
    )
    wrap(
        GPUModelRunner,
        "_model_forward",
        ("self", "input_ids", "positions", "intermediate_tensors", "inputs_embeds", "model_kwargs"),
        _make_forward,
    )
    wrap(GPUModelRunner, "_sample", ("self", "logits", "spec_decode_metadata"), _make_sample)


def _make_initialize(original: Callable) -> Callable:
    def initialize_kv_cache(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        layers = list(target_layers(self).values())
        packing = None
        if self.device.type == "cpu":
            from nwor.vllm.cpu import find_packing

            packing = find_packing(layers[0])
            if packing is None:
                raise RuntimeError("the audit cannot tell the slots of this CPU cache packing: unset VLLM_NWOR_AUDIT")
        self.nwor_audit = CacheAudit([layer.kv_cache for layer in layers], packing)

    return initialize_kv_cache


def _make_forward(original: Callable) -> Callable:
    def _model_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not self.nwor_audit.enabled:
            return original(self, *args, **kwargs)
        starts = self.query_start_loc.np[: self.input_batch.num_reqs + 1].tolist()
        slots = target_slot_mapping(self)[: starts[-1]].clone()
        self.nwor_audited = starts, slots
        self.nwor_audit.before(slots)
        return original(self, *args, **kwargs)

    return _model_forward


def _make_sample(original: Callable) -> Callable:
    def _sample(self: Any, logits: Tensor | None, spec_decode_metadata: Any) -> Any:
        output = original(self, logits, spec_decode_metadata)
        if not self.nwor_audit.enabled:
            return output
        starts, slots = self.nwor_audited
        self.nwor_audit.after(kept_slots(starts, slots, output.sampled_token_ids, spec_decode_metadata))
        return output

    return _sample


def kept_slots(starts: list[int], slots: Tensor, sampled_token_ids: Tensor, metadata: Any) -> Tensor:
    """The slots of every row that stays: all of a query's but the last `num_rejected`."""
    if metadata is None:
        return slots
    drafts = torch.tensor(metadata.num_draft_tokens, dtype=torch.int32, device=sampled_token_ids.device)
    num_rejected = rejected(sampled_token_ids, drafts).tolist()
    rows = [range(starts[i], starts[i + 1] - gone) for i, gone in enumerate(num_rejected)]
    return slots[torch.tensor([row for kept in rows for row in kept], device=slots.device)]
