# SPDX-License-Identifier: Apache-2.0
"""A paged KV cache, one layer's view of it, and the rows of one step's batch.

`rows` are keys and values as the cache holds them: raw bytes, uint8 `[2, T, H, D * element size]`, keys first.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from nwor_lab.reference.ledger import Traffic

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


@dataclass(frozen=True)
class LayerContext:
    """Everything a write or a commit needs of a layer; it travels with the rows that are staged for it.

    Attributes:
        layer: the layer's number. A drafter's layers follow the target's.
        pages: `[2, num_blocks, block_size, H, D]`, the key cache and the value cache.
        k_scale, v_scale: what keys and values are divided by before they are rounded to fp8; 1 for other dtypes.
        traffic: the ledger that this layer's operators count in.
    """

    layer: int
    pages: Tensor
    k_scale: float = 1.0
    v_scale: float = 1.0
    traffic: Traffic = field(default_factory=Traffic, compare=False, repr=False)

    @property
    def row_bytes(self) -> int:
        """Bytes of one token's key and value."""
        return self.pages[:, 0, 0].numel() * self.pages.itemsize

    def write(self, key: Tensor, value: Tensor, slot_mapping: Tensor, launches: int = 1) -> None:
        """vLLM's paged write: `key, value [T, H, D]` to `slot_mapping` int64 `[T]`, where a negative slot is skipped.

        It counts as `launches`.
        """
        valid = slot_mapping >= 0
        self.store(self.encode(key[valid], value[valid]), slot_mapping[valid])
        if n := int(valid.sum()):
            read = 2 * n * key[0].numel() * key.element_size()
            self.traffic.count("write", read=read, written=n * self.row_bytes, launches=launches)

    def read(self, slots: Tensor, dtype: torch.dtype, tail: int = 0) -> Tensor:
        """What attention gathers: keys and values `[2, T, H, D]` at `slots` int64 `[T]`, in `dtype`.

        The last `tail` of them are rows of an open window, which are counted apart.
        """
        self.traffic.count("attention", read=(len(slots) - tail) * self.row_bytes)
        self.traffic.count("tail", read=tail * self.row_bytes)
        return self.decode(self.load(slots), dtype)

    def encode(self, key: Tensor, value: Tensor) -> Tensor:
        """The rows of `key, value [T, H, D]`: fp8 divides by the scale, saturates and rounds."""
        rows, dtype = torch.stack((key, value)), self.pages.dtype
        if dtype in FP8:
            limit = torch.finfo(dtype).max
            rows = (rows.float() / self._scales).clamp(-limit, limit).to(dtype)
        return rows.view(torch.uint8)

    def decode(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """The keys and values `[2, T, H, D]` of rows, in `dtype`."""
        held = rows.view(self.pages.dtype)
        return (held.float() * self._scales if held.dtype in FP8 else held).to(dtype)

    def load(self, slots: Tensor) -> Tensor:
        """The rows at `slots` int64 `[T]`; the caller counts them."""
        return self._by_slot[:, slots]

    def store(self, rows: Tensor, slots: Tensor) -> None:
        """Put rows at `slots` int64 `[T]`; the caller counts them."""
        self._by_slot[:, slots] = rows

    @property
    def _scales(self) -> Tensor:
        return torch.tensor([self.k_scale, self.v_scale]).view(2, 1, 1, 1)

    @property
    def _by_slot(self) -> Tensor:
        return self.pages.view(torch.uint8).flatten(1, 2)


class PagedCache:
    """Keys and values of several layers in pages of `block_size` tokens.

    Args:
        num_layers, num_heads, head_size: layers, KV heads on this rank, and elements of a head's key and of its value.
        num_blocks, block_size: pages, and tokens a page.
        dtype: of the cache.
        poison: fill pages never written with NaN bytes, so that a read of one shows; else with zeros, as vLLM does.
        first_layer: the number of the first layer; a drafter's cache begins where the target's ends.
    """

    def __init__(
        self, num_layers: int, num_heads: int, head_size: int, num_blocks: int, block_size: int,
        dtype: torch.dtype = torch.float32, *, poison: bool = True, first_layer: int = 0,
    ) -> None:  # fmt: skip
        self.num_layers, self.num_heads, self.head_size = num_layers, num_heads, head_size
        self.num_blocks, self.block_size, self.dtype = num_blocks, block_size, dtype
        self.traffic = Traffic()
        size = (num_layers, 2, num_blocks, block_size, num_heads, head_size * dtype.itemsize)
        self.pool = torch.full(size, 0xFF if poison else 0, dtype=torch.uint8)
        self.layers = {
            layer: LayerContext(layer, pages.view(dtype), traffic=self.traffic)
            for layer, pages in enumerate(self.pool, start=first_layer)
        }

    def slots(self, block_table: Tensor, positions: Tensor) -> Tensor:
        """Slots int64 `[T]` of `positions` int64 `[T]`:
        `block_table[p // block_size] * block_size + p % block_size`."""
        return block_table[positions // self.block_size] * self.block_size + positions % self.block_size

    def changed_bytes(self, before: Tensor, kept_slots: Tensor) -> int:
        """Bytes outside `kept_slots` int64 `[K]` that differ from `before`, an earlier clone of `pool`,
        in any layer."""
        changed = (self.pool != before).flatten(4).flatten(2, 3)  # [L, 2, slots, bytes]
        changed[:, :, kept_slots] = False
        return int(changed.sum())


@dataclass(frozen=True)
class Batch:
    """One step's rows, flattened over its requests as vLLM flattens them. T rows, R requests, integers int64.

    Attributes:
        input_ids, positions, slot_mapping: `[T]`.
        query_start_loc: `[R + 1]`; request r's rows are `query_start_loc[r]:query_start_loc[r + 1]`.
        num_drafts: `[R]`; a request that verifies n > 0 drafts brings 1 + n rows, one that prefills has 0.
        sequence_slots: of each request, the slots of all its positions, this step's rows last.
    """

    input_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    query_start_loc: Tensor
    num_drafts: Tensor
    sequence_slots: list[Tensor]

    @property
    def query_lens(self) -> Tensor:
        return self.query_start_loc.diff()

    @cached_property
    def row_request(self) -> Tensor:
        """The request of each row, `[T]`."""
        return torch.repeat_interleave(torch.arange(len(self.query_lens)), self.query_lens)

    @cached_property
    def window_rows(self) -> Tensor:
        """Rows of requests that verify drafts, `[M]`; never those of a prefill."""
        return torch.nonzero(self.num_drafts[self.row_request] > 0).flatten()

    @cached_property
    def draft_rows(self) -> Tensor:
        """Window rows but each request's first, which is a token sampled before and always kept."""
        return self.window_rows[~torch.isin(self.window_rows, self.query_start_loc)]

    def kept(self, num_rejected: Tensor) -> Tensor:
        """Which rows stay, bool `[T]`: of each query the rows `[0, query_len - num_rejected)`, as vLLM counts them."""
        return torch.arange(len(self.row_request)) < (self.query_start_loc[1:] - num_rejected)[self.row_request]
