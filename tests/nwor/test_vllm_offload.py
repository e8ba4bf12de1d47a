# SPDX-License-Identifier: Apache-2.0
"""Modes beside vLLM's `OffloadingConnector`, on a CPU: blocks leave the cache and come back, and none is dirty.

The connector, its scheduler and its store of blocks are vLLM's; `HostOffloadingSpec` copies from host to host.
"""

from functools import partial

import pytest

from tests.nwor import faults
from tests.nwor.offloading import assert_shipped_and_served, converse, first_answers, offloading
from tests.nwor.on_cpu import spec_of

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def answers(engines, model) -> list[list[int]]:
    return first_answers(engines, offloading(spec_of(model), offload=0))


@pytest.fixture(scope="module")
def computed(engines, model, answers) -> list[list[list[int]]]:
    """What vLLM says without a connector."""
    outcome = converse(engines, offloading(spec_of(model), offload=0), "off", answers)
    assert not outcome.metrics.get("external_prefix_cache_hits") and not outcome.audit["shipped_slots"]
    return [generation.tokens for generation in outcome.generations]


@pytest.mark.parametrize("mode", ["off", "cow", "stage"])
def test_blocks_that_leave_and_come_back(engines, model, answers, computed, mode):
    """The next turn finds its blocks on the host, and tokens are those of an engine without connector."""
    outcome = converse(engines, offloading(spec_of(model)), mode, answers)
    assert [generation.tokens for generation in outcome.generations] == computed
    assert_shipped_and_served(outcome, mode)


@pytest.mark.parametrize(("mode", "ships"), [("off", True), ("cow", False), ("stage", False)])
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
    outcome = converse(engines, offloading(spec_of(model)), "stage", answers, fault, checks=False)
    assert outcome.ranks[0]["serving"] == "stage"
    assert outcome.audit[red] > 0
