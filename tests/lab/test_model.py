# SPDX-License-Identifier: Apache-2.0
"""Where a mode is faster, by hand and against the price of a step; predicted against measured, no point hidden."""

import itertools
import math

import numpy as np
import pandas as pd
import pytest

from nwor_lab import paths
from nwor_lab.bench.gpu_steps import SETTING
from nwor_lab.cost import breakeven, predicted
from nwor_lab.cost.breakeven import H200, MODELS, Chip, step_difference
from nwor_lab.cost.ratios import SURE, abba_ratio, audited_servers, audited_steps, is_stable, median_between
from nwor_lab.cost.traffic import Window
from nwor_lab.gpu import kernel_times as kernels
from nwor_lab.run import results

LLAMA_7B = MODELS["llama-2-7b"]


def test_the_chip_is_the_recorded_one():
    times = results.read_table("kernel_times", paths.RECORDED)
    (bandwidth, _), (_, further) = kernels.ceilings(times), kernels.per_launch(times)
    assert pytest.approx((further, bandwidth), rel=0.03) == (H200.launch_us, H200.copy_bytes_per_s / 1e12)


def test_a_step_by_hand():
    """stage, one request, k = 8, 2 accepted: 30 launches less, and 32 x (2 x 2 - 9) x 16 KiB."""
    window = Window(1, 8, 6, 521)
    moved = step_difference("stage", LLAMA_7B, window)
    assert (moved.launches, moved.read + moved.written) == (-30, -32 * 5 * 16384)
    assert Chip("x", 3.0, 4.25e12).us(moved) == pytest.approx(-30 * 3.0 - 32 * 5 * 16384 / 4.25e6)
    cow = step_difference("cow", LLAMA_7B, window)
    assert (cow.launches, cow.read + cow.written) == (3, 2 * 32 * (3 + 6) * 16384)


def test_where_a_mode_is_faster():
    """With all of 8 drafts accepted staging moves more than vanilla; with one draft it moves as much."""
    found = {
        (mode, k, acceptance, batch): H200.us(step_difference(mode, LLAMA_7B, Window.expected(batch, k * [acceptance])))
        for mode, k, acceptance, batch in itertools.product(("cow", "stage"), (1, 8), (0.0, 1.0), (1, 1024))
    }
    slower = [setting for setting, us in found.items() if us >= 0]
    assert [setting[0] for setting in slower].count("cow") == 8
    assert slower[8:] == [("stage", 8, 1.0, 1024)]


def test_published_acceptance_is_a_product_over_positions():
    survival = breakeven.published_survival()
    llama = survival.query("model == 'Llama-2-chat-7B, EAGLE-1'").sort_values("position")
    assert llama["value"].tolist() == pytest.approx([0.76, 0.76 * 0.69, 0.76 * 0.69 * 0.67, 0.2389, 0.16247], abs=1e-4)


# -- predicted against measured ------------------------------------------------------------------------------------


def bench(**settings) -> pd.DataFrame:
    """Two repeats of vanilla (1 ms, then 2 ms a step) and of cow, a tenth slower; 4 requests, k = 4, half accepted."""
    rows = []
    for repeat in (0, 1):
        for mode, slower in (("off", 1.0), ("cow", 1.1)):
            common = {"mode": mode, "repeat": repeat}
            rows += [
                {**common, "metric": "step_ms", "value": slower * (1 + repeat), "step": step} for step in range(10)
            ]
            counts = {"windows": 40, "draft_tokens": 160, "accepted_tokens": 80}
            rows += [{**common, "metric": metric, "value": value} for metric, value in counts.items()]
    return results.tidy(pd.DataFrame(rows), model="llama-2-7b", k=4, batch=4, unit="", **settings)


def test_a_measured_point_by_hand():
    (point,) = predicted.against_measured(bench()).to_dict("records")
    us = 3 * 3.9 + 2 * 32 * 16384 * (8 + 4 + 8) / 4.24e6
    assert point["predicted"] == pytest.approx(1 + us / 1500)
    assert point["measured"] == pytest.approx(1.1), "repeat for repeat, whatever the machine did between them"


