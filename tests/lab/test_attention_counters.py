# SPDX-License-Identifier: Apache-2.0
"""Hardware counters: what the profiler prints, and which shape and kernel it is of."""

import pytest

from nwor_lab import paths, results
from nwor_lab.microbench import counters, nsight

TIME, DRAM = "gpu__time_duration.sum", "dram__bytes_read.sum"
PRINTED = """==PROF== Connected to process 7
"ID","Process ID","Kernel Name","Metric Name","Metric Unit","Metric Value"
"0","7","verify_windows","gpu__time_duration.sum","ns","12,736"
"0","7","verify_windows","dram__bytes_read.sum","Kbyte","1.5"
"0","7","verify_windows","other","","1"
"1","7","flash<1, 2>","gpu__time_duration.sum","us","13"
"1","7","flash<1, 2>","dram__bytes_read.sum","byte","7"
"""


def test_what_the_profiler_prints_is_read():
    first, second = nsight.parse(PRINTED, (TIME, DRAM))
    assert first == {"kernel": "verify_windows", TIME: (pytest.approx(12.736), "us"), DRAM: (1500, "byte")}
    assert second == {"kernel": "flash<1, 2>", TIME: (13, "us"), DRAM: (7, "byte")}
    assert nsight.parse("==PROF== no kernels were profiled", (TIME,)) == []
    with pytest.raises(RuntimeError, match="gave no lost of launch 0"):
        nsight.parse(PRINTED, (TIME, "lost"))
    with pytest.raises(RuntimeError, match="is in fortnight, not in byte"):
        nsight.parse(PRINTED.replace('"us"', '"fortnight"'), (TIME,))
    with pytest.raises(nsight.Unreadable, match="no lost/ncu on the PATH: install Nsight Compute"):
        nsight.read("a.module", metrics=(TIME,), kernels="x", ncu="lost/ncu")


@pytest.mark.parametrize(
    ("says", "forbidden"),
    [("==ERROR== ERR_NVGPUCTRPERM - no permission to read counters", True), ("ImportError: no module", False)],
)
def test_a_profiler_that_fails_says_why(says, forbidden, tmp_path):
    """A program that crashes under it is no reason to do without its counters."""
    ncu = tmp_path / "ncu"
    ncu.write_text(f"#!/bin/sh\necho '{says}'; exit 3\n")
    ncu.chmod(0o755)
    with pytest.raises(RuntimeError, match=f"failed with 3: {says}") as raised:
        nsight.read("nwor_lab.microbench.counters", metrics=(TIME,), kernels="x", ncu=str(ncu))
    assert isinstance(raised.value, nsight.Unreadable) is forbidden


def test_the_profiler_is_asked_for_what_is_read(tmp_path):
    ncu = tmp_path / "ncu"
    ncu.write_text(f'#!/bin/sh\necho "$*" > {tmp_path}/asked\ncat <<END\n{PRINTED}END\n')
    ncu.chmod(0o755)
    options = ("--profile-from-start", "off")
    seen = nsight.read("a.module", "--launch", metrics=(TIME,), kernels="a|b", options=options, ncu=str(ncu))
    assert [launch["kernel"] for launch in seen] == ["verify_windows", "flash<1, 2>"]
    asked = (tmp_path / "asked").read_text()
    assert "--clock-control none" in asked and "regex:a|b --profile-from-start off" in asked
    assert asked.endswith("-m a.module --launch\n") and f"--metrics {TIME} " in asked


def launches(combined: bool = True) -> list[dict]:
    """As the profiler gives them of every shape: the n-th launch takes n us."""
    names = ["verify_windows", "void vllm::reshape_and_cache_flash_kernel<>", "flash::FlashAttnFwdSm90<>"]
    names += ["flash::FlashAttnFwdCombine<>"] * combined
    every = [name for _ in counters.shapes() for name in names]
    values = dict.fromkeys(counters.METRICS, (1.0, "%"))
    return [{"kernel": name, **values, TIME: (float(n), "us")} for n, name in enumerate(every)]


def test_launches_are_told_by_shape_and_kernel():
    frame = counters.table(launches())
    times = frame[frame.metric == "time"].reset_index()
    assert (times.value == times.index).all()
    assert times.op[:5].tolist() == ["nwor", "write", "flash", "combine", "nwor"]
    assert (times.context[0], times.context[4]) == (512, 8192)
    shown = counters.shown(frame)
    assert len(shown) == 3 * len(counters.shapes())
    assert len(counters.table(launches(combined=False))) == 3 * 6 * len(counters.shapes())


@pytest.mark.parametrize("wrong", [lambda seen: seen[1:], lambda seen: seen[:-4], lambda seen: seen[:2] + seen[4:]])
def test_launches_that_are_not_those_of_the_shapes_are_an_error(wrong):
    """Else a shape's counters would be another's."""
    with pytest.raises(
        RuntimeError, match="which are not this kit's kernel, vLLM's write and FlashAttention of 13 shapes"
    ):
        counters.table(wrong(launches()))
    for more in (launches()[:4], launches()[-2:]):  # of a shape too many, and a kernel of the last seen twice
        with pytest.raises(RuntimeError, match="which are not"):
            counters.table(launches() + more)


def test_what_is_recorded_is_of_every_shape():
    frame = results.read_table("attention_counters", paths.RECORDED)
    assert len(frame.groupby(counters.KEYS)) == len(counters.shapes())
    assert set(frame.metric) == set(counters.METRICS.values())
    assert frame[frame.metric == "dram"].value.between(0, 100).all()
