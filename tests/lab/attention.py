# SPDX-License-Identifier: Apache-2.0
"""Verify windows for the CPU attention, and the same attention in float64 PyTorch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nwor import ops
from nwor.vllm.self_check import attend
from tests.nwor.paged import random_packing, write_rows

FP8 = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
# Half a unit in the last place of what the operator returns, and some fp32 noise of its sums.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-8, torch.float16: 2**-10}


def identity_packing(block_size: int, width: int) -> Tensor:
    return torch.arange(block_size * width, dtype=torch.int32).view(block_size, width)


@dataclass
class Problem:
    """Requests with `prefixes` positions and `tails` rows in the query; windows for those in `windows`.

    The first row of a window lies in the pages, behind its prefix, and the others in staging.

    Everything that is nobody's is NaN: pages, staging, what the block table leaves of a page, and the output.
    """

    prefixes: Sequence[int]
    tails: Sequence[int]
    dtype: torch.dtype = torch.float32
    kv_cache_dtype: str = "auto"
    num_heads: int = 4
    num_kv_heads: int = 2
    head_size: int = 32
    block_size: int = 16
    packing: Tensor | None = None
    windows: Sequence[bool] | None = None
    softcap: float = 0.0
    sliding_window: int = 0
    alibi: bool = False
    with_sinks: bool = False
    k_scale: float = 1.0
    v_scale: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)
        n, d, h = self.block_size, self.head_size, self.num_kv_heads
        self.windows = self.windows or [True] * len(self.tails)
        self.lengths = [prefix + tail for prefix, tail in zip(self.prefixes, self.tails, strict=True)]
        pages = [-(-length // n) for length in self.lengths]
        num_blocks = sum(pages) + 2
        blocks = torch.randperm(num_blocks, generator=generator)
        if self.packing is None:
            self.packing = random_packing(n, 2 * d, self.seed)
        self.cache_dtype = self.dtype if self.kv_cache_dtype == "auto" else FP8[self.kv_cache_dtype]
        self.kv_cache = self.nan_cache(num_blocks)
        self.block_table = torch.full((len(pages), max(pages) + 1), 2**30, dtype=torch.int32)
        rows = torch.randn(sum(self.lengths), h, 2 * d, generator=generator).clamp(-3, 3).to(self.cache_dtype)
        self.rows = list(rows.split(self.lengths))
        staged = []
        start: list[int] = []
        first_block = 0
        for request, prefix in enumerate(self.prefixes):
            table = blocks[first_block : first_block + pages[request]]
            first_block += pages[request]
            self.block_table[request, : pages[request]] = table.int()
            if not self.windows[request]:
                self.block_table[request] = 2**30
                start.append(-1)
                continue
            positions = torch.arange(prefix + 1)
            write_rows(self.kv_cache, table[positions // n] * n + positions % n, self.rows[request], self.packing)
            start.append(sum(map(len, staged)))
            staged.append(self.rows[request][prefix + 1 :])
        self.window_start = torch.tensor(start, dtype=torch.int32)
        self.staging = self.nan_cache(-(-max(1, sum(map(len, staged))) // n) + 1)
        if staged:
            write_rows(self.staging, torch.arange(sum(map(len, staged))), torch.cat(staged), self.packing)
        if self.kv_cache_dtype != "auto":
            self.kv_cache, self.staging = self.kv_cache.view(torch.uint8), self.staging.view(torch.uint8)
        self.query_start_loc = torch.tensor([0, *self.tails]).cumsum(0).int()
        self.seq_lens = torch.tensor(self.lengths, dtype=torch.int32)
        # The query is a view of the qkv projection, as in vLLM: not dense over tokens.
        qkv = torch.randn(sum(self.tails), self.num_heads + 2 * h, d, generator=generator).to(self.dtype)
        self.query = qkv[:, : self.num_heads]
        self.output = torch.full((sum(self.tails), self.num_heads, d), float("nan"), dtype=self.dtype)
        self.scale = d**-0.5
        self.alibi_slopes = torch.rand(self.num_heads, generator=generator) if self.alibi else None
        self.sinks = torch.randn(self.num_heads, generator=generator) if self.with_sinks else None

    def nan_cache(self, blocks: int) -> Tensor:
        shape = (blocks, self.num_kv_heads, self.block_size, 2 * self.head_size)
        return torch.full(shape, float("nan")).to(self.cache_dtype)

    def arguments(self) -> dict[str, Any]:
        """What the operator is given, by name."""
        return {name: getattr(self, name) for name in ops.OPERATORS["verify_attention"]}

    def run(self) -> Tensor:
        ops.verify_attention(**self.arguments())
        return self.output

    def reference(self) -> Tensor:
        """[T, Hq, D] float64; NaN where no window is."""
        expected = torch.full(self.output.shape, float("nan"), dtype=torch.float64)
        for request, (prefix, tail) in enumerate(zip(self.prefixes, self.tails, strict=True)):
            if not self.windows[request]:
                continue
            first = int(self.query_start_loc[request])
            query = self.query[first : first + tail].double()
            expected[first : first + tail] = attend(
                query, self.rows[request], prefix, self.scale, self.softcap, self.sliding_window, self.k_scale,
                self.v_scale, self.alibi_slopes, self.sinks,
            )  # fmt: skip
        return expected

    def check(self) -> None:
        before = [tensor.view(torch.uint8).clone() for tensor in (self.kv_cache, self.staging)]
        output, tolerance = self.run(), TOLERANCE[self.dtype]
        torch.testing.assert_close(output.double(), self.reference(), rtol=tolerance, atol=2e-6, equal_nan=True)
        for tensor, old in zip((self.kv_cache, self.staging), before, strict=True):
            assert torch.equal(tensor.view(torch.uint8), old)
