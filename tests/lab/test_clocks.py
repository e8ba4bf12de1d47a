# SPDX-License-Identifier: Apache-2.0
"""Clock and power beside each timed pass: hypotheses about a chip's limits are checked with them."""

import time

import pandas as pd
import pytest
from fake_engine import engines  # noqa: F401

pytest.importorskip("vllm", reason="vLLM is not installed: it brings NVML")

from vllm.platforms import current_platform
from vllm.third_party import pynvml

from nwor_lab.engines import clocks
from nwor_lab.engines.engine import EngineSpec
from nwor_lab.experiments import bench, bench_table
from nwor_lab.experiments.plan import Plan


@pytest.fixture
def chips(monkeypatch) -> None:
    """Two GPUs of four: one that slows from 1,980 MHz to 1,500 as it is looked at, and one that draws twice as much."""
    seen = [1500, 1500, 1500, 1980, 1980]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    monkeypatch.setattr(type(current_platform), "device_control_env_var", "CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(clocks, "PERIOD", 0.001)
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", lambda index: index)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetPowerUsage", lambda gpu: {3: 350_000, 1: 700_000}[gpu])

    def clock(gpu: int, kind: int) -> int:
        assert kind == pynvml.NVML_CLOCK_SM
        return 1200 if gpu == 1 else seen.pop() if seen else 1500

    monkeypatch.setattr(pynvml, "nvmlDeviceGetClockInfo", clock)
    clocks._sensors.cache_clear()
    yield
    clocks._sensors.cache_clear()


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


def test_what_is_over_at_once_is_sampled_at_its_end(chips, monkeypatch):
    monkeypatch.setattr(clocks, "PERIOD", 60)
    with clocks.watched(1) as rows:
        assert pynvml.nvmlDeviceGetClockInfo(3, pynvml.NVML_CLOCK_SM) == 1980
    assert [row["value"] for row in rows] == [1500, 350]


def test_nothing_is_sampled_where_there_is_no_gpu(monkeypatch):
    monkeypatch.delattr(pynvml, "nvmlInit")
    with clocks.watched(0) as rows:
        pass
    assert rows == []


def test_a_driver_that_does_not_tell_costs_no_run(chips, monkeypatch, capsys):
    """Said once, and not with every pass."""

    def refuse(gpu: int) -> int:
        raise pynvml.NVMLError_NotSupported

    monkeypatch.setattr(pynvml, "nvmlDeviceGetPowerUsage", refuse)
    for _ in range(3):
        with clocks.watched(1) as rows:
            pass
        assert rows == []
    assert capsys.readouterr().err == "clock and power are left out: Not Supported\n"


def test_each_timed_pass_of_a_bench_has_its_clock(chips, engines, monkeypatch):  # noqa: F811
    monkeypatch.setattr(bench, "on_cpu", lambda: False)
    plan = Plan(modes=("off", "stage"), batches=(1, 2), repeats=3, audit=False)
    rows = pd.DataFrame(bench.run(EngineSpec("shape", tp=2), plan, [[1, 2, 3]])[0])
    sampled = rows[rows.metric == "sm_clock"].groupby(["mode", "batch", "repeat", "rank"]).size()
    assert len(sampled) == 2 * 2 * 3 * 2 and (sampled == 1).all()
    shown = bench_table.summary(rows[rows["rank"] != 0], plan).set_index(["mode", "batch"])
    assert (shown.clock_mhz == 1200).all()
    assert "clock_mhz" not in bench_table.summary(rows[~rows.metric.isin(["sm_clock", "power"])], plan)
