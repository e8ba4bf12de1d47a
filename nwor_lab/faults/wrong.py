# SPDX-License-Identifier: Apache-2.0
"""How each fault of the catalogue goes wrong: other arguments of an operator, or another function in its place."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from nwor import ops
from nwor.manager import DraftCommitManager
from nwor.step import Step

Arguments = dict[str, Any]
Change = Callable[[Arguments], Arguments]
"""From the arguments of an operator, by name, those that are wrong instead."""
Replace = Callable[[Any, str, Any], object]
"""Sets an attribute of an object for as long as the fault is injected: `pytest.MonkeyPatch.setattr`, say."""


def instead_of(operator: str, do: Callable[[Callable[..., None], Arguments], None], replace: Replace) -> None:
    """Let ``do(operator, its arguments by name)`` stand for an operator of all layers in each step that runs it."""
    run, opens, closes = getattr(ops, operator), Step.open, Step.close

    def named(step: Step, requests: int) -> Arguments:
        some = {name: step.tensors[name][:requests] for name in ("slots", "num_drafts", "kept")}
        return {name: given for name, given in (step.tensors | some).items() if name in ops.OPERATORS[operator]}

    def opened(self: Step, *batch: Tensor, stages: bool = False, logs: bool = False) -> None:
        opens(self, *batch, stages=stages)
        if logs:
            do(run, named(self, batch[1].numel() - 1))

    def closed(
        self: Step, num_rejected: Tensor, counts: Tensor, published: Tensor | None = None, restores: bool = False
    ) -> None:
        if restores is not (operator == "restore_all_layers"):
            return closes(self, num_rejected, counts, published, restores=restores)
        given = {"num_rejected": num_rejected, "counts": counts, "published": published}
        do(run, named(self, len(num_rejected)) | given)

    replace(Step, *(("open", opened) if operator == "log_all_layers" else ("close", closed)))


# -- wrong arguments ---------------------------------------------------------------------------------------------------


def _laid_out_as(rows: Tensor, changed: Tensor) -> Tensor:
    """The changed rows with the strides of `rows`, which the operators hold to be those of the cache."""
    return torch.empty_like(rows).copy_(changed)


def another_layer(given: Arguments) -> Arguments:
    return {"rows": _laid_out_as(given["rows"], given["rows"].roll(1, 0))}


def one_less_rejected(given: Arguments) -> Arguments:
    return {"num_rejected": (given["num_rejected"] - 1).clamp(min=0)}


def one_more_rejected(given: Arguments) -> Arguments:
    return {"num_rejected": torch.minimum(given["num_rejected"] + 1, given["num_drafts"])}


def first_layer_only(given: Arguments) -> Arguments:
    return {name: given[name][:1] for name in ("layer_offsets", "rows")}


def values_as_they_were(given: Arguments) -> Arguments:
    """The keys of each row, beside the values that its slot holds."""
    rows, packing = given["rows"], given["packing"]
    size, width = rows.shape[3:]
    if packing is None:  # a slot's bytes lie together, keys first
        packing = torch.arange(size * width).view(size, width)
    values = torch.zeros(packing.numel(), dtype=torch.bool)
    values[packing[:, packing.shape[1] // 2 :].flatten().long()] = True
    values = values.repeat_interleave(size * width // len(values)).view(size, width)
    held = rows.clone()
    slots = {name: given[name] for name in ("pool", "layer_offsets", "cache_strides", "slots", "packing")}
    ops.log_all_layers(**slots, rows=held)
    return {"rows": _laid_out_as(rows, torch.where(values.to(rows.device), held, rows))}


def one(name: str, change: Callable[[Any], Any]) -> Change:
    """The change of one argument."""
    return lambda given: {name: change(given[name])}


def one_logit_more(cu_num_logits: Tensor) -> Tensor:
    """The last row of a prefill or a plain decode is then a draft."""
    return cu_num_logits + torch.arange(len(cu_num_logits)).to(cu_num_logits)


# -- anything else -----------------------------------------------------------------------------------------------------


def left_out(operator: str) -> Callable[[Replace], None]:
    return lambda replace: instead_of(operator, lambda move, given: None, replace)


def never_committed(replace: Replace) -> None:
    replace(DraftCommitManager, "commit", lambda self, num_rejected: self._close())


def committed_late(replace: Replace) -> None:
    begin, commit, waiting = DraftCommitManager.begin, DraftCommitManager.commit, list[Callable[[], None]]()

    def wait(self: Any, num_rejected: Tensor) -> Any:
        if not self.way.attends:  # a logged step has no row that waits
            return commit(self, num_rejected)
        waiting.append(functools.partial(self.way.commit, num_rejected.clone()))
        return self._close()

    def begin_and_commit(self: DraftCommitManager, *arguments: Any, **named: Any) -> Any:
        while waiting:
            waiting.pop()()
        return begin(self, *arguments, **named)

    replace(DraftCommitManager, "commit", wait)
    replace(DraftCommitManager, "begin", begin_and_commit)


def written_between_steps(replace: Replace) -> None:
    from nwor.vllm import stats

    commit, add_to_output, committed = DraftCommitManager.commit, stats.add_to_output, []

    def commit_and_remember(self: DraftCommitManager, num_rejected: Tensor) -> None:
        commit(self, num_rejected)
        committed.append(self.layout)

    def add_and_write(*arguments: Any) -> None:
        add_to_output(*arguments)
        while committed:
            layout = committed.pop()
            layout.pool[layout.layer_offsets[-1]] ^= 1

    replace(DraftCommitManager, "commit", commit_and_remember)
    replace(stats, "add_to_output", add_and_write)


def slots_of_first_group(replace: Replace) -> None:
    from nwor.vllm.context import RunnerContext

    begin, read_later = RunnerContext.begin, []

    def begin_on_first(self: Any, starts: Any, logits: Any, slot_mappings: Any, *rest: Any) -> None:
        if isinstance(slot_mappings, Mapping):
            slot_mappings = dict.fromkeys(slot_mappings, next(iter(slot_mappings.values())))
        else:  # one tensor, under the V2 runner
            slot_mappings = slot_mappings[:1].expand_as(slot_mappings).contiguous()
        read_later.append(slot_mappings)
        begin(self, starts, logits, slot_mappings, *rest)

    replace(RunnerContext, "begin", begin_on_first)


def first_group_committed(replace: Replace) -> None:
    from nwor.vllm.context import RunnerContext

    def commit_first(self: Any, num_rejected: Tensor) -> None:
        first, *others = self.groups
        if first.manager.is_open:
            first.manager.commit(num_rejected)
            for group in others:
                group.manager._close()

    replace(RunnerContext, "commit", commit_first)


# -- what attention sees -----------------------------------------------------------------------------------------------


def drafts_hidden(given: Arguments, heads: slice = slice(None)) -> Arguments:
    """Zeros in place of the drafts' keys and values: on a CPU they lie in `staging`, on a GPU beside the pages."""
    if "key" not in given:
        staging = given["staging"].clone()
        staging[:, heads] = 0
        return {"staging": staging}
    drafts = torch.ones(len(given["key"]), dtype=torch.bool, device=given["key"].device)
    drafts[given["query_start_loc"][:-1].long().clamp(max=len(drafts) - 1)] = False
    hidden = {name: given[name].clone() for name in ("key", "value")}
    for rows in hidden.values():
        rows[:, heads] = rows[:, heads].masked_fill(drafts.view(-1, 1, 1), 0)
    return hidden


