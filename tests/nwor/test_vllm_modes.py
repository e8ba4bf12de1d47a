# SPDX-License-Identifier: Apache-2.0
"""Modes in real vLLM on the CPU: tokens, caches, counters and reasons, with injected faults.

Thirteen prompts of 10 to 149 tokens, eight at a time, 96 tokens a batch:
chunked prefill runs beside decodes throughout.
"""

import pytest

from nwor.settings import Settings
from nwor_lab.bench import options
from nwor_lab.bench.parity import compare
from nwor_lab.bench.plan import Plan, settings_of
from nwor_lab.engines import shapes
from nwor_lab.engines.engine import EngineSpec
from nwor_lab.engines.random_weights import FORMAT
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
def test_every_mode_beside_vanilla(engines, model, vanilla, dtype, kv_cache_dtype):
    """Vanilla and the control leave rejected bytes behind, cow and stage none; tokens are vanilla's, or near ties."""
    plain = vanilla(dtype, kv_cache_dtype)
    assert plain.ranks[0]["hooks"] == [] and not [name for name in plain.metrics if name.startswith("nwor_")]
    counters = plain.generation.counters
    assert plain.audit["dirty_slots"] == 3 * (counters["draft_tokens"] - counters["accepted_tokens"]) > 0
    assert plain.audit["content_checked"] == plain.audit["kept_rows"] > 0 == plain.audit["unwritten_rows"]
    exact = treated(engines, model, "cow", None, dtype, kv_cache_dtype)
    assert exact.tokens == plain.tokens
    staged, direct = (
        treated(engines, model, mode, fault, dtype, kv_cache_dtype, logprobs=5)
        for mode, fault in (("stage", planned_is_held), ("direct", None))
    )
    for mode, outcome in (("cow", exact), ("stage", staged)):
        assert_clean_and_counted(outcome, mode, element=ELEMENT[dtype, kv_cache_dtype])
    parity = compare(plain.generation, staged.generation)
    gap = ROUNDING if dtype == "float32" else GAPS["auto" if kv_cache_dtype == "auto" else "fp8"]
    assert parity.within(gap) and (dtype != "float32" or parity.equal == parity.requests), parity
    [rank] = direct.ranks
    assert rank["serving"] == "direct" and not any(rank["counters"].values())
    assert direct.tokens == staged.tokens, "stage's attention, bit for bit"
    assert direct.generation.top_logprobs == staged.generation.top_logprobs != []
    assert direct.audit["dirty_layer_steps"] > 80 and direct.audit["unwritten_rows"] == 0
    assert dtype != "float32" or direct.audit["dirty_slots"] == plain.audit["dirty_slots"]


def test_parity_of_a_shape_alone_can_fail(engines, tmp_path):
    """Under vLLM's own dummy weights faults gave vanilla's tokens, request for request."""
    target, head = shapes.write_shape("tiny", tmp_path, max_model_len=512)
    spec = EngineSpec(str(target), str(head), load_format=FORMAT, num_blocks=64, dtype="float32")
    prompts = options.random_prompts(Plan(num_prompts=6, random_prompts=(100,)))
    plain = engines.run(spec, settings_of("off", False), prompts=prompts, logprobs=5)
    settings = Settings(
        mode="stage", eagle_bias=True, audit=True
    )  # the scheduler's check would end the run before parity does
    calls = [{"fault": fault} for fault in (faults.none, faults.no_commit)]
    outcome = engines.run(spec, settings, calls=calls, prompts=prompts, logprobs=5)
    assert [compare(plain.generation, made).within(ROUNDING) for made in outcome.generations] == [True, False]


def test_blind_attention_is_seen(engines, model, vanilla):
    """The historical flaw: attention never saw the staged tokens."""
    outcome = treated(engines, model, "stage", faults.blind_attention, logprobs=5)
    assert not compare(vanilla().generation, outcome.generation).within(ROUNDING)


def test_a_window_that_does_not_fit_is_written_by_vllm(engines, model, vanilla):
    """Overflow takes vLLM's own write, counted; no write is skipped."""
    outcome = treated(engines, model, "stage", faults.small_capacity)
    assert outcome.tokens == vanilla().tokens
    assert outcome.ranks[0]["counters"]["fallbacks"] > 0
    assert outcome.metrics["nwor_fallbacks"] == outcome.ranks[0]["counters"]["fallbacks"]
    assert outcome.audit["unwritten_rows"] == 0


def test_a_model_no_mode_can_serve_falls_back_with_its_reason(engines, model, vanilla):
    outcome = engines.run(spec_of(model), Settings(mode="stage"), faults.unreadable_packing)
    assert outcome.tokens == vanilla().tokens
    assert outcome.ranks[0]["serving"] == "off"
    assert "packing" in outcome.ranks[0]["reason"]


def test_an_attention_that_fails_here_is_met_before_any_request(engines, model, vanilla):
    """Stage logs every step then, and the rank says why."""
    outcome = engines.run(spec_of(model), Settings(mode="stage", audit=True), faults.blind_from_the_start)
    assert outcome.tokens == vanilla().tokens
    [rank] = outcome.ranks
    assert (rank["serving"], rank["ways"]) == ("stage", ["logged"])
    assert outcome.audit["dirty_layer_steps"] == 0 < outcome.audit["layer_steps"]
    assert "start-up" in rank["reason"] and "attention" in rank["reason"], rank["reason"]


@pytest.mark.parametrize(
    ("fault", "says", "ways"),
    [(faults.one_layer_of_another_class, "hybrid", []), (faults.writes_its_own, "itself", ["logged"])],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_models_and_settings_that_are_refused_by_name(engines, model, vanilla, fault, says, ways):
    """Of unknown layers nothing is served; of a model that writes its own cache every step is logged, and the audit
    does not say that it has checked rows, since nothing passes vLLM's hook of the cache write."""
    outcome = engines.run(spec_of(model), Settings(mode="stage", audit=bool(ways), debug_sync=True), fault)
    assert outcome.tokens == vanilla().tokens
    [rank] = outcome.ranks
    assert (rank["serving"], rank["ways"]) == ("stage" if ways else "off", ways) and says in rank["reason"]
    if ways:
        audit = outcome.audit
        assert audit["dirty_slots"] == audit["unwritten_rows"] == 0 < rank["counters"]["logged_steps"]
        assert audit["content_checked"] == 0 < audit["kept_rows"]


def test_the_audit_refuses_a_model_it_would_see_a_part_of(engines, model):
    with pytest.raises(RuntimeError, match="OfThisModel"):
        engines.run(spec_of(model), Settings(audit=True), faults.one_layer_of_another_class)


@pytest.mark.parametrize(
    "fault, says",
    [
        (faults.broken_extension, "operators"),
        (faults.plugin_missing_in_worker, "not active"),
        (faults.changed_body, "_sample"),
        (faults.layer_without_hook, "staged nothing"),
        (faults.scheduler_disagrees, "accepted"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_run_that_asked_for_a_mode_and_did_not_get_it_stops(engines, model, fault, says):
    """Never a clean baseline under the treatment's name."""
    with pytest.raises(RuntimeError, match=says):
        engines.run(spec_of(model), Settings(mode="stage", debug_sync=True), fault)


@pytest.mark.parametrize("architecture", ["qwen3", "mistral"])
def test_other_architectures(engines, tmp_path, architecture):
    random_pair(tmp_path, architecture=architecture, noise=0.3)
    outcome = treated(engines, tmp_path, "stage")
    assert outcome.tokens == engines.run(spec_of(tmp_path), Settings()).tokens
    assert_clean_and_counted(outcome, "stage")
