# SPDX-License-Identifier: Apache-2.0
"""Which attention ``stage`` knows: causal, with a sliding window and a soft cap, and ALiBi and sinks by name.

What vLLM's backends can do beside that (look-back by chunks, windows that spare the prompt, prefixes attended to in
both directions, another cache layout) grows from release to release. So this is a list of what is known to change no
score, held to vLLM's classes by a test: whatever else a layer brings refuses the mode, by its name.
"""

from typing import Any

BACKENDS = ("CPUAttentionBackend", "FlashAttentionBackend", "TritonAttentionBackend", "FlashInferBackend")

# Of an implementation: what is read, or checked, elsewhere; shapes, types and helpers; and what only tells which of
# several kernels of one meaning runs.
_KNOWN = {
    "alibi_slopes", "attn_type", "head_size", "kv_cache_dtype", "logits_soft_cap", "num_heads", "num_kv_heads",
    "scale", "sinks", "sliding_window",
    "kv_sharing_target_layer_name", "num_queries_per_kv", "supports_quant_query_input",
    "dcp_rank", "dcp_world_size", "pcp_rank", "pcp_world_size", "total_cp_rank", "total_cp_world_size",
    "need_to_return_lse_for_decode",
    "is_fp8_kv_cache", "use_zentorch_sdpa",
    "_dcp_dtype", "_dcp_max_num_tokens", "batch_invariant_enabled", "dcp_combine", "fa4_hd256",
    "vllm_flash_attn_version",
    "_is_per_token_head_quant", "_k_scale_cache", "_kv_quant_mode", "_v_scale_cache", "fp8_dtype", "use_td",
    "_set_kv_ptr_range",
    "_nvfp4_fp8_out", "_sinks_source", "bmm1_scale", "bmm2_scale", "cache_dtype", "fp4_data_dim", "is_kvcache_nvfp4",
    "_multi_ctas_kv_counter_buffer", "nvfp4_fa2",
    "nvfp4_trtllm", "o_sf_scale", "supports_xqa_or_trtllm_gen_decode", "window_left",
}  # fmt: skip
# Masks that are known with one value, and unknown to stage with any other.
_NEUTRAL = {"chunk_lookback": -1, "use_alibi_sqrt": False}


def unknown_mask(layer: Any, config: Any) -> str:
    """Why a target layer's attention is none that stage knows, or an empty string.

    layer: vLLM's attention layer, its implementation made. config: vLLM's `VllmConfig`.
    """
    from vllm.model_executor.layers.attention import Attention

    impl, backend = layer.impl, layer.attn_backend.__name__
    if type(layer) is not Attention:
        return f"attention of class {type(layer).__name__}: its mask is not known to be causal"
    if backend not in BACKENDS:
        return f"the attention backend {backend}: stage knows {', '.join(BACKENDS)}"
    if layer.use_mm_prefix or config.model_config.is_mm_prefix_lm:
        return "multimodal prefixes that are attended to in both directions"
    if (window := config.model_config.rswa_window) is not None:
        return f"a window of {window} that spares the prompt (R-SWA)"
    if layer.attn_type != "decoder" or getattr(impl, "attn_type", "decoder") != "decoder":
        return f"attention of type {layer.attn_type}"
    if layer.head_size_v != layer.head_size:
        return f"values of size {layer.head_size_v} beside keys of size {layer.head_size}"
    for name, value in vars(impl).items():
        if name in _NEUTRAL and value != _NEUTRAL[name]:
            return f"{type(impl).__name__}.{name} is {value}, which stage does not know"
        if name not in _NEUTRAL and name not in _KNOWN:
            return f"{type(impl).__name__}.{name}, which stage does not know"
    return _unknown_cache(layer.get_kv_cache_spec(config), impl.sliding_window)


def _unknown_cache(spec: Any, window: Any) -> str:
    """The same of the layer's cache, which has a class for each kind of attention; window: the implementation's."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

    # Subclasses (R-SWA, sinks, MLA) mean other masks. (w - 1, 0) on a GPU and w on a CPU are a window of w positions.
    attended = window[0] + 1 if isinstance(window, tuple) else max(window, 0)
    if type(spec) is FullAttentionSpec:
        known = not (spec.non_causal or spec.attention_chunk_size or spec.sliding_window or attended)
    elif type(spec) is SlidingWindowSpec:
        known = spec.sliding_window == attended and window in ((attended - 1, 0), attended)
    else:
        known = False
    return "" if known and spec.tokens_per_state == 1 else f"a cache of kind {spec}: its mask is not known to be causal"
