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
from vllm.v1.spec_decode.metrics import SpecDecodingStats

from nwor.counters import Counters, Totals
from nwor.settings import Settings
from nwor.vllm import metrics, patch, worker
from nwor.vllm import scheduler as vllm_scheduler
from nwor.vllm.carrier import add_to_statistics, take_from_statistics
from nwor.ways import HOLDING

# -- every rank serves the mode ----------------------------------------------------------------------------------------


BOTH, LOGGED = ["staged", "logged"], ["logged"]


def rank(number: int, mode: str = "stage", serving: str = "stage", ways=(), reason: str = "") -> dict:
    return asdict(worker.Status(number, mode, serving, list(ways), reason))


@pytest.mark.parametrize(
    "ranks",
    [
        [rank(0, ways=BOTH), rank(1, ways=BOTH)],
        [rank(0, ways=LOGGED, reason="MLA"), rank(1, ways=LOGGED, reason="MLA")],
        [rank(0, serving="off", reason="a KV connector"), rank(1, serving="off", reason="a KV connector")],
    ],
    ids=["active", "every step is logged", "fallback with a reason"],
)
def test_require_mode(ranks):
    vllm_scheduler.require_mode("stage", ranks)


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        ([rank(0), rank(1, mode="off", serving="off")], "but not on all ranks: rank 0 stage; rank 1 off$"),
        ([rank(0, mode="cow", serving="cow")], "MODE=stage was asked for, but not on all ranks: rank 0 cow$"),
        ([rank(0), rank(1, serving="off", reason="a hybrid")], "disagree .*: rank 0 stage; rank 1 off: a hybrid$"),
        ([rank(0, ways=BOTH), rank(1, ways=LOGGED, reason="MLA")], "disagree .*: rank 0 stage; rank 1 stage: MLA$"),
        ([rank(0, serving="off"), rank(1, serving="off")], r"not active on ranks \[0, 1\]; see whether .* doctor"),
        ([rank(0, serving="off", reason="x"), rank(1, serving="off")], r"not active on ranks \[1\]"),
        ([], "was asked for, but not on all ranks"),
    ],
    ids=[
        "a rank lacks the plugin",
        "another mode",
        "ranks disagree",
        "on the ways",
        "not active",
        "one unexplained",
        "no rank",
    ],
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
    assert [one.model_runner.nwor.counts_by_request for one in workers] == 2 * [settings.debug_sync]


# -- counters on their way to the front end ----------------------------------------------------------------------------


def test_carried_counters_arrive_and_leave_no_trace():
    """Out of the worker, along with vLLM's own statistics, and off them again before vLLM counts them."""
    counters = asdict(Counters(windows=3, staged_tokens=12, bytes_written=2**40))
    stats = SimpleNamespace(num_kv_fetch_reqs_by_stage={"prefill": 2})
    add_to_statistics(stats, counters)
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
            add_to_statistics(stats, {"windows": number})
            manager.record(stats, None, engine_idx=number)
    finally:
        patch.undo_all()
    assert seen == [({"waiting": 3}, number) for number in (1, 2) for _ in range(3)]
    assert observed == [(prometheus, {"windows": number}, number) for number in (1, 2)]


