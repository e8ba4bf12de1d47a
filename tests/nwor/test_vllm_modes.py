# SPDX-License-Identifier: Apache-2.0
"""Modes in real vLLM on the CPU: tokens, caches, counters and reasons, with injected faults.

Thirteen prompts of 10 to 149 tokens, eight at a time, 96 tokens a batch:
chunked prefill runs beside decodes throughout.
"""

from dataclasses import replace
from functools import partial

import pytest

from nwor.settings import Settings
from nwor_lab import paths
from nwor_lab.bench import options
from nwor_lab.bench.parity import compare
from nwor_lab.bench.plan import Plan, settings_of
from nwor_lab.engines import shapes
from nwor_lab.engines.engine import EngineSpec
from nwor_lab.engines.random_weights import FORMAT
from tests.checkpoints import GAPS, random_pair
from tests.devices import needs_fp8_cache
from tests.engines import PROMPTS, Outcome
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
    plain, exact = vanilla(dtype, kv_cache_dtype), treated(engines, model, "cow", None, dtype, kv_cache_dtype)
    assert plain.audit["dirty_layer_steps"] > plain.audit["layer_steps"] // 2 > 40 and not plain.audit["unwritten_rows"]
    assert exact.tokens == plain.tokens
    staged, direct = (
        treated(engines, model, mode, None, dtype, kv_cache_dtype, logprobs=5) for mode in ("stage", "direct")
    )
    for mode, outcome in (("cow", exact), ("stage", staged)):
        assert_clean_and_counted(outcome, mode, element=ELEMENT[dtype, kv_cache_dtype])
    parity = compare(vanilla(dtype, kv_cache_dtype, logprobs=5).generation, staged.generation)
    gap = ROUNDING if dtype == "float32" else GAPS["auto" if kv_cache_dtype == "auto" else "fp8"]
    assert parity.within(gap) and (dtype != "float32" or parity.equal == parity.requests), parity
    [rank] = direct.ranks
    assert rank["serving"] == "direct" and not any(rank["counters"].values())
    assert direct.tokens == staged.tokens, "stage's attention, bit for bit"
    assert direct.generation.top_logprobs == staged.generation.top_logprobs != []
    assert direct.audit["dirty_layer_steps"] > 80 and direct.audit["unwritten_rows"] == 0
    assert dtype != "float32" or direct.audit["dirty_slots"] == plain.audit["dirty_slots"]


@pytest.mark.parametrize("mode", ["cow", "stage"])
def test_requests_that_are_preempted_and_the_blocks_they_leave(engines, model, mode):
    """A cache too small for its batch takes blocks from requests in flight, which come back and write anew."""
    spec = replace(spec_of(model), block_size=32, num_blocks=20)
    plain = engines.run(spec, Settings())
    outcome = engines.run(spec, Settings(mode=mode, audit=True, debug_sync=True), planned_is_held)
    assert plain.metrics["num_preemptions"] > 0 and outcome.metrics["num_preemptions"] > 0
    assert outcome.tokens == plain.tokens
    assert_clean_and_counted(outcome, mode)


@pytest.mark.parametrize(("fault", "close"), [(None, True), (faults.no_commit, False)])
def test_parity_of_a_shape_alone_can_fail(engines, tmp_path, fault, close):
    """Under vLLM's own dummy weights faults gave vanilla's tokens, request for request."""
    target, head = shapes.write_shape("tiny", tmp_path, max_model_len=512)
    spec = EngineSpec(str(target), str(head), load_format=FORMAT, num_blocks=64, dtype="float32")
    prompts = options.random_prompts(Plan(num_prompts=6, random_prompts=(100,)))
    plain = engines.run(spec, settings_of("off", False), prompts=prompts, logprobs=5)
    settings = Settings(mode="stage", eagle_bias=True)  # the scheduler's check would end the run before parity does
    outcome = engines.run(spec, settings, fault, prompts=prompts, logprobs=5)
    parity = compare(plain.generation, outcome.generation)
    assert parity.within(ROUNDING) == close, parity


def test_off_leaves_vllm_untouched(engines, model):
    outcome = engines.run(spec_of(model), Settings())
    assert outcome.ranks[0]["hooks"] == []
    assert not [name for name in outcome.metrics if name.startswith("nwor_")]


@pytest.mark.parametrize("mode", ["cow", "stage"])
def test_paused_a_mode_is_vanilla_and_resumed_itself(engines, model, vanilla, mode):
    """What is compared with itself must not be treated both times:
    paused, it leaves dirty bytes and counts nothing."""
    paused = engines.run(spec_of(model), Settings(mode=mode, audit=True), paused=True)
    assert paused.tokens == vanilla().tokens
    assert paused.audit["dirty_layer_steps"] == vanilla().audit["dirty_layer_steps"] > 0
    assert not any(paused.ranks[0]["counters"].values()), "no window opened, and none was cancelled"
    interleaved = [{}, {"paused": True}, {}]
    outcome = engines.run(spec_of(model), Settings(mode=mode, debug_sync=True), calls=interleaved)
    assert [generation.tokens for generation in outcome.generations] == 3 * [vanilla().tokens]
    windows = [generation.counters["drafts"] for generation in outcome.generations]
    assert outcome.ranks[0]["counters"]["windows"] == windows[0] + windows[2]
    assert outcome.metrics["nwor_scheduler_checks"] > 20 and outcome.metrics["nwor_scheduler_mismatches"] == 0


