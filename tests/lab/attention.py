# SPDX-License-Identifier: Apache-2.0
"""Batches of one attention layer over poisoned pages, with the same attention in float64; `Problem` is a CPU's."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import nan
from typing import Any

import torch
from torch import Tensor

from nwor import ops
from nwor.vllm.self_check import attend
from tests.nwor.paged import random_packing

FP8 = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
# Half a unit in the last place of what the operator returns, and some fp32 noise of its sums.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-8, torch.float16: 2**-10}


def identity_packing(block_size: int, width: int) -> Tensor:
    return torch.arange(block_size * width, dtype=torch.int32).view(block_size, width)


@dataclass
class Batch:
    """A batch of `requests`, (prefix, query rows) each, their prefixes in pages at random places.

    Everything that is nobody's is `poison`, and so is what lies below a sliding window, whose whole blocks vLLM frees:
    the table names one block for all of them. The output is NaN, and the table's ends lead out of the cache. The query,
    keys and values are views of the qkv projection, as in vLLM: not dense over tokens.

    poison: NaN or infinity; in a cache without infinity its largest number.
    """

    requests: Sequence[tuple[int, int]]
    dtype: torch.dtype = torch.float32
    kv_cache_dtype: str = "auto"
    num_heads: int = 4
    num_kv_heads: int = 2
    head_size: int = 64
    block_size: int = 16
    softcap: float = 0.0
    sliding_window: int = 0
    alibi: bool = False
    with_sinks: bool = False
    packing: Tensor | None = None
    layout: str = "HND"
    poison: float = nan
    seed: int = 0

    def __post_init__(self) -> None:
        self.generator = torch.Generator().manual_seed(self.seed)
        n, d, h, hq = self.block_size, self.head_size, self.num_kv_heads, self.num_heads
        self.prefixes, self.tails = (list(numbers) for numbers in zip(*self.requests, strict=True))
        self.fp8 = self.kv_cache_dtype != "auto"
        self.cache_dtype = FP8[self.kv_cache_dtype] if self.fp8 else self.dtype
        tokens = sum(self.tails)
        self.query_start_loc = torch.tensor([0, *self.tails]).cumsum(0).int()
        self.seq_lens = torch.tensor([prefix + tail if tail else 0 for prefix, tail in self.requests]).int()
        pages = [-(-(prefix + tail) // n) for prefix, tail in self.requests]
        *blocks, spare = torch.randperm(sum(pages) + 3, generator=self.generator).split([*pages, 3])
        self.block_table = torch.full((len(pages), max(pages) + 2), 2**30, dtype=torch.int32)
        self.kv_cache, self.staging = self.poisoned(sum(pages) + 3), self.poisoned(-(-max(tokens, 1) // n) + 1)
        self.slots, self.prefix_rows = [], []
        for request, (table, (prefix, tail)) in enumerate(zip(blocks, self.requests, strict=True)):
            self.block_table[request, : len(table)] = table.int()
            positions = torch.arange(prefix + tail)
            self.slots.append(table[positions // n] * n + positions % n)
            rows = torch.randn(prefix, h, 2 * d, generator=self.generator).clamp(-4, 4).to(self.cache_dtype)
            below = self.below_window(prefix)
            self.write(self.kv_cache, self.slots[-1][below:prefix], rows[below:])
            self.block_table[request, : below // n] = spare[0]
            self.prefix_rows.append(rows)
        self.qkv = torch.randn(tokens, hq + 2 * h, d, generator=self.generator).to(self.dtype)
        self.query, self.key, self.value = self.qkv.split([hq, h, h], dim=1)
        self.output = torch.full((tokens, hq, d), float("nan"), dtype=self.dtype)
        self.scale = d**-0.5
        self.alibi_slopes = torch.rand(hq, generator=self.generator) if self.alibi else None
        self.sinks = torch.randn(hq, generator=self.generator).to(self.dtype) if self.with_sinks else None

    def below_window(self, prefix: int) -> int:
        """How many positions no row sees of a request whose rows begin at `prefix`."""
        return max(prefix - self.sliding_window + 1, 0) if self.sliding_window > 0 else 0

    def poisoned(self, blocks: int) -> Tensor:
        """A cache [blocks, H, N, 2 * D] of `poison`."""
        sizes = {"B": blocks, "H": self.num_kv_heads, "N": self.block_size}
        order = {"NHD": "BNH", "HND": "BHN"}[self.layout]
        memory = torch.full([*(sizes[dim] for dim in order), 2 * self.head_size], self.poison).to(self.cache_dtype)
        memory = memory.view(torch.uint8) if self.fp8 else memory
        return memory.permute(*(order.index(dim) for dim in "BHN"), 3)

    def write(self, cache: Tensor, slots: Tensor, rows: Tensor) -> None:
        """Rows [T, H, 2 * D] of the cache's element size to their slots."""
        rows, block, offset = rows.to(cache.device).view(cache.dtype), slots // self.block_size, slots % self.block_size
        if self.packing is None:
            cache[block, :, offset] = rows
        else:
            heads = torch.arange(self.num_kv_heads)[None, :, None]
            cache.flatten(2)[block[:, None, None], heads, self.packing[offset].long()[:, None]] = rows

    def attend(self, request: int, query: Tensor, tail: Tensor, k_scale: float, v_scale: float) -> Tensor:
        """[T, Hq, D] of a request's window, float64: of its query, and of rows [T, H, 2 * D] behind its prefix."""
        rows = torch.cat([self.prefix_rows[request].cpu().double(), tail.double()])
        return attend(
            query.cpu().double(), rows, self.prefixes[request], self.scale, self.softcap, self.sliding_window,
            k_scale, v_scale, *(None if given is None else given.cpu() for given in (self.alibi_slopes, self.sinks)),
        )  # fmt: skip


