# SPDX-License-Identifier: Apache-2.0
"""`nwor soak`: random traffic on real vLLM engines, every step of each mode audited and every text beside vanilla's.

An episode starts vanilla and the modes in one configuration that the seed draws, and serves scripts of arrivals, joins
and aborts that it draws too. A fault ends it: its script is made as short as still fails, and kept in a file that
`--replay` runs. Finished episodes stay in the run's folder, where `--resume` goes on.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nwor.settings import CLEAN
from nwor_lab import paths, results
from nwor_lab.engines.engine import EngineError, EngineSpec
from nwor_lab.soak import episode as episodes
from nwor_lab.soak import script
from nwor_lab.soak.judge import Verdict

RUNS = 60
"""Times that a failing script is run again to shorten it, at most."""
DEFAULTS: dict[str, Any] = {"minutes": 20.0, "seed": 0, "mode": "cow,stage", "tp": 0, "scripts": 64}


def main(argv: list[str] | None = None) -> int:
    """The command; 0 without a fault, 1 with one, 2 for wrong input."""
    parser = _parser()
    given = parser.parse_args(argv)
    asked = {name: value for name in DEFAULTS if (value := getattr(given, name)) is not None}
    try:
        if given.replay:
            verdict = episodes.replay(Path(given.replay))
            print("\n".join([str(verdict), *verdict.examples]))
            return int(bool(verdict.faults))
        directory, options = _open_run(given.resume, asked)
    except (ValueError, OSError) as error:
        print(f"nwor soak: {error}", file=sys.stderr)
        return 2
    except EngineError as error:
        print(f"nwor soak: {error}", file=sys.stderr)
        return 1
    try:
        return soak(directory, options)
    except EngineError as error:
        print(f"nwor soak: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"nwor soak: stopped; `nwor soak --resume {directory.name}` goes on", file=sys.stderr)
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
        directory = paths.RESULTS / f"soak-{datetime.datetime.now():%Y%m%d-%H%M%S}"
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


def soak(directory: Path, options: dict[str, Any]) -> int:
    """Run episodes until the minutes are over, at least one; returns the exit status."""
    modes = options["mode"].split(",")
    finished = [json.loads(file.read_text(encoding="utf-8")) for file in sorted(directory.glob("episodes/*.json"))]
    spent = sum(one["seconds"] for one in finished)
    deadline = time.monotonic() + 60 * options["minutes"] - spent
    print(f"soak of {options['minutes']:g} minutes, seed {options['seed']}, in {directory}", flush=True)
    for one in finished:
        print(f"episode {one['number']} is finished", flush=True)
    while not finished or time.monotonic() < deadline:
        number = len(finished)
        spec = script.configuration(options["seed"], number, options["tp"])
        print(f"episode {number}: {_words(spec)}", flush=True)
        found = episodes.run(number, spec, modes, options["scripts"], deadline, directory, RUNS)
        one = found.as_json()
        results.write_json(directory / "episodes" / f"{number:04d}.json", one)
        finished.append(one)
        _show(found.verdicts, f"{found.scripts} scripts, {found.seconds:.0f} s: ")
        for file in found.replays:
            print(f"  replay: nwor soak --replay {directory / file}", flush=True)
        table = results.write_table(directory / "soak.parquet", results.tidy(_rows(finished), run_id=directory.name))
        results.write_provenance(table, options)
    total = {mode: Verdict() for mode in modes}
    for one in finished:
        for mode in modes:
            total[mode].add(Verdict(**one["verdicts"][mode]))
    seconds = sum(one["seconds"] for one in finished)
    layer_steps = sum(verdict.counts["layer-steps"] for verdict in total.values())
    print(f"total: {len(finished)} episodes, {layer_steps:,} layer-steps audited in {seconds:.0f} s")
    _show(total)
    return int(any(verdict.faults for verdict in total.values()))


def _words(spec: EngineSpec) -> str:
    caching = "prefix caching" if spec.prefix_caching else "no prefix caching"
    return (
        f"{spec.method} {Path(spec.draft).name}".strip() + f", k={spec.k}, {spec.dtype}, tp={spec.tp}, "
        f"batch {spec.batch}, {spec.num_blocks} blocks of {spec.block_size}, "
        f"{spec.max_num_batched_tokens} tokens a step, {caching}"
    )


def _show(verdicts: dict[str, Verdict], before: str = "") -> None:
    for mode, verdict in verdicts.items():
        print(f"  {mode:6} {before}{verdict}", flush=True)
        for example in verdict.examples:
            print(f"         {example}")


def _rows(finished: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Tidy rows of all episodes: counts and faults of each mode, scripts and seconds."""
    rows = []
    for one in finished:
        spec = one["spec"]
        common = {name: spec[name] for name in ("tp", "k", "batch", "seed", "dtype", "block_size", "num_blocks")}
        common |= {"episode": one["number"], "model": Path(spec["model"]).parent.name, "method": spec["method"]}
        for mode, verdict in one["verdicts"].items():
            for unit, counts in (("count", verdict["counts"]), ("faults", verdict["faults"])):
                rows += [common | {"mode": mode, "metric": m, "value": v, "unit": unit} for m, v in counts.items()]
            rows.append(
                common | {"mode": mode, "metric": "faults", "value": sum(verdict["faults"].values()), "unit": "faults"}
            )
            rows.append(common | {"mode": mode, "metric": "scripts", "value": one["scripts"], "unit": "count"})
        rows.append(common | {"mode": "", "metric": "seconds", "value": one["seconds"], "unit": "s"})
    return rows


if __name__ == "__main__":
    sys.exit(main())