def test_every_setting_is_a_point_of_its_own():
    parts = [bench(), bench(kv_heads=8), bench(kv_heads=8, kv_cache_dtype="fp8"), bench(prompt=2048), bench(tp=2)]
    found = predicted.against_measured(pd.concat(parts, ignore_index=True))
    assert len(found) == len(parts)
    bytes_us = 1500 * (found["predicted"] - 1) - 3 * 3.9
    assert (bytes_us / bytes_us.iloc[0]).tolist() == pytest.approx([1, 1 / 4, 1 / 8, 1, 1 / 2])


def attention_times(times: dict[str, float], shapes: dict[tuple[int, int, int], float]) -> pd.DataFrame:
    """Table `attention` of bf16 and k=8: `times` of each op, times the factor of each (KV heads, batch, context)."""
    rows = [
        {"op": op, "value": factor * us, "heads": 32, "kv_heads": heads, "batch": batch, "context": context}
        for (heads, batch, context), factor in shapes.items()
        for op, us in times.items()
    ]
    return pd.DataFrame(rows).assign(cache="bf16", metric="time", k=8, build="k:1")


def test_stage_and_direct_are_predicted_with_the_attention_measured():
    """32 layers save 70 - 60 us each, and a step opens and commits 8 drafts once."""
    times = {"nwor": 60.0, "flash": 70.0, "triton": 65.0, "write": 4.0, "empty": 3.0}
    shapes = {(32, 4, 512): 1.0, (32, 4, 4096): 10.0, (16, 4, 512): 100.0, (32, 16, 512): 1000.0}
    attention = attention_times(times, shapes)
    attention = pd.concat([attention, attention.assign(metric="error", value=1.0)])
    staged = bench(prompt=700).replace({"mode": {"cow": "stage"}}).assign(k=8, build="k:1")
    (point,) = predicted.against_measured(staged, attention=attention).to_dict("records")
    commit = 2 * 32 * 16384 * 8 / 4.24e6
    assert point["with_attention"] == pytest.approx(1 + (-32 * 10 + 2 * 3.9 + commit) / 1500)
    assert point["predicted"] != point["with_attention"]
    direct = staged.replace({"mode": {"stage": "direct"}})
    (alone,) = predicted.against_measured(direct, attention=attention)["with_attention"]
    assert alone == pytest.approx(1 - 32 * 10 / 1500), "it opens and commits nothing"
    others = (staged.assign(k=4), staged.assign(batch=5), staged.assign(kv_cache_dtype="fp8"), bench(prompt=700))
    for unknown in (*others, staged.assign(build="k:2"), staged.drop(columns="build")):
        assert predicted.against_measured(unknown, attention=attention)["with_attention"].isna().all()


def test_what_cannot_be_predicted_is_an_error():
    table = bench()
    with pytest.raises(ValueError, match="mine"):
        predicted.against_measured(table.assign(model="mine"))
    with pytest.raises(ValueError, match="off"):
        predicted.against_measured(table[table["mode"] != "off"])


def test_the_recorded_run_is_predicted_point_for_point():
    table = results.read_table("gpu_decode", paths.RECORDED)
    found = predicted.against_measured(table).query("mode == 'cow'")
    timed = table.query("mode == 'cow' and metric == 'step_ms'")
    assert len(found) == len(timed.groupby([name for name in SETTING if name in table])) == 9
    assert found["predicted"].between(1, 1.02).all() and (found["predicted"] - found["measured"]).abs().max() < 0.02


def test_kernels_are_priced_by_launches_and_bytes():
    times = results.read_table("kernel_times", paths.RECORDED)
    (bandwidth, empty), (_, further) = kernels.ceilings(times), kernels.per_launch(times)
    found = kernels.priced(times)
    assert len(found) == kernels.medians(times)["op"].isin(["commit", "log", "restore", "vllm"]).sum()
    line = found.query("op == 'vllm' and kv_heads == 32 and cache == 'bf16' and rows == 72 and kept == 9").iloc[0]
    assert line["predicted"] == pytest.approx(empty + 31 * further + 2 * 32 * 72 * 16384 / bandwidth / 1e6)


