# SPDX-License-Identifier: Apache-2.0
"""Modes beside those of vLLM's KV connectors that run on a CPU: blocks leave the cache clean, and come back.

Connectors, their schedulers and stores are vLLM's; for `OffloadingConnector`, `HostOffloadingSpec` copies from host to
host.
"""

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from nwor_lab.engines.spec import EngineSpec
from tests.engines import Outcome
from tests.nwor import faults
from tests.nwor.offloading import assert_shipped_and_served, converse, first_answers, offloading
from tests.nwor.on_cpu import spec_of
from tests.nwor.specs import with_connector

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

ON_HOST = {
    "cpu_bytes_to_use": 64 << 20,
    "spec_name": "HostOffloadingSpec",
    "spec_module_path": "tests.nwor.offloading",
}


def behind_one(spec: EngineSpec, folder: Path) -> EngineSpec:
    """Two connectors behind one. A prompt is one chunk: of a longer one `ExampleConnector` saves blocks too early."""
    options = {"OffloadingConnector": ON_HOST, "ExampleConnector": {"shared_storage_path": str(folder)}}
    both = [
        {"kv_connector": name, "kv_role": "kv_both", "kv_connector_extra_config": given}
        for name, given in options.items()
    ]
    spec = replace(offloading(spec, offload=0), max_num_batched_tokens=512, max_model_len=192, num_blocks=14)
    return with_connector(spec, "MultiConnector", {"connectors": both})


def tokens(outcome: Outcome) -> list[list[list[int]]]:
    return [generation.tokens for generation in outcome.generations]


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
def test_blocks_that_leave_and_come_back(engines, model, answers, continued, mode, tmp_path):
    """The next turn finds its blocks on the host, and tokens are those of an engine without connector."""
    spec = offloading(spec_of(model)) if mode == "cow" else behind_one(spec_of(model), tmp_path)
    outcome = converse(engines, spec, mode, answers)
    assert tokens(outcome) == continued
    assert_shipped_and_served(outcome, mode)
    layers = 3 + 1  # the drafter's too
    files, more = divmod(len([*tmp_path.glob("*/*.safetensors")]), layers)
    assert more == 0 and files >= (len(answers) if mode == "stage" else 0)


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
