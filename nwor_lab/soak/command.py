# SPDX-License-Identifier: Apache-2.0
"""`nwor soak`: random traffic on real vLLM engines, every step of each mode audited and every text beside vanilla's.

An episode starts vanilla and the modes in one configuration that the seed draws, and serves scripts of arrivals, joins
and aborts that it draws too. A fault ends it, and what it served is kept in a file that `--replay` runs. Finished
episodes stay in the run's folder, where `--resume` goes on.

A run is clean if it has no fault and drafts were accepted, rejected, and both in one window, under each mode; one in
which some of that did not occur is incomplete, and ends with a status of its own.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from nwor.settings import CLEAN
from nwor_lab import paths, results
from nwor_lab.engines.engine import EngineError, EngineSpec
from nwor_lab.soak import episode as episodes
from nwor_lab.soak import script
from nwor_lab.soak.judge import Verdict

SHOWN = ("method", "k", "tp", "dtype", "batch", "num_blocks", "block_size", "seed")
"""Of an episode's configuration, columns of the table."""
FOLDER = "soak-%Y%m%d-%H%M%S"
INCOMPLETE = 3
"""How a run ends that has no fault, and has not tried all that may become of drafts."""
DEFAULTS: dict[str, Any] = {"minutes": 20.0, "seed": 0, "mode": "cow,stage", "tp": 0, "scripts": 64}


def main(argv: list[str] | None = None) -> int:
    """The command; 0 if the run is clean, 1 with a fault, 2 for wrong input, 3 if it is incomplete."""
    given = _parser().parse_args(argv)
    again = ""
    try:
        if given.replay:
            run = partial(replay, *episodes.read_replay(Path(given.replay)))
        else:
            asked = {name: value for name in DEFAULTS if (value := getattr(given, name)) is not None}
            directory, options = _open_run(given.resume, asked)
            run, again = partial(soak, directory, options), f"; `nwor soak --resume {directory.name}` goes on"
    except (ValueError, OSError) as error:
        print(f"nwor soak: {error}", file=sys.stderr)
        return 2
    try:
        return run()
    except EngineError as error:
        print(f"nwor soak: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"nwor soak: stopped{again}", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="nwor soak", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    text = {
        "minutes": "minutes of the whole run, its earlier parts included; an episode begun is not cut inside a script",
        "seed": "draws configurations and scripts",
        "mode": f"modes beside vanilla, of {','.join(CLEAN)}",
        "tp": "tensor-parallel ranks; 0 for one, and two in every fifth episode",
        "scripts": "scripts of an episode, at most 1000",
    }
    for name, default in DEFAULTS.items():
        parser.add_argument(f"--{name}", type=type(default), help=f"{text[name]} (default: {default})")
    parser.add_argument("--resume", metavar="RUN", default="", help="go on with this run of results/, by its options")
    parser.add_argument(
        "--replay", metavar="FILE", default="", help="run what a failing episode wrote, and nothing else"
    )
    return parser


def _open_run(resume: str, asked: dict[str, Any]) -> tuple[Path, dict[str, Any]]:
    """The run's folder and its options, those of a run that is resumed but for its minutes.

    Raises:
        ValueError, OSError: an option is impossible, or the folder cannot be used.
    """
    if resume:
        directory = paths.RESULTS / resume
        if not (request := directory / "request.json").is_file():
            raise ValueError(f"--resume {resume}: there is no soak in {directory}; name a folder of results/")
        if more := sorted(asked.keys() - {"minutes"}):
            raise ValueError(
                f"--resume takes the options of its run: leave out {', '.join('--' + name for name in more)}"
            )
        options = json.loads(request.read_text(encoding="utf-8")) | asked
    else:
        directory = paths.RESULTS / f"{datetime.datetime.now():{FOLDER}}"
        if directory.exists():
            raise ValueError(
                f"{directory} is another run's: start again, or go on with it by --resume {directory.name}"
            )
        options = DEFAULTS | asked
    modes = options["mode"].split(",")
    if not set(modes) <= set(CLEAN) or len(set(modes)) < len(modes):
        raise ValueError(f"--mode {options['mode']}: choose different ones of {','.join(CLEAN)}")
    if options["minutes"] <= 0 or not 1 <= options["scripts"] <= 1000 or options["tp"] < 0:
        raise ValueError("--minutes must be above 0, --scripts 1 to 1000, --tp 0 or more")
    script.configuration(options["seed"], 0, options["tp"])  # heads that do not divide over the ranks
    results.check_folder(directory)
    results.write_json(directory / "request.json", options)
    return directory, options


