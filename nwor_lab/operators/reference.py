# SPDX-License-Identifier: Apache-2.0
"""Every operator of `nwor.ops` once more in plain Python, byte by byte.

The functions named like operators take their arguments on the CPU, and the device whose writer's fp8 bytes are wanted.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

FP8 = {"fp8": "e4m3", "fp8_e4m3": "e4m3", "fp8_e5m2": "e5m2"}


# -- numbers -----------------------------------------------------------------------------------------------------------


def fp8_magnitudes(fmt: str) -> np.ndarray:
    """The finite non-negative numbers of an fp8 format by their code, from the definition of the format."""
    exponent_bits, bias, last = (4, 7, 0x7E) if fmt == "e4m3" else (5, 15, 0x7B)
    mantissa_bits = 7 - exponent_bits
    values = []
    for code in range(last + 1):
        exponent, mantissa = code >> mantissa_bits, (code & ((1 << mantissa_bits) - 1)) / (1 << mantissa_bits)
        values.append(2.0 ** (1 - bias) * mantissa if exponent == 0 else 2.0 ** (exponent - bias) * (1 + mantissa))
    return np.array(values)


MAGNITUDES = {fmt: fp8_magnitudes(fmt) for fmt in ("e4m3", "e5m2")}


def quantise(vector: Tensor, scale: float, fmt: str, device: str) -> Tensor:
    """fp8 codes of `vector` as vLLM's cache writer of `device` makes them; see `kernels/quant.h`. uint8, 1-D."""
    values, table, scale32 = vector.to(torch.float32).numpy(), MAGNITUDES[fmt], np.float32(scale)
    codes = []
    with np.errstate(all="ignore"):
        scaled = values / scale32 if device == "cuda" else values * (np.float32(1) / scale32)
        for y in scaled:
            if np.isnan(y):
                codes.append(0x7F if device == "cuda" else len(table) - 1)
                continue
            magnitude = min(abs(float(y)), table[-1])
            if device == "cpu" and fmt == "e4m3":  # that writer passes through fp32's subnormals, which round
                magnitude = float(np.float32(magnitude) * np.float32(2.0**-120)) * 2.0**120
            below = int(np.searchsorted(table, magnitude, side="right")) - 1
            above = min(below + 1, len(table) - 1)
            code = below
            if device == "cuda":
                to_below, to_above = magnitude - table[below], table[above] - magnitude
                if to_above < to_below or (to_above == to_below and below % 2 == 1):
                    code = above
            negative = np.signbit(y) and not (device == "cpu" and y == 0)
            codes.append(code | (0x80 if negative else 0))
    return torch.tensor(codes, dtype=torch.uint8)


def scale_of(scale: Tensor | None, token: int, head: int) -> float:
    """The scale of one token and head; the shape that the caller stated says which of the two it varies over."""
    if scale is None:
        return 1.0
    if scale.numel() == 1:
        return float(scale.reshape(-1)[0])
    return float(scale[token, 0]) if scale.shape[1] == 1 else float(scale[0, head])


def raw(tensor: Tensor) -> Tensor:
    """The bytes of a tensor, the last dimension in bytes."""
    return tensor.view(torch.uint8)


# -- the operators -----------------------------------------------------------------------------------------------------


def cache_bytes(vector: Tensor, kv_cache_dtype: str, scale: float, device: str) -> Tensor:
    """What a cache holds of one head's vector."""
    return raw(vector) if kv_cache_dtype == "auto" else quantise(vector, scale, FP8[kv_cache_dtype], device)


def stage_kv_cache(
    key: Tensor,
    value: Tensor,
    slot_mapping: Tensor,
    staging_key: Tensor,
    staging_value: Tensor,
    staging_slots: Tensor,
    staging_metadata: Tensor,
    kv_cache_dtype: str,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    device: str,
) -> None:
    slots = slot_mapping.tolist()
    staged_count, error_flag = staging_metadata.tolist()
    if error_flag or staged_count + sum(slot >= 0 for slot in slots) > len(staging_slots):
        staging_metadata[1] = 1
        return
    for token, slot in enumerate(slots):
        if slot < 0:
            continue
        for head in range(key.shape[1]):
            for source, scale, staging in ((key, k_scale, staging_key), (value, v_scale, staging_value)):
                vector = source[token, head]
                raw(staging)[staged_count, head] = cache_bytes(
                    vector, kv_cache_dtype, scale_of(scale, token, head), device
                )
        staging_slots[staged_count] = slot
        staged_count += 1
    staging_metadata[0] = staged_count