# -- repeats -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ratios", "together"),
    [
        ([0.95 * 1.02, 0.95 / 1.02], 0.95),  # who comes first gains 2 %, in either order
        ([0.95 * 1.02, 0.95 / 1.02, 0.95 * 1.02], 0.95),
        ([0.95 * 1.02, 0.95 / 1.02, 0.90, 0.90, 0.99 * 1.1, 0.99 / 1.1], 0.95),
        ([0.97], 0.97),
    ],
)
def test_a_ratio_is_free_of_which_turn_came_first(ratios, together):
    assert abba_ratio(pd.Series(ratios)) == pytest.approx(together)


def test_repeats_are_paired_by_their_number():
    """Of a table with a hole: 1 and 2 are of one order each, but of two captures and minutes apart."""
    assert abba_ratio(pd.Series({0: 0.9, 1: 1.0, 3: 0.5})) == pytest.approx(0.9**0.5)


@pytest.mark.parametrize("passes", [5, 6, 11, 20])
def test_of_many_passes_one_slow_one_does_not_widen_what_is_said(passes):
    """The true median is 1: it lies between the two in `SURE` of draws and more, and nothing narrower would do."""
    draws = np.random.default_rng(0).standard_cauchy((20000, passes)) + 1
    ranked = np.sort(draws)
    (at,) = {sorted(one).index(median_between(one)[0]) for one in draws[:50].tolist()}
    held = (ranked[:, at] < 1) & (ranked[:, passes - 1 - at] > 1)
    assert held.mean() > SURE - 0.01
    narrower = (ranked[:, at + 1] < 1) & (ranked[:, passes - 2 - at] > 1)
    assert narrower.mean() < SURE + 0.01


def test_of_few_passes_the_least_and_the_greatest_are_said():
    assert median_between([1.1, 0.9, 1.0]) == (0.9, 1.1)
    assert median_between([1.1]) == (1.1, 1.1)
    assert all(map(math.isnan, median_between([math.nan])))


def test_what_the_auditor_costs_is_over_the_same_repeat_and_pass_of_each_gpu():
    """The machine is twice as slow in the second repeat, and the other GPU in both."""
    steps = [
        {"gpu": gpu, "batch": 1, "repeat": n, "audit": audit, "step_ms": slow * way * ms}
        for gpu, slow in (("H100", 1.0), ("H200", 3.0))
        for n, way in enumerate((1.0, 2.0))
        for audit, ms in (("off", 10.0), ("full", 11.0 + n))
    ]
    lines = audited_steps(pd.DataFrame(steps)).set_index("gpu")
    assert (lines["mode"] == "full").all() and lines["ratio"].to_list() == pytest.approx([(1.1 * 1.2) ** 0.5] * 2)
    assert lines.loc["H100", ["low", "high"]].to_list() == pytest.approx([1.1, 1.2])
    served = [
        {"gpu": "H100", "tp": tp, "load": "1 at once", "repeat": n, "mode": mode, "metric": metric, "value": value}
        for tp, ratios in ((1, (0.9, 1.0, 0.98)), (2, (1.1,)))
        for n, ratio in enumerate(ratios)
        for metric, times in (("tokens_per_s", 100 * (n + 1)), ("equal", 7))
        for mode, value in (("off", times), ("kv audit", times * ratio))
    ]
    found = audited_servers(pd.DataFrame(served)).set_index("tp")
    columns = ["ratio", "low", "high"]
    assert found.loc[1, columns].to_list() == pytest.approx([0.98, 0.9, 1.0])
    assert found.loc[2, columns].to_list() == pytest.approx([1.1, 1.1, 1.1])


def test_a_range_of_a_tenth_says_nothing():
    assert is_stable(pd.DataFrame({"low": [0.9, 0.95], "high": [1.01, 1.0]})).tolist() == [False, True]
