# SPDX-License-Identifier: Apache-2.0
"""Modes in real vLLM on the CPU: tokens, caches, counters and reasons, with injected faults.

Thirteen prompts of 10 to 149 tokens, eight at a time, 96 tokens a batch:
chunked prefill runs beside decodes throughout.
"""

from dataclasses import replace
from functools import cache, partial

import pytest

from nwor.settings import Settings
from nwor_lab import paths
from nwor_lab.engines import shapes
from nwor_lab.engines.engine import EngineSpec
from nwor_lab.engines.random_weights import FORMAT
from nwor_lab.experiments import options
from nwor_lab.experiments.parity import compare
from nwor_lab.experiments.plan import Plan, settings_of
from tests import checkpoints
from tests.checkpoints import GAPS, random_pair
from tests.devices import needs_fp8_cache
from tests.engines import PROMPTS, Outcome
from tests.nwor import faults, request_kinds
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


@pytest.fixture(scope="module")
def attending(engines, model):
    """Of a mode with an attention of its own and a cache, its outcome with log-probabilities."""
    return cache(lambda mode, *dtypes: treated(engines, model, mode, None, *dtypes, logprobs=5))


@pytest.mark.parametrize("dtype, kv_cache_dtype", CACHES)
def test_vanilla_leaves_rejected_bytes_behind(vanilla, dtype, kv_cache_dtype):
    """The audit's negative control: it must fail where nobody cleans up."""
    audit = vanilla(dtype, kv_cache_dtype).audit
    assert audit["layer_steps"] > 80
    assert audit["dirty_layer_steps"] > audit["layer_steps"] // 2
    assert audit["unwritten_rows"] == 0


@pytest.mark.parametrize(("fault", "close"), [(None, True), (faults.blind_attention, False), (faults.no_commit, False)])
def test_parity_of_a_shape_alone_can_fail(engines, tmp_path, fault, close):
    """Under vLLM's own dummy weights both faults gave vanilla's tokens, request for request."""
    target, head = shapes.write_shape("tiny", tmp_path, max_model_len=512)
    spec = EngineSpec(str(target), str(head), load_format=FORMAT, num_blocks=64, dtype="float32")
    prompts = options.random_prompts(Plan(num_prompts=6, random_prompts=(100,)))
    plain = engines.run(spec, settings_of("off", False), prompts=prompts, logprobs=5)
    settings = Settings(mode="stage", eagle_bias=True)  # the scheduler's check would end the run before parity does
    outcome = engines.run(spec, settings, fault, prompts=prompts, logprobs=5)
    parity = compare(plain.generation, outcome.generation)
    assert parity.within(ROUNDING) == close, parity


@pytest.mark.parametrize("dtype, kv_cache_dtype", CACHES)
def test_cow_is_exact(engines, model, vanilla, dtype, kv_cache_dtype):
    outcome = treated(engines, model, "cow", dtype=dtype, kv_cache_dtype=kv_cache_dtype)
    assert outcome.tokens == vanilla(dtype, kv_cache_dtype).tokens
    assert_clean_and_counted(outcome, "cow", element=ELEMENT[dtype, kv_cache_dtype])


@pytest.mark.parametrize("mode", ["cow", "stage"])
def test_requests_that_are_preempted_and_the_blocks_they_leave(engines, model, mode):
    """A cache too small for its batch takes blocks from requests in flight, which come back and write anew."""
    spec = replace(spec_of(model), block_size=32, num_blocks=20)
    plain = engines.run(spec, Settings())
    outcome = engines.run(spec, Settings(mode=mode, audit=True, debug_sync=True), planned_is_held)
    assert plain.metrics["num_preemptions"] > 0 and outcome.metrics["num_preemptions"] > 0
    assert outcome.tokens == plain.tokens
    assert_clean_and_counted(outcome, mode)


