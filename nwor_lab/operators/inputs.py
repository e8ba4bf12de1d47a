# SPDX-License-Identifier: Apache-2.0
"""Inputs of the operators of `nwor.ops`, their memory poisoned: random bytes, NaN patterns among them."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

LAYOUTS = ("NHD", "HND", "vllm HND", "vllm NHD")
"""Of one layer's cache."""
ORDERS = ("LBNH", "LBHN", "BLHN")
"""Of a pool: layers, blocks, heads and slots of a block, outermost first."""
CACHE_DTYPES = ("auto", "fp8_e4m3", "fp8_e5m2")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SHAPES = ((2, 8, 16), (4, 16, 4), (3, 5, 8), (1, 128, 16))
"""Heads, head size, block size: few elements for a warp, as many heads as slots in a block, rows of no whole words."""


def poison(shape: Sequence[int], dtype: torch.dtype, device: str, seed: int = 0) -> Tensor:
    """Memory of random bytes, NaN patterns among them."""
    generator = torch.Generator().manual_seed(seed)
    count = int(np.prod(shape)) * dtype.itemsize
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator).to(device).view(dtype).view(*shape)


def poison_in_order(
    order: str, sizes: Mapping[str, int], width: int, dtype: torch.dtype, device: str, seed: int, view: str
) -> Tensor:
    """Poison of dimensions `order` in memory, outermost first, each of `sizes`, and seen in the order `view`; rows of
    `width` elements come last in both."""
    memory = poison([*(sizes[dim] for dim in order), width], dtype, device, seed)
    return memory.permute(*(order.index(dim) for dim in view), len(order))


