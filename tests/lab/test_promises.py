# SPDX-License-Identifier: Apache-2.0
"""What was promised beside what was measured: every promise has its own number, and a missing one is an error."""

from __future__ import annotations

from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest

from docs import values
from nwor_lab import paths, results
from nwor_lab.plots import promises, style


@pytest.fixture(scope="module")
def found() -> dict[str, pd.DataFrame]:
    return {name: results.read_table(name, paths.RECORDED) for name in promises.TABLES}


@pytest.fixture(scope="module")
def data(found: dict) -> pd.DataFrame:
    return promises.beside(found)


def of(data: pd.DataFrame, promise: str, case: str) -> pd.Series:
    return data.loc[(data["promise"] == promise) & (data["case"] == case), "value"]


def test_each_promise_stands_beside_a_measured_value(data: pd.DataFrame) -> None:
    quoted = pd.read_csv(paths.PROMISES)
    then = data[data["source"] == promises.SOURCES["then"]]
    pd.testing.assert_frame_equal(then[list(quoted)].reset_index(drop=True), quoted)
    here = data[data["source"] == promises.SOURCES["here"]]
    assert set(here["promise"]) == set(quoted["promise"])
    assert np.isfinite(here["value"]).all()


def test_measured_values_are_those_of_the_other_pages(data: pd.DataFrame) -> None:
    pages = of(data, "bandwidth", promises.SAVED["pages"])
    counted = [100 * values.rejected_at_scale(8, temperature) for temperature in (0, 1)]
    assert sorted(pages) == pytest.approx(sorted(counted))
    faster = values.settings("stage")["step"]
    assert sorted(of(data, "throughput", "here: stage")) == pytest.approx(sorted(1 / faster))
    longer = values.settings("cow")["step"] - 1
    assert sorted(of(data, "overhead", "here: cow")) == pytest.approx(sorted(100 * longer))
    blind = of(data, "acceptance", promises.POLICIES["blind"]).item()
    assert blind == pytest.approx(100 * (values.reference("blind") - 1) / 4)
    assert (of(data, "counts", "here: stage operations") == 1).all()
    assert (of(data, "counts", "here: staged tokens") == 1).all()


@pytest.mark.parametrize(
    ("table", "lost", "said"),
    [
        ("reference", "mode == 'blind'", "here: blind staging"),
        ("gpu_acceptance", "metric == metric", "page writes alone"),
        ("gpu_steps", "mode == 'cow'", "here: cow"),
        ("gpu_steps", "metric.str.startswith('counters.')", "here: stage operations"),
        ("kv_write_share", "value == value", "at most, by no write"),
    ],
)
def test_a_value_that_is_not_recorded_is_an_error_that_names_it(found: dict, table: str, lost: str, said: str) -> None:
    rows = found[table]
    with pytest.raises(LookupError, match=said):
        promises.beside({**found, table: rows.drop(rows.query(lost).index)})


def test_a_promise_that_nothing_was_measured_of_is_an_error(found: dict) -> None:
    quoted = pd.DataFrame([{"promise": "latency", "title": "ms", "case": "promised", "value": 1.0}])
    with pytest.raises(LookupError, match="'latency'"):
        promises.beside(found, quoted)


def test_the_picture_of_the_page_is_as_recorded(tmp_path: Path) -> None:
    picture = plt.imread(promises.record(tmp_path / "promises.png"))
    style.close()
    recorded = plt.imread(promises.PICTURE)
    assert picture.shape == recorded.shape, "draw it anew: nwor_lab.plots.promises.record()"
    assert np.abs(picture - recorded).mean() < 1e-3, "draw it anew: nwor_lab.plots.promises.record()"
    assert promises.PICTURE.stat().st_size < 150_000
