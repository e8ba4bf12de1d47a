# SPDX-License-Identifier: Apache-2.0
"""Where a slot's bytes lie in vLLM's cache: read off the layers' views, or on a CPU asked of vLLM's own writer."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

CHECKED = {"FullAttentionSpec", "MLAAttentionSpec", "SlidingWindowSpec", "ChunkedLocalAttentionSpec"}
"""Kinds of cache, by the class of their spec, whose rows are each written once to one slot, at which they stay."""
LAYERS = {"Attention", "ChunkedLocalAttention", "MLAAttention", "PrefillPrefixLMAttention"}
"""Classes of layers whose slots are rows; in the cache of a sparse attention's indexer numbers and scales lie apart."""
TYPES = {"auto", "bfloat16", "float16", "fp8", "fp8_ds_mla", "fp8_e4m3", "fp8_e5m2"}
TYPES |= {f"{kind}_per_token_head" for kind in ("fp8", "int4", "int8")}
"""Types of cache whose slots are rows; in NVFP4's, too, numbers and scales lie apart."""


@dataclass(frozen=True)
class Pages:
    """Layers of one cache group whose slots lie alike.

    names: of the layers. group: index of their cache group.
    units: the whole allocation as int8, int16 or int32 [n], its *units*; a slot is `heads` runs of `width` units.
    offsets: int64 [layers], where each layer begins. strides: between blocks, heads and slots. All in units.
    num_blocks, block_size: blocks of the layers' views, and slots of each.
    table_block_size: slots of an entry of vLLM's block tables, one or several of those blocks.
    packing: int32 [block_size, width], where the units of a slot lie in its block and head if they are scattered, as
        keys on a CPU are; None where they are a run.
    window, chunk: positions that a request can still see, where vLLM frees others; 0 for all.
    """

    names: Sequence[str]
    group: int
    units: Tensor
    offsets: Tensor
    strides: tuple[int, int, int]
    heads: int
    width: int
    num_blocks: int
    block_size: int
    table_block_size: int
    packing: Tensor | None = None
    window: int = 0
    chunk: int = 0

    @property
    def num_slots(self) -> int:
        """Slots of each layer, those of the block that vLLM never hands out included."""
        return self.num_blocks * self.block_size

    @functools.cached_property
    def inside(self) -> Tensor:
        """int64 [block_size, heads * width]: where in its block the units of each slot lie."""
        device = self.units.device
        if self.packing is None:
            run = torch.arange(self.width, device=device)
            within = torch.arange(self.block_size, device=device)[:, None] * self.strides[2] + run
        else:
            within = self.packing.long()
        head = torch.arange(self.heads, device=device) * self.strides[1]
        return (head[None, :, None] + within[:, None]).flatten(1)

    def addresses(self, slots: Tensor) -> Tensor:
        """int64 [n, heads * width]: the units of the slots, int64 [n], in the first of the layers less its offset."""
        return self.inside[slots % self.block_size] + (slots // self.block_size * self.strides[0])[:, None]


def find_pages(runner: Any) -> tuple[list[Pages], list[str]]:
    """What can be audited of a runner's cache, and of what cannot be, which layers and why, a line each.

    A drafter's own layers are among the latter: what it has wrong costs accepted drafts and never changes text, and
    vLLM lets it write its rows twice, from drafts and from what became of them.
    """
    context = runner.compilation_config.static_forward_context
    target = {id(module) for module in runner.get_model().modules()}
    found: list[Pages] = []
    left: dict[str, list[str]] = {}
    for index, group in enumerate(runner.kv_cache_config.kv_cache_groups):
        alike: dict[tuple, dict[str, Any]] = {}
        for name in group.layer_names:
            layer = context.get(name)
            if getattr(layer, "kv_sharing_target_layer_name", None):
                continue  # it has no rows of its own
            spec = getattr(group.kv_cache_spec, "kv_cache_specs", {}).get(name, group.kv_cache_spec)
            own = id(layer) in target
            why = _why_not(spec, layer, _table_block_size(runner, index)) if own else "the drafter's own"
            if why:
                left.setdefault(why, []).append(name)
                continue
            cache = context[name].kv_cache
            storage = cache.untyped_storage().data_ptr()
            key = (storage, cache.shape, cache.stride(), cache.dtype, type(spec).__name__)
            alike.setdefault(key, {})[name] = layer
        for layers in alike.values():
            first = next(iter(layers))
            spec = getattr(group.kv_cache_spec, "kv_cache_specs", {}).get(first, group.kv_cache_spec)
            found.append(_pages_of(layers, index, spec, _table_block_size(runner, index)))
    return found, [f"{_list(names)}: {why}" for why, names in left.items()]


def _list(names: Sequence[str]) -> str:
    return f"1 layer ({names[0]})" if len(names) == 1 else f"{len(names)} layers ({names[0]}, ...)"


def _table_block_size(runner: Any, group: int) -> int:
    if runner.vllm_config.use_v2_model_runner:
        return runner.block_tables.block_sizes[group]
    return runner.input_batch.block_table[group].block_size


def _why_not(spec: Any, layer: Any, block_size: int) -> str:
    kind, cache = type(spec).__name__, getattr(layer, "kv_cache", None)
    if kind not in CHECKED or getattr(spec, "tokens_per_state", 1) != 1:
        return f"a cache of kind {kind} has no slot for each token"
    if not isinstance(cache, Tensor) or cache.dim() not in (3, 4) or cache.stride(-1) != 1:
        return "no cache of rows by block and slot"
    if type(layer).__name__ not in LAYERS:
        return f"{type(layer).__name__}, whose slots are not known to be rows"
    if layer.kv_cache_dtype not in TYPES:
        return f"a cache of type {layer.kv_cache_dtype}, whose slots are not known to be rows"
    if block_size % cache.shape[-2]:
        return f"blocks of {cache.shape[-2]} slots, where block tables have {block_size}"
    return ""


def _pages_of(layers: dict[str, Any], group: int, spec: Any, table_block_size: int) -> Pages:
    caches = [layer.kv_cache if layer.kv_cache.dim() == 4 else layer.kv_cache[:, None] for layer in layers.values()]
    first = next(iter(layers.values()))
    cache, size = caches[0], caches[0].element_size()
    packing = _packing(first) if cache.device.type == "cpu" and first.kv_cache.dim() == 4 else None
    num_blocks, heads, block_size, width = cache.shape
    begins, strides = [each.storage_offset() * size for each in caches], [x * size for x in cache.stride()[:3]]
    unit = size
    if packing is None:
        width *= size
        if strides[1] == width:  # all heads are one run
            heads, width = 1, heads * width
        unit = math.gcd(4, width, *strides, *begins)
    storage = cache.untyped_storage()
    raw = torch.empty(0, dtype=torch.uint8, device=cache.device).set_(storage)
    kinds = {1: torch.int8, 2: torch.int16, 4: torch.int32}
    return Pages(
        names=list(layers),
        group=group,
        units=raw[: len(raw) // unit * unit].view(kinds[unit]),
        offsets=torch.tensor([begin // unit for begin in begins], dtype=torch.int64, device=cache.device),
        strides=(strides[0] // unit, strides[1] // unit, strides[2] // unit),
        heads=heads,
        width=width if packing is not None else width // unit,
        num_blocks=num_blocks,
        block_size=block_size,
        table_block_size=table_block_size,
        packing=packing,
        window=spec.sliding_window if type(spec).__name__ == "SlidingWindowSpec" else 0,
        chunk=spec.attention_chunk_size if type(spec).__name__ == "ChunkedLocalAttentionSpec" else 0,
    )


def _packing(layer: Any) -> Tensor:
    """int32 [block_size, width]: the elements of each slot in its block and head, by vLLM's own writer.

    Raises:
        RuntimeError: an element belongs to no slot, or to several.
    """
    _, heads, block_size, width = layer.kv_cache.shape
    dtype = layer.kv_cache.dtype if layer.kv_cache.is_floating_point() else torch.bfloat16
    row = torch.ones(1, heads, width // 2, dtype=dtype)
    places = []
    for offset in range(block_size):
        scratch = torch.zeros_like(layer.kv_cache[:1])
        layer.impl.do_kv_cache_update(layer, row, row, scratch, torch.tensor([offset]))
        places.append(scratch[0, 0].flatten().nonzero()[:, 0])
    if sorted(torch.cat(places).tolist()) != list(range(block_size * width)) or {len(x) for x in places} != {width}:
        raise RuntimeError("kv audit: this CPU cache has elements that belong to no slot, or to several")
    return torch.stack(places).int()
