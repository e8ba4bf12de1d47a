# SPDX-License-Identifier: Apache-2.0
"""Chunk-based verification: vanilla's tokens, no row behind a rejection, a model exact against the counts."""

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nwor_lab.bench.reference import ChunkedRun, compare_chunks, formula
from nwor_lab.cost import chunks as model
from nwor_lab.cost.traffic import Traffic, Window
from nwor_lab.reference.chunks import ChunkedDrafter, LookupDrafter
from nwor_lab.reference.decoder import EagleDrafter, SpeculativeDecoder
from tests.lab.reference_models import (
    ScriptedDrafter,
    agreeing_pair,
    prompts,
    said_alone,
    tiny_pair,
)

LENGTHS, MAX_TOKENS, K = (3, 17, 9), 24, 12
EXACT = ("off", "cow", "stage")


@pytest.fixture(scope="module")
def target():
    return tiny_pair()[0]


@pytest.fixture(scope="module")
def truth(target):
    return {tuple(prompt): said_alone(target, prompt, MAX_TOKENS + 3 * K) for prompt in prompts(LENGTHS)}


def decode(target, mode, drafter, chunk, lengths=LENGTHS) -> ChunkedRun:
    chunked = ChunkedDrafter(drafter, chunk)
    decoder = SpeculativeDecoder(target, mode, chunked, block_size=4, prefill_chunk=5)
    return ChunkedRun(chunk, decoder.generate(prompts(lengths), MAX_TOKENS), chunked.windows)


def rows_written(run: ChunkedRun) -> float:
    """Rows of windows that reached their pages, a restored one twice: what the ledger holds beyond prompts' rows."""
    cache, steps = run.generation.cache, run.generation.steps
    traffic = sum((step.traffic for step in steps), Traffic())
    written = sum(traffic[kind].written for kind in ("write", "commit", "restore") if kind in traffic)
    rows = sum(step.requests + step.draft_rows + step.prefill_rows for step in steps)
    return written / cache.num_layers / cache.layers[0].row_bytes - (rows - run.counted[1])


def simulate(accepted: int, k: int, chunk: int) -> tuple[int, int]:
    """Forwards and rows computed of a window that accepts `accepted` drafts, row by row."""
    forwards = computed = 0
    while computed <= k:
        forwards, computed = forwards + 1, min(computed + chunk, k + 1)
        if accepted < computed:
            break
    return forwards, computed


# -- the reference model --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("spoil", "chunk"), [(0.0, 5), (0.15, 1), (0.15, 5), (1.0, 4), (1.0, 13)])
def test_chunks_say_what_the_target_says_alone_and_the_formula_counts_them(target, truth, chunk, spoil):
    for mode in EXACT:
        run = decode(target, mode, ScriptedDrafter(truth, K, spoil), chunk)
        assert run.generation.tokens == [truth[tuple(prompt)][:MAX_TOKENS] for prompt in prompts(LENGTHS)]
        found = [(window.forwards, window.rows) for window in run.windows]
        assert found == [simulate(window.accepted, K, chunk) for window in run.windows]
        assert run.exact and rows_written(run) == pytest.approx(len(run.windows) * run.predicted.written)
        assert all(step.traffic == formula(run.generation, step) for step in run.generation.steps)
        assert {0.0: min, 0.15: max, 1.0: max}[spoil](w.accepted for w in run.windows) == (0 if spoil == 1 else K)
        assert mode != "stage" or rows_written(run) == sum(1 + window.accepted for window in run.windows)
        assert mode == "off" or run.generation.dirty_bytes == 0


def test_steps_are_the_models_step_for_step(target, truth):
    """One request, 13 rows in chunks of 3, the last of one row: requests, drafts, rejected and context rows of each
    step, and so its bytes and launches."""
    run = decode(target, "stage", ScriptedDrafter(truth, K, 0.1), 3, LENGTHS[:1])
    context, expected = LENGTHS[0], []
    for window in run.windows:
        survival = [float(place < window.accepted) for place in range(K)]
        expected += model.chunk_steps(survival, 3, context)
        context += 1 + window.accepted
    steps = run.generation.steps[1:]
    counted = [Window(s.requests, s.draft_rows, s.rejected_rows, s.context_rows, s.prefill_rows) for s in steps]
    assert [(1.0, step) for step in counted] == expected


def test_an_eagle_head_drafts_the_same_windows_in_chunks():
    """Its own cache follows the target's through chunks that it drafts nothing for."""
    target, head = agreeing_pair()
    found = []
    for chunk in (1 + K, 2):
        drafter = ChunkedDrafter(EagleDrafter(head, K), chunk)
        SpeculativeDecoder(target, "stage", drafter, block_size=8).generate(prompts((9,)), 60)
        found.append([window.accepted for window in drafter.windows])
    assert found[0] == found[1] and max(found[0]) > 2


def test_a_draft_is_looked_up_where_the_text_stood_first():
    drafter = LookupDrafter(5, 3)
    assert drafter.look_up([1, 2, 3, 9, 8, 1, 2, 3, 7, 1, 2, 3]) == [9, 8, 1, 2, 3]
    assert drafter.look_up([1, 2, 3, 9, 1, 2, 3]) == [9, 1, 2, 3, 9], "the draft goes on with itself"
    assert drafter.look_up([1, 2, 3]) == drafter.look_up([1, 2, 3, 4, 1, 2]) == []


# -- the model ------------------------------------------------------------------------------------------------------


@given(k=st.integers(1, 60), chunk=st.integers(1, 70), data=st.data())
def test_the_model_is_the_mean_of_simulated_windows(k, chunk, data):
    accepted = data.draw(st.lists(st.integers(0, k), min_size=1, max_size=12))
    n = len(accepted)
    survival = [sum(count > place for count in accepted) / n for place in range(k)]
    simulated = [simulate(count, k, chunk) for count in accepted]
    forwards, computed = (sum(each) / n for each in zip(*simulated, strict=True))
    kept = 1 + sum(accepted) / n
    for mode, written in {"off": computed, "direct": computed, "cow": 2 * computed - kept, "stage": kept}.items():
        found = model.window_rows(mode, survival, chunk)
        assert (found.forwards, found.computed, found.written) == pytest.approx((forwards, computed, written))
    saved, added = 1 + k - computed, forwards - 1
    assert model.break_even_rows(survival, chunk) == (pytest.approx(saved / added) if added > 1e-9 else inf)


def test_prompts_that_give_no_window_are_an_error(target):
    with pytest.raises(ValueError, match="window"):
        compare_chunks(target, [[1, 2]], k=4, chunk=2, max_tokens=2)
