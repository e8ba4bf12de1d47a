# SPDX-License-Identifier: Apache-2.0
"""Every rank serves the mode, and its counts reach the scheduler and the front end and leave no trace, on stand-ins."""

import gc
import weakref
from contextlib import nullcontext
from types import SimpleNamespace
from unittest.mock import Mock

import prometheus_client
import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: there is nothing to hook into")

from vllm.v1.metrics.loggers import PrometheusStatLogger, StatLoggerManager
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.spec_decode.metrics import SpecDecodingStats

from nwor.counters import Totals
from nwor.settings import Settings
from nwor.vllm import stats, worker
from nwor.ways import HOLDING

# -- every rank serves the mode ----------------------------------------------------------------------------------------


BOTH, LOGGED = ["staged", "logged"], ["logged"]


def rank(number: int, mode: str = "stage", serving: str = "stage", ways=(), reason: str = "") -> dict:
    return {"rank": number, "mode": mode, "serving": serving, "ways": [*ways], "reason": reason}


RANKS = {
    "active": ([rank(0, ways=BOTH), rank(1, ways=BOTH)], ""),
    "every step is logged": ([rank(n, ways=LOGGED, reason="MLA") for n in (0, 1)], ""),
    "fallback with a reason": ([rank(n, serving="off", reason="a KV connector") for n in (0, 1)], ""),
    "a rank lacks the plugin": ([rank(0), rank(1, mode="off", serving="off")], "rank 1 off"),
    "another mode": ([rank(0, mode="cow", serving="cow")], "rank 0 cow"),
    "ranks disagree": ([rank(0), rank(1, serving="off", reason="a hybrid")], "disagree .*a hybrid"),
    "on the ways": ([rank(0, ways=BOTH), rank(1, ways=LOGGED, reason="MLA")], "disagree .*MLA"),
    "not active": ([rank(0, serving="off"), rank(1, serving="off")], r"\[0, 1\]"),
    "one unexplained": ([rank(0, serving="off", reason="x"), rank(1, serving="off")], r"\[1\]"),
    "no rank": ([], "not on all ranks"),
}


@pytest.mark.parametrize("case", RANKS)
def test_a_mode_that_is_not_active_stops_the_run(case):
    """A clean baseline must not carry the treatment's name."""
    ranks, message = RANKS[case]
    with pytest.raises(worker.ModeNotActive, match=message) if message else nullcontext():
        worker.require_mode("stage", ranks)


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
    managers = [SimpleNamespace(counters=SimpleNamespace()) for _ in range(2)]
    runners = [SimpleNamespace(nwor=SimpleNamespace(manager=manager)) for manager in managers]
    workers = [SimpleNamespace(is_driver_worker=n == 0, model_runner=runner) for n, runner in enumerate(runners)]

    class Executor:
        def collective_rpc(self, function, args=()):
            if function is worker.status:
                return [rank(number, settings.mode, settings.mode) for number in range(2)]
            return [function(one, *args) for one in workers]

    core = SimpleNamespace(model_executor=Executor(), log_stats=log_stats)
    at_start = []
    start = worker.make_initialize(lambda self, config: (at_start.append(self.log_stats), "caches")[1], settings)
    assert start(core, None) == "caches"
    assert at_start == [log_stats or settings.debug_sync], "the scheduler counts too, which is made behind this"
    assert [manager.counters.publishes for manager in managers] == [sent, False]


# -- from a worker to the scheduler ------------------------------------------------------------------------------------


class Asynchronous:
    """vLLM's output of a step whose tokens are on their way: it keeps buffers on the device and pinned ones."""

    def get_output(self) -> SimpleNamespace:
        return SimpleNamespace(sampled_token_ids=[[1]])


def test_an_asynchronous_output_carries_counts_when_it_is_asked_for():
    """Nobody waits for the device before vLLM does, and its buffers are free at once, not when cycles are collected."""
    read, output = [], Asynchronous()
    gone = weakref.ref(output)
    stats.add_to_output(output, lambda: (read.append("totals"), "the totals")[1])
    assert not read
    gc.disable()
    try:
        result = output.get_output()
        del output
        assert gone() is None
    finally:
        gc.enable()
    assert vars(result) == {"sampled_token_ids": [[1]], "nwor_commit": "the totals"}
    output = Asynchronous()
    stats.add_to_output(output, lambda: None)
    assert "nwor_commit" not in vars(output.get_output()), "overtaken: they would be another commit's"


