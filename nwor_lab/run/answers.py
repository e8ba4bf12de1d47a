# SPDX-License-Identifier: Apache-2.0
"""What the exercises of the lessons are held to, out of the reader's sight; where it can be, the kit's own code."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from nwor import ops
from nwor_lab.cost.breakeven import Chip, step_difference, survival_of
from nwor_lab.cost.chunks import window_rows
from nwor_lab.cost.traffic import Shape, Window, served_traffic
from nwor_lab.operators.check import Suspect
from nwor_lab.reference.cache import PagedCache
from nwor_lab.reference.decoder import Request, make_batch


def kept_slots(
    block_table: list[int], num_computed_tokens: int, k: int, num_rejected: int, block_size: int = 4
) -> list[int]:
    """The slots that one request's step may change: of the token sampled last, and of the accepted drafts."""
    cache = PagedCache(1, 1, 1, max(block_table) + 1, block_size)
    request = Request([], 0, torch.tensor(block_table), num_computed_tokens, drafts=[0] * k)
    batch = make_batch(cache, [request], [num_computed_tokens], [[0] * (1 + k)])
    return batch.slot_mapping[batch.kept(torch.tensor([num_rejected]))].tolist()


def restore(pages: Tensor, log: Tensor, slot_mapping: Tensor, query_start_loc: Tensor, num_rejected: Tensor) -> None:
    """Put back what the slots of rejected rows held, by `ops.restore_rejected_drafts`.

    Args:
        pages: float32 [num_blocks, N, H, D], the keys of one layer.
        log: float32 [T, H, D], what slot `slot_mapping[t]` held.
        slot_mapping: int64 [T]. query_start_loc: int64 [R + 1]. num_rejected: int64 [R].
    """
    accepted = torch.ones(len(slot_mapping), dtype=torch.bool)
    for end, rejected in zip(query_start_loc[1:].tolist(), num_rejected.tolist(), strict=True):
        accepted[end - rejected : end] = False
    ops.restore_rejected_drafts(log, log.clone(), slot_mapping, accepted, pages, pages.clone())


def commit(pages: Tensor, staging: Tensor, slots: Tensor, num_drafts: Tensor, num_rejected: Tensor) -> None:
    """Copy the accepted drafts of all layers to their slots, by `ops.commit_all_layers`.

    Args:
        pages: float32 [L, num_slots, H, C], in blocks of 4 slots.
        staging: float32 [L, R * W, H, C], in blocks of 4, too: row ``r * W + d`` is draft d of request r.
        slots: int64 [R, W], -1 where a request has no such draft.
        num_drafts, num_rejected: int64 [R].
    """
    caches, rows = (each.view(len(each), -1, 4, *each.shape[2:]).transpose(2, 3) for each in (pages, staging))
    strides = [stride * pages.element_size() for stride in caches.stride()]
    ops.commit_all_layers(
        pool=pages.view(torch.uint8).flatten(),
        layer_offsets=torch.arange(len(pages)) * strides[0],
        cache_strides=strides[1:4],
        slots=slots,
        packing=None,
        rows=rows.view(torch.uint8),
        num_drafts=num_drafts.int(),
        num_rejected=num_rejected.int(),
        kept=torch.zeros(len(slots), dtype=torch.int32),
        counts=torch.zeros(6, dtype=torch.int64),
    )


def rows_computed(k: int, chunk: int, accepted: int) -> int:
    """Rows that a window of k drafts computes in chunks, when the first `accepted` drafts hold and no other."""
    return round(window_rows("off", [float(draft < accepted) for draft in range(k)], chunk).computed)


def kept_mask(num_drafts: Tensor, num_rejected: Tensor, width: int) -> Tensor:
    """Which drafts of a batch are kept: bool [R, width], of `num_drafts` and `num_rejected` [R]."""
    return torch.arange(width) < (num_drafts - num_rejected).unsqueeze(1)


def find_broken(suspects: Sequence[Suspect]) -> str:
    """The name of the one commit that has a fault."""
    return next(str(suspect) for suspect in suspects if suspect.fault)


def predicted_share(survival: Sequence[float], k: int) -> float:
    """The mean share of a window's 1 + k rows that are rejected; `survival` is of k positions or more."""
    return (k - sum(survival[:k])) / (1 + k)


def acceptance(staged_tokens: int, committed_tokens: int, num_layers: int) -> tuple[float, int]:
    """The share of drafts accepted, and the rejected rows in all layers."""
    return committed_tokens / staged_tokens, (staged_tokens - committed_tokens) * num_layers


def is_clean(before: Tensor, after: Tensor, kept_slots: Sequence[int]) -> bool:
    """Whether no slot outside `kept_slots` changed between two pools [slots, bytes]."""
    return {*(before != after).nonzero()[:, 0].tolist()} <= {*kept_slots}


def floor_us(num_bytes: int, copy_tb_s: float) -> float:
    """The microseconds that `num_bytes` take at the bandwidth of a large copy."""
    return num_bytes / copy_tb_s / 1e6


def limited_by_latency(dram: Sequence[float], tensor: Sequence[float], issue: Sequence[float]) -> list[bool]:
    """Of each launch, whether no unit reaches half of its peak; all in percent."""
    return [max(units) < 50 for units in zip(dram, tensor, issue, strict=True)]


def losing_batch(chip: Chip, shape: Shape, k: int) -> Callable[[float], int]:
    """By acceptance, the smallest batch up to 4,096 at which `stage` is dearer than vanilla, and 0 where none is."""

    def smallest(acceptance: float) -> int:
        survival = survival_of(acceptance, k)
        for batch in range(1, 4097):
            if chip.us(step_difference("stage", shape, Window.expected(batch, survival))) > 0:
                return batch
        return 0

    return smallest


def scrub(batch: float, k: int, accepted: float, num_layers: int) -> tuple[float, float]:
    """Rows read and written in each layer, and launches, of a step of `cow` that has no log."""
    shape = Shape(num_layers, 1, 1, cache_bytes=1)
    kinds = served_traffic("cow", shape, Window(batch, batch * k, batch * k - accepted, batch * (1 + k)))
    moved = kinds["tail"] + kinds["write"] + kinds["restore"] + kinds["open"]
    return (moved.read + moved.written) / (num_layers * shape.row), moved.launches
