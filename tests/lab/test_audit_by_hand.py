# SPDX-License-Identifier: Apache-2.0
"""A few steps by hand, for lesson 00: the audit is clean, and each fault of the catalogue turns its own fields red."""

import pytest

from nwor_lab import audit_by_hand
from nwor_lab.faults import injectable

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
