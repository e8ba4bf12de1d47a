# SPDX-License-Identifier: Apache-2.0
"""The microbenchmarks: bytes by hand, what is made of samples and counters, the recorded data."""

import math

import pandas as pd
import pytest
import torch

from nwor_lab import paths
from nwor_lab.gpu import attention, counters, operators, timer
from nwor_lab.gpu import kernel_times as kernels
from nwor_lab.gpu import layer_times as attention_plots
from nwor_lab.gpu.attention_case import AttentionShape
from nwor_lab.gpu.operator_case import shape_of
from nwor_lab.gpu.operators import OURS, QUERY, bytes_moved
from nwor_lab.run import results

SHAPE = AttentionShape(32, 8, 16, 512)
LATER = {"head_size", "tuned_on", "build", "attempt"}
"""Columns that tables recorded long ago do not have, or that only a GPU or the record adds."""


@pytest.fixture(scope="module")
def times() -> pd.DataFrame:
    return results.read_table("kernel_times", paths.RECORDED)


# -- the all-layer operators ---------------------------------------------------------------------------------------


def test_bytes_are_the_rows_that_move() -> None:
    """A row of 8 heads x 128 in bf16 is 4 KiB a layer; each is read once and written once."""
    shape = shape_of(8, "bf16")
    assert shape.row == 4096
    for op, rows in {"commit": 6, "restore": 12, "log": 18, "vllm": 6}.items():
        assert bytes_moved(op, shape, 18, 3) == 2 * 32 * rows * 4096, op
    assert bytes_moved("commit", shape, 18, 0) == 0 == bytes_moved("restore", shape, 18, QUERY)
    assert shape_of(8, "fp8").row * 2 == shape.row


def test_ceilings_and_speedups() -> None:
    """One case, whose copy of 8 GB runs at 4 TB/s."""
    us = {"copy": 2000, "empty": 3, "commit": 20, "vllm": 200}
    rows = [{"op": op, "value": value, "bytes": 8e9, "rows": 9, "kept": 3, "launches": 1} for op, value in us.items()]
    frame = results.tidy(rows, metric="time", unit="us").assign(kv_heads=8, cache="bf16")
    assert kernels.ceilings(frame) == (4.0, 3.0)
    assert kernels.speedups(frame)["vllm"].item() == pytest.approx(10)


def test_samples_that_are_not_there_are_named() -> None:
    rows = [{"op": "copy"}, {"op": "commit", "k": 8, "heads": 16}, {"op": "commit", "k": 1, "heads": 32}]
    times = pd.DataFrame(rows).assign(value=1.0)
    assert len(kernels.select(times, k=[1], heads=[32, 16])) == 2
    for wanted, says in (({"k": [3]}, "k"), ({"k": [1], "heads": [16]}, "together")):
        with pytest.raises(ValueError, match=says):
            kernels.select(times, **wanted)


def test_counters_cover_every_case_that_exceeds_the_cache() -> None:
    cases = operators.beyond_cache()
    assert {case[4] for case in cases} == set(OURS)
    assert min(bytes_moved(op, shape_of(*case), rows, kept) for *case, rows, kept, op in cases) >= 192 << 20
    assert len(kernels.dram_over_model(results.read_table("kernel_counters", paths.RECORDED))) == len(cases)