class Core:
    """A stand-in of vLLM's scheduler behind our hooks, and the worker's totals up to now.

    Each step brings a commit: what the worker counted in it, and what vLLM did. now: the time in seconds.
    """

    now = 1.0

    def __init__(self, by_request: bool = False, emit: bool = True) -> None:
        self.by_request, self.emit = by_request, emit
        self.commits, self.of_ways, self.steps = 0, [6 * [0], 6 * [0]], [0, 0]
        self.unfinished = True
        self.scheduler = SimpleNamespace(has_unfinished_requests=lambda: self.unfinished)

    def counted(self, windows: int = 0, kept: int = 0, drafts: int = 0, way: str = "staged") -> None:
        """A commit of the worker's, which nobody has been told of."""
        way = HOLDING.index(way)
        self.commits += 1
        self.steps[way] += 1
        risen = kept, drafts - kept, windows, drafts, 0, 0
        self.of_ways[way] = [before + by for before, by in zip(self.of_ways[way], risen, strict=True)]

    def step(
        self,
        vllms: tuple[int, int] | None = None,
        by_request: dict[str, int] | None = None,
        accepted: dict[str, int] | None = None,
        statistics: bool = True,
        seconds: float = 1.0,
        **risen,
    ) -> dict[str, int]:
        """What the step's statistics carry.

        vllms: vLLM's windows and accepted drafts, None where it had none. by_request, accepted: committed by the
        worker, and accepted by vLLM. statistics: vLLM makes some in this step. seconds: since the step before.
        risen: as `counted`; nothing for a step without a window.
        """
        Core.now += seconds
        spec = None if vllms is None else SpecDecodingStats(8, num_drafts=vllms[0], num_accepted_tokens=vllms[1])
        stats = SchedulerStats(spec_decoding_stats=spec)
        note = vllm_scheduler._make_spec_decoding_stats(lambda self, spec_decoding_stats, **counts: None)

        def update(core, scheduler_output, model_runner_output):
            for request, number in (accepted or {}).items():
                note(core, None, request_id=request, num_accepted_tokens=number)
            silent = SimpleNamespace(scheduler_stats=None)
            return {0: silent, 1: SimpleNamespace(scheduler_stats=stats if statistics else None)}

        output = SimpleNamespace()
        if risen:
            self.counted(**risen)
            totals = Totals(self.commits, [*self.of_ways], [*self.steps], 0, 2, 10, reads_back=False)
            output.nwor_commit = totals, by_request or {}
        vllm_scheduler._make_update(update, self.by_request, self.emit)(self.scheduler, None, output)
        assert not vars(output), "nothing of ours is left for vLLM"
        carried = take_from_statistics(stats)
        assert not stats.num_kv_fetch_reqs_by_stage
        return carried

    @property
    def checked(self) -> tuple[int, int]:
        """Steps that were compared, and that differed."""
        commits = vllm_scheduler._commits(self.scheduler)
        return commits.checks, commits.mismatches


@pytest.fixture(autouse=True)
def warnings(monkeypatch) -> Mock:
    """vLLM's logger; and the time is that of `Core`."""
    log = Mock()
    monkeypatch.setattr("vllm.logger.init_logger", lambda name: log)
    monkeypatch.setattr(vllm_scheduler, "time", SimpleNamespace(monotonic=lambda: Core.now))
    return log.warning


@pytest.mark.parametrize("emit", [True, False])
def test_nothing_is_carried_where_nobody_takes_it_off(emit):
    """With metrics off, the scheduler's check still runs; its counts stayed in vLLM's own dict."""
    core = Core(emit=emit)
    carried = core.step(vllms=(3, 5), windows=3, kept=5)
    assert bool(carried) is emit and core.checked == (1, 0)


# What the worker counted in a step, vLLM's windows and accepted drafts, and what it is of them.
STEPS = {
    "equal": ((3, 5), (3, 5), "right"),
    "a draft too few": ((3, 4), (3, 5), "wrong"),
    "a draft too many": ((3, 6), (3, 5), "wrong"),
    "none was accepted": ((3, 0), (3, 0), "right"),
    "a request has ended meanwhile": ((3, 5), (2, 3), "not compared"),
    "a request's drafts fell back": ((2, 3), (3, 5), "not compared"),
    "vLLM keeps no statistics of drafts": ((3, 5), None, "not compared"),
}


@pytest.mark.parametrize("way", HOLDING)
@pytest.mark.parametrize("case", STEPS)
def test_commits_are_held_against_the_scheduler(case, way, warnings):
    """In all, of each step alone: a difference that another made good would stay unseen in totals since start-up.

    Whichever way the step went, and the one before it.
    """
    (windows, committed), vllms, expected = STEPS[case]
    core = Core()
    core.step(vllms=(4, 7), windows=4, kept=7)
    assert core.checked == (1, 0)
    carried = core.step(vllms=vllms, windows=windows, kept=committed, way=way)
    checks, wrong = expected != "not compared", expected == "wrong"
    assert core.checked == (1 + checks, wrong) and warnings.call_count == wrong
    assert (carried["scheduler_checks"], carried["scheduler_mismatches"]) == (checks, wrong), "what they rose by"
    core.step(vllms=(2, 2), windows=2, kept=2)
    assert core.checked == (2 + checks, wrong), "the next step is compared by itself"


