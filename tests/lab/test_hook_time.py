# SPDX-License-Identifier: Apache-2.0
"""Host time of hooks: what is theirs, and what is not."""

import pytest

from nwor_lab import paths
from nwor_lab.engines import hook_time
from nwor_lab.engines.hook_time import Clock
from nwor_lab.engines.spec import EngineSpec
from tests.engines import in_child


@pytest.fixture
def clock(monkeypatch):
    """A clock whose time passes only where a test says so."""
    now = [0]
    monkeypatch.setattr(hook_time.time, "perf_counter_ns", lambda: now[0])
    made = Clock()
    made.pass_time = lambda nanoseconds: now.__setitem__(0, now[0] + nanoseconds)
    return made


def test_a_hook_is_timed_without_what_it_wraps(clock):
    """vLLM's own function may hold another hook, whose time is its own."""
    within = clock.timed("within", lambda: clock.pass_time(5))

    def vllms():
        clock.pass_time(1000)
        within()

    original = clock.timed("", vllms)

    def hook():
        clock.pass_time(20)
        original()
        clock.pass_time(3)

    timed = clock.timed("hook", hook)
    timed()
    assert not clock.own, "it is off"
    clock.is_on = True
    timed(), timed()
    assert clock.own == {"hook": 46, "within": 10} and clock.calls == {"hook": 2, "within": 2}


@pytest.mark.engine
def test_hooks_of_an_engine_are_timed(monkeypatch):
    spec = EngineSpec(
        str(paths.PAIR_TARGET), str(paths.PAIR_EAGLE), dtype="float32", batch=2, num_blocks=32, max_model_len=1024
    )
    found = in_child(hook_time.hook_times, spec, "stage", 2, 150)
    assert {"_sample", "_model_forward", "schedule", "update_from_output"} <= found.keys()
    assert sum(found.values()) > 0 and not {"forward", "do_kv_cache_update"} & found.keys()
