# SPDX-License-Identifier: Apache-2.0
"""Patch of the runners for `VLLM_NWOR_AUDIT=1`: copy the target caches before each forward, compare after sampling.

Why: the proof must not share code with what it proves, and must hold vanilla vLLM to the same rule.
How: what is compared lies around the modes' own hooks: the copy is taken before a window opens and compared when it has
closed. On the V1 runner these patches go on last and lie outside; the V2 runner's slots are made by the very method in
which a window opens, so there they go on first and lie inside. Rows and rejections are worked out here from vLLM's own
batch.
When it can go: never; it costs nothing unless asked for.
"""

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from torch import Tensor

from nwor.vllm.context import target_group, target_layers
from nwor.vllm.patch import wrap
from nwor.vllm.support import why_not_whole
from nwor_lab.audit.auditor import CacheAudit

_INITIALIZE = ("self", "kv_cache_config", "is_profiling", "kv_cache_allocation_context")


def install() -> None:
    """Let every worker of this process and of its children audit its cache from the first step on."""
    from vllm.v1.worker.gpu_worker import Worker
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    wrap(WorkerWrapperBase, "init_device", ("self",), _make_init_device)
    wrap(Worker, "compile_or_warm_up_model", ("self",), _make_warm_up)


def report(worker: Any) -> dict[str, Any]:
    """What this worker's audit found: ``audit``, an `AuditReport` as a dict, empty without one, and ``dirty_examples``;
    sent to every rank through vLLM's ``collective_rpc``."""
    audit = getattr(worker.model_runner, "nwor_audit", None)
    if audit is None:
        return {"audit": {}, "dirty_examples": []}
    return {"audit": asdict(audit.report), "dirty_examples": audit.examples}


def stop_audit(worker: Any) -> None:
    """End this worker's audit, if it has one; sent like `report`."""
    if (audit := getattr(worker.model_runner, "nwor_audit", None)) is not None:
        audit.enabled = False


def _make_init_device(original: Callable) -> Callable:
    def init_device(self: Any) -> Any:  # `original` installs the modes' own hooks
        if self.vllm_config.use_v2_model_runner:
            install_v2()
            return original(self)
        result = original(self)
        install_v1()
        return result

    return init_device


def _make_warm_up(original: Callable) -> Callable:
    def compile_or_warm_up_model(self: Any) -> Any:
        result = original(self)
        if (audit := getattr(self.model_runner, "nwor_audit", None)) is not None:
            audit.reset_counters()  # the V2 runner's warm-up runs real steps
        return result

    return compile_or_warm_up_model


def install_v1() -> None:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    wrap(GPUModelRunner, "initialize_kv_cache", _INITIALIZE, _make_initialize)
    wrap(
        GPUModelRunner,
        "_model_forward",
        ("self", "input_ids", "positions", "intermediate_tensors", "inputs_embeds", "model_kwargs"),
        _make_forward,
    )
    wrap(GPUModelRunner, "_sample", ("self", "logits", "spec_decode_metadata"), _make_sample)


def install_v2() -> None:
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    wrap(GPUModelRunner, "initialize_kv_cache", _INITIALIZE, _make_initialize)
    wrap(GPUModelRunner, "prepare_attn", ("self", "input_batch"), _make_prepare)
    wrap(
        GPUModelRunner,
        "postprocess_sampled",
        ("self", "idx_mapping", "sampled_tokens", "num_sampled", "num_rejected", "query_start_loc"),
        _make_postprocess,
    )


def _make_initialize(original: Callable) -> Callable:
    def initialize_kv_cache(self: Any, *args: Any, **kwargs: Any) -> None:
        self.nwor_audit = None
        original(self, *args, **kwargs)
        layers = target_layers(self)
        if unseen := why_not_whole(self, layers):
            raise RuntimeError(f"the audit would not see the whole cache: {unseen}: unset VLLM_NWOR_AUDIT")
        packing = None
        if self.device.type == "cpu":
            from nwor.vllm.attention_cpu import find_packing

            packing = find_packing(next(iter(layers.values())))
            if packing is None:
                raise RuntimeError("the audit cannot tell the slots of this CPU cache packing: unset VLLM_NWOR_AUDIT")
        self.nwor_audit = CacheAudit([layer.kv_cache for layer in layers.values()], packing)
        self.nwor_audit_group = target_group(self, layers)

    return initialize_kv_cache


def _make_forward(original: Callable) -> Callable:
    def _model_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.nwor_audit.enabled:
            starts = self.query_start_loc.np[: self.input_batch.num_reqs + 1].tolist()
            slots = self.input_batch.block_table[self.nwor_audit_group].slot_mapping.gpu
            self.nwor_audit.before(starts, slots)
        return original(self, *args, **kwargs)

    return _model_forward


def _make_sample(original: Callable) -> Callable:
    def _sample(self: Any, logits: Tensor | None, spec_decode_metadata: Any) -> Any:
        output = original(self, logits, spec_decode_metadata)
        if self.nwor_audit.enabled:
            self.nwor_audit.after(rejected(output.sampled_token_ids, spec_decode_metadata))
        return output

    return _sample


def rejected(sampled_token_ids: Tensor, metadata: Any) -> list[int]:
    """Rejected drafts of each request on the V1 runner, which marks them by -1; none without drafts."""
    if metadata is None:
        return [0] * len(sampled_token_ids)
    accepted = (sampled_token_ids != -1).sum(dim=1) - 1
    return [max(0, drafts - taken) for drafts, taken in zip(metadata.num_draft_tokens, accepted.tolist(), strict=True)]


def _make_prepare(original: Callable) -> Callable:
    def prepare_attn(self: Any, input_batch: Any) -> Any:
        block_tables, slot_mappings = original(self, input_batch)
        if self.nwor_audit.enabled:
            starts = input_batch.query_start_loc_np[: input_batch.num_reqs + 1].tolist()
            self.nwor_audit.before(starts, slot_mappings[self.nwor_audit_group])
        return block_tables, slot_mappings

    return prepare_attn


def _make_postprocess(original: Callable) -> Callable:
    def postprocess_sampled(
        self: Any,
        idx_mapping: Tensor,
        sampled_tokens: Tensor,
        num_sampled: Tensor,
        num_rejected: Tensor,
        query_start_loc: Tensor | None = None,
    ) -> None:
        original(self, idx_mapping, sampled_tokens, num_sampled, num_rejected, query_start_loc)
        if self.nwor_audit.enabled:
            self.nwor_audit.after(num_rejected.tolist())

    return postprocess_sampled
