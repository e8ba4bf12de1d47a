# SPDX-License-Identifier: Apache-2.0
"""Patch of vLLM's V1 model runner: open the window before the forward, close it between sampling and drafting.

Why: only the runner knows which rows of a batch are drafts and how many of them were rejected.
How: `_prepare_inputs` yields the drafts per request, `_model_forward` (real steps only: dummy runs call the model
itself) is where the window opens, `_sample` returns the accepted tokens before the drafter proposes.
When it can go: with the V1 runner.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from nwor.manager import CacheLayout, DraftCommitManager, LayerContext, Window
from nwor.settings import Settings
from nwor.vllm.patch import wrap


def install(settings: Settings) -> None:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    wrap(
        GPUModelRunner,
        "initialize_kv_cache",
        ("self", "kv_cache_config", "is_profiling", "kv_cache_allocation_context"),
        lambda original: _make_initialize(original, settings.mode),
    )
    wrap(GPUModelRunner, "_prepare_inputs", ("self", "scheduler_output", "num_scheduled_tokens"), _make_prepare)
    wrap(
        GPUModelRunner,
        "_model_forward",
        ("self", "input_ids", "positions", "intermediate_tensors", "inputs_embeds", "model_kwargs"),
        _make_forward,
    )
    wrap(GPUModelRunner, "_sample", ("self", "logits", "spec_decode_metadata"), _make_sample)
    wrap(GPUModelRunner, "sample_tokens", ("self", "grammar_output"), _make_sample_tokens)


def _make_initialize(original: Callable, mode: str) -> Callable:
    def initialize_kv_cache(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self.nwor, self.nwor_metadata, self.nwor_committed = None, None, {}
        layers = target_layers(self)
        self.nwor_group = target_group(self, layers)
        if mode == "off":
            return
        self.nwor_reason = unsupported(self, layers, mode)
        if not self.nwor_reason:
            self.nwor, self.nwor_reason = build_manager(self, mode, list(layers.values()))
        if self.nwor_reason:
            from vllm.logger import init_logger

            init_logger(__name__).warning(
                "NWOR mode %s: %s%s",
                mode,
                self.nwor_reason,
                "" if self.nwor else "; vLLM's own cache write serves this model",
            )
        if self.nwor is None:
            return
        for index, layer in enumerate(layers.values()):
            layer.nwor = LayerContext(self.nwor, index)

    return initialize_kv_cache


def target_layers(runner: Any) -> dict[str, Any]:
    """The target model's attention layers by name, in order; the drafter's own are never part of a window."""
    from vllm.model_executor.layers.attention import Attention

    drafter = getattr(runner, "drafter", None)
    draft_names: set[str] = getattr(drafter, "_draft_attn_layer_names", set())
    context = runner.compilation_config.static_forward_context
    return {name: layer for name, layer in context.items() if isinstance(layer, Attention) and name not in draft_names}


def unsupported(runner: Any, layers: dict[str, Any], mode: str) -> str:
    """Why the mode cannot serve this configuration, or an empty string."""
    config = runner.vllm_config
    if config.speculative_config is None:
        return "no speculative decoding: there are no drafts to hold back"
    if config.kv_transfer_config is not None:
        return "a KV connector reads the pages before the commit"
    parallel = config.parallel_config
    if parallel.pipeline_parallel_size > 1:
        return "pipeline parallelism: only the last stage knows what was rejected"
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        return "context parallelism"
    if mode == "stage" and runner.device.type != "cpu":
        return f"stage has an attention hook on the CPU alone, not on {runner.device.type}"
    if mode == "stage" and parallel.use_ubatching:
        return "micro-batches: stage's attention takes a batch whole"
    if runner.shared_kv_cache_layers:
        return "layers that share another layer's KV cache"
    groups = {
        group
        for group, spec in enumerate(runner.kv_cache_config.kv_cache_groups)
        for name in spec.layer_names
        if name in layers
    }
    attention = {name for spec in runner.kv_cache_config.kv_cache_groups for name in spec.layer_names}
    if len(groups) != 1 or not layers.keys() <= attention:
        return f"a hybrid model: its target layers lie in {len(groups)} cache groups"
    return ""


def build_manager(runner: Any, mode: str, layers: list[Any]) -> tuple[DraftCommitManager | None, str]:
    """The manager of this rank, and a notice; or None, and why these layers cannot be served."""
    packing, notice = None, ""
    if runner.device.type == "cpu":
        from nwor.vllm import cpu

        packing = cpu.find_packing(layers[0])
        if packing is None:
            return None, f"a CPU cache packing ({layers[0].isa}) that is no permutation of a slot's elements"
        unread = next(filter(None, map(cpu.cannot_attend, layers)), "")
        if mode == "stage" and unread:
            notice = f"stage is emulated (write, attend, put back): {unread}"
    try:
        layout = CacheLayout.of([layer.kv_cache for layer in layers], packing)
    except ValueError as error:
        return None, str(error)
    config = runner.vllm_config.scheduler_config
    held = runner.num_spec_tokens + int(mode == "stage")
    manager = DraftCommitManager(
        layout,
        mode,
        capacity=min(config.max_num_seqs * held, config.max_num_batched_tokens),
        max_tokens=config.max_num_batched_tokens,
        emulate=bool(notice),
    )
    return manager, notice


def _make_prepare(original: Callable) -> Callable:
    def _prepare_inputs(self: Any, scheduler_output: Any, num_scheduled_tokens: Any) -> Any:
        result = original(self, scheduler_output, num_scheduled_tokens)
        self.nwor_metadata = result[1]
        return result

    return _prepare_inputs


def _make_forward(original: Callable) -> Callable:
    def _model_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        manager, metadata = self.nwor, self.nwor_metadata
        if manager is None or metadata is None:
            return original(self, *args, **kwargs)
        window = Window.of(
            self.query_start_loc.np[: self.input_batch.num_reqs + 1].tolist(),
            metadata.num_draft_tokens,
            self.device,
            sampled_rows=manager.mode == "stage",
        )
        manager.begin(window, target_slot_mapping(self))
        try:
            return original(self, *args, **kwargs)
        except BaseException:
            manager.cancel()
            raise

    return _model_forward


def target_group(runner: Any, layers: dict[str, Any]) -> int | None:
    """The first cache group that holds target layers, None where none does."""
    groups = runner.kv_cache_config.kv_cache_groups
    return next((index for index, spec in enumerate(groups) if layers.keys() & set(spec.layer_names)), None)


def target_slot_mapping(runner: Any) -> Tensor:
    """The persistent int64 slot mapping of the cache group that holds the target layers."""
    return runner.input_batch.block_table[runner.nwor_group].slot_mapping.gpu


def _make_sample(original: Callable) -> Callable:
    def _sample(self: Any, logits: Tensor | None, spec_decode_metadata: Any) -> Any:
        manager = self.nwor
        self.nwor_committed = {}
        if manager is None or manager.window is None:
            return original(self, logits, spec_decode_metadata)
        try:
            output = original(self, logits, spec_decode_metadata)
            drafts = torch.tensor(manager.window.num_drafts, dtype=torch.int32).to(self.device, non_blocking=True)
            num_rejected = rejected(output.sampled_token_ids, drafts)
            manager.commit(num_rejected)
        except BaseException:
            manager.cancel()
            raise
        if self.device.type == "cpu":
            committed = (drafts - num_rejected).tolist()
            self.nwor_committed = dict(zip(self.input_batch.req_ids, committed, strict=True))
        return output

    return _sample


def rejected(sampled_token_ids: Tensor, num_drafts: Tensor) -> Tensor:
    """Rejected drafts of each request.

    Args:
        sampled_token_ids: int [num_reqs, k + 1], accepted drafts and one more token, then -1.
        num_drafts: int32 [num_reqs].

    Returns:
        int32 [num_reqs].
    """
    accepted = (sampled_token_ids != -1).sum(dim=1, dtype=torch.int32) - 1
    return torch.minimum((num_drafts - accepted).clamp_(min=0), num_drafts)


def _make_sample_tokens(original: Callable) -> Callable:
    def sample_tokens(self: Any, grammar_output: Any) -> Any:
        output = original(self, grammar_output)
        if self.nwor is not None and self.nwor_committed:
            output.nwor_committed = self.nwor_committed
            output.nwor_counters = vars(self.nwor.read_counters()).copy()
        return output

    return sample_tokens