class Core:
    """A stand-in of vLLM's scheduler behind our hook, and the worker's totals up to now.

    Each step brings a commit: what the worker counted in it, and what vLLM did. now: the time in seconds.
    """

    now = 1.0

    def __init__(self, **settings: bool) -> None:
        self.settings = Settings(mode="stage", **settings)
        self.commits, self.of_ways, self.steps = 0, [6 * [0], 6 * [0]], [0, 0]
        self.unfinished = True
        self.scheduler = SimpleNamespace(has_unfinished_requests=lambda: self.unfinished)

    def counted(self, windows: int = 0, kept: int = 0, drafts: int = 0, way: str = "staged") -> None:
        """A commit of the worker's, which nobody has been told of."""
        number = HOLDING.index(way)
        self.commits += 1
        self.steps[number] += 1
        risen = kept, drafts - kept, windows, drafts, 0, 0
        self.of_ways[number] = [before + by for before, by in zip(self.of_ways[number], risen, strict=True)]

    def step(
        self, vllms: tuple[int, int] | None = None, statistics: bool = True, seconds: float = 1.0,
        asked: int | None = None, **risen,
    ) -> dict[str, int]:  # fmt: skip
        """What the step's statistics carry.

        vllms: vLLM's windows and accepted drafts, None where it had none. statistics: vLLM makes some in this step.
        seconds: since the step before. asked: drafts that the scheduler asked for; None for those that were held.
        risen: as `counted`; nothing for a step without a window.
        """
        asked = risen.get("drafts", 0) if asked is None else asked
        scheduled = SimpleNamespace(scheduled_spec_decode_tokens={"a": asked * [7]})
        Core.now += seconds
        spec = None if vllms is None else SpecDecodingStats(8, num_drafts=vllms[0], num_accepted_tokens=vllms[1])
        vllms_stats = SchedulerStats(num_kv_fetch_reqs_by_stage={"waiting": 3}, spec_decoding_stats=spec)
        outputs = {0: None, 1: vllms_stats if statistics else None}
        outputs = {client: SimpleNamespace(scheduler_stats=given) for client, given in outputs.items()}
        output = SimpleNamespace()
        if risen:
            self.counted(**risen)
            output.nwor_commit = Totals(self.commits, [*self.of_ways], [*self.steps], 0, 2, 10, reads_back=False)
        stats._make_update(lambda *arguments: outputs, self.settings)(self.scheduler, scheduled, output)
        assert not vars(output), "nothing of ours is left for vLLM"
        carried = stats.take_from_statistics(vllms_stats)
        assert vllms_stats.num_kv_fetch_reqs_by_stage == {"waiting": 3}
        return carried

    @property
    def checked(self) -> tuple[int, int]:
        """Steps that were compared, and that differed."""
        return self.scheduler.nwor.checks, self.scheduler.nwor.mismatches


@pytest.fixture(autouse=True)
def logger(monkeypatch) -> Mock:
    """vLLM's; and the time is that of `Core`."""
    log = Mock()
    monkeypatch.setattr(stats, "init_logger", lambda name: log)
    monkeypatch.setattr(stats, "time", SimpleNamespace(monotonic=lambda: Core.now))
    return log


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
def test_commits_are_held_against_the_scheduler(case, way, logger):
    """In all, of each step alone: a difference that another made good would stay unseen in totals since start-up.

    Whichever way the step went, and the one before it; and to debug, a difference stops the engine.
    """
    (windows, committed), vllms, expected = STEPS[case]
    core, strict = Core(), Core(debug_sync=True)
    for each in (core, strict):
        each.step(vllms=(4, 7), windows=4, kept=7)
    assert core.checked == (1, 0)
    carried = core.step(vllms=vllms, windows=windows, kept=committed, way=way)
    checks, wrong = expected != "not compared", expected == "wrong"
    assert core.checked == (1 + checks, wrong) and logger.warning.call_count == wrong
    assert (carried["scheduler_checks"], carried["scheduler_mismatches"]) == (checks, wrong), "what they rose by"
    core.step(vllms=(2, 2), windows=2, kept=2)
    assert core.checked == (2 + checks, wrong), "the next step is compared by itself"
    if wrong:
        core.step(vllms=(2, 3), windows=2, kept=2)
        assert core.checked == (3 + checks, 2) and logger.warning.call_count == 1, "said once"
        with pytest.raises(AssertionError, match="accepted"):
            strict.step(vllms=vllms, windows=windows, kept=committed, way=way)


