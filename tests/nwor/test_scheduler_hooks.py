# SPDX-License-Identifier: Apache-2.0
"""The hooks in vLLM's engine core and front end: every rank serves the mode, and counts arrive and leave no trace."""

from dataclasses import asdict, fields
from types import SimpleNamespace
from unittest.mock import Mock

import prometheus_client
import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: there is nothing to hook into")

from vllm.v1.metrics.loggers import StatLoggerManager
from vllm.v1.metrics.stats import SchedulerStats

from nwor.counters import Counters
from nwor.settings import Settings
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
        ([rank(0), rank(1, mode="off", serving="off")], "but not on all ranks: rank 0 stage; rank 1 off$"),
        ([rank(0, mode="cow", serving="cow")], "MODE=stage was asked for, but not on all ranks: rank 0 cow$"),
        ([rank(0), rank(1, serving="off", reason="a hybrid")], "disagree .*: rank 0 stage; rank 1 off: a hybrid$"),
        ([rank(0, serving="off"), rank(1, serving="off")], r"not active on ranks \[0, 1\]; see whether .* doctor"),
        ([rank(0, serving="off", reason="x"), rank(1, serving="off")], r"not active on ranks \[1\]"),
        ([], "was asked for, but not on all ranks"),
    ],
    ids=["a rank lacks the plugin", "another mode", "ranks disagree", "not active", "one unexplained", "no rank"],
)
def test_a_mode_that_is_not_active_stops_the_run(ranks, message):
    """A clean baseline must not carry the treatment's name."""
    with pytest.raises(vllm_scheduler.ModeNotActive, match=message):
        vllm_scheduler.require_mode("stage", ranks)


@pytest.mark.parametrize(
    ("settings", "log_stats", "sent"),
    [
        (Settings(mode="cow"), True, True),
        (Settings(mode="stage"), False, False),  # as in an `LLM` of a script
        (Settings(mode="stage", debug_sync=True), False, True),
        (Settings(mode="stage", emit_metrics=False), True, False),
        (Settings(mode="direct"), True, False),  # it holds nothing back
    ],
    ids=str,
)
def test_counts_are_asked_for_where_somebody_takes_them(settings, log_stats, sent):
    """Of every rank, which knows whether its output is the one that is read."""
    workers = [SimpleNamespace(is_driver_worker=first, model_runner=SimpleNamespace()) for first in (True, False)]

    class Executor:
        def collective_rpc(self, function, args=()):
            if function is worker.status:
                return [rank(number, settings.mode, settings.mode) for number in range(2)]
            return [function(one, *args) for one in workers]

    core = SimpleNamespace(model_executor=Executor(), log_stats=log_stats)
    assert vllm_scheduler.make_initialize(settings)(lambda self, config: "caches")(core, None) == "caches"
    assert [one.model_runner.nwor.copies_counts for one in workers] == [sent, False]


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
    prometheus.nwor_metrics = {}
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
@pytest.mark.parametrize(("committed", "mismatches"), [({"p": 0, "q": 2}, 0), ({"p": 0, "q": 1}, 1), ({"p": 0}, 0)])
def test_commits_are_held_against_the_scheduler(committed, mismatches, strict):
    """In every step, each request's commits are what the scheduler accepts; a difference is counted, or stops.

    A request that fell back has none: vLLM's own write stored its drafts.
    """
    scheduler, counters, accepted = SimpleNamespace(), Counters(windows=1), {"q": 2}
    if strict and mismatches:
        with pytest.raises(AssertionError, match="committed and accepted drafts differ, by request: {'q'"):
            commit_step(scheduler, counters, committed, accepted, strict=True)
        return
    carried = commit_step(scheduler, counters, committed, accepted, strict=strict)
    assert carried == asdict(counters) | {"scheduler_checks": 1, "scheduler_mismatches": mismatches}
    assert hasattr(scheduler, "nwor_warned") == bool(mismatches)
    assert commit_step(scheduler, None, {}, accepted, strict=strict) == {}, (
        "a step without a window has nothing to hold"
    )


def commit_step(
    scheduler, counters: Counters | None, committed: dict, accepted: dict, statistics: bool = True, strict: bool = False
) -> dict:
    """What a step's statistics carry, of a worker that has counted `counters` since start-up; None: no window."""
    stats = SimpleNamespace(num_kv_fetch_reqs_by_stage={})
    note = vllm_scheduler._make_spec_decoding_stats(lambda self, spec_decoding_stats, **counts: None)

    def update(self, scheduler_output, model_runner_output):
        for request, number in accepted.items():
            note(self, None, request_id=request, num_accepted_tokens=number)
        return {0: SimpleNamespace(scheduler_stats=stats if statistics else None)}

    output = SimpleNamespace(**({"nwor_commit": (asdict(counters), committed)} if counters else {}))
    vllm_scheduler._make_update(update, strict, emit=True)(scheduler, None, output)
    assert not vars(output)
    return take_from_statistics(stats)


