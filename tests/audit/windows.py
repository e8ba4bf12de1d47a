# SPDX-License-Identifier: Apache-2.0
"""A small cache and requests that prefill and decode in it, for the auditor's marks and checks without an engine."""

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from vllm_kv_audit import marks as definitions
from vllm_kv_audit.marks import Batch, Marks, Outcome, Sample
from vllm_kv_audit.pages import Pages

BLOCK, BLOCKS, LAYERS, POSITIONS = 8, 24, 3, 60
PROMPTS = (20, 5, 11)


def small_pages(
    heads: int = 1, width: int = 20, packed: bool = False, dtype: torch.dtype = torch.int32, parts: int = 1, **more: int
) -> Pages:
    """Pages of random units, one layer after the other.

    packed: a slot's units lie anywhere in its block and head. parts: views' blocks that an entry of a table names.
    """
    generator, size = torch.Generator().manual_seed(0), BLOCK // parts
    layer = BLOCKS * heads * BLOCK * width
    units = torch.randint(-100, 100, (LAYERS * layer,), generator=generator).to(dtype)
    packing = torch.randperm(size * width, generator=generator).view(size, width).int() if packed else None
    strides = (heads * size * width, size * width, 0 if packed else width)
    offsets = torch.arange(LAYERS) * layer
    names = [f"layer {index}" for index in range(LAYERS)]
    return Pages(names, 0, units, offsets, strides, heads, width, parts * BLOCKS, size, BLOCK, packing, **more)


@dataclass
class Served:
    """Requests with drafts that are accepted or not, step by step, and whatever marks and checks them.

    triton: by `kernels.Launches`, else by `cpu.OnCpu`.
    """

    pages: Pages
    device: str = "cpu"
    triton: bool = False
    seed: int = 0
    rows: tuple[int, ...] = (3, 0, 4)
    tokens: list[list[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.generator = torch.Generator().manual_seed(self.seed)
        if self.device != "cpu":
            tensors = {name: getattr(self.pages, name).to(self.device) for name in ("units", "offsets")}
            packing = None if self.pages.packing is None else self.pages.packing.to(self.device)
            self.pages = replace(self.pages, **tensors, packing=packing)
        self.marks, self.ring = Marks.of(self.pages, 2), definitions.new_ring(torch.device(self.device))
        self.expected = torch.zeros(6, POSITIONS, dtype=torch.int32, device=self.device)
        self.table = torch.arange(1, 1 + 3 * 7, dtype=torch.int32, device=self.device).view(3, 7)
        self.tokens = [self._draw(length) for length in PROMPTS]
        for row, prompt in zip(self.rows, self.tokens, strict=True):
            known = definitions.mix(torch.tensor(prompt), torch.arange(len(prompt))).cumsum(0).int()
            self.expected[row, : len(prompt)] = known.to(self.device)
        self.computed, self.rejected, self.steps = [0, 0, 0], [0, 0, 0], 0
        if self.triton:
            from vllm_kv_audit.kernels import Launches as Form
        else:
            from vllm_kv_audit.cpu import OnCpu as Form
        form = Form(self.marks, self.expected, self.ring)
        self.mark, self.check = form.mark, form.check

    def _draw(self, count: int, below: int = 200) -> list[int]:
        return torch.randint(0, below, (count,), generator=self.generator).tolist()

    def slot(self, request: int, position: int) -> int:
        return int(self.table[request, position // BLOCK]) * BLOCK + position % BLOCK

    def on_device(self, values: list, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)

    def step(self, size: int = 0, fed: dict[int, int] | None = None, adopt: bool = False) -> list[tuple]:
        """Check, then write and mark a step's rows; findings as (kind, request's row, position, layer), sorted.

        size: as in `Sample`. fed: another token than the request's own that is fed first, by request.
        """
        self.steps += 1
        drafts = [
            self._draw(1, 4)[0] if len(t) - c == 1 else 0 for t, c in zip(self.tokens, self.computed, strict=True)
        ]
        lengths = [min(9, len(t) - c) + d for t, c, d in zip(self.tokens, self.computed, drafts, strict=True)]
        drafted = [self._draw(count) for count in drafts]
        ids, slots, rejected, sampled = [], [], [], torch.full((3, 5), -1)
        counts = [0, 0, 0]
        for request, (start, length) in enumerate(zip(self.computed, lengths, strict=True)):
            own = (self.tokens[request] + drafted[request])[start : start + length]
            own[0] = (fed or {}).get(request, own[0])
            ids += own
            slots += [self.slot(request, position) for position in range(start, start + length)]
            accepted = self._draw(1, drafts[request] + 1)[0]
            rejected.append(drafts[request] - accepted)
            if start + length - drafts[request] == len(self.tokens[request]):
                new = [*drafted[request][:accepted], *self._draw(1)]
                sampled[request, : len(new)] = torch.tensor(new)
                counts[request] = len(new)
                self.tokens[request] += new
        batch = Batch(
            self.on_device(list(self.rows), torch.int64),
            self.on_device([0, *torch.tensor(lengths).cumsum(0).tolist()]),
            self.on_device([start + length for start, length in zip(self.computed, lengths, strict=True)]),
            self.on_device(ids),
            num_requests=3,
            num_tokens=len(ids),
        )
        most = size or max(self.computed)
        if most:
            everyone = torch.arange(3, device=self.device)
            self.check(batch, self.table, Sample(everyone, size, most, self.steps), adopt)
        written = self.on_device(slots, torch.int64)
        places = self.pages.offsets[:, None, None] + self.pages.addresses(written)
        noise = torch.randint(-100, 100, places.shape, generator=self.generator)
        self.pages.units[places] = noise.to(self.pages.units)
        self.rejected = rejected
        outcome = Outcome(self.on_device(rejected), self.on_device(counts), sampled.to(self.device))
        self.mark(batch, written, outcome)
        for request, length in enumerate(lengths):
            self.computed[request] += length - rejected[request]
        return self.findings()

    def look(self, computed: list[int], size: int = 0) -> list[tuple]:
        """Check slots as if so many rows of each request were computed; findings as from `step`."""
        self.steps += 1
        rows = self.on_device(list(self.rows), torch.int64)
        lengths = self.on_device([done + 1 for done in computed])
        batch = Batch(rows, self.on_device([0, 1, 2, 3]), lengths, lengths, num_requests=3, num_tokens=3)
        everyone = torch.arange(3, device=self.device)
        self.check(batch, self.table, Sample(everyone, size, size or max(computed), self.steps))
        return self.findings()

    def findings(self) -> list[tuple]:
        total = int(self.ring[definitions.FINDINGS_AT])
        entries = self.ring[definitions.COUNTERS :].view(definitions.RING, definitions.FIELDS)[:total].tolist()
        return sorted((kind, row, position, layer) for _, row, position, _, layer, kind, _, _ in entries)
