# SPDX-License-Identifier: Apache-2.0
"""Count accepted drafts in vanilla vLLM at many draft lengths.

    nwor acceptance --k 1,2,4,8 --temperature 0,1

Defaults are for counts at scale on a GPU: one engine a draft length, all up at once. Written are the counts of every
pass: windows, drafts, accepted drafts, and the windows in which the draft at each position was accepted. Long greedy
answers repeat themselves, and what repeats is drafted well: answers have 64 tokens.
"""

from __future__ import annotations

import itertools
import math
import os
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, Any

import numpy as np
import pandas as pd
from tyro.conf import arg

from nwor_lab import machine, pair
from nwor_lab.bench import bench, options
from nwor_lab.bench.bench_table import rows_of_generation
from nwor_lab.bench.plan import Plan, Workload, settings_of
from nwor_lab.bench.survival import COUNTS, predict_rejected, summary, survival, verdicts
from nwor_lab.engines.spec import EngineOptions, EngineSpec
from nwor_lab.progress import say
from nwor_lab.run import lessons, results

__all__ = ["predict_rejected", "summary", "survival", "verdicts"]

RECORDED = "gpu_acceptance"
"""Table of the counts at scale, in a run and in `data/recorded/`."""


@dataclass(frozen=True, kw_only=True)
class Acceptance:
    ks: options.Ks = (1, 2, 3, 4, 5, 6, 7, 8)
    """draft lengths; their engines work side by side"""
    temperatures: Annotated[tuple[float, ...], arg(name="temperature")] = (0.0, 1.0)
    """sampling temperatures; 0 is greedy"""
    repeats: int = 8
    """passes, each with seeds of its own; greedy ones are not repeated"""
    workload: Workload = field(default_factory=partial(Workload, num_prompts=0))
    # With a cache of a given size engines start side by side.
    engine: EngineOptions = field(
        default_factory=partial(
            EngineOptions, batch=64, max_num_batched_tokens=8192, kv_cache_memory=1024, gpu_memory_utilization=0.1
        )
    )
    output: options.Output = field(default_factory=partial(options.Output, name=RECORDED))

    def __post_init__(self) -> None:
        if self.repeats < 1:
            raise ValueError(f"repeats must be at least 1, got {self.repeats}")
        if len(self.workload.random_prompts) > 1:
            raise ValueError("--random-prompts has several lengths: acceptance is counted of one")
        if self.workload.max_tokens < 2:
            raise ValueError("an answer of one token has no window: give --max-tokens 2 or more")
        if self.workload.num_prompts > 0:
            pair.load_prompts(self.workload.prompts, self.workload.num_prompts)  # none is to be counted twice

    @property
    def plan(self) -> Plan:
        counted = {**vars(self.workload), "temperatures": self.temperatures, "repeats": self.repeats}
        return Plan(modes=("off",), ks=self.ks, audit=False, **counted)


def passes(plan: Plan, seed: int) -> list[tuple[float, int, int]]:
    """(temperature, repeat, seed of the first request) of each counted pass."""
    every = itertools.product(plan.temperatures, range(plan.repeats))
    return [(temperature, repeat, seed + 1000 * repeat) for temperature, repeat in every if temperature or not repeat]


