# SPDX-License-Identifier: Apache-2.0
"""Drafts whose number follows the batch in real vLLM on a GPU: a CUDA graph for each number of them, and none."""

import pytest

from nwor.settings import Settings
from tests.engines import PROMPTS
from tests.nwor.gpu.on_gpu import assert_clean_and_counted, assert_parity, both, spec_of
from tests.nwor.specs import LENGTHS, SCHEDULES, by_batch

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]


@both
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("stack", ["v2 FA graphs", "v2 FA eager", "v1 FA graphs"])
def test_draft_lengths_that_follow_the_batch(engines, model, mode, schedule, stack):
    """Windows grow from two drafts to four as the batch shrinks, or there are none before."""
    spec = by_batch(spec_of(model, stack, batch=4), SCHEDULES[schedule])
    call = {"prompts": PROMPTS[:4], "sampling": LENGTHS, "logprobs": 5}
    plain = engines.run(spec, Settings(audit=True), **call)
    assert plain.audit["dirty_layer_steps"] > 0
    outcome = engines.run(spec, Settings(mode=mode, audit=True, debug_sync=True), **call)
    always = SCHEDULES[schedule][-1][-1] > 0  # else windows come when no request is prefilled any more, beside none
    assert_clean_and_counted(outcome, mode, checks=0, logged=mode == "cow" or always)  # few steps have drafts
    assert_parity(plain, outcome)
    counters = outcome.ranks[0]["counters"]
    assert counters["staged_tokens"] < 4 * counters["windows"] or not always
