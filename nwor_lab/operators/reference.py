# SPDX-License-Identifier: Apache-2.0
"""Every operator of `nwor.ops` once more in plain Python, byte by byte, and the comparison of the two on equal memory.

Functions named like operators take one namespace: the operator's arguments on the CPU by their names in `nwor.ops`,
which documents them, and `device`, "cpu" or "cuda", whose writer's fp8 bytes are wanted.
"""

import inspect
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nwor import ops

FP8 = {"fp8": "e4m3", "fp8_e4m3": "e4m3", "fp8_e5m2": "e5m2"}
MAGNITUDES = {
    "e4m3": torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).double().numpy(),
    "e5m2": torch.arange(0x7C, dtype=torch.uint8).view(torch.float8_e5m2).double().numpy(),
}
"""The finite non-negative numbers of each fp8 format, by their code."""


# -- numbers -----------------------------------------------------------------------------------------------------------


def quantise(numbers: Tensor, scale: float, fmt: str, device: str) -> Tensor:
    """fp8 codes of `numbers` as vLLM's cache writer of `device` makes them (`kernels/quant.h`), uint8."""
    values, table, scale32 = numbers.to(torch.float32).numpy(), MAGNITUDES[fmt], np.float32(scale)
    with np.errstate(all="ignore"):
        scaled = values / scale32 if device == "cuda" else values * (np.float32(1) / scale32)
        magnitude = np.minimum(np.abs(scaled.astype(np.float64)), table[-1])
        if device == "cpu" and fmt == "e4m3":  # that writer passes through fp32's subnormals, which round
            magnitude = (magnitude.astype(np.float32) * np.float32(2.0**-120)).astype(np.float64) * 2.0**120
    code = np.searchsorted(table, magnitude, side="right") - 1
    if device == "cuda":
        above = np.minimum(code + 1, len(table) - 1)
        to_below, to_above = magnitude - table[code], table[above] - magnitude
        code = np.where((to_above < to_below) | ((to_above == to_below) & (code % 2 == 1)), above, code)
    negative = np.signbit(scaled) & ((scaled != 0) | (device == "cuda"))
    nan = 0x7F if device == "cuda" else len(table) - 1
    return torch.from_numpy(np.where(np.isnan(scaled), nan, code | (negative * 0x80)).astype(np.uint8))


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


# -- one layer ---------------------------------------------------------------------------------------------------------


def cache_rows(a: SimpleNamespace, token: int) -> list[Tensor]:
    """What a cache holds of a token's key and value, each uint8 [H, bytes]."""
    if a.kv_cache_dtype == "auto":
        return [raw(a.key[token]), raw(a.value[token])]
    fmt, rows = FP8[a.kv_cache_dtype], []
    for vectors, scale in ((a.key[token], a.k_scale), (a.value[token], a.v_scale)):
        heads = [quantise(v, scale_of(scale, token, head), fmt, a.device) for head, v in enumerate(vectors)]
        rows.append(torch.stack(heads))
    return rows


def slot_rows(a: SimpleNamespace, slot: int) -> list[Tensor]:
    """The bytes of a slot in the key cache and in the value cache, each uint8 [H, bytes]."""
    block, offset = divmod(slot, a.key_cache.shape[1])
    return [raw(cache)[block, offset] for cache in (a.key_cache, a.value_cache)]


def copy(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source)


def stage_kv_cache(a: SimpleNamespace) -> None:
    slots = a.slot_mapping.tolist()
    staged_count, error_flag = a.staging_metadata.tolist()
    if error_flag or staged_count + sum(slot >= 0 for slot in slots) > len(a.staging_slots):
        a.staging_metadata[1] = 1
        return
    for token, slot in enumerate(slots):
        if slot >= 0:
            copy(cache_rows(a, token), [raw(a.staging_key)[staged_count], raw(a.staging_value)[staged_count]])
            a.staging_slots[staged_count] = slot
            staged_count += 1
    a.staging_metadata[0] = staged_count


def commit_staged_kv_cache(a: SimpleNamespace) -> None:
    for row in range(0 if a.staging_metadata[1] else int(a.accepted_len)):
        copy([raw(a.staging_key)[row], raw(a.staging_value)[row]], slot_rows(a, int(a.staging_slots[row])))


def commit_draft_layer(a: SimpleNamespace) -> None:
    for token, slot in enumerate(a.slot_mapping.tolist()):
        if slot >= 0 and a.accepted_mask[token]:
            copy(cache_rows(a, token), slot_rows(a, slot))


def log_cache_slots(a: SimpleNamespace) -> None:
    for token, slot in enumerate(a.slot_mapping.tolist()):
        if slot >= 0:
            copy(slot_rows(a, slot), [raw(a.log_key)[token], raw(a.log_value)[token]])


def restore_rejected_drafts(a: SimpleNamespace) -> None:
    for token, slot in enumerate(a.slot_mapping.tolist()):
        if slot >= 0 and not a.accepted_mask[token]:
            copy([raw(a.log_key)[token], raw(a.log_value)[token]], slot_rows(a, slot))


# -- all layers --------------------------------------------------------------------------------------------------------


