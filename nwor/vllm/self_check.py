# SPDX-License-Identifier: Apache-2.0
"""One small window through a mode at start-up, on this device and with these layers, before any request meets it.

It runs over scratch pages of the model's own layout. Under ``cow``, which serves writers of any kind, all their bytes
change between `begin` and `commit`, and those of the rejected rows alone must come back. The modes that attend go
through the hooks: pages must be as vLLM's writer makes them of the kept rows (``direct``: of all), and the attention
as plain PyTorch has it. Keys and values are multiples of 1/4 up to 2, exact in every cache dtype.
"""

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from nwor.layout import CacheLayout
from nwor.manager import DraftCommitManager
from nwor.settings import ATTENDING
from nwor.vllm.context import LayerContext

# Relative error over all outputs: ten times that of sums in another order, a tenth of that of a row unseen.
_TOLERANCE_FLOAT32, _TOLERANCE = 1e-4, 2e-2
_BATCHES = (1, 2, 4, 8, 16, 32, 64)  # larger ones are run as it is, and would take scratch that a GPU has not left
_ABOVE = 1.02  # times a number of fp8: both of vLLM's writers, rounding to nearest or towards zero, make that number


def failure(manager: DraftCommitManager, layers: Sequence[Any]) -> str:
    """Why a small window does not come out right here, or an empty string.

    Args:
        manager: of the mode that is to serve; its scratch, if any, is used, and no page of its cache is touched.
        layers: vLLM's attention layers that it is to serve, hooks installed, none of them going through a manager.

    Raises:
        torch.cuda.OutOfMemoryError: there is no room for a window.
    """
    attends, most = manager.mode in ATTENDING, len(manager.slots)
    checked = _one_of_each_shape(layers) if attends else layers[:2]
    # On a GPU a kernel is compiled for several sizes of batches, which start-up needs anyway.
    sizes = {min(most, size) for size in _BATCHES} if attends and manager.slots.is_cuda else {min(most, 2)}
    try:
        for requests in sorted(sizes):
            window = _Window(manager, checked, requests)
            if wrong := window.wrong_attention() if attends else window.wrong_restore():
                return f"the check at start-up failed, {wrong}: a window of {requests} requests"
    except torch.cuda.OutOfMemoryError:
        raise
    except Exception as error:  # noqa: BLE001  (a kernel fails in ways of its own, to compile among them)
        return f"the check at start-up failed: {type(error).__name__}: {error}"
    finally:
        for layer in checked:
            layer.nwor = None
    return ""


def _one_of_each_shape(layers: Sequence[Any]) -> list[Any]:
    """The first two layers, since the operators move several at once, and one of each further kind of attention."""
    shapes = [
        (impl.num_heads, impl.head_size, impl.scale, impl.logits_soft_cap, impl.sliding_window, layer.dtype)
        for layer, impl in ((layer, layer.impl) for layer in layers)
    ]
    return [layer for index, layer in enumerate(layers) if index < 2 or shapes[index] not in shapes[:index]]


