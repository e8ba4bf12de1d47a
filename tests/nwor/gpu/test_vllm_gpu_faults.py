# SPDX-License-Identifier: Apache-2.0
"""The audit of real vLLM on a GPU: each fault injected into a mode makes its own fields red, and no others."""

import pytest

from tests.nwor.faults import check_each_is_seen
from tests.nwor.gpu.on_gpu import spec_of

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]


@pytest.mark.parametrize(
    ("mode", "stack"),
    [("stage", "v2 FA eager"), ("cow", "v2 FA eager"), ("cow", "v2 FA eager fp8"), ("stage", "v1 Triton eager")],
)
def test_each_fault_is_seen_for_what_it_is(engines, model, mode, stack):
    """Without graphs, whose replay runs no hook that content is checked in, and no step ahead of the scheduler."""
    check_each_is_seen(engines, spec_of(model, stack, async_scheduling=False), mode)
