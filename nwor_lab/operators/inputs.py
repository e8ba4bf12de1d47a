# SPDX-License-Identifier: Apache-2.0
"""Inputs of the operators of `nwor.ops`, their memory poisoned: random bytes, NaN patterns among them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

ACCEPTANCE = ("none", "full", "prefix", "sparse")
LAYOUTS = ("NHD", "HND", "vllm HND", "vllm NHD")


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
    """Keys and values of all sizes, special values among them:
    'packed', or strided as a 'qkv' projection leaves them."""
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
    num_drafts: Sequence[int], num_rejected: Sequence[int], num_slots: int, device: str, seed: int = 5, width: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """slots, num_drafts, num_rejected and kept of a window, poison in kept.

    The slots are different ones in no order, some of them -1, in rows `width` wide (0: as wide as the most drafts).
    """
    drawn = make_slots(sum(num_drafts) + 1, num_slots, "cpu", seed).tolist()
    slots = torch.full((len(num_drafts), width or max(num_drafts)), -1)
    for request, drafts in enumerate(num_drafts):
        slots[request, :drafts] = torch.tensor([drawn.pop(0) for _ in range(drafts)])
    counted, rejected = (torch.tensor(numbers, dtype=torch.int32).to(device) for numbers in (num_drafts, num_rejected))
    return slots.to(device), counted, rejected, poison((len(num_drafts),), torch.int32, device, 10)


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


def make_targets(requests: int, width: int, tokens: int, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Poisoned slots [requests, width], num_drafts [requests], staging_rows and page_slots [tokens]."""
    slots, staging_rows, page_slots = (
        poison(shape, torch.int64, device, 14) for shape in ((requests, width), (tokens,), (tokens,))
    )
    return slots, poison((requests,), torch.int32, device, 15), staging_rows, page_slots
