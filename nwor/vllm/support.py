# SPDX-License-Identifier: Apache-2.0
"""What a mode can serve, and why not: asked once, before a cache is used and before a graph is captured."""

from typing import Any

from nwor.vllm import write_bypass
from nwor.vllm.connectors import why_not_beside
from nwor.vllm.context import draft_layers, is_latent, recurrent_layers, sharing_layers

BACKENDS = ("CPUAttentionBackend", "FlashAttentionBackend", "TritonAttentionBackend", "FlashInferBackend")
ONE_ROW = {"auto", "bfloat16", "float16", "fp8", "fp8_e4m3", "fp8_e5m2"}
ONE_ROW |= {f"{kind}_per_token_head" for kind in ("fp8", "int4", "int8")}
"""Types of cache in which a slot is one row a head. NVFP4 is none: its numbers and scales lie apart in a block."""
NEUTRAL = {"chunk_lookback": -1, "use_alibi_sqrt": False}
"""Masks of vLLM's implementations, each with the value at which it changes no score."""


def why_unsupported(runner: Any, layers: dict[str, Any]) -> str:
    """Why no mode can serve this configuration and these target layers, or an empty string."""
    from vllm.platforms import current_platform

    config = runner.vllm_config
    if not (current_platform.is_cuda() or current_platform.is_cpu()):
        return f"{current_platform.device_name}: the operators are built for CUDA and for CPUs"
    if config.speculative_config is None:
        return "no speculative decoding: there are no drafts to hold back"
    if config.speculative_config.enable_adaptive_verification:
        return "adaptive verification: only the device knows how long queries are, while the host plans with others"
    if config.kv_transfer_config is not None and (reason := why_not_beside(config.kv_transfer_config)):
        return reason
    parallel = config.parallel_config
    if parallel.pipeline_parallel_size > 1:
        return "pipeline parallelism: only the last stage knows what was rejected"
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        return "context parallelism"
    if any(is_latent(layer) and layer.use_sparse for layer in layers.values()):
        return "sparse MLA: the caches of its indexer are not served"
    if reason := why_not_whole(runner, layers):
        return reason
    if recurrent_layers(runner) and (states := config.cache_config.mamba_cache_mode) != "none":
        return f"states of recurrent layers in the prefix cache ({states}): use --no-enable-prefix-caching"
    return ""


def why_not_attending(runner: Any, layers: dict[str, Any]) -> str:
    """Why NWOR's attention cannot serve these target layers, or an empty string."""
    from vllm import envs

    config = runner.vllm_config
    parallel, graphs = config.parallel_config, config.compilation_config.cudagraph_mode
    if sharing := sorted(sharing_layers(runner)):
        return f"layers that read another layer's KV cache, which lacks the rows that stage holds: {sharing[0]}"
    if any(map(is_latent, layers.values())):
        return "MLA: stage's attention has no latent kernel"
    if envs.VLLM_BATCH_INVARIANT:
        return "batch invariance (VLLM_BATCH_INVARIANT): how stage's attention adds up depends on the batch"
    if graphs is not None and graphs.has_full_cudagraphs() and graphs.mixed_mode().has_full_cudagraphs():
        return "cudagraph_mode=FULL: one graph for prefill and decodes; FULL_AND_PIECEWISE has one for decodes alone"
    if parallel.use_ubatching:
        return "micro-batches: stage's attention takes a batch whole"
    if parallel.enable_elastic_ep:
        return "elastic expert parallelism: it gives up graphs that hold the mode"
    for layer in layers.values():
        if layer.kv_cache_torch_dtype.is_floating_point and layer.kv_cache_torch_dtype != layer.dtype:
            return f"a cache of {layer.kv_cache_torch_dtype} beside a model of {layer.dtype}"
        if reason := _unknown_mask(layer, config):
            return reason
    if write_bypass.some_layer_does(runner, layers.values()):
        return "the model writes keys and values itself, or reads them once more: they never reach the attention hook"
    if runner.device.type == "cuda":
        from nwor.vllm import attention_gpu

        if blocked := attention_gpu.fused_passes(config) or attention_gpu.captured_writes(config):
            return blocked
        query_len = 1 + config.speculative_config.num_speculative_tokens
        for layer in layers.values():
            if reason := attention_gpu.cannot_attend(layer) or attention_gpu.why_slower(layer, query_len):
                return reason
    return ""


def _unknown_mask(layer: Any, config: Any) -> str:
    """Why a target layer's attention is none that stage knows, or an empty string.

    It knows causal attention, with a sliding window and a soft cap, and ALiBi and sinks by name. What a backend can do
    beside that grows from release to release: it changes the bodies of the functions that are wrapped, which are then
    those of no known release.
    """
    from vllm.model_executor.layers.attention import Attention
    from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

    kind, impl, backend, model = type(layer), layer.impl, layer.attn_backend.__name__, config.model_config
    masked = [name for name, value in NEUTRAL.items() if getattr(impl, name, value) != value]
    attended = {layer.attn_type, getattr(impl, "attn_type", "decoder")} - {"decoder"}
    if kind is not Attention:
        return f"attention of class {kind.__name__}: its mask is not known to be causal"
    if backend not in BACKENDS:
        return f"the attention backend {backend}: stage knows {', '.join(BACKENDS)}"
    if masked or attended:
        return f"attention of kind {', '.join([*masked, *attended])}, which stage does not know"
    if model.rswa_window is not None:
        return f"a window of {model.rswa_window} that spares the prompt (R-SWA)"
    if layer.use_mm_prefix or model.is_mm_prefix_lm:
        return "multimodal prefixes that are attended to in both directions"
    if layer.head_size_v != layer.head_size:
        return f"values of size {layer.head_size_v} beside keys of size {layer.head_size}"
    # The cache has a class for each kind of attention; subclasses (R-SWA, sinks, MLA) mean other masks. (w - 1, 0) on a
    # GPU and w on a CPU are a window of w positions.
    spec, window = layer.get_kv_cache_spec(config), impl.sliding_window
    seen = window[0] + 1 if isinstance(window, tuple) else max(window, 0)
    if type(spec) is FullAttentionSpec:
        known = not (spec.non_causal or spec.attention_chunk_size or spec.sliding_window or seen)
    else:
        known = type(spec) is SlidingWindowSpec and spec.sliding_window == seen and window in ((seen - 1, 0), seen)
    return "" if known and spec.tokens_per_state == 1 else f"a cache of kind {spec}: its mask is not known to be causal"


def why_not_whole(runner: Any, layers: dict[str, Any]) -> str:
    """Why the rows of `layers` are not all of the target's cache, or an empty string.

    A part of a model is neither served nor audited: what was rejected in the rest of it would stay. Layers that only
    read another one's cache leave nothing there. Nor is a cache whose slots are not known to be rows.
    """
    if unknown := sorted({layer.kv_cache_dtype for layer in layers.values()} - ONE_ROW):
        return f"a cache of type {unknown[0]}: its slots are not known to be one row a head"
    cached = {name for spec in runner.kv_cache_config.kv_cache_groups for name in spec.layer_names}
    context = runner.compilation_config.static_forward_context
    known = layers.keys() | draft_layers(runner) | sharing_layers(runner) | recurrent_layers(runner)
    if others := sorted(cached - known):
        kind = type(context[others[0]]).__name__ if others[0] in context else "a class of its own"
        return f"{len(others)} layers of the cache that no mode knows, {others[0]} ({kind}) among them"
    if missing := sorted(layers.keys() - cached):
        return f"{len(missing)} of the target's layers lie in no cache group, {missing[0]} among them"
    return "" if layers else "no attention layers"
