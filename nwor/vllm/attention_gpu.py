# SPDX-License-Identifier: Apache-2.0
"""Patch of vLLM's GPU attention for mode ``stage``: one kernel attends over pages and tail and puts each row away.

Why: vLLM attends over pages alone, and writes them in a launch of its own before each layer's attention.
How: in a step whose queries are all windows, `nwor.attention.verify.verify_attention` takes the place of writer and
attention both: held rows go to staging, all others to the pages, by what the manager's tensors say at that moment, so
that a captured graph serves whatever step replays it; in mode ``direct`` all rows go to the pages. In every other step
vLLM's own writer and attention run, and nothing of ours. All backends share one signature, and all but FlashInfer's
metadata describe the batch as a whole; FlashInfer's gets that description where it is built.
When it can go: when vLLM's attention takes keys and values beside the cache.
"""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from nwor.attention.configs import HEAD_SIZES
from nwor.vllm.patch import wrap

if TYPE_CHECKING:
    from nwor.attention.verify import LayerAttention
    from nwor.manager import DraftCommitManager

FP8_SINCE = (8, 9)  # Triton's fp8e4nv
FASTER_ROWS = 64  # packed rows of a window; with more our kernel loses to FlashAttention 3 at long contexts
CACHE_DTYPES = ("auto", "bfloat16", "float16", "fp8", "fp8_e4m3")


def install(layers: Iterable[Any]) -> None:
    """Wrap the attention backends of these layers; no other is imported."""
    for implementation in {type(layer.impl) for layer in layers}:
        wrap(implementation, "do_kv_cache_update", _make_update)
        wrap(implementation, "forward", _make_forward)
        if implementation.__name__ == "FlashInferImpl":
            from vllm.v1.attention.backends.flashinfer import FlashInferMetadataBuilder

            wrap(FlashInferMetadataBuilder, "build", _make_build)


def fused_passes(config: Any) -> str:
    """Why a compilation pass keeps rows from our hooks, or an empty string."""
    passes = config.compilation_config.pass_config
    if passes.fuse_rope_kvcache or passes.fuse_qk_norm_rope_kvcache:
        return "rope and cache write are fused: the rows never reach the attention hook"
    if passes.fuse_attn_quant:
        return "attention with quantised output"
    return ""


def captured_writes(config: Any) -> str:
    """Why the cache write is captured in graphs of pieces, where our hook does not run, or an empty string."""
    from vllm import envs

    compilation = config.compilation_config
    graphs = compilation.cudagraph_mode
    if graphs is None or not graphs.has_piecewise_cudagraphs():
        return ""
    if envs.VLLM_USE_BREAKABLE_CUDAGRAPH:
        return "breakable CUDA graphs (VLLM_USE_BREAKABLE_CUDAGRAPH): they hold the cache write"
    if compilation.use_inductor_graph_partition or "vllm::unified_kv_cache_update" not in compilation.splitting_ops:
        return "piecewise CUDA graphs that hold the cache write: it is none of splitting_ops"
    return ""


def cannot_attend(layer: Any) -> str:
    """Why our attention cannot serve this layer, or an empty string."""
    impl = layer.impl
    if impl.head_size not in HEAD_SIZES:
        return f"heads of size {impl.head_size}"
    if impl.kv_cache_dtype not in CACHE_DTYPES:
        return f"a cache of type {impl.kv_cache_dtype}"
    if impl.kv_cache_dtype.startswith("fp8") and (capability := torch.cuda.get_device_capability()) < FP8_SINCE:
        return "an fp8 cache on a GPU of compute capability {}.{}: the kernel needs 8.9".format(*capability)
    if impl.alibi_slopes is not None and type(impl).__name__ == "FlashInferImpl":
        return "ALiBi under FlashInfer, which leaves it out"
    if impl.alibi_slopes is not None and impl.sinks is not None:
        return "ALiBi and attention sinks at once"
    if layer._k_scale.numel() != 1 or layer._v_scale.numel() != 1:
        return "a scale for each head"
    return ""


