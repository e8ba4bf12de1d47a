# SPDX-License-Identifier: Apache-2.0
"""Run the notebooks in order with papermill, keep what they made, and print the table of claims.

`nwor walk` is what `make reproduce` runs. It leaves in `results/<run>/` the executed notebooks, their
logs, tables and figures, and `manifest.json`. A notebook that fails does not stop those after it. The walk fails at
the end when a notebook failed or a claim does not hold. `--resume` goes on with a run that was interrupted or failed:
it skips a notebook that the manifest calls whole, and only while notebook and parameters are what they were.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from nwor_lab import paths, results

DRAWS = ("09_paper_figures",)
"""Notebooks that draw what the others left: not whole any more once one of those has run again."""


class UnknownParameter(ValueError):
    """No selected notebook declares this parameter."""


def notebooks(only: list[str] | None = None) -> list[Path]:
    """Return the notebooks in order; `only` names some of them, with or without `.ipynb`.

    Raises:
        FileNotFoundError: a name is no notebook, or there is none at all.
    """
    found = {path.stem: path for path in sorted(paths.NOTEBOOKS.glob("[0-9]*.ipynb"))}
    if not found:
        raise FileNotFoundError(f"no notebooks in {paths.NOTEBOOKS}")
    wanted = [Path(name).stem for name in only or found]
    if unknown := [name for name in wanted if name not in found]:
        raise FileNotFoundError(f"no notebook {', '.join(unknown)}; there are {', '.join(found)}")
    return [path for name, path in found.items() if name in wanted]


def declared(notebook: Path) -> dict[str, str]:
    """Return the parameters a notebook declares and their types, such as `{"k": "int"}`."""
    import papermill

    return {name: entry["inferred_type_name"] for name, entry in papermill.inspect_notebook(str(notebook)).items()}


def parse(text: str, kind: str) -> Any:
    """Read a parameter given on the command line as the type its notebook declares.

    A string stays the string it was given as: `off` is `off`, never YAML's false. A list is given with commas.

    Raises:
        ValueError: the text is not of that type.
    """
    if kind == "bool":
        if text.lower() not in ("true", "false"):
            raise ValueError(f"{text!r} is not true or false")
        return text.lower() == "true"
    if kind in ("int", "float"):
        return {"int": int, "float": float}[kind](text)
    if kind.startswith("list"):
        inner = kind[5:-1] if "[" in kind else "str"
        return [parse(item.strip(), inner) for item in text.strip("[]").split(",") if item.strip()]
    return text


def parameters_of(chosen: list[Path], given: dict[str, str]) -> dict[str, dict[str, Any]]:
    """Return for each chosen notebook the `given` parameters it declares, as the types it declares.

    Raises:
        UnknownParameter: none of them declares one of the names.
        ValueError: a value is not of the declared type.
    """
    kinds = {notebook.stem: declared(notebook) for notebook in chosen}
    known = sorted({name for kind in kinds.values() for name in kind} - {"run_dir"})
    if unknown := [name for name in given if name not in known]:
        raise UnknownParameter(f"no notebook here has a parameter {', '.join(unknown)}; they have {', '.join(known)}")
    values: dict[str, dict[str, Any]] = {}
    for notebook, kind in kinds.items():
        values[notebook] = {}
        for name in (name for name in given if name in kind):
            try:
                values[notebook][name] = parse(given[name], kind[name])
            except ValueError as error:
                raise ValueError(f"{notebook}: parameter {name}={given[name]!r} is not of type {kind[name]}") from error
    return values


def fingerprint(notebook: Path, parameters: dict[str, Any]) -> str:
    """Return the SHA-256 of a notebook as it stands and of what it is given: a result of another one is not its."""
    given = json.dumps(parameters, sort_keys=True, default=str)
    return hashlib.sha256(notebook.read_bytes() + b"\0" + given.encode()).hexdigest()


def is_whole(notebook: Path, directory: Path, parameters: dict[str, Any]) -> bool:
    """Return whether `directory` holds what this notebook makes of these parameters, whole.

    The manifest says so, and it is told last: after the notebook's own end, and after the executed notebook is there.
    A manifest that cannot be read says nothing.
    """
    try:
        entry = results.read_manifest(directory)["notebooks"].get(notebook.stem, {})
    except (ValueError, KeyError, AttributeError):
        return False
    return entry.get("whole") == fingerprint(notebook, parameters) and (directory / notebook.name).exists()


def run_notebook(notebook: Path, directory: Path, parameters: dict[str, Any]) -> str | None:
    """Run one notebook into `directory` and return None, or the reason it failed.

    The executed notebook gets its name when it has ended, failed or not; its output is kept in `logs/`. When all is
    well the manifest's `whole` is the run's fingerprint; until then it is empty.
    """
    import papermill

    name = notebook.stem
    log = directory / "logs" / f"{name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    part = directory / f".{name}.part.ipynb"
    results.update_manifest(directory, name, state="running", passed=parameters, whole=None)
    mark = fingerprint(notebook, parameters)
    begin, problem = time.monotonic(), None
    try:
        with open(log, "w", encoding="utf-8", buffering=1) as file:
            try:
                papermill.execute_notebook(
                    str(notebook),
                    str(part),
                    parameters={**parameters, "run_dir": str(directory)},
                    kernel_name="python3",
                    cwd=str(paths.ROOT),
                    stdout_file=file,
                    stderr_file=file,
                    extra_arguments=["--IPKernelApp.log_level=ERROR"],
                )
            except Exception as error:  # noqa: BLE001 - the other notebooks still run, and the walk fails at its end
                file.write(traceback.format_exc())
                problem = reason(error)
    finally:
        if part.exists():
            os.replace(part, directory / notebook.name)
        # Anything that is no Exception (an interrupt) passes through here with its state still "running".
        state: dict[str, Any] = {"state": "done", "error": None, "whole": mark}
        if problem:
            state = {"state": "failed", "error": problem}
        elif sys.exc_info()[0]:
            state = {"state": "interrupted", "error": None}
        results.update_manifest(directory, name, seconds=round(time.monotonic() - begin, 1), **state)
    return problem


def reason(error: Exception) -> str:
    """Return in one line why a notebook failed: the error raised in its cell, or papermill's own."""
    name, said = getattr(error, "ename", type(error).__name__), str(getattr(error, "evalue", error)).strip()
    return f"{name}: {said.splitlines()[0] if said else ''}"


