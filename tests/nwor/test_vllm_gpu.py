# SPDX-License-Identifier: Apache-2.0
"""Modes in real vLLM on a GPU: under both runners, the attention backends at hand, CUDA graphs and fp8 caches.

Thirteen prompts of 10 to 149 tokens, eight at a time, 96 tokens a batch:
chunked prefill runs beside decodes throughout.
"""

import importlib.util
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from nwor.settings import Settings
from nwor_lab import pair, paths
from nwor_lab.engines import shapes
from nwor_lab.engines.engine import Engine, EngineSpec, Generation
from nwor_lab.engines.random_weights import FORMAT
from nwor_lab.experiments import options
from nwor_lab.experiments.parity import compare
from nwor_lab.experiments.plan import Plan, settings_of
from tests import checkpoints
from tests.checkpoints import random_pair
from tests.engines import PROMPTS, Engines, Outcome
from tests.nwor import faults, request_kinds

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]

# Nats below which near ties may fall either way. With an fp8 cache FlashAttention rounds attention weights to fp8 as
# well, and our kernel does not.
GAPS = {"auto": 0.25, "fp8": 0.75}
LAYERS = 3
# Both runners, all backends, FULL and PIECEWISE graphs (uniform decodes, and everything else) and none.
STACKS = {
    "v2 FA graphs": {"enforce_eager": False},
    "v2 FA graphs fp8": {"enforce_eager": False, "kv_cache_dtype": "fp8"},
    "v2 Triton graphs": {"enforce_eager": False, "attention_backend": "TRITON_ATTN"},
    "v2 Triton graphs fp8": {"enforce_eager": False, "attention_backend": "TRITON_ATTN", "kv_cache_dtype": "fp8"},
    "v2 FA one graph": {"enforce_eager": False, "cudagraph_mode": "FULL"},
    "v2 FA piecewise": {"enforce_eager": False, "cudagraph_mode": "PIECEWISE"},
    "v2 FA eager": {},
    "v1 FA graphs": {"enforce_eager": False, "runner": "v1"},
    "v1 Triton eager": {"runner": "v1", "attention_backend": "TRITON_ATTN"},
    "v2 FlashInfer graphs": {"enforce_eager": False, "attention_backend": "FLASHINFER"},
    "v2 FlashInfer eager fp8": {"attention_backend": "FLASHINFER", "kv_cache_dtype": "fp8"},
}
no_flashinfer = pytest.mark.skipif(importlib.util.find_spec("flashinfer") is None, reason="no FlashInfer here")
stacks = pytest.mark.parametrize(
    "stack", [pytest.param(name, marks=no_flashinfer if "FlashInfer" in name else ()) for name in STACKS]
)
both = pytest.mark.parametrize("mode", ["cow", "stage"])


@pytest.fixture(scope="module")
def engines():
    if not torch.cuda.is_available():
        pytest.skip("no NVIDIA GPU here")
    made = Engines()
    yield made
    made.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("pair")
    random_pair(path, noise=0.3, num_hidden_layers=LAYERS, head_dim=64)
    return path


def spec_of(model: Path, stack: str = "v2 FA eager", **more) -> EngineSpec:
    fields = {"max_num_batched_tokens": 96, "num_blocks": 96, "kv_cache_memory": 256, **STACKS[stack], **more}
    return EngineSpec(model=str(model / "target"), draft=str(model / "eagle"), **fields)


@pytest.fixture(scope="module")
def vanilla(engines, model):
    """Vanilla's outcomes by stack; its audit is the negative control."""
    cache: dict[str, Outcome] = {}

    def run(stack: str) -> Outcome:
        if stack not in cache:
            cache[stack] = engines.run(spec_of(model, stack), Settings(audit=True), logprobs=5)
            assert not cache[stack].error, cache[stack].error
        return cache[stack]

    return run


def treated(engines, model, mode: str, stack: str, fault=None, **more) -> Outcome:
    settings = Settings(mode=mode, audit=True, debug_sync=True)
    return engines.run(spec_of(model, stack, **more), settings, fault, logprobs=5)


