# SPDX-License-Identifier: Apache-2.0
"""Where a notebook's samples of a GPU come from, and what it is told when they cannot be taken."""

import pandas as pd
import pytest
import torch

from nwor_lab import paths, results, sources
from nwor_lab.microbench import counters

NAMES = ("kernel_times", "kernel_counters", "attention", "attention_counters", "gpu_acceptance")


@pytest.fixture
def run(tmp_path) -> results.Run:
    return results.Run(tmp_path / "run", "06_kernel_bandwidth")


def samples() -> pd.DataFrame:
    return results.tidy([{"metric": "time", "value": 3.0, "unit": "us"}], mode="", model="")


def must_not() -> pd.DataFrame:
    raise AssertionError("measured")


@pytest.mark.parametrize("name", NAMES)
def test_without_a_gpu_they_are_the_recorded_ones(name, run, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    recorded = sources.obtain(run, name, must_not)["value"]
    assert len(recorded) > 1 and recorded.notna().all()
    assert not (run.directory / f"{name}.parquet").exists()
    with pytest.raises(ValueError, match="no NVIDIA GPU here; the recorded results need none"):
        sources.obtain(run, name, must_not, "measure")
    with pytest.raises(ValueError, match="source is measure, recorded or empty, got 'mesure'"):
        sources.obtain(run, name, must_not, "mesure")


def test_with_a_gpu_they_are_measured_and_kept_unless_the_recorded_are_asked_for(run, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for source in ("", "measure"):
        assert sources.obtain(run, "kernel_times", samples, source)["value"].tolist() == [3.0]
    assert results.read_table("kernel_times", run.directory)["value"].tolist() == [3.0]
    recorded = results.read_table("kernel_times", paths.RECORDED)
    assert len(sources.obtain(run, "kernel_times", must_not, "recorded")) == len(recorded) > 1


def test_counters_that_cannot_be_read_are_the_recorded_ones_unless_asked_for(run, monkeypatch, capsys) -> None:
    def refuse() -> pd.DataFrame:
        raise counters.Unreadable("no permission")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert len(sources.obtain(run, "attention_counters", refuse)) > 1
    assert "attention_counters is what was recorded on an H200, since no permission" in capsys.readouterr().out
    with pytest.raises(counters.Unreadable, match="no permission"):
        sources.obtain(run, "attention_counters", refuse, "measure")


def test_another_error_is_no_reason_for_recorded_samples(run, monkeypatch) -> None:
    def broken() -> pd.DataFrame:
        raise RuntimeError("an illegal memory access")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        sources.obtain(run, "kernel_times", broken)
