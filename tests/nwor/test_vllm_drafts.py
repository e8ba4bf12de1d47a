# SPDX-License-Identifier: Apache-2.0
"""Drafts of every length and fate in real vLLM on the CPU, and requests that find each other's blocks."""

from dataclasses import replace
from pathlib import Path

import pytest

from nwor.settings import Settings
from nwor_lab import paths
from nwor_lab.engines.engine import EngineSpec
from nwor_lab.soak.scripts import worst_drafter
from tests.engines import PROMPTS, Outcome
from tests.nwor import scripts
from tests.nwor.drafters import HasALayer, Repeats, custom
from tests.nwor.on_cpu import spec_of
from tests.nwor.specs import LENGTHS, SCHEDULES, by_batch

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]


def clean_like_vanilla(engines, spec: EngineSpec, *modes: str, **call) -> list[tuple[int, int, int]]:
    """Of each mode windows, staged and committed tokens: answers are vanilla's, pages are clean, counts are vLLM's."""
    repaired = {"fix_cpu_sampling": "temperature" in call}
    plain = engines.run(spec, Settings(**repaired), **call)
    return [counts(engines.run(spec, replace(settings_of(mode), **repaired), **call), plain) for mode in modes]


def settings_of(mode: str) -> Settings:
    return Settings(mode=mode, audit=True, debug_sync=True)


def counts(outcome: Outcome, plain: Outcome) -> tuple[int, int, int]:
    assert outcome.tokens == plain.tokens
    audit, counters, metrics = outcome.audit, outcome.ranks[0]["counters"], outcome.metrics
    assert audit["layer_steps"] > 20
    assert audit["dirty_layer_steps"] == audit["wrong_rows"] == audit["unwritten_rows"] == audit["stray_slots"] == 0
    assert counters["fallbacks"] == counters["cancelled"] == metrics["nwor_scheduler_mismatches"] == 0
    found = tuple(counters[name] for name in ("windows", "staged_tokens", "committed_tokens"))
    names = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
    assert found == tuple(metrics[f"spec_decode_{name}"] for name in names)
    return found


@pytest.mark.parametrize(("k", "modes"), [(16, ["cow"]), (32, ["stage"]), (48, ["cow", "stage"])])
def test_long_drafts(engines, model, k, modes):
    """Windows of several blocks, full ones of k drafts and shorter ones where a match or the request ends."""
    spec = replace(spec_of(model), method="ngram", draft="", k=k, batch=4, block_size=32, max_num_batched_tokens=512)
    prompts = [[(7 * i + 13 * j) % (5 + j) + 3 for i in range(90)] for j in range(4)]
    for windows, staged, committed in clean_like_vanilla(engines, spec, *modes, prompts=prompts, max_tokens=80):
        assert windows > 10 and 0.4 * k < staged / windows <= k
        assert 0 < committed < staged


@pytest.mark.parametrize(("fate", "modes"), [("all", ["stage"]), ("none", ["cow", "stage"])])
def test_drafts_that_are_all_accepted_and_that_all_are_not(engines, fate, modes):
    """The drafter is the target itself, or one that proposes what the target finds least likely."""
    draft = paths.PAIR_TARGET if fate == "all" else worst_drafter()
    spec = EngineSpec(
        str(paths.PAIR_TARGET), str(draft), method="draft_model", k=8, dtype="float32", num_blocks=64, batch=4
    )
    for windows, staged, committed in clean_like_vanilla(engines, spec, *modes, prompts=PROMPTS[:4], max_tokens=32):
        assert windows > 4 and staged > 4 * windows
        assert committed == (staged if fate == "all" else 0)


@pytest.mark.parametrize("drafter", [Repeats, HasALayer])
def test_a_drafter_of_the_users_own(engines, drafter):
    """One whose layers vLLM does not know is served by vLLM's own write: rejected rows in those layers would stay."""
    spec = EngineSpec(str(paths.PAIR_TARGET), k=4, dtype="float32", num_blocks=64, batch=4)
    spec, call = custom(spec, drafter), {"prompts": [2 * prompt[:40] for prompt in PROMPTS[2:6]], "max_tokens": 40}
    if drafter is Repeats:
        for windows, staged, committed in clean_like_vanilla(engines, spec, "cow", "stage", **call):
            assert windows < staged < 4 * windows and 0 < committed < staged
        return
    plain, outcome = (engines.run(spec, Settings(mode=mode), **call) for mode in ("off", "stage"))
    [rank] = outcome.ranks
    assert rank["serving"] == "off" and "drafter.0.attn" in rank["reason"]
    assert outcome.tokens == plain.tokens and plain.generation.counters["accepted_tokens"] > 0


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_draft_lengths_that_follow_the_batch(engines, model, schedule):
    """Windows grow from two drafts to four as the batch shrinks, or there are none before."""
    spec = by_batch(spec_of(model, batch=4), SCHEDULES[schedule])
    call = {"prompts": PROMPTS[:4], "sampling": LENGTHS}
    [(windows, staged, committed)] = clean_like_vanilla(engines, spec, "stage", **call)
    assert 0 < committed < staged
    if SCHEDULES[schedule][-1][-1]:
        assert 2 < staged / windows < 4
    else:
        assert windows + committed < sum(length["max_tokens"] for length in LENGTHS) / 2, "the others had no window"


def test_a_request_that_joins_as_a_block_is_filled(engines, model):
    """Its tokens are vanilla's, and so are those of a request that finds its rows in the prefix cache afterwards."""
    spec = replace(sharing(model), method="ngram", draft="")
    joined = [{"joined": [[5, 6, 7], [11, 12, 13, 14, 15, 16, 17, 18, 19, 20]]}]
    prompts = [[(7 * i) % 50 + 3 for i in range(20)] * 2]
    [(windows, *_)] = clean_like_vanilla(engines, spec, "stage", calls=joined, prompts=prompts, max_tokens=420)
    assert windows > 10


def test_answers_to_one_prompt_share_blocks_that_one_step_fills(engines, model):
    """Each of n answers is a request; all but the first find in the cache the blocks that the first is filling."""
    spec = replace(sharing(model), method="draft_model", draft=str(model / "target"))
    prompts = [[(7 * i + 13 * j) % 50 + 3 for i in range(length)] for j, length in enumerate((33, 36, 64, 70))]
    call = {"prompts": prompts, "max_tokens": 24, "temperature": 1.0, "sampling": [{"n": 4}]}
    [(windows, *_)] = clean_like_vanilla(engines, spec, "stage", **call)
    assert windows > 10


def sharing(model: Path) -> EngineSpec:
    return spec_of(model, batch=4, block_size=32, prefix_caching=True)


def test_a_request_that_is_asked_again_by_its_id(engines):
    """All of its prompt but a token is cached, so no step prefills, and it is alone: only that it is new says that its
    slots may be others'. A drafter that is never right has every slot restored."""
    spec = EngineSpec(
        str(paths.PAIR_TARGET), str(worst_drafter()), method="draft_model", k=3, batch=2, dtype="float32",
        block_size=scripts.BLOCK, num_blocks=6, max_model_len=96, prefix_caching=True,
    )  # fmt: skip
    call = {"script": scripts.asked_again_by_its_id}
    for mode in ("off", "cow"):
        outcome = engines.run(spec, Settings(mode=mode, audit=True), scripts.same_ids, calls=[call])
        assert (outcome.audits[0]["audit"]["dirty_layer_steps"] > 0) == (mode == "off")