@dataclass
class Problem(Batch):
    """Windows for the CPU attention, of the requests in `windows`: the first row of one lies in the pages, behind its
    prefix, and the others in staging. Of other requests it knows no page."""

    head_size: int = 32
    windows: Sequence[bool] | None = None
    k_scale: float = 1.0
    v_scale: float = 1.0

    def __post_init__(self) -> None:
        if self.packing is None:
            self.packing = random_packing(self.block_size, 2 * self.head_size, self.seed)
        super().__post_init__()
        self.windows = self.windows or [True] * len(self.tails)
        self.sinks = None if self.sinks is None else self.sinks.float()
        tails = torch.cat([self.key, self.value], dim=-1).clamp(-3, 3).to(self.cache_dtype).split(self.tails)
        self.rows = [torch.cat(pair) for pair in zip(self.prefix_rows, tails, strict=True)]
        staged = 0
        self.window_start = torch.full((len(tails),), -1, dtype=torch.int32)
        for request, (tail, is_window) in enumerate(zip(tails, self.windows, strict=True)):
            if not is_window:
                self.block_table[request] = 2**30
                continue
            below = self.below_window(self.prefixes[request]) // self.block_size
            self.block_table[request, :below] = -1  # not even named: a CPU reads none of it
            self.write(self.kv_cache, self.slots[request][self.prefixes[request] :][:1], tail[:1])
            self.write(self.staging, torch.arange(staged, staged + len(tail) - 1), tail[1:])
            self.window_start[request] = staged
            staged += len(tail) - 1

    def arguments(self) -> dict[str, Any]:
        """What the operator is given, by name."""
        return {name: getattr(self, name) for name in ops.OPERATORS["verify_attention"]}

    def run(self) -> Tensor:
        ops.verify_attention(**self.arguments())
        return self.output

    def reference(self) -> Tensor:
        """[T, Hq, D] float64; NaN where no window is."""
        expected = torch.full(self.output.shape, float("nan"), dtype=torch.float64)
        for request, prefix in enumerate(self.prefixes):
            if self.windows[request]:
                rows = slice(*self.query_start_loc[request : request + 2].tolist())
                tail = self.rows[request][prefix:]
                expected[rows] = self.attend(request, self.query[rows], tail, self.k_scale, self.v_scale)
        return expected

    def check(self) -> None:
        before = [tensor.view(torch.uint8).clone() for tensor in (self.kv_cache, self.staging)]
        output, tolerance = self.run(), TOLERANCE[self.dtype]
        torch.testing.assert_close(output.double(), self.reference(), rtol=tolerance, atol=2e-6, equal_nan=True)
        for tensor, old in zip((self.kv_cache, self.staging), before, strict=True):
            assert torch.equal(tensor.view(torch.uint8), old)
