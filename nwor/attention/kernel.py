# SPDX-License-Identifier: Apache-2.0
"""The Triton kernel of `nwor.attention.verify`: attention of verify windows, one launch a layer.

It packs all query heads of a KV head and all rows of the window into one tile, so that a page is read once, and cuts
the prefix into splits where requests and heads alone do not fill the GPU. Where these rows are few, each warp attends
to keys of its own (KEY_GROUPS), and needs to wait for no other between two tiles. The softmax over splits is that of
Flash-Decoding (Dao et al., 2023): each split leaves its sum of values, its sum of weights and its largest score. When
all have arrived they are added up: by all of them, each some rows, where there is a multiprocessor for each program
(a cooperative launch, and a sense-reversing barrier such as CUDA's `grid.sync`), else by the last.

Importing this module imports Triton.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _quantize(rows, scale, FP8: tl.constexpr):
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
def _dequantize(elements, dtype: tl.constexpr, FP8: tl.constexpr):
    """Elements of pages in the dtype of the products; every fp8 number is exact in both 16-bit dtypes."""
    if FP8 and dtype != elements.dtype:
        return elements.to(dtype)
    else:
        return elements


@triton.jit
def _sum_last(parts, KEY_GROUPS: tl.constexpr):
    """The sum over the last dimension; Triton's own, over warps, goes through shared memory element by element."""
    if KEY_GROUPS == 1:
        return tl.reshape(parts, (parts.shape[0], parts.shape[1]))
    else:
        a, b = tl.split(tl.reshape(parts, (parts.shape[0], parts.shape[1], KEY_GROUPS // 2, 2)))
        return _sum_last(a + b, KEY_GROUPS // 2)


@triton.jit
def _transpose(keys):
    """Keys [..., keys, elements] as `tl.dot` takes them from the right."""
    if len(keys.shape) == 3:
        return tl.permute(keys, (0, 2, 1))
    else:
        return tl.trans(keys)


@triton.jit
def _scores(query, keys, position, row, slopes, scale, softcap, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr):
    """Scores in units of log 2, of each part where there are some.

    position: of each key, counted from the end of the prefix, as the rows are.
    """
    scores = tl.dot(query, _transpose(keys)) * scale
    if SOFTCAP:
        scores = softcap * (1 - 2 / (tl.exp2(scores * (2 * 1.4426950408889634 / softcap)) + 1))
    if ALIBI:
        scores += slopes[:, None] * tl.expand_dims(position, -2)
    if SOFTCAP or ALIBI:
        scores *= 1.4426950408889634
    return scores


@triton.jit
def _add(scores, values, largest, total, summed):
    """One step of the running softmax; a row that has seen no key yet has -inf as its largest score."""
    KEYS: tl.constexpr = len(scores.shape) - 1
    new = tl.maximum(largest, tl.max(scores, KEYS))
    base = tl.where(new == float("-inf"), 0.0, new)
    weights = tl.exp2(scores - tl.expand_dims(base, -1))
    fade = tl.exp2(largest - base)
    summed = tl.dot(weights.to(values.dtype), values, summed * tl.expand_dims(fade, -1))
    return new, total * fade + tl.sum(weights, KEYS), summed


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
    MAX_SPLITS: tl.constexpr,
    FP8: tl.constexpr,
):
    """Add up what the splits of a window left of some of its packed rows, all splits at once.

    Rows come first: Triton gives warps to the first dimension, and sums over splits go from no warp to another.
    """
    row, head = packed // GROUP, kv_head * GROUP + packed % GROUP
    dim, split = tl.arange(0, WIDTH), tl.arange(0, MAX_SPLITS)
    mine = (row < query_len)[:, None] & (split < active)[None, :]
    at = (part + split)[None, :] * (MAX_QUERY * GROUP) + packed[:, None]
    largest = tl.load(softmax + at * 2, mask=mine, other=float("-inf"))
    total = tl.load(softmax + at * 2 + 1, mask=mine, other=0.0)
    found = tl.load(
        partials + at[:, :, None] * HEAD_SIZE + dim[None, None, :],
        mask=mine[:, :, None] & (dim < HEAD_SIZE)[None, None, :],
        other=0.0,
    )
    base = tl.max(largest, 1)
    fade = tl.exp2(largest - tl.where(base == float("-inf"), 0.0, base)[:, None])
    fade *= (1 / tl.sum(total * fade, 1))[:, None]
    result = tl.sum(found * fade[:, :, None], 1)
    if FP8:
        result *= tl.load(v_scale)
    tl.store(
        output + row[:, None].to(tl.int64) * output_row + head[:, None] * output_head + dim[None, :],
        result.to(output.dtype.element_ty),
        mask=(row < query_len)[:, None] & (dim < HEAD_SIZE)[None, :],
    )


@triton.jit(do_not_specialize=["min_tiles_per_split", "table_row"])
def verify_windows(
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
    min_tiles_per_split,
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
    KEY_GROUPS: tl.constexpr,
    GRID_BARRIER: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    COMBINE_ROWS: tl.constexpr,
):
    # Splits come last, so that those without work leave no multiprocessor with less than its share.
    kv_head, split, splits = tl.program_id(0), tl.program_id(2), tl.num_programs(2)
    request, row_tile = tl.program_id(1) // ROW_TILES, tl.program_id(1) % ROW_TILES
    # Every layer waits for these few lines, and weights that pass through the L2 cache from one layer to the next
    # would push them out: they are to be the last to go.
    KEPT: tl.constexpr = "evict_last"
    first = tl.load(query_start_loc + request, eviction_policy=KEPT)
    query_len = tl.load(query_start_loc + request + 1, eviction_policy=KEPT) - first
    prefix = tl.load(seq_lens + request, eviction_policy=KEPT) - query_len
    if (query_len * GROUP <= row_tile * ROWS) | (query_len > MAX_QUERY) | (prefix < 0):
        return

    # The splits' shares of the prefix, in tiles, as even as they go; the last split has none of the odd ones,
    # but the tail.
    oldest = 0  # the first position that any row sees: the first row's
    if SLIDING_WINDOW > 0:
        oldest = tl.maximum(prefix - SLIDING_WINDOW + 1, 0)
    lowest = oldest // TILE
    tiles = tl.cdiv(prefix, TILE) - lowest
    active = tl.maximum(tl.minimum(tiles // min_tiles_per_split, splits), 1)
    if split >= active:
        return
    begin = lowest + tl.cdiv(tiles * split, active)
    end = lowest + tl.cdiv(tiles * (split + 1), active)
    has_tail = split == active - 1

    # What is waited for first is asked for first, and all of it before any is used. The table is read a tile ahead:
    # else a stage of the pipeline would be spent on it.
    table = block_table + request.to(tl.int64) * table_row
    position = begin * TILE + tl.arange(0, TILE)
    if KEY_GROUPS > 1:
        position = tl.reshape(position, (KEY_GROUPS, TILE // KEY_GROUPS))
    next_block = tl.load(
        table + position.to(tl.uint32) // BLOCK_SIZE, mask=position < prefix, other=0, eviction_policy=KEPT
    )

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
    tail_mask = in_tail[:, None] & in_head[None, :]
    token = (first + place).to(tl.int64)
    tail_keys = tl.load(key + token[:, None] * key_row + kv_head * key_head + dim[None, :], mask=tail_mask, other=0.0)
    tail_values = tl.load(
        value + token[:, None] * value_row + kv_head * value_head + dim[None, :], mask=tail_mask, other=0.0
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
    NATIVE: tl.constexpr = QUERY_FP8 and FP8 == 1 and ROWS >= 64  # configs.WARPGROUP_ROWS
    if QUERY_FP8 and not NATIVE:
        q = q.to(tl.float16)

    if KEY_GROUPS > 1:
        queries = tl.broadcast_to(q[None, :, :], (KEY_GROUPS, ROWS, WIDTH))
        largest = tl.full([KEY_GROUPS, ROWS], float("-inf"), tl.float32)
        total = tl.zeros([KEY_GROUPS, ROWS], tl.float32)
        summed = tl.zeros([KEY_GROUPS, ROWS, WIDTH], tl.float32)
    else:
        queries = q
        largest = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        summed = tl.zeros([ROWS, WIDTH], tl.float32)
    pages = kv_cache + kv_head.to(tl.int64) * page_head + dim[None, :]
    for _ in tl.range(begin, end, num_stages=STAGES):
        seen = position < prefix
        if SLIDING_WINDOW > 0:  # vLLM may have given what lies below to another request: its NaN times 0 is NaN
            seen = seen & (position >= oldest)
        block = next_block.to(tl.int64)
        ahead = position + TILE
        next_block = tl.load(table + ahead.to(tl.uint32) // BLOCK_SIZE, mask=ahead < prefix, other=0)
        inside = block * page_block + (position.to(tl.uint32) % BLOCK_SIZE).to(tl.int32) * page_slot
        at = pages + tl.expand_dims(inside, -1)
        page_mask = tl.expand_dims(seen, -1)
        if WIDTH != HEAD_SIZE:
            page_mask = page_mask & in_head[None, :]
        keys = _dequantize(tl.load(at, mask=page_mask, other=0.0), q.dtype, FP8)
        values = _dequantize(tl.load(at + HEAD_SIZE, mask=page_mask, other=0.0), value_dtype, FP8)
        scores = _scores(queries, keys, position - prefix, row, slopes, scale, softcap, SOFTCAP, ALIBI)
        if SLIDING_WINDOW > 0:
            near = (prefix + row)[:, None] - tl.expand_dims(position, -2) < SLIDING_WINDOW
            scores = tl.where(tl.expand_dims(seen, -2) & near, scores, float("-inf"))
        else:
            scores = tl.where(tl.expand_dims(seen, -2), scores, float("-inf"))
        largest, total, summed = _add(scores, values, largest, total, summed)
        position = ahead

    if KEY_GROUPS > 1:
        highest = tl.max(largest, 0)
        share = tl.exp2(largest - tl.where(highest == float("-inf"), 0.0, highest)[None, :])
        largest, total = highest, tl.sum(total * share, 0)
        summed = _sum_last(tl.permute(summed * share[:, :, None], (1, 2, 0)), KEY_GROUPS)

    if has_tail:
        # Rows outside are 0 already; without this Triton would move the tail to shared memory before the loop.
        tail_keys, tail_values = tl.where(tail_mask, tail_keys, 0.0), tl.where(tail_mask, tail_values, 0.0)
        stored_keys, stored_values = _quantize(tail_keys, k_scale, FP8), _quantize(tail_values, v_scale, FP8)
        to_staging = staged >= 0
        at = tl.where(to_staging, staged, slot)
        block, offset = at // BLOCK_SIZE, at % BLOCK_SIZE
        into = tl.where(
            to_staging,
            staging + block * staging_block + kv_head.to(tl.int64) * staging_head + offset * staging_slot,
            kv_cache + block * page_block + kv_head.to(tl.int64) * page_head + offset * page_slot,
        )
        into = into[:, None] + dim[None, :]
        keep = (at >= 0)[:, None] & in_head[None, :]
        tl.store(into, stored_keys, mask=keep)
        tl.store(into + HEAD_SIZE, stored_values, mask=keep)
        keys, values = _dequantize(stored_keys, q.dtype, FP8), _dequantize(stored_values, value_dtype, FP8)
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
            if GRID_BARRIER:  # all wait for all, and each combines some rows
                # All together add 2^31, whatever their number, so that the sign turns and nobody has to set anything
                # back; split 0 adds what the others do not, written so that no term leaves int32.
                added = tl.where(split == 0, 0x7FFFFFFF - (active - 2), 1)
                before = tl.atomic_add(arrival + 1, added, sem="release", scope="gpu")
                while (tl.atomic_add(arrival + 1, 0, sem="acquire", scope="gpu") ^ before) >= 0:
                    pass
                worker, workers = split, active
            else:  # the last to arrive combines all rows
                if tl.atomic_add(arrival, 1, sem="acq_rel", scope="gpu") != active - 1:
                    return
                tl.store(arrival, 0)
                worker, workers = 0, 1
            rows = tl.minimum(query_len * GROUP - row_tile * ROWS, ROWS)
            out = output + first.to(tl.int64) * output_row
            for first_row in range(worker * COMBINE_ROWS, rows, workers * COMBINE_ROWS):
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
                    row_tile * ROWS + first_row + tl.arange(0, COMBINE_ROWS),
                    query_len,
                    GROUP,
                    HEAD_SIZE,
                    WIDTH,
                    MAX_QUERY,
                    MAX_SPLITS,
                    FP8,
                )
            return

    result = summed * (1 / total)[:, None]
    if FP8:
        result *= tl.load(v_scale)
    tl.store(
        output + (first + row)[:, None].to(tl.int64) * output_row + head[:, None] * output_head + dim[None, :],
        result.to(output.dtype.element_ty),
        mask=valid[:, None] & in_head[None, :],
    )
