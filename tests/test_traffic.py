# SPDX-License-Identifier: Apache-2.0
"""The closed formulas of bytes and launches against the reference model's ledger, and what they predict (N4)."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_models import make_case, run_step

from nwor.reference import make_policy
from nwor.traffic import (
    MODES,
    Moved,
    Shape,
    Traffic,
    Window,
    break_even,
    predicted_step_difference,
    step_difference,
    step_traffic,
)

LLAMA_7B = Shape(num_layers=32, num_kv_heads=32, head_size=128)
DTYPES = {1: torch.float8_e4m3fn, 2: torch.bfloat16, 4: torch.float32}


@st.composite
def steps(draw):
    size = draw(st.sampled_from(sorted(DTYPES)))
    tp = draw(st.sampled_from([1, 2, 4]))
    layers, heads, width = (draw(st.sampled_from(s)) for s in ([1, 2, 3], [1, 2, 4], [2, 8]))
    shape = Shape(layers, heads, width, size, max(size, 2), tp)
    requests, rejected = [], []
    for _ in range(draw(st.integers(1, 4))):
        drafts = draw(st.integers(0, 5))
        requests.append((draw(st.integers(0, 13)), drafts, draw(st.integers(1, 9))))
        rejected.append(draw(st.integers(0, drafts)))
    return shape, requests, rejected


def window_of(requests, rejected) -> Window:
    prefill = sum(rows for _, drafts, rows in requests if not drafts)
    drafts = [d for _, d, _ in requests if d]
    own = sum(drafts) + len(drafts) + prefill
    return Window(len(drafts), sum(drafts), sum(rejected), sum(c for c, _, _ in requests) + own, prefill)


@pytest.mark.parametrize("mode", MODES)
@settings(max_examples=60, deadline=None)
@given(step=steps())
def test_counted_equals_formula(mode, step):
    shape, requests, rejected = step
    cache, batch = make_case(shape, DTYPES[shape.cache_bytes], requests)
    run_step(make_policy(mode, cache), batch, rejected)
    assert cache.traffic == step_traffic(mode, shape, window_of(requests, rejected))


@settings(max_examples=40, deadline=None)
@given(mode=st.sampled_from(MODES), k=st.integers(1, 8), accepted=st.lists(st.integers(0, 1), min_size=1, max_size=4))
def test_a_step_is_its_layers_and_its_ranks(mode, k, accepted):
    window = Window.of(k, accepted, [100] * len(accepted))
    whole = step_traffic(mode, Shape(6, 8, 16), window)
    layer = step_traffic(mode, Shape(1, 8, 16), window)
    half = step_traffic(mode, Shape(6, 8, 16, tp=2), window)
    for kind, moved in whole.items():
        assert (moved.read, moved.written) == (6 * layer[kind].read, 6 * layer[kind].written)
        assert (moved.read, moved.written) == (2 * half[kind].read, 2 * half[kind].written)
        assert moved.launches == half[kind].launches


def test_numbers_by_hand():
    """Llama-2-7B, one request, k = 8, 2 accepted, 512 tokens before: a row is 2 x 32 x 128 x 2 = 16 KiB."""
    window = Window.of(8, [2], [512])
    assert (window.rows, window.kept_rows, window.rejected_rows, window.context_rows) == (9, 3, 6, 521)
    row, layers = 16384, 32
    write = Moved(layers * 9 * row, layers * 9 * row, layers)
    prefix, tail = Moved(layers * 512 * row, 0, layers), Moved(layers * 9 * row, 0, 0)
    assert step_traffic("off", LLAMA_7B, window) == {"attention": prefix, "tail": tail, "write": write}
    cow = step_traffic("cow", LLAMA_7B, window)
    assert cow["log"] == Moved(layers * 8 * row, layers * 8 * row, 1)
    assert cow["restore"] == Moved(layers * 6 * row, layers * 6 * row, 1)
    stage = step_traffic("stage", LLAMA_7B, window)
    assert set(stage) == {"attention", "stage", "commit"}
    assert stage["attention"] == prefix
    assert stage["commit"] == Moved(layers * 3 * row, layers * 3 * row, 1)


def test_launches_of_each_mode_against_vanilla():
    """cow adds two launches a step; stage takes away one a layer and adds one; beside a prefill it cannot."""
    window = Window.of(8, [2], [512])
    assert step_difference("off", LLAMA_7B, window) == (0, 0)
    assert step_difference("cow", LLAMA_7B, window)[0] == 2
    assert step_difference("stage", LLAMA_7B, window)[0] == 1 - 32
    assert step_difference("blind", LLAMA_7B, window)[0] == 32
    assert step_difference("stage", LLAMA_7B, Window.of(8, [2], [512], prefill_rows=64))[0] == 1


def test_step_without_drafts_is_vanilla_in_every_mode():
    prefill = Window(requests=0, draft_rows=0, rejected_rows=0, context_rows=64, prefill_rows=64)
    assert all(step_difference(mode, LLAMA_7B, prefill) == (0, 0) for mode in MODES)


@given(k=st.integers(1, 16), accepted=st.integers(0, 16), launch=st.floats(0.1, 20), bandwidth=st.floats(10, 8000))
def test_prediction_and_break_even_agree(k, accepted, launch, bandwidth):
    window = Window.of(k, [min(k, accepted)], [100])
    for mode in ("cow", "stage"):
        threshold = break_even(mode, LLAMA_7B, window, bandwidth_gb_s=bandwidth)
        costs = predicted_step_difference(mode, LLAMA_7B, window, launch_us=launch, bandwidth_gb_s=bandwidth)
        if not math.isclose(launch, threshold, rel_tol=1e-9):
            assert (costs < 0) == (launch > threshold)
    assert break_even("cow", LLAMA_7B, window, bandwidth_gb_s=bandwidth) == math.inf


def test_prediction_by_hand():
    """31 launches less at 3 us each, and 32 x (2 x 3 - 9) x 16 KiB at 4,250 GB/s."""
    window = Window.of(8, [2], [512])
    got = predicted_step_difference("stage", LLAMA_7B, window, launch_us=3.0, bandwidth_gb_s=4250)
    assert got == pytest.approx(-31 * 3.0 - 32 * 3 * 16384 / 4250e3)


def test_ranks_beyond_the_heads_hold_one_each():
    assert Shape(1, 2, 8, tp=4).heads == 1
    with pytest.raises(ValueError, match="evenly"):
        Shape(1, 6, 8, tp=4)


def test_bad_input_is_an_error():
    window = Window.of(2, [1], [10])
    with pytest.raises(ValueError, match="choose one of off, blind, cow, stage"):
        step_traffic("staging", LLAMA_7B, window)
    with pytest.raises(ValueError, match="no kind"):
        Traffic().count("wirte", read=1)
    with pytest.raises(ValueError, match="3 rejected of 2"):
        Window(1, 2, 3, 20)
    with pytest.raises(ValueError, match="own rows"):
        Window(1, 2, 0, 2)
    with pytest.raises(ValueError, match="accepted counts"):
        Window.of(2, [1, 1], [10])