def test_slots_that_stay_masked_are_seen(engines):
    """The drafter writes its own layer through the same slots."""
    spec = EngineSpec(str(paths.PAIR_TARGET), str(paths.PAIR_EAGLE), dtype="float32", batch=4, num_blocks=64)
    call = {"prompts": PROMPTS[:4], "max_tokens": 80}
    plain = engines.run(spec, Settings(), **call)
    outcome = engines.run(spec, Settings(mode="stage"), faults.masked_for_the_drafter, **call)
    accepted = [made.generation.counters["accepted_tokens"] for made in (outcome, plain)]
    assert accepted[0] < 0.95 * accepted[1], accepted


def test_blind_attention_is_seen(engines, model, vanilla):
    """The historical flaw: attention never saw the staged tokens."""
    outcome = treated(engines, model, "stage", faults.blind_attention, logprobs=5)
    assert not compare(vanilla(logprobs=5).generation, outcome.generation).within(ROUNDING)


@pytest.mark.parametrize("mode", ["cow", "stage"])
def test_a_window_that_does_not_fit_is_written_by_vllm(engines, model, vanilla, mode):
    """Overflow takes vLLM's own write, counted; no write is skipped."""
    outcome = treated(engines, model, mode, faults.small_capacity)
    assert outcome.tokens == vanilla().tokens
    assert outcome.ranks[0]["counters"]["fallbacks"] > 0
    assert outcome.metrics["nwor_fallbacks"] == outcome.ranks[0]["counters"]["fallbacks"]
    assert outcome.audit["unwritten_rows"] == 0


def test_a_model_no_mode_can_serve_falls_back_with_its_reason(engines, model, vanilla):
    outcome = engines.run(spec_of(model), Settings(mode="stage"), faults.unreadable_packing)
    assert outcome.tokens == vanilla().tokens
    assert outcome.ranks[0]["serving"] == "off"
    assert "packing" in outcome.ranks[0]["reason"]


@pytest.mark.parametrize(
    ("mode", "fault", "says"),
    [
        ("stage", faults.blind_from_the_start, "attention"),
        ("direct", faults.attention_fails, "shared memory"),
        ("cow", partial(faults.one_byte_too_many, "restore_all_layers"), "pages"),
    ],
    ids=["blind attention", "a kernel that fails", "a restore too far"],
)
def test_an_operator_that_fails_here_is_met_before_any_request(engines, model, vanilla, mode, fault, says):
    """Stage logs every step then, vLLM's own write serves beside the others, and the rank says why."""
    outcome = engines.run(spec_of(model), Settings(mode=mode, audit=mode == "stage"), fault)
    assert outcome.tokens == vanilla().tokens
    [rank] = outcome.ranks
    assert (rank["serving"], rank["ways"]) == (("stage", ["logged"]) if mode == "stage" else ("off", []))
    assert mode != "stage" or outcome.audit["dirty_layer_steps"] == 0 < outcome.audit["layer_steps"]
    assert "start-up" in rank["reason"] and says in rank["reason"], rank["reason"]


@pytest.mark.parametrize(
    ("fault", "says", "served"),
    [
        (faults.one_layer_of_another_class, "hybrid", False),
        (faults.writes_its_own, "itself", True),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_models_and_settings_that_are_refused_by_name(engines, model, vanilla, fault, says, served):
    """Of unknown layers nothing is served; of a model that writes its own cache every step is logged."""
    for mode in ("cow", "stage"):
        outcome = engines.run(spec_of(model), Settings(mode=mode, audit=served, debug_sync=True), fault)
        assert outcome.tokens == vanilla().tokens
        [rank] = outcome.ranks
        assert (rank["serving"], rank["ways"]) == ((mode, ["logged"]) if served else ("off", []))
        assert (says in rank["reason"]) == (mode == "stage" or not served), rank["reason"]
        audit = outcome.audit if served else {}
        assert not served or audit["dirty_slots"] == audit["unwritten_rows"] == 0 < rank["counters"]["logged_steps"]


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
        (faults.scheduler_disagrees, "differ"),
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
    vanilla = engines.run(spec_of(tmp_path), Settings())
    for mode in ("cow", "stage"):
        outcome = treated(engines, tmp_path, mode)
        assert outcome.tokens == vanilla.tokens
        assert_clean_and_counted(outcome, mode)
