# SPDX-License-Identifier: Apache-2.0
"""The kernels' recorded samples and what is made of them;
on a GPU, the timer and the window themselves."""

import numpy as np
import pandas as pd
import pytest
import torch

from nwor_lab import paths, results
from nwor_lab.microbench import operators
from nwor_lab.microbench.operators import KEPT, OURS, PEERS, QUERY, ROWS, SHAPES, bytes_moved, rows_moved, shape_of
from nwor_lab.operators import check
from nwor_lab.plots import kernels, style


@pytest.fixture(scope="module")
def times() -> pd.DataFrame:
    return results.read_table("kernel_times", paths.RECORDED)


@pytest.fixture(scope="module")
def counters() -> pd.DataFrame:
    return results.read_table("kernel_counters", paths.RECORDED)


def made_up(us: dict[str, float], rows: int = 2304, kept: int = 3) -> pd.DataFrame:
    """Samples of one shape (8 heads, bf16) in which `us` gives each op's time; the copy runs at 4 TB/s."""
    lines = [{"op": "copy", "value": 2e3, "bytes": 8_000_000_000, "rows": 0, "kept": 0, "launches": 0}]
    for op, value in us.items():
        moved = 0 if op == "empty" else bytes_moved(op, shape_of(8, "bf16"), rows, kept)
        launches = 32 if op in PEERS else 1
        lines += [{"op": op, "value": value, "bytes": moved, "rows": rows, "kept": kept, "launches": launches}] * 3
    return results.tidy(lines, metric="time", unit="us").assign(kv_heads=8, cache="bf16")


def test_bytes_are_the_rows_that_move() -> None:
    """A row of 8 heads x 128 in bf16 is 4 KiB a layer; each is read once and written once."""
    shape = shape_of(8, "bf16")
    assert shape.row == 4096
    assert [rows_moved(op, 18, 3) for op in ("commit", "restore", "log", "vllm")] == [6, 12, 18, 6]
    assert bytes_moved("commit", shape, 18, 3) == 2 * 32 * 6 * 4096
    assert bytes_moved("commit", shape, 18, 0) == 0 == bytes_moved("restore", shape, 18, QUERY)
    assert shape_of(8, "fp8").row * 2 == shape.row


def test_counted_cases_exceed_the_cache() -> None:
    cases = operators.counted()
    assert {case[4] for case in cases} == set(OURS)
    assert min(bytes_moved(op, shape_of(*case), rows, kept) for *case, rows, kept, op in cases) >= 192 << 20


def test_model_share_and_speedup() -> None:
    """Empty kernel plus bytes at the copy's bandwidth; shares with and without the launch."""
    moved = bytes_moved("commit", shape_of(8, "bf16"), 2304, 3)
    ideal = 3 + moved / 4e6
    frame = made_up({"empty": 3, "commit": 2 * ideal - 3, "stream": ideal, "vllm": 20 * ideal})
    assert kernels.ceilings(frame) == (4.0, 3.0)
    (line,) = kernels.modelled(frame).itertuples()
    assert line.model == pytest.approx(ideal)
    assert line.net == pytest.approx(0.5)
    assert line.gross == pytest.approx(moved / (2 * ideal - 3) / 4e6)
    assert kernels.speedups(frame)["vllm"].item() == pytest.approx(20 * ideal / (2 * ideal - 3))


def test_a_missed_goal_is_shown_as_missed() -> None:
    """The table counts what is not met, and tells what streaming would reach."""
    slow = made_up({"empty": 3, "commit": 6, "stream": 4, "vllm": 40}, rows=9)
    table = kernels.goal_table(slow)
    assert table.loc["empty kernels, 9 rows: at most", "met"] == "0 of 1"
    assert table.loc["empty kernels, 9 rows: at most", "met by streaming"] == "1 of 1"
    assert table.loc["9 rows, times faster than vllm: at least", "met"] == "0 of 1"
    fast = made_up({"empty": 3, "commit": 4, "stream": 4, "vllm": 40}, rows=9)
    assert kernels.goals(fast)["met"].all()


