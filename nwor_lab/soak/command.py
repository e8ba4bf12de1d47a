# SPDX-License-Identifier: Apache-2.0
"""Random traffic on real vLLM engines, every step of each mode audited and every text beside vanilla's.

    nwor soak --minutes 20 --modes cow,stage

An episode starts vanilla and the modes in one configuration, by its seed, and hypothesis draws the scripts of arrivals
and aborts that they serve. The first fault ends the soak: hypothesis looks for a smaller script that still shows it,
and `--seed` with the seed of its episode runs the same again.

With ``VLLM_KV_AUDIT`` set, vanilla too is under the sampled auditor (`kv_audit/`), and any finding is a fault.

A run is clean if it has no fault and drafts were accepted and rejected under each mode; one in which none was is
incomplete, and ends with a status of its own.
"""

from __future__ import annotations

import datetime
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any

import hypothesis
import pandas as pd
from tyro.conf import arg

from nwor.settings import CLEAN
from nwor_lab import command_line, paths, progress
from nwor_lab.bench.bench import STOPPED, fail_kept, started
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
        self.spec, self.modes, self._served = spec, modes, 0
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
        self._served += 1
        progress.say(f"script {self._served}, {len(requests)} requests", plain=False)
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
            ranks = served[mode].result().ranks if not verdict.faults["died"] else []
            if sampled := [rank["sampled"]["counts"]["checked"] for rank in ranks if rank.get("sampled")]:
                self.verdicts[mode].counts["slots sampled"] = sum(sampled)  # since the engine's start
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


@dataclass(frozen=True)
class Soak:
    minutes: float = 20
    """of the run; a script begun is not cut"""
    seed: int = 0
    """of the first episode; the others count on from it"""
    modes: Annotated[tuple[str, ...], arg(aliases=("--mode",))] = CLEAN
    """modes beside vanilla: cow, stage or both"""
    tp: int = 0
    """tensor-parallel ranks; 0: two for every fifth seed"""

    def __post_init__(self) -> None:
        command_line.check_names("--modes", self.modes, CLEAN)
        if not self.modes or len(set(self.modes)) < len(self.modes):
            raise ValueError(f"--modes must be different ones, got {','.join(self.modes)}")
        if self.minutes <= 0 or self.tp < 0:
            raise ValueError("--minutes must be above 0, --tp 0 or more")


def soak(asked: Soak) -> int:
    """Run episodes until the minutes are over, at least one; print what they found; returns the exit status.

    What was counted is kept in `soak.parquet` of a new folder of results/, that of whole episodes too where one is
    interrupted or its engines fail.
    """
    directory = results.check_folder(paths.RESULTS / f"{datetime.datetime.now():soak-%Y%m%d-%H%M%S}")
    begin, rows, fault, ended, number = time.monotonic(), list[dict[str, Any]](), "", "", 0
    end, totals = begin + 60 * asked.minutes, {mode: Verdict() for mode in asked.modes}
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # engines share the cores, and threads that wait there would spin
    shown = ("method", "draft", "k", "tp", "dtype", "batch", "num_blocks", "block_size", "prefix_caching", "seed")
    try:
        while not fault and (not number or time.monotonic() < end):
            spec = scripts.configuration(asked.seed + number, asked.tp)
            episode, start = Episode(spec, asked.modes), time.monotonic()
            print(f"episode {number}: {', '.join(f'{name}={getattr(spec, name)}' for name in shown)}", flush=True)
            with progress.moving():
                fault = episode.run(end)
            seconds = {"mode": "", "metric": "seconds", "value": time.monotonic() - start, "unit": "s"}
            rows += [{"episode": number, **row} for row in (*episode.rows(), seconds)]
            for mode, verdict in episode.verdicts.items():
                totals[mode].add(verdict)
            number += 1
    except (KeyboardInterrupt, EngineError) as stopped:
        if not rows:
            directory.rmdir()
            raise
        ended = str(stopped) or STOPPED
    table = results.write_table(directory / "soak.parquet", results.tidy(rows, run_id=directory.name))
    results.write_provenance(table, asdict(asked))

    print(f"\n{number} episodes in {(time.monotonic() - begin) / 60:.1f} minutes; counts are in {table}")
    counted = pd.DataFrame({mode: verdict.table() for mode, verdict in totals.items()})
    print(counted.fillna(0).astype(int).to_string())
    if ended:
        return fail_kept("soak", ended, "episodes")
    if fault:
        again = f"nwor soak --seed {asked.seed + number - 1} --modes {','.join(asked.modes)} --tp {asked.tp}"
        print(f"\n{fault}\n\nagain: {again}")
        print(f"verdict: a fault, {', '.join(sorted(set().union(*(each.faults for each in totals.values()))))}")
        return 1
    if untried := [f"{words} under {mode}" for mode, verdict in totals.items() for words in verdict.untried]:
        print(f"verdict: incomplete, {', '.join(untried)}; let it run longer")
        return INCOMPLETE
    print("verdict: clean; drafts were accepted and rejected under each mode")
    return 0


def main(argv: list[str] | None = None) -> int:
    """The command; 0 if the run is clean, 1 with a fault, 2 for wrong input, 3 if it is incomplete, 130 if it was
    interrupted."""
    try:
        asked = command_line.parse(Soak, argv, "nwor soak", __doc__ or "")
        return soak(asked)
    except (ValueError, OSError, EngineError) as error:
        return command_line.fail("nwor soak", error, 1 if isinstance(error, EngineError) else 2)
    except KeyboardInterrupt:
        return command_line.fail("nwor soak", "interrupted in its first episode, nothing was written", 130)
