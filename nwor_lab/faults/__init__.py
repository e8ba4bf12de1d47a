# SPDX-License-Identifier: Apache-2.0
"""Faults to inject on purpose, each a way this has failed before: one catalogue for tests, notebooks and the margin.

    with FAULTS["commit: one row too many"].inject():
        ...  # every engine of this process commits a row that the verifier rejected

A worker that is up takes one by `start` and gives it back by `end`, both through vLLM's ``collective_rpc``:

    engine.on_every_rank(functools.partial(faults.start, name="commit: one row too many"))
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

from nwor_lab.faults import wrong
from nwor_lab.faults.wrong import Change, Replace

DIRTY, UNWRITTEN, WRONG, STRAY = "dirty_layer_steps", "unwritten_rows", "wrong_rows", "stray_slots"


@dataclass(frozen=True)
class Fault:
    """One way in which what a mode moves, or what its attention sees, is wrong.

    name: what goes wrong, and before the colon where.
    breaks: what that is, in a sentence.
    red: the fields of `AuditReport` that it makes red, and no others; none where no byte of the cache is wrong.
    modes: those that it can be injected into; none where no mode runs the operator.
    needs: what an engine must have for it to show; empty for any.
    operator, change: where the fault is wrong arguments of an operator of `nwor.ops`, which and how.
    patch: injects it by replacing attributes, where it is anything else.
    """

    name: str
    breaks: str
    red: frozenset[str] = frozenset()
    modes: tuple[str, ...] = ()
    needs: str = ""
    operator: str = ""
    change: Change | None = None
    patch: Callable[[Replace], None] | None = None

    def __call__(self, patch: Any) -> None:
        """Inject it for as long as a `pytest.MonkeyPatch` lasts, as if it came after the check at start-up."""
        from nwor.vllm import self_check

        patch.setattr(self_check, "failure", lambda *arguments: "")
        self.apply(patch.setattr)

    def apply(self, replace: Replace) -> None:
        """Inject it, and let the check at start-up see it."""
        if self.patch is not None:
            self.patch(replace)
        elif self.change is not None:
            change = self.change
            wrong.instead_of(self.operator, lambda move, given: move(**(given | change(given))), replace)

    @contextmanager
    def inject(self) -> Iterator[None]:
        """Inject it into every engine of this process for the length of a block."""
        with ExitStack() as stack:
            self.apply(lambda *attribute: stack.enter_context(mock.patch.object(*attribute)))
            yield

    def __reduce__(self) -> tuple[Any, ...]:  # by its name, since what it calls may be local to a function
        return by_name, (self.name,)


# -- the catalogue -----------------------------------------------------------------------------------------------------

HELD, BOTH = ("stage",), ("cow", "stage")
GROUPS, FP8 = "several cache groups", "an fp8 cache"
COMMIT, RESTORE = "commit_all_layers", "restore_all_layers"


def _of(name: str, breaks: str, red: str = "", modes: tuple[str, ...] = (), **how: Any) -> Fault:
    return Fault(name, breaks, frozenset(red.split()), modes, **how)


def _wrong(operator: str, argument: str, name: str, breaks: str, change: Callable[[Any], Any]) -> Fault:
    return Fault(name, breaks, operator=operator, change=wrong.one(argument, change))


_EVERY = (
    _of("commit: nothing", "A step ends without its commit or restore.", f"{UNWRITTEN} {DIRTY}", HELD,
        patch=wrong.never_committed),
    _of("commit: one layer", "Kept drafts reach the pages of the first layer alone.", UNWRITTEN, HELD,
        operator=COMMIT, change=wrong.first_layer_only),
    _of("commit: another layer's bytes", "Each layer gets the rows of its neighbour.", WRONG, HELD,
        operator=COMMIT, change=wrong.another_layer),
    _of("commit: another request's bytes", "Two requests get each other's rows.", WRONG, HELD,
        operator=COMMIT, change=wrong.another_request),
    _of("commit: another head's bytes", "Heads get each other's rows.", WRONG, HELD,
        operator=COMMIT, change=wrong.another_head),
    _of("commit: keys without values", "Half of each kept row is not written.", UNWRITTEN, HELD,
        patch=wrong.part_committed("keys")),
    _of("commit: one head", "Kept rows are written for the first head alone.", UNWRITTEN, HELD,
        patch=wrong.part_committed("head 0")),
    _of("commit: one row too many", "A rejected row is written.", DIRTY, HELD,
        operator=COMMIT, change=wrong.one_less_rejected),
    _of("commit: one row too few", "The last kept draft is not written.", UNWRITTEN, HELD,
        operator=COMMIT, change=wrong.one_more_rejected),
    _of("commit: in the next step", "Rows come a step late.", f"{UNWRITTEN} {DIRTY}", HELD, patch=wrong.committed_late),
    _of("log: nothing", "What a restore puts back was never saved.", DIRTY, HELD,
        patch=wrong.left_out("log_all_layers")),
    _of("log: stale", "The log holds the bytes of the first step.", DIRTY, ("cow",), patch=wrong.logged_once),
    _of("restore: nothing", "Rejected rows stay in the pages.", DIRTY, BOTH, patch=wrong.left_out(RESTORE)),
    _of("restore: another layer's bytes", "Each layer gets back what its neighbour held.", DIRTY, BOTH,
        operator=RESTORE, change=wrong.another_layer),
    _of("restore: another request's bytes", "Two requests get back what the other's slots held.", DIRTY, ("cow",),
        operator=RESTORE, change=wrong.another_request),
    _of("restore: another head's bytes", "Heads get back what the others held.", DIRTY, ("cow",),
        operator=RESTORE, change=wrong.another_head),
    _of("restore: one row too many", "The last kept draft is undone.", UNWRITTEN, BOTH,
        operator=RESTORE, change=wrong.one_more_rejected),
    _of("restore: one row too few", "A rejected row stays in the pages.", DIRTY, BOTH,
        operator=RESTORE, change=wrong.one_less_rejected),
    _of("restore: requantised", "Old fp8 bytes come back as rounded numbers.", DIRTY, ("cow",),
        needs=FP8, operator=RESTORE, change=wrong.requantised),
    _of("a write between steps", "A byte changes when no step runs.", STRAY, BOTH, patch=wrong.written_between_steps),
    _of("groups: slots of the first", "Each cache group's window opens on the first one's slots.", DIRTY, ("cow",),
        needs=GROUPS, patch=wrong.slots_of_first_group),
    _of("groups: the first alone is committed", "The windows of the other cache groups are dropped.", UNWRITTEN, HELD,
        needs=GROUPS, patch=wrong.first_group_committed),
    _of("groups: the first alone is restored", "The windows of the other cache groups are dropped.", DIRTY, ("cow",),
        needs=GROUPS, patch=wrong.first_group_committed),
    # No byte of the cache is wrong: tokens are, and log-probabilities shift.
    _of("attention: drafts hidden", "No query sees the drafts before it, the second generation's flaw.", modes=HELD,
        patch=wrong.attends_over(wrong.drafts_hidden)),
    _of("attention: drafts hidden from one head", "One KV head does not see the drafts.", modes=HELD,
        patch=wrong.attends_over(lambda given: wrong.drafts_hidden(given, slice(1)))),
    _of("attention: a page missed", "The last whole page before a window is not read.", modes=HELD,
        patch=wrong.attends_over(wrong.last_page_missed)),
    # Of operators that no mode runs, and of what opens a window: the comparison with plain Python sees them.
    _wrong("commit_draft_layer", "key_cache", "layer: the layout guessed", "A cache of as many heads as slots in a "
           "block is taken for one of the other layout.", lambda cache: cache.transpose(1, 2)),
    _wrong("commit_draft_layer", "k_scale", "layer: the scale ignored", "Keys are quantised as if their scale were 1.",
           lambda scale: None),
    _wrong("commit_draft_layer", "accepted_mask", "layer: the mask a row late", "Each row gets the verdict of the one "
           "before.", lambda mask: mask.roll(1)),
    _wrong("commit_draft_layer", "value_cache", "layer: keys without values", "Values are not written.",
           lambda cache: cache.clone()),
    _wrong("restore_rejected_drafts", "accepted_mask", "layer: rejected rows kept", "Accepted rows are undone.",
           lambda mask: ~mask),
    _wrong("log_cache_slots", "slot_mapping", "layer: slots of the captured step", "A replayed graph reads the slots "
           "that it was captured with.", lambda slots: slots.roll(1)),
    _wrong("commit_staged_kv_cache", "accepted_len", "layer: one staged row too few", "The last accepted row is lost.",
           lambda accepted: (accepted - 1).clamp(min=0)),
    _wrong("open_window", "cu_num_logits", "window: prefill rows for drafts", "The last row of a prefill is held back.",
           wrong.one_logit_more),
    _wrong("open_window", "slot_mapping", "window: slots of the step before", "Rows are held for other slots than "
           "theirs.", lambda slots: slots.roll(1)),
)  # fmt: skip
FAULTS: dict[str, Fault] = {fault.name: fault for fault in _EVERY}
"""The catalogue, by name."""
MARGIN = tuple(fault.name for fault in _EVERY if fault.name.startswith("attention: "))
"""Those that parity has to tell from rounding (`nwor_lab.bench.parity_margin`)."""


def by_name(name: str) -> Fault:
    return FAULTS[name]


def injectable(mode: str, needs: str = "") -> list[Fault]:
    """The faults that make an audit of this mode red, on an engine that has what is needed."""
    return [fault for fault in _EVERY if mode in fault.modes and fault.red and fault.needs == needs]


# -- in a worker that is up --------------------------------------------------------------------------------------------

_injected: list[AbstractContextManager[None]] = []


def start(worker: Any, name: str) -> None:
    """Inject a fault into this worker until `end`; in place of the one before. Graphs have to be captured again."""
    end(worker)
    _injected.append(FAULTS[name].inject())
    _injected[-1].__enter__()
    _remake_attention(worker)


def end(worker: Any) -> None:
    """End the fault that `start` has injected, if there is one."""
    while _injected:
        _injected.pop().__exit__(None, None, None)
    _remake_attention(worker)


def _remake_attention(worker: Any) -> None:
    from nwor.vllm.context import context_of, set_served_groups

    set_served_groups(worker.model_runner, context_of(worker.model_runner).groups)