@pytest.mark.parametrize(("fault", "close"), [(None, True), (faults.no_commit, False)])
def test_parity_of_a_shape_alone_can_fail(engines, tmp_path, fault, close):
    """With synthetic acceptance too, as steps are timed; under vLLM's own dummy weights no fault showed."""
    target, head = shapes.write_shape("tiny", tmp_path, max_model_len=512)
    more = {"load_format": FORMAT, "acceptance_length": 3.0, "enforce_eager": False}
    spec = EngineSpec(str(target), str(head), num_blocks=96, kv_cache_memory=256, **more)
    prompts = options.random_prompts(Plan(num_prompts=6, random_prompts=(100,)))
    plain = engines.run(spec, settings_of("off", False), prompts=prompts, logprobs=5)
    settings = Settings(mode="stage", eagle_bias=True)  # the scheduler's check would end the run before parity does
    outcome = engines.run(spec, settings, fault, prompts=prompts, logprobs=5)
    assert not plain.error and not outcome.error, plain.error + outcome.error
    parity = compare(plain.generation, outcome.generation, drafted=True)
    assert parity.within(GAPS["auto"]) == close, parity


@stacks
def test_vanilla_leaves_rejected_bytes_behind(vanilla, stack):
    audit = vanilla(stack).audit
    assert audit["layer_steps"] > 60
    assert audit["dirty_layer_steps"] > audit["layer_steps"] // 2
    assert audit["unwritten_rows"] == 0


@both
@stacks
def test_a_mode_is_exact_and_leaves_the_cache_clean(engines, model, vanilla, stack, mode):
    outcome = treated(engines, model, mode, stack)
    assert not outcome.error, outcome.error
    assert_clean_and_counted(outcome, mode)
    parity = compare(vanilla(stack).generation, outcome.generation)
    if mode == "cow":
        assert parity.equal == parity.requests
    assert parity.within(GAPS[STACKS[stack].get("kv_cache_dtype", "auto")]), parity


@both
@pytest.mark.parametrize("stack", ["v2 FA graphs", "v2 Triton graphs fp8", "v2 FA eager"])
def test_paused_a_mode_is_vanilla_and_resumed_itself(engines, model, vanilla, stack, mode):
    """Under graphs too, which hold what was captured: paused, it leaves what vanilla leaves, token for token."""
    settings = Settings(mode=mode, audit=True)
    paused = engines.run(spec_of(model, stack), settings, calls=[{"paused": True}], logprobs=5)
    assert not paused.error, paused.error
    assert compare(vanilla(stack).generation, paused.generation).equal == len(PROMPTS)
    assert paused.audit["dirty_layer_steps"] == vanilla(stack).audit["dirty_layer_steps"] > 0
    assert not any(paused.ranks[0]["counters"].values()), "no window opened, and none was cancelled"
    interleaved = [{}, {"paused": True}, {}, {"paused": True}]
    outcome = engines.run(spec_of(model, stack), Settings(mode=mode, debug_sync=True), calls=interleaved, logprobs=5)
    assert not outcome.error, outcome.error
    first, between, second, last = outcome.generations
    assert first.tokens == second.tokens and between.tokens == last.tokens == vanilla(stack).tokens
    windows = outcome.ranks[0]["counters"]["windows"]
    assert windows >= first.counters["drafts"] + second.counters["drafts"] and windows < 1.2 * (
        first.counters["drafts"] + second.counters["drafts"]
    ), "a step ahead of the scheduler, the device also runs a last window"


def test_a_runner_whose_graphs_cannot_be_captured_again_refuses_to_pause(engines, model):
    outcome = engines.run(spec_of(model, "v1 FA graphs"), Settings(mode="stage"), paused=True)
    assert "pause it under the V2 runner" in outcome.error


def assert_clean_and_counted(outcome: Outcome, mode: str, layers: int = LAYERS) -> None:
    assert outcome.audit["layer_steps"] > 60
    assert outcome.audit["dirty_layer_steps"] == outcome.audit["unwritten_rows"] == 0, outcome.ranks[0]
    rank, metrics = outcome.ranks[0], outcome.metrics
    counters = rank["counters"]
    assert (rank["mode"], rank["serving"], rank["target_layers"]) == (mode, mode, layers), rank["reason"]
    assert not any(outcome.counters_after_start.values()), "warm-up must not count"
    # A step ahead of the scheduler, the device also runs a last window of requests that have just finished.
    ahead = counters["windows"] - metrics["spec_decode_num_drafts"]
    assert ahead >= 0
    assert counters["committed_tokens"] >= metrics["spec_decode_num_accepted_tokens"] > 0
    assert counters["rejected_tokens"] == counters["staged_tokens"] - counters["committed_tokens"] > 0
    assert counters["stage_operations"] == layers * counters["staged_tokens"], "layers x rows, once each"
    assert counters["fallbacks"] == counters["cancelled"] == 0
    unheard = counters["committed_tokens"] - metrics["nwor_committed_tokens"]
    assert 0 <= unheard <= 8 * ahead, "the front end must see all else"
    assert 0 <= counters["stage_operations"] - metrics["nwor_stage_operations"] <= layers * 9 * ahead
    assert metrics["nwor_scheduler_checks"] > 20
    assert metrics["nwor_scheduler_mismatches"] == 0


