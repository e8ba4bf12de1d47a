# SPDX-License-Identifier: Apache-2.0
"""Tolerances of parity lie between what rounding does and what injected faults do: as recorded, and in live engines."""

import pytest

from nwor import ops
from nwor_lab import faults, paths
from nwor_lab.bench import parity_margin
from nwor_lab.bench.parity import tolerance
from nwor_lab.faults import wrong
from nwor_lab.run import results
from tests.lab.attention import Problem, identity_packing

ONE_HEAD = "attention: drafts hidden from one head"
"""What the other heads may drown."""


BEFORE = {
    "tail_unseen": "attention: drafts hidden",
    "one_head_unseen": ONE_HEAD,
    "last_page_missed": "attention: a page missed",
}
"""Names of the faults in the recorded table."""


def test_every_tolerance_lies_above_all_noise_and_below_every_fault():
    table = results.read_table("parity_margin", paths.RECORDED).replace({"fault": BEFORE})
    table = table[(table["metric"] == "shift") & table["fault"].isin([parity_margin.NOISE, *faults.MARGIN])]
    configurations = table.groupby(parity_margin.WHERE)
    assert len(configurations) >= 7
    for (device, weights, dtype, cache), rows in configurations:
        shifts = rows.groupby("fault")["value"].agg(["min", "max"])
        assert {*shifts.index} == {parity_margin.NOISE, *faults.MARGIN}
        on_gpu, random = device != "CPU", weights == "random weights"
        bound, room = tolerance(dtype, cache, random, on_gpu), 1.04 if on_gpu and cache == "fp8" else 1.15
        least = shifts["min"].drop([parity_margin.NOISE, ONE_HEAD]).min()
        assert room * shifts.loc[parity_margin.NOISE, "max"] < bound < least / room, (device, weights, dtype, cache)


CHANGES = {
    "drafts hidden": (wrong.drafts_hidden, [0, 1, 1, 1, 1, 0, 1, 1], 4),
    "drafts hidden from one head": (lambda given: wrong.drafts_hidden(given, slice(1)), [0, 1, 1, 1, 1, 0, 1, 1], 2),
    "a page missed": (wrong.last_page_missed, 8 * [1], 4),
}
"""Of each change the rows that it moves, of two windows of 5 and 3 rows, and how many of 4 query heads."""


@pytest.mark.parametrize("name", CHANGES)
def test_a_fault_is_what_its_name_says(name):
    problem = Problem([(40, 5), (70, 3)], packing=identity_packing(16, 64))
    right = problem.run().clone()
    change, rows, heads = CHANGES[name]
    wrong.attend_twice(ops.verify_attention, problem.arguments(), change)
    moved = (problem.output - right).abs().amax(dim=2) > 1e-4
    assert moved.any(dim=1).int().tolist() == rows and int(moved.any(dim=0).sum()) == heads


@pytest.mark.engine
@pytest.mark.timeout(900)
def test_rounding_passes_and_no_fault_does(monkeypatch):
    """The shipped pair in bfloat16: vanilla and the mode side by side."""
    monkeypatch.setattr(parity_margin, "TOKENS", 24)
    spec, prompts, _ = parity_margin.of_pair("bfloat16", "auto")
    table = parity_margin.measure(spec, prompts[:8], (8,))
    shifts = table[table["metric"] == "shift"].set_index("fault")["value"] / tolerance("bfloat16")
    assert list(shifts.index) == [parity_margin.NOISE, *faults.MARGIN] and table["places"].iloc[0] > 100
    assert shifts.iloc[0] < 1 and shifts.iloc[1:].min() > 2, shifts
