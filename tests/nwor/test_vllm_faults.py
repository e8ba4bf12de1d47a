# SPDX-License-Identifier: Apache-2.0
"""The audit of real vLLM on a CPU: each fault injected into a mode makes its own fields red, and no others."""

import pytest

from nwor_lab.faults import FP8
from tests.devices import needs_fp8_cache
from tests.nwor.faults import check_each_is_seen
from tests.nwor.on_cpu import spec_of

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]


@pytest.mark.parametrize(
    ("mode", "cache", "needs"),
    [
        ("stage", ("float32",), ""),
        ("cow", ("float32",), ""),
        pytest.param("cow", ("bfloat16", "fp8"), FP8, marks=needs_fp8_cache),
    ],
    ids=["stage", "cow", "cow fp8"],
)
def test_each_fault_is_seen_for_what_it_is(engines, model, mode, cache, needs):
    check_each_is_seen(engines, spec_of(model, *cache), mode, needs)
