# SPDX-License-Identifier: Apache-2.0
"""One small window through each way of a mode at start-up, on this device and with these layers, before any request.

Pages are scratch of the model's own layout, filled by vLLM's own writer, or for a logged step, which serves writers of
any kind, with random bytes. What the step leaves in them is compared with what is there when the kept rows alone are
written, or under ``direct`` all rows, and where NWOR's attention serves it that with plain PyTorch.
"""

import functools
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from nwor.attention.configs import Compiled, batches_of_each_kernel, plan
from nwor.layout import CacheLayout
from nwor.manager import DraftCommitManager
from nwor.vllm.context import LayerContext
from nwor.ways import Way

# Relative error over all outputs: ten times that of sums in another order, a tenth of that of a row unseen.
_TOLERANCE = {torch.float32: 1e-4}
_ROUNDED = 2e-2
_LARGEST_BATCH = 64  # larger ones are compiled for alone: they would take scratch that a GPU has not left
_SCRATCH_SLOTS = 8192  # two blocks a request: beside recurrent layers blocks are large, and batches smaller
_QUANTISED = 0.3  # of a row in fp8 beside what was to be written


def failure(manager: DraftCommitManager, layers: Sequence[Any]) -> str:
    """Why a small window does not come out right here, or an empty string.

    Args:
        manager: of the mode that is to serve; its scratch, if any, is used, and no page of its cache is touched.
        layers: vLLM's attention layers that it is to serve, hooks installed, none of them going through a manager.

    Raises:
        torch.cuda.OutOfMemoryError: there is no room for a window.
    """
    try:
        for way in manager.ways:
            checked = _one_of_each_shape(layers) if way.attends else layers[:2]
            run, compiled = _batches(manager, checked) if way.attends else ([min(len(manager.slots), 2)], [])
            for requests in run:
                window = _Window(manager, way, checked, requests)
                if wrong := window.wrong():
                    return f"the check at start-up failed, {wrong} of {requests} requests, {way.name}"
            for requests in compiled:
                window.launch_without_rows(requests)
    except torch.cuda.OutOfMemoryError:
        raise
    except Exception as error:  # noqa: BLE001  (a kernel fails in ways of its own, to compile among them)
        return f"the check at start-up failed: {type(error).__name__}: {error}"
    finally:
        for layer in layers:
            layer.nwor = None
    return ""


def _one_of_each_shape(layers: Sequence[Any]) -> list[Any]:
    """The first layer of each kind of attention, and one more, since the operators move several layers at once."""
    found: dict[tuple, Any] = {}
    for layer in layers:
        impl = layer.impl
        masks = impl.logits_soft_cap, impl.sliding_window, impl.alibi_slopes is not None, impl.sinks is not None
        shape = impl.num_heads, impl.head_size, impl.scale, *masks, layer.dtype
        found.setdefault(shape, layer)
    others = [layer for layer in layers if all(layer is not one for one in found.values())]
    return [*found.values(), *others[:1]]