@pytest.mark.parametrize("dtype, kv_cache_dtype", CACHES)
def test_stage_is_exact_or_a_near_tie(attending, vanilla, dtype, kv_cache_dtype):
    outcome = attending("stage", dtype, kv_cache_dtype)
    assert_clean_and_counted(outcome, "stage", element=ELEMENT[dtype, kv_cache_dtype])
    parity = compare(vanilla(dtype, kv_cache_dtype, logprobs=5).generation, outcome.generation)
    if dtype == "float32":
        assert parity.equal == parity.requests
    else:
        assert parity.within(GAPS["auto" if kv_cache_dtype == "auto" else "fp8"]), parity


@pytest.mark.parametrize("dtype, kv_cache_dtype", CACHES)
def test_direct_says_what_stage_says_and_leaves_what_vanilla_leaves(attending, vanilla, dtype, kv_cache_dtype):
    """The control: stage's attention, bit for bit, and every row written, so that its rejected rows stay."""
    outcome, staged = attending("direct", dtype, kv_cache_dtype), attending("stage", dtype, kv_cache_dtype)
    [rank] = outcome.ranks
    assert rank["serving"] == "direct" and not any(rank["counters"].values())
    assert outcome.tokens == staged.tokens
    assert outcome.generation.top_logprobs == staged.generation.top_logprobs != []
    assert outcome.audit["dirty_layer_steps"] > 80 and outcome.audit["unwritten_rows"] == 0
    if dtype == "float32":
        assert outcome.audit["dirty_slots"] == vanilla(dtype, kv_cache_dtype).audit["dirty_slots"]


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


def test_leaving_out_the_restore_is_seen(engines, model):
    outcome = engines.run(spec_of(model), Settings(mode="cow", audit=True), faults.no_restore)
    assert outcome.audit["dirty_layer_steps"] > 0
    assert "of request" in outcome.ranks[0]["dirty_examples"][0]


def test_leaving_out_the_log_is_seen(engines, model):
    """Under stage in the steps that hold prefill alone: the rule of a step has two halves."""
    outcome = engines.run(spec_of(model), Settings(mode="stage", audit=True), faults.no_log)
    assert outcome.audit["dirty_layer_steps"] > 0 and outcome.ranks[0]["counters"]["staged_steps"] > 0


@pytest.mark.parametrize("fault", [faults.no_commit, faults.commit_one_layer])
def test_leaving_out_the_commit_is_seen(engines, model, vanilla, fault):
    """No commit call at all, or a commit to one layer."""
    outcome = engines.run(spec_of(model), Settings(mode="stage", audit=True), fault)
    assert outcome.audit["unwritten_rows"] > 0
    assert outcome.tokens != vanilla().tokens


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
        ("stage", faults.blind_from_the_start, "the attention differs from a plain one by "),
        ("stage", faults.attention_fails, "ValueError: out of resource: shared memory"),
        ("direct", faults.attention_fails, "ValueError: out of resource: shared memory"),
        (
            "stage",
            partial(faults.one_byte_too_many, "commit_all_layers"),
            "the pages that stage left are not those with",
        ),
        ("cow", partial(faults.one_byte_too_many, "restore_all_layers"), "the pages that cow left are not those with"),
    ],
    ids=["blind attention", "a kernel that fails", "direct's too", "a commit too far", "a restore too far"],
)
def test_an_operator_that_fails_here_is_met_before_any_request(engines, model, vanilla, mode, fault, says):
    """Stage logs every step then, vLLM's own write serves beside the others, and the rank says why."""
    outcome = engines.run(spec_of(model), Settings(mode=mode, audit=mode == "stage"), fault)
    assert outcome.tokens == vanilla().tokens
    [rank] = outcome.ranks
    assert (rank["serving"], rank["ways"]) == (("stage", ["logged"]) if mode == "stage" else ("off", []))
    assert mode != "stage" or outcome.audit["dirty_layer_steps"] == 0 < outcome.audit["layer_steps"]
    assert "the check at start-up failed" in rank["reason"] and says in rank["reason"], rank["reason"]


