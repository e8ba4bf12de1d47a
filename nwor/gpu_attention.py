# SPDX-License-Identifier: Apache-2.0
"""Attention of verify windows on a GPU: prefix from the pages, the step's own rows from the projection, one launch.

A window is a request whose query has 1 to `max_query_len` rows. Its rows attend to the positions
``[0, seq_len - query_len)`` in the pages and, causally, to the query's own keys and values, which need not be in any
page; each of these rows is stored once on the way, to staging or to its page.

The kernel packs all query heads of a KV head and all rows of the window into one tile, so that a page is read once,
and cuts the prefix into splits where requests and heads alone do not fill the GPU. The softmax over splits is that of
Flash-Decoding (Dao et al., 2023): each split leaves its sum of values, its sum of weights and its largest score. When
all have arrived they are added up: by all of them, each some rows, where there is a multiprocessor for each program
(a cooperative launch), else by the last.

Importing this module imports Triton.
"""

from __future__ import annotations

import functools
import json
import math
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from nwor import paths

HEAD_SIZES = (64, 96, 128, 256)
FP8 = {"fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 2}
LARGEST_TILE = 128  # rows of query heads and window in one tile; more make more tiles, each of which reads the pages
COMBINED = 1 << 11  # partial sums that are added at a time: more take more instructions, all of them read from memory
PARTIAL_ROWS = 1 << 16  # rows of the partial sums of all splits: bounds the number of splits, 32 MiB at head size 128


# -- the kernel ----------------------------------------------------------------------------------------------------


@triton.jit
def _stored(rows, scale, FP8: tl.constexpr):
    """Rows in the bytes of vLLM's `reshape_and_cache_flash`: divide, round to nearest even, saturate, NaN to 0x7f."""
    if FP8:
        scaled, divisor = rows.to(tl.float32), tl.load(scale)
        if divisor != 1:  # most are 1, and the instructions of exact divisions take long to fetch
            scaled = tl.div_rn(scaled, divisor)
        largest: tl.constexpr = 448.0 if FP8 == 1 else 57344.0
        clamped = tl.minimum(tl.maximum(scaled, -largest), largest)
        kind: tl.constexpr = tl.float8e4nv if FP8 == 1 else tl.float8e5
        found = tl.where(tl.abs(scaled) >= 0, clamped.to(kind).to(tl.uint8, bitcast=True), 0x7F)
        return found.to(kind, bitcast=True)
    else:
        return rows


@triton.jit
def _read(elements, dtype: tl.constexpr, FP8: tl.constexpr):
    """Elements of pages in the dtype of the products; every fp8 number is exact in both 16-bit dtypes."""
    if FP8 and dtype != elements.dtype:
        return elements.to(dtype)
    else:
        return elements


@triton.jit
def _scores(query, keys, position, row, slopes, scale, softcap, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr):
    """Scores in units of log 2. position: of each key, counted from the end of the prefix, as the rows are."""
    scores = tl.dot(query, tl.trans(keys)) * scale
    if SOFTCAP:
        scores = softcap * (1 - 2 / (tl.exp2(scores * (2 * 1.4426950408889634 / softcap)) + 1))
    if ALIBI:
        scores += slopes[:, None] * position[None, :]
    if SOFTCAP or ALIBI:
        scores *= 1.4426950408889634
    return scores


@triton.jit
def _add(scores, values, largest, total, summed):
    """One step of the running softmax; a row that has seen no key yet has -inf as its largest score."""
    new = tl.maximum(largest, tl.max(scores, 1))
    base = tl.where(new == float("-inf"), 0.0, new)
    weights = tl.exp2(scores - base[:, None])
    fade = tl.exp2(largest - base)
    summed = tl.dot(weights.to(values.dtype), values, summed * fade[:, None])
    return new, total * fade + tl.sum(weights, 1), summed


@triton.jit
def _combine(
    output,
    partials,
    softmax,
    v_scale,
    output_row,
    output_head,
    part,
    active,
    kv_head,
    packed,
    query_len,
    GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    MAX_QUERY: tl.constexpr,
    MOST: tl.constexpr,
    FP8: tl.constexpr,
):
    """Add up what the splits of a window left of some of its packed rows, all splits at once."""
    row, head = packed // GROUP, kv_head * GROUP + packed % GROUP
    dim, split = tl.arange(0, WIDTH), tl.arange(0, MOST)
    mine = (split < active)[:, None] & (row < query_len)[None, :]
    at = (part + split)[:, None] * (MAX_QUERY * GROUP) + packed[None, :]
    largest = tl.load(softmax + at * 2, mask=mine, other=float("-inf"))
    total = tl.load(softmax + at * 2 + 1, mask=mine, other=0.0)
    found = tl.load(
        partials + at[:, :, None] * HEAD_SIZE + dim[None, None, :],
        mask=mine[:, :, None] & (dim < HEAD_SIZE)[None, None, :],
        other=0.0,
    )
    base = tl.max(largest, 0)
    fade = tl.exp2(largest - tl.where(base == float("-inf"), 0.0, base)[None, :])
    fade *= (1 / tl.sum(total * fade, 0))[None, :]
    result = tl.sum(found * fade[:, :, None], 0)
    if FP8:
        result *= tl.load(v_scale)
    tl.store(
        output + row[:, None].to(tl.int64) * output_row + head[:, None] * output_head + dim[None, :],
        result.to(output.dtype.element_ty),
        mask=(row < query_len)[:, None] & (dim < HEAD_SIZE)[None, :],
    )


@triton.jit(do_not_specialize=["least"])
def _verify_attention(
    query,
    key,
    value,
    kv_cache,
    output,
    query_start_loc,
    seq_lens,
    block_table,
    page_slots,
    staging,
    staging_rows,
    alibi_slopes,
    sinks,
    q_scale,
    k_scale,
    v_scale,
    partials,
    softmax,
    arrivals,
    scale,
    softcap,
    query_row,
    query_head,
    key_row,
    key_head,
    value_row,
    value_head,
    output_row,
    output_head,
    page_block,
    page_head,
    page_slot,
    staging_block,
    staging_head,
    staging_slot,
    table_row,
    least,
    GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    MAX_QUERY: tl.constexpr,
    ROWS: tl.constexpr,
    ROW_TILES: tl.constexpr,
    TAIL: tl.constexpr,
    TILE: tl.constexpr,
    SPLIT: tl.constexpr,
    SLIDING_WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr,
    SINKS: tl.constexpr,
    FP8: tl.constexpr,
    QUERY_FP8: tl.constexpr,
    STAGES: tl.constexpr,
    MEET: tl.constexpr,
    MOST: tl.constexpr,
    CHUNK: tl.constexpr,
):
    # Splits come last, so that those without work leave no multiprocessor with less than its share.
    kv_head, split, splits = tl.program_id(0), tl.program_id(2), tl.num_programs(2)
    request, row_tile = tl.program_id(1) // ROW_TILES, tl.program_id(1) % ROW_TILES
    first = tl.load(query_start_loc + request)
    query_len = tl.load(query_start_loc + request + 1) - first
    prefix = tl.load(seq_lens + request) - query_len
    if (query_len <= 0) | (query_len > MAX_QUERY) | (prefix < 0):
        return

    # The splits' shares of the prefix, in tiles; the last split that has one takes the tail too.
    begin = 0
    if SLIDING_WINDOW > 0:
        begin = tl.maximum(prefix - SLIDING_WINDOW + 1, 0) // TILE
    end = tl.cdiv(prefix, TILE)
    share = tl.maximum(tl.cdiv(end - begin, splits), least)
    active = tl.maximum(tl.cdiv(end - begin, share), 1)
    if split >= active:
        return
    begin += split * share
    end = tl.minimum(begin + share, end)
    has_tail = split == active - 1

    # What is waited for first is asked for first, and all of it before any is used. The table is read a tile ahead:
    # else a stage of the pipeline would be spent on it.
    table = block_table + request.to(tl.int64) * table_row
    position = begin * TILE + tl.arange(0, TILE)
    next_block = tl.load(table + position.to(tl.uint32) // BLOCK_SIZE, mask=position < prefix, other=0)

    packed = row_tile * ROWS + tl.arange(0, ROWS)
    row, head = packed // GROUP, kv_head * GROUP + packed % GROUP
    valid = row < query_len
    dim = tl.arange(0, WIDTH)
    in_head = dim < HEAD_SIZE
    if QUERY_FP8:
        scale *= tl.load(q_scale)
    # fp8 weights and values are multiplied in fp16, which holds both exactly or better than bf16.
    value_dtype: tl.constexpr = tl.float16 if FP8 else value.dtype.element_ty
    if FP8:
        scale *= tl.load(k_scale)
    if not (SOFTCAP or ALIBI):
        scale *= 1.4426950408889634
    slopes = tl.full([ROWS], 0.0, tl.float32)
    if ALIBI:
        slopes = tl.load(alibi_slopes + head, mask=valid, other=0.0)

    place = tl.arange(0, TAIL)
    in_tail = (place < query_len) & has_tail
    here = in_tail[:, None] & in_head[None, :]
    token = (first + place).to(tl.int64)
    tail_keys = tl.load(key + token[:, None] * key_row + kv_head * key_head + dim[None, :], mask=here, other=0.0)
    tail_values = tl.load(
        value + token[:, None] * value_row + kv_head * value_head + dim[None, :], mask=here, other=0.0
    )
    to_store = in_tail & (row_tile == 0)
    staged = tl.load(staging_rows + token, mask=to_store, other=-1)
    slot = tl.load(page_slots + token, mask=to_store, other=-1)
    q = tl.load(
        query + (first + row)[:, None].to(tl.int64) * query_row + head[:, None] * query_head + dim[None, :],
        mask=valid[:, None] & in_head[None, :],
        other=0.0,
    )
    # Where the tensor cores take fp8 from shared memory, the keys need no conversion.
    NATIVE: tl.constexpr = QUERY_FP8 and FP8 == 1 and ROWS >= 64
    if QUERY_FP8 and not NATIVE:
        q = q.to(tl.float16)

    largest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    summed = tl.zeros([ROWS, WIDTH], tl.float32)
    pages = kv_cache + kv_head * page_head.to(tl.int64) + dim[None, :]
    for _ in tl.range(begin, end, num_stages=STAGES):
        seen = position < prefix
        block = next_block.to(tl.int64)
        ahead = position + TILE
        next_block = tl.load(table + ahead.to(tl.uint32) // BLOCK_SIZE, mask=ahead < prefix, other=0)
        at = pages + (block * page_block + (position.to(tl.uint32) % BLOCK_SIZE).to(tl.int32) * page_slot)[:, None]
        there = seen[:, None]
        if WIDTH != HEAD_SIZE:
            there = there & in_head[None, :]
        keys = _read(tl.load(at, mask=there, other=0.0), q.dtype, FP8)
        values = _read(tl.load(at + HEAD_SIZE, mask=there, other=0.0), value_dtype, FP8)
        scores = _scores(q, keys, position - prefix, row, slopes, scale, softcap, SOFTCAP, ALIBI)
        if SLIDING_WINDOW > 0:
            near = (prefix + row)[:, None] - position[None, :] < SLIDING_WINDOW
            scores = tl.where(seen[None, :] & near, scores, float("-inf"))
        else:
            scores = tl.where(seen[None, :], scores, float("-inf"))
        largest, total, summed = _add(scores, values, largest, total, summed)
        position = ahead

    if has_tail:
        # Rows outside are 0 already; without this Triton would move the tail to shared memory before the loop.
        tail_keys, tail_values = tl.where(here, tail_keys, 0.0), tl.where(here, tail_values, 0.0)
        stored_keys, stored_values = _stored(tail_keys, k_scale, FP8), _stored(tail_values, v_scale, FP8)
        to_staging = staged >= 0
        at = tl.where(to_staging, staged, slot)
        block, offset = at // BLOCK_SIZE, at % BLOCK_SIZE
        into = tl.where(
            to_staging,
            staging + block * staging_block + kv_head * staging_head + offset * staging_slot,
            kv_cache + block * page_block + kv_head * page_head + offset * page_slot,
        )
        into = into[:, None] + dim[None, :]
        keep = (at >= 0)[:, None] & in_head[None, :]
        tl.store(into, stored_keys, mask=keep)
        tl.store(into + HEAD_SIZE, stored_values, mask=keep)
        keys, values = _read(stored_keys, q.dtype, FP8), _read(stored_values, value_dtype, FP8)
        scores = _scores(q, keys, place, row, slopes, scale, softcap, SOFTCAP, ALIBI)
        seen = place[None, :] <= row[:, None]
        if SLIDING_WINDOW > 0:
            seen = seen & (row[:, None] - place[None, :] < SLIDING_WINDOW)
        scores = tl.where(seen, scores, float("-inf"))
        if SINKS:
            sink = tl.load(sinks + head, mask=valid, other=0.0).to(tl.float32) * 1.4426950408889634
            base = tl.maximum(largest, sink)
            fade = tl.exp2(largest - base)
            total = total * fade + tl.exp2(sink - base)
            summed = summed * fade[:, None]
            largest = base
        largest, total, summed = _add(scores, values, largest, total, summed)

    if SPLIT:  # noqa: SIM102 - known when compiled, the next is not
        if active > 1:
            window = request * tl.num_programs(0) + kv_head
            part = (window.to(tl.int64) * splits + split) * (MAX_QUERY * GROUP) + packed
            mine = valid[:, None] & in_head[None, :]
            tl.store(partials + part[:, None] * HEAD_SIZE + dim[None, :], summed, mask=mine)
            tl.store(softmax + part * 2, largest, mask=valid)
            tl.store(softmax + part * 2 + 1, total, mask=valid)
            tl.debug_barrier()  # every thread's stores come before the one thread's release
            arrival = arrivals + 2 * (window * ROW_TILES + row_tile)
            if MEET:  # all wait for all, and each combines some rows
                tl.atomic_add(arrival, 1, sem="acq_rel", scope="gpu")
                while tl.atomic_add(arrival, 0, sem="acquire", scope="gpu") < active:
                    pass
                worker, workers = split, active
            else:  # the last to arrive combines all rows
                if tl.atomic_add(arrival, 1, sem="acq_rel", scope="gpu") != active - 1:
                    return
                tl.store(arrival, 0)
                worker, workers = 0, 1
            rows = tl.minimum(query_len * GROUP - row_tile * ROWS, ROWS)
            out = output + first.to(tl.int64) * output_row
            for some in range(worker * CHUNK, rows, workers * CHUNK):
                _combine(
                    out,
                    partials,
                    softmax,
                    v_scale,
                    output_row,
                    output_head,
                    window.to(tl.int64) * splits,
                    active,
                    kv_head,
                    row_tile * ROWS + some + tl.arange(0, CHUNK),
                    query_len,
                    GROUP,
                    HEAD_SIZE,
                    WIDTH,
                    MAX_QUERY,
                    MOST,
                    FP8,
                )
            if MEET:  # noqa: SIM102 - known when compiled
                if tl.atomic_add(arrival + 1, 1, sem="acq_rel", scope="gpu") == active - 1:  # the last to leave
                    tl.store(arrival, 0)
                    tl.store(arrival + 1, 0)
            return

    result = summed * (1 / total)[:, None]
    if FP8:
        result *= tl.load(v_scale)
    tl.store(
        output + (first + row)[:, None].to(tl.int64) * output_row + head[:, None] * output_head + dim[None, :],
        result.to(output.dtype.element_ty),
        mask=valid[:, None] & in_head[None, :],
    )


# -- configurations ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Config:
    """How a shape is run; it changes no result beyond the order of sums.

    tile: positions read at a time. warps, stages: as Triton means them. registers: of a thread at most, 0 for no bound.
    splits: programs of a window and KV head, at most. least: tiles that a split has at least, but for the last.
    """

    tile: int = 64
    warps: int = 4
    stages: int = 3
    registers: int = 0
    splits: int = 1
    least: int = 1


def packed_rows(max_query_len: int, group: int) -> int:
    """Rows of a tile that holds the window's rows for each of the `group` query heads of a KV head, or part of them."""
    return min(LARGEST_TILE, max(16, triton.next_power_of_2(max_query_len * group)))


@functools.cache
def tuned() -> list[dict[str, Any]]:
    """The tuned configurations in `data/attention`, each with the shape it was found for; none where none are."""
    folder = paths.DATA / "attention"
    return [entry for path in sorted(folder.glob("*.json")) for entry in json.loads(path.read_text())["configurations"]]


@functools.cache
def choose(requests: int, kv_heads: int, group: int, head_size: int, cache_bytes: int, max_query_len: int) -> Config:
    """The configuration of the nearest tuned shape, or one that fills 132 multiprocessors twice.

    Nearest by factors between shapes: of bytes of an element, rows in a tile, head size, and programs without splits.
    """
    rows = packed_rows(max_query_len, group)
    shape = {"cache_bytes": cache_bytes, "rows": rows, "head_size": head_size, "programs": requests * kv_heads}
    weights = {"cache_bytes": 8, "rows": 4, "head_size": 4, "programs": 1}

    def distance(entry: dict[str, Any]) -> float:
        return sum(weight * abs(math.log2(shape[name] / entry[name])) for name, weight in weights.items())

    if entries := tuned():
        entry = min(entries, key=distance)
        config = Config(**{name: entry[name] for name in Config.__dataclass_fields__})
        # The number of programs is what a number of splits is good for.
        splits = max(1, round(config.splits * entry["programs"] / shape["programs"]))
        config = replace(config, splits=splits)
    else:
        config = Config(splits=max(1, min(64, 264 // (requests * kv_heads))), least=2)
    return _fitting(config, rows, triton.next_power_of_2(head_size), cache_bytes)


def _fitting(config: Config, rows: int, width: int, cache_bytes: int, limit: int = 200 << 10) -> Config:
    """`config`, or the like of it whose tiles fit into shared memory, and whose sums into registers."""
    tile, stages = max(config.tile, 32), config.stages
    warps = 8 if rows * width > 8192 else config.warps
    registers = config.registers if width <= 128 else 0
    while stages * tile * 2 * width * cache_bytes + rows * width * 2 > limit and (stages > 2 or tile > 32):
        stages, tile = (stages - 1, tile) if stages > 2 else (stages, tile // 2)
    return replace(config, tile=tile, stages=stages, warps=warps, registers=registers)


def division(splits: int, windows: int, rows: int, head_size: int, processors: int) -> tuple[int, bool, int, int]:
    """How splits are combined: (splits, whether all meet, bound of splits compiled for, rows combined at a time).

    They meet, that is wait for each other and share the work, where there is a multiprocessor for each program; a
    cooperative launch then promises that all run at once.
    """
    splits = min(splits, 64)
    meet = 1 < splits <= processors // windows
    most = 4 if splits <= 4 else 16 if splits <= 16 else 64
    chunk = max(1, COMBINED // (most * triton.next_power_of_2(head_size)))
    return splits, meet, most, min(chunk, triton.next_power_of_2(triton.cdiv(rows, most))) if meet else chunk


# -- the call ------------------------------------------------------------------------------------------------------


class Workspace:
    """What splits leave for each other; made once, used by all layers of a stream in turn, zero between launches.

    Args:
        max_requests: of a batch, padding included.
        max_query_len: rows of a window at most.
        num_heads: query heads of a layer.
        head_size: their size.
        device: of everything.
    """

    def __init__(
        self, max_requests: int, max_query_len: int, num_heads: int, head_size: int, device: torch.device | str
    ) -> None:
        self.max_requests, self.max_query_len, self.num_heads = max_requests, max_query_len, num_heads
        rows = max(PARTIAL_ROWS, num_heads * max_query_len)
        self.partials = torch.empty(rows, head_size, dtype=torch.float32, device=device)
        self.softmax = torch.empty(rows, 2, dtype=torch.float32, device=device)
        tiles = num_heads * (2 + max_query_len // 16)
        self.arrivals = torch.zeros(max_requests * tiles, 2, dtype=torch.int32, device=device)
        cuda = self.arrivals.is_cuda
        self.processors = torch.cuda.get_device_properties(device).multi_processor_count if cuda else 0

    def splits(self, requests: int) -> int:
        """How many splits of the windows of so many requests there is room for."""
        return max(1, len(self.partials) // (requests * self.num_heads * self.max_query_len))


def verify_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kv_cache: Tensor,
    output: Tensor,
    *,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    page_slots: Tensor,
    staging: Tensor,
    staging_rows: Tensor,
    max_query_len: int,
    scale: float,
    softcap: float = 0.0,
    sliding_window: int = 0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    kv_cache_dtype: str = "auto",
    q_scale: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    workspace: Workspace,
    config: Config | None = None,
) -> None:
    """Attend and store the window rows of one layer, in one launch.

    Requests with more than `max_query_len` rows, and padded ones with none, are left alone: their output, pages and
    staging are not touched. No page position from ``seq_len - query_len`` on is read. Allocates nothing, waits for
    nothing, and depends on the shapes alone, so it may be captured in a CUDA graph and replayed on other values.

    Args:
        query: [T, Hq, D] bf16 or fp16, or float8_e4m3fn with an fp8 cache; D 64, 96, 128 or 256.
        key, value: [T', H, D] bf16 or fp16, T' >= T, the rows as projected (rotated), not yet quantised.
        kv_cache: [num_blocks, H, N, 2 * D], keys then values, of the dtype of `key`, or uint8 for fp8; any strides
            but the last, which is 1.
        output: [T, Hq, D] bf16 or fp16. The last dimension of these four is dense, their other strides are free.
        query_start_loc: int32 [R + 1]; seq_lens: int32 [R], the query's rows included.
        block_table: int32 [R, max_blocks], rows dense.
        page_slots: int64 [>= T], ``block * N + offset`` of the page slot to write a row to, negative: none.
        staging: [B', H, N, 2 * D], the layer's mini-cache, of the dtype of `kv_cache`.
        staging_rows: int64 [>= T], the row of staging (block ``m // N``, offset ``m % N``) for a held row; such a row
            is not written to its page. Negative: not held.
        max_query_len: rows of a window at most.
        scale: of the scores. softcap: 0 is none. sliding_window: 0 or the window in positions, own row included.
        alibi_slopes: fp32 [Hq] or None. sinks: [Hq] or None, a score more in each head's softmax.
        kv_cache_dtype: ``"auto"``, ``"fp8"``, ``"fp8_e4m3"`` or ``"fp8_e5m2"``. Stored bytes are those of vLLM's
            `reshape_and_cache_flash`; with fp8 the tail is attended to as it is stored.
        q_scale, k_scale, v_scale: fp32, one element each on the device: what fp8 numbers are multiples of.
        workspace: see `Workspace`; not shared by launches that may run at once.
        config: instead of the tuned one.

    Raises:
        ValueError: wrong input, named, before anything is launched.
    """
    requests, kv_heads, block_size = seq_lens.shape[0], kv_cache.shape[1], kv_cache.shape[2]
    _check(
        query, key, value, kv_cache, output, query_start_loc, seq_lens, block_table, page_slots, staging, staging_rows,
        max_query_len, kv_cache_dtype, q_scale, k_scale, v_scale, alibi_slopes, sinks, workspace,
    )  # fmt: skip
    if requests == 0:
        return
    heads, head_size = query.shape[1:]
    group = heads // kv_heads
    rows = packed_rows(max_query_len, group)
    row_tiles = triton.cdiv(max_query_len * group, rows)
    if config is None:
        config = choose(requests, kv_heads, group, head_size, kv_cache.element_size(), max_query_len)
    fp8 = FP8.get(kv_cache_dtype, 0)
    if fp8:  # as such the tensor cores can take keys from where they were copied to
        kind = torch.float8_e4m3fn if fp8 == 1 else torch.float8_e5m2
        kv_cache, staging = kv_cache.view(kind), staging.view(kind)
    splits, meet, most, chunk = division(
        min(config.splits, workspace.splits(requests)),
        kv_heads * requests * row_tiles,
        min(rows, max_query_len * group),
        head_size,
        workspace.processors,
    )
    _verify_attention[(kv_heads, requests * row_tiles, splits)](
        query,
        key,
        value,
        kv_cache,
        output,
        query_start_loc,
        seq_lens,
        block_table,
        page_slots,
        staging,
        staging_rows,
        alibi_slopes,
        sinks,
        q_scale,
        k_scale,
        v_scale,
        workspace.partials,
        workspace.softmax,
        workspace.arrivals,
        scale,
        softcap,
        query.stride(0),
        query.stride(1),
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        output.stride(0),
        output.stride(1),
        *kv_cache.stride()[:3],
        *staging.stride()[:3],
        block_table.stride(0),
        config.least,
        GROUP=group,
        HEAD_SIZE=head_size,
        WIDTH=triton.next_power_of_2(head_size),
        BLOCK_SIZE=block_size,
        MAX_QUERY=max_query_len,
        ROWS=rows,
        ROW_TILES=row_tiles,
        TAIL=max(16, triton.next_power_of_2(max_query_len)),
        TILE=config.tile,
        SPLIT=splits > 1,
        SLIDING_WINDOW=sliding_window,
        SOFTCAP=softcap > 0,
        ALIBI=alibi_slopes is not None,
        SINKS=sinks is not None,
        FP8=fp8,
        QUERY_FP8=query.dtype == torch.float8_e4m3fn,
        STAGES=config.stages,
        MEET=meet,
        MOST=most,
        CHUNK=chunk,
        num_warps=config.warps,
        num_stages=config.stages,
        launch_cooperative_grid=meet,
        maxnreg=config.registers or None,
    )


def _check(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kv_cache: Tensor,
    output: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    page_slots: Tensor,
    staging: Tensor,
    staging_rows: Tensor,
    max_query_len: int,
    kv_cache_dtype: str,
    q_scale: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    workspace: Workspace,
) -> None:
    def need(condition: bool, complaint: str) -> None:
        if not condition:
            raise ValueError(complaint)

    need(query.dim() == 3 and key.dim() == 3 and value.dim() == 3, "query, key and value must be [T, heads, D]")
    need(kv_cache.dim() == 4 and staging.dim() == 4, "kv_cache and staging must be [blocks, H, N, 2 * D]")
    tokens, heads, head_size = query.shape
    kv_heads = kv_cache.shape[1]
    fp8 = kv_cache_dtype in FP8
    need(head_size in HEAD_SIZES, f"head size {head_size} is none of {HEAD_SIZES}; use vLLM's own attention")
    need(heads % kv_heads == 0, f"{heads} query heads do not divide among {kv_heads} KV heads")
    need(fp8 or kv_cache_dtype == "auto", f"kv_cache_dtype {kv_cache_dtype!r} is none of auto, {', '.join(FP8)}")
    need(key.dtype in (torch.bfloat16, torch.float16), f"key must be bfloat16 or float16, is {key.dtype}")
    need(key.shape == value.shape and key.dtype == value.dtype, "key and value must have one shape and dtype")
    need(key.shape[0] >= tokens and key.shape[1:] == (kv_heads, head_size), f"key has shape {tuple(key.shape)}")
    need(output.shape == query.shape and output.dtype == key.dtype, "output must have query's shape and key's dtype")
    cache_dtype = torch.uint8 if fp8 else key.dtype
    need(kv_cache.dtype == cache_dtype, f"kv_cache of {kv_cache_dtype} must be {cache_dtype}, is {kv_cache.dtype}")
    need(kv_cache.shape[3] == 2 * head_size, f"kv_cache rows hold {kv_cache.shape[3]} elements, not {2 * head_size}")
    need(
        staging.dtype == kv_cache.dtype and staging.shape[1:] == kv_cache.shape[1:],
        "staging must have the dtype, heads, block size and row of kv_cache",
    )
    quantised = query.dtype == torch.float8_e4m3fn
    need(query.dtype == key.dtype or (fp8 and quantised), f"query is {query.dtype} beside a key of {key.dtype}")
    for name, tensor in (("query", query), ("key", key), ("value", value), ("output", output)):
        need(tensor.stride(2) == 1, f"{name} must have a dense last dimension")
    need(kv_cache.stride(3) == 1 and staging.stride(3) == 1, "kv_cache and staging must have a dense last dimension")
    requests = seq_lens.shape[0]
    for name, tensor, dtype, least in (
        ("query_start_loc", query_start_loc, torch.int32, requests + 1),
        ("seq_lens", seq_lens, torch.int32, requests),
        ("page_slots", page_slots, torch.int64, tokens),
        ("staging_rows", staging_rows, torch.int64, tokens),
    ):
        need(tensor.dtype == dtype and tensor.is_contiguous(), f"{name} must be contiguous {dtype}")
        need(tensor.numel() >= least, f"{name} has {tensor.numel()} elements, needs {least}")
    need(
        block_table.dim() == 2 and block_table.dtype == torch.int32 and block_table.stride(1) == 1,
        "block_table must be int32 [R, max_blocks] with dense rows",
    )
    need(block_table.shape[0] >= requests, f"block_table has {block_table.shape[0]} rows, needs {requests}")
    scales = [("q_scale", q_scale, quantised), ("k_scale", k_scale, fp8), ("v_scale", v_scale, fp8)]
    for name, scale, wanted in scales:
        if wanted:
            need(scale is not None, f"{name} is needed for fp8")
            assert scale is not None
            need(scale.numel() == 1 and scale.dtype == torch.float32, f"{name} must be one fp32; use vLLM's attention")
    for name, per_head in (("alibi_slopes", alibi_slopes), ("sinks", sinks)):
        need(per_head is None or per_head.shape == (heads,), f"{name} must be [{heads}]")
    need(
        requests <= workspace.max_requests
        and 0 < max_query_len <= workspace.max_query_len
        and heads <= workspace.num_heads
        and head_size <= workspace.partials.shape[1],
        f"the workspace is for {workspace.max_requests} requests of {workspace.max_query_len} rows, "
        f"{workspace.num_heads} heads of {workspace.partials.shape[1]}; make a larger one",
    )
    tensors = [key, value, kv_cache, output, query_start_loc, seq_lens, block_table, page_slots, staging, staging_rows]
    tensors += [tensor for tensor in (q_scale, k_scale, v_scale, alibi_slopes, sinks) if tensor is not None]
    need(
        all(tensor.device == query.device for tensor in [*tensors, workspace.partials]),
        f"everything must be on {query.device}, where query is",
    )
