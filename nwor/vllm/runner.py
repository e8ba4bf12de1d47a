# SPDX-License-Identifier: Apache-2.0
"""What the hooks of both model runners share: which layers are the target's, whether a mode can serve them, and the
way of a commit's counts to the scheduler."""

from collections.abc import Callable
from typing import Any

import torch

from nwor.manager import CacheLayout, DraftCommitManager, LayerContext, Receipt, rows_held
from nwor.settings import Settings
from nwor.vllm import own_write, self_check
from nwor.vllm.masks import unknown_mask


def make_initialize(settings: Settings) -> Callable[[Callable], Callable]:
    """A wrapper of `initialize_kv_cache`, which vLLM calls twice on a GPU: once to learn what graphs cost."""

    def make(original: Callable) -> Callable:
        def initialize_kv_cache(self: Any, *args: Any, **kwargs: Any) -> None:
            self.nwor_receipt = None
            serve_by(self, None)
            original(self, *args, **kwargs)
            layers = target_layers(self)
            self.nwor_group = target_group(self, layers)
            if settings.mode == "off":
                return
            self.nwor_receipts = settings.emit_metrics or settings.debug_sync
            self.nwor_reason = unsupported(self, layers, settings.mode)
            manager = None
            if not self.nwor_reason:
                if settings.mode == "stage" and self.device.type == "cuda":
                    from nwor.vllm import attention_gpu

                    attention_gpu.install(layers.values())
                with torch.inference_mode(False):
                    manager, self.nwor_reason = build_manager(self, settings.mode, list(layers.values()))
            if self.nwor_reason:
                from vllm.logger import init_logger

                init_logger(__name__).warning(
                    "NWOR mode %s: %s; vLLM's own cache write serves this model", settings.mode, self.nwor_reason
                )
            serve_by(self, manager)

        return initialize_kv_cache

    return make


def make_load(original: Callable) -> Callable:
    """A wrapper of a GPU runner's `load_model`, for mode ``stage``: the layers are watched from their first run on."""

    def load_model(self: Any, *args: Any, **kwargs: Any) -> None:
        from nwor.vllm import attention_gpu

        original(self, *args, **kwargs)
        for implementation in {type(layer.impl) for layer in target_layers(self).values()}:
            if implementation.__name__ in attention_gpu.SERVED:
                own_write.watch(implementation)

    return load_model


def serve_by(runner: Any, manager: DraftCommitManager | None) -> None:
    """Let the hooks of the runner and of its target layers go through `manager` from now on, or be vLLM alone."""
    runner.nwor = manager
    for index, layer in enumerate(target_layers(runner).values()):
        layer.nwor = None if manager is None else LayerContext(manager, index)


def target_layers(runner: Any) -> dict[str, Any]:
    """The target model's attention layers by name, in order; the drafter's own are never part of a window.

    Of these classes, no subclass included: each writes a row to the one slot that its cache group's slot mapping says.
    """
    from vllm.model_executor.layers import attention

    served = (
        attention.Attention,
        attention.ChunkedLocalAttention,
        attention.PrefillPrefixLMAttention,
        attention.RSWAAttention,
    )
    context, drafter = runner.compilation_config.static_forward_context, draft_layers(runner)
    return {name: layer for name, layer in context.items() if type(layer) in served and name not in drafter}


def draft_layers(runner: Any) -> set[str]:
    """Names of the drafter's own layers, under either runner; none where it has none."""
    of_v1: set[str] = getattr(getattr(runner, "drafter", None), "_draft_attn_layer_names", set())
    of_v2: set[str] = getattr(getattr(runner, "speculator", None), "draft_attn_layer_names", set())
    return of_v1 | of_v2


def not_whole(runner: Any, layers: dict[str, Any]) -> str:
    """Why `layers` are not all of the target's cache, or why they lie in several groups, or an empty string.

    A part of a model is neither served nor audited: what was rejected in the rest of it would stay.
    """
    groups = [set(spec.layer_names) for spec in runner.kv_cache_config.kv_cache_groups]
    context = runner.compilation_config.static_forward_context
    if others := sorted(set().union(*groups) - layers.keys() - draft_layers(runner)):
        kind = type(context[others[0]]).__name__ if others[0] in context else "a class of its own"
        return f"a hybrid model: {len(others)} of its layers are not served, {others[0]} ({kind}) among them"
    holding = [group for group in groups if group & layers.keys()]
    if len(holding) != 1 or not layers.keys() <= holding[0]:
        return f"a hybrid model: its target layers lie in {len(holding)} cache groups"
    return ""


def target_group(runner: Any, layers: dict[str, Any]) -> int | None:
    """The first cache group that holds target layers, None where none does."""
    groups = runner.kv_cache_config.kv_cache_groups
    return next((index for index, spec in enumerate(groups) if layers.keys() & set(spec.layer_names)), None)


def drafts_alone(num_scheduled_tokens: Any, num_drafts: int) -> bool:
    """Whether all rows of a batch but one a request are drafts: nothing is prefilled.

    num_scheduled_tokens: int32 array [num_reqs], each request's rows.
    """
    return int(num_scheduled_tokens.sum()) == num_drafts + len(num_scheduled_tokens)


