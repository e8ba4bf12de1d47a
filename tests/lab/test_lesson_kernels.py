# SPDX-License-Identifier: Apache-2.0
"""What notebook 02 gives its reader: commits of which one is broken, a comparison with a loop, pictures of pages."""

from math import nan

import pandas as pd
import torch

from nwor_lab.faults import COMMIT
from nwor_lab.figures import pool
from nwor_lab.operators import check, reference


def test_one_of_three_suspects_is_broken_and_drawn_calls_show_which() -> None:
    broken = set()
    for seed in range(8):
        suspects = check.suspects(seed)
        found = []
        for suspect in suspects:
            wrong = 0
            for number in range(16):
                twins = reference.Twins(*(args := check.drawn_commit(number)))
                reference.run(COMMIT, twins.copies, "cpu")
                suspect(*args)
                wrong += twins.compare()[1]
            found += [str(suspect)] * (wrong > 0)
        assert found == [str(suspect) for suspect in suspects if suspect.fault]
        broken |= set(found)
    assert len(broken) > 1, "it is not always the same one"


def test_a_loop_of_ones_own_is_held_to_the_operator() -> None:
    right = check.beside(lambda *args: reference.run(COMMIT, args, "cpu"), COMMIT, 8, 0)
    nothing = check.beside(lambda *args: None, COMMIT, 8, 0)
    assert right["bytes_differing"] == 0 < nothing["bytes_differing"] < right["bytes_compared"]


def test_a_table_has_a_line_an_operator_and_a_cache(tmp_path) -> None:
    compared = check.compare("cpu", 1, 0)
    table = check.by_operator(compared, check.against_vllm("cpu", 0).assign(device="cpu"))
    assert table.loc[("plain Python", COMMIT), ("cpu", "compared")] > 0 == table["cpu"]["differing"].sum()
    assert ("vLLM's own writer", "cache auto") in table.index
    assert len(check.by_operator(compared, pd.DataFrame())) == compared["operator"].nunique()


def test_slots_are_drawn_as_poison_as_they_were_or_as_changed(tmp_path) -> None:
    first = torch.tensor([[[nan, 1.0, 2.0, nan]]])
    then = torch.tensor([[[nan, 1.0, 3.0, 4.0]]])
    frame = pool.cells({"before": {"block": first}, "after": {"block": then}})
    assert frame["state"].tolist() == ["poison", "same", "same", "poison", "poison", "same", "changed", "changed"]
    assert pool.pages(tmp_path, "pages", frame).is_file()
