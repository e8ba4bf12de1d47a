# SPDX-License-Identifier: Apache-2.0
"""Modes in real vLLM on the CPU: tokens, caches, counters and reasons, with injected faults.

Thirteen prompts of 10 to 149 tokens, eight at a time, 96 tokens a batch:
chunked prefill runs beside decodes throughout.
"""

import pytest

from nwor.settings import Settings
from nwor_lab.bench.parity import compare
from tests.checkpoints import GAPS, random_pair
from tests.devices import needs_fp8_cache
from tests.engines import Outcome
from tests.nwor import faults
from tests.nwor.on_cpu import ROUNDING, assert_clean_and_counted, planned_is_held, spec_of

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

CACHES = [
    ("float32", "auto"),
    ("bfloat16", "auto"),
    pytest.param("bfloat16", "fp8", marks=needs_fp8_cache),
    pytest.param("bfloat16", "fp8_e5m2", marks=needs_fp8_cache),
]

ELEMENT = {("float32", "auto"): 4, ("bfloat16", "auto"): 2, ("bfloat16", "fp8"): 1, ("bfloat16", "fp8_e5m2"): 1}


def treated(engines, model, mode: str, fault=None, dtype="float32", kv_cache_dtype="auto", **call) -> Outcome:
    settings = Settings(mode=mode, audit=True, debug_sync=True)
    return engines.run(spec_of(model, dtype, kv_cache_dtype), settings, fault, **call)


@pytest.mark.parametrize("dtype, kv_cache_dtype", CACHES)
def test_modes_beside_vanilla(engines, model, vanilla, dtype, kv_cache_dtype):
    """Vanilla leaves rejected bytes behind, cow and stage none; tokens are vanilla's, or near ties."""
    plain = vanilla(dtype, kv_cache_dtype)
    assert plain.ranks[0]["hooks"] == [] and not [name for name in plain.metrics if name.startswith("nwor_")]
    counters = plain.generation.counters
    assert plain.audit["dirty_slots"] == 3 * (counters["draft_tokens"] - counters["accepted_tokens"]) > 0
    assert plain.audit["content_checked"] == plain.audit["kept_rows"] > 0 == plain.audit["unwritten_rows"]
    element = ELEMENT[dtype, kv_cache_dtype]
    if kv_cache_dtype != "fp8_e5m2":
        exact = treated(engines, model, "cow", None, dtype, kv_cache_dtype)
        assert exact.tokens == plain.tokens
        assert_clean_and_counted(exact, "cow", element=element)
    staged = treated(engines, model, "stage", planned_is_held, dtype, kv_cache_dtype, logprobs=5)
    assert_clean_and_counted(staged, "stage", element=element)
    parity = compare(plain.generation, staged.generation)
    gap = ROUNDING if dtype == "float32" else GAPS["auto" if kv_cache_dtype == "auto" else "fp8"]
    assert parity.within(gap) and (dtype != "float32" or parity.equal == parity.requests), parity


def test_the_control_attends_as_stage_does_and_writes_as_vanilla_does(engines, model, vanilla):
    """In bfloat16, where its attention is not vLLM's to the bit."""
    staged, direct = (treated(engines, model, mode, None, "bfloat16", logprobs=5) for mode in ("stage", "direct"))
    [rank] = direct.ranks
    assert rank["serving"] == "direct" and not any(rank["counters"].values())
    assert direct.tokens == staged.tokens
    assert direct.generation.top_logprobs == staged.generation.top_logprobs != []
    counters = direct.generation.counters
    assert direct.audit["dirty_slots"] == 3 * (counters["draft_tokens"] - counters["accepted_tokens"]) > 0
    assert direct.audit["unwritten_rows"] == 0


@pytest.mark.parametrize("mode", ["stage", "cow"])
def test_each_fault_is_seen_for_what_it_is(engines, model, mode):
    """Each fault injected into a mode makes its own fields of the audit red, and no others."""
    faults.check_each_is_seen(engines, spec_of(model), mode)


def test_blind_attention_is_seen(engines, model, vanilla):
    """The historical flaw: attention never saw the staged tokens."""
    outcome = treated(engines, model, "stage", faults.blind_attention, logprobs=5)
    assert not compare(vanilla().generation, outcome.generation).within(ROUNDING)


def test_a_window_that_does_not_fit_is_written_by_vllm(engines, model, vanilla):
    """Overflow takes vLLM's own write, counted; no write is skipped."""
    outcome = treated(engines, model, "stage", faults.small_capacity)
    assert outcome.tokens == vanilla().tokens
    assert outcome.metrics["nwor_fallbacks"] == outcome.ranks[0]["counters"]["fallbacks"] > 0
    assert outcome.audit["unwritten_rows"] == 0


@pytest.mark.parametrize(
    ("fault", "says", "ways"),
    [
        (faults.unreadable_packing, "packing", []),
        (faults.one_layer_of_another_class, "OfThisModel", []),
        (faults.blind_from_the_start, "start-up", ["logged"]),
        (faults.writes_its_own, "itself", ["logged"]),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_cannot_be_served_falls_back_with_its_reason(engines, model, vanilla, fault, says, ways):
    """Of unknown layers nothing is served. Where our attention fails, or a model writes its own cache, every step is
    logged, and the audit does not say that it has checked rows that pass no hook of the cache write."""
    outcome = engines.run(spec_of(model), Settings(mode="stage", audit=bool(ways), debug_sync=True), fault)
    assert outcome.tokens == vanilla().tokens
    [rank] = outcome.ranks
    assert (rank["serving"], rank["ways"]) == ("stage" if ways else "off", ways) and says in rank["reason"]
    if ways:
        audit = outcome.audit
        assert audit["dirty_slots"] == audit["unwritten_rows"] == 0 < rank["counters"]["logged_steps"]
        assert audit["content_checked"] == (0 if fault is faults.writes_its_own else audit["kept_rows"])


@pytest.mark.parametrize(
    ("settings", "fault", "says"),
    [
        (Settings(mode="stage"), faults.plugin_missing_in_worker, "not active"),
        (Settings(mode="stage"), faults.layer_without_hook, "staged nothing"),
        (Settings(mode="stage", debug_sync=True), faults.scheduler_disagrees, "accepted"),
        (Settings(audit=True), faults.one_layer_of_another_class, "OfThisModel"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_run_that_does_not_get_what_it_asked_for_stops(engines, model, settings, fault, says):
    """Never a clean baseline under the treatment's name, nor an audit of a part."""
    with pytest.raises(RuntimeError, match=says):
        engines.run(spec_of(model), settings, fault)


@pytest.mark.parametrize("architecture", ["qwen3", "mistral"])
def test_other_architectures(engines, tmp_path, architecture):
    random_pair(tmp_path, architecture=architecture, noise=0.3)
    outcome = treated(engines, tmp_path, "stage")
    assert outcome.tokens == engines.run(spec_of(tmp_path), Settings()).tokens
    assert_clean_and_counted(outcome, "stage")
