# SPDX-License-Identifier: Apache-2.0
"""A few steps by hand, for lesson 00: the audit is clean, and each fault of the catalogue turns its own fields red."""

import pytest

from nwor_lab import audit_by_hand
from nwor_lab.faults import injectable
from nwor_lab.figures import style, tour

EACH = [(mode, fault) for mode in ("cow", "stage") for fault in injectable(mode)]


@pytest.mark.parametrize("mode", ["cow", "stage"])
@pytest.mark.parametrize("seed", range(3))
def test_without_a_fault_the_steps_are_clean_and_all_bytes_are_compared(mode: str, seed: int) -> None:
    audited = audit_by_hand.run(mode=mode, seed=seed)
    assert audited.report.clean and audited.red == set() and audited.examples == []
    assert audited.report.content_checked == audited.report.kept_rows > 50


@pytest.mark.parametrize(("mode", "fault"), EACH, ids=[f"{mode} {fault.name}" for mode, fault in EACH])
def test_a_fault_turns_its_own_fields_red(mode, fault) -> None:
    audited = audit_by_hand.run(fault, mode)
    assert audited.red == set(fault.red)
    assert len(audited.where()) == len(audited.examples) > 0, "each is read"
    assert audit_by_hand.run(mode=mode).red == set(), "it ends with its steps"


def test_what_is_offered_can_be_injected_and_is_shown() -> None:
    offered = audit_by_hand.offered()
    assert {fault.name for _, fault in EACH} == set(offered)
    assert all(mode in fault.modes for fault, mode in offered.values())
    audited = audit_by_hand.run(*offered["commit: keys without values"])
    first = audited.where().iloc[0]
    assert (first["head"], first["half"]) == ("0", "values")
    pages = audited.pages()
    assert (pages["state"] == "wrong").sum() == len(audited.where().drop_duplicates(["layer", "slot"]))
    assert len(tour.named(pages).axes) == audit_by_hand.LAYERS
    style.close()


def test_vanilla_has_no_manager_to_audit() -> None:
    with pytest.raises(ValueError, match="off"):
        audit_by_hand.run(mode="off")
