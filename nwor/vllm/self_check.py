# SPDX-License-Identifier: Apache-2.0
"""One small window through each way of a mode at start-up, on this device and with these layers, before any request.

Pages are scratch of the model's own layout, filled by vLLM's own writer, or for a logged step, which serves writers of
any kind, with random bytes. What the step leaves in them is compared with what is there when the kept rows alone are
written, or under ``direct`` all rows, and where NWOR's attention serves it that with plain PyTorch. What larger batches
need of that attention is compiled too: else it would be while requests wait, for seconds.
"""

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from nwor.attention.configs import Compiled, batches_of_each_kernel, plan
from nwor.layout import CacheLayout
from nwor.manager import DraftCommitManager
from nwor.vllm.context import LayerContext
from nwor.ways import Way

# Relative error over all outputs: ten times that of sums in another order, a tenth of that of a row unseen.
_TOLERANCE = {torch.float32: 1e-4}
_ROUNDED = 2e-2
_QUANTISED = 0.3  # of a row in fp8 beside what was to be written
_REQUESTS = 4


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
            window = _Window(manager, way, checked)
            if wrong := window.wrong():
                return f"the check at start-up failed, {wrong}, {way.name}"
            if way.attends and manager.attention is not None:
                for requests in _batches(manager, checked):
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
    first: dict[tuple, Any] = {}
    for layer in layers:
        impl = layer.impl
        masks = impl.logits_soft_cap, impl.sliding_window, impl.alibi_slopes is not None, impl.sinks is not None
        first.setdefault((impl.num_heads, impl.head_size, impl.scale, *masks, layer.dtype), layer)
    others = [layer for layer in layers if all(layer is not one for one in first.values())]
    return [*first.values(), *others[:1]]


def _batches(manager: DraftCommitManager, layers: Sequence[Any]) -> list[int]:
    """A batch's number of requests for each kernel that serving may need of these layers."""
    workspace, layout = manager.attention, manager.layout
    assert workspace is not None

    def compiled(layer: Any, requests: int) -> Compiled:
        heads, size, element = layer.impl.num_heads, layer.impl.head_size, layer.kv_cache.element_size()
        shape = requests, heads, layout.num_heads, size, element, manager.max_query_len
        return plan(workspace.device, len(workspace.partials), *shape, layer.query_quant is not None).compiled

    most = len(manager.slots)
    return sorted({
        requests for layer in layers
        for requests in batches_of_each_kernel(most, lambda n, layer=layer: compiled(layer, n))  # type: ignore[misc]
    })  # fmt: skip