def walk(directory: Path, chosen: list[Path], given: dict[str, str], resume: bool = False) -> int:
    """Run `chosen` into `directory`; return the exit code: 0 when all ran and every claim holds, else 1."""
    values = parameters_of(chosen, given)
    entries = results.read_manifest(directory)["notebooks"]
    failed: dict[str, str] = {}
    ran = False
    print(f"{'going on with' if resume else 'results go to'} {directory}")
    for number, notebook in enumerate(chosen, 1):
        name, entry = notebook.stem, entries.get(notebook.stem, {})
        print(f"\nnotebook {number} of {len(chosen)}: {name}", flush=True)
        # What an interrupted run was given holds on when it is resumed.
        passed = {**(entry.get("passed", {}) if resume else {}), **values[name]}
        stale = ran and name in DRAWS
        if resume and not stale and is_whole(notebook, directory, passed):
            print(f"  done before, in {entry.get('seconds', 0):.0f} s")
            continue
        problem = run_notebook(notebook, directory, passed)
        ran = True
        if problem:
            failed[name] = problem
            print(f"  FAILED: {problem}\n  log: {directory / 'logs' / (name + '.log')}", file=sys.stderr, flush=True)
    claims = results.claims(directory)
    claims = claims[claims["notebook"].isin([notebook.stem for notebook in chosen])]
    results.write_table(directory / "claims.parquet", claims)
    print(f"\n{table(claims)}\n\nresults: {directory}")
    broken, skipped = int(claims["holds"].isin([False]).sum()), int(claims["holds"].isna().sum())
    if skipped:
        print(f"{skipped} of {len(claims)} claims were skipped; the reason is under `measured`")
    if failed:
        print(f"{len(failed)} of {len(chosen)} notebooks failed: {', '.join(failed)}", file=sys.stderr)
    if broken:
        print(f"{broken} of {len(claims)} claims do not hold", file=sys.stderr)
    return 1 if failed or broken else 0


def table(claims: Any) -> str:
    """Return the claims as aligned text: notebook, claim, predicted, measured, holds."""
    lines = [["notebook", "claim", "predicted", "measured", "holds"]]
    for line in claims.itertuples():
        holds = "skipped" if line.holds is None else "yes" if line.holds else "NO"
        lines.append([line.notebook, line.claim, line.predicted, line.measured, holds])
    widths = [max(len(line[column]) for line in lines) for column in range(5)]
    return "\n".join("  ".join(word.ljust(width) for word, width in zip(line, widths, strict=True)) for line in lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="nwor walk", description="Run the notebooks and print the table of claims.")
    parser.add_argument("--run", help="name under results/, or a path, for what the run leaves (default: the time)")
    parser.add_argument("--only", nargs="+", metavar="NOTEBOOK", help="run these notebooks alone")
    parser.add_argument("-p", "--parameter", nargs=2, action="append", default=[], metavar=("NAME", "VALUE"))
    parser.add_argument("--resume", action="store_true", help="go on with --run, or the newest run: skip what is done")
    options = parser.parse_args(argv)
    name = options.run or datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    directory = paths.RESULTS / name if os.sep not in name else Path(name).resolve()
    if options.resume:
        directory = directory if options.run else results.newest_run() or directory
        if not (directory / "manifest.json").exists():
            parser.error(f"nothing to resume in {directory}")
    try:
        return walk(directory, notebooks(options.only), dict(options.parameter), options.resume)
    except (UnknownParameter, FileNotFoundError, ValueError) as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        print("\ninterrupted; go on with: nwor walk --resume", file=sys.stderr)
        return 130