def test_a_step_carries_what_counters_rose_by():
    """Of several front ends each is sent some steps alone: totals would be counted again by each."""
    scheduler = SimpleNamespace()
    first = commit_step(scheduler, Counters(windows=2, staged_tokens=8, bytes_avoided=-64), {}, {})
    assert (first["windows"], first["staged_tokens"], first["bytes_avoided"]) == (2, 8, -64)
    assert commit_step(scheduler, Counters(windows=3, staged_tokens=12), {}, {}, statistics=False) == {}
    later = commit_step(scheduler, Counters(windows=5, staged_tokens=20, bytes_avoided=-32), {}, {})
    assert (later["windows"], later["staged_tokens"], later["bytes_avoided"]) == (3, 12, 32), "and what nobody was sent"
    assert later["scheduler_checks"] == 2


def test_a_difference_warns_at_most_once_a_minute(monkeypatch):
    """A log says that something is wrong, as `/metrics` does, and is not flooded."""
    warnings, now, scheduler = Mock(), [1.0], SimpleNamespace()
    monkeypatch.setattr("vllm.logger.init_logger", lambda name: warnings)
    monkeypatch.setattr(vllm_scheduler.time, "monotonic", lambda: now[0])
    commit_step(scheduler, Counters(windows=1), {"q": 2}, {"q": 2})
    assert warnings.warning.call_count == 0
    for now[0], said in ((2.0, 1), (3.0, 1), (61.9, 1), (62.0, 2)):
        commit_step(scheduler, Counters(windows=1), {"q": 1}, {"q": 2})
        assert warnings.warning.call_count == said, now[0]
    text, *values = warnings.warning.call_args.args
    assert (text % tuple(values)).startswith("NWOR: 1 drafts of request q were committed, but vLLM accepted 2; 4 such")


# -- what a front end shows --------------------------------------------------------------------------------------------


def front_end(monkeypatch, engines=(0,)) -> SimpleNamespace:
    """A stand-in of vLLM's Prometheus logger, with a registry and a log of its own."""
    registry, log = prometheus_client.CollectorRegistry(), Mock()

    def kind(name):
        return lambda *args, **more: getattr(prometheus_client, name)(*args, **more, registry=registry)

    monkeypatch.setattr("vllm.logger.init_logger", lambda name: log)
    logger = SimpleNamespace(
        engine_indexes=list(engines),
        per_engine_labelvalues={engine: ["pair", str(engine)] for engine in engines},
        _counter_cls=kind("Counter"),
        _gauge_cls=kind("Gauge"),
        log=Mock(),
    )
    vllms = logger.log
    metrics._make_init(lambda self, *_: None)(logger, None, None)

    def value(name, engine=0):
        return registry.get_sample_value(f"vllm:nwor_{name}", {"model_name": "pair", "engine": str(engine)})

    return SimpleNamespace(logger=logger, value=value, info=log.info, vllms_log=vllms)


def test_two_front_ends_together_show_what_was_counted(monkeypatch):
    """Each adds what it was sent, so that Prometheus may sum them; what may fall is a gauge."""
    scheduler, ends = SimpleNamespace(), [front_end(monkeypatch), front_end(monkeypatch)]
    for step in range(1, 7):
        counters = Counters(windows=step, staged_tokens=4 * step, committed_tokens=3 * step, bytes_avoided=-10 * step)
        sent = commit_step(scheduler, counters, {}, {})
        metrics._observe(ends[step % 3 == 0].logger, sent, 0)
    for name, total in (("windows_total", 6), ("staged_tokens_total", 24), ("bytes_avoided", -60)):
        assert sum(end.value(name) for end in ends) == total, name
        assert all(end.value(name) for end in ends), "both were sent some"
    assert [end.value("unique_tokens") for end in ends] == [4, 4]
    assert ends[0].value("acceptance_rate") == 0.75


def test_a_counter_that_falls_stops_no_server(monkeypatch):
    end = front_end(monkeypatch)
    metrics._observe(end.logger, {"windows": 3, "staged_tokens": 12, "bytes_avoided": 7}, 0)
    metrics._observe(end.logger, {"windows": -1, "staged_tokens": -4, "bytes_avoided": -9}, 0)
    assert (end.value("windows_total"), end.value("bytes_avoided")) == (3, -2)


def test_each_time_vllm_logs_a_line_says_what_was_committed_since(monkeypatch):
    """Of all engines behind the front end; none where there were no drafts; and vLLM's own logger is still called."""
    end = front_end(monkeypatch, engines=(0, 1))
    end.logger.log()
    assert end.info.call_count == 0
    metrics._observe(end.logger, {"staged_tokens": 12, "committed_tokens": 5, "windows": 3}, 0)
    metrics._observe(end.logger, {"staged_tokens": 4, "committed_tokens": 3, "windows": 1}, 1)
    end.logger.log()
    end.logger.log()
    metrics._observe(end.logger, {"staged_tokens": 8, "committed_tokens": 0, "windows": 2}, 1)
    end.logger.log()
    said = [call.args[0] % call.args[1:] for call in end.info.call_args_list]
    assert said == [
        "NWOR: committed 8 of 16 drafts (acceptance 50.0 %)",
        "NWOR: committed 0 of 8 drafts (acceptance 0.0 %)",
    ]
    assert end.vllms_log.call_count == 4


def test_the_carrier_is_vllms():
    """The field must stay a dict of names to numbers, or counters would be lost on the way."""
    carrier = {field.name: field for field in fields(SchedulerStats)}["num_kv_fetch_reqs_by_stage"]
    assert carrier.type == dict[str, int] or carrier.type == "dict[str, int]"
    assert SchedulerStats().num_kv_fetch_reqs_by_stage == {}
