# SPDX-License-Identifier: Apache-2.0
"""`nwor soak`: random traffic on real vLLM engines, every step of each mode audited and every text beside vanilla's.

An episode starts vanilla and the modes in one configuration, by its seed, and hypothesis draws the scripts of arrivals
and aborts that they serve. The first fault ends the soak: hypothesis looks for a smaller script that still shows it,
and `--seed` with the seed of its episode runs the same again.

A run is clean if it has no fault and drafts were accepted, rejected, and both in one window, under each mode; one in
which some of that did not occur is incomplete, and ends with a status of its own.
"""

from __future__ import annotations

import argparse
import datetime
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import hypothesis
import pandas as pd

from nwor.settings import CLEAN
from nwor_lab import paths
from nwor_lab.bench.bench import started
from nwor_lab.bench.plan import settings_of
from nwor_lab.engines.engine import Engine, EngineError, EngineSpec
from nwor_lab.run import results
from nwor_lab.soak import scripts
from nwor_lab.soak.judge import Verdict, judge

SCRIPTS = 25
"""Of an episode."""
INCOMPLETE = 3
"""How a run ends that has no fault, and has not tried all that may become of drafts."""


class Episode:
    """Vanilla and `modes` in one configuration, and the verdicts on what they serve."""

    def __init__(self, spec: EngineSpec, modes: Sequence[str]) -> None:
        self.spec, self.modes = spec, modes
        self.verdicts = {mode: Verdict() for mode in modes}
        self._stack, self._engines = ExitStack(), dict[str, Engine]()

    def serve(self, requests: list[scripts.Request]) -> None:
        """Serve a script everywhere; AssertionError where a mode has a fault. Engines start for the first script, and
        again after one has died."""
        every = ("off", *self.modes)
        if not self._engines:
            settings = {mode: replace(settings_of(mode, audit=mode != "off"), debug_sync=False) for mode in every}
            wanted = {mode: (self.spec, one, 0) for mode, one in settings.items()}  # which count, and do not stop
            self._engines = self._stack.enter_context(started(wanted, ""))
        # A near tie is known by its log-probabilities, and they cost time: float32 has hardly any.
        events = scripts.events(requests, logprobs=5 if self.spec.dtype == "float32" else 20)
        # On a CPU each rank has a core of its own; engines that would share them all follow each other.
        at_once = 1 if 2 * self.spec.tp > len(os.sched_getaffinity(0)) else len(every)
        with ThreadPoolExecutor(at_once) as pool:
            served = {mode: pool.submit(self._engines[mode].traffic, events, self.spec.seed) for mode in every}
        faults = []
        for mode in self.modes:
            verdict = Verdict()
            try:
                verdict = judge(events, served["off"].result(), served[mode].result(), mode, self.spec.dtype)
            except EngineError as error:
                verdict.blame("died", 1, str(error))
                self.close()
            self.verdicts[mode].add(verdict)
            faults += [f"{mode}: {example}" for example in verdict.examples]
        if faults:
            raise AssertionError("\n".join(faults))

    def run(self, deadline: float) -> str:
        """Serve `SCRIPTS` scripts, or those that begin before `deadline` (`time.monotonic`), at least one.

        Returns:
            The faults of the smallest script that shows some, and that script; empty where there is none.
        """
        begun = failed = False

        @hypothesis.seed(self.spec.seed)
        @hypothesis.settings(
            max_examples=SCRIPTS, deadline=None, database=None, report_multiple_bugs=False,
            suppress_health_check=list(hypothesis.HealthCheck),
            phases=(hypothesis.Phase.generate, hypothesis.Phase.shrink),
        )  # fmt: skip
        @hypothesis.given(script=scripts.SCRIPTS)
        def serve(script: list[scripts.Request]) -> None:
            nonlocal begun, failed
            if begun and not failed and time.monotonic() > deadline:
                return
            begun = True
            try:
                self.serve(script)
            except AssertionError:
                failed = True
                raise

        try:
            serve()
        except (AssertionError, hypothesis.errors.Flaky) as error:
            return "\n".join([str(error), *getattr(error, "__notes__", [])])
        finally:
            self.close()
        return ""

    def close(self) -> None:
        self._stack.close()
        self._engines = {}

    def rows(self) -> list[dict[str, Any]]:
        """What its modes served, tidy."""
        common = {"seed": self.spec.seed, "k": self.spec.k, "tp": self.spec.tp, "unit": "1"}
        tables = {mode: verdict.table() for mode, verdict in self.verdicts.items()}
        return [{**common, "mode": m, "metric": n, "value": v} for m, found in tables.items() for n, v in found.items()]


