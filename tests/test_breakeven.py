# SPDX-License-Identifier: Apache-2.0
"""Where a mode pays, by hand and against the price of a step; and predicted against measured, no point hidden (N4)."""

import math

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nwor import breakeven, figures, kernel_figures, paths, results
from nwor.breakeven import CHIPS, H200, MODELS, Chip, step_difference, step_difference_us, survival_of
from nwor.traffic import Moved, Shape, Window

LLAMA_7B = MODELS["llama-2-7b"]
some = {
    "mode": st.sampled_from(breakeven.MODES),
    "k": st.integers(1, 16),
    "acceptance": st.floats(0, 1),
    "batch": st.integers(1, 512),
    "fused": st.booleans(),
}


def test_the_chip_is_the_recorded_one():
    bandwidth, empty = kernel_figures.ceilings(results.read_table("kernel_times", paths.RECORDED))
    assert H200.launch_us == pytest.approx(empty, abs=0.05)
    assert H200.copy_bytes_per_s == pytest.approx(bandwidth * 1e12, rel=0.005)
    assert all(chip.source.startswith("assumed") for name, chip in CHIPS.items() if name != "H200")
    with pytest.raises(ValueError, match="0 us or more"):
        Chip("x", -1, 1)


def test_a_step_by_hand():
    """stage, one request, k = 8, 2 accepted: 30 launches less, and 32 x (2 x 3 - 9) x 16 KiB."""
    window = Window.of(8, [2], [512])
    moved = step_difference("stage", LLAMA_7B, window)
    assert (moved.launches, moved.read + moved.written) == (-30, -32 * 3 * 16384)
    got = step_difference_us("stage", LLAMA_7B, window, Chip("x", 3.0, 4.25e12))
    assert got == pytest.approx(-30 * 3.0 - 32 * 3 * 16384 / 4.25e6)
    cow = step_difference("cow", LLAMA_7B, window)
    assert (cow.launches, cow.read + cow.written) == (3, 2 * 32 * (8 + 6) * 16384)
    fused = step_difference("stage", LLAMA_7B, window, fused=True)
    assert (fused.launches, fused.read + fused.written) == (2, 32 * (2 * 3 - 4.5) * 16384)


@given(**some)
def test_the_break_even_launch_is_where_the_price_changes_sign(mode, k, acceptance, batch, fused):
    window = Window.expected(batch, survival_of(acceptance, k))
    threshold = breakeven.break_even_launch_us(mode, LLAMA_7B, window, fused=fused)
    launches = step_difference(mode, LLAMA_7B, window, fused=fused).launches
    assert (launches < 0) == (threshold < math.inf) == (mode == "stage" and not fused)
    if 0 < threshold < math.inf:
        dearer, cheaper = (Chip("x", share * threshold, H200.copy_bytes_per_s) for share in (1.01, 0.99))
        assert (
            step_difference_us(mode, LLAMA_7B, window, dearer) < 0 < step_difference_us(mode, LLAMA_7B, window, cheaper)
        )


@given(**{name: some[name] for name in ("mode", "k", "batch", "fused")}, share=st.floats(0, 1))
def test_the_break_even_share_is_where_the_price_changes_sign(mode, k, batch, fused, share):
    most = breakeven.break_even_share(mode, LLAMA_7B, batch, k, fused=fused)
    us = step_difference_us(mode, LLAMA_7B, Window.expected(batch, [share] * k), fused=fused)
    if most is None:
        assert us > 0
    elif not math.isclose(share, most, abs_tol=1e-6):
        assert (us < 0) == (share < most)


@given(**{name: some[name] for name in ("mode", "k", "acceptance", "fused")})
def test_the_paying_batches_are_those_that_pay(mode, k, acceptance, fused):
    survival = survival_of(acceptance, k)
    span = breakeven.paying_batches(mode, LLAMA_7B, survival, fused=fused)

    def us(batch: float) -> float:
        return step_difference_us(mode, LLAMA_7B, Window.expected(batch, survival), fused=fused)

    if span is None:
        assert min(us(1), us(1e6)) > -1e-6
        return
    least, largest = span
    assert us(least * 1.01) < 0 or least == 1
    assert least == 1 or us(least * 0.99) > 0
    if largest < math.inf:
        assert us(largest * 0.99) < 0 < us(largest * 1.01)
    else:
        assert us(max(1e6, 2 * least)) < 0


def test_the_table_says_of_each_point_whether_it_pays():
    table = breakeven.pays({"llama-2-7b": LLAMA_7B}, [1, 8], [0.5, 1.0], [1, 1024], modes=("cow", "stage"))
    assert len(table) == 2 * 2 * 2 * 2 * 2
    assert (table["pays"] == (table["us"] < 0)).all()
    assert not table.loc[table["mode"] == "cow", "pays"].any()
    paid = table[table["pays"]].set_index(["vanilla", "k", "acceptance", "batch"]).index
    small = [("separate", k, a, 1) for k in (1, 8) for a in (0.5, 1.0)]
    assert set(paid) == {*small, ("separate", 8, 0.5, 1024), ("fused", 8, 0.5, 1024)}, "2 of 9 rows kept"
    (line,) = table.query("mode == 'stage' and k == 8 and acceptance == 1 and batch == 1024 and vanilla == 'fused'").us
    assert line == pytest.approx(2 * 3.3 + 32 * 1024 * 9 * 1.5 * 16384 / 4.24e6)


