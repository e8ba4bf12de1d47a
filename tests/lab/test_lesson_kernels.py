# SPDX-License-Identifier: Apache-2.0
"""What notebook 02 gives its reader: commits of which one is broken, a comparison with a loop, pictures of pages."""

from math import nan

import torch

from nwor_lab.faults import COMMIT
from nwor_lab.figures import pool
from nwor_lab.operators import check, reference


def test_a_loop_of_ones_own_is_held_to_the_operator() -> None:
    right = check.beside(lambda *args: reference.run(COMMIT, args, "cpu"), COMMIT, 8, 0)
    nothing = check.beside(lambda *args: None, COMMIT, 8, 0)
    assert right["bytes_differing"] == 0 < nothing["bytes_differing"] < right["bytes_compared"]


def test_slots_are_drawn_as_poison_as_they_were_or_as_changed(tmp_path) -> None:
    first = torch.tensor([[[nan, 1.0, 2.0, nan]]])
    then = torch.tensor([[[nan, 1.0, 3.0, 4.0]]])
    frame = pool.cells({"before": {"block": first}, "after": {"block": then}})
    assert frame["state"].tolist() == ["poison", "same", "same", "poison", "poison", "same", "changed", "changed"]
    assert pool.pages(tmp_path, "pages", frame).is_file()
