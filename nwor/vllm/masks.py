# SPDX-License-Identifier: Apache-2.0
"""Which attention ``stage`` knows: causal, with a sliding window and a soft cap, and ALiBi and sinks by name."""

from typing import Any

BACKENDS = ("CPUAttentionBackend", "FlashAttentionBackend", "TritonAttentionBackend", "FlashInferBackend")
NEUTRAL = {"chunk_lookback": -1, "use_alibi_sqrt": False}
"""Masks of vLLM's implementations, each with the value at which it changes no score."""


def unknown_mask(layer: Any, config: Any) -> str:
    """Why a target layer's attention is none that stage knows, or an empty string.

    What a backend can do beside that grows from release to release: it changes the bodies of the functions that are
    wrapped, which are then those of no known release.

    layer: vLLM's attention layer, its implementation made. config: vLLM's `VllmConfig`.
    """
    from vllm.model_executor.layers.attention import Attention

    kind, impl, backend, model = type(layer), layer.impl, layer.attn_backend.__name__, config.model_config
    masked = [name for name, value in NEUTRAL.items() if getattr(impl, name, value) != value]
    attended = {layer.attn_type, getattr(impl, "attn_type", "decoder")} - {"decoder"}
    facts = [
        (kind is Attention, f"attention of class {kind.__name__}: its mask is not known to be causal"),
        (backend in BACKENDS, f"the attention backend {backend}: stage knows {', '.join(BACKENDS)}"),
        (not (masked or attended), f"attention of kind {', '.join([*masked, *attended])}, which stage does not know"),
        (model.rswa_window is None, f"a window of {model.rswa_window} that spares the prompt (R-SWA)"),
        (
            not (layer.use_mm_prefix or model.is_mm_prefix_lm),
            "multimodal prefixes that are attended to in both directions",
        ),
    ]
    reason = next((why for holds, why in facts if not holds), "")
    return reason or _unknown_cache(layer, layer.get_kv_cache_spec(config), impl.sliding_window)


def _unknown_cache(layer: Any, spec: Any, window: Any) -> str:
    """The same of the layer's cache, which has a class for each kind of attention; window: the implementation's."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

    # Subclasses (R-SWA, sinks, MLA) mean other masks. (w - 1, 0) on a GPU and w on a CPU are a window of w positions.
    attended = window[0] + 1 if isinstance(window, tuple) else max(window, 0)
    if type(spec) is FullAttentionSpec:
        known = not (spec.non_causal or spec.attention_chunk_size or spec.sliding_window or attended)
    else:
        known = type(spec) is SlidingWindowSpec and spec.sliding_window == attended
        known = known and window in ((attended - 1, 0), attended)
    if layer.head_size_v != layer.head_size:
        return f"values of size {layer.head_size_v} beside keys of size {layer.head_size}"
    return "" if known and spec.tokens_per_state == 1 else f"a cache of kind {spec}: its mask is not known to be causal"
