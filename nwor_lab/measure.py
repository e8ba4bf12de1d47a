# SPDX-License-Identifier: Apache-2.0
"""`nwor measure [DIR]`: measure on GPUs what `data/recorded/` holds; `nwor measure --record RUN`: record a run there.

What there is to measure is in `measurements.toml`; `--list` shows it. Each measurement is a command with its own GPU,
share of the cores and log; they run side by side, as many as the GPUs hold, those of several ranks first. Left out are
those that need more GPUs than there are, or another release of vLLM. A measurement whose table exists is skipped, so an
interrupted run goes on; one that fails does not stop the others, and the exit code is then 1, as where GPUs are too
few. No table is overwritten: `--again` measures once more into `NAME@2`, `NAME@3` and so on.

`--record` takes such a folder, a whole reproduction run (`results/<run>`), notebooks that `nwor reproduce` ran on GPUs,
or a run of `nwor soak`. It writes a table only when all of its parts are there, or `--partial` names it; what is
recorded stays as it is otherwise. All attempts at a measurement are recorded (column `attempt`), and every median is
over the repeats of all of them. Nothing is recorded where files differed from the commit, rows of a table are of
different builds (`nwor_lab.builds`), or a setting has too few repeats.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import queue
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from nwor.vllm.releases import release_of
from nwor_lab import builds, paths, provenance, results
from nwor_lab.experiments.gpu_steps import gpu_tables
from nwor_lab.kept import keep_table


@dataclass(frozen=True)
class Measurement:
    """A run of `python -m`, as `measurements.toml` describes it; in `command`, `{out}` stands for its folder.

    release: of vLLM that it is of; empty for any.
    """

    command: list[str]
    table: str
    minutes: float
    least_repeats: int = 0
    gpus: int = 1
    release: str = ""
    columns: dict[str, Any] = field(default_factory=dict)

    @property
    def needs(self) -> str:
        """What it runs on, in words."""
        return f"{self.gpus} NVIDIA GPU{'s' * (self.gpus > 1)}{', vLLM ' * bool(self.release)}{self.release}"


def read_matrix(text: str) -> dict[str, Measurement]:
    """Return the measurements that a text as that of `measurements.toml` describes, by name."""
    matrix, found = tomllib.loads(text), dict[str, Measurement]()
    for entry in matrix["measurement"]:
        each = entry.get("each", {})
        for values in itertools.product(*each.values()):
            point = words = dict(zip(each, values, strict=True))
            for axis, value in point.items():
                words = words | matrix["values"].get(axis, {}).get(str(value), {})
            name = entry["name"].format(**words)
            command = matrix["commands"].get(entry["command"], entry["command"]) + " " + entry.get("more", "")
            found[name] = Measurement(
                command.format(**words, name=name, out="{out}").split(),
                entry.get("table", name).format(**words),
                entry["minutes"],
                entry.get("least_repeats", 0),
                point.get("tp", 1),
                entry.get("release", ""),
                {axis: point[axis] for axis in entry.get("columns", ())},
            )
    return found


MEASUREMENTS = read_matrix(Path(__file__).with_name("measurements.toml").read_text())
TABLES = ("reference", "acceptance", "traffic", "steps")
"""Tables that a reproduction run makes."""
TIMES = ("step_ms", "time", "between")
"""Metrics whose repeats are counted."""


def table(directory: Path, attempt: str) -> Path:
    """Return the path of the table of an attempt at a measurement; beside it, as `.json`, lies what made it."""
    return directory / attempt / f"{attempt.partition('@')[0]}.parquet"


def attempts(directory: Path, name: str) -> list[str]:
    """Return the attempts at a measurement that left a table: NAME, NAME@2, ..."""
    every = itertools.chain([name], (f"{name}@{number}" for number in itertools.count(2)))
    return list(itertools.takewhile(lambda attempt: table(directory, attempt).exists(), every))


def measure(directory: Path, only: list[str], again: bool = False) -> list[str]:
    """Run every measurement that has no table yet; return the names of those that failed or need more GPUs.

    Args:
        only: measurements to run; all where it is empty. again: those that have a table are attempted once more.
    """
    import torch

    if why := unrecordable(provenance.probe(provenance.git)):
        print(f"what is measured now cannot be recorded: {why}", flush=True)
    gpus = torch.cuda.device_count()
    visible = (os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(gpus)))).split(",")[:gpus]
    needed = dict[str, Measurement]()
    for name in only or MEASUREMENTS:
        number = len(attempts(directory, name))
        if again or not number:
            needed[f"{name}@{number + 1}" if number else name] = MEASUREMENTS[name]
    installed = release_of(provenance.version("vllm"))
    elsewhere = {name for name, one in needed.items() if one.release not in ("", installed)}
    served = {name: one.gpus for name, one in needed.items() if name not in elsewhere and one.gpus <= gpus}
    cores, free = sorted(os.sched_getaffinity(0)), queue.SimpleQueue[int]()
    share = max(1, len(cores) // max(1, gpus))
    for index in range(gpus):
        free.put(index)

    def run_on(name: str, taken: list[int]) -> bool:
        own = {cores[(index * share + n) % len(cores)] for index in taken for n in range(share)}
        os.sched_setaffinity(0, own)  # of this thread and what it starts
        try:
            return run(directory, name, [visible[index] for index in taken])
        finally:
            for index in taken:
                free.put(index)

    runs = dict[str, Future[bool]]()
    with ThreadPoolExecutor(max(1, gpus)) as threads:
        for name in sorted(served, key=served.__getitem__, reverse=True):
            runs[name] = threads.submit(run_on, name, sorted(free.get() for _ in range(served[name])))
    done = {name: finished.result() for name, finished in runs.items()}
    for name, one in needed.items():
        if name not in served:
            print(f"{name}: left out, it needs {one.needs}", flush=True)
    return [name for name in needed if not done.get(name) and name not in elsewhere]


def run(directory: Path, attempt: str, gpus: list[str]) -> bool:
    """Make an attempt on these GPUs, its output into a log beside its table; return whether it succeeded."""
    out = table(directory, attempt).parent
    out.mkdir(parents=True, exist_ok=True)
    words = MEASUREMENTS[attempt.partition("@")[0]].command
    command = [sys.executable, "-m", *(word.replace("{out}", str(out)) for word in words)]
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": ",".join(gpus)}
    with open(out / "log.txt", "w") as log:
        done = subprocess.run(command, check=False, stdout=log, stderr=subprocess.STDOUT, env=environ, cwd=paths.ROOT)
    print(f"{attempt}: {'failed, see ' + str(out / 'log.txt') if done.returncode else 'done'}", flush=True)
    return not done.returncode


def unrecordable(git: str | Mapping[str, Any]) -> str:
    """Return why nothing of this state of git, or failure to ask it, can be recorded; empty where it can."""
    if isinstance(git, str):
        return f"git could not be asked ({git}): set NWOR_COMMIT"
    changed = ", ".join(git["changed"][:3]) or "says NWOR_COMMIT"
    return "" if git["clean"] else f"files differ from the commit ({changed}): commit them"


def few_repeats(frame: pd.DataFrame, least: int) -> str:
    """Return which setting of a table has the fewest repeats, if they are less than `least`; empty where none has."""
    timed = frame[frame["metric"].isin(TIMES)]
    no_setting = ("repeat", "value", "step", "position", "rank", "build", "run_id")
    setting = [column for column in timed if column not in no_setting]
    counts = timed.groupby(setting, dropna=False, observed=True)["repeat"].nunique()
    if counts.empty or counts.min() >= least:
        return "it has no times" if counts.empty and least else ""
    where = dict(zip(setting, counts.idxmin(), strict=True))
    varied = ", ".join(f"{name} {value}" for name, value in where.items() if timed[name].nunique() > 1)
    return f"{counts.min()} repeats where {least} are needed ({varied or 'everywhere'})"


def read_attempts(directory: Path, name: str) -> tuple[pd.DataFrame, list[dict[str, Any]]]:
    """Return a measurement's table and what made it, of all attempts.

    Repeats are counted on from attempt to attempt, from an even number, since two of them make one ratio
    (`nwor_lab.model.ratios`): so a median over repeats is over those of all attempts.

    Raises:
        ValueError: an attempt is not to be recorded, or they are of different builds; the message says why.
    """
    frames, runs, begin = list[pd.DataFrame](), list[dict[str, Any]](), 0
    for number, attempt in enumerate(attempts(directory, name), 1):
        path = table(directory, attempt)
        if not path.with_suffix(".json").exists():
            raise ValueError(f"{attempt} is not recorded: no {path.stem}.json says what made it; measure it again")
        frame, made = pd.read_parquet(path), json.loads(path.with_suffix(".json").read_text())["provenance"]
        why = unrecordable(made["git"]) or few_repeats(frame, MEASUREMENTS[name].least_repeats)
        if not why and not ("build" in frame and frame["build"].astype(str).str.startswith("k:").all()):
            why = "its rows do not say with which build they were made"
        if why:
            raise ValueError(f"{attempt} is not recorded: {why}; measure it again in another folder")
        about = {"table": MEASUREMENTS[name].table, "name": attempt, "run_id": directory.name}
        runs.append({**about, "build": str(frame["build"].iloc[0]), **kept(made)})
        repeat = {"attempt": number, "repeat": frame["repeat"] + begin}
        frames.append(frame.assign(run_id=directory.name, **repeat, **MEASUREMENTS[name].columns))
        begin += -(-(int(frame["repeat"].max()) + 1) // 2) * 2
    return builds.join(frames), runs


def record(directory: Path, recorded: Path = paths.RECORDED, partial: Collection[str] = ()) -> list[str]:
    """Write those tables of `recorded` that `directory` holds whole.

    Args:
        partial: tables to write even where measurements are missing, unless these are recorded already.

    Returns:
        The names of tables that were not written, though `directory` has some of their measurements or `partial` names
        them, and of measurements that a partial one lacks.

    Raises:
        ValueError: there is none, or one of them is not to be recorded; nothing is written.
    """
    parts: dict[str, list[str]] = {}
    for name, measurement in MEASUREMENTS.items():
        parts.setdefault(measurement.table, []).append(name)
    there = {table: [name for name in names if attempts(directory, name)] for table, names in parts.items()}
    if not any(there.values()):
        raise ValueError(f"no measurement is in {directory}: `nwor measure {directory}` makes them")
    written = [table for table, names in there.items() if names == parts[table] or (names and table in partial)]
    path, tables, runs = recorded / "gpu_runs.json", dict[str, pd.DataFrame](), list[dict[str, Any]]()
    known = json.loads(path.read_text()) if path.exists() else []
    lacking = [name for table in written for name in parts[table] if name not in there[table]]
    if lost := sorted({run["name"] for run in known} & set(lacking)):
        raise ValueError(f"{directory} lacks what is recorded already: {', '.join(lost)}; put it there too")
    for name in written:
        frames = []
        for part in there[name]:
            frame, made = read_attempts(directory, part)
            frames.append(frame)
            runs += made
        tables |= gpu_tables(frames) if name == "gpu_steps" else {name: builds.join(frames)}
    for name, frame in tables.items():
        keep_table(recorded / f"{name}.parquet", frame)
    if written:
        results.write_json(path, [*(run for run in known if run["table"] not in written), *runs])
    asked = [table for table, names in there.items() if names or table in partial]
    return [table for table in asked if table not in written] + lacking


def record_run(run: Path, recorded: Path = paths.RECORDED) -> None:
    """Copy a whole reproduction run's small tables, claims, first figure and manifest to `recorded`.

    The manifest loses what is of one machine: commands, folders and the kernel's name. Of a run on GPUs
    `record_claims_on_gpus` keeps what it has.

    Raises:
        ValueError: a notebook of the run did not end well, or files differed from the commit on GPUs.
    """
    manifest = results.read_manifest(run)
    unfinished = [name for name, entry in manifest["notebooks"].items() if entry["state"] != "done"]
    if unfinished:
        raise ValueError(f"{run} is not whole: {', '.join(unfinished)}; go on with `nwor reproduce --resume`")
    every = {name: entry["provenance"] for name, entry in manifest["notebooks"].items()}
    for made in every.values():
        made["parameters"].pop("run_dir", None)
        for name in ("command", "platform"):
            made.pop(name, None)
    if any(isinstance(made["gpu"], list) for made in every.values()):
        record_claims_on_gpus(run, every, recorded)
        return
    for name in (*TABLES, "claims"):
        keep_table(recorded / f"{name}.parquet", results.read_table(name, run))
    shutil.copy(run / "figures" / "reference_policies.png", recorded)
    results.write_json(recorded / "manifest.json", manifest)


def record_claims_on_gpus(run: Path, every: Mapping[str, dict[str, Any]], recorded: Path) -> None:
    """Keep what notebooks claimed and measured on GPUs as `gpu_claims`, and what notebook 02 compared there.

    every: what made each notebook, its provenance.
    """
    path = recorded / "gpu_claims.parquet"
    if lost := sorted(set(pd.read_parquet(path)["notebook"] if path.exists() else ()) - set(every)):
        raise ValueError(f"{run} lacks what is recorded already: {', '.join(lost)}; run that on GPUs too")
    for name, made in every.items():
        if why := unrecordable(made["git"]):
            raise ValueError(f"{name} of {run} is not recorded: {why}")
    claims = results.claims(run).query("kind == 'claim' and origin == 'measured'").drop(columns=["kind", "origin"])
    keep_table(path, claims.reset_index(drop=True))
    if "02_kernel_correctness" in every:
        compared = results.read_table("kernels", run)
        keep_table(recorded / "kernel_check.parquet", compared[compared["device"] == "cuda"])
    results.write_json(recorded / "gpu_claims.json", {name: kept(made, "parameters") for name, made in every.items()})


def kept(made: Mapping[str, Any], *more: str) -> dict[str, Any]:
    """What is kept of a provenance: when, with what, on what, of which commit, and the entries named in `more`."""
    found = {name: made[name] for name in ("time", "versions", "python", "gpu", "cpu", *more)}
    return {**found, "git": {name: made["git"][name] for name in ("commit", "clean")}}


def record_soak(run: Path, recorded: Path = paths.RECORDED) -> None:
    """Copy the table of a `nwor soak` to `recorded`, and beside it when, where and of which commit it is.

    The table is `soak`, or `gpu_soak` of a machine with GPUs.

    Raises:
        ValueError: files differed from the commit.
    """
    made = json.loads((run / "soak.json").read_text())["provenance"]
    if why := unrecordable(made["git"]):
        raise ValueError(f"{run} is not recorded: {why}")
    name = "gpu_soak" if isinstance(made["gpu"], list) else "soak"  # else why there is none
    keep_table(recorded / f"{name}.parquet", results.read_table("soak", run))
    results.write_json(recorded / f"{name}.json", kept(made, "parameters"))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="nwor measure", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = paths.RESULTS / "gpu"
    parser.add_argument("directory", nargs="?", type=Path, default=default, help="folder for what is measured")
    parser.add_argument(
        "--only", nargs="+", default=[], choices=list(MEASUREMENTS), metavar="NAME", help="measure these"
    )
    parser.add_argument("--again", action="store_true", help="measure once more what has a table, beside it as NAME@2")
    parser.add_argument("--list", action="store_true", help="show what there is to measure, and measure nothing")
    parser.add_argument("--record", type=Path, metavar="RUN", help="record this folder, and measure nothing")
    tables = {one.table for one in MEASUREMENTS.values()}
    about = "record these tables even where measurements are missing"
    parser.add_argument("--partial", nargs="+", default=[], choices=sorted(tables), metavar="TABLE", help=about)
    options = parser.parse_args(argv)
    if options.partial and not options.record:
        parser.error("--partial says what to record: name the folder with --record")
    if options.list:
        for name, one in MEASUREMENTS.items():
            print(f"{name:32} about {one.minutes:g} minutes on {one.needs}, for {one.table}")
        return 0
    run, missing = options.record, list[str]()
    try:
        if run and not run.is_dir():
            raise FileNotFoundError(f"no folder {run}")
        if not run:
            missing = measure(results.check_folder(options.directory).resolve(), options.only, options.again)
        elif (run / "manifest.json").exists():
            record_run(run.resolve())
        elif (run / "soak.json").exists():
            record_soak(run.resolve())
        else:
            missing = record(run.resolve(), partial=options.partial)
    except (OSError, ValueError) as error:
        print(f"nwor measure: {error}", file=sys.stderr)
        return 2
    print(f"{'not recorded' if run else 'missing'}: {', '.join(missing) or 'none'}")
    return int(bool(missing))


if __name__ == "__main__":
    sys.exit(main())
