# SPDX-License-Identifier: Apache-2.0
"""A small paged cache of poisoned bytes, target layers with a drafter's layer between them, and a plain writer."""

from dataclasses import dataclass

import torch
from torch import Tensor

from nwor_lab.operators.inputs import poison

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
NUM_BLOCKS, BLOCK_SIZE, NUM_HEADS, WIDTH = 6, 4, 2, 8
DRAFTER = 1  # the drafter's layer lies between target layers: the manager must find each by its address
MEMORY = {  # how caches lie in memory, as arguments of `Paged`
    "NHD": {"order": "LBNH"},
    "HND": {"order": "LBHN"},
    "layers inside blocks": {"order": "BLHN"},
    "packed": {"order": "LBHN", "packed": True},
    "packed fp8": {"order": "LBHN", "packed": True, "dtype": torch.uint8},
    "fp32": {"order": "LBNH", "dtype": torch.float32},
}


def random_packing(block_size: int, width: int, seed: int = 0) -> Tensor:
    """int32 [block_size, width]: element e of offset n lies at ``packing[n, e]`` of its chunk, all places different."""
    order = torch.randperm(block_size * width, generator=torch.Generator().manual_seed(seed))
    return order.view(block_size, width).to(torch.int32)


def write_rows(cache: Tensor, slots: Tensor, rows: Tensor, packing: Tensor | None) -> None:
    """A writer like vLLM's: row t goes to slot t, negative slots are skipped.

    Args:
        cache: [num_blocks, H, N, width] of any strides; with a packing each [N, width] chunk is contiguous.
        slots: int64 [T].
        rows: [T', H, width] of the cache's element size, T' >= T.
        packing: as `random_packing` makes it.
    """
    block_size, width = cache.shape[2:]
    bits = BITS[cache.element_size()]
    cache, rows = cache.view(bits), rows.view(bits)
    for row, slot in zip(rows, slots.tolist(), strict=False):
        if slot < 0:
            continue
        block, offset = divmod(slot, block_size)
        if packing is None:
            cache[block, :, offset] = row
        else:
            cache[block].view(-1, block_size * width)[:, packing[offset].long()] = row


@dataclass
class Paged:
    """`num_layers` layers of one allocation, layer `DRAFTER` of which is not a target's.

    order: the memory's dimensions, outermost first: L layers, B blocks, H heads, N tokens of a block.
    """

    order: str = "LBHN"
    dtype: torch.dtype = torch.bfloat16
    packed: bool = False
    device: str = "cpu"
    num_layers: int = 4
    num_blocks: int = NUM_BLOCKS
    block_size: int = BLOCK_SIZE
    width: int = WIDTH

    def __post_init__(self) -> None:
        self.sizes = {"L": self.num_layers, "B": self.num_blocks, "H": NUM_HEADS, "N": self.block_size}
        shape = (*(self.sizes[dim] for dim in self.order), self.width)
        memory = poison(shape, self.dtype, self.device)
        self.pool = torch.empty(0, dtype=torch.uint8, device=self.device).set_(memory.untyped_storage())
        self.packing = random_packing(self.block_size, self.width) if self.packed else None

    def targets(self, pool: Tensor | None = None) -> list[Tensor]:
        """The target layers' views, each [B, H, N, width], of the pool or of a copy of it."""
        shape = (*(self.sizes[dim] for dim in self.order), self.width)
        memory = (self.pool if pool is None else pool).view(self.dtype).view(shape)
        layers = memory.permute(*(self.order.index(dim) for dim in "LBHN"), 4)
        return [layer for index, layer in enumerate(layers) if index != DRAFTER]

    def new_rows(self, count: int, seed: int) -> Tensor:
        """[count, H, width] of random bits."""
        return poison((count, NUM_HEADS, self.width), self.dtype, self.device, seed)


@dataclass
class Batch:
    """One step's batch: rows per query, drafts among them, and a slot for each row, a query's at consecutive offsets.

    slot_mapping is a buffer longer than the batch, -1 behind it, as vLLM's is.
    """

    queries: tuple[int, ...]
    num_drafts: tuple[int, ...]
    num_slots: int = NUM_BLOCKS * BLOCK_SIZE
    device: str = "cpu"
    seed: int = 0

    def __post_init__(self) -> None:
        self.query_start_loc = [sum(self.queries[:request]) for request in range(len(self.queries) + 1)]
        self.num_tokens = self.query_start_loc[-1]
        generator, blocks = torch.Generator().manual_seed(self.seed), self.num_slots // BLOCK_SIZE
        order = torch.stack([torch.randperm(blocks, generator=generator) for _ in range(BLOCK_SIZE)], dim=1)
        slots = (order * BLOCK_SIZE + torch.arange(BLOCK_SIZE)).flatten()[: self.num_tokens]
        self.slots: list[int] = slots.tolist()
        self.slot_mapping = torch.full((self.num_tokens + 3,), -1, dtype=torch.int64, device=self.device)
        self.slot_mapping[: self.num_tokens] = slots.to(self.device)

    def held(self) -> list[int]:
        """The rows a window holds, by the rule in words: the last d rows of each query."""
        rows = []
        for end, drafts in zip(self.query_start_loc[1:], self.num_drafts, strict=True):
            rows += range(end - drafts, end)
        return rows

    def kept(self, num_rejected: tuple[int, ...]) -> list[int]:
        """The rows ``[0, query_len - num_rejected)`` of each query."""
        rows = []
        for request, gone in enumerate(num_rejected):
            rows += range(self.query_start_loc[request], self.query_start_loc[request + 1] - gone)
        return rows