class _Window:
    """A batch of verify windows over scratch pages: every other request has one draft, the others `max_drafts`.

    lengths, tails, rejected: int [R], a request's positions, the rows of its query, and the drafts that it loses.
    slots: int64 [R, P], of each position. in_prefix, in_query, kept: bool [R, P], the positions that are in the pages
    before, those that this step computes, and those of them that stay.
    """

    def __init__(self, manager: DraftCommitManager, layers: Sequence[Any], requests: int) -> None:
        layout, max_drafts, device = manager.layout, manager.max_drafts, manager.layout.pool.device
        n, number = layout.block_size, torch.arange(requests, device=device)
        self.layers, self.random = layers, torch.Generator().manual_seed(0)
        self.tails = torch.where(number % 2 == 0, max_drafts + 1, 2)
        self.lengths = torch.where(number % 2 == 0, n + 5, 3) + self.tails
        self.rejected = torch.where(number % 2 == 0, self.tails // 2, number // 2 % 2).int()
        self.query_start_loc = torch.nn.functional.pad(self.tails.cumsum(0), (1, 0)).int()

        position = torch.arange(n + 5 + max_drafts + 1, device=device)
        first, last, end = ((self.lengths - fewer)[:, None] for fewer in (self.tails, self.rejected, 0))
        self.in_prefix, self.in_query = position < first, (position >= first) & (position < end)
        self.kept = self.in_query & (position < last)
        blocks = -(-len(position) // n)
        self.block_table = torch.randperm(requests * blocks, generator=self.random).view(requests, blocks).to(device)
        self.slots = self.block_table[:, position // n] * n + position % n
        self.slot_mapping = self.slots[self.in_query]

        some = replace(layout, layer_offsets=layout.layer_offsets[: len(layers)])
        # A block more than there are requests for: where nothing may be read, it is NaN in every dtype.
        self.pages = some.new_rows((requests * blocks + 1) * n).fill_(0xFF)
        self.layout = CacheLayout.from_kv_caches(self._caches(self.pages), layout.packing)
        self.manager = DraftCommitManager(
            self.layout, manager.mode, requests, max_drafts, len(self.slot_mapping), attention=manager.attention
        )

    def _caches(self, pages: Tensor) -> list[Tensor]:
        """Each layer's scratch as vLLM sees its cache: [blocks, H, N, 2 * head_size]."""
        return [page.view(self.layers[0].kv_cache.dtype) for page in pages]

    def _begin(self) -> None:
        if not self.manager.begin(self.query_start_loc, self.query_start_loc, self.slot_mapping):
            raise RuntimeError("no window opened")

    def _wrong_pages(self, expected: Tensor) -> str:
        if torch.equal(self.pages, expected):
            return ""
        return f"the pages that {self.manager.mode} left are not those with the rows it is to write"

    def wrong_restore(self) -> str:
        """What does not come out right where old bytes are logged and restored, or an empty string."""
        self.pages.copy_(torch.randint(0, 256, self.pages.shape, dtype=torch.uint8, generator=self.random))
        old = self.pages.clone()
        self._begin()
        self.pages.bitwise_not_()
        expected = torch.where(self._bytes_of(self.slots[self.in_query & ~self.kept]), old, self.pages)
        self.manager.commit(self.rejected)
        return self._wrong_pages(expected)

    def _bytes_of(self, slots: Tensor) -> Tensor:
        """bool [B, 1, N, C], the bytes of these slots in each layer and head."""
        blocks, n, size = self.pages.shape[1], self.layout.block_size, self.layout.dtype.itemsize
        places = self.layout.packing
        if places is None:
            places = torch.arange(n * self.layout.row_bytes // size, device=slots.device).view(n, -1)
        found = torch.zeros(blocks, places.numel(), dtype=torch.bool, device=slots.device)
        found[(slots // n)[:, None], places[slots % n].long()] = True
        return found.view(blocks, 1, n, -1).repeat_interleave(size, dim=3)

    def wrong_attention(self) -> str:
        """What does not come out right where the mode attends, or an empty string."""
        rows = [self._random_rows(layer) for layer in self.layers]
        self._write(self.pages, rows, self.in_prefix)
        expected = self.pages.clone()
        self._write(expected, rows, self.in_query if self.manager.mode == "direct" else self.kept)
        self._begin()
        outputs = self._forward(rows)
        self.manager.commit(self.rejected)
        if wrong := self._wrong_pages(expected):
            return wrong
        for layer, (query, stored), output in zip(self.layers, rows, outputs, strict=True):
            tolerance = _TOLERANCE_FLOAT32 if layer.dtype == torch.float32 else _TOLERANCE
            for request in {0, min(1, len(stored) - 1), len(stored) - 1}:
                tail = slice(*self.query_start_loc[request : request + 2].tolist())
                plain = self._plain_attention(layer, query[tail], stored[request, : self.lengths[request]])
                off = float((output[tail].double() - plain).norm() / plain.norm())
                if not off <= tolerance:  # NaN too
                    return f"the attention differs from a plain one by {off:.2g} of it ({tolerance:.0e} allowed)"
        return ""

    def _random_rows(self, layer: Any) -> tuple[Tensor, Tensor]:
        """Queries [T, Hq, D], and of all positions what the cache is to hold [R, P, H, 2 * D], scales apart."""
        heads, kv_heads, size = layer.impl.num_heads, self.layout.num_heads, layer.impl.head_size
        query = torch.randn(len(self.slot_mapping), heads, size, generator=self.random).to(self.pages.device)
        query = query.to(layer.dtype) if layer.query_quant is None else _in_fp8(query, layer).float() * layer._q_scale
        stored = torch.randint(-8, 9, (*self.slots.shape, kv_heads, 2 * size), generator=self.random)
        return query, stored.to(self.pages.device, layer.dtype) / 4

    def _scales(self, layer: Any) -> tuple[float, float]:
        return (layer._k_scale_float, layer._v_scale_float) if self.layout.dtype == torch.uint8 else (1.0, 1.0)

    def _given(self, layer: Any, stored: Tensor) -> list[Tensor]:
        """Keys and values [T, H, D] of which vLLM's writer makes these rows."""
        above = _ABOVE if self.layout.dtype == torch.uint8 else 1.0
        return [
            part * (above * scale) for part, scale in zip(stored.chunk(2, dim=-1), self._scales(layer), strict=True)
        ]

    def _write(self, pages: Tensor, rows: Sequence[tuple[Tensor, Tensor]], chosen: Tensor) -> None:
        """The write of these positions as vLLM makes it, in all layers."""
        for layer, (_, stored), cache in zip(self.layers, rows, self._caches(pages), strict=True):
            layer.impl.do_kv_cache_update(layer, *self._given(layer, stored[chosen]), cache, self.slots[chosen])

    def _forward(self, rows: Sequence[tuple[Tensor, Tensor]]) -> list[Tensor]:
        """All layers through the hooks in vLLM's attention; returns the output of each, [T, Hq, D]."""
        from vllm.forward_context import override_forward_context

        metadata = SimpleNamespace(
            num_actual_tokens=len(self.slot_mapping),
            max_query_len=int(self.tails.max()),
            query_start_loc=self.query_start_loc,
            seq_lens=self.lengths.int(),
            block_table=self.block_table.int(),
            slot_mapping=self.slot_mapping,
        )
        outputs, caches = [], self._caches(self.pages)
        of_layers: Any = SimpleNamespace(attn_metadata={layer.layer_name: metadata for layer in self.layers})
        with override_forward_context(of_layers):
            for index, (layer, (query, stored)) in enumerate(zip(self.layers, rows, strict=True)):
                key, value = self._given(layer, stored[self.in_query])
                outputs.append(torch.full_like(query, float("nan"), dtype=layer.dtype))
                query = query if layer.query_quant is None else _in_fp8(query, layer)
                layer.nwor = LayerContext(self.manager, index)
                layer.impl.do_kv_cache_update(layer, key, value, caches[index], self.slot_mapping)
                layer.impl.forward(layer, query, key, value, caches[index], metadata, outputs[-1])
                layer.nwor = None
        return outputs

    def _plain_attention(self, layer: Any, query: Tensor, rows: Tensor) -> Tensor:
        window, softcap = layer.impl.sliding_window, layer.impl.logits_soft_cap or 0.0
        window = window[0] + 1 if isinstance(window, tuple) else max(window, 0)
        prefix = len(rows) - len(query)
        return attend(query.double(), rows, prefix, layer.impl.scale, softcap, window, *self._scales(layer))


def _in_fp8(query: Tensor, layer: Any) -> Tensor:
    """Queries as vLLM's layer hands them over where its backend takes them quantised."""
    return (query.float() / layer._q_scale.float()).clamp(-448, 448).to(torch.float8_e4m3fn)


def attend(
    query: Tensor,
    rows: Tensor,
    prefix: int,
    scale: float,
    softcap: float = 0.0,
    sliding_window: int = 0,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> Tensor:
    """Causal attention of one request in plain PyTorch.

    Args:
        query: float64 [tail, Hq, D]; rows: [prefix + tail, H, 2 * D], keys then values.
        prefix: positions before the query's first. scale, softcap: of the scores; softcap 0 is none.
        sliding_window: 0 or the window in positions. k_scale, v_scale: what the numbers in `rows` are multiples of.

    Returns:
        float64 [tail, Hq, D].
    """
    group = query.shape[1] // rows.shape[1]
    keys, values = rows.double().repeat_interleave(group, dim=1).chunk(2, dim=-1)
    scores = torch.einsum("thd,phd->htp", query, keys * k_scale) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    last = prefix + torch.arange(query.shape[0], device=query.device)[:, None]
    position = torch.arange(rows.shape[0], device=query.device)[None]
    seen = position <= last
    if sliding_window > 0:
        seen &= position > last - sliding_window
    weights = scores.masked_fill(~seen, float("-inf")).softmax(dim=-1)
    return torch.einsum("htp,phd->thd", weights, values * v_scale)