def test_every_sample_is_kept(times: pd.DataFrame) -> None:
    """Each shape and op, 30 samples or more, all of them different enough to be no copies of one number."""
    frame = kernels.medians(times)
    ours = frame[frame["op"].isin(OURS) & frame["kept"].isin(KEPT)]
    assert len(ours) == len(OURS) * len(SHAPES) * len(ROWS) * len(KEPT)
    assert frame["samples"].min() >= 30
    assert set(PEERS) <= set(frame["op"])
    spread = times[times["metric"] == "time"].groupby(["op", "kv_heads", "cache", "rows", "kept"])["value"].nunique()
    assert (spread > 1).all()


def test_parity_stands_beside_the_times(times: pd.DataFrame) -> None:
    """Each timed peer has its bytes compared, in every shape that writes rows, and none differs."""
    compared = times[times["metric"] == "bytes_differing"]
    timed = times[(times["metric"] == "time") & times["op"].isin(["commit", *PEERS]) & (times["kept"] > 0)]
    keys = ["op", "kv_heads", "cache", "rows", "kept"]
    assert set(compared[keys].itertuples(index=False, name=None)) == set(timed[keys].itertuples(index=False, name=None))
    assert kernels.unequal_bytes(times) == 0
    broken = times.copy()
    broken.loc[compared.index[0], "value"] = 7
    assert kernels.unequal_bytes(broken) == 7


def test_counters_cover_every_case(counters: pd.DataFrame) -> None:
    cases = kernels.counted(counters)
    assert len(cases) == len(operators.counted())
    assert np.allclose(cases["both"], (cases["read"] + cases["written"]) / 2)


def test_figures_are_drawn_from_the_recorded_samples(times: pd.DataFrame, counters: pd.DataFrame, tmp_path) -> None:
    names = ("roofline", "over_rows", "over_share", "launches")
    drawn = [getattr(kernels, name)(tmp_path, times) for name in names]
    drawn.append(kernels.counters(tmp_path, counters))
    style.close()
    for path in drawn:
        assert path.with_suffix(".png").stat().st_size > 10_000
        assert len(pd.read_csv(path.with_suffix(".csv")))


def test_devices_that_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert check.devices() == ["cpu"]
    with pytest.raises(ValueError, match="device is cpu on this machine, or empty for all; got 'cuda'"):
        check.devices("cuda")


def test_the_command_needs_a_gpu(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        operators.main(["--out", str(tmp_path)])


def test_the_recorded_comparison_is_of_a_gpu() -> None:
    """What an H200 compared, recorded: every operator it has, and no byte that differs."""
    frame = check.recorded()
    sums = frame.pivot_table(index="operator", columns="metric", values="value", aggfunc="sum")
    assert set(frame["device"]) == {"cuda"}
    assert set(sums.index) == set(check.ops.OPERATORS) - {"verify_attention"}
    assert (sums["bytes_compared"] > 0).all() and (sums["bytes_differing"] == 0).all()


@pytest.mark.gpu
@pytest.mark.parametrize("clean", [False, True])
def test_the_timer_takes_what_it_is_given(clean: bool) -> None:
    """One sample a turn and call, times in the right order, and a cold cache: no faster than memory allows."""
    timer = operators.Timer(clean)
    small, large = (torch.zeros(n << 20, dtype=torch.int32, device="cuda") for n in (2, 64))
    calls = {"empty": operators.empty, "small": small.bitwise_not_, "large": large.bitwise_not_}
    samples = pd.DataFrame(timer.sample(calls, 30), columns=["op", "repeat", "us"])
    assert (samples.groupby("op").size() == 30).all()
    median = samples.groupby("op")["us"].median()
    assert median["empty"] < median["small"] < median["large"]
    assert 2 * large.nbytes / median["large"] / 1e6 < 6  # TB/s: memory, not cache
