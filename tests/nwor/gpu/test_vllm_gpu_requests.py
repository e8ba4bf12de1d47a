# SPDX-License-Identifier: Apache-2.0
"""Requests, drafters and architectures in real vLLM on a GPU, under the modes."""

import json
from contextlib import closing
from dataclasses import replace

import pytest
import torch
from tokenizers import Tokenizer

from nwor.settings import Settings
from nwor_lab import pair, paths
from nwor_lab.bench.parity import compare
from nwor_lab.engines.engine import Engine, Generation
from tests import checkpoints
from tests.checkpoints import GAPS, random_pair
from tests.engines import PROMPTS, Engines
from tests.nwor import request_kinds
from tests.nwor.gpu.on_gpu import assert_clean_and_counted, assert_parity, both, eager, spec_of, treated
from tests.nwor.specs import With

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]


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
    outcome = treated(engines, model, mode, "v2 FA graphs", **more)
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
    assert vanilla.audit["dirty_layer_steps"] > 0
    request_kinds.assert_meaningful(vanilla, stops, spec.k, paths.PAIR_TARGET)
    for mode in ("cow", "stage"):
        outcome = engines.run(spec, Settings(mode=mode, audit=True, debug_sync=True), calls=calls)
        assert_clean_and_counted(outcome, mode, layers=5)
        request_kinds.assert_like(vanilla, outcome, mode, GAPS["auto"])


def test_eagle3(engines, model, tmp_path):
    """Hidden states of three layers for the head, and a draft vocabulary smaller than the target's."""
    head = checkpoints.random_eagle3(tmp_path, model / "target", draft_vocab_size=288)
    spec = replace(spec_of(model, "v2 FA graphs"), draft=str(head), method="eagle3")
    vanilla = engines.run(spec, Settings(), logprobs=5)
    assert vanilla.generation.counters["accepted_tokens"] > vanilla.generation.counters["drafts"]
    for mode in ("cow", "stage"):
        outcome = engines.run(spec, Settings(mode=mode, audit=True, debug_sync=True), logprobs=5)
        assert_clean_and_counted(outcome, mode)
        assert_parity(vanilla, outcome)


@pytest.mark.parametrize("k", [1, 8])
def test_batches_of_32_and_64(engines, model, k):
    """And past the 64, prompts that wait and are prefilled in chunks beside the others' windows."""
    prompts = [[token + shift for token in prompt] for shift in range(8) for prompt in PROMPTS]
    calls = [{"prompts": prompts[:32]}, {"prompts": prompts}]
    spec = replace(spec_of(model, "v2 FA graphs"), k=k, batch=64, num_blocks=960)
    spec = replace(spec, max_num_batched_tokens=64 * (k + 1) + 64)
    vanilla = engines.run(spec, Settings(), logprobs=5, calls=calls)
    for mode in ("cow", "stage"):
        outcome = engines.run(spec, Settings(mode=mode, audit=True, debug_sync=True), logprobs=5, calls=calls)
        assert_clean_and_counted(outcome, mode)
        assert_parity(vanilla, outcome)


@both
@pytest.mark.parametrize("architecture", ["qwen3", "mistral"])
def test_other_architectures(engines, tmp_path_factory, architecture, mode):
    path = tmp_path_factory.mktemp(architecture)
    random_pair(path, architecture=architecture, noise=0.3, head_dim=64)
    plain = engines.run(spec_of(path), Settings(), logprobs=5)
    outcome = treated(engines, path, mode, "v2 FA eager")
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
        with closing(Engines()) as engines:
            settings = Settings(mode=mode, audit=True, debug_sync=mode != "off")
            made[mode] = engines.run(spec, settings, calls=[{"joined": endings}], prompts=prompts, max_tokens=400)
        if mode != "off":
            assert made[mode].audit["dirty_layer_steps"] == made[mode].audit["unwritten_rows"] == 0
            assert made[mode].ranks[0]["counters"]["windows"] > 10
    assert stack not in eager or made["cow"].tokens == made["off"].tokens
    for outcome in made.values():
        joined, again, anew = (part(outcome.generation, when) for when in ("joined", "again", "anew"))
        for parity in (compare(anew, joined), compare(anew, again)):
            assert parity.requests == len(endings) and parity.within(GAPS["auto"]), parity


@both
def test_after_sleep_a_mode_serves_as_before(model, mode):
    """vLLM takes the cache away, and what a mode holds goes to the host and back with the rest of the memory."""
    # vLLM checks that sleep frees memory of the GPU: these 16 GiB are more than tests beside this one take meanwhile.
    spec = spec_of(model, "v2 FA graphs", num_blocks=0, kv_cache_memory=16 << 10)
    spec = With(**vars(spec), arguments={"enable_sleep_mode": True})
    with closing(Engines()) as engines:
        outcome = engines.run(spec, Settings(mode=mode, debug_sync=True), calls=[{}, {"asleep": True}])
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
        assert outcome.tokens == vanilla("v2 FA eager").tokens
        accepted.append(outcome.generation.counters["accepted_tokens"] / outcome.generation.counters["drafts"])
    assert json.loads((folder / "config.json").read_text())
    assert accepted[1] < 0.8 * accepted[0]
