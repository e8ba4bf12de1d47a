# SPDX-License-Identifier: Apache-2.0
"""Patch of vLLM's CPU attention for mode ``stage``: drafts go to staging, and attention is over pages and staging.

Why: vLLM attends over pages alone, so a row that is not in them would not be seen.
How: in a step whose queries are all windows drafts are written by vLLM's own writer into staging, a mini-cache of the
same packing; our operator reads them there, and what lies before them through the block table. Mode ``direct`` writes
all rows as vLLM does, and our operator reads them all through the block table.
When it can go: when the CPU backend takes keys and values beside the cache.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from nwor import ops
from nwor.vllm import write_bypass
from nwor.vllm.patch import wrap

_DIGITS = 8  # whole numbers up to 8 are exact in every cache dtype, fp8 e5m2 included


def install() -> None:
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

    wrap(CPUAttentionBackendImpl, "do_kv_cache_update", _make_update)
    wrap(CPUAttentionBackendImpl, "forward", _make_forward)
    write_bypass.watch(CPUAttentionBackendImpl)


def _make_update(original: Callable) -> Callable:
    def do_kv_cache_update(
        self: Any, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        context = getattr(layer, "nwor", None)
        if context is None or not context.manager.serves_attention:
            return original(self, layer, key, value, kv_cache, slot_mapping)

        def write(cache: Tensor, slots: Tensor) -> None:
            original(self, layer, key, value, cache, slots)

        context.manager.stage(context.index, write, kv_cache, slot_mapping)

    return do_kv_cache_update


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
        vanilla = (self, layer, query, key, value, kv_cache, attn_metadata, output, output_scale, output_block_scale)
        if context is None or not context.manager.serves_attention or attn_metadata is None:
            return original(*vanilla)
        manager = context.manager
        tokens, starts = attn_metadata.num_actual_tokens, attn_metadata.query_start_loc
        first_drafts = torch.arange(len(starts) - 1, dtype=torch.int32) * manager.max_drafts
        ops.verify_attention(
            query[:tokens],
            kv_cache,
            None if manager.page_slots is None else manager.staging_of(context.index),
            output[:tokens].view(query[:tokens].shape),
            starts,
            attn_metadata.seq_lens,
            attn_metadata.block_table,
            first_drafts,
            scale=self.scale,
            softcap=self.logits_soft_cap,
            sliding_window=self.sliding_window,
            alibi_slopes=self.alibi_slopes,
            sinks=None if self.sinks is None else self.sinks.float(),
            packing=manager.layout.packing,
            kv_cache_dtype=self.kv_cache_dtype,
            k_scale=layer._k_scale_float,
            v_scale=layer._v_scale_float,
        )
        return output

    return forward


def find_packing(layer: Any) -> Tensor | None:
    """Learn where vLLM's CPU writer puts each element of a slot, by writing numbers and looking for them.

    The CPU cache is packed by instruction set (keys transposed inside a block, or in tiles), so the writer itself is
    asked: it writes the digits of every element's index into a scratch block, and the digits are read back in place.

    Returns:
        int32 [N, 2 * head_size], each element's place in its (block, head) chunk of ``N * 2 * head_size`` elements;
        None when the places are no permutation, that is, when this packing is one we cannot read.
    """
    from vllm import _custom_ops

    cache = layer.kv_cache
    heads, block_size, width = cache.shape[1:]
    count = block_size * width
    place = torch.zeros(count, dtype=torch.int64)
    value_dtype = {"fp8_e5m2": torch.float8_e5m2}.get(layer.impl.kv_cache_dtype, torch.float8_e4m3fn)
    model_dtype = cache.dtype if cache.dtype != torch.uint8 else torch.bfloat16
    index = torch.arange(count).view(block_size, 1, width).expand(-1, heads, -1)
    weight = 1
    while weight < count:
        digits = (index // weight % _DIGITS + 1).to(model_dtype)
        key, value = (half.contiguous() for half in digits.chunk(2, dim=-1))
        scratch = torch.zeros_like(cache[:1])
        caches = scratch.view(1, heads, block_size * 2, -1).chunk(2, dim=2)
        _custom_ops.cpu_attn_reshape_and_cache(
            key, value, *caches, torch.arange(block_size), layer.isa, kv_cache_dtype=layer.impl.kv_cache_dtype
        )
        chunk = scratch[0, 0].reshape(-1)
        found = (chunk.view(value_dtype) if cache.dtype == torch.uint8 else chunk).float()
        if not bool(((found >= 1) & (found <= _DIGITS)).all()):
            return None
        place += (found.long() - 1) * weight
        weight *= _DIGITS
    packing = place.argsort()
    return packing.int().view(block_size, width) if torch.equal(place[packing], torch.arange(count)) else None