def test_a_step_behind_one_that_was_not_told_of_is_not_compared(warnings):
    """Its counts are those of two steps; the one after it is a step's again."""
    core = Core()
    core.step(vllms=(2, 1), windows=2, kept=1)
    core.counted(kept=3)  # overtaken, or failed behind the commit
    core.step(vllms=(2, 1), windows=2, kept=1)
    assert core.checked == (1, 0) and not warnings.called
    core.step(vllms=(2, 1), windows=2, kept=1)
    core.step()
    core.step(vllms=(2, 1), windows=2, kept=1)
    assert core.checked == (3, 0), "steps without a window lie between, and count nothing"
    core.step(vllms=(2, 1), windows=2, kept=1, statistics=False)
    core.step(vllms=(2, 1), windows=2, kept=1)
    assert core.checked == (4, 0), "nor does one of which vLLM makes no statistics hinder the next"


@pytest.mark.parametrize(
    ("committed", "right"),
    [({"p": 0, "q": 2}, True), ({"p": 0, "q": 1}, False), ({"p": 0, "q": 3}, False), ({"p": 0}, True)],
)
def test_to_debug_requests_are_compared_one_by_one(committed, right):
    """And a difference stops the engine. Of a request that fell back, vLLM's own write stored the drafts.

    Totals agree in all of these, as where one request has what another lacks.
    """
    core = Core(by_request=True)
    step = {"vllms": (2, 2), "windows": 2, "kept": 2, "by_request": committed, "accepted": {"q": 2}}
    if not right:
        with pytest.raises(AssertionError, match="q"):
            core.step(**step)
        return
    assert core.step(**step)["scheduler_checks"] == 1
    assert core.step(accepted={"q": 9}) == {}, "a step without a window has nothing to hold"
    core.step(**step)
    core.step(**step | {"by_request": {"p": 1, "q": 1}, "accepted": {"p": 1}})  # q has ended meanwhile
    assert core.checked == (3, 0), "what it accepted in the step before is nothing to hold this one against"


def test_a_step_carries_what_counters_rose_by():
    """Of several front ends each is sent some steps alone: totals would be counted again by each."""
    core = Core()
    first = core.step(windows=2, drafts=8, kept=5, way="logged")
    assert (first["windows"], first["staged_tokens"], first["committed_tokens"], first["logged_steps"]) == (2, 8, 5, 1)
    assert first["bytes_avoided"] == -2 * (8 + 3) * 10 and first["unique_tokens"] == 8
    assert core.step(windows=1, drafts=4, statistics=False) == {}
    later = core.step(vllms=(2, 0), windows=2, drafts=6)
    assert (later["windows"], later["staged_tokens"], later["staged_steps"]) == (3, 10, 2), "and what nobody was sent"
    assert later["logged_steps"] == 0 and later["bytes_avoided"] == 10 * 13, "of this part alone"
    assert later["unique_tokens"] == 6 and later["scheduler_checks"] == 1
    assert core.step(vllms=(2, 0), windows=2)["scheduler_checks"] == 1


def test_counters_are_carried_now_and_then_and_behind_the_last_request():
    """Not in every step, which would take as long as a step's hooks; and none is left behind where steps end."""
    core = Core()
    assert core.step(windows=1)["windows"] == 1
    assert [core.step(windows=1, seconds=0.1) for _ in range(3)] == 3 * [{}]
    assert core.step(windows=1, seconds=0.3)["windows"] == 4
    core.step(windows=1, seconds=0.1)
    core.unfinished = False
    assert core.step(seconds=0.1)["windows"] == 1, "a step without a window, behind which none may come"
    assert core.step(seconds=0.1) == {}, "nothing rose"


def test_a_difference_warns_at_most_once_a_minute(warnings):
    """A log says that something is wrong, as `/metrics` does, and is not flooded; what it counts are steps."""
    core = Core()
    core.step(vllms=(1, 2), windows=1, kept=2)
    assert warnings.call_count == 0
    for seconds, said in ((1.0, 1), (1.0, 1), (58.9, 1), (0.2, 2)):
        core.step(vllms=(3, 9), windows=3, kept=5, seconds=seconds)
        assert warnings.call_count == said, seconds
    assert core.checked == (5, 4)
    text, *values = warnings.call_args.args
    assert values == [5, 9, 4] and text % tuple(values)


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
    core, ends = Core(), [front_end(monkeypatch), front_end(monkeypatch)]
    for step in range(1, 7):
        sent = core.step(windows=1, drafts=4, kept=3, way="logged")
        metrics._observe(ends[step % 3 == 0].logger, sent, 0)
    for name, total in (("windows_total", 6), ("staged_tokens_total", 24), ("bytes_avoided", -600)):
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