class _Window:
    """A batch of verify windows over scratch pages, every other one of one draft, the others of `max_drafts`.

    Of all positions of all requests, one behind the other, `slots` are their places; `drafted` are those of a window
    (row 0 too), and `rejected` those that are not kept.
    """

    def __init__(self, manager: DraftCommitManager, way: Way, layers: Sequence[Any]) -> None:
        layout, most = manager.layout, manager.max_drafts + 1
        n, device = layout.block_size, layout.pool.device
        self.way, self.layers, self.device = way, layers, device
        numbers = range(min(len(manager.slots), _REQUESTS))
        self.tails = [2 if number % 2 else most for number in numbers]
        self.prefixes = [3 if number % 2 else n + 5 for number in numbers]
        self.num_rejected = [number // 2 if number % 2 else most // 2 for number in numbers]
        self.lengths = [prefix + tail for prefix, tail in zip(self.prefixes, self.tails, strict=True)]
        self.drafted = self._last(self.tails)
        self.rejected = self._last(self.num_rejected)
        blocks = -(-(n + 5 + most) // n)
        order = torch.randperm(len(numbers) * blocks, generator=torch.Generator().manual_seed(0)).view(-1, blocks)
        self.block_table = order.to(device, torch.int32)
        slots = (order[..., None] * n + torch.arange(n)).flatten(1)
        self.slots = torch.cat([of[:length] for of, length in zip(slots, self.lengths, strict=True)]).to(device)
        self.generator = torch.Generator().manual_seed(0)
        # A block more than there are requests for: where nothing may be read, it is NaN in every dtype. What is to be
        # logged differs from slot to slot and from layer to layer.
        some = replace(layout, layer_offsets=layout.layer_offsets[: len(layers)])
        self.pages = some.new_rows((order.numel() + 1) * n).fill_(0xFF)
        if not way.attends:
            self.pages.copy_(self._random_bytes(*self.pages.shape))
        self.layout = CacheLayout.from_kv_caches(self._caches(self.pages), layout.packing)
        self.manager = DraftCommitManager(
            self.layout, manager.mode, len(numbers), manager.max_drafts, sum(self.tails),
            attends=manager.attends, attention=manager.attention,
        )  # fmt: skip
        if way.attends:
            self.rows = [self._random_rows(layer) for layer in layers]
        else:
            shape = len(layers), len(self.slots), layout.num_heads, layout.row_bytes
            self.bytes = self._random_bytes(*shape).to(device)

    def _random_bytes(self, *shape: int) -> Tensor:
        return torch.randint(0, 256, shape, dtype=torch.uint8, generator=self.generator)

    def _last(self, counts: Sequence[int]) -> Tensor:
        """bool [P]: of each request's positions so many of the last."""
        of_requests = zip(self.lengths, counts, strict=True)
        return torch.cat([torch.arange(length) >= length - count for length, count in of_requests]).to(self.device)

    def _caches(self, pages: Tensor) -> list[Tensor]:
        """Each layer's scratch as vLLM sees its cache: [blocks, H, N, 2 * head_size]."""
        dtype = self.layers[0].kv_cache.dtype
        return [page.view(dtype) for page in pages]

    def _random_rows(self, layer: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [T, Hq, D] of the windows, keys and values [P, H, D] of all positions."""
        size, scales = layer.impl.head_size, (1.0, layer._k_scale_float, layer._v_scale_float)
        heads = layer.impl.num_heads, self.layout.num_heads, self.layout.num_heads
        counts = sum(self.tails), len(self.slots), len(self.slots)
        query, key, value = (
            (torch.randn(count, each, size, generator=self.generator) * scale).to(self.device, layer.dtype)
            for count, each, scale in zip(counts, heads, scales, strict=True)
        )
        return query, key, value

    def wrong(self) -> str:
        """What does not come out right, or an empty string."""
        self._write(self.pages, ~self.drafted)
        written, expected = self.pages.clone(), self.pages.clone()
        self._write(written, self.drafted)
        all_stay = self.way.leaves == "new rows"
        self._write(expected, self.drafted if all_stay else self.drafted & ~self.rejected)
        if self.way.leaves == "zeros":
            for cache in self._caches(expected):
                view, places = self._at(cache, self.slots[self.rejected])
                view[places] = 0
        outputs = self._step()
        if not self._same_pages(expected):
            return f"the pages that {self.manager.mode} left are not those with the rows it is to write"
        caches = self._caches(written)
        for layer, rows, cache, output in zip(self.layers, self.rows if outputs else (), caches, outputs, strict=False):
            if wrong := self._attended_wrongly(layer, rows, cache, output):
                return wrong
        return ""

    def _write(self, pages: Tensor, rows: Tensor) -> None:
        """The write of these positions as vLLM makes it, in all layers, or for a logged step of bytes."""
        slots = self.slots[rows]
        for number, (layer, cache) in enumerate(zip(self.layers, self._caches(pages), strict=True)):
            if self.way.attends:
                _, key, value = self.rows[number]
                layer.nwor = None
                layer.impl.do_kv_cache_update(layer, key[rows], value[rows], cache, slots)
            else:
                view, places = self._at(cache, slots)
                view[places] = self.bytes[number][rows].view(cache.dtype)

    def _at(self, cache: Tensor, slots: Tensor) -> tuple[Tensor, tuple[Any, ...]]:
        """A view of the cache, and where in it [P, H, elements of a slot and head] lie."""
        blocks, offsets, packing = slots // self.layout.block_size, slots % self.layout.block_size, self.layout.packing
        if packing is None:
            return cache, (blocks, slice(None), offsets)
        heads = torch.arange(cache.shape[1], device=self.device)[None, :, None]
        return cache.flatten(2), (blocks[:, None, None], heads, packing[offsets].long()[:, None])

    def _step(self) -> list[Tensor]:
        """The step as a runner takes it; returns each layer's attention, none where vLLM's own attends."""
        manager, outputs = self.manager, list[Tensor]()
        starts = pad(torch.tensor(self.tails).cumsum(0), (1, 0)).to(self.device, torch.int32)
        slot_mapping = self.slots[self.drafted]
        if not manager.begin(starts, starts, slot_mapping, windows_alone=self.way.attends):
            raise RuntimeError("no window opened")
        if self.way.attends:
            rows = [(query, key[self.drafted], value[self.drafted]) for query, key, value in self.rows]
            seq_lens = torch.tensor(self.lengths, dtype=torch.int32, device=self.device)
            outputs = self._through_hooks(rows, starts, seq_lens, self.block_table, slot_mapping)
        else:
            self._write(self.pages, self.drafted)
        manager.commit(torch.tensor(self.num_rejected, dtype=torch.int32, device=self.device))
        return outputs

    def launch_without_rows(self, requests: int) -> None:
        """Each layer's attention over so many requests of no rows: what it needs is compiled, and nothing is done."""
        zeros = torch.zeros(requests + 1, dtype=torch.int32, device=self.device)
        one_row = [(query[:1], key[:1], value[:1]) for query, key, value in self.rows]
        nowhere = torch.full((1,), -1, dtype=torch.int64, device=self.device)
        self.manager.hold_nothing()
        self._through_hooks(one_row, zeros, zeros[:-1], zeros[:-1, None], nowhere)

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
        impl, window = layer.impl, layer.impl.sliding_window
        window = window[0] + 1 if isinstance(window, tuple) else max(window, 0)
        stored = self._read(layer, cache)
        if not _off(stored, torch.cat([key, value], dim=-1).double()) <= (
            _QUANTISED if self.layout.dtype == torch.uint8 else 0.0
        ):
            return "rows are not read from where vLLM's writer puts them"
        reference = torch.cat([
            attend(tail.double(), all_rows, prefix, impl.scale, impl.logits_soft_cap or 0.0, window,
                   alibi_slopes=impl.alibi_slopes, sinks=impl.sinks)
            for tail, all_rows, prefix in zip(
                query.split(self.tails), stored.split(self.lengths), self.prefixes, strict=True)
        ])  # fmt: skip
        off, allowed = _off(output.double(), reference), _TOLERANCE.get(query.dtype, _ROUNDED)
        return (
            ""
            if off <= allowed
            else f"the attention differs from a plain one by {off:.2g} of it ({allowed:.0e} allowed)"
        )

    def _read(self, layer: Any, cache: Tensor) -> Tensor:
        """float64 [P, H, 2 * D], keys and values of all positions as the cache holds them."""
        view, places = self._at(cache, self.slots)
        found = view[places]
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
