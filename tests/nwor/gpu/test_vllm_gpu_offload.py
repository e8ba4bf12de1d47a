# SPDX-License-Identifier: Apache-2.0
"""Modes beside vLLM's `OffloadingConnector` on a GPU: blocks go to the host and come back, and none is dirty.

The audit does not follow `SimpleCPUOffloadConnector`, which needs a GPU: tokens tell whether its blocks are right.
"""

from contextlib import closing

import pytest

from tests.engines import Engines
from tests.nwor import faults
from tests.nwor.gpu.on_gpu import assert_parity, both, spec_of
from tests.nwor.offloading import BLOCK, assert_shipped_and_served, converse, first_answers, offloading
from tests.nwor.specs import with_connector

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def answers(engines, model) -> list[list[int]]:
    return first_answers(engines, offloading(spec_of(model), offload=0))


@both
@pytest.mark.parametrize("stack", ["v2 FA graphs", "v2 Triton graphs fp8", "v1 FA graphs"])
def test_blocks_that_leave_and_come_back(engines, model, answers, stack, mode):
    """The next turn finds its blocks on the host; vanilla, beside the same connector, says the same."""
    spec = offloading(spec_of(model, stack))
    plain, outcome = (converse(engines, spec, each, answers, logprobs=5) for each in ("off", mode))
    assert_parity(plain, outcome, stack)
    assert_shipped_and_served(plain, "off")
    assert_shipped_and_served(outcome, mode)


@pytest.mark.parametrize(("mode", "ships"), [("off", True), ("cow", False), ("stage", False)])
def test_no_rejected_row_leaves_under_a_mode(engines, model, answers, mode, ships):
    """vLLM once offloaded a slot too many (its issue 54193): it holds a rejected row, or under a mode none."""
    # A step ahead of the scheduler, the device would write the row of the token sampled last after all. No draft is
    # accepted: the last slot of every answer has held a rejected one, whatever texts this GPU makes.
    spec = offloading(spec_of(model, "v2 FA graphs", async_scheduling=False, acceptance_length=1.0))
    outcome = converse(engines, spec, mode, answers, faults.ships_last_slots)
    assert outcome.audit["shipped_slots"] > 0
    assert (outcome.audit["shipped_rejected"] > 0) == ships


@both
def test_blocks_of_the_simple_connector_come_back(model, answers, mode):
    """The next turn finds its blocks on the host; vanilla, beside the same connector, says the same."""
    spec = offloading(spec_of(model, "v2 FA graphs"), offload=0)
    spec = with_connector(spec, "SimpleCPUOffloadConnector", {"cpu_bytes_to_use": 64 << 20})
    made = []
    for each in ("off", mode):  # in a process each: it leaves its memory pinned, and the next may lie at its address
        with closing(Engines()) as engines:
            made.append(converse(engines, spec, each, answers, logprobs=5, audit=False))
    plain, outcome = made
    assert_parity(plain, outcome)
    [rank] = outcome.ranks
    assert rank["serving"] == mode, rank["reason"]
    assert rank["counters"]["windows"] > 0 == rank["counters"]["fallbacks"]
    # The host has two blocks of each, of which EAGLE's lookup gives up the last; half are still on the GPU as well.
    assert min(run.metrics["external_prefix_cache_hits"] for run in (plain, outcome)) >= len(answers) // 2 * BLOCK