def last_page_missed(given: Arguments) -> Arguments:
    """The last whole page before each window is read from where the one before it lies."""
    table, lengths = given["block_table"], given["query_start_loc"].diff().long()
    prefix = given["seq_lens"][: len(lengths)].long() - lengths
    page = (prefix // given["kv_cache"].shape[2] - 1).clamp(min=1)[:, None]
    rows = table[: len(page)]
    return {"block_table": rows.scatter(1, page, rows.gather(1, page - 1))}


def attend_twice(attend: Callable[..., None], given: Arguments, change: Change) -> None:
    """Attend and store the rows, then attend over what is changed, and store none."""
    attend(**given)
    stored = {name: torch.full_like(given[name], -1) for name in ("page_slots", "staging_rows") if name in given}
    attend(**(given | change(given) | stored))


def attends_over(change: Change) -> Callable[[Replace], None]:
    """`stage` of a CPU or a GPU; the layers of a worker that is up have to make their attention anew (`start`)."""
    step = "query", "key", "value", "kv_cache", "output", "query_start_loc", "seq_lens", "block_table", "page_slots"

    def patch(replace: Replace) -> None:
        if not torch.cuda.is_available():
            attend = ops.verify_attention

            def faulty(*arguments: Any, **named: Any) -> None:
                by_place = zip(ops.OPERATORS["verify_attention"], arguments, strict=False)
                attend_twice(attend, named | dict(by_place), change)

            replace(ops, "verify_attention", faulty)
            return
        from nwor.attention import verify
        from nwor.vllm import attention_gpu

        hook: Any = attention_gpu
        make = hook._layer_attention

        def make_faulty(*arguments: Any) -> Callable[..., None]:
            layer = make(*arguments)
            fixed = {field.name: getattr(layer, field.name) for field in fields(layer)}
            return lambda *given: attend_twice(
                verify.verify_attention, fixed | dict(zip(step, given, strict=True)), change
            )

        replace(attention_gpu, "_layer_attention", make_faulty)

    return patch
