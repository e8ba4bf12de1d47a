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

from nwor_lab.operators.reference import quantise
from tests.lab.attention import Batch

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
# Relative error over all outputs: half a unit in the last place of the weights and of the output.
TOLERANCE = {torch.bfloat16: 4e-3, torch.float16: 6e-4}
# (prefix, query rows): a padded request has 0 rows, and one with more than `max_query_len` is not a window.
RAGGED = ((37, 5), (0, 3), (0, 0), (16, 9), (1, 1), (64, 9), (50, 12), (130, 2))


@dataclass
class Windows(Batch):
    """A batch whose last rows the attention stores itself.

    destinations: of each row in turn, cyclically: `h`eld in staging, written to its `p`age, or `n`either.
    """

    requests: Sequence[tuple[int, int]] = RAGGED
    dtype: torch.dtype = DTYPE
    layout: str = "NHD"
    query_fp8: bool = False
    max_query_len: int = 9
    destinations: str = "hpn"
    config: Config | None = None
    scales: dict[str, float] = field(default_factory=lambda: {"q_scale": 0.5, "k_scale": 0.75, "v_scale": 1.5})

    def __post_init__(self) -> None:
        super().__post_init__()
        tokens = sum(self.tails)
        self.q_read = self.query
        if self.query_fp8:
            self.q_read = (self.query.float() / self.scales["q_scale"]).to(torch.float8_e4m3fn)
        tail_slots = torch.cat([slots[prefix:] for slots, prefix in zip(self.slots, self.prefixes, strict=True)])
        destination = (self.destinations * (tokens + 1))[:tokens]
        self.page_slots = torch.full((tokens + 4,), -1)
        self.staging_rows = torch.full((tokens + 4,), -1)
        # A held row has a page slot too, which must stay as it was.
        for token in range(tokens):
            self.page_slots[token] = tail_slots[token] if destination[token] in "hp" else -1
        held = [token for token in range(tokens) if destination[token] == "h"]
        room = self.staging.shape[0] * self.block_size
        self.staging_rows[held] = torch.randperm(room, generator=self.generator)[: len(held)]
        self.workspace = Workspace(len(self.tails), self.max_query_len, self.num_heads, self.head_size, DEVICE)

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
            "alibi_slopes": self.alibi_slopes,
            "sinks": self.sinks,
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
            rows = slice(tokens.start, tokens.stop)
            query = self.q_read[rows].cpu().double() * (self.scales["q_scale"] if self.query_fp8 else 1.0)
            output[rows] = self.attend(request, query, tail.view(self.cache_dtype), k_scale, v_scale)
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