def make_staging(
    capacity: int, num_heads: int, head_size: int, dtype: torch.dtype, device: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Poisoned staging_key, staging_value and staging_slots, and metadata of an empty window."""
    return (
        poison((capacity, num_heads, head_size), dtype, device, 11),
        poison((capacity, num_heads, head_size), dtype, device, 12),
        poison((capacity,), torch.int64, device, 13),
        torch.zeros(2, dtype=torch.int32, device=device),
    )


def make_cache(
    layout: str, num_blocks: int, block_size: int, num_heads: int, head_size: int, dtype: torch.dtype, device: str
) -> tuple[Tensor, Tensor]:
    """Poisoned key and value caches, each [num_blocks, block_size, num_heads, head_size] by stride."""
    sizes, order = {"B": num_blocks, "N": block_size, "H": num_heads}, "BHN" if layout.endswith("HND") else "BNH"
    if layout.startswith("vllm"):
        keys, values = poison_in_order(order, sizes, 2 * head_size, dtype, device, 1, "BNH").split(head_size, -1)
        return keys, values
    keys, values = (poison_in_order(order, sizes, head_size, dtype, device, seed, "BNH") for seed in (1, 2))
    return keys, values


def make_vectors(
    form: str, tokens: int, num_heads: int, head_size: int, dtype: torch.dtype, device: str, seed: int = 3
) -> tuple[Tensor, Tensor]:
    """Keys and values of all sizes, special values among them: 'packed', strided as a 'qkv' projection leaves them,
    or 'heads first' in memory."""
    generator = torch.Generator().manual_seed(seed)
    width = 4 if form == "qkv" else 2  # qkv: the query heads come first and stay unused
    numbers = torch.randn(tokens, width * num_heads, head_size, generator=generator)
    numbers *= 10.0 ** (torch.rand(numbers.shape, generator=generator) * 12 - 7)
    special = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan"), 448.0, -460.0, 1e-9, -1e-9, 6e4])
    places = torch.randperm(numbers.numel(), generator=generator)[: numbers.numel() // 8]
    numbers.view(-1)[places] = special[torch.arange(len(places)) % len(special)]
    key, value = numbers.to(dtype).to(device)[:, -2 * num_heads :].split(num_heads, dim=1)
    if form == "packed":
        return key.contiguous(), value.contiguous()
    if form == "heads first":
        return key.transpose(0, 1).contiguous().transpose(0, 1), value.transpose(0, 1).contiguous().transpose(0, 1)
    return key, value


def make_slots(tokens: int, num_slots: int, device: str, seed: int = 5) -> Tensor:
    """int64 [tokens], different slots in no order, some of them -1: a slice of a longer buffer."""
    generator = torch.Generator().manual_seed(seed)
    slots = torch.randperm(num_slots, generator=generator)[:tokens]
    slots[torch.rand(tokens, generator=generator) < 0.25] = -1
    return within(slots, device)


def within(tensor: Tensor, device: str) -> Tensor:
    """The same numbers on a device, as a slice of a longer poisoned buffer, as vLLM's persistent ones are."""
    buffer = poison((len(tensor) + 5, *tensor.shape[1:]), tensor.dtype, device, 16)
    return buffer[3 : 3 + len(tensor)].copy_(tensor)


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
        order = "LBNH" if "NH" in self.layout else "LBHN"  # the mini-cache's blocks are those of the pool
        mini = sizes | {"B": self.mini_blocks}
        self.rows = poison_in_order(order, mini, self.slot_bytes, torch.uint8, self.device, 8, "LBHN")
        self.packing = None
        if self.element_size:
            elements = self.slot_bytes // self.element_size
            index = torch.randperm(self.block_size * elements, generator=torch.Generator().manual_seed(9))
            self.packing = index.view(self.block_size, elements).to(torch.int32)
        self.counts = torch.tensor([5, 7, 11, 13, 17, 0], device=self.device)

    def arguments(self, slots: Tensor) -> tuple[Any, ...]:
        return self.pool, self.layer_offsets, self.cache_strides, slots, self.packing, self.rows


def make_window(
    num_drafts: Sequence[int], num_rejected: Sequence[int], num_slots: int, device: str, seed: int = 5, width: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """slots, num_drafts, num_rejected and kept of a window, poison in kept, each a slice of a longer buffer.

    The slots are different ones in no order, some of them -1, in rows `width` wide (0: as wide as the most drafts).
    """
    drawn = make_slots(sum(num_drafts), num_slots, "cpu", seed).split(list(num_drafts))
    slots = torch.full((len(num_drafts), width or max(num_drafts)), -1)
    for row, own in zip(slots, drawn, strict=False):
        row[: len(own)] = own
    numbers = *map(torch.tensor, (num_drafts, num_rejected)), poison((len(num_drafts),), torch.int32, "cpu", 10)
    return within(slots, device), *(within(each.int(), device) for each in numbers)


def make_batch(
    queries: Sequence[int], num_logits: Sequence[int], num_slots: int, device: str, seed: int = 5, padding: int = 3
) -> tuple[Tensor, Tensor, Tensor]:
    """query_start_loc, cu_num_logits and slot_mapping of a batch, padded as vLLM pads: slots of -1 behind the last row.

    Some rows inside have slot -1 too.
    """
    starts, logits = (torch.tensor([0, *numbers]).cumsum(0).int() for numbers in (queries, num_logits))
    slot_mapping = torch.full((sum(queries) + padding,), -1)
    slot_mapping[: sum(queries)] = make_slots(sum(queries), num_slots, "cpu", seed)
    return torch.cat([starts, starts[-1:]]).to(device), logits.to(device), slot_mapping.to(device)


def make_targets(requests: int, width: int, tokens: int, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Poisoned slots [requests, width], num_drafts [requests], staging_rows and page_slots [tokens]."""
    slots, staging_rows, page_slots = (
        poison(shape, torch.int64, device, 14) for shape in ((requests, width), (tokens,), (tokens,))
    )
    return slots, poison((requests,), torch.int32, device, 15), staging_rows, page_slots


def calls(
    device: str, seed: int = 0, *, dtype: torch.dtype = torch.bfloat16, cache: str = "fp8", layout: str = "NHD",
    form: str = "qkv", scale: str = "scalar", tokens: int = 5, heads: int = 4, head_size: int = 16, block_size: int = 4,
    order: str = "LBHN", element_size: int = 0, padding: int = 0, requests: int = 3, stages: bool = True,
) -> dict[str, tuple[Any, ...]]:  # fmt: skip
    """Arguments of a call of every operator but `verify_attention`, by its name.

    The seed draws their contents: numbers, slots, accepted rows, what is staged, drafts and logits of requests. Shapes
    and dtypes are those that the other arguments say, so that two seeds give tensors that can be copied into each
    other. Of keys and values there are `padding` rows more than slots, as in a batch that vLLM pads; `scale` is none,
    one, or one a token or a head; `stages` says whether `open_window` fills what only mode `stage` needs.
    """
    rng, stored, blocks, width = random.Random(seed), cache_dtype_of(dtype, cache), 8, 5
    rows = tokens + padding
    key, value = make_vectors(form, rows, heads, head_size, dtype, device, seed)
    shape = {"none": None, "scalar": (1,), "token": (rows, 1), "head": (1, heads)}[scale]
    numbers = torch.Generator().manual_seed(seed)
    scales = [shape and (torch.rand(shape, generator=numbers) * 2 + 0.01).to(device) for _ in range(2)]
    slots, share = make_slots(tokens, blocks * block_size, device, seed), rng.choice((0, 0.5, 0.5, 1))
    mask = within(torch.tensor([rng.random() < share for _ in range(tokens)], dtype=torch.bool), device)
    caches = make_cache(layout, blocks, block_size, heads, head_size, stored, device)
    filling, staged = (make_staging(tokens + 1, heads, head_size, stored, device) for _ in range(2))
    filling[3][0] = rng.choice((0, 0, 1, tokens + 1))  # of tokens + 1: what is left may be too little
    filled = slots[slots >= 0]
    staged[2][: len(filled)] = filled
    staged[3][0], overflowed = len(filled), rng.random() < 0.1
    filling[3][1] = staged[3][1] = overflowed
    accepted = torch.tensor([rng.randint(0, len(filled))], dtype=torch.int32, device=device)

    pool = Pool(order, 2, blocks, heads, block_size, 2 * head_size, device, element_size, mini_blocks=blocks)
    num_drafts = [rng.randint(1, width) for _ in range(requests)]
    rejected = [rng.randint(0, drafts + 1) for drafts in num_drafts]
    window = make_window(num_drafts, rejected, blocks * block_size, device, seed, width)
    where, log = pool.arguments(window[0]), torch.empty_like(pool.rows).copy_(pool.rows.flip(0))
    queries = [rng.randint(2, 5), *(rng.randint(0, 7) for _ in range(requests))]  # the first is a verify step
    logits = [queries[0], *(rng.choice((0, 1, query, query, rng.randint(0, 8))) for query in queries[1:])]
    batch = make_batch(queries, logits, 64, device, seed, padding=5 + 7 * requests - sum(queries))
    routes = make_targets(requests + 3, width, len(batch[2]) + padding, device)
    return {
        "log_cache_slots": (*caches, slots, *make_staging(tokens, heads, head_size, stored, device)[:2]),
        "stage_kv_cache": (key, value, slots, *filling, cache, *scales),
        "commit_staged_kv_cache": (*staged, *caches, accepted),
        "commit_draft_layer": (key, value, *caches, slots, mask, cache, *scales),
        "restore_rejected_drafts": (*staged[:2], slots, mask, *caches),
        "open_window": (*batch, *routes[:2], *(routes[2:] if stages else (None, None)), pool.counts),
        "log_all_layers": (*where[:5], log),
        "restore_all_layers": (*where, *window[1:], pool.counts),
        "commit_all_layers": (*where, *window[1:], pool.counts),
    }


def draw(device: str, seed: int) -> dict[str, tuple[Any, ...]]:
    """`calls` of drawn dtypes, layouts, shapes and strides."""
    rng = random.Random(seed)
    heads, head_size, block_size = rng.choice(SHAPES)
    order = rng.choice(ORDERS)
    sizes = [size for size in (1, 2, 4) if 2 * head_size % size == 0]
    return calls(
        device, seed, cache=rng.choice(CACHE_DTYPES), layout=rng.choice(LAYOUTS), order=order,
        heads=heads, head_size=head_size, block_size=block_size, tokens=rng.randint(0, 12), dtype=rng.choice(DTYPES),
        form=rng.choice(("packed", "qkv", "heads first")), scale=rng.choice(("none", "scalar", "token", "head")),
        element_size=rng.choice((0, *sizes)) if device == "cpu" and order != "LBNH" else 0, padding=rng.choice((0, 2)),
        requests=rng.randint(0, 6), stages=rng.random() < 0.5,
    )  # fmt: skip