def commit_staged_kv_cache(
    staging_key: Tensor,
    staging_value: Tensor,
    staging_slots: Tensor,
    staging_metadata: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    accepted_len: Tensor,
    device: str,
) -> None:
    if staging_metadata[1]:
        return
    block_size = key_cache.shape[1]
    for row in range(int(accepted_len)):
        block, offset = divmod(int(staging_slots[row]), block_size)
        raw(key_cache)[block, offset] = raw(staging_key)[row]
        raw(value_cache)[block, offset] = raw(staging_value)[row]


def commit_draft_layer(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    accepted_mask: Tensor,
    kv_cache_dtype: str,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    device: str,
) -> None:
    for token, slot in enumerate(slot_mapping.tolist()):
        if slot < 0 or not accepted_mask[token]:
            continue
        block, offset = divmod(slot, key_cache.shape[1])
        for head in range(key.shape[1]):
            for source, scale, cache in ((key, k_scale, key_cache), (value, v_scale, value_cache)):
                vector = source[token, head]
                raw(cache)[block, offset, head] = cache_bytes(
                    vector, kv_cache_dtype, scale_of(scale, token, head), device
                )


def log_cache_slots(
    key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor, log_key: Tensor, log_value: Tensor, device: str
) -> None:
    for token, slot in enumerate(slot_mapping.tolist()):
        if slot >= 0:
            block, offset = divmod(slot, key_cache.shape[1])
            raw(log_key)[token] = raw(key_cache)[block, offset]
            raw(log_value)[token] = raw(value_cache)[block, offset]


def restore_rejected_drafts(
    log_key: Tensor,
    log_value: Tensor,
    slot_mapping: Tensor,
    accepted_mask: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    device: str,
) -> None:
    for token, slot in enumerate(slot_mapping.tolist()):
        if slot >= 0 and not accepted_mask[token]:
            block, offset = divmod(slot, key_cache.shape[1])
            raw(key_cache)[block, offset] = raw(log_key)[token]
            raw(value_cache)[block, offset] = raw(log_value)[token]


def slot_in_pool(
    layer_offset: int, strides: Sequence[int], slot: int, head: int, rows: Tensor, packing: Tensor | None
) -> list[int]:
    """Byte positions in the pool of one slot of one layer and head, in the order of the slot's own bytes."""
    block_size, slot_bytes = rows.shape[3], rows.shape[4]
    block, offset = divmod(slot, block_size)
    chunk = layer_offset + block * strides[0] + head * strides[1]
    return [chunk + byte for byte in bytes_in_chunk(offset, strides[2], slot_bytes, packing)]


def bytes_in_chunk(offset: int, token_stride: int, slot_bytes: int, packing: Tensor | None) -> list[int]:
    """Positions of a slot's bytes inside its (block, head) chunk."""
    if packing is None:
        return [offset * token_stride + byte for byte in range(slot_bytes)]
    size = slot_bytes // packing.shape[1]
    return [element * size + byte for element in packing[offset].tolist() for byte in range(size)]


def row_in_chunk(rows: Tensor, layer: int, row: int, head: int, packing: Tensor | None) -> tuple[Tensor, list[int]]:
    """The (block, head) chunk of the mini-cache that holds `row`, flat, and the positions of the row's bytes."""
    block, offset = divmod(row, rows.shape[3])
    stride = rows.stride(3)
    chunk = rows[layer, block, head].as_strided(
        ((rows.shape[3] - 1) * stride + rows.shape[4],), (1,), rows[layer, block, head].storage_offset()
    )
    return chunk, bytes_in_chunk(offset, stride, rows.shape[4], packing)


