# SPDX-License-Identifier: Apache-2.0
"""What a bench runs, in which order, and what it makes of it."""

from types import SimpleNamespace
from typing import ClassVar

import pandas as pd
import pytest

from nwor_lab.engines.engine import EngineSpec, Generation
from nwor_lab.experiments import bench, bench_table
from nwor_lab.experiments.plan import Plan


def test_kernels_of_a_step_are_the_mean_of_the_ranks():
    """A kind is told by the kernel's name, and a rank that waits for another does so in communication."""
    ranks = [
        {"reshape_and_cache_flash_kernel": 80.0, "ncclDevKernel_AllReduce": 8.0, "nvjet_tst_64x8": 160.0, "rms": 16.0},
        {
            "reshape_and_cache_flash_kernel": 88.0,
            "void vllm::cross_device_reduce_1stage": 40.0,
            "nvjet_tst_64x8": 176.0,
        },
    ]
    found = {row["kind"]: row["value"] for row in bench_table.kernel_rows(ranks, steps=8)}
    told = {"KV write": 10.5, "communication": 3.0, "matmul": 21.0, "other": 1.0, "attention": 0.0, "NWOR": 0.0}
    assert found == pytest.approx(told)


def test_loads_are_those_that_the_caches_hold(capsys):
    """Every length with every batch, but for 8 prompts of 100 tokens and 28 more: 1,024 slots are needed."""
    plan = Plan(batches=(1, 8), random_prompts=(32, 100), max_tokens=28)
    assert plan.loads(longest=200, capacity=1024) == [(32, 1), (32, 8), (100, 1), (100, 8)]
    assert plan.loads(longest=200, capacity=1023) == [(32, 1), (32, 8), (100, 1)]
    assert "left out: 8 prompts of 100 tokens, the cache has 1023 slots" in capsys.readouterr().err
    assert plan.loads(longest=50, capacity=1024) == [(32, 1), (32, 8), (50, 1), (50, 8)]
    assert Plan(batches=(1, 8)).loads(longest=200, capacity=1) == [(200, 1), (200, 8)]


class Noted:
    """An engine that notes what it is asked for in `calls`, beside its mode; its steps take 1 ms, paused 2."""

    calls: ClassVar[list[tuple]] = []
    good_captures: ClassVar[int] = 99
    bad_batch: ClassVar[int] = 0
    of_its_own: ClassVar[bool] = False

    def __init__(self, spec, settings) -> None:
        self.spec, self.mode, self.served_by = spec, settings.mode, settings.mode

    def __getattr__(self, name):
        def call(*given):
            self.calls.append((self.mode, name, *given))
            return 10**6

        return call

    def __enter__(self):
        return self

    def __exit__(self, *error) -> None:
        pass

    def report(self):
        return [{"rank": 0, "mode": self.mode, "serving": self.served_by, "counters": {}, "audit": {}}]

    def metrics(self):
        return {}

    def pause(self) -> None:
        self.served_by = "off"

    def resume(self) -> None:
        self.served_by = self.mode

    def generate(self, prompts, max_tokens, temperature=0.0, seed=0, logprobs=0):
        self.calls.append(
            (self.mode, "generate", self.served_by, len(prompts), max_tokens, temperature, seed, logprobs)
        )
        counters = {"drafts": 1, "draft_tokens": 1, "accepted_tokens": 1}
        captures = self.calls.count(("stage", "capture_anew"))
        broken = self.served_by == "stage" and (captures > self.good_captures or len(prompts) == self.bad_batch)
        seconds = 1e-3 if self.served_by == self.mode else 2e-3
        token = 1 + broken + 2 * (self.of_its_own and self.mode == "stage")
        return Generation([[token]] * len(prompts), [""] * len(prompts), [seconds] * 3, counters, [1])


