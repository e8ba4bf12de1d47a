# SPDX-License-Identifier: Apache-2.0
"""The tables that notebook 01 makes of the four policies."""

import pandas as pd
import pytest

from nwor_lab import results
from nwor_lab.model.traffic import MODES
from nwor_lab.reference import compare
from tests.lab.reference_models import compared

K = 3


@pytest.fixture(scope="module")
def runs():
    return compared(K)


def test_outcome_is_tidy_and_consistent(runs):
    frame = results.tidy(compare.outcome(runs), k=K, batch=3)
    value = frame[frame["position"].isna()].set_index(["mode", "metric"])["value"]
    assert set(frame["mode"]) == set(MODES)
    assert value["cow", "same_tokens"] == value["stage", "same_tokens"] == 1.0
    assert value["off", "dirty_bytes"] > value["cow", "dirty_bytes"] == value["stage", "dirty_bytes"] == 0
    for mode in MODES:
        survival = frame[(frame["metric"] == "survival") & (frame["mode"] == mode)].sort_values("position")["value"]
        assert len(survival) == K and survival.is_monotonic_decreasing
        assert 1 + survival.sum() == pytest.approx(value[mode, "acceptance_length"])
    assert value["off", "acceptance_length"] > 1.0


def test_counted_and_formula_agree_in_the_table(runs):
    frame = pd.DataFrame(compare.traffic_of_a_window(runs))
    both = frame.pivot_table(index=["mode", "kind", "metric"], columns="origin", values="value")
    assert not both.isna().any().any()
    assert (both["counted"] == both["formula"]).all()
    assert both.loc[("stage", "commit", "launches"), "counted"] == 1
    assert both.loc[("off", "write", "launches"), "counted"] == 3


def test_the_figure_is_saved_with_its_data(runs, tmp_path):
    run = results.Run(tmp_path / "run", "01")
    frame = run.table("reference", compare.outcome(runs), k=K, batch=3)
    pdf = compare.figure(run, frame)
    assert pdf.read_bytes().startswith(b"%PDF")
    assert "k=3, 3 prompts" in pdf.with_suffix(".txt").read_text()
    assert len(pd.read_csv(pdf.with_suffix(".csv"))) == len(frame)