def open_window(a: SimpleNamespace) -> None:
    starts, logits, width = a.query_start_loc.tolist(), a.cu_num_logits.tolist(), a.slots.shape[1]
    batch, stages = a.slot_mapping.tolist()[: starts[len(logits) - 1]], a.staging_rows is not None
    a.slots.fill_(-1)
    a.num_drafts.zero_()
    if stages:
        a.staging_rows.fill_(-1)
        a.page_slots.fill_(-1)
        a.page_slots[: len(batch)] = torch.tensor(batch, dtype=torch.int64)
    for request in range(len(logits) - 1):
        tokens = range(starts[request], starts[request + 1])
        n = logits[request + 1] - logits[request]
        drafts = n - 1
        if drafts <= 0:
            continue
        if drafts > min(width, len(tokens)) or (stages and n != len(tokens)):
            a.counts[4] += 1
            continue
        a.num_drafts[request] = drafts
        a.counts[2] += 1
        a.counts[3] += drafts
        for draft, token in enumerate(tokens[len(tokens) - drafts :]):
            a.slots[request, draft] = max(batch[token], -1)
            if stages:
                a.staging_rows[token], a.page_slots[token] = request * width + draft, -1


def slot_in_chunk(a: SimpleNamespace, offset: int, token_stride: int) -> Tensor:
    """Where the bytes of in-block offset `offset` lie in their (block, head) chunk, in the order of the slot's own."""
    slot_bytes = a.rows.shape[4]
    if a.packing is None:
        return offset * token_stride + torch.arange(slot_bytes)
    size = slot_bytes // a.packing.shape[1]
    return (a.packing[offset].long()[:, None] * size + torch.arange(size)).flatten()


def move_row(a: SimpleNamespace, request: int, draft: int, into_pool: bool) -> None:
    """Copy one row of all layers and heads between the pool and the mini-cache."""
    slot, row, block_size = int(a.slots[request, draft]), request * a.slots.shape[1] + draft, a.rows.shape[3]
    if a.logged is not None:
        row = request * a.logged.shape[1] + slot % a.logged.shape[1]
    (page, offset), (block, place) = divmod(slot, block_size), divmod(row, block_size)
    memory = torch.empty(0, dtype=torch.uint8).set_(a.rows.untyped_storage())
    of_layer, of_block, of_head, of_token, _ = a.rows.stride()
    for layer, first in enumerate(a.layer_offsets.tolist()):
        for head in range(a.rows.shape[2]):
            in_pool = first + page * a.cache_strides[0] + head * a.cache_strides[1]
            in_pool = in_pool + slot_in_chunk(a, offset, a.cache_strides[2])
            in_rows = a.rows.storage_offset() + layer * of_layer + block * of_block + head * of_head
            in_rows = in_rows + slot_in_chunk(a, place, of_token)
            if into_pool:
                a.pool[in_pool] = memory[in_rows]
            else:
                memory[in_rows] = a.pool[in_pool]


def log_all_layers(a: SimpleNamespace) -> None:
    for request, slots in enumerate(a.slots.tolist()):
        there = a.logged[request].tolist() if a.logged is not None else []
        for draft, slot in enumerate(slots):
            if slot >= 0 and slot not in there:
                move_row(a, request, draft, into_pool=False)


def restore_all_layers(a: SimpleNamespace) -> None:
    write_back(a, rejected_ones=True)


def commit_all_layers(a: SimpleNamespace) -> None:
    a.logged = None
    write_back(a, rejected_ones=False)


def write_back(a: SimpleNamespace, rejected_ones: bool) -> None:
    """Move the rejected rows, or the kept ones, into the pool; count both, and list them in `logged`."""
    a.kept.zero_()
    for request, slots in enumerate(a.slots.tolist()):
        kept_drafts = int(a.num_drafts[request] - a.num_rejected[request])
        for draft, slot in enumerate(slots):
            if slot < 0:
                continue
            rejected = draft >= kept_drafts
            if rejected == rejected_ones:
                move_row(a, request, draft, into_pool=True)
            a.kept[request] += not rejected
            a.counts[int(rejected)] += 1
            if a.logged is not None:
                a.logged[request, slot % a.logged.shape[1]] = slot if rejected else -1
    if a.published is not None:
        a.published[: len(a.counts)] = a.counts
        both = torch.stack([a.kept, a.num_drafts], dim=1).contiguous()
        a.published[len(a.counts) :][: len(both)] = both.view(torch.int64)[:, 0]


# -- side by side ------------------------------------------------------------------------------------------------------


class Twins:
    """Copies of tensors on the CPU that share storages where the originals do."""

    def __init__(self, *tensors: Any) -> None:
        self.storages: dict[int, tuple[Tensor, Tensor]] = {}  # address: (original bytes, copied bytes)
        self.copies = [self.copy(tensor) for tensor in tensors]

    def copy(self, value: Any) -> Any:
        """The twin of a tensor; anything else as it is."""
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
        """How many bytes there are in all storages, written or not, and how many of them differ now."""
        differing = sum(int((original.cpu() != copied).sum()) for original, copied in self.storages.values())
        return sum(len(copied) for _, copied in self.storages.values()), differing

    def assert_equal(self, what: str) -> None:
        compared, differing = self.compare()
        assert not differing, f"{what}: {differing} of {compared} bytes differ"


def run(operator: str, args: Sequence[Any], device: str) -> None:
    """The operator in plain Python, on `args` of the CPU; what is left out has its default in `nwor.ops`."""
    given = inspect.signature(getattr(ops, operator)).bind(*args)
    given.apply_defaults()
    globals()[operator](SimpleNamespace(**given.arguments, device=device))


def run_both(operator: str, *args: Any, given: Sequence[Any] | None = None) -> Twins:
    """Run the reference on twins of `args` and the operator on `args`, or on what it is `given` instead of them."""
    twins = Twins(*args)
    run(operator, twins.copies, next(arg.device.type for arg in args if isinstance(arg, Tensor)))
    getattr(ops, operator)(*(args if given is None else given))
    return twins