def test_published_acceptance_is_priced_as_published():
    table = breakeven.pays_published(figures.published_survival(), [16], modes=("stage",))
    llama = table[(table["model"] == "Llama-2-chat-7B") & (table["vanilla"] == "separate")]
    assert llama["k"].tolist() == [1, 2, 3, 4, 5]
    assert llama["kept"].iloc[1] == pytest.approx(1 + 0.76 + 0.76 * 0.69)
    assert llama["acceptance"].iloc[0] == pytest.approx(0.76)
    assert set(table["model"]) >= {"Llama-3.1-8B", "Qwen3-8B", "gpt-oss-20b", "Vicuna-7B"}
    assert not table["model"].str.contains("DeepSeek").any(), "latent attention has no rows of keys and values"


# -- predicted against measured ----------------------------------------------------------------------------------


def bench(**settings) -> pd.DataFrame:
    """Two repeats of vanilla (1 ms, then 2 ms a step) and of cow, a tenth slower; 4 requests, k = 4, half accepted."""
    rows = []
    for repeat in (0, 1):
        for mode, slower in (("off", 1.0), ("cow", 1.1)):
            rows += [
                {"mode": mode, "repeat": repeat, "metric": "step_ms", "value": slower * (1 + repeat), "step": step}
                for step in range(10)
            ]
            counts = {"windows": 40, "draft_tokens": 160, "accepted_tokens": 80}
            rows += [
                {"mode": mode, "repeat": repeat, "metric": metric, "value": value} for metric, value in counts.items()
            ]
    return results.tidy(pd.DataFrame(rows), model="Llama-2-7b-hf", k=4, batch=4, unit="", **settings)


def test_a_measured_point_by_hand():
    (point,) = breakeven.against_measured(bench()).to_dict("records")
    assert (point["requests"], point["drafts"], point["rejected"]) == (4, 16, 8)
    us = 3 * 3.3 + 2 * 32 * 16384 * (16 + 8) / 4.24e6
    assert point["difference_us"] == pytest.approx(us)
    assert point["predicted"] == pytest.approx(1 + us / 1500)
    assert point["measured"] == pytest.approx(1.1), "repeat for repeat, whatever the machine did between them"
    assert point["error"] == pytest.approx(point["predicted"] - 1.1)


def test_every_setting_is_a_point_of_its_own():
    parts = [bench(), bench(kv_heads=8), bench(kv_heads=8, kv_cache_dtype="fp8"), bench(prompt=2048), bench(tp=2)]
    found = breakeven.against_measured(pd.concat(parts, ignore_index=True))
    assert len(found) == len(parts)
    bytes_us = found["difference_us"] - 3 * 3.3
    assert (bytes_us / bytes_us.iloc[0]).tolist() == pytest.approx([1, 1 / 4, 1 / 8, 1, 1 / 2])


def test_what_cannot_be_predicted_is_an_error():
    table = bench()
    with pytest.raises(ValueError, match="no cache is known of model 'mine': pass shapes="):
        breakeven.against_measured(table.assign(model="mine"))
    assert len(breakeven.against_measured(table.assign(model="mine"), shapes={"mine": Shape(2, 2, 8)})) == 1
    with pytest.raises(ValueError, match="mode off has no step times"):
        breakeven.against_measured(table[table["mode"] != "off"])


def test_the_recorded_run_is_predicted_point_for_point():
    table = results.read_table("gpu_cow", paths.RECORDED)
    found = breakeven.against_measured(table)
    assert len(found) == table["graphs"].nunique()
    assert found["predicted"].between(1, 1.01).all()
    assert found["measured"].gt(1).all()


def test_kernels_are_priced_by_launches_and_bytes():
    medians = kernel_figures.medians(results.read_table("kernel_times", paths.RECORDED))
    found = breakeven.kernels_against_model(medians)
    assert len(found) == medians["op"].isin(["commit", "log", "restore", "vllm"]).sum()
    line = found.query("op == 'vllm' and kv_heads == 32 and cache == 'bf16' and rows == 72 and kept == 9").iloc[0]
    assert line["predicted"] == pytest.approx(H200.us(Moved(32 * 72 * 16384, 32 * 72 * 16384, 32)))
    assert line["error"] == pytest.approx(line["predicted"] / line["us"] - 1)


def test_the_hardware_counted_the_bytes_of_the_formulas():
    found = breakeven.counters_against_model(results.read_table("kernel_counters", paths.RECORDED))
    assert set(found["op"]) == {"commit", "log", "restore"}
    assert found["error"].abs().max() < 0.1
    line = found.query("op == 'commit' and kv_heads == 32 and cache == 'bf16' and rows == 2304 and kept == 3").iloc[0]
    assert line["model"] == 32 * 768 * 16384
