# SPDX-License-Identifier: Apache-2.0
"""What the exercises of lessons 00 and 01 are held to: the kit's own operators and formulas, in the lessons' words."""

from __future__ import annotations

import torch
from torch import Tensor

from nwor import ops
from nwor_lab.cost.chunks import window_rows
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