def move_rows(
    pool: Tensor,
    layer_offsets: Tensor,
    cache_strides: Sequence[int],
    slots: Tensor,
    packing: Tensor | None,
    rows: Tensor,
    logged: Tensor | None,
    chosen: Sequence[int],
    into_pool: bool,
) -> None:
    """Copy the chosen rows of all layers and heads between the pool and the mini-cache."""
    for layer, layer_offset in enumerate(layer_offsets.tolist()):
        for row in chosen:
            slot = int(slots.view(-1)[row])
            place = row
            if logged is not None:
                place = row // slots.shape[1] * logged.shape[1] + slot % logged.shape[1]
            for head in range(rows.shape[2]):
                in_pool = slot_in_pool(layer_offset, cache_strides, slot, head, rows, packing)
                chunk, in_chunk = row_in_chunk(rows, layer, place, head, packing)
                if into_pool:
                    pool[in_pool] = chunk[in_chunk]
                else:
                    chunk[in_chunk] = pool[in_pool]


def open_window(
    query_start_loc: Tensor,
    cu_num_logits: Tensor,
    slot_mapping: Tensor,
    slots: Tensor,
    num_drafts: Tensor,
    staging_rows: Tensor | None,
    page_slots: Tensor | None,
    counts: Tensor,
    device: str,
) -> None:
    starts, logits, width = query_start_loc.tolist(), cu_num_logits.tolist(), slots.shape[1]
    batch = slot_mapping.tolist()[: starts[len(logits) - 1]]
    slots.fill_(-1)
    num_drafts.zero_()
    if staging_rows is not None and page_slots is not None:
        staging_rows.fill_(-1)
        page_slots.fill_(-1)
        page_slots[: len(batch)] = torch.tensor(batch, dtype=torch.int64)
    for request in range(len(logits) - 1):
        tokens = range(starts[request], starts[request + 1])
        n = logits[request + 1] - logits[request]
        if n <= 1 or (staging_rows is not None and n != len(tokens)):
            continue
        drafts = n - 1
        if drafts > min(width, len(tokens)):
            counts[4] += 1
            continue
        num_drafts[request] = drafts
        counts[2] += 1
        counts[3] += drafts
        for draft, token in enumerate(tokens[len(tokens) - drafts :]):
            slots[request, draft] = max(batch[token], -1)
            if staging_rows is not None and page_slots is not None:
                staging_rows[token], page_slots[token] = request * width + draft, -1


def log_all_layers(
    pool: Tensor,
    layer_offsets: Tensor,
    cache_strides: Sequence[int],
    slots: Tensor,
    packing: Tensor | None,
    rows: Tensor,
    logged: Tensor | None = None,
    *,
    device: str,
) -> None:
    there = set() if logged is None else {(r, s) for r, entries in enumerate(logged.tolist()) for s in entries}
    held = enumerate(slots.flatten().tolist())
    chosen = [row for row, slot in held if slot >= 0 and (row // slots.shape[1], slot) not in there]
    move_rows(pool, layer_offsets, cache_strides, slots, packing, rows, logged, chosen, into_pool=False)


def split_rows(slots: Tensor, num_drafts: Tensor, num_rejected: Tensor) -> list[tuple[list[int], list[int]]]:
    """The kept and the rejected rows of each request."""
    width = slots.shape[1]
    found = []
    for request, drafts_kept in enumerate((num_drafts - num_rejected).tolist()):
        drafts = [draft for draft in range(width) if slots[request, draft] >= 0]
        kept = [request * width + draft for draft in drafts if draft < drafts_kept]
        found.append((kept, [request * width + draft for draft in drafts if draft >= drafts_kept]))
    return found


def write_back(
    wanted: int,
    pool: Tensor,
    layer_offsets: Tensor,
    cache_strides: Sequence[int],
    slots: Tensor,
    packing: Tensor | None,
    rows: Tensor,
    num_drafts: Tensor,
    num_rejected: Tensor,
    kept: Tensor,
    counts: Tensor,
    logged: Tensor | None = None,
) -> None:
    """Move the kept rows (`wanted` 0) or the rejected ones (1) into the pool, and count both."""
    for request, split in enumerate(split_rows(slots, num_drafts, num_rejected)):
        move_rows(pool, layer_offsets, cache_strides, slots, packing, rows, logged, split[wanted], into_pool=True)
        if logged is not None:
            for rejected, held in enumerate(split):
                for slot in slots.flatten()[held].tolist():
                    logged[request, slot % logged.shape[1]] = slot if rejected else -1
        kept[request] = len(split[0])
        counts[:2] += torch.tensor([len(split[0]), len(split[1])])


def restore_all_layers(*args: Any, device: str) -> None:
    write_back(1, *args)


def commit_all_layers(*args: Any, device: str) -> None:
    write_back(0, *args)