def why_slower(layer: Any, query_len: int) -> str:
    """Why vLLM's attention is the faster one for windows of so many rows, or an empty string."""
    rows, version = query_len * layer.impl.num_queries_per_kv, getattr(layer.impl, "vllm_flash_attn_version", 0) or 0
    if rows > FASTER_ROWS and version >= 3:
        return (
            f"windows of {query_len} rows for {layer.impl.num_queries_per_kv} query heads of a KV head: of more than "
            f"{FASTER_ROWS} in all FlashAttention {version} is faster"
        )
    return ""


def _make_build(original: Callable) -> Callable:
    def build(self: Any, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        metadata = original(self, common_prefix_len, common_attn_metadata, fast_build)
        metadata.max_query_len = common_attn_metadata.max_query_len
        metadata.query_start_loc = common_attn_metadata.query_start_loc
        metadata.seq_lens = common_attn_metadata.seq_lens
        metadata.block_table = common_attn_metadata.block_table_tensor
        return metadata

    return build


def attention_metadata(layer_name: str) -> Any:
    """What vLLM's attention of a layer is given in this forward; None in a dummy run without attention."""
    from vllm.forward_context import get_forward_context

    metadata = get_forward_context().attn_metadata
    return metadata.get(layer_name) if isinstance(metadata, dict) else None


def _make_update(original: Callable) -> Callable:
    def do_kv_cache_update(
        self: Any, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        context = getattr(layer, "nwor", None)
        if context is not None and ((manager := context.manager).serves_attention or manager.is_dummy_or_capture):
            metadata = attention_metadata(layer.layer_name)
            if metadata is not None and _serves(manager, metadata):
                return  # our kernel stores these rows
        original(self, layer, key, value, kv_cache, slot_mapping)

    return do_kv_cache_update


def _serves(manager: "DraftCommitManager", metadata: Any) -> bool:
    """Whether our kernel serves this batch, of an open window or a capture: its queries are windows alone."""
    if manager.is_dummy_or_capture:
        return manager.attends and metadata.max_query_len <= manager.max_query_len
    if metadata.max_query_len > manager.max_query_len:
        raise RuntimeError(f"a query of {metadata.max_query_len} rows among windows of {manager.max_query_len} at most")
    return True


def _make_forward(original: Callable) -> Callable:
    def forward(
        self: Any,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Any,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        context = getattr(layer, "nwor", None)
        if (
            context is not None
            and attn_metadata is not None
            and ((manager := context.manager).serves_attention or manager.is_dummy_or_capture)
            and _serves(manager, attn_metadata)
        ):
            if (attention := context.attention) is None:
                attention = context.attention = _layer_attention(self, layer, manager, context.index, kv_cache)
            # In mode direct, which stages no row, vLLM's own slots say where each goes.
            slots = attn_metadata.slot_mapping if manager.page_slots is None else manager.page_slots
            rows, all_rows = slots.shape[0], output
            if query.shape[0] > rows:  # vLLM pads queries further than its own slots
                query, output = query[:rows], output[:rows]
            starts, lengths, table = attn_metadata.query_start_loc, attn_metadata.seq_lens, attn_metadata.block_table
            attention(query, key, value, kv_cache, output, starts, lengths, table, slots)
            manager.mark_staged(context.index)
            return all_rows
        return original(
            self, layer, query, key, value, kv_cache, attn_metadata, output, output_scale, output_block_scale
        )

    return forward


def _layer_attention(self: Any, layer: Any, manager: Any, index: int, kv_cache: Tensor) -> "LayerAttention":
    from nwor.attention.verify import LayerAttention

    return LayerAttention(
        staging=kv_cache if manager.page_slots is None else manager.staging_of(index),
        staging_rows=manager.staging_rows,
        max_query_len=manager.max_query_len,
        scale=self.scale,
        softcap=self.logits_soft_cap or 0.0,  # FlashInfer's is None where there is none
        sliding_window=self.sliding_window[0] + 1,
        alibi_slopes=self.alibi_slopes,
        sinks=self.sinks,
        kv_cache_dtype=self.kv_cache_dtype if self.kv_cache_dtype.startswith("fp8") else "auto",
        q_scale=layer._q_scale,
        k_scale=layer._k_scale,
        v_scale=layer._v_scale,
        workspace=manager.attention,
    )
