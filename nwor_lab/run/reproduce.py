# SPDX-License-Identifier: Apache-2.0
"""Run the notebooks with papermill, once or at every point of a grid of parameters, and report what they claim.

    nwor reproduce                                                every notebook, as `make reproduce` does
    nwor reproduce -p k 3                                         the same, each that has a parameter k with k=3
    nwor reproduce --only 06 -p k 4 --run k4                      one notebook, by the beginning of its name
    nwor reproduce --only 04 --grid k=1,3 tp=1,2                  a grid of four points, each in a folder of its own
    nwor reproduce --resume --run k4                              go on with what was interrupted or failed

`results/<run>/` then holds the executed notebooks, their tables, figures, claims and logs, `manifest.json`, and
`index.html` to read all of it. In a grid each point is such a folder, and `grid.csv` has what was measured at each. A
notebook that fails does not stop those after it; the run fails at its end. A notebook fails, too, when one of its cells
takes longer than `--cell-minutes`. A resumed run skips what the manifest calls whole, while notebook and parameters are
unchanged.
"""

from __future__ import annotations

import datetime
import functools
import hashlib
import json
import os
import sys
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
from tyro.conf import FlagCreatePairsOff, UseAppendAction, arg

from nwor_lab import command_line, machine, paths, progress
from nwor_lab.run import claims as claim_table
from nwor_lab.run import grid, parameters, report, results

CELL_MINUTES = 120.0


def notebooks(only: list[str] | None = None) -> list[Path]:
    """Return the notebooks in order; `only` names some of them, each by its name or the beginning of that.

    Raises:
        FileNotFoundError: a name is no notebook.
    """
    found = {path.stem: path for path in sorted(paths.NOTEBOOKS.glob("[0-9]*.ipynb"))}
    wanted = [Path(name).stem for name in only or found]
    if unknown := [name for name in wanted if not name or not any(one.startswith(name) for one in found)]:
        raise FileNotFoundError(f"no notebook {', '.join(unknown)}; there are {', '.join(found) or 'none'}")
    return [path for name, path in found.items() if name.startswith(tuple(wanted))]


def fingerprint(notebook: Path, given: dict[str, Any]) -> str:
    """Return the SHA-256 of a notebook as it stands and of its parameters, which identifies what it makes."""
    text = json.dumps(given, sort_keys=True, default=str)
    return hashlib.sha256(notebook.read_bytes() + b"\0" + text.encode()).hexdigest()


def is_whole(notebook: Path, directory: Path, given: dict[str, Any]) -> bool:
    """Return whether `directory` holds all that this notebook makes of these parameters; the manifest says so last."""
    entry = results.read_manifest(directory)["notebooks"].get(notebook.stem, {})
    return entry.get("whole") == fingerprint(notebook, given) and (directory / notebook.name).exists()


def run_notebook(notebook: Path, directory: Path, given: dict[str, Any], cell_minutes: float) -> str | None:
    """Run one notebook into `directory` and return None, or why it failed. Its output goes to `logs/`."""
    from nwor_lab.run import kernel

    name, made_from = notebook.stem, fingerprint(notebook, given)
    log, part = directory / "logs" / f"{name}.log", directory / f".{name}.part.ipynb"
    log.parent.mkdir(parents=True, exist_ok=True)
    results.update_manifest(directory, name, state="running", passed=given, whole=None)
    begin, outcome = time.monotonic(), {"state": "interrupted", "error": None, "whole": None}
    try:
        with open(log, "w", encoding="utf-8", buffering=1) as file:
            try:
                kernel.execute(notebook, part, {**given, "run_dir": str(directory)}, file, cell_minutes)
                outcome |= {"state": "done", "whole": made_from}
            except Exception as error:  # noqa: BLE001 - the other notebooks still run, and the run fails at its end
                file.write(traceback.format_exc())
                why = f"{getattr(error, 'ename', type(error).__name__)}: {getattr(error, 'evalue', error)}".strip()
                outcome |= {"state": "failed", "error": why}
    finally:
        if part.exists():
            os.replace(part, directory / notebook.name)
        results.update_manifest(directory, name, seconds=round(time.monotonic() - begin, 1), **outcome)
    return outcome["error"]


def run_point(
    directory: Path,
    chosen: list[Path],
    values: parameters.Values,
    resume: bool = False,
    cell_minutes: float = CELL_MINUTES,
) -> int:
    """Run the notebooks `chosen` into `directory` and write its report; return how many failed."""
    failed = 0
    for number, notebook in enumerate(chosen, 1):
        name = notebook.stem
        at = f" at {', '.join(f'{k}={v}' for k, v in values[name].items())}" if values[name] else ""
        print(f"\nnotebook {number} of {len(chosen)}: {name}{at}", flush=True)
        if resume and is_whole(notebook, directory, values[name]):
            print("  done before")
            continue
        with progress.moving():
            progress.say(name, plain=False)
            problem = run_notebook(notebook, directory, values[name], cell_minutes)
        if problem:
            failed += 1
            told = problem.replace("\n", "\n    ")
            print(f"  FAILED: {told}\n  log: {directory / 'logs' / (name + '.log')}", file=sys.stderr, flush=True)
    claims = results.claims(directory)
    of_this_run = {*values, *results.read_manifest(directory)["notebooks"]}
    results.write_table(directory / "claims.parquet", claims[claims["notebook"].isin(of_this_run)])
    report.write(directory)
    return failed


