# SPDX-License-Identifier: Apache-2.0
"""A batch of verify windows for the GPU's attention, with what must come of it in float64.

To be imported first: a module that imports it is skipped where the kernel cannot run, without an NVIDIA GPU and without
Triton's interpreter (``TRITON_INTERPRET=1``).
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, fields

import pytest
import torch
from torch import Tensor

from nwor.vllm.self_check import attend
from nwor_lab.operators.reference import quantise

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if INTERPRETED:  # numpy warns where infinities meet; that their weights are 0 is what the tests look at
    MARKS = [pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning:triton")]
    from tests.kernels.triton_interpreter import install

    install()
elif torch.cuda.is_available():
    MARKS = [pytest.mark.gpu]
    pytest.importorskip("triton", reason="no Triton here")
else:
    pytest.skip("no NVIDIA GPU; `make test` runs these under Triton's interpreter apart", allow_module_level=True)

from nwor.attention.configs import Config
from nwor.attention.verify import LayerAttention, Workspace, verify_attention

DEVICE = "cpu" if INTERPRETED else "cuda"
DTYPE = torch.bfloat16
SPLIT = Config(tile=32, splits=3, min_tiles_per_split=1)
FP8 = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
# Relative error over all outputs: half a unit in the last place of the weights and of the output.
TOLERANCE = {torch.bfloat16: 4e-3, torch.float16: 6e-4}
# (prefix, query rows): a padded request has 0 rows, and one with more than `max_query_len` is not a window.
RAGGED = ((37, 5), (0, 3), (0, 0), (16, 9), (1, 1), (64, 9), (50, 12), (130, 2))


@dataclass
class Windows:
    """A batch of `requests`, (prefix, query rows) each, of one layer.

    destinations: of each row in turn, cyclically: `h`eld in staging, written to its `p`age, or `n`either.
    """

    requests: Sequence[tuple[int, int]] = RAGGED
    dtype: torch.dtype = DTYPE
    kv_cache_dtype: str = "auto"
    query_fp8: bool = False
    num_heads: int = 4
    num_kv_heads: int = 2
    head_size: int = 64
    block_size: int = 16
    layout: str = "NHD"
    max_query_len: int = 9
    destinations: str = "hpn"
    softcap: float = 0.0
    sliding_window: int = 0
    alibi: bool = False
    sinks: bool = False
    config: Config | None = None
    seed: int = 0
    scales: dict[str, float] = field(default_factory=lambda: {"q_scale": 0.5, "k_scale": 0.75, "v_scale": 1.5})

    def __post_init__(self) -> None:
        self.generator = torch.Generator().manual_seed(self.seed)
        n, d, h, hq = self.block_size, self.head_size, self.num_kv_heads, self.num_heads
        self.prefixes, self.tails = (list(numbers) for numbers in zip(*self.requests, strict=True))
        self.fp8 = self.kv_cache_dtype != "auto"
        tokens = sum(self.tails)
        pages = [-(-(prefix + tail) // n) for prefix, tail in self.requests]
        num_blocks = sum(pages) + 3
        blocks = torch.randperm(num_blocks, generator=self.generator)
        # The table's unused ends would lead far out of the cache.
        self.block_table = torch.full((len(pages), max(pages) + 2), 2**30, dtype=torch.int32)
        self.kv_cache, self.staging = self.poisoned(num_blocks), self.poisoned(-(-max(tokens, 1) // n) + 1)
        self.qkv = torch.randn(tokens, hq + 2 * h, d, generator=self.generator).to(self.dtype)
        self.query, self.key, self.value = self.qkv.split([hq, h, h], dim=1)
        self.q_read = self.query
        if self.query_fp8:
            self.q_read = (self.query.float() / self.scales["q_scale"]).to(torch.float8_e4m3fn)
        self.prefix_rows, slots, first_block = [], [], 0
        for request, (prefix, tail) in enumerate(self.requests):
            table = blocks[first_block : first_block + pages[request]]
            first_block += pages[request]
            self.block_table[request, : pages[request]] = table.int()
            positions = torch.arange(prefix + tail)
            slots.append(table[positions // n] * n + positions % n)
            rows = torch.randn(prefix, h, 2 * d, generator=self.generator)
            rows = rows.to(FP8[self.kv_cache_dtype]) if self.fp8 else rows.to(self.dtype)
            self.write(self.kv_cache, slots[-1][:prefix], rows.view(self.kv_cache.dtype))
            self.prefix_rows.append(rows)
        tail_slots = torch.cat([slot[prefix:] for slot, prefix in zip(slots, self.prefixes, strict=True)])
        destination = (self.destinations * (tokens + 1))[:tokens]
        self.page_slots = torch.full((tokens + 4,), -1)
        self.staging_rows = torch.full((tokens + 4,), -1)
        # A held row has a page slot too, which must stay as it was.
        for token in range(tokens):
            self.page_slots[token] = tail_slots[token] if destination[token] in "hp" else -1
        held = [token for token in range(tokens) if destination[token] == "h"]
        places = torch.randperm(self.staging.shape[0] * n, generator=self.generator)[: len(held)]
        self.staging_rows[held] = places
        self.query_start_loc = torch.tensor([0, *self.tails]).cumsum(0).int()
        self.seq_lens = torch.tensor([prefix + tail if tail else 0 for prefix, tail in self.requests]).int()
        self.output = torch.full((tokens, hq, d), float("nan"), dtype=self.dtype)
        self.scale = d**-0.5
        self.slopes = -torch.rand(hq, generator=self.generator) if self.alibi else None
        self.sink = torch.randn(hq, generator=self.generator).to(self.dtype) if self.sinks else None
        self.workspace = Workspace(len(pages), self.max_query_len, hq, d, DEVICE)

    def poisoned(self, blocks: int) -> Tensor:
        """A cache [blocks, H, N, 2 * D] of NaN."""
        sizes = {"B": blocks, "H": self.num_kv_heads, "N": self.block_size}
        order = {"NHD": "BNH", "HND": "BHN"}[self.layout]
        dtype, nan = (torch.uint8, 0x7F) if self.fp8 else (self.dtype, float("nan"))
        memory = torch.full([*(sizes[dim] for dim in order), 2 * self.head_size], nan, dtype=dtype)
        return memory.permute(*(order.index(dim) for dim in "BHN"), 3)

    def write(self, cache: Tensor, slots: Tensor, rows: Tensor) -> None:
        cache[slots // self.block_size, :, slots % self.block_size] = rows.to(cache.device)

    def to_device(self) -> "Windows":
        for name, held in vars(self).items():
            if isinstance(held, Tensor):
                setattr(self, name, held.to(DEVICE))
        self.query, self.key, self.value = self.qkv.split([self.num_heads, self.num_kv_heads, self.num_kv_heads], dim=1)
        return self

    def arguments(self) -> dict:
        scales = {name: torch.full((1,), scale, device=DEVICE) for name, scale in self.scales.items()}
        return {
            "query": self.q_read if self.query_fp8 else self.query,
            "key": self.key,
            "value": self.value,
            "kv_cache": self.kv_cache,
            "output": self.output,
            "query_start_loc": self.query_start_loc,
            "seq_lens": self.seq_lens,
            "block_table": self.block_table,
            "page_slots": self.page_slots,
            "staging": self.staging,
            "staging_rows": self.staging_rows,
            "max_query_len": self.max_query_len,
            "scale": self.scale,
            "softcap": self.softcap,
            "sliding_window": self.sliding_window,
            "alibi_slopes": self.slopes,
            "sinks": self.sink,
            "kv_cache_dtype": self.kv_cache_dtype,
            **(scales if self.fp8 else {}),
            "workspace": self.workspace,
            "config": self.config,
        }

    def layer(self) -> tuple[LayerAttention, dict[str, Tensor]]:
        """The attention, and by name and in order what it is called with."""
        step = self.arguments()
        fixed = {field.name: step.pop(field.name) for field in fields(LayerAttention) if field.name in step}
        return LayerAttention(**fixed), step

    def windows(self) -> list[int]:
        return [request for request, tail in enumerate(self.tails) if 0 < tail <= self.max_query_len]

    def stored(self, token: int) -> Tensor:
        """[H, 2 * D]: what a cache holds of a row, in the cache's dtype."""
        pair = torch.cat([self.key[token], self.value[token]], dim=-1).cpu()
        if not self.fp8:
            return pair
        fmt = "e5m2" if self.kv_cache_dtype == "fp8_e5m2" else "e4m3"
        halves = [
            quantise(half.flatten(), self.scales[name], fmt, "cuda").view(half.shape)
            for half, name in zip(pair.chunk(2, dim=-1), ("k_scale", "v_scale"), strict=True)
        ]
        return torch.cat(halves, dim=-1)

    def expected(self) -> tuple[Tensor, Tensor, Tensor]:
        """(output in float64, kv_cache, staging) as they have to be."""
        output = torch.full(self.output.shape, float("nan"), dtype=torch.float64)
        kv_cache, staging = self.kv_cache.cpu().clone(), self.staging.cpu().clone()
        k_scale, v_scale = (self.scales[name] if self.fp8 else 1.0 for name in ("k_scale", "v_scale"))
        start = self.query_start_loc.tolist()
        for request in self.windows():
            tokens = range(start[request], start[request + 1])
            tail = torch.stack([self.stored(token) for token in tokens])
            for token, row in zip(tokens, tail, strict=True):
                to_staging, to_page = int(self.staging_rows[token]), int(self.page_slots[token])
                if to_staging >= 0:
                    self.write(staging, torch.tensor([to_staging]), row[None])
                elif to_page >= 0:
                    self.write(kv_cache, torch.tensor([to_page]), row[None])
            prefix = self.prefix_rows[request].cpu()
            rows = torch.cat([prefix.double(), tail.view(prefix.dtype).double()])
            query = self.q_read[tokens.start : tokens.stop].cpu().double()
            query = query * (self.scales["q_scale"] if self.query_fp8 else 1.0)
            output[tokens.start : tokens.stop] = attend(
                query, rows, self.prefixes[request], self.scale, self.softcap, self.sliding_window, k_scale, v_scale,
                *(None if tensor is None else tensor.cpu() for tensor in (self.slopes, self.sink)),
            )  # fmt: skip
        return output, kv_cache, staging

    def check(self) -> float:
        self.to_device()
        output, kv_cache, staging = self.expected()
        verify_attention(**self.arguments())
        return self.compare(output, kv_cache, staging)

    def compare(self, output: Tensor, kv_cache: Tensor, staging: Tensor) -> float:
        found = self.output.cpu()
        assert torch.equal(found.isnan(), output.isnan()), "other rows than those of windows were written, or NaN was"
        error = relative(found, output)
        assert error < TOLERANCE[self.dtype]
        for wanted, tensor in ((kv_cache, self.kv_cache), (staging, self.staging)):
            bits = torch.uint8 if self.fp8 else torch.int16
            assert torch.equal(wanted.contiguous().view(bits), tensor.cpu().contiguous().view(bits))
        last, barrier = self.workspace.arrivals.unbind(1)
        assert not (last | barrier & 0x7FFFFFFF).any(), "the next launch would find arrivals of this one"
        return error


def relative(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted).nan_to_num().norm() / wanted.nan_to_num().norm().clamp(min=1e-9))
