# SPDX-License-Identifier: Apache-2.0
"""A request that is admitted in the very step in which another's row 0 fills a block of its prefix."""

from dataclasses import replace
from pathlib import Path

import pytest

from nwor.settings import Settings
from nwor_lab.engines.engine import EngineSpec
from tests.nwor import on_cpu

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

ENDINGS = [[5, 6, 7], [11, 12, 13, 14, 15, 16, 17, 18, 19, 20]]
SCHEDULED = {"synchronous": False, "asynchronous": True}


def spec_of(model: Path, method: str, **more) -> EngineSpec:
    draft = {"eagle": str(model / "eagle"), "draft_model": str(model / "target"), "ngram": ""}[method]
    spec = on_cpu.spec_of(model, batch=4, block_size=32, prefix_caching=True, **more)
    return replace(spec, method=method, draft=draft, max_num_batched_tokens=256)


def clean_tokens(engines, spec: EngineSpec, **call) -> dict[str, list[list[int]]]:
    """Tokens under ``off`` and ``stage``, which served and left every page as it must be."""
    tokens = {}
    for mode in ("off", "stage"):
        settings = Settings(mode=mode, audit=True, debug_sync=mode != "off", fix_cpu_sampling="temperature" in call)
        outcome = engines.run(spec, settings, **call)
        tokens[mode] = outcome.tokens
        if mode != "off":
            assert outcome.audit["dirty_layer_steps"] == outcome.audit["unwritten_rows"] == 0
            assert outcome.ranks[0]["counters"]["windows"] > 10
    return tokens


@pytest.mark.parametrize(
    ("method", "scheduled"),
    [
        ("ngram", "synchronous"),
        ("eagle", "asynchronous"),
    ],
)
def test_a_request_that_joins_as_a_block_is_filled(engines, model, method, scheduled):
    """Its tokens are vanilla's, and so are those of a request that finds its rows in the prefix cache afterwards."""
    spec = spec_of(model, method, async_scheduling=SCHEDULED[scheduled])
    prompts = [[(7 * i) % 50 + 3 for i in range(20)] * 2]
    tokens = clean_tokens(engines, spec, calls=[{"joined": ENDINGS}], prompts=prompts, max_tokens=420)
    assert len(tokens["off"]) == 1 + 3 * len(ENDINGS)
    assert tokens["stage"] == tokens["off"]


def test_answers_to_one_prompt_share_blocks_that_one_step_fills(engines, model):
    """Each of n answers is a request; all but the first find in the cache the blocks that the first is filling."""
    prompts = [[(7 * i + 13 * j) % 50 + 3 for i in range(length)] for j, length in enumerate((33, 36, 64, 70))]
    more = {"prompts": prompts, "max_tokens": 24, "temperature": 1.0, "sampling": [{"n": 4}]}
    tokens = clean_tokens(engines, spec_of(model, "draft_model"), **more)
    assert len(tokens["off"]) == 16 and len(set(map(tuple, tokens["off"]))) > 4
    assert tokens["stage"] == tokens["off"]