def test_windows_that_are_as_many_by_chance_are_not_compared(logger):
    """One request's drafts were trimmed by the worker or fell back, and another request was aborted meanwhile."""
    core = Core(debug_sync=True)
    core.step(vllms=(2, 3), windows=2, kept=4, drafts=5, asked=8)
    assert core.checked == (0, 0) and not logger.warning.called
    core.step(vllms=(2, 4), windows=2, kept=4, drafts=5, asked=8)
    assert core.checked == (1, 0), "what agrees is counted"
    with pytest.raises(AssertionError, match="accepted"):
        core.step(vllms=(2, 3), windows=2, kept=4, drafts=8, asked=8)


def test_a_step_behind_one_that_was_not_told_of_is_not_compared(logger):
    """Its counts are those of two steps; the one after it is a step's again."""
    core, equal = Core(), {"vllms": (2, 1), "windows": 2, "kept": 1}
    core.step(**equal)
    core.counted(kept=3)  # overtaken, or failed behind the commit
    core.step(**equal)
    assert core.checked == (1, 0) and not logger.warning.called
    core.step(**equal)
    core.step()
    core.step(**equal)
    assert core.checked == (3, 0), "steps without a window lie between, and count nothing"
    core.step(**equal, statistics=False)
    core.step(**equal)
    assert core.checked == (4, 0), "nor does one of which vLLM makes no statistics hinder the next"


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
    quiet = Core(emit_metrics=False)
    assert quiet.step(vllms=(3, 5), windows=3, kept=5) == {} and quiet.checked == (1, 0)


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


# -- what a front end shows --------------------------------------------------------------------------------------------


class FrontEnd:
    """vLLM's manager of loggers behind our hook, with a registry of its own; other loggers come before Prometheus'.

    seen: what other loggers find in vLLM's dict.
    """

    def __init__(self, *engines: int) -> None:
        registry, self.seen = prometheus_client.CollectorRegistry(), []

        def kind(name):
            return lambda *args, **more: getattr(prometheus_client, name)(*args, **more, registry=registry)

        vllms = object.__new__(PrometheusStatLogger)
        vllms._counter_cls, vllms._gauge_cls = kind("Counter"), kind("Gauge")
        vllms.per_engine_labelvalues = {engine: ["pair", str(engine)] for engine in engines}
        vllms.record = lambda scheduler_stats, *rest, **more: self.seen.append(
            {**scheduler_stats.num_kv_fetch_reqs_by_stage}
        )
        other = SimpleNamespace(record=vllms.record)

        def init(manager):
            manager.stat_loggers = [other, vllms]

        self.manager = object.__new__(StatLoggerManager)
        stats._make_init(init)(self.manager)
        self.logger = self.manager.stat_loggers[0]
        self.value = lambda name, engine=0: registry.get_sample_value(
            f"vllm:nwor_{name}", {"model_name": "pair", "engine": str(engine)}
        )

    def told(self, counters: dict[str, int], engine: int = 0) -> None:
        sent = SchedulerStats(num_kv_fetch_reqs_by_stage={"waiting": 3})
        stats.add_to_statistics(sent, counters)
        self.manager.record(sent, None, engine_idx=engine)


def test_two_front_ends_together_show_what_was_counted():
    """Each adds what it was sent, so that Prometheus may sum them; what may fall is a gauge. No other logger of a front
    end sees a carried counter, whichever comes first."""
    core, ends = Core(), [FrontEnd(0), FrontEnd(0)]
    for step in range(1, 7):
        ends[step % 3 == 0].told(core.step(windows=1, drafts=4, kept=3, way="logged"))
    for name, total in (("windows_total", 6), ("staged_tokens_total", 24), ("bytes_avoided", -600)):
        assert sum(end.value(name) for end in ends) == total, name
        assert all(end.value(name) for end in ends), "both were sent some"
    assert [end.value("unique_tokens") for end in ends] == [4, 4]
    assert ends[0].value("acceptance_rate") == 0.75
    assert ends[0].seen == 8 * [{"waiting": 3}]


def test_a_counter_that_falls_stops_no_server():
    end = FrontEnd(0)
    end.logger.record(None, None)
    end.told({"windows": 3, "staged_tokens": 12, "bytes_avoided": 7})
    end.told({"windows": -1, "staged_tokens": -4, "bytes_avoided": -9})
    assert (end.value("windows_total"), end.value("bytes_avoided")) == (3, -2)
