# SPDX-License-Identifier: Apache-2.0
"""The hooks in vLLM's engine core and front end: every rank serves the mode, and counts arrive and leave no trace."""

from dataclasses import asdict, fields
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: there is nothing to hook into")

from vllm.v1.metrics.loggers import StatLoggerManager
from vllm.v1.metrics.stats import SchedulerStats

from nwor.counters import Counters
from nwor.vllm import metrics, patch, worker
from nwor.vllm import scheduler as vllm_scheduler
from nwor.vllm.carrier import add_to_statistics, take_from_statistics

# -- every rank serves the mode ----------------------------------------------------------------------------------------


def rank(number: int, mode: str = "stage", serving: str = "stage", reason: str = "") -> dict:
    return asdict(worker.Status(number, mode, serving, reason))


@pytest.mark.parametrize(
    "ranks",
    [
        [rank(0), rank(1)],
        [rank(0, serving="off", reason="a KV connector"), rank(1, serving="off", reason="a KV connector")],
    ],
    ids=["active", "fallback with a reason"],
)
def test_require_mode(ranks):
    vllm_scheduler.require_mode("stage", ranks)


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        ([rank(0), rank(1, mode="off", serving="off")], "was asked for, but the ranks have .'off', 'stage'."),
        ([rank(0, mode="cow", serving="cow")], "MODE=stage was asked for, but the ranks have .'cow'."),
        ([rank(0), rank(1, serving="off", reason="a hybrid model")], "the ranks disagree on what serves"),
        ([rank(0, serving="off"), rank(1, serving="off")], r"not active on ranks \[0, 1\]; see whether .* doctor"),
        ([rank(0, serving="off", reason="x"), rank(1, serving="off")], r"not active on ranks \[1\]"),
        ([], "was asked for, but the ranks have"),
    ],
    ids=["a rank lacks the plugin", "another mode", "ranks disagree", "not active", "one unexplained", "no rank"],
)
def test_a_mode_that_is_not_active_stops_the_run(ranks, message):
    """A clean baseline must not carry the treatment's name."""
    with pytest.raises(vllm_scheduler.ModeNotActive, match=message):
        vllm_scheduler.require_mode("stage", ranks)


# -- counters on their way to the front end ----------------------------------------------------------------------------


def test_carried_counters_arrive_and_leave_no_trace():
    """Out of the worker, along with vLLM's own statistics, and off them again before vLLM counts them."""
    counters = asdict(Counters(windows=3, staged_tokens=12, bytes_written=2**40))
    stats = SimpleNamespace(num_kv_fetch_reqs_by_stage={"prefill": 2})
    silent, speaking = SimpleNamespace(scheduler_stats=None), SimpleNamespace(scheduler_stats=stats)
    add_to_statistics({0: silent, 1: speaking}, counters)
    assert stats.num_kv_fetch_reqs_by_stage.keys() > {"prefill"}
    assert take_from_statistics(stats) == counters
    assert stats.num_kv_fetch_reqs_by_stage == {"prefill": 2}
    assert take_from_statistics(stats) == {}


def test_no_logger_of_the_front_end_sees_a_carried_counter(monkeypatch):
    """Whichever comes first: only the Prometheus logger took them off, after all others had read vLLM's dict."""
    seen, observed = [], []

    class Logger:
        def record(self, scheduler_stats, iteration_stats, mm_cache_stats=None, engine_idx=0):
            seen.append((dict(scheduler_stats.num_kv_fetch_reqs_by_stage), engine_idx))

    prometheus = Logger()
    prometheus.nwor_counters = {}
    monkeypatch.setattr(metrics, "_observe", lambda logger, *what: observed.append((logger, *what)))
    manager = object.__new__(StatLoggerManager)
    manager.stat_loggers = [Logger(), prometheus, Logger()]
    try:
        metrics.install()
        for number in (1, 2):  # two data-parallel engines
            stats = SchedulerStats(num_kv_fetch_reqs_by_stage={"waiting": 3})
            add_to_statistics({0: SimpleNamespace(scheduler_stats=stats)}, {"windows": number})
            manager.record(stats, None, engine_idx=number)
    finally:
        patch.undo_all()
    assert seen == [({"waiting": 3}, number) for number in (1, 2) for _ in range(3)]
    assert observed == [(prometheus, {"windows": number}, number) for number in (1, 2)]


def test_nothing_is_carried_where_nobody_takes_it_off():
    """With metrics off, the scheduler's check still runs; its counts stayed in vLLM's own dict."""
    stats = SchedulerStats()
    hook = vllm_scheduler._make_update(lambda *_: {0: SimpleNamespace(scheduler_stats=stats)}, strict=True, emit=False)
    scheduler = SimpleNamespace()
    hook(scheduler, None, SimpleNamespace(nwor_commit=(asdict(Counters(windows=1)), {})))
    assert stats.num_kv_fetch_reqs_by_stage == {}
    assert scheduler.nwor_checked == (1, 0)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(("committed", "mismatches"), [({"p": 0, "q": 2}, 0), ({"p": 0, "q": 1}, 1), ({"p": 0}, 1)])
def test_commits_are_held_against_the_scheduler(committed, mismatches, strict):
    """In every step, each request's commits are what the scheduler accepts; a difference is counted, or stops."""
    stats = SimpleNamespace(num_kv_fetch_reqs_by_stage={})
    note = vllm_scheduler._make_spec_decoding_stats(lambda self, spec_decoding_stats, **counts: spec_decoding_stats)

    def update(self, scheduler_output, model_runner_output):
        note(self, None, request_id="q", num_accepted_tokens=2)
        return {0: SimpleNamespace(scheduler_stats=stats)}

    hook, scheduler = vllm_scheduler._make_update(update, strict, emit=True), SimpleNamespace()
    output = SimpleNamespace(nwor_commit=(asdict(Counters(windows=1)), committed))
    if strict and mismatches:
        with pytest.raises(AssertionError, match="committed and accepted drafts differ, by request: {'q'"):
            hook(scheduler, None, output)
        return
    hook(scheduler, None, output)
    assert not vars(output)
    carried = take_from_statistics(stats)
    assert carried == asdict(Counters(windows=1)) | {"scheduler_checks": 1, "scheduler_mismatches": mismatches}
    hook(scheduler, None, SimpleNamespace())  # a step without a window has nothing to hold
    assert stats.num_kv_fetch_reqs_by_stage == {}


def test_the_carrier_is_vllms():
    """The field must stay a dict of names to numbers, or counters would be lost on the way."""
    carrier = {field.name: field for field in fields(SchedulerStats)}["num_kv_fetch_reqs_by_stage"]
    assert carrier.type == dict[str, int] or carrier.type == "dict[str, int]"
    assert SchedulerStats().num_kv_fetch_reqs_by_stage == {}