@pytest.mark.parametrize(
    ("fault", "says", "served"),
    [
        (faults.one_layer_of_another_class, "a hybrid model: 1 of its layers are not served", False),
        (faults.unknown_mask, "CPUAttentionBackendImpl.chunk_lookback is 1, which stage does not know", True),
        (faults.writes_its_own, "the model writes keys and values itself", True),
        (faults.unattended, "a feature our attention lacks", True),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_models_and_settings_that_are_refused_by_name(engines, model, vanilla, fault, says, served):
    """Of unknown layers nothing is served. Of unknown masks, and models that write their own cache, every step is
    logged."""
    for mode in ("cow", "stage"):
        outcome = engines.run(spec_of(model), Settings(mode=mode, audit=served, debug_sync=True), fault)
        assert outcome.tokens == vanilla().tokens
        [rank] = outcome.ranks
        assert (rank["serving"], rank["ways"]) == ((mode, ["logged"]) if served else ("off", []))
        assert (says in rank["reason"]) == (mode == "stage" or not served), rank["reason"]
        audit = outcome.audit if served else {}
        assert not served or audit["dirty_slots"] == audit["unwritten_rows"] == 0 < rank["counters"]["logged_steps"]


def test_the_audit_refuses_a_model_it_would_see_a_part_of(engines, model):
    with pytest.raises(RuntimeError, match="(?s)the audit would not see the whole cache: .*OfThisModel"):
        engines.run(spec_of(model), Settings(audit=True), faults.one_layer_of_another_class)


@pytest.mark.parametrize(
    "fault, says",
    [
        (faults.broken_extension, "operators do not load"),
        (faults.plugin_missing_in_worker, "not active on ranks"),
        (faults.unknown_vllm, "0.99.0"),
        (faults.changed_signature, "_sample takes"),
        (faults.changed_body, "_sample of vLLM 0.32.0"),
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
@pytest.mark.parametrize("mode", ["cow", "stage"])
def test_other_architectures(engines, tmp_path_factory, architecture, mode):
    path = tmp_path_factory.mktemp(architecture)
    random_pair(path, architecture=architecture, noise=0.3)
    vanilla = engines.run(spec_of(path), Settings())
    outcome = treated(engines, path, mode)
    assert outcome.tokens == vanilla.tokens
    assert_clean_and_counted(outcome, mode)


def test_requests_of_every_kind(engines, model):
    """Structured output, stops inside a window, blocks of aborted requests, and a temperature."""
    stops = list(range(3, 320, 4))
    calls = request_kinds.calls(PROMPTS, stops)
    vanilla = engines.run(spec_of(model), Settings(fix_cpu_sampling=True), calls=calls)
    request_kinds.assert_meaningful(vanilla, stops, 4, model / "target")
    for mode in ("cow", "stage"):
        settings = Settings(mode=mode, audit=True, debug_sync=True, fix_cpu_sampling=True)
        outcome = engines.run(spec_of(model), settings, calls=calls)
        assert_clean_and_counted(outcome, mode)
        request_kinds.assert_like(vanilla, outcome, mode, gap=ROUNDING)


def test_eagle3(engines, tmp_path):
    """Hidden states of three layers for the head, and a draft vocabulary smaller than the target's."""
    target, _ = random_pair(tmp_path, noise=0.3, head_dim=64)
    head = checkpoints.random_eagle3(tmp_path / "eagle3", target, draft_vocab_size=288)
    spec = replace(spec_of(tmp_path), draft=str(head), method="eagle3")
    vanilla = engines.run(spec, Settings())
    assert vanilla.generation.counters["accepted_tokens"] > vanilla.generation.counters["drafts"]
    for mode in ("cow", "stage"):
        outcome = engines.run(spec, Settings(mode=mode, audit=True, debug_sync=True))
        assert outcome.tokens == vanilla.tokens
        assert_clean_and_counted(outcome, mode, width=256)
