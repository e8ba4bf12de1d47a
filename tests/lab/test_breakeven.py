# SPDX-License-Identifier: Apache-2.0
"""Where a mode pays, by hand and against the price of a step; and predicted against measured, no point hidden."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nwor_lab import paths, results
from nwor_lab.model import breakeven
from nwor_lab.model.breakeven import CHIPS, H200, MODELS, Chip, step_difference, step_difference_us, survival_of
from nwor_lab.model.traffic import Window
from nwor_lab.plots import kernels, paper

LLAMA_7B = MODELS["llama-2-7b"]
some = {
    "mode": st.sampled_from(breakeven.MODES),
    "k": st.integers(1, 16),
    "acceptance": st.floats(0, 1),
    "batch": st.integers(1, 512),
    "fused": st.booleans(),
}


def test_the_chip_is_the_recorded_one():
    bandwidth, empty = kernels.ceilings(results.read_table("kernel_times", paths.RECORDED))
    assert H200.launch_us == pytest.approx(empty, rel=0.03)
    assert H200.copy_bytes_per_s == pytest.approx(bandwidth * 1e12, rel=0.03)
    assert all(chip.source.startswith("assumed") for name, chip in CHIPS.items() if name != "H200")
    with pytest.raises(ValueError, match="0 us or more"):
        Chip("x", -1, 1)


def test_a_step_by_hand():
    """stage, one request, k = 8, 2 accepted: 30 launches less, and 32 x (2 x 2 - 9) x 16 KiB."""
    window = Window.of(8, [2], [512])
    moved = step_difference("stage", LLAMA_7B, window)
    assert (moved.launches, moved.read + moved.written) == (-30, -32 * 5 * 16384)
    got = step_difference_us("stage", LLAMA_7B, window, Chip("x", 3.0, 4.25e12))
    assert got == pytest.approx(-30 * 3.0 - 32 * 5 * 16384 / 4.25e6)
    cow = step_difference("cow", LLAMA_7B, window)
    assert (cow.launches, cow.read + cow.written) == (3, 2 * 32 * (3 + 6) * 16384)
    fused = step_difference("stage", LLAMA_7B, window, fused=True)
    assert (fused.launches, fused.read + fused.written) == (2, 32 * (2 * 2 - 4.5) * 16384)


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
    few = {("separate", 8, 0.5, 1024), ("fused", 8, 0.5, 1024)}  # 1 of 9 rows is an accepted draft
    half = {("separate", 1, a, 1024) for a in (0.5, 1.0)}  # with all drafts accepted the bytes are vanilla's
    assert set(paid) == {*small, *few, *half}
    (line,) = table.query("mode == 'stage' and k == 8 and acceptance == 1 and batch == 1024 and vanilla == 'fused'").us
    assert line == pytest.approx(2 * 3.3 + 32 * 1024 * 11.5 * 16384 / 4.24e6)


def test_published_acceptance_is_priced_as_published():
    table = breakeven.pays_published(paper.published_survival(), [16], modes=("stage",))
    llama = table[(table["model"] == "Llama-2-chat-7B") & (table["vanilla"] == "separate")]
    assert llama["k"].tolist() == [1, 2, 3, 4, 5]
    assert llama["kept"].iloc[1] == pytest.approx(1 + 0.76 + 0.76 * 0.69)
    assert llama["acceptance"].iloc[0] == pytest.approx(0.76)
    assert set(table["model"]) >= {"Llama-3.1-8B", "Qwen3-8B", "gpt-oss-20b", "Vicuna-7B"}
    assert not table["model"].str.contains("DeepSeek").any(), "latent attention has no rows of keys and values"