def replay(spec: EngineSpec, mode: str, scripts: Sequence[episodes.Script]) -> int:
    """Serve the scripts of a failure once more; returns the exit status."""
    verdict = Verdict()
    for found in episodes.served(spec, [mode], scripts):
        verdict.add(found[mode])
    print("\n".join([str(verdict), *verdict.examples]))
    return int(bool(verdict.faults))


def soak(directory: Path, options: dict[str, Any]) -> int:
    """Run episodes until the minutes are over, at least one; returns the exit status.

    What the finished ones found is in `soak.parquet`, by which a run that is resumed goes on.
    """
    modes, path = options["mode"].split(","), directory / "soak.parquet"
    tables = [pd.read_parquet(path)] if path.exists() else []
    number = sum(table["episode"].nunique() for table in tables)
    spent = sum(table.loc[table["metric"] == "seconds", "value"].sum() for table in tables)
    deadline = time.monotonic() + 60 * options["minutes"] - spent
    print(f"soak of {options['minutes']:g} minutes, seed {options['seed']}, in {directory}", flush=True)
    if number:
        print(f"{number} episodes are finished", flush=True)
    while not number or time.monotonic() < deadline:
        spec = script.configuration(options["seed"], number, options["tp"])
        drawn = (
            f"{name}={getattr(spec, name)}" for name in ("draft", *SHOWN, "max_num_batched_tokens", "prefix_caching")
        )
        print(f"episode {number}: {', '.join(drawn)}", flush=True)
        found = episodes.run(number, spec, modes, options["scripts"], _end(number, deadline), directory)
        for mode, verdict in found.verdicts.items():
            print(f"  {mode:6} {found.scripts} scripts, {found.seconds:.0f} s: {verdict}", flush=True)
            print("".join(f"         {example}\n" for example in verdict.examples), end="")
        for file in found.replays:
            print(f"  replay: nwor soak --replay {directory / file}", flush=True)
        tables = [pd.concat([*tables, _table(found, directory.name)], ignore_index=True)]
        results.write_provenance(results.write_table(path, tables[0]), options)
        number += 1
    every = tables[0].groupby(["metric", "unit", "mode"], sort=False)["value"].sum()
    layer_steps, seconds = int(every["layer-steps"].sum()), every["seconds"].sum()
    print(f"total: {number} episodes, {layer_steps:,} layer-steps audited in {seconds:.0f} s")
    untried = []
    for mode in modes:
        sums = every.xs(mode, level="mode").astype(int)
        counts, faults = (sums.xs(unit, level="unit").to_dict() for unit in ("count", "faults"))
        scripts, _ = counts.pop("scripts"), faults.pop("faults")
        verdict = Verdict(Counter(counts), Counter(faults))
        print(f"  {mode:6} {scripts} scripts: {verdict}")
        untried += [f"{words} under {mode}" for words in verdict.untried]
    if number_of_faults := int(every["faults"].sum()):
        print(f"verdict: {number_of_faults:,} faults")
        return 1
    if untried:
        more = f"nwor soak --resume {directory.name} --minutes {2 * options['minutes']:g}"
        print(f"verdict: incomplete: {', '.join(untried)}; `{more}` goes on")
        return INCOMPLETE
    print("verdict: clean; drafts were accepted, rejected, and both in one window, under each mode")
    return 0


def _end(number: int, deadline: float) -> float:
    """When episode `number` ends: the first ones share the time, so that a short run meets every drafter."""
    now = time.monotonic()
    return now + (deadline - now) / max(1, len(script.DRAFTERS) - number)


def _table(found: episodes.Episode, run_id: str) -> pd.DataFrame:
    """Tidy rows of an episode: counts and faults of each mode, scripts and seconds."""
    common = {name: getattr(found.spec, name) for name in SHOWN}
    common |= {"episode": found.number, "model": Path(found.spec.model).parent.name, "run_id": run_id}
    rows: list[dict[str, Any]] = [{"mode": "", "metric": "seconds", "value": found.seconds, "unit": "s"}]
    for mode, verdict in found.verdicts.items():
        counts = {**verdict.counts, "scripts": found.scripts}
        faults = {**verdict.faults, "faults": verdict.faults.total()}
        rows += [{"mode": mode, "metric": name, "value": value, "unit": "count"} for name, value in counts.items()]
        rows += [{"mode": mode, "metric": name, "value": value, "unit": "faults"} for name, value in faults.items()]
    return results.tidy(rows, **common)