def run_points(
    directory: Path,
    chosen: list[Path],
    points: dict[str, parameters.Values],
    options: Reproduce,
) -> int:
    """Run every point, here or on Ray; return the exit code, 0 when no notebook failed and all claims hold."""
    print(f"{'going on with' if options.resume else 'results go to'} {directory}", flush=True)
    folders = {directory / point: values for point, values in points.items()}
    run = functools.partial(run_point, resume=options.resume, cell_minutes=options.cell_minutes)
    if options.ray:
        from nwor_lab.run import on_ray

        failed = on_ray.run(options.gpus, run, chosen, folders)
    else:
        failed = sum(run(folder, chosen, values) for folder, values in folders.items())
    claims = {folder.name: results.claims(folder) for folder in folders}
    if "" in points:
        print("\n" + claim_table.as_text(results.claims(directory)))
    else:
        table = grid.measured(folders)
        results.write_table(directory / "grid.csv", table)
        varying, judged = grid.varying(table), pd.concat(claims.values())
        report.write(directory, varying)
        if len(varying):
            print(f"\n{varying.to_string(float_format='{:.4g}'.format, na_rep='')}")
        values = table.groupby(grid.VALUE, dropna=False).ngroups
        said = f"{len(varying)} of {values} measured values differ between the {len(points)} points"
        said = said if values else "these notebooks leave no table of measured values"
        print(f"\n{said}{'; ' + claim_table.verdict_line(judged) if len(judged) else ''}")
    print(f"\nresults: {directory}\nto read: {directory / 'index.html'}", flush=True)
    broken = [(point, claim) for point, table in claims.items() for claim in table.itertuples() if claim.holds is False]
    for point, claim in broken:
        where = claim.notebook if "" in points else f"{point}, {claim.notebook}"
        print(f"does not hold: {where}: {claim_table.sentence(claim)}", file=sys.stderr)
    if failed:
        count = f"{failed} of {len(chosen) * len(points)} notebooks failed"
        print(f"{count}; go on with: {_resume(directory)}", file=sys.stderr)
    return 1 if failed or broken else 0


def _resume(directory: Path) -> str:
    """Return the command that goes on with the run in `directory`."""
    run = directory.name if directory.parent == paths.RESULTS else directory
    return f"{os.path.relpath(sys.argv[0])} reproduce --resume --run {run}"


def _folder(options: Reproduce) -> Path:
    """Return the folder of the run that is asked for."""
    name = options.run or datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    directory = paths.RESULTS / name if os.sep not in name else Path(name).resolve()
    if options.resume and not options.run:
        begun = [run for run in paths.RESULTS.glob("*") if "request" in results.read_manifest(run)]
        return max(begun, key=lambda run: (run / "manifest.json").stat().st_mtime_ns, default=directory)
    return directory


def _read_request(
    directory: Path, options: Reproduce
) -> tuple[dict[str, Any], list[Path], dict[str, parameters.Values]]:
    """Return the request, notebooks and points; a resumed run goes by what it was asked for at first.

    Raises:
        OSError: there is no run to resume, or one that is not to be resumed.
        ValueError, FileNotFoundError: a parameter or a notebook is wrong.
    """
    before = results.read_manifest(directory).get("request")
    if bool(before) != options.resume:
        said = "holds a run: add --resume, or name another --run" if before else "holds no run to resume"
        raise OSError(f"{directory} {said}")
    before = before or {"only": [*options.only], "given": {}, "grid": []}
    request = {
        "only": before["only"],
        "given": {**before["given"], **dict(options.parameter)},
        "grid": options.grid or before["grid"],
    }
    chosen = notebooks([*options.only] or before["only"])
    points = parameters.read_points(chosen, request["given"], request["grid"], here=not options.ray)
    return request, chosen, points


@dataclass(frozen=True)
class Reproduce:
    only: tuple[str, ...] = ()
    """run these notebooks alone, each by the beginning of its name"""
    parameter: Annotated[UseAppendAction[list[tuple[str, str]]], arg(aliases=("-p",), metavar="NAME VALUE")] = field(
        default_factory=list
    )
    """give a parameter to each notebook that declares it"""
    grid: Annotated[list[str], arg(metavar="NAME=V1,V2 ...")] = field(default_factory=list)
    """run at every combination of these values"""
    run: str = ""
    """name under results/, or a path, of the run's folder; none: the time"""
    resume: FlagCreatePairsOff[bool] = False
    """go on with --run, or with the newest run"""
    cell_minutes: float = CELL_MINUTES
    """minutes a cell may take before its notebook fails; 0: without end"""
    ray: str = ""
    """run the points on this Ray cluster; auto: the one here"""
    gpus: float = 0
    """GPUs a point asks of Ray"""

    def __post_init__(self) -> None:
        for name in ("cell_minutes", "gpus"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must be at least 0, got {getattr(self, name):g}")


def main(argv: list[str] | None = None) -> int:
    """The command; 1 where a notebook fails or a claim does not hold, 2 for wrong input, 130 when interrupted."""
    try:
        options = command_line.parse(Reproduce, argv, "nwor reproduce", __doc__ or "")
        directory = _folder(options)
        if missing := machine.missing_folders():
            raise OSError("; ".join(missing))
        _read_request(directory, options)  # a wrong word leaves no folder behind
        with results.alone(directory, "--run"):
            request, chosen, points = _read_request(directory, options)  # another may have begun or ended meanwhile
            if options.ray:
                from nwor_lab.run import on_ray

                on_ray.connect(options.ray, options.gpus)
            results.update_manifest(directory, request=request, points=[point for point in points if point])
            try:
                return run_points(directory, chosen, points, options)
            except KeyboardInterrupt:
                print(f"\ninterrupted; go on with: {_resume(directory)}", file=sys.stderr)
                return 130
    except (OSError, ValueError) as error:
        return command_line.fail("nwor reproduce", error)