def count(
    spec: EngineSpec, plan: Plan, prompts: Sequence[list[int]], logs: str = ""
) -> tuple[bench.Rows, dict[str, Any]]:
    """Rows `survival.COUNTS` of vanilla by draft length, temperature and repeat, and every rank's status.

    One engine a draft length: side by side on a GPU, on a CPU as many as have cores of their own.
    """
    settings, every = settings_of("off", audit=False), passes(plan, spec.seed)
    specs = {f"k={k}": (replace(spec, k=k), settings, i * spec.tp) for i, k in enumerate(plan.ks)}
    with bench.started(specs, logs) as engines:
        ends = threading.Event()

        def count_one(name: str) -> bench.Rows:
            rows: bench.Rows = []
            for number, (temperature, repeat, seed) in enumerate(every, 1):
                if ends.is_set():
                    break
                say(f"{name}: pass {number} of {len(every)}, temperature {temperature:g}")
                done = engines[name].generate(prompts, plan.max_tokens, temperature, seed)
                where = {"mode": "off", "k": specs[name][0].k, "temperature": temperature}
                where |= {"repeat": repeat, "seed": seed}
                rows += [{**where, **row} for row in rows_of_generation(done) if row["metric"] in COUNTS]
            return rows

        at_once = max(1, len(os.sched_getaffinity(0)) // spec.tp) if machine.on_cpu() else len(engines)
        with ThreadPoolExecutor(at_once) as pool:  # which waits for what it has begun
            try:
                rows = list(itertools.chain.from_iterable(pool.map(count_one, engines)))
            except BaseException:
                ends.set()
                raise
        return rows, {"ranks": {name: engine.report() for name, engine in engines.items()}}


def claim(run: results.Run, table: pd.DataFrame, at_scale: pd.DataFrame, by_hand: Mapping[str, float]) -> None:
    """Record what must hold of acceptance by `survival`: of a run, `table`, beside the counts at scale.

    The longest k of `table` predicts the rejected share of the others, and is not held against itself. Nothing is
    claimed of draft lengths that were not run.

    by_hand: by what the notebook computes itself, `largest_difference` from the same in `table`.
    """
    for what, apart in by_hand.items():
        run.claim(f"{what}: largest difference from the library's numbers", "< 1e-9", apart, apart < 1e-9)
    lengths, shares = (table[table["metric"] == name] for name in ("acceptance_length", "rejected_share"))
    greedy = lengths.loc[(lengths["temperature"] == 0) & (lengths["k"] == 4), "value"].mean()
    both = shares.merge(at_scale[at_scale["metric"] == "rejected_share"], on=["k", "temperature"])
    shorter = shares[shares["k"] < shares["k"].max()].merge(predict_rejected(table), on=["temperature", "k"])
    apart, off = ((each["value_x"] - each["value_y"]).abs().max() for each in (both, shorter))
    text = "rejected share of written rows at the shorter k: counted against predicted from survival at the longest"
    expectations = (
        ("mean acceptance length, greedy, k=4 (tokens a window by the verifier)", ">= 2.5", greedy, greedy >= 2.5),
        (text, "<= 0.08 apart", off, off <= 0.08),
        ("rejected share of written rows: this run's against that at scale", "<= 0.05 apart", apart, apart <= 0.05),
    )
    for claimed, expected, value, holds in expectations:
        if not math.isnan(value):  # of draft lengths that were not run there is nothing to say
            run.expect(claimed, expected, value, holds)


def largest_difference(mine: pd.DataFrame, table: pd.DataFrame, *columns: str) -> float:
    """The largest difference of numbers that `mine` has from those of a table of `survival`.

    mine: columns `temperature`, `k`, `metric`, `position` (NaN where a number is of whole windows), and `columns`.

    Raises:
        KeyError: `table` has no such number.
    """
    keys = ["temperature", "k", "metric", "position"]
    both = mine.merge(table, on=keys, how="left", suffixes=("_mine", ""), indicator=True)
    if (both["_merge"] != "both").any():
        raise KeyError(f"numbers that the table does not have: {both[both['_merge'] != 'both'][keys].values.tolist()}")
    return float(max((both[f"{column}_mine"] - both[column]).abs().max() for column in columns))


def check_curve(guessed: Sequence[float], found: Sequence[float], within: float = 0.1) -> bool:
    """Say how far a guess of a survival curve is from the one that was counted, in mean absolute error; return whether
    it is closer than `within`."""
    if not len(guessed):
        print(lessons.NOT_YET)
        return False
    if len(guessed) != len(found):
        print(f"{lessons.NOT_YET}: {len(guessed)} numbers, wanted {len(found)}")
        return False
    off = float(np.abs(np.subtract(guessed, found)).mean())
    print(f"{lessons.RIGHT if off < within else lessons.NOT_YET}: off by {off:.3f} a position, wanted below {within}")
    return off < within


def measure(run: results.Run) -> pd.DataFrame:
    """Counts at scale, which the command `nwor acceptance` takes on a GPU and keeps as a table of `run`."""
    run.command("acceptance", "--run-dir", run.directory, "--name", RECORDED)
    return results.read_table(RECORDED, run.directory)


def main(argv: list[str] | None = None) -> int:
    """The command."""
    return bench.bench_command("acceptance", Acceptance, __doc__, argv, show, count)


def show(frame: pd.DataFrame, plan: Plan, report: Mapping[str, Any]) -> int:
    """Print one line a temperature and draft length, and a sentence a temperature."""
    counts = survival(frame)
    print(summary(counts).reset_index().to_string(index=False, float_format="{:.3f}".format))
    print(*verdicts(counts), sep="\n")
    return 0
