# SPDX-License-Identifier: Apache-2.0
"""Faults of mode `stage`'s attention, to be injected into a worker that is up: what parity must tell from rounding.

Each lets the mode's attention run and store its rows, and runs it once more over inputs that are wrong in one way. On
a GPU, graphs hold the attention: they are captured anew after each injection.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from nwor import ops
from nwor.manager import DraftCommitManager
from nwor.vllm import self_check
from nwor.vllm.context import context_of, manager_of, set_served_groups

STEP = "query", "key", "value", "kv_cache", "output", "query_start_loc", "seq_lens", "block_table", "page_slots"
"""Positional arguments of a call of `LayerAttention`."""


@dataclass
class Call:
    """One call of the attention, of a CPU or a GPU, and what faults may change of it.

    attend: `ops.verify_attention` or `nwor.attention.verify.verify_attention`; named: its arguments, in which on a GPU
        no row is to be stored. middle: whether this is the layer in the middle of the model.
    """

    attend: Callable[..., None]
    named: dict[str, Any]
    on_cpu: bool
    middle: bool

    @property
    def output(self) -> Tensor:
        return self.named["output"]

    def again(self, **changed: Any) -> None:
        """The attention over changed inputs, to the output and nowhere else."""
        self.attend(**{**self.named, **changed})

    def window(self) -> tuple[Tensor, Tensor, Tensor]:
        """Of each row of the batch, int64 [T]: its place in its query, and that query's length; bool: in a window."""
        starts = self.named["query_start_loc"].long()
        row = torch.arange(len(self.output), device=starts.device)
        request = (torch.searchsorted(starts, row, right=True) - 1).clamp(0, len(starts) - 2)
        length = (starts[1:] - starts[:-1])[request]
        inside = self.named["window_start"][request] >= 0 if self.on_cpu else length <= self.named["max_query_len"]
        return row - starts[request], length, inside & (row < starts[-1])

    def with_drafts(self, change: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        """The attention with the drafts' rows changed.

        change: from rows [M, H, ...], of each int64 [M] its place among its window's drafts and how many these are.
        """
        if self.on_cpu:
            return self.again(staging=self._staging(change))
        place, length, inside = self.window()
        held = inside & (place > 0)
        changed = {}
        for name in ("key", "value"):
            rows = self.named[name][: len(place)]
            mask = held.view(-1, *[1] * (rows.dim() - 1))
            changed[name] = torch.where(mask, change(rows, place - 1, length - 1), rows)
        self.again(**changed)

    def _staging(self, change: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Tensor:
        staging, packing = self.named["staging"], self.named["packing"].long()
        blocks, heads, size, width = staging.shape
        index = packing[None, None].expand(blocks, heads, -1, -1).reshape(blocks, heads, -1)
        rows = staging.flatten(2).gather(2, index).view(staging.shape).transpose(1, 2).reshape(-1, heads, width)
        place, count = torch.zeros(2, len(rows), dtype=torch.int64)
        lengths = self.named["query_start_loc"].diff().tolist()
        for start, length in zip(self.named["window_start"].tolist(), lengths, strict=False):
            if start >= 0 and length > 1:
                place[start : start + length - 1] = torch.arange(length - 1)
                count[start : start + length - 1] = length - 1
        rows = change(rows, place, count).view(blocks, size, heads, width).transpose(1, 2).reshape(blocks, heads, -1)
        return torch.empty_like(staging).flatten(2).scatter(2, index, rows).view(staging.shape)


def tail_unseen(call: Call) -> None:
    call.with_drafts(lambda rows, place, count: torch.zeros_like(rows))


def tail_unseen_in_one_layer(call: Call) -> None:
    if call.middle:
        tail_unseen(call)


def one_head_unseen(call: Call) -> None:
    def change(rows: Tensor, place: Tensor, count: Tensor) -> Tensor:
        rows = rows.clone()
        rows[:, 0] = 0
        return rows

    call.with_drafts(change)


def drafts_swapped(call: Call) -> None:
    def change(rows: Tensor, place: Tensor, count: Tensor) -> Tensor:
        swap = ((place == 0) & (count > 1)).long() - ((place == 1) & (count > 1)).long()
        other = (torch.arange(len(rows), device=rows.device) + swap).clamp(0, len(rows) - 1)
        return rows[other]

    call.with_drafts(change)


def next_draft_seen(call: Call) -> None:
    """Each query one row on sees one key more."""
    place, length, inside = call.window()
    row, query = torch.arange(len(place), device=place.device), call.named["query"]
    back = row - (place > 0).long()
    wrong, kind = call.output.clone(), torch.uint8 if query.element_size() == 1 else query.dtype
    call.again(query=query.view(kind)[: len(row)][back].view(query.dtype), output=wrong)
    seen = inside & (place > 0) & (place < length - 1)
    after = (row + 1).clamp(max=len(row) - 1)
    call.output.copy_(torch.where(seen.view(-1, *[1] * (wrong.dim() - 1)), wrong[after], call.output))


def last_page_missed(call: Call) -> None:
    """The last whole page before the window is read from where the one before it lies."""
    table, starts = call.named["block_table"], call.named["query_start_loc"].long()
    prefix = call.named["seq_lens"].long() - (starts[1:] - starts[:-1])[: len(call.named["seq_lens"])]
    page = (prefix // call.named["kv_cache"].shape[2] - 1).clamp(min=1)[:, None]
    rows = table[: len(page)]
    call.again(block_table=rows.scatter(1, page, rows.gather(1, page - 1)))


def key_scale_ignored(call: Call) -> None:
    """As if keys had been stored by a scale of 2."""
    call.again(k_scale=call.named["k_scale"] * 2)


FAULTS: dict[str, Callable[[Call], None]] = {
    fault.__name__: fault
    for fault in (
        tail_unseen, one_head_unseen, drafts_swapped, next_draft_seen, last_page_missed, tail_unseen_in_one_layer,
        key_scale_ignored,
    )
}  # fmt: skip


def inject(worker: Any, name: str) -> None:
    """Let the worker's mode `stage` attend with this fault from now on; an empty name ends it."""
    manager, on_cpu = _serving(worker), worker.device.type == "cpu"
    middle = manager.staging_of(len(manager.layout.layer_offsets) // 2).data_ptr()

    def harmed(attend: Callable[..., None], named: dict[str, Any]) -> None:
        attend(**named)
        unstored = {} if on_cpu else {rows: torch.full_like(named[rows], -1) for rows in ("page_slots", "staging_rows")}
        FAULTS[name](Call(attend, named | unstored, on_cpu, named["staging"].data_ptr() == middle))

    if on_cpu:
        attend = getattr(ops.verify_attention, "unharmed", ops.verify_attention)

        def faulty(*given: Any, **named: Any) -> None:
            harmed(attend, named | dict(zip(ops.OPERATORS["verify_attention"], given, strict=False)))

        faulty.unharmed = attend  # type: ignore[attr-defined]
        ops.verify_attention = faulty if name else attend
        return
    from nwor.attention import verify
    from nwor.vllm import attention_gpu

    hook: Any = attention_gpu
    make = getattr(hook._layer_attention, "unharmed", hook._layer_attention)

    def make_faulty(*given: Any) -> Callable[..., None]:
        layer = make(*given)
        fixed = {field.name: getattr(layer, field.name) for field in fields(layer)}
        return lambda *step: harmed(verify.verify_attention, fixed | dict(zip(STEP, step, strict=True)))

    make_faulty.unharmed = make  # type: ignore[attr-defined]
    hook._layer_attention = make_faulty if name else make
    set_served_groups(worker.model_runner, context_of(worker.model_runner).groups)  # whose layers make theirs anew


def check(worker: Any) -> str:
    """What the check at start-up finds wrong now, or an empty string; to be sent to every rank."""
    _serving(worker)
    runner = worker.model_runner
    groups = context_of(runner).groups
    set_served_groups(runner, ())
    try:
        return next(filter(None, (self_check.failure(group.manager, group.layers) for group in groups)), "")
    finally:
        set_served_groups(runner, groups)


def _serving(worker: Any) -> DraftCommitManager:
    manager = manager_of(worker.model_runner)
    if manager is None or manager.mode != "stage":
        raise RuntimeError("mode stage does not serve here: there is no attention to inject a fault into")
    return manager