def test_turns_of_a_repeat_differ_in_the_mode_alone(monkeypatch):
    """A capture's luck, a prefill or a cool chip in the first turn would be taken for the mode's doing."""
    monkeypatch.setattr(bench, "Engine", Noted)
    monkeypatch.setattr(Noted, "calls", [])
    plan = Plan(modes=("cow", "stage"), paused=True, batches=(1, 2), repeats=2, max_tokens=5, audit=False)
    rows, _ = bench.run(EngineSpec("shape", prefix_caching=True), plan, [[1, 2, 3]])
    asked = [call for call in Noted.calls if call[1] in ("capture_anew", "generate")]

    def judged(size: int) -> list[tuple]:
        made = [(mode, "generate", mode, size, 1, 0.0, 0, 0) for mode in plan.modes]
        made += [(mode, "generate", mode, size, 5, 0.0, 0, 20) for mode in plan.modes]  # an audit ends before a pause
        return made + [(mode, "generate", "off", size, 5, 0.0, 0, 20) for mode in plan.modes]

    expected = judged(plan.num_prompts)
    for repeat in range(2):
        expected += [(mode, "capture_anew") for mode in plan.modes]
        for size in plan.sizes:
            timed = [(mode, served_by) for mode in plan.modes for served_by in ("off", mode)]
            how = (size, 5, 0.0, 1000 * repeat, 0)
            expected += judged(size)
            expected += [(mode, "generate", by, *how) for mode, by in (timed[::-1] if repeat else timed)]
    assert asked == expected
    steps = pd.DataFrame(rows).query("metric == 'step_ms'").groupby(["engine", "mode"]).value.agg(["count", "max"])
    assert steps.to_dict("index") == {
        (engine, mode): {"count": 12, "max": 2.0 if mode == "off" else 1.0}
        for engine in plan.modes
        for mode in (engine, "off")
    }


@pytest.mark.parametrize(("batches", "judged"), [((), 0), ((8,), 0), ((1, 8), 1)])
def test_a_load_that_the_first_pass_was_not_is_judged_once(batches, judged, monkeypatch):
    """Engines beside each other: their graphs stay, so that once will do; and not again what the first pass was."""
    monkeypatch.setattr(bench, "Engine", Noted)
    monkeypatch.setattr(Noted, "calls", [])
    plan = Plan(modes=("off", "stage"), batches=batches, repeats=3)
    bench.run(EngineSpec("shape"), plan, [[1, 2, 3]])
    passes = [call[3] for call in Noted.calls if call[:2] == ("stage", "generate") and call[-1]]
    assert passes == [8] + [1] * judged


@pytest.mark.parametrize(
    ("broken", "without"), [("", []), ("capture", [1, 2, 4]), ("batch", [2]), ("first pass", [1, 2, 4])]
)
def test_all_that_is_timed_is_held_to_parity(broken, without, monkeypatch):
    """A capture that goes wrong later than the first pass costs the mode its times, and so does the first pass
    itself; one batch that does, its own.

    Beside each ratio is the parity of that load, in both captures; the first pass has 8 requests.
    """
    monkeypatch.setattr(bench, "Engine", Noted)
    monkeypatch.setattr(Noted, "calls", [])
    monkeypatch.setattr(Noted, "good_captures", 1 if broken == "capture" else 9)
    monkeypatch.setattr(Noted, "bad_batch", {"batch": 2, "first pass": 8}.get(broken, 0))
    plan = Plan(modes=("stage",), paused=True, batches=(1, 2, 4), repeats=2, max_tokens=5, audit=False)
    rows, report = bench.run(EngineSpec("shape"), plan, [[1, 2, 3]])
    all_of_them = 8 + 2 * (1 + 2 + 4)
    equal = all_of_them - {"": 0, "capture": 7, "batch": 4, "first pass": 8}[broken]
    assert [found["equal"] for found in report["parity"].values()] == [all_of_them, equal]
    table = bench_table.summary(pd.DataFrame(rows), plan).set_index(["mode", "batch"])
    assert (table.step_ms["stage paused"] == 2).all() and (table.equal["stage paused"] == ["2/2", "4/4", "8/8"]).all()
    assert table.step_ms["stage"].isna().pipe(lambda bad: bad.index[bad].tolist()) == without
    assert table.step_ms["stage"].dropna().eq(1).all()


def test_an_engine_that_pauses_is_its_own_baseline(monkeypatch):
    """Two engines of one configuration need not say the same, and neither is wrong."""
    monkeypatch.setattr(bench, "Engine", Noted)
    monkeypatch.setattr(Noted, "calls", [])
    monkeypatch.setattr(Noted, "of_its_own", True)
    for paused, equal in ((True, 8), (False, 0)):
        plan = Plan(modes=("cow", "stage"), paused=paused, repeats=0, audit=False)
        _, report = bench.run(EngineSpec("shape"), plan, [[1, 2, 3]])
        assert report["parity"]["stage"]["equal"] == equal, "nor is it compared with the first where none is paused"


