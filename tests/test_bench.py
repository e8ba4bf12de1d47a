# SPDX-License-Identifier: Apache-2.0
"""What a bench runs, in which order, and what it makes of it."""

from typing import ClassVar

import pandas as pd
import pytest

from nwor import bench
from nwor.engine import EngineSpec, Generation


def test_kernels_of_a_step_are_the_mean_of_the_ranks():
    """N5, R22: a kind is told by the kernel's name, and a rank that waits for another does so in communication."""
    ranks = [
        {"reshape_and_cache_flash_kernel": 80.0, "ncclDevKernel_AllReduce": 8.0, "nvjet_tst_64x8": 160.0, "rms": 16.0},
        {
            "reshape_and_cache_flash_kernel": 88.0,
            "void vllm::cross_device_reduce_1stage": 40.0,
            "nvjet_tst_64x8": 176.0,
        },
    ]
    found = {row["kind"]: row["value"] for row in bench.kernel_rows(ranks, steps=8)}
    told = {"KV write": 10.5, "communication": 3.0, "matmul": 21.0, "other": 1.0, "attention": 0.0, "NWOR": 0.0}
    assert found == pytest.approx(told)


def test_loads_are_those_that_the_caches_hold(capsys):
    """Every length with every batch, but for 8 prompts of 100 tokens and 28 more: 1,024 slots are needed."""
    plan = bench.Plan(batches=(1, 8), random_prompts=(32, 100), max_tokens=28)
    assert plan.loads(longest=200, capacity=1024) == [(32, 1), (32, 8), (100, 1), (100, 8)]
    assert plan.loads(longest=200, capacity=1023) == [(32, 1), (32, 8), (100, 1)]
    assert "left out: 8 prompts of 100 tokens, the cache has 1023 slots" in capsys.readouterr().err
    assert plan.loads(longest=50, capacity=1024) == [(32, 1), (32, 8), (50, 1), (50, 8)]
    assert bench.Plan(batches=(1, 8)).loads(longest=200, capacity=1) == [(200, 1), (200, 8)]


class Noted:
    """An engine that notes what it is asked for in `calls`, beside its mode; its steps take 1 ms, paused 2."""

    calls: ClassVar[list[tuple]] = []
    good_captures: ClassVar[int] = 99

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
        broken = self.served_by == "stage" and self.calls.count(("stage", "capture_anew")) > self.good_captures
        seconds = 1e-3 if self.served_by == self.mode else 2e-3
        return Generation([[1 + broken]] * len(prompts), [""] * len(prompts), [seconds] * 3, counters, [1])


def test_turns_of_a_repeat_differ_in_the_mode_alone(monkeypatch):
    """A capture's luck, a prefill or a cool chip in the first turn would be taken for the mode's doing."""
    monkeypatch.setattr(bench, "Engine", Noted)
    monkeypatch.setattr(Noted, "calls", [])
    plan = bench.Plan(modes=("cow", "stage"), paused=True, batches=(1, 2), repeats=2, max_tokens=5, audit=False)
    rows, _ = bench.run(EngineSpec("shape", prefix_caching=True), plan, [[1, 2, 3]])
    asked = [call for call in Noted.calls if call[1] in ("capture_anew", "generate")]
    first = (plan.num_prompts, 5, 0.0, 0, 5)
    judged = [(mode, "generate", mode, *first) for mode in plan.modes]  # an audit is over before its mode pauses
    judged += [(mode, "generate", "off", *first) for mode in plan.modes]
    expected = [(mode, "generate", mode, plan.num_prompts, 1, 0.0, 0, 0) for mode in plan.modes] + judged
    for repeat in range(2):
        expected += [(mode, "capture_anew") for mode in plan.modes] + judged
        for size in plan.sizes:
            expected += [(mode, "generate", mode, size, 5, 0.0, 0, 0) for mode in plan.modes]
            timed = [(mode, served_by) for mode in plan.modes for served_by in ("off", mode)]
            how = (size, 5, 0.0, 1000 * repeat, 0)
            expected += [(mode, "generate", by, *how) for mode, by in (timed[::-1] if repeat else timed)]
    assert asked == expected
    steps = pd.DataFrame(rows).query("metric == 'step_ms'").groupby(["engine", "mode"]).value.agg(["count", "max"])
    assert steps.to_dict("index") == {
        (engine, mode): {"count": 12, "max": 2.0 if mode == "off" else 1.0}
        for engine in plan.modes
        for mode in (engine, "off")
    }


@pytest.mark.parametrize(("good", "equal"), [(2, 8), (1, 0)])
def test_graphs_that_are_timed_are_held_to_parity(good, equal, monkeypatch):
    """#24: a capture that goes wrong later than the first pass costs the mode its times."""
    monkeypatch.setattr(bench, "Engine", Noted)
    monkeypatch.setattr(Noted, "calls", [])
    monkeypatch.setattr(Noted, "good_captures", good)
    plan = bench.Plan(modes=("stage",), paused=True, repeats=2, max_tokens=5, audit=False)
    rows, report = bench.run(EngineSpec("shape"), plan, [[1, 2, 3]])
    assert [found["equal"] for found in report["parity"].values()] == [8, equal]
    table = bench.summary(pd.DataFrame(rows), plan).set_index("mode")
    assert table.step_ms["stage paused"] == 2 and (table.step_ms["stage"] == 1) == (equal == 8)
