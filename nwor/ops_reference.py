# SPDX-License-Identifier: Apache-2.0
"""Every operator of `nwor.ops` once more in plain Python, byte by byte, and makers of inputs with poisoned caches.

`check(operator, *args)` runs both on equal memory and compares all of it: each byte of each storage that the
arguments lie in, whether it was to be written or not. The functions named like operators take their arguments on the
CPU, and the device whose writer's fp8 bytes are wanted.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nwor import ops

FP8 = {"fp8": "e4m3", "fp8_e4m3": "e4m3", "fp8_e5m2": "e5m2"}
ACCEPTANCE = ("none", "full", "prefix", "sparse")
LAYOUTS = ("NHD", "HND", "vllm HND", "vllm NHD")


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
    """The scale of one token and head, told apart by the shape that the caller stated."""
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
    chosen: Sequence[int],
    into_pool: bool,
) -> None:
    """Copy the chosen rows of all layers and heads between the pool and the mini-cache."""
    for layer, layer_offset in enumerate(layer_offsets.tolist()):
        for row in chosen:
            for head in range(rows.shape[2]):
                in_pool = slot_in_pool(layer_offset, cache_strides, int(slots.view(-1)[row]), head, rows, packing)
                chunk, in_chunk = row_in_chunk(rows, layer, row, head, packing)
                if into_pool:
                    pool[in_pool] = chunk[in_chunk]
                else:
                    chunk[in_chunk] = pool[in_pool]


def open_window(
    query_start_loc: Tensor,
    cu_num_logits: Tensor,
    slot_mapping: Tensor,
    slots: Tensor,
    staging_rows: Tensor | None,
    page_slots: Tensor | None,
    counts: Tensor,
    device: str,
) -> None:
    starts, logits, width = query_start_loc.tolist(), cu_num_logits.tolist(), slots.shape[1]
    batch = slot_mapping.tolist()[: starts[len(logits) - 1]]
    slots.fill_(-1)
    if staging_rows is not None and page_slots is not None:
        staging_rows.fill_(-1)
        page_slots.fill_(-1)
        page_slots[: len(batch)] = torch.tensor(batch, dtype=torch.int64)
    for request in range(len(logits) - 1):
        tokens = range(starts[request], starts[request + 1])
        n = logits[request + 1] - logits[request]
        if n <= 1 or (staging_rows is not None and n != len(tokens)):
            continue
        held = n if staging_rows is not None else n - 1
        if held > min(width, len(tokens)):
            counts[4] += 1
            continue
        counts[2] += 1
        counts[3] += n - 1
        for column, token in zip(range(width - held, width), tokens[len(tokens) - held :], strict=True):
            slots[request, column] = max(batch[token], -1)
            if staging_rows is not None and page_slots is not None:
                staging_rows[token], page_slots[token] = request * width + column, -1


def log_all_layers(
    pool: Tensor,
    layer_offsets: Tensor,
    cache_strides: Sequence[int],
    slots: Tensor,
    packing: Tensor | None,
    rows: Tensor,
    device: str,
) -> None:
    chosen = [row for row, slot in enumerate(slots.flatten().tolist()) if slot >= 0]
    move_rows(pool, layer_offsets, cache_strides, slots, packing, rows, chosen, into_pool=False)


def split_rows(slots: Tensor, num_rejected: Tensor) -> list[tuple[list[int], list[int]]]:
    """The kept and the rejected rows of each request."""
    width = slots.shape[1]
    found = []
    for request, rejected in enumerate(num_rejected.tolist()):
        there = [w for w in range(width) if slots[request, w] >= 0]
        kept = [request * width + w for w in there if width - 1 - w >= rejected]
        found.append((kept, [request * width + w for w in there if width - 1 - w < rejected]))
    return found


def write_back(
    wanted: int,
    pool: Tensor,
    layer_offsets: Tensor,
    cache_strides: Sequence[int],
    slots: Tensor,
    packing: Tensor | None,
    rows: Tensor,
    num_rejected: Tensor,
    kept: Tensor,
    counts: Tensor,
) -> None:
    """Move the kept rows (`wanted` 0) or the rejected ones (1) into the pool, and count both."""
    for request, split in enumerate(split_rows(slots, num_rejected)):
        move_rows(pool, layer_offsets, cache_strides, slots, packing, rows, split[wanted], into_pool=True)
        kept[request] = len(split[0])
        counts[:2] += torch.tensor([len(split[0]), len(split[1])])


def restore_all_layers(*args: Any, device: str) -> None:
    write_back(1, *args)


def commit_all_layers(*args: Any, device: str) -> None:
    write_back(0, *args)


# -- comparison --------------------------------------------------------------------------------------------------------


class Twins:
    """Copies of tensors on the CPU that share storages where the originals do."""

    def __init__(self) -> None:
        self.storages: dict[int, tuple[Tensor, Tensor]] = {}  # address: (original bytes, copied bytes)

    def __call__(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        storage = value.untyped_storage()
        if storage.data_ptr() not in self.storages:
            original = torch.empty(0, dtype=torch.uint8, device=value.device).set_(storage)
            self.storages[storage.data_ptr()] = (original, original.to("cpu", copy=True))
        copied = self.storages[storage.data_ptr()][1]
        twin = torch.empty(0, dtype=value.dtype)
        return twin.set_(copied.untyped_storage(), value.storage_offset(), value.shape, value.stride())

    def compare(self) -> tuple[int, int]:
        """How many bytes there are in all storages, and how many of them differ now."""
        differing = sum(int((original.cpu() != copied).sum()) for original, copied in self.storages.values())
        return sum(len(copied) for _, copied in self.storages.values()), differing

    def assert_equal(self, what: str) -> None:
        """Every byte of every storage, or an AssertionError that says how many are wrong and where."""
        for original, copied in self.storages.values():
            wrong = (original.cpu() != copied).nonzero().flatten()
            if len(wrong):
                places = wrong[:8].tolist()
                raise AssertionError(f"{what}: {len(wrong)} of {len(copied)} bytes differ, first at {places}")


def run_both(operator: str, *args: Any, given: Sequence[Any] | None = None) -> Twins:
    """Run the reference on twins of `args` and the operator on `args`, or on what it is `given` instead of them."""
    twins = Twins()
    expected = [twins(arg) for arg in args]
    device = next(arg.device.type for arg in args if isinstance(arg, Tensor))
    reference: Callable[..., None] = globals()[operator]
    reference(*expected, device=device)
    getattr(ops, operator)(*(args if given is None else given))
    return twins


def check(operator: str, *args: Any) -> None:
    """Run an operator and its reference on equal memory and compare every byte."""
    run_both(operator, *args).assert_equal(operator)


def check_refused(operator: str, args: Sequence[Any], message: str) -> None:
    """The operator raises a RuntimeError with `message` in it and has changed no byte."""
    twins = Twins()
    for arg in args:
        twins(arg)
    try:
        getattr(ops, operator)(*args)
    except RuntimeError as error:
        if message not in str(error):
            raise AssertionError(f"{operator} says {error}, not {message!r}") from error
    else:
        raise AssertionError(f"{operator} took it; expected an error with {message!r}")
    twins.assert_equal(operator)


# -- inputs ------------------------------------------------------------------------------------------------------------


def make_staging(capacity: int, num_heads: int, head_size: int, dtype: torch.dtype, device: str) -> tuple[Tensor, ...]:
    """Poisoned staging_key, staging_value and staging_slots, and metadata of an empty window."""
    return (
        poison((capacity, num_heads, head_size), dtype, device, 11),
        poison((capacity, num_heads, head_size), dtype, device, 12),
        poison((capacity,), torch.int64, device, 13),
        torch.zeros(2, dtype=torch.int32, device=device),
    )


def poison(shape: Sequence[int], dtype: torch.dtype, device: str, seed: int = 0) -> Tensor:
    """Memory of random bytes, NaN patterns among them."""
    generator = torch.Generator().manual_seed(seed)
    count = int(np.prod(shape)) * dtype.itemsize
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator).to(device).view(dtype).view(*shape)


def make_cache(
    layout: str, num_blocks: int, block_size: int, num_heads: int, head_size: int, dtype: torch.dtype, device: str
) -> tuple[Tensor, Tensor]:
    """Poisoned key and value caches, each [num_blocks, block_size, num_heads, head_size] by stride."""
    if layout == "NHD":
        shape = (num_blocks, block_size, num_heads, head_size)
        return poison(shape, dtype, device, 1), poison(shape, dtype, device, 2)
    if layout == "HND":
        shape = (num_blocks, num_heads, block_size, head_size)
        return poison(shape, dtype, device, 1).transpose(1, 2), poison(shape, dtype, device, 2).transpose(1, 2)
    if layout == "vllm HND":
        kv_cache = poison((num_blocks, num_heads, block_size, 2 * head_size), dtype, device, 1)
    else:
        kv_cache = poison((num_blocks, block_size, num_heads, 2 * head_size), dtype, device, 1).transpose(1, 2)
    key_cache, value_cache = kv_cache.transpose(1, 2).split(head_size, -1)
    return key_cache, value_cache


def make_vectors(
    form: str, tokens: int, num_heads: int, head_size: int, dtype: torch.dtype, device: str, seed: int = 3
) -> tuple[Tensor, Tensor]:
    """Keys and values of all sizes, special values among them: 'packed', or strided as a 'qkv' projection leaves them."""
    generator = torch.Generator().manual_seed(seed)
    width = {"packed": 2, "qkv": 4, "heads first": 2}[form]  # qkv: the query heads come first and stay unused
    numbers = torch.randn(tokens, width * num_heads, head_size, generator=generator)
    numbers *= 10.0 ** (torch.rand(numbers.shape, generator=generator) * 12 - 7)
    special = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan"), 448.0, -460.0, 1e-9, -1e-9, 6e4])
    places = torch.randperm(numbers.numel(), generator=generator)[: numbers.numel() // 8]
    numbers.view(-1)[places] = special[torch.arange(len(places)) % len(special)]
    vectors = numbers.to(dtype).to(device)
    key, value = vectors[:, -2 * num_heads : -num_heads], vectors[:, -num_heads:]
    if form == "packed":
        return key.contiguous(), value.contiguous()
    if form == "heads first":
        return key.transpose(0, 1).contiguous().transpose(0, 1), value.transpose(0, 1).contiguous().transpose(0, 1)
    return key, value


def make_scale(kind: str, tokens: int, num_heads: int, device: str, seed: int) -> Tensor | None:
    """None, or fp32 scales: one 'scalar', one a 'token', one a 'head'."""
    if kind == "none":
        return None
    shape = {"scalar": (1,), "token": (tokens, 1), "head": (1, num_heads)}[kind]
    return (torch.rand(shape, generator=torch.Generator().manual_seed(seed)) * 2 + 0.01).to(device)


def make_slots(tokens: int, num_slots: int, device: str, seed: int = 5, padding: bool = True) -> Tensor:
    """int64 [tokens], different slots in no order, some of them -1."""
    generator = torch.Generator().manual_seed(seed)
    slots = torch.randperm(num_slots, generator=generator)[:tokens]
    if padding:
        slots[torch.rand(tokens, generator=generator) < 0.25] = -1
        slots[-1] = -1
    return slots.to(device)


def make_mask(acceptance: str, tokens: int, device: str) -> Tensor:
    """bool [tokens]: no row, all, a prefix, or every third."""
    index = torch.arange(tokens)
    accepted = {"none": index < 0, "full": index >= 0, "prefix": index < tokens // 2, "sparse": index % 3 == 1}
    return accepted[acceptance].to(device)


def cache_dtype_of(dtype: torch.dtype, kv_cache_dtype: str) -> torch.dtype:
    return dtype if kv_cache_dtype == "auto" else torch.uint8


@dataclass
class Pool:
    """The arguments of the all-layer operators, poisoned. `layout` names the order in memory, outermost first."""

    layout: str
    num_layers: int
    num_blocks: int
    num_heads: int
    block_size: int
    slot_bytes: int
    device: str
    element_size: int = 0  # of a packed cache; 0: not packed
    mini_blocks: int = 2

    def __post_init__(self) -> None:
        sizes = {"L": self.num_layers, "B": self.num_blocks, "H": self.num_heads, "N": self.block_size}
        bytes_of, stride = {}, self.slot_bytes
        for dim in reversed(self.layout):
            bytes_of[dim] = stride
            stride *= sizes[dim]
        front = 3 * self.slot_bytes  # memory before the first layer that is nobody's
        self.pool = poison((front + stride,), torch.uint8, self.device, 7)
        self.layer_offsets = (front + bytes_of["L"] * torch.arange(self.num_layers)).to(self.device)
        self.cache_strides = (bytes_of["B"], bytes_of["H"], bytes_of["N"])
        shape = (self.num_layers, self.mini_blocks, self.num_heads, self.block_size, self.slot_bytes)
        self.rows = poison(shape, torch.uint8, self.device, 8)
        if "NH" in self.layout:  # a mini-cache in the order of the pool
            self.rows = poison(
                (self.num_layers, self.mini_blocks, self.block_size, self.num_heads, self.slot_bytes),
                torch.uint8,
                self.device,
                8,
            ).transpose(2, 3)
        self.packing = None
        if self.element_size:
            elements = self.slot_bytes // self.element_size
            index = torch.randperm(self.block_size * elements, generator=torch.Generator().manual_seed(9))
            self.packing = index.view(self.block_size, elements).to(torch.int32)
        self.counts = torch.tensor([5, 7, 11, 13, 17], device=self.device)

    def arguments(self, slots: Tensor) -> tuple[Any, ...]:
        return self.pool, self.layer_offsets, self.cache_strides, slots, self.packing, self.rows


def make_window(
    queries: Sequence[int], num_rejected: Sequence[int], num_slots: int, device: str, seed: int = 5, width: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """slots, num_rejected and kept of requests with `queries` held rows each, poison in kept.

    The slots are different ones in no order, some of them -1, to the right of a window `width` rows wide (0: as wide
    as the longest query).
    """
    drawn = make_slots(sum(queries) + 1, num_slots, "cpu", seed).tolist()
    slots = torch.full((len(queries), width or max(queries)), -1)
    for request, rows in enumerate(queries):
        slots[request, slots.shape[1] - rows :] = torch.tensor([drawn.pop(0) for _ in range(rows)])
    rejected = torch.tensor(num_rejected, dtype=torch.int32)
    return slots.to(device), rejected.to(device), poison((len(queries),), torch.int32, device, 10)


def make_batch(
    queries: Sequence[int], num_logits: Sequence[int], num_slots: int, device: str, seed: int = 5, padding: int = 3
) -> tuple[Tensor, Tensor, Tensor]:
    """query_start_loc, cu_num_logits and slot_mapping of a batch, padded as vLLM pads: slots of -1 behind the last row.

    Some rows inside have slot -1 too.
    """
    starts, logits = (torch.tensor([0, *numbers]).cumsum(0).int() for numbers in (queries, num_logits))
    slot_mapping = torch.full((sum(queries) + padding,), -1)
    slot_mapping[: sum(queries)] = make_slots(sum(queries) + 1, num_slots, "cpu", seed)[:-1]
    return torch.cat([starts, starts[-1:]]).to(device), logits.to(device), slot_mapping.to(device)


def make_targets(requests: int, width: int, tokens: int, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Poisoned slots [requests, width], staging_rows and page_slots [tokens] for `open_window`."""
    shapes = ((requests, width), (tokens,), (tokens,))
    slots, staging_rows, page_slots = (poison(shape, torch.int64, device, 14) for shape in shapes)
    return slots, staging_rows, page_slots