def _batches(manager: DraftCommitManager, layers: Sequence[Any]) -> tuple[list[int], list[int]]:
    """Sizes of batches to run, and of larger ones to compile for alone: one for each kernel that serving may need.

    A kernel that is compiled while requests wait makes them all wait for seconds.
    """
    most = min(len(manager.slots), _LARGEST_BATCH, max(2, _SCRATCH_SLOTS // (2 * manager.layout.block_size)))
    if manager.attention is None:
        return [min(most, 2)], []
    first = {
        requests
        for layer in layers
        for requests in batches_of_each_kernel(len(manager.slots), functools.partial(_compiled, manager, layer))
    }
    return sorted(n for n in first if n <= most), sorted(n for n in first if n > most)


def _compiled(manager: DraftCommitManager, layer: Any, requests: int) -> Compiled:
    """What a batch of so many requests needs of the layer's attention."""
    workspace = manager.attention
    assert workspace is not None
    impl, heads, element = layer.impl, manager.layout.num_heads, layer.kv_cache.element_size()
    shape = requests, impl.num_heads, heads, impl.head_size, element, manager.max_query_len
    return plan(workspace.device, len(workspace.partials), *shape, layer.query_quant is not None).compiled


class _Window:
    """A batch of verify windows over scratch pages: every other request has one draft, the others `max_drafts`."""

    def __init__(self, manager: DraftCommitManager, way: Way, layers: Sequence[Any], requests: int) -> None:
        self.way = way
        layout, max_drafts = manager.layout, manager.max_drafts
        n, device = layout.block_size, layout.pool.device
        tails = [max_drafts + 1 if request % 2 == 0 else 2 for request in range(requests)]
        self.prefixes = [n + 5 if request % 2 == 0 else 3 for request in range(requests)]
        self.rejected = [request // 2 % 2 if request % 2 else tail // 2 for request, tail in enumerate(tails)]
        self.layers, self.tails, self.device = layers, tails, device
        some = replace(layout, layer_offsets=layout.layer_offsets[: len(layers)])
        blocks = -(-(n + 5 + max_drafts + 1) // n)
        # A block more than there are requests for: where nothing may be read, it is NaN in every dtype.
        self.pages = some.new_rows((requests * blocks + 1) * n).fill_(0xFF)
        self.layout = CacheLayout.from_kv_caches(self._caches(self.pages), layout.packing)
        order = torch.randperm(requests * blocks, generator=torch.Generator().manual_seed(0))
        self.block_table = order.view(requests, blocks).to(device, torch.int32)
        self.slots = [
            (order.view(requests, blocks).repeat_interleave(n, dim=1) * n + torch.arange(n).repeat(blocks))[request][
                : prefix + tail
            ].to(device)
            for request, (prefix, tail) in enumerate(zip(self.prefixes, tails, strict=True))
        ]
        self.manager = DraftCommitManager(
            self.layout, manager.mode, requests, max_drafts, sum(tails),
            attends=manager.attends, attention=manager.attention,
        )  # fmt: skip
        generator = torch.Generator().manual_seed(0)
        if way.attends:
            self.rows = [self._random_rows(layer, generator) for layer in layers]
        else:
            shape = len(layers), len(torch.cat(self.slots)), layout.num_heads, layout.row_bytes
            bytes_ = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
            self.bytes = bytes_.to(device)

    def _caches(self, pages: Tensor) -> list[Tensor]:
        """Each layer's scratch as vLLM sees its cache: [blocks, H, N, 2 * head_size]."""
        dtype = self.layers[0].kv_cache.dtype
        return [page.view(dtype) for page in pages]

    def _random_rows(self, layer: Any, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [T, Hq, D] of the tails, keys and values [P, H, D] of all positions, request by request."""
        heads, kv_heads, size = layer.impl.num_heads, self.layout.num_heads, layer.impl.head_size
        positions = sum(self.prefixes) + sum(self.tails)
        query = torch.randn(sum(self.tails), heads, size, generator=generator)
        key = torch.randn(positions, kv_heads, size, generator=generator) * layer._k_scale_float
        value = torch.randn(positions, kv_heads, size, generator=generator) * layer._v_scale_float
        return query.to(self.device, layer.dtype), key.to(self.device, layer.dtype), value.to(self.device, layer.dtype)

    def wrong(self) -> str:
        """What does not come out right, or an empty string."""
        tail_rows, slots = self._rows_of_tails(), torch.cat(self.slots)
        in_tail = torch.zeros(len(slots), dtype=torch.bool, device=self.device)
        in_tail[tail_rows] = True
        self._write(self.pages, ~in_tail)
        written, expected = self.pages.clone(), self.pages.clone()
        self._write(written, in_tail)
        rejected = in_tail.clone()
        rejected[tail_rows] = torch.cat(
            [torch.arange(t) >= t - r for t, r in zip(self.tails, self.rejected, strict=True)]
        ).to(self.device)
        self._write(expected, in_tail if self.way.leaves == "new rows" else in_tail & ~rejected)
        if self.way.leaves == "zeros":
            for cache in self._caches(expected):
                self._put(cache, slots[rejected], cache.new_zeros(()))
        outputs = self._step(slots, tail_rows)
        if not self._same_pages(expected):
            return f"the pages that {self.manager.mode} left are not those with the rows it is to write: a window"
        if not outputs:
            return ""
        for layer, rows, cache, output in zip(self.layers, self.rows, self._caches(written), outputs, strict=True):
            if wrong := self._attended_wrongly(layer, rows, cache, output):
                return wrong
        return ""

    def _rows_of_tails(self) -> Tensor:
        """int64 [T], which of all positions are the tails', in the order of the batch."""
        found, first = [], 0
        for prefix, tail in zip(self.prefixes, self.tails, strict=True):
            found.append(torch.arange(first + prefix, first + prefix + tail))
            first += prefix + tail
        return torch.cat(found).to(self.device)

    def _write(self, pages: Tensor, rows: Tensor) -> None:
        """The write of these positions as vLLM makes it, in all layers, or for a logged step of bytes."""
        slots = torch.cat(self.slots)[rows]
        if not self.way.attends:
            for number, cache in enumerate(self._caches(pages)):
                self._put(cache, slots, self.bytes[number][rows].view(cache.dtype))
            return
        for layer, (_, key, value), cache in zip(self.layers, self.rows, self._caches(pages), strict=True):
            layer.nwor = None
            layer.impl.do_kv_cache_update(layer, key[rows], value[rows], cache, slots)

    def _put(self, cache: Tensor, slots: Tensor, rows: Tensor) -> None:
        """rows: [P, H, elements of a slot and head]."""
        blocks, offsets, packing = slots // self.layout.block_size, slots % self.layout.block_size, self.layout.packing
        if packing is None:
            cache[blocks, :, offsets] = rows
        else:
            heads = torch.arange(cache.shape[1], device=self.device)[None, :, None]
            cache.flatten(2)[blocks[:, None, None], heads, packing[offsets].long()[:, None]] = rows

    def _step(self, slots: Tensor, tail_rows: Tensor) -> list[Tensor]:
        """The step as a runner takes it; returns each layer's attention, none where vLLM's own attends."""
        manager, tails = self.manager, torch.tensor(self.tails)
        starts = torch.nn.functional.pad(tails.cumsum(0), (1, 0)).to(self.device, torch.int32)
        slot_mapping = slots[tail_rows]
        if not manager.begin(starts, starts, slot_mapping, windows_alone=self.way.attends):
            raise RuntimeError("no window opened")
        outputs = []
        if not self.way.attends:
            in_tail = torch.zeros(len(slots), dtype=torch.bool, device=self.device)
            in_tail[tail_rows] = True
            self._write(self.pages, in_tail)
        else:
            outputs = self._forward(starts, slot_mapping, tail_rows)
        manager.commit(torch.tensor(self.rejected, dtype=torch.int32, device=self.device))
        return outputs

    def _forward(self, starts: Tensor, slot_mapping: Tensor, tail_rows: Tensor) -> list[Tensor]:
        """All layers through the hooks in vLLM's attention."""
        lengths = [prefix + tail for prefix, tail in zip(self.prefixes, self.tails, strict=True)]
        seq_lens = torch.tensor(lengths, dtype=torch.int32, device=self.device)
        rows = [(query, key[tail_rows], value[tail_rows]) for query, key, value in self.rows]
        return self._through_hooks(rows, starts, seq_lens, self.block_table, slot_mapping)

    def launch_without_rows(self, requests: int) -> None:
        """Each layer's attention over so many requests of no rows: what it needs is compiled, and nothing is done."""
        zeros = torch.zeros(requests + 1, dtype=torch.int32, device=self.device)
        one_row = [(query[:1], key[:1], value[:1]) for query, key, value in self.rows]
        slot_mapping = torch.full((1,), -1, dtype=torch.int64, device=self.device)
        self.manager.hold_nothing()
        self._through_hooks(one_row, zeros, zeros[:-1], zeros[:-1, None], slot_mapping)

    def _through_hooks(
        self,
        rows: Sequence[tuple[Tensor, Tensor, Tensor]],
        query_start_loc: Tensor,
        seq_lens: Tensor,
        block_table: Tensor,
        slot_mapping: Tensor,
    ) -> list[Tensor]:
        """Write and attention of each layer, as vLLM calls them; rows: each layer's query, key and value."""
        from vllm.forward_context import override_forward_context

        metadata = SimpleNamespace(
            num_actual_tokens=len(slot_mapping),
            max_query_len=max(self.tails),
            query_start_loc=query_start_loc,
            seq_lens=seq_lens,
            block_table=block_table,
            slot_mapping=slot_mapping,
        )
        outputs = []
        of_layers: Any = SimpleNamespace(attn_metadata={layer.layer_name: metadata for layer in self.layers})
        with override_forward_context(of_layers):
            for index, (layer, (query, key, value)) in enumerate(zip(self.layers, rows, strict=True)):
                output = torch.full_like(query, float("nan"))
                if layer.query_quant is not None:
                    query = _in_fp8(query, layer)
                cache = self._caches(self.pages)[index]
                layer.nwor = LayerContext(self.manager, index)
                layer.impl.do_kv_cache_update(layer, key, value, cache, slot_mapping)
                layer.impl.forward(layer, query, key, value, cache, metadata, output)
                layer.nwor = None
                outputs.append(output)
        return outputs

    def _same_pages(self, expected: Tensor) -> bool:
        if torch.equal(self.pages, expected):
            return True
        if self.layout.dtype != torch.uint8:
            return False
        # vLLM's writers of fp8 do not round alike in the last place.
        kind = _fp8_of(self.layers[0])
        found, wanted = (pages.view(kind).float() for pages in (self.pages, expected))
        return torch.allclose(found, wanted, rtol=0.15, atol=2**-8, equal_nan=True)

    def _attended_wrongly(self, layer: Any, rows: tuple[Tensor, Tensor, Tensor], cache: Tensor, output: Tensor) -> str:
        query, key, value = rows
        if layer.query_quant is not None:
            query = (_in_fp8(query, layer).float() * layer._q_scale.float()).to(query.dtype)
        tolerance = _TOLERANCE.get(query.dtype, _ROUNDED)
        window = layer.impl.sliding_window
        window = window[0] + 1 if isinstance(window, tuple) else max(window, 0)
        row, position = 0, 0
        for request, (prefix, tail) in enumerate(zip(self.prefixes, self.tails, strict=True)):
            stored = self._read(layer, cache, self.slots[request])
            wanted = torch.cat([key, value], dim=-1)[position : position + prefix + tail].double()
            bound = _QUANTISED if self.layout.dtype == torch.uint8 else 0.0
            if not _off(stored, wanted) <= bound:
                return "rows are not read from where vLLM's writer puts them: a window"
            if request < 2 or request == len(self.tails) - 1:
                reference = attend(
                    query[row : row + tail].double(), stored, prefix, layer.impl.scale,
                    layer.impl.logits_soft_cap or 0.0, window,
                    alibi_slopes=layer.impl.alibi_slopes, sinks=layer.impl.sinks,
                )  # fmt: skip
                off = _off(output[row : row + tail].double(), reference)
                if not off <= tolerance:
                    return (
                        f"the attention differs from a plain one by {off:.2g} of it ({tolerance:.0e} allowed): a window"
                    )
            row, position = row + tail, position + prefix + tail
        return ""

    def _read(self, layer: Any, cache: Tensor, slots: Tensor) -> Tensor:
        """float64 [P, H, 2 * D], keys and values as the cache holds them."""
        n, packing = self.layout.block_size, self.layout.packing
        if packing is None:
            found = cache[slots // n, :, slots % n]
        else:
            chunks = cache[slots // n].flatten(2)
            found = chunks.gather(2, packing[slots % n].long()[:, None].expand(-1, cache.shape[1], -1))
        if cache.dtype != torch.uint8:
            return found.double()
        found = found.contiguous().view(_fp8_of(layer))
        scales = torch.tensor([layer._k_scale_float, layer._v_scale_float], device=self.device, dtype=torch.float64)
        return found.double() * scales.repeat_interleave(found.shape[-1] // 2)


def _off(found: Tensor, wanted: Tensor) -> float:
    """Relative error over all elements; NaN where something is."""
    return float((found - wanted).norm() / wanted.norm())


def _fp8_of(layer: Any) -> torch.dtype:
    return torch.float8_e5m2 if layer.impl.kv_cache_dtype == "fp8_e5m2" else torch.float8_e4m3fn


def _in_fp8(query: Tensor, layer: Any) -> Tensor:
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
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Causal attention of one request in plain PyTorch.

    Args:
        query: float64 [tail, Hq, D]; rows: [prefix + tail, H, 2 * D], keys then values.
        prefix: positions before the query's first. scale, softcap: of the scores; softcap 0 is none.
        sliding_window: 0 or the window in positions. k_scale, v_scale: what the numbers in `rows` are multiples of.
        alibi_slopes: [Hq] or None. sinks: [Hq] or None, a score more in each head's softmax.

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
    if alibi_slopes is not None:
        scores = scores + alibi_slopes.double()[:, None, None] * (position - last)
    scores = scores.masked_fill(~seen, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.double()[:, None, None].expand(-1, len(query), 1)], dim=-1)
    weights = scores.softmax(dim=-1)[..., : len(rows)]
    return torch.einsum("htp,phd->thd", weights, values * v_scale)
