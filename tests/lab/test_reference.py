# SPDX-License-Identifier: Apache-2.0
"""The four write policies and the speculative decoder: same tokens, clean pages, visible tails."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nwor_lab.bench.reference import formula
from nwor_lab.cost.traffic import MODES, Shape
from nwor_lab.reference.decoder import SpeculativeDecoder
from nwor_lab.reference.policies import Staging, make_policy
from nwor_lab.reference.staging import Counts
from tests.lab.reference_models import (
    CONFIG,
    ScriptedDrafter,
    fresh_rows,
    make_case,
    prompts,
    run_step,
    said_alone,
    tiny_pair,
)

LENGTHS, MAX_TOKENS = (3, 17, 9, 30), 24
MIXED = [(7, 3, 0), (0, 0, 6), (12, 2, 0), (5, 4, 0), (9, 0, 2)]
EXACT = ("off", "cow", "stage")
SHAPE = Shape(2, 2, 8, 4)


@pytest.fixture(scope="module")
def pair():
    return tiny_pair()


@pytest.fixture(scope="module")
def truth(pair):
    """What the target says on its own, and by a plain forward over the whole sequence."""
    return {tuple(prompt): said_alone(pair[0], prompt, MAX_TOKENS + 12) for prompt in prompts(LENGTHS)}


def decode(target, mode, drafter, **options):
    options = {"block_size": 4, "prefill_chunk": 5, **options}
    return SpeculativeDecoder(target, mode, drafter, **options).generate(prompts(LENGTHS), MAX_TOKENS)


# -- tokens and acceptance ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spoil", "k", "seed", "block_size"), [(0.0, 1, 0, 2), (0.3, 4, 1, 16), (0.3, 7, 2, 5), (1.0, 7, 2, 5)]
)
def test_three_policies_say_what_the_target_says_alone(pair, truth, k, seed, block_size, spoil):
    """Prompts of four lengths, prefilled in chunks beside verifies, on pages full of NaN, whatever the order and size
    of blocks; the number of KV heads is 2, and so is one of the sizes. All leave clean pages but vanilla."""
    drafters = {mode: ScriptedDrafter(truth, k, spoil) for mode in EXACT}
    runs = {mode: decode(pair[0], mode, drafters[mode], seed=seed, block_size=block_size) for mode in EXACT}
    want, off = [truth[tuple(prompt)][:MAX_TOKENS] for prompt in prompts(LENGTHS)], runs["off"]
    for mode, run in runs.items():
        assert run.tokens == want, mode
        assert run.accepted == off.accepted, mode
        assert all(step.traffic == formula(run, step) for step in run.steps), mode
        assert (run.dirty_bytes > 0) == (mode == "off" and spoil > 0), mode
    assert any(step.prefill_rows and step.requests for step in off.steps)
    windows, counts = [step for step in off.steps if step.requests], runs["stage"].counts
    staged, accepted = sum(window.draft_rows for window in windows), sum(off.accepted)
    layers = CONFIG.num_hidden_layers
    assert counts == Counts(len(windows), layers * staged, staged, accepted, staged - accepted)
    least, most = {0.0: (k + 1, k + 1), 0.3: (1, k + 1), 1.0: (1, 1)}[spoil]
    assert least <= off.acceptance_length <= most, "the bonus token is counted"


def test_blind_staging_on_poisoned_pages_reads_nan():
    """Rows never written read as NaN; the same check finds the three others clean."""
    for mode in MODES:
        cache, batch = make_case(SHAPE, torch.float32, MIXED)
        outputs = run_step(make_policy(mode, cache), batch, [1, 0, 0, 2, 0])
        window = batch.num_drafts[batch.row_request] > 0
        for output in outputs:
            assert output[window].isnan().any() == (mode == "blind"), mode
            assert output[~window].isfinite().all(), mode


# -- what a step leaves behind --------------------------------------------------------------------------------------


@st.composite
def batches(draw):
    requests, rejected = [], []
    for _ in range(draw(st.integers(1, 5))):
        drafts = draw(st.integers(0, 4))
        requests.append((draw(st.integers(0, 14)), drafts, draw(st.integers(1, 7))))
        rejected.append(draw(st.integers(0, drafts)))
    return requests, rejected


@pytest.mark.parametrize("mode", ["cow", "stage"])
@settings(max_examples=60, deadline=None)
@given(case=batches(), dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float8_e4m3fn]))
def test_a_step_leaves_the_kept_rows_and_nothing_else(mode, case, dtype):
    """In every layer the rows `[0, query_len - num_rejected)` of each query, found row by row, and attention computes
    on the bytes that the cache would hold, staged or not."""
    requests, rejected = case
    cache, batch = make_case(SHAPE, dtype, requests)
    vanilla, _ = make_case(SHAPE, dtype, requests)
    before = cache.pool.clone()
    got = run_step(make_policy(mode, cache), batch, rejected)
    want = run_step(make_policy("off", vanilla), batch, rejected)
    assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))

    kept, row = [], 0
    for (_, drafts, prefill), dropped in zip(requests, rejected, strict=True):
        rows = 1 + drafts if drafts else prefill
        kept += [int(batch.slot_mapping[row + n]) for n in range(rows - dropped)]
        row += rows
    for number, context in cache.layers.items():
        slots = torch.tensor(kept)
        assert torch.equal(context.load(slots), vanilla.layers[number].load(slots)), f"layer {number}"
    assert cache.changed_bytes(before, torch.tensor(kept)) == 0
    dirty = vanilla.changed_bytes(before, torch.tensor(kept))
    assert (dirty > 0) == (sum(rejected) > 0)


def test_a_failed_forward_is_cancelled(pair, truth, monkeypatch):
    target, cancelled = pair[0], []
    monkeypatch.setattr(Staging, "cancel", lambda policy: cancelled.append(policy.state))

    class Failing(ScriptedDrafter):
        def propose(self, requests, *args):
            super().propose(requests, *args)
            if any(request.drafts for request in requests):
                monkeypatch.setattr(target.model.norm, "forward", lambda x: 1 / 0)

    with pytest.raises(ZeroDivisionError):
        decode(target, "stage", Failing(truth, 4, 0.3))
    assert cancelled == ["staging"]


@pytest.mark.parametrize("mode", ["cow", "stage", "blind"])
def test_cancel_undoes_a_window(mode):
    cache, batch = make_case(SHAPE, torch.float32, MIXED)
    policy = make_policy(mode, cache)
    before = cache.pool.clone()
    policy.begin(batch)
    key, value = fresh_rows(cache, len(batch.slot_mapping), torch.Generator().manual_seed(0))
    policy.stage(0, key, value)
    policy.cancel()
    prefill = batch.slot_mapping[batch.num_drafts[batch.row_request] == 0]
    first = batch.slot_mapping[batch.query_start_loc[:-1]]
    always_kept = first[:0] if mode == "blind" else first
    assert cache.changed_bytes(before, torch.cat((prefill, always_kept))) == 0
    assert policy.counts.cancelled == int(mode != "cow")
    run_step(policy, batch, [0, 0, 0, 0, 0])


# -- wrong input ----------------------------------------------------------------------------------------------------


def test_bad_input_is_an_error(pair, truth):
    drafter = ScriptedDrafter(truth, 4, 0.0)
    for bad in ([], [[]], [[1], []]):
        with pytest.raises(ValueError, match="prompt"):
            SpeculativeDecoder(pair[0], "off", drafter).generate(bad, 4)