def reads_rows_of_this_step(manager: DraftCommitManager | None, scheduler_output: Any) -> bool:
    """Whether a request may attend to rows that another request of this step writes, where our attention stores rows.

    vLLM publishes a block to the prefix cache while it schedules the step that fills it, so a request admitted in this
    step may find it there. Of a query longer than a window vLLM's own attention takes care, behind vLLM's own writer.
    """
    if manager is None or manager.attention is None:
        return False
    resumed = scheduler_output.scheduled_cached_reqs
    computed = {request.req_id: request.num_computed_tokens for request in scheduler_output.scheduled_new_reqs}
    computed |= {
        request: tokens
        for request, tokens in zip(resumed.req_ids, resumed.num_computed_tokens, strict=True)
        if request in resumed.resumed_req_ids
    }
    return any(
        tokens > 0 and scheduler_output.num_scheduled_tokens[request] <= manager.max_query_len
        for request, tokens in computed.items()
    )


def unsupported(runner: Any, layers: dict[str, Any], mode: str) -> str:
    """Why the mode cannot serve this configuration, or an empty string."""
    from vllm import envs
    from vllm.platforms import current_platform

    config = runner.vllm_config
    if current_platform.is_rocm():
        return "ROCm: the operators are not built for it"
    if config.speculative_config is None:
        return "no speculative decoding: there are no drafts to hold back"
    if config.kv_transfer_config is not None:
        return "a KV connector reads the pages before the commit"
    parallel = config.parallel_config
    if parallel.pipeline_parallel_size > 1:
        return "pipeline parallelism: only the last stage knows what was rejected"
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        return "context parallelism"
    if any(getattr(layer, "kv_sharing_target_layer_name", None) for layer in layers.values()):
        return "layers that share another layer's KV cache"
    if reason := not_whole(runner, layers):
        return reason
    if mode == "cow":
        return ""
    if envs.VLLM_BATCH_INVARIANT:
        return "batch invariance (VLLM_BATCH_INVARIANT): how stage's attention adds up depends on the batch"
    if parallel.use_ubatching:
        return "micro-batches: stage's attention takes a batch whole"
    if parallel.enable_elastic_ep:
        return "elastic expert parallelism: it gives up graphs that hold the mode"
    for layer in layers.values():
        if layer.kv_cache_torch_dtype.is_floating_point and layer.kv_cache_torch_dtype != layer.dtype:
            return f"a cache of {layer.kv_cache_torch_dtype} beside a model of {layer.dtype}"
        if reason := unknown_mask(layer, config):
            return reason
    if own_write.some_layer_does(runner, layers.values()):
        return "the model writes keys and values itself, or reads them once more: they never reach the attention hook"
    if runner.device.type == "cuda":
        from nwor.vllm import attention_gpu

        blocked = attention_gpu.fused_passes(config) or attention_gpu.captured_writes(config)
        return blocked or next(filter(None, map(attention_gpu.cannot_attend, layers.values())), "")
    from nwor.vllm import attention_cpu

    return next(filter(None, map(attention_cpu.cannot_attend, layers.values())), "")


def build_manager(runner: Any, mode: str, layers: list[Any]) -> tuple[DraftCommitManager | None, str]:
    """The manager of this rank, or None and why these layers cannot be served."""
    packing = None
    if runner.device.type == "cpu":
        from nwor.vllm import attention_cpu

        packing = attention_cpu.find_packing(layers[0])
        if packing is None:
            return None, f"a CPU cache packing ({layers[0].isa}) that is no permutation of a slot's elements"
    try:
        layout = CacheLayout.of([layer.kv_cache for layer in layers], packing)
    except ValueError as error:
        return None, str(error)
    config = runner.vllm_config
    graphs = config.compilation_config.cudagraph_mode
    max_requests, max_drafts = config.scheduler_config.max_num_seqs, config.speculative_config.num_speculative_tokens
    try:
        manager = DraftCommitManager(
            layout,
            mode,
            max_requests=max_requests,
            max_drafts=max_drafts,
            max_tokens=max(config.scheduler_config.max_num_batched_tokens, max_requests),
            replayed=graphs is not None and graphs.has_full_cudagraphs(),
        )
        if mode == "stage" and runner.device.type == "cuda":
            from nwor.vllm import attention_gpu

            manager.attention = attention_gpu.workspace(manager, layers[0])
            manager.graphs_of_prefills = manager.replayed and graphs.mixed_mode().has_full_cudagraphs()
        if failure := self_check.failure(manager, layers, max_drafts):
            return None, failure
    except torch.cuda.OutOfMemoryError as error:
        needed = layout.num_layers * layout.slot_bytes * max_requests * rows_held(mode, max_drafts, layout.block_size)
        raise RuntimeError(
            f"NWOR holds {needed / 2**30:.1f} GiB beside vLLM's share of the GPU, for {max_requests} requests of "
            f"{max_drafts} drafts, and the GPU has no such room: lower max_num_seqs or gpu_memory_utilization"
        ) from error
    return manager, ""


def attach(output: Any, receipt: Receipt | None, req_ids: list[str]) -> None:
    """Let the model runner's output carry the commit's counts: at once, or when an asynchronous output is asked for."""
    if receipt is None or output is None:
        return

    def add(result: Any) -> Any:
        counters, committed = receipt.read()
        result.nwor_committed = dict(zip(req_ids, committed, strict=False))
        result.nwor_counters = vars(counters)
        return result

    get_output = getattr(output, "get_output", None)
    if get_output is None:
        add(output)
    else:
        output.get_output = lambda: add(get_output())
