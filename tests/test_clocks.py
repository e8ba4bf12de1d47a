# SPDX-License-Identifier: Apache-2.0
"""Clock and power beside a turn: hypotheses about a chip's limits are checked with them."""

import time

import pandas as pd
import pytest
import torch

from nwor import bench, clocks
from nwor.engine import EngineSpec
from tests.test_bench import Noted


@pytest.fixture
def chips(monkeypatch) -> None:
    """Two GPUs: one that slows from 1,980 MHz to 1,500 as it is looked at, and one that draws twice as much."""
    seen = [1500.0, 1500.0, 1500.0, 1980.0]
    monkeypatch.setattr(clocks, "PERIOD", 0.001)
    monkeypatch.setattr(torch.cuda, "clock_rate", lambda rank: 1200 if rank else seen.pop() if seen else 1500)
    monkeypatch.setattr(torch.cuda, "power_draw", lambda rank: 350_000 * (1 + rank))


def test_medians_of_each_gpu_while_something_runs(chips):
    with clocks.watched(2) as rows:
        assert not rows
        time.sleep(0.2)
    found = pd.DataFrame(rows).set_index(["metric", "rank"])
    assert found.value.to_dict() == {
        ("sm_clock", 0): 1500,
        ("sm_clock", 1): 1200,
        ("power", 0): 350,
        ("power", 1): 700,
    }
    assert found.unit.to_dict() == {index: "MHz" if index[0] == "sm_clock" else "W" for index in found.index}


def test_what_is_over_at_once_is_sampled_once(chips, monkeypatch):
    monkeypatch.setattr(clocks, "PERIOD", 60)
    with clocks.watched(1) as rows:
        pass
    assert [row["value"] for row in rows] == [1980, 350]


def test_nothing_is_sampled_where_there_is_no_gpu(monkeypatch):
    monkeypatch.delattr(torch.cuda, "clock_rate")
    with clocks.watched(0) as rows:
        pass
    assert rows == []


def test_what_cannot_be_sampled_stops_the_run_before_it_is_timed(monkeypatch):
    def missing(rank: int) -> int:
        raise ModuleNotFoundError("nvidia-ml-py does not seem to be installed")

    monkeypatch.setattr(torch.cuda, "clock_rate", missing)
    with pytest.raises(ModuleNotFoundError, match="nvidia-ml-py"), clocks.watched(1):
        raise AssertionError("not reached")


def test_each_timed_turn_of_a_bench_has_its_clock(chips, monkeypatch):
    monkeypatch.setattr(bench, "Engine", Noted)
    monkeypatch.setattr(bench, "on_cpu", lambda: False)
    plan = bench.Plan(modes=("off", "stage"), batches=(1, 2), repeats=3, audit=False)
    rows = pd.DataFrame(bench.run(EngineSpec("shape", tp=2), plan, [[1, 2, 3]])[0])
    sampled = rows[rows.metric == "sm_clock"].groupby(["mode", "batch", "repeat", "rank"]).size()
    assert len(sampled) == 2 * 2 * 3 * 2 and (sampled == 1).all()
    shown = bench.summary(rows[rows["rank"] != 0], plan).set_index(["mode", "batch"])
    assert (shown.clock_mhz == 1200).all()
    assert "clock_mhz" not in bench.summary(rows[~rows.metric.isin(["sm_clock", "power"])], plan)
