# SPDX-License-Identifier: Apache-2.0
"""One configuration's engines, vanilla and each mode, under the same scripts; and a failure that can be replayed."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from nwor.settings import Settings
from nwor_lab import paths, results
from nwor_lab.engines.engine import EngineError, EngineSpec
from nwor_lab.engines.traffic import Event
from nwor_lab.experiments.bench import started
from nwor_lab.experiments.plan import settings_of
from nwor_lab.soak import script
from nwor_lab.soak.judge import Verdict, judge

Script = tuple[int, Sequence[Event]]
"""Its seed and its events."""


def served(spec: EngineSpec, modes: Sequence[str], scripts: Iterable[Script]) -> Iterator[dict[str, Verdict]]:
    """Verdicts by mode on each script, up to the first with a fault. An engine that fails is a fault of its mode."""
    # Engines share the cores, and threads that wait for each other there would spin.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    every = ("off", *modes)
    settings = {mode: replace(settings_of(mode, audit=mode != "off"), debug_sync=False) for mode in every}
    wanted = {mode: (spec, one, 0) for mode, one in settings.items()}  # which count, and do not stop
    # On a CPU each rank has a core of its own; engines that would share them all follow each other.
    at_once = 1 if 2 * spec.tp > len(os.sched_getaffinity(0)) else len(every)
    with started(wanted, "") as engines, ThreadPoolExecutor(at_once) as pool:
        for seed, events in scripts:
            made = {mode: pool.submit(engines[mode].traffic, events, seed) for mode in every}
            verdicts = {}
            for mode in modes:
                try:
                    verdicts[mode] = judge(events, made["off"].result(), made[mode].result(), mode, spec.dtype)
                except EngineError as error:
                    verdicts[mode] = Verdict()
                    verdicts[mode].blame("died", 1, str(error))
            yield verdicts
            if any(verdict.faults for verdict in verdicts.values()):
                return


@dataclass
class Episode:
    """What an episode found: verdicts by mode, scripts served, seconds, and the files that replay its failures."""

    number: int
    spec: EngineSpec
    verdicts: dict[str, Verdict]
    scripts: int = 0
    seconds: float = 0.0
    replays: list[str] = field(default_factory=list)


def run(number: int, spec: EngineSpec, modes: Sequence[str], scripts: int, deadline: float, directory: Path) -> Episode:
    """Serve scripts until there are `scripts` of them, or `deadline` (`time.monotonic`) is over, or one fails.

    directory: for the replay of a mode that failed, which has all scripts that its engine served.
    """
    begin = time.monotonic()
    episode = Episode(number, spec, {mode: Verdict() for mode in modes})
    drawn: list[Script] = []

    def draw() -> Iterator[Script]:
        while len(drawn) < scripts and (not drawn or time.monotonic() < deadline):
            seed = spec.seed * 10**6 + number * 10**3 + len(drawn)
            drawn.append((seed, script.script(seed, spec)))
            yield drawn[-1]

    for verdicts in served(spec, modes, draw()):
        for mode, verdict in verdicts.items():
            episode.verdicts[mode].add(verdict)
    episode.scripts = len(drawn)
    for mode, verdict in episode.verdicts.items():
        if verdict.faults:
            file = directory / f"replay-{number}-{mode}.json"
            write_replay(file, spec, mode, drawn, verdict)
            episode.replays.append(file.name)
    episode.seconds = time.monotonic() - begin
    return episode


def write_replay(file: Path, spec: EngineSpec, mode: str, scripts: Sequence[Script], verdict: Verdict) -> None:
    """Write what `read_replay` reads: the configuration, the mode, the scripts, and what failed."""
    ours = asdict(spec) | {"model": _relative(spec.model), "draft": _relative(spec.draft)}
    said = {
        "command": f"nwor soak --replay {file}",
        "mode": mode,
        "faults": verdict.faults,
        "examples": verdict.examples,
    }
    written = [{"seed": seed, "events": [asdict(event) for event in events]} for seed, events in scripts]
    results.write_json(file, {**said, "spec": ours, "scripts": written})


def read_replay(file: Path) -> tuple[EngineSpec, str, list[Script]]:
    """What `write_replay` wrote: the configuration, the mode and the scripts.

    Raises:
        ValueError: it is no such file.
    """
    script.contrary()  # a drafter that may not be there in this checkout yet
    try:
        given = json.loads(file.read_text(encoding="utf-8"))
        ours = given["spec"] | {"cudagraph_capture_sizes": tuple(given["spec"]["cudagraph_capture_sizes"])}
        ours |= {name: str(paths.ROOT / ours[name]) for name in ("model", "draft") if ours[name]}
        scripts: list[Script] = [(one["seed"], [Event(**event) for event in one["events"]]) for one in given["scripts"]]
        return EngineSpec(**ours), Settings(given["mode"]).mode, scripts
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file} is no replay of a soak ({type(error).__name__}: {error}); name one") from error


def _relative(path: str) -> str:
    """A path below the checkout without the checkout, so that a replay serves in another."""
    return os.path.relpath(path, paths.ROOT) if path.startswith(str(paths.ROOT)) else path