@both
def test_under_batch_invariance_a_request_is_the_same_alone_and_in_company(model, monkeypatch, mode):
    """Under cow because vLLM attends, under stage because it steps back. vLLM's CPU build has none."""
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    with Engine(spec_of(model), Settings(mode=mode)) as engine:
        company = engine.generate(PROMPTS, 40).tokens
        assert [engine.generate([prompt], 40).tokens[0] for prompt in PROMPTS[:4]] == company[:4]
        [rank] = engine.report()
    assert rank["serving"] == ("cow" if mode == "cow" else "off")
    assert ("batch invariance" in rank["reason"]) == (mode == "stage")


@both
def test_no_step_waits_for_the_device(model, monkeypatch, mode):
    """VLLM's own guard, which makes every synchronisation of a step an error."""
    monkeypatch.setenv("VLLM_GPU_SYNC_CHECK", "error")
    with Engine(spec_of(model, "v2 FA graphs"), Settings(mode=mode)) as engine:
        engine.generate([[5, 6, 7, 8] * 8, [9, 10, 11] * 5], 24)
        assert engine.report()[0]["counters"]["windows"] > 0


@pytest.mark.parametrize(
    ("mode", "fault", "seen"),
    [
        ("cow", faults.no_restore, "dirty_layer_steps"),
        ("stage", faults.no_commit, "unwritten_rows"),
        ("stage", faults.commit_one_layer, "unwritten_rows"),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_what_is_left_out_is_seen(engines, model, mode, fault, seen):
    outcome = engines.run(spec_of(model, "v2 FA eager"), Settings(mode=mode, audit=True), fault)
    assert not outcome.error, outcome.error
    assert outcome.audit[seen] > 0


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        (faults.broken_extension, "operators do not load"),
        (faults.plugin_missing_in_worker, "not active on ranks"),
        (faults.unknown_vllm, "0.33.0"),
        (faults.changed_v2_signature, "postprocess_sampled takes"),
        (faults.gpu_layer_without_hook, "staged nothing"),
        (faults.v2_scheduler_disagrees, "differ"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_run_that_asked_for_a_mode_and_did_not_get_it_stops(engines, model, fault, says):
    outcome = engines.run(spec_of(model), Settings(mode="stage", debug_sync=True), fault)
    assert says in outcome.error


@both
@pytest.mark.parametrize(
    "more",
    [
        {"batch": 1, "k": 1},
        {"batch": 2, "k": 8, "max_num_batched_tokens": 64},
        {"batch": 13, "k": 3, "num_blocks": 40},  # too few blocks: preemption, and blocks that others held
        {"batch": 4, "k": 2, "prefix_caching": True},
        {"batch": 8, "k": 4, "block_size": 32},
    ],
    ids=str,
)
def test_batches_drafts_and_small_caches(engines, model, mode, more):
    plain = engines.run(spec_of(model, "v2 FA graphs", **more), Settings(), logprobs=5)
    assert not plain.error, plain.error
    outcome = treated(engines, model, mode, "v2 FA graphs", **more)
    assert not outcome.error, outcome.error
    assert all((run.metrics["num_preemptions"] > 0) == ("num_blocks" in more) for run in (plain, outcome))
    assert outcome.audit["dirty_layer_steps"] == outcome.audit["unwritten_rows"] == 0
    assert outcome.metrics["nwor_scheduler_mismatches"] == 0
    parity = compare(plain.generation, outcome.generation)
    assert parity.within(GAPS["auto"]), parity


def test_requests_of_every_kind(engines):
    """Structured output, stops inside a window, blocks of aborted requests, and a temperature.

    By the shipped pair: its text is what grammars and stops are made for.
    """
    tokenizer = Tokenizer.from_file(str(paths.PAIR_TARGET / "tokenizer.json"))
    stops = [token for token in range(tokenizer.get_vocab_size()) if set("(:") & set(tokenizer.decode([token]))]
    prompts = [tokenizer.encode(text).ids for text in pair.load_prompts(count=24)]
    calls = request_kinds.calls(prompts, stops)
    spec = replace(spec_of(paths.PAIR_TARGET.parent, "v2 FA graphs"), num_blocks=160)
    vanilla = engines.run(spec, Settings(audit=True), calls=calls)
    assert not vanilla.error, vanilla.error
    assert vanilla.audit["dirty_layer_steps"] > 0
    request_kinds.assert_meaningful(vanilla, stops, spec.k, paths.PAIR_TARGET)
    for mode in ("cow", "stage"):
        outcome = engines.run(spec, Settings(mode=mode, audit=True, debug_sync=True), calls=calls)
        assert not outcome.error, outcome.error
        assert_clean_and_counted(outcome, mode, layers=5)
        request_kinds.assert_like(vanilla, outcome, mode, GAPS["auto"])


def test_eagle3(engines, model, tmp_path):
    """Hidden states of three layers for the head, and a draft vocabulary smaller than the target's."""
    head = checkpoints.random_eagle3(tmp_path, model / "target", draft_vocab_size=288)
    spec = replace(spec_of(model, "v2 FA graphs"), draft=str(head), method="eagle3")
    vanilla = engines.run(spec, Settings(), logprobs=5)
    assert not vanilla.error, vanilla.error
    assert vanilla.generation.counters["accepted_tokens"] > vanilla.generation.counters["drafts"]
    for mode in ("cow", "stage"):
        outcome = engines.run(spec, Settings(mode=mode, audit=True, debug_sync=True), logprobs=5)
        assert not outcome.error, outcome.error
        assert_clean_and_counted(outcome, mode)
        assert_parity(vanilla, outcome, mode)


@pytest.mark.parametrize("k", [1, 8])
def test_batches_of_32_and_64(engines, model, k):
    """And past the 64, prompts that wait and are prefilled in chunks beside the others' windows."""
    prompts = [[token + shift for token in prompt] for shift in range(8) for prompt in PROMPTS]
    calls = [{"prompts": prompts[:32]}, {"prompts": prompts}]
    spec = replace(spec_of(model, "v2 FA graphs"), k=k, batch=64, num_blocks=960)
    spec = replace(spec, max_num_batched_tokens=64 * (k + 1) + 64)
    vanilla = engines.run(spec, Settings(), logprobs=5, calls=calls)
    assert not vanilla.error, vanilla.error
    for mode in ("cow", "stage"):
        outcome = engines.run(spec, Settings(mode=mode, audit=True, debug_sync=True), logprobs=5, calls=calls)
        assert not outcome.error, outcome.error
        assert_clean_and_counted(outcome, mode)
        assert_parity(vanilla, outcome, mode)


def assert_parity(vanilla: Outcome, outcome: Outcome, mode: str) -> None:
    for theirs, ours in zip(vanilla.generations, outcome.generations, strict=True):
        parity = compare(theirs, ours)
        assert parity.within(GAPS["auto"]), parity
        if mode == "cow":
            assert parity.equal == parity.requests


@both
@pytest.mark.parametrize("architecture", ["qwen3", "mistral"])
def test_other_architectures(engines, tmp_path_factory, architecture, mode):
    path = tmp_path_factory.mktemp(architecture)
    random_pair(path, architecture=architecture, noise=0.3, head_dim=64)
    plain = engines.run(spec_of(path), Settings(), logprobs=5)
    assert not plain.error, plain.error
    outcome = treated(engines, path, mode, "v2 FA eager")
    assert not outcome.error, outcome.error
    assert_clean_and_counted(outcome, mode)
    assert compare(plain.generation, outcome.generation).within(GAPS["auto"])


def part(generation: Generation, when: str) -> Generation:
    """The requests whose names begin with `when`."""
    places = [place for place, name in enumerate(generation.text) if name.startswith(when)]
    tokens, best = ([values[place] for place in places] for values in (generation.tokens, generation.top_logprobs))
    return replace(generation, tokens=tokens, top_logprobs=best)


@pytest.mark.parametrize("method", ["eagle", "ngram", "draft_model"])
@pytest.mark.parametrize(
    "stack", ["v2 FA graphs", "v2 FA one graph", "v2 Triton graphs", "v1 FA graphs", "v2 FA eager"]
)
def test_a_request_that_joins_as_a_block_is_filled(model, stack, method):
    """One more token, as many as a window has, fewer and more, behind a block that the same step fills."""
    draft = {"eagle": str(model / "eagle"), "draft_model": str(model / "target"), "ngram": ""}[method]
    sizes = {} if method == "eagle" else {"batch": 4}
    spec = replace(spec_of(model, stack, prefix_caching=True, **sizes), method=method, draft=draft)
    prompts, made = [[(7 * i) % 50 + 3 for i in range(20)] * 2], {}
    endings = [[9], [5, 6, 7], [3, 1, 4, 1, 5], [11, 12, 13, 14, 15, 16, 17, 18, 19, 20]]
    for mode in ("off", "cow", "stage"):
        engines = Engines()
        try:
            settings = Settings(mode=mode, audit=True, debug_sync=mode != "off")
            made[mode] = engines.run(spec, settings, calls=[{"joined": endings}], prompts=prompts, max_tokens=400)
        finally:
            engines.close()
        assert not made[mode].error, made[mode].error
        if mode != "off":
            assert made[mode].audit["dirty_layer_steps"] == made[mode].audit["unwritten_rows"] == 0
            assert made[mode].ranks[0]["counters"]["windows"] > 10
    assert made["cow"].tokens == made["off"].tokens
    for outcome in made.values():
        joined, again, anew = (part(outcome.generation, when) for when in ("joined", "again", "anew"))
        for parity in (compare(anew, joined), compare(anew, again)):
            assert parity.requests == len(endings) and parity.within(GAPS["auto"]), parity


@both
def test_after_sleep_a_mode_serves_as_before(model, mode):
    """vLLM takes the cache away, and what a mode holds goes to the host and back with the rest of the memory."""
    engines = Engines()
    try:
        settings, calls = Settings(mode=mode, debug_sync=True), [{}, {"asleep": True}]
        outcome = engines.run(spec_of(model, "v2 FA graphs"), settings, faults.sleep_mode, calls=calls)
    finally:
        engines.close()
    assert not outcome.error, outcome.error
    before, after = outcome.generations
    assert before.tokens == after.tokens
    assert (rank := outcome.ranks[0])["serving"] == mode and rank["counters"]["windows"] > before.counters["drafts"]


def test_short_prompts_in_one_graph_for_all(engines, model):
    """A graph captured with queries of one row is replayed for a prompt longer than a window."""
    prompts = [[(5 * i + j) % 90 + 3 for i in range(length)] for j, length in enumerate((6, 7, 8, 9, 12))]
    plain, staged = (
        engines.run(
            spec_of(model, "v2 FA one graph", batch=8),
            Settings(mode=mode, audit=True),
            prompts=[prompts[0]],
            max_tokens=24,
            logprobs=5,
            calls=[{"prompts": [prompt]} for prompt in prompts],
        )
        for mode in ("off", "stage")
    )
    assert not plain.error and not staged.error, plain.error + staged.error
    assert staged.audit["dirty_layer_steps"] == staged.audit["unwritten_rows"] == 0
    for theirs, ours in zip(plain.generations, staged.generations, strict=True):
        parity = compare(theirs, ours)
        assert parity.within(GAPS["auto"]), parity


@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_other_drafters(model, method):
    """A drafter without layers, and one with a whole model of its own."""
    draft = str(model / "target") if method == "draft_model" else ""
    spec = replace(spec_of(model), method=method, draft=draft, batch=2)
    prompts = [[5, 6, 7, 8] * 8, [9, 10, 11] * 5]
    tokens = {}
    for mode in ("off", "cow", "stage"):
        with Engine(spec, Settings(mode=mode, audit=True, debug_sync=mode != "off")) as engine:
            tokens[mode] = engine.generate(prompts, 32).tokens
            rank = engine.report()[0]
        if mode != "off":
            assert rank["audit"]["dirty_layer_steps"] == rank["audit"]["unwritten_rows"] == 0
            assert rank["counters"]["windows"] > 0
    assert tokens["cow"] == tokens["off"]


def test_a_biased_head_loads(engines, model, vanilla, tmp_path):
    """A bias of zeros is skipped, any other is applied, and costs or saves acceptance accordingly."""
    accepted = []
    for bias in (torch.zeros(128), 3.0 * torch.randn(128, generator=torch.Generator().manual_seed(1))):
        folder = tmp_path / str(len(accepted))
        checkpoints.write_biased_copy(model / "eagle", folder, bias)
        spec = replace(spec_of(model), draft=str(folder))
        outcome = engines.run(spec, Settings(mode="cow", audit=True, eagle_bias=True))
        assert not outcome.error, outcome.error
        assert outcome.tokens == vanilla("v2 FA eager").tokens
        accepted.append(outcome.generation.counters["accepted_tokens"] / outcome.generation.counters["drafts"])
    assert json.loads((folder / "config.json").read_text())
    assert accepted[1] < 0.8 * accepted[0]