def test_a_ratio_is_of_both_orders_of_turns():
    """The turn that comes second takes a tenth longer, whichever it is; `stage` takes 0.9 times vanilla's."""
    plan = Plan(modes=("stage",), paused=True, repeats=3)
    rows = [
        {**turn.columns, "batch": 8, "repeat": repeat, "metric": "step_ms", "unit": "ms", "value": value * late}
        for repeat in range(3)
        for turn, value, late in zip(plan.turns, (10.0, 9.0), (1.1, 1.0) if repeat == 1 else (1.0, 1.1), strict=True)
    ]
    table = bench_table.summary(pd.DataFrame(rows), plan).set_index("mode")
    assert table.ratio.to_dict() == pytest.approx({"stage paused": 1.0, "stage": 0.9})


def test_kernels_are_profiled_in_both_orders(monkeypatch):
    """A turn that comes first finds a cooler chip, and its kernels are the faster: the table has the mean of both."""

    class Profiled(Noted):
        def kernel_times(self, prompts, max_tokens):
            self.calls.append((self.mode, "kernel_times", self.served_by, len(prompts)))
            return [{"nvjet": 8.0 * len(self.calls), "reshape_and_cache": 4.0}], 4

    monkeypatch.setattr(bench, "Engine", Profiled)
    monkeypatch.setattr(bench, "on_cpu", lambda: False)
    monkeypatch.setattr(Noted, "calls", [])
    plan = Plan(modes=("stage",), paused=True, repeats=0, profile=True, audit=False)
    rows, _ = bench.run(EngineSpec("shape"), plan, [[1, 2, 3]])
    assert [call[2] for call in Noted.calls if call[1] == "kernel_times"] == ["off", "stage", "stage", "off"]
    found = pd.DataFrame(rows).query("metric == 'kernel_us' and kind == 'KV write'")
    assert found.groupby("mode").size().to_dict() == {"off": 2, "stage": 2} and (found.value == 1).all()
    assert sorted(found.repeat) == [0, 0, 1, 1]


@pytest.mark.parametrize(
    ("minutes", "seconds", "repeats"),
    [
        (0.1, (60, 60, 60), 1),
        (0.0, (60, 60, 60), 3),
        (3.5, (60, 60, 60), 3),
        (2.5, (60, 60, 60), 2),
        (3.5, (60, 100, 50), 2),
    ],
)
def test_no_repeat_begins_that_would_outlast_the_minutes(minutes, seconds, repeats, monkeypatch, capsys):
    """A lent GPU goes back at its time: what is whole by then is kept. The first repeat is always run."""
    clock, timed = [0.0], bench.Session.timed

    def taking(session, temperature, repeat):
        clock[0] += seconds[repeat] / 2
        return timed(session, temperature, repeat)

    monkeypatch.setattr(bench, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(bench.Session, "timed", taking)
    monkeypatch.setattr(bench, "Engine", Noted)
    monkeypatch.setattr(Noted, "calls", [])
    plan = Plan(modes=("off", "stage"), temperatures=(0.0, 1.0), repeats=3, max_minutes=minutes)
    rows, _ = bench.run(EngineSpec("shape"), plan, [[1, 2, 3]])
    steps = pd.DataFrame(rows).query("metric == 'step_ms'").groupby(["mode", "temperature"])["repeat"].nunique()
    assert (steps == repeats).all() and len(steps) == 4
    assert (f"minutes hold {repeats} of 3 repeats" in capsys.readouterr().err) == (repeats < 3)


def test_minutes_are_no_debt():
    with pytest.raises(ValueError, match="max_minutes"):
        Plan(max_minutes=-1)


@pytest.mark.parametrize(
    ("words", "bound"), [(["--dtype", "float32"], 1e-3), (["--dtype", "bfloat16"], 0.25), (["--logit-gap", "0.1"], 0.1)]
)
def test_a_near_tie_is_one_of_the_dtype(words, bound):
    """What bfloat16 excuses would hide a fault in float32."""
    _, plan, _ = bench.read(bench.parser().parse_args(words))
    assert plan.logit_gap == bound
