# SPDX-License-Identifier: Apache-2.0
"""The audit of real vLLM on a CPU: each fault injected into a mode makes its own fields red, and no others."""

import pytest

from tests.nwor.faults import check_each_is_seen
from tests.nwor.on_cpu import spec_of

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]


@pytest.mark.parametrize("mode", ["stage", "cow"])
def test_each_fault_is_seen_for_what_it_is(engines, model, mode):
    check_each_is_seen(engines, spec_of(model, "float32"), mode)