@pytest.mark.parametrize("module", [operators, attention, counters])
def test_the_commands_need_a_gpu(module, tmp_path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as raised:
        module.main(["--out", str(tmp_path)])
    assert raised.value.code == 2 and "no NVIDIA GPU here" in capsys.readouterr().err


def sampled(calls: dict, repeats: int, clean: bool = False):
    """A timer for tests: every call takes as many microseconds as its place in `calls`, from 1."""
    yield from ((name, repeat, float(us)) for repeat in range(repeats) for us, name in enumerate(calls, 1))


def test_operators_are_measured_as_they_are_recorded(times: pd.DataFrame, monkeypatch) -> None:
    class Case:
        def __init__(self, kv_heads, cache, seed, query):
            self.shape, self.heads, self.cache, self.query = shape_of(kv_heads, cache), kv_heads, cache, query

        def fill(self, rows):
            self.slots = torch.arange(rows)

        def calls(self, kept):
            return dict.fromkeys(["empty", *OURS, "vllm"], print)

        def writes(self, layers, slots):
            return print

        def differing(self, call, kept):
            return 0

    monkeypatch.setattr(operators, "OperatorCase", Case)
    monkeypatch.setattr(operators, "interleaved", sampled)
    monkeypatch.setattr(operators, "_copies", lambda repeats: [{"op": "copy", "value": 2e3, "bytes": 8 << 30}])
    monkeypatch.setattr(operators.ops, "load", lambda: None)
    found = operators.measure(2, (1, 4), 0, [(8, "fp8"), (32, "bf16")], k=3)
    assert set(found) == set(times) - LATER
    assert set(found["rows"]) == {0, 4, 16} and set(found.loc[found["rows"] > 0, "kept"]) == {0, 1, 4}
    line = found.query("op == 'commit' and metric == 'time' and kv_heads == 8 and rows == 16 and kept == 1").iloc[0]
    assert line["bytes"] == bytes_moved("commit", shape_of(8, "fp8"), 16, 1, 4) and line["k"] == 3
    assert kernels.ceilings(found) == (pytest.approx(4.29, rel=0.01), 1.0)
    assert len(kernels.roof_points(found)) and kernels.per_launch(found)[1] > 0


def test_attention_is_measured_as_it_is_recorded(monkeypatch, capsys) -> None:
    names = ["empty", "nwor", "flash", "flash 1", "triton", "write"]

    class Case:
        def __init__(self, shape):
            self.calls, self.error = lambda: dict.fromkeys(names, print), lambda call: 1e-3

    monkeypatch.setattr(attention, "AttentionCase", Case)
    monkeypatch.setattr(attention, "interleaved", sampled)
    found = attention.measure(attention.shapes([(32, 8)], [4, 1], [512], ["bf16"], [3]), repeats=3)
    assert set(found) == set(results.read_table("attention", paths.RECORDED)) - {"attempt", "build"}
    assert not found["tuned_on"].any(), "without a GPU there is no tuning"
    assert found.groupby("metric").size().to_dict() == {"time": 2 * 6 * 3, "error": 2 * 4}
    table = attention_plots.frame(found, bandwidth=4.0)
    assert table["ratio"].tolist() == [0.5, 0.5] and capsys.readouterr().out.count("FlashAttention 3 0.500") == 2


@pytest.mark.gpu
@pytest.mark.parametrize("clean", [False, True])
def test_the_timer_takes_what_it_is_given(clean: bool) -> None:
    """One sample a repeat and call, times in the right order, and a cold cache: no faster than memory allows."""
    small, large = (torch.zeros(n << 20, dtype=torch.int32, device="cuda") for n in (2, 64))
    calls = {"empty": timer.empty, "small": small.bitwise_not_, "large": large.bitwise_not_}
    samples = pd.DataFrame(timer.interleaved(calls, 30, clean), columns=["op", "repeat", "us"])
    assert samples["op"].tolist() == list(calls) * 30
    median = samples.groupby("op")["us"].median()
    assert median["empty"] < median["small"] < median["large"]
    assert 2 * large.nbytes / median["large"] / 1e6 < 6  # TB/s: memory, not cache


# -- the attention -------------------------------------------------------------------------------------------------


def samples(ratio: float = 0.8, **other) -> pd.DataFrame:
    """Three samples of each call: the empty kernel 2 us, vLLM's faster 100 us more, nwor `ratio` of that."""
    us = {"empty": 2, "nwor": 2 + 100 * ratio, "flash": 112, "flash 1": 102, "triton": 152, "write": 5}
    shape = vars(SHAPE) | {"bytes": SHAPE.bytes, "tuned_on": True} | other
    rows = [
        shape | {"op": op, "metric": "time", "unit": "us", "value": time + jitter, "repeat": n}
        for op, time in us.items()
        for n, jitter in enumerate((0, -1, 1))
    ]
    wrong = {"metric": "error", "unit": "relative", "value": 2e-3}
    return results.tidy(rows + [shape | wrong | {"op": op} for op in ("nwor", "flash", "triton")], mode="", model="")


def test_net_times_are_without_the_empty_kernel_and_beside_the_faster_backend():
    """A version that was forced is no backend of vLLM's there: even where it is the fastest it is not `vanilla`."""
    forced = samples(0.8).query("op == 'nwor' and metric == 'time'").assign(op="flash2", value=42)
    frame = pd.concat([samples(0.8), forced, samples(0.8, cache="fp8")])
    table = attention_plots.frame(frame, bandwidth=4.0).sort_values("cache")
    line, other = table.to_dict("records")
    assert (line["nwor"], line["vanilla"], line["flash"], line["ratio"]) == pytest.approx((80, 100, 100, 0.8))
    assert other["ratio"] == 0.8
    over = attention_plots.over_each(frame).set_index("cache")["FlashAttention 2, forced"]
    assert over["bf16"] == pytest.approx(2) and math.isnan(over["fp8"])
    assert line["floor"] == pytest.approx(SHAPE.bytes / 4e6)
    assert attention_plots.errors(samples())["over_flash"].tolist() == [1]


def test_options_say_which_shapes(tmp_path, monkeypatch, capsys):
    asked, answer = [], samples(0.8)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(attention, "measure", lambda shapes, repeats: asked.append((shapes, repeats)) or answer)
    where = ["--out", str(tmp_path), "--name", "some", "--repeats", "7"]
    chosen = ["--heads", "32x8,16x4", "--batches", "1,4", "--contexts", "131072", "--ks", "48", "--caches", "bf16"]
    assert attention.main([*where, *chosen]) == 0 == attention.main(where)
    expected = [AttentionShape(*heads, batch, 131072, k=48) for heads in ((32, 8), (16, 4)) for batch in (1, 4)]
    assert asked == [(expected, 7), (attention.grid(), 7)]
    assert len(results.read_table("some", tmp_path)) == len(answer)
    assert "nwor takes 0.800 of the time" in capsys.readouterr().out


def test_numbers_below_one_are_refused():
    for axis in ({"ks": (4, 0)}, {"contexts": (-1,)}, {"heads": ("8x0",)}):
        with pytest.raises(ValueError, match="at least 1"):
            timer.Axes(**axis)
