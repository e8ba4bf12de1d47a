# SPDX-License-Identifier: Apache-2.0
"""The attention's hardware counters: what is asked of the profiler, what it prints, and whose launch is whose."""

from pathlib import Path

import pandas as pd
import pytest

from nwor_lab.gpu import counters

TIME, DRAM = "gpu__time_duration.sum", "dram__bytes_read.sum"
PRINTED = """==PROF== Connected to process 7
"ID","Process ID","Kernel Name","Metric Name","Metric Unit","Metric Value"
"0","7","verify_windows","gpu__time_duration.sum","ns","12,736"
"0","7","verify_windows","dram__bytes_read.sum","Kbyte","1.5"
"0","7","verify_windows","other","","1"
"1","7","flash<1, 2>","gpu__time_duration.sum","us","13"
"1","7","flash<1, 2>","dram__bytes_read.sum","byte","7"
"""


def test_what_the_profiler_prints_is_read(monkeypatch):
    found = counters.parse(PRINTED, (TIME, DRAM))
    assert found["kernel"].tolist() == 2 * ["verify_windows"] + 2 * ["flash<1, 2>"]
    assert found["value"].tolist() == pytest.approx([12.736, 1500, 13, 7])
    assert found["unit"].tolist() == 2 * ["us", "byte"] and found["launch"].tolist() == [0, 0, 1, 1]
    assert counters.parse("==PROF== no kernels were profiled", (TIME,)).empty
    with pytest.raises(RuntimeError, match="lost"):
        counters.parse(PRINTED, (TIME, "lost"))
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(counters.Unreadable, match="no ncu"):
        counters.read("code", metrics=(TIME,), kernels="x")


@pytest.fixture
def profiler(tmp_path, monkeypatch) -> Path:
    """Where a profiler is looked for first: a script that is yet to be written."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    path = tmp_path / "ncu"
    path.touch(mode=0o755)
    return path


@pytest.mark.parametrize(("says", "forbidden"), [("==ERROR== ERR_NVGPUCTRPERM", True), ("ImportError", False)])
def test_a_profiler_that_fails_says_why(says, forbidden, profiler):
    """A program that crashes under it is no reason to do without its counters."""
    profiler.write_text(f"#!/bin/sh\necho '{says}'; exit 3")
    with pytest.raises(RuntimeError, match=says) as raised:
        counters.read("code", metrics=(TIME,), kernels="x")
    assert isinstance(raised.value, counters.Unreadable) is forbidden


def test_the_profiler_is_asked_for_what_is_read(profiler, tmp_path):
    profiler.write_text(f'#!/bin/sh\necho "$*" > {tmp_path}/asked\ncat <<END\n{PRINTED}END')
    options = ("--profile-from-start", "off")
    seen = counters.read("code()", metrics=(TIME,), kernels="a|b", options=options)
    assert seen["kernel"].tolist() == ["verify_windows", "flash<1, 2>"]
    asked = (tmp_path / "asked").read_text()
    assert f"regex:a|b --profile-from-start off --metrics {TIME} " in asked and asked.endswith("-c code()\n")


def launches(combined: bool = True) -> pd.DataFrame:
    """As the profiler gives them of every shape: the n-th launch takes n us."""
    names = ["verify_windows", "void vllm::reshape_and_cache_flash_kernel<>", "flash::FlashAttnFwdSm90<>"]
    names += ["flash::FlashAttnFwdCombine<>"] * combined
    every = [name for _ in counters.shapes() for name in names]
    rows = [
        {"launch": n, "kernel": name, "metric": metric, "value": float(n) if metric == TIME else 1.0, "unit": "%"}
        for n, name in enumerate(every)
        for metric in counters.METRICS
    ]
    return pd.DataFrame(rows)


def at(seen: pd.DataFrame, numbers: list[int]) -> pd.DataFrame:
    """Those launches, one after the other."""
    parts = [seen[seen["launch"] == number].assign(launch=n) for n, number in enumerate(numbers)]
    return pd.concat(parts, ignore_index=True)


def test_launches_are_matched_with_shapes_and_kernels():
    frame = counters.table(launches())
    found = frame[frame.metric == "time"].reset_index()
    assert (found.value == found.index).all()
    assert found.op[:5].tolist() == ["nwor", "write", "flash", "combine", "nwor"]
    assert (found.context[0], found.context[4]) == (512, 8192)
    assert len(counters.shown(frame)) == 3 * len(counters.shapes())
    assert len(counters.table(launches(combined=False))) == 3 * 6 * len(counters.shapes())


@pytest.mark.parametrize(
    "wrong",
    [lambda n: n[1:], lambda n: n[:-4], lambda n: n[:2] + n[4:], lambda n: n + n[:4], lambda n: n + n[-2:]],
)
def test_launches_that_are_not_those_of_the_shapes_are_an_error(wrong):
    """Else a shape's counters would be another's."""
    seen = launches()
    with pytest.raises(RuntimeError, match="13 shapes"):
        counters.table(at(seen, wrong([*range(seen["launch"].max() + 1)])))
