# SPDX-License-Identifier: Apache-2.0
"""The audit of real vLLM on a CPU: each fault injected into a mode makes its own fields red, and no others."""

import pytest

from nwor.settings import Settings
from nwor_lab.faults import DIRTY, FP8
from tests.devices import needs_fp8_cache
from tests.engines import PROMPTS
from tests.injected import check_each_is_seen, red
from tests.nwor import faults
from tests.nwor.on_cpu import spec_of

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]


@pytest.mark.parametrize(
    ("mode", "cache", "needs"),
    [
        ("stage", ("float32",), ""),
        ("cow", ("float32",), ""),
        pytest.param("cow", ("bfloat16", "fp8"), FP8, marks=needs_fp8_cache),
    ],
    ids=["stage", "cow", "cow fp8"],
)
def test_each_fault_is_seen_for_what_it_is(engines, model, mode, cache, needs):
    check_each_is_seen(engines, spec_of(model, *cache), mode, needs)


def test_vanilla_is_dirty_by_its_rejected_rows_alone(engines, model):
    outcome = engines.run(spec_of(model), Settings(audit=True), prompts=PROMPTS[:6], max_tokens=24)
    counters = outcome.generation.counters
    assert red(outcome.audit) == {DIRTY}
    assert outcome.audit["dirty_slots"] == 3 * (counters["draft_tokens"] - counters["accepted_tokens"]) > 0
    assert outcome.audit["content_checked"] == outcome.audit["kept_rows"] > 0


def test_rows_that_a_model_writes_itself_are_not_said_to_be_checked(engines, model):
    """Nothing passes vLLM's hook of the cache write, so there is nothing to compare with."""
    outcome = engines.run(spec_of(model), Settings(audit=True), faults.writes_its_own, prompts=PROMPTS[:2])
    assert outcome.audit["content_checked"] == 0 < outcome.audit["kept_rows"]
