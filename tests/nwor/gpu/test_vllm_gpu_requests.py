# SPDX-License-Identifier: Apache-2.0
"""Requests, drafters and architectures in real vLLM on a GPU, under the modes."""

import json
import math
import re
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from nwor.settings import Settings
from nwor_lab import pair, paths
from nwor_lab.bench.parity import compare
from nwor_lab.bench.survival import mean_accepted
from nwor_lab.engines.engine import Generation
from tests import checkpoints
from tests.checkpoints import GAPS, random_pair
from tests.engines import PROMPTS, Engines, Outcome
from tests.nwor.gpu.on_gpu import assert_clean_and_counted, assert_parity, both, spec_of, treated
from tests.nwor.scripts import REGEX, SCHEMA
from tests.nwor.specs import With

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]

GRAMMARS: list[dict[str, Any]] = [{"json": SCHEMA}, {"regex": REGEX}]
KINDS = ["structured", "stopped", "after aborts", "sampled"]


def calls_of_each_kind(prompts: list[list[int]], stop_token_ids: list[int]) -> list[dict[str, Any]]:
    """One generation of each of `KINDS`.

    Grammars cut drafts short, beside requests without one. Stops fall inside a window. Aborted requests leave blocks
    that the next ones fill. Temperature 1 is seeded.
    """
    structured = [{"structured_outputs": grammar, "ignore_eos": False} for grammar in GRAMMARS]
    return [
        {"prompts": prompts, "max_tokens": 64, "logprobs": 5, "sampling": [*structured, {}]},
        {"prompts": prompts, "max_tokens": 96, "logprobs": 5, "sampling": [{"stop_token_ids": stop_token_ids}]},
        {"prompts": prompts, "max_tokens": 24, "logprobs": 5, "abandon": 4},
        {"prompts": 2 * prompts, "max_tokens": 48, "temperature": 1.0, "seed": 7},
    ]


def assert_meaningful(outcome: Outcome, stop_token_ids: list[int], k: int, target: Path) -> None:
    """That grammars bound the text and cut drafts, and that stops fell inside accepted runs."""
    structured, stopped = outcome.generations[:2]
    tokenizer = Tokenizer.from_file(str(target / "tokenizer.json"))
    for index, tokens in enumerate(structured.tokens):
        kind, text, finished = index % 3, tokenizer.decode(tokens), tokens[-1] == 0
        if kind == 0:  # white space may take all of its tokens
            assert list(json.loads(text)) == SCHEMA["required"] if finished else re.match(r'\{\s*"name"', text), text
        elif kind == 1:
            assert finished and re.fullmatch(REGEX, text), text
    assert structured.counters["draft_tokens"] < k * structured.counters["drafts"], "no draft was cut by a grammar"
    sampled = len(stopped.tokens) + stopped.counters["drafts"] + stopped.counters["accepted_tokens"]
    by_length = sum(tokens[-1] not in stop_token_ids for tokens in stopped.tokens)
    cut = sampled - sum(map(len, stopped.tokens))
    assert cut > k * by_length, "no stop inside an accepted run"


def assert_like(vanilla: Outcome, outcome: Outcome, mode: str, gap: float) -> None:
    """Vanilla's tokens: all of them under cow, but for near ties under stage, whose acceptance is vanilla's."""
    for kind, theirs, ours in zip(KINDS, vanilla.generations, outcome.generations, strict=True):
        if mode == "cow":
            assert ours.tokens == theirs.tokens, kind
        elif kind != "sampled":
            parity = compare(theirs, ours)
            assert parity.within(gap), (kind, parity)
    sampled = (made.generations[-1] for made in (vanilla, outcome))
    (was, error), (now, other_error) = (mean_accepted(made.accepted_at, made.counters["drafts"]) for made in sampled)
    assert abs(now - was) <= 4 * math.hypot(error, other_error), (was, now, error, other_error)


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
    calls = calls_of_each_kind(prompts, stops)
    spec = replace(spec_of(paths.PAIR_TARGET.parent, "v2 FA graphs"), num_blocks=160)
    vanilla = engines.run(spec, Settings(audit=True), calls=calls)
    assert vanilla.audit["dirty_layer_steps"] > 0
    assert_meaningful(vanilla, stops, spec.k, paths.PAIR_TARGET)
    for mode in ("cow", "stage"):
        outcome = engines.run(spec, Settings(mode=mode, audit=True, debug_sync=True), calls=calls)
        assert_clean_and_counted(outcome, mode, layers=5)
        assert_like(vanilla, outcome, mode, GAPS["auto"])


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
        assert_clean_and_counted(outcome, mode, checks=5)  # with k=8 some request ends in most steps
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
    assert made["cow"].tokens == made["off"].tokens
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