def soak(minutes: float, seed: int, modes: Sequence[str], tp: int) -> int:
    """Run episodes until the minutes are over, at least one; print what they found; returns the exit status.

    What was counted is kept in `soak.parquet` of a new folder of results/.
    """
    directory = paths.RESULTS / f"{datetime.datetime.now():soak-%Y%m%d-%H%M%S}"
    begin, rows, fault, number = time.monotonic(), list[dict[str, Any]](), "", 0
    totals = {mode: Verdict() for mode in modes}
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # engines share the cores, and threads that wait there would spin
    while not fault and (not number or time.monotonic() < begin + 60 * minutes):
        episode, start = Episode(scripts.configuration(seed + number, tp), modes), time.monotonic()
        shown = ("method", "draft", "k", "tp", "dtype", "batch", "num_blocks", "block_size", "prefix_caching", "seed")
        print(f"episode {number}: {', '.join(f'{n}={getattr(episode.spec, n)}' for n in shown)}", flush=True)
        fault = episode.run(begin + 60 * minutes)
        seconds = {"mode": "", "metric": "seconds", "value": time.monotonic() - start, "unit": "s"}
        rows += [{"episode": number, **row} for row in (*episode.rows(), seconds)]
        for mode, verdict in episode.verdicts.items():
            totals[mode].add(verdict)
        number += 1
    table = results.write_table(directory / "soak.parquet", results.tidy(rows, run_id=directory.name))
    results.write_provenance(table, {"minutes": minutes, "seed": seed, "mode": ",".join(modes), "tp": tp})

    print(f"\n{number} episodes in {(time.monotonic() - begin) / 60:.1f} minutes; counts are in {table}")
    counted = pd.DataFrame({mode: verdict.table() for mode, verdict in totals.items()})
    print(counted.fillna(0).astype(int).to_string())
    if fault:
        print(f"\n{fault}\n\nagain: nwor soak --seed {seed + number - 1} --mode {','.join(modes)} --tp {tp}")
        print(f"verdict: a fault, {', '.join(sorted(set().union(*(each.faults for each in totals.values()))))}")
        return 1
    if untried := [f"{words} under {mode}" for mode, verdict in totals.items() for words in verdict.untried]:
        print(f"verdict: incomplete, {', '.join(untried)}; let it run longer")
        return INCOMPLETE
    print("verdict: clean; drafts were accepted, rejected, and both in one window, under each mode")
    return 0


def main(argv: list[str] | None = None) -> int:
    """The command; 0 if the run is clean, 1 with a fault, 2 for wrong input, 3 if it is incomplete."""
    parser = argparse.ArgumentParser(
        prog="nwor soak", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    modes = ",".join(CLEAN)
    parser.add_argument("--minutes", type=float, default=20, help="of the run; a script begun is not cut (20)")
    parser.add_argument("--seed", type=int, default=0, help="of the first episode; the others count on from it (0)")
    parser.add_argument("--mode", default=modes, help=f"modes beside vanilla, of {modes} ({modes})")
    parser.add_argument("--tp", type=int, default=0, help="tensor-parallel ranks; 0: two for every fifth seed (0)")
    asked = parser.parse_args(argv)
    chosen = asked.mode.split(",")
    try:
        if not set(chosen) <= set(CLEAN) or len(set(chosen)) < len(chosen):
            raise ValueError(f"--mode {asked.mode}: choose different ones of {modes}")
        if asked.minutes <= 0 or asked.tp < 0:
            raise ValueError("--minutes must be above 0, --tp 0 or more")
        return soak(asked.minutes, asked.seed, chosen, asked.tp)
    except (ValueError, OSError, EngineError) as error:
        print(f"nwor soak: {error}", file=sys.stderr)
        return 1 if isinstance(error, EngineError) else 2
