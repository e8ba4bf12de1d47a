# SPDX-License-Identifier: Apache-2.0
"""Predicted against measured: by hand, setting by setting, no point hidden."""

import pandas as pd
import pytest

from nwor_lab import paths, results
from nwor_lab.model import predicted
from nwor_lab.model.breakeven import H200
from nwor_lab.model.traffic import Moved, Shape
from nwor_lab.plots import kernels


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
    (point,) = predicted.against_measured(bench()).to_dict("records")
    assert (point["requests"], point["drafts"], point["rejected"]) == (4, 16, 8)
    us = 3 * 3.3 + 2 * 32 * 16384 * (8 + 4 + 8) / 4.24e6
    assert point["difference_us"] == pytest.approx(us)
    assert point["predicted"] == pytest.approx(1 + us / 1500)
    assert point["measured"] == pytest.approx(1.1), "repeat for repeat, whatever the machine did between them"
    assert point["error"] == pytest.approx(point["predicted"] - 1.1)


def test_every_setting_is_a_point_of_its_own():
    parts = [bench(), bench(kv_heads=8), bench(kv_heads=8, kv_cache_dtype="fp8"), bench(prompt=2048), bench(tp=2)]
    found = predicted.against_measured(pd.concat(parts, ignore_index=True))
    assert len(found) == len(parts)
    bytes_us = found["difference_us"] - 3 * 3.3
    assert (bytes_us / bytes_us.iloc[0]).tolist() == pytest.approx([1, 1 / 4, 1 / 8, 1, 1 / 2])


def test_stage_is_predicted_with_the_attention_measured_between_its_neighbours():
    """32 layers save 70 - 60 us each, and a step opens and commits 8 drafts once."""
    times = {"nwor": 60.0, "flash": 70.0, "triton": 65.0, "write": 4.0, "empty": 3.0}
    shapes = {(32, 4, 512): 1.0, (32, 4, 4096): 10.0, (16, 4, 512): 100.0, (32, 16, 512): 1000.0}
    rows = [
        {
            "op": op,
            "value": factor * us,
            "heads": 32,
            "kv_heads": heads,
            "batch": batch,
            "context": context,
            "cache": "bf16",
        }
        for (heads, batch, context), factor in shapes.items()
        for op, us in times.items()
    ]
    alone = pd.DataFrame(rows).assign(metric="time", k=8, value=1.0)
    attention = pd.concat([pd.DataFrame(rows).assign(metric="between", k=8), alone]).assign(run_id="")
    staged = bench(prompt=700).replace({"mode": {"cow": "stage"}}).assign(k=8)
    (point,) = predicted.against_measured(staged, attention=attention).to_dict("records")
    commit = 2 * 32 * 16384 * 8 / 4.24e6
    assert point["with_attention"] == pytest.approx(1 + (-32 * 10 + 2 * 3.3 + commit) / 1500)
    assert point["predicted"] != point["with_attention"]
    triton = staged.assign(backend="TRITON_ATTN")
    (other,) = predicted.against_measured(triton, attention=attention)["with_attention"]
    assert other == pytest.approx(1 + (-32 * 5 + 2 * 3.3 + commit) / 1500)
    others = (staged.assign(k=4), staged.assign(batch=5), staged.assign(kv_cache_dtype="fp8"), bench(prompt=700))
    for unknown in (*others, staged.assign(run_id="an earlier kernel's")):
        assert predicted.against_measured(unknown, attention=attention)["with_attention"].isna().all()


def test_a_step_that_fell_back_is_predicted_to_take_vanillas_time():
    """As recorded, from 4,120 positions on: bf16, k=8, 16 requests on 32 KV heads."""
    rows = [
        {"op": op, "value": us, "heads": 32, "kv_heads": 32, "batch": 16, "context": context, "cache": "bf16", "k": 8}
        for op, us in {"nwor": 60.0, "flash": 70.0}.items()
        for context in (512, 8192)
    ]
    attention = pd.DataFrame(rows).assign(metric="between", run_id="")
    staged = bench(kv_heads=32).replace({"mode": {"cow": "stage"}}).assign(k=8, batch=16)
    for prompt, fell_back in ((4119, False), (4120, True)):
        (found,) = predicted.against_measured(staged.assign(prompt=prompt), attention=attention)["with_attention"]
        assert (found == 1) == fell_back


def test_what_cannot_be_predicted_is_an_error():
    table = bench()
    with pytest.raises(ValueError, match="no cache is known of model 'mine': pass shapes="):
        predicted.against_measured(table.assign(model="mine"))
    assert len(predicted.against_measured(table.assign(model="mine"), shapes={"mine": Shape(2, 2, 8)})) == 1
    with pytest.raises(ValueError, match="mode off has no step times"):
        predicted.against_measured(table[table["mode"] != "off"])


def test_the_recorded_run_is_predicted_point_for_point():
    table = results.read_table("gpu_cow", paths.RECORDED)
    found = predicted.against_measured(table)
    assert len(found) == table["graphs"].nunique()
    assert found["predicted"].between(1, 1.01).all()
    assert found["measured"].gt(1).all()


def test_kernels_are_priced_by_launches_and_bytes():
    medians = kernels.medians(results.read_table("kernel_times", paths.RECORDED))
    found = predicted.kernels_against_model(medians)
    assert len(found) == medians["op"].isin(["commit", "log", "restore", "vllm"]).sum()
    line = found.query("op == 'vllm' and kv_heads == 32 and cache == 'bf16' and rows == 72 and kept == 9").iloc[0]
    assert line["predicted"] == pytest.approx(H200.us(Moved(32 * 72 * 16384, 32 * 72 * 16384, 32)))
    assert line["error"] == pytest.approx(line["predicted"] / line["us"] - 1)


def test_the_hardware_counted_the_bytes_of_the_formulas():
    found = predicted.counters_against_model(results.read_table("kernel_counters", paths.RECORDED))
    assert set(found["op"]) == {"commit", "log", "restore"}
    assert found["error"].abs().max() < 0.1
    line = found.query("op == 'commit' and kv_heads == 32 and cache == 'bf16' and rows == 2304 and kept == 3").iloc[0]
    assert line["model"] == 32 * 768 * 16384
