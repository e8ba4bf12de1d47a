# SPDX-License-Identifier: Apache-2.0
"""Faults to inject on purpose, each a way this has failed before: one catalogue for tests, notebooks and the margin.

    with FAULTS["commit: one row too many"].inject():
        ...  # every engine of this process commits a row that the verifier rejected

A worker that is up takes one by `start` and gives it back by `end`, both through vLLM's ``collective_rpc``:

    engine.on_every_rank(functools.partial(faults.start, name="commit: one row too many"))
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

from nwor_lab.faults import wrong
from nwor_lab.faults.wrong import Change, Replace

DIRTY, UNWRITTEN, WRONG, STRAY = "dirty_layer_steps", "unwritten_rows", "wrong_rows", "stray_slots"


@dataclass(frozen=True, eq=False)
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
    red: Collection[str] = frozenset()
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

HELD, BOTH, COMMIT, RESTORE = ("stage",), ("cow", "stage"), "commit_all_layers", "restore_all_layers"
GROUPS = "several cache groups"

_EVERY = (
    Fault("commit: nothing", "A step ends without its commit.", {UNWRITTEN, DIRTY}, HELD, patch=wrong.never_committed),
    Fault("commit: one layer", "Kept drafts reach the pages of the first layer alone.", {UNWRITTEN}, HELD,
          operator=COMMIT, change=wrong.first_layer_only),
    Fault("commit: another layer's bytes", "Each layer gets the rows of its neighbour.", {WRONG}, HELD,
          operator=COMMIT, change=wrong.another_layer),
    Fault("commit: keys without values", "Half of each kept row is not written.", {UNWRITTEN}, HELD,
          operator=COMMIT, change=wrong.values_as_they_were),
    Fault("commit: one row too many", "A rejected row is written.", {DIRTY}, HELD,
          operator=COMMIT, change=wrong.one_less_rejected),
    Fault("commit: one row too few", "The last kept draft is not written.", {UNWRITTEN}, HELD,
          operator=COMMIT, change=wrong.one_more_rejected),
    Fault("commit: in the next step", "Rows come a step late.", {UNWRITTEN, DIRTY}, HELD, patch=wrong.committed_late),
    Fault("log: nothing", "What a restore puts back was never saved.", {DIRTY}, BOTH,
          patch=wrong.left_out("log_all_layers")),
    Fault("restore: nothing", "Rejected rows stay in the pages.", {DIRTY}, BOTH, patch=wrong.left_out(RESTORE)),
    Fault("restore: another layer's bytes", "Each layer gets back what its neighbour held.", {DIRTY}, BOTH,
          operator=RESTORE, change=wrong.another_layer),
    Fault("restore: one row too many", "The last kept draft is undone.", {UNWRITTEN}, BOTH,
          operator=RESTORE, change=wrong.one_more_rejected),
    Fault("a write between steps", "A byte changes when no step runs.", {STRAY}, BOTH,
          patch=wrong.written_between_steps),
    Fault("groups: slots of the first", "Each cache group's window opens on the first one's slots.", {DIRTY}, ("cow",),
          needs=GROUPS, patch=wrong.slots_of_first_group),
    Fault("groups: the first alone is committed", "The windows of the other cache groups are dropped.", {UNWRITTEN},
          HELD, needs=GROUPS, patch=wrong.first_group_committed),
    # No byte of the cache is wrong: tokens are, and log-probabilities shift.
    Fault("attention: drafts hidden", "No query sees the drafts before it, the second generation's flaw.", modes=HELD,
          patch=wrong.attends_over(wrong.drafts_hidden)),
    Fault("attention: drafts hidden from one head", "One KV head does not see the drafts.", modes=HELD,
          patch=wrong.attends_over(lambda given: wrong.drafts_hidden(given, slice(1)))),
    Fault("attention: a page missed", "The last whole page before a window is not read.", modes=HELD,
          patch=wrong.attends_over(wrong.last_page_missed)),
    # Of operators that no mode runs, and of what opens a window: the comparison with plain Python sees them.
    Fault("layer: the layout guessed", "A cache of as many heads as slots in a block is taken for one of the other "
          "layout.", operator="commit_draft_layer", change=wrong.one("key_cache", lambda cache: cache.transpose(1, 2))),
    Fault("layer: the scale ignored", "Keys are quantised as if their scale were 1.", operator="commit_draft_layer",
          change=wrong.one("k_scale", lambda scale: None)),
    Fault("layer: rejected rows kept", "Accepted rows are undone.", operator="restore_rejected_drafts",
          change=wrong.one("accepted_mask", lambda mask: ~mask)),
    Fault("layer: slots of the captured step", "A replayed graph reads the slots that it was captured with.",
          operator="log_cache_slots", change=wrong.one("slot_mapping", lambda slots: slots.roll(1))),
    Fault("layer: one staged row too few", "The last accepted row is lost.", operator="commit_staged_kv_cache",
          change=wrong.one("accepted_len", lambda accepted: (accepted - 1).clamp(min=0))),
    Fault("window: prefill rows for drafts", "The last row of a prefill is held back.", operator="open_window",
          change=wrong.one("cu_num_logits", wrong.one_logit_more)),
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

_injected = ExitStack()


def start(worker: Any, name: str) -> None:
    """Inject a fault into this worker until `end`; in place of the one before. Graphs have to be captured again."""
    end(worker)
    _injected.enter_context(FAULTS[name].inject())
    _remake_attention(worker)


def end(worker: Any) -> None:
    """End the fault that `start` has injected, if there is one."""
    _injected.close()
    _remake_attention(worker)


def _remake_attention(worker: Any) -> None:
    from nwor.vllm.context import context_of, set_served_groups

    set_served_groups(worker.model_runner, context_of(worker.model_runner).groups)
