# SPDX-License-Identifier: Apache-2.0
"""The audit of several cache groups over one memory, without an engine."""

import pytest
import torch

from nwor_lab.audit.auditor import CacheAudit
from nwor_lab.audit.groups import GroupsAudit

SIZE = 4  # slots of a block
STARTS, TABLES = (0, 3), {0: [[1, 2]], 1: [[3]], 2: [[5]]}
SLOTS = {0: torch.tensor([4, 5, 6]), 1: torch.tensor([12, 13, 14]), 2: torch.tensor([20, 21, 22])}


class Overlaid:
    """Groups 0 and 1 of one layer each, which are the same memory; group 2 is a drafter's."""

    def __init__(self) -> None:
        self.cache = torch.zeros(6, 2, SIZE, 8)
        audits = {index: CacheAudit([self.cache]) for index in (0, 1)}
        self.audit = GroupsAudit(audits, [SIZE] * 3, 6)
        self.audit.before(STARTS, SLOTS, TABLES)

    def write(self, *slots: int) -> None:
        for slot in slots:
            self.cache[slot // SIZE, :, slot % SIZE] = torch.rand(2, 8)

    def end(self) -> tuple[int, int, int]:
        """Close the step, of whose rows the last is rejected; returns slots dirty and stray, and rows not written."""
        self.audit.after([1])
        self.audit.look_between_steps()
        report = self.audit.report
        return report.dirty_slots, report.stray_slots, report.unwritten_rows


KEPT = (4, 5, 12, 13)


@pytest.mark.parametrize(
    ("slots", "found"),
    [
        (KEPT, (0, 0, 0)),
        ((*KEPT, 6), (1, 0, 0)),  # group 0's rejected row
        ((*KEPT, 14), (1, 0, 0)),  # group 1's
        ((4, 5, 12), (0, 0, 1)),  # a kept row of group 1
        ((*KEPT, 8), (1, 0, 0)),  # a block behind group 0's rows, where a drafter writes between steps
        ((*KEPT, 20), (0, 0, 0)),  # the drafter's
        ((*KEPT, 0), (2, 0, 0)),  # block 0 is nobody's: each group objects
        ((*KEPT, 16), (2, 0, 0)),  # nobody has had block 4
    ],
)
def test_what_is_written_is_held_against_the_group_that_has_the_block(slots, found):
    made = Overlaid()
    made.write(*slots)
    assert made.end() == found
    report = made.audit.report
    assert (report.steps, report.layer_steps, report.kept_rows) == (1, 2, 4)


def test_what_another_group_has_poisoned_is_not_stray():
    cache = torch.zeros(6, 2, SIZE, 8)
    audits = {0: CacheAudit([cache]), 1: CacheAudit([torch.zeros_like(cache), cache])}
    audit = GroupsAudit(audits, [SIZE] * 2, 6)
    audit.look_between_steps()
    assert audit.report.stray_slots == 0


def test_a_drafter_may_write_over_another_groups_layer_in_its_own_blocks():
    """Its layer lies in group 2's blocks here; between steps anything else is stray."""
    made = Overlaid()
    made.write(*KEPT)
    made.audit.after([1])
    made.write(20)
    made.audit.look_between_steps()
    assert made.audit.report.stray_slots == 0
    made.write(12)
    made.audit.look_between_steps()
    assert made.audit.report.stray_slots == 1
    assert made.audit.examples == ["group 1, step 1, layer 0, slot 12, all heads: changed before the step"]


def test_a_block_changes_hands():
    """What a window has left is still named by its table; the group whose rows lie there has it."""
    made = Overlaid()
    made.write(*KEPT)
    made.audit.after([1])
    slots = {0: torch.tensor([13]), 1: torch.tensor([16]), 2: torch.tensor([20])}
    made.audit.before((0, 1), slots, {0: [[1, 3]], 1: [[3, 4]], 2: [[5]]})
    made.write(13, 16, 14)
    made.audit.after([0])
    assert (made.audit.report.dirty_slots, made.audit.report.unwritten_rows) == (1, 0), "14 is group 0's now"
    assert made.audit.examples[0].startswith("group 0, step 1, layer 0, slot 14")


class BesideStates:
    """Group 1 is a recurrent one, whose states lie over group 0's layer; vLLM makes no slots for such a group."""

    def __init__(self, recurrent: set[int]) -> None:
        self.cache = torch.zeros(7, 2, SIZE, 8)
        audits = {0: CacheAudit([self.cache])}
        self.audit = GroupsAudit(audits, [SIZE, 512], 7, recurrent)
        self.step({0: [[1, 2]], 1: [[3, 4]]})

    def step(self, tables: dict[int, list[list[int]]], *written: int) -> None:
        """A step whose last row is rejected, in which these blocks' states are written."""
        slots = {0: torch.tensor([4, 5, 6]), 1: torch.zeros(3, dtype=torch.int64)}
        self.audit.before(STARTS, slots, tables)
        self.cache[[*written]] = torch.rand(len(written), 2, SIZE, 8)
        for slot in (4, 5):
            self.cache[1, :, slot % SIZE] = torch.rand(2, 8)
        self.audit.after([1])


def test_states_are_passed_over_in_blocks_of_their_own_alone():
    """Else they are dirty: in a block that attention has, that nobody has had, or that has gone back to attention."""
    beside, unknown = BesideStates({1}), BesideStates(set())
    for made in (beside, unknown):
        made.step({0: [[1, 2]], 1: [[3, 4]]}, 3, 4)
    assert (beside.audit.report.dirty_slots, unknown.audit.report.dirty_slots) == (0, 2 * SIZE)
    beside.step({0: [[1, 2]], 1: [[3, 4]]}, 2, 5)
    beside.step({0: [[1, 4]], 1: [[3, 6]]}, 4, 6)
    assert (beside.audit.report.dirty_slots, beside.audit.report.unwritten_rows) == (3 * SIZE, 0)


@pytest.mark.parametrize(("accepted", "stray"), [(True, 0), (False, SIZE)])
def test_a_new_block_is_taken_as_zeroed(accepted, stray):
    made = BesideStates({1})
    made.cache[5] = 0.0
    if accepted:
        made.audit.accept([5])
    made.step({0: [[1, 5]], 1: [[3, 4]]})
    assert (made.audit.report.stray_slots, made.audit.report.dirty_slots) == (stray, 0)
    made.cache[5] = 1.0
    made.audit.look_between_steps()
    assert made.audit.report.stray_slots == stray + SIZE
