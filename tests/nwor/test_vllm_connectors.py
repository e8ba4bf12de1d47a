# SPDX-License-Identifier: Apache-2.0
"""Modes beside those of vLLM's KV connectors that run on a CPU: blocks leave the cache clean, and come back.

Connectors, their schedulers and stores are vLLM's; for `OffloadingConnector`, `HostOffloadingSpec` copies from host to
host.
"""

from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest

from nwor.settings import Settings
from nwor_lab.audit.auditor import FAULTS
from tests.engines import Outcome
from tests.nwor import faults
from tests.nwor.offloading import (
    BLOCK,
    FIRST,
    OTHERS,
    assert_shipped_and_served,
    converse,
    first_answers,
    offloading,
)
from tests.nwor.on_cpu import spec_of
from tests.nwor.specs import with_connector

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

PROMPTS, EVICTING = (
    [left + right + [9, 8, 7] for left, right in pairwise([*some, some[0]])] for some in (FIRST, OTHERS)
)
CALLS = [{"prompts": prompts} for prompts in (PROMPTS, EVICTING, PROMPTS)]
SHIPPED = 2 * len(PROMPTS) * 2 * BLOCK
"""Slots of whole blocks of the prompts that are asked first and then, in a layer."""
ON_HOST = {
    "cpu_bytes_to_use": 64 << 20,
    "spec_name": "HostOffloadingSpec",
    "spec_module_path": "tests.nwor.offloading",
}


def serve(engines, model, mode: str, *connector) -> Outcome:
    """Prompts, others for which these are evicted, and the first again, in one engine.

    Every prompt is one chunk: of a longer one `ExampleConnector` saves blocks that it does not have yet.
    """
    spec = replace(offloading(spec_of(model), offload=0), max_num_batched_tokens=512)
    spec = with_connector(spec, *connector) if connector else spec
    settings = Settings(mode=mode, audit=True, debug_sync=mode != "off")
    return engines.run(spec, settings, calls=CALLS, max_tokens=BLOCK)


def tokens(outcome: Outcome) -> list[list[list[int]]]:
    return [generation.tokens for generation in outcome.generations]


def on_host_and_disk(folder) -> dict:
    options = {"OffloadingConnector": ON_HOST, "ExampleConnector": {"shared_storage_path": str(folder)}}
    return {
        "connectors": [
            {"kv_connector": name, "kv_role": "kv_both", "kv_connector_extra_config": given}
            for name, given in options.items()
        ]
    }


def test_prompts_that_leave_and_come_back(engines, model, tmp_path):
    """Two connectors behind one: asked again, a prompt's blocks are brought back; tokens are those without either."""
    outcome = serve(engines, model, "stage", "MultiConnector", on_host_and_disk(tmp_path))
    assert tokens(outcome) == tokens(serve(engines, model, "off"))
    audit, [rank] = outcome.audit, outcome.ranks
    layers = audit["layer_steps"] // audit["steps"]
    files = list(tmp_path.glob("*/*.safetensors"))
    assert len(files) == len(PROMPTS + EVICTING) * (layers + 1), "of the drafter's layer too"
    assert audit["shipped_slots"] >= 2 * SHIPPED * layers
    assert outcome.metrics["external_prefix_cache_hits"] >= len(PROMPTS) * BLOCK
    assert not [fault for fault in FAULTS if audit[fault]], rank["dirty_examples"]
    assert rank["serving"] == "stage", rank["reason"]
    assert rank["counters"]["windows"] > 0 == rank["counters"]["fallbacks"]


# -- OffloadingConnector alone: a conversation, and blocks that leave with their last slots ----------------------------


@pytest.fixture(scope="module")
def answers(engines, model) -> list[list[int]]:
    return first_answers(engines, offloading(spec_of(model), offload=0))


@pytest.fixture(scope="module")
def continued(engines, model, answers) -> list[list[list[int]]]:
    """What vLLM says without a connector."""
    outcome = converse(engines, offloading(spec_of(model), offload=0), "off", answers)
    assert not outcome.metrics.get("external_prefix_cache_hits") and not outcome.audit["shipped_slots"]
    return tokens(outcome)


@pytest.mark.parametrize("mode", ["cow", "stage"])
def test_blocks_that_leave_and_come_back(engines, model, answers, continued, mode):
    """The next turn finds its blocks on the host, and tokens are those of an engine without connector."""
    outcome = converse(engines, offloading(spec_of(model)), mode, answers)
    assert tokens(outcome) == continued
    assert_shipped_and_served(outcome, mode)


@pytest.mark.parametrize(("mode", "ships"), [("off", True), ("stage", False)])
def test_no_rejected_row_leaves_under_a_mode(engines, model, answers, mode, ships):
    """vLLM once offloaded a slot too many (its issue 54193): it holds a rejected row, or under a mode none."""
    outcome = converse(engines, offloading(spec_of(model)), mode, answers, faults.ships_last_slots)
    assert outcome.audit["shipped_slots"] > 0
    assert (outcome.audit["shipped_rejected"] > 0) == ships


@pytest.mark.parametrize(
    ("ships", "red"), [(faults.none, "shipped_rejected"), (faults.ships_last_slots, "shipped_unwritten")]
)
def test_a_commit_that_comes_behind_the_save_is_seen(engines, model, answers, ships, red):
    """What left too early holds no accepted row yet, and what was written since is not what the step left."""
    fault = partial(faults.commits_behind_the_save, ships)
    outcome = converse(engines, offloading(spec_of(model)), "stage", answers, fault, debug_sync=False)
    assert outcome.ranks[0]["serving"] == "stage"
    assert outcome.audit[red] > 0
