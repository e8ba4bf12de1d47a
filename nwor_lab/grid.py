# SPDX-License-Identifier: Apache-2.0
"""Run one notebook at every point of a grid of parameters, here or on a Ray cluster, and lose nothing on the way.

    nwor sweep 04_tp2_end_to_end -p k=1,3,8 -p tp=1,2 --run ks
    nwor sweep 04_tp2_end_to_end --grid grid.yaml --run more
    nwor sweep --run more --resume
    nwor sweep 04_tp2_end_to_end -p tp=1,2,4 --ray auto --gpus tp

What it leaves in `results/<run>/`:

    sweep.json            the notebook, and of each point its parameters, state, seconds and error
    <point>/              a whole point: executed notebook, manifest, tables, claims, figures, log
    unfinished/<point>/   one that failed, was interrupted or is running, with the logs of all its attempts

A point is made in `unfinished/` and moved out by one rename when it is whole. Its name ends in a fingerprint of the
notebook and of all it is given, so what another notebook or other parameters made is never taken for it. A point that
fails does not stop the others; the sweep fails at its end. Ray is imported for `--ray` alone.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import fcntl
import hashlib
import io
import itertools
import json
import os
import re
import shutil
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from nwor_lab import paths, reproduce, results

INSTALL_RAY = "Ray is not installed: `pip install --no-deps -r requirements/ray.lock`, here and on every node"


@dataclass(frozen=True)
class Point:
    """One point of a sweep: its folder's name, what the notebook is given, and what it asks of a node."""

    name: str
    parameters: dict[str, Any]
    cpus: float = 1
    gpus: float = 0


# -- the grid ----------------------------------------------------------------------------------------------------------


def read_grid(file: Path | None, given: list[str], kinds: Mapping[str, str]) -> dict[str, list[Any]]:
    """Return each parameter's values, of the types the notebook declares.

    Args:
        file: YAML or JSON, a mapping of names to a value or a list of values; or None.
        given: `name=value,value`, which wins over the file. Values of a list parameter have `;` between them.
        kinds: the notebook's parameters, as `walk.declared` returns them.

    Raises:
        UnknownParameter: the notebook declares no such parameter.
        ValueError: a value is not of the declared type, there is none, or the file is no mapping.
    """
    grid: dict[str, list[Any]] = {}
    if file:
        import yaml

        found = yaml.safe_load(file.read_text(encoding="utf-8"))
        if not isinstance(found, dict):
            raise ValueError(f"{file}: a grid maps parameter names to values, such as `k: [1, 3, 8]`")
        for name, values in found.items():
            of_lists = kinds.get(name, "").startswith("list")
            many = isinstance(values, list) and (not of_lists or all(isinstance(value, list) for value in values))
            grid[name] = values if many else [values]
    for word in given:
        name, equals, text = word.partition("=")
        if not equals:
            raise ValueError(f"-p {word}: write it as name=value or name=value,value")
        separator = ";" if kinds.get(name, "").startswith("list") else ","
        grid[name] = [value.strip() for value in text.split(separator) if value.strip()]
    kinds = {name: kind for name, kind in kinds.items() if name != "run_dir"}
    if unknown := [name for name in grid if name not in kinds]:
        names = ", ".join(sorted(kinds))
        raise reproduce.UnknownParameter(f"the notebook has no parameter {', '.join(unknown)}; it has {names}")
    if empty := [name for name, values in grid.items() if not values]:
        raise ValueError(f"parameter {', '.join(empty)} has no value")
    return {name: [_typed(name, value, kinds[name]) for value in values] for name, values in grid.items()}


def _typed(name: str, value: Any, kind: str) -> Any:
    if isinstance(value, bool) and kind != "bool":
        raise ValueError(f"parameter {name}={value} is not of type {kind}; YAML reads a bare on or off so: quote it")
    text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
    try:
        return reproduce.parse(text, kind)
    except ValueError as error:
        raise ValueError(f"parameter {name}={value!r} is not of type {kind}") from error


def points(notebook: Path, grid: Mapping[str, list[Any]], cpus: str = "1", gpus: str = "0") -> list[Point]:
    """Return the product of the grid. `cpus` and `gpus` are numbers, or the parameter that says how many.

    Raises:
        ValueError: `cpus` or `gpus` is neither, or two points are the same.
    """
    made = []
    varied = [name for name, values in grid.items() if len(values) > 1]
    for values in itertools.product(*grid.values()):
        parameters = dict(zip(grid, values, strict=True))
        words = ",".join(f"{name}={parameters[name]}" for name in varied)
        name = re.sub(r"[^\w.,=+-]+", "-", words)[:80] or notebook.stem
        mark = reproduce.fingerprint(notebook, parameters)[:8]
        made.append(Point(f"{name}-{mark}", parameters, _number(cpus, parameters), _number(gpus, parameters)))
    if len({point.name for point in made}) < len(made):
        raise ValueError("a value is given twice, and a point is run once")
    return made


def _number(text: str, parameters: Mapping[str, Any]) -> float:
    value = parameters.get(text, text)
    try:
        return float(value)
    except (TypeError, ValueError):
        raise ValueError(f"{text!r} is no number and no parameter of the grid that is one") from None


# -- a point -----------------------------------------------------------------------------------------------------------


def is_whole(directory: Path, notebook: Path, point: Point) -> bool:
    return reproduce.is_whole(notebook, directory / point.name, point.parameters)


@contextlib.contextmanager
def unfinished(directory: Path, notebook: Path, point: Point) -> Iterator[Path]:
    """Yield the empty folder to make a point in, and move it to its place when the point is whole.

    Of an earlier attempt the logs stay, numbered, and nothing else does.
    """
    folder = directory / "unfinished" / point.name
    if (taken := directory / point.name).exists():  # not whole, or it would not be made again
        shutil.rmtree(folder, ignore_errors=True)
        folder.parent.mkdir(parents=True, exist_ok=True)
        os.replace(taken, folder)
    logs = folder / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    for path in folder.iterdir():
        if path != logs:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    number = len(list(logs.glob("attempt-*")))
    if left := [path for path in logs.iterdir() if not path.name.startswith("attempt-")]:
        (logs / f"attempt-{number}").mkdir()
        for path in left:
            os.replace(path, logs / f"attempt-{number}" / path.name)
    yield folder
    if reproduce.is_whole(notebook, folder, point.parameters):
        os.replace(folder, directory / point.name)


# -- the sweep ---------------------------------------------------------------------------------------------------------


def sweep(directory: Path, notebook: Path, todo: list[Point], ray_address: str = "") -> int:
    """Run the points of a notebook that `directory` does not hold whole; return 0 when it then holds all, else 1.

    Raises:
        RuntimeError: another sweep is at work in the folder, Ray is not there, or no node has what a point asks for.
    """
    if ray_address:
        _connect(ray_address, todo)
    directory.mkdir(parents=True, exist_ok=True)
    with open(directory / ".sweep.lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RuntimeError(f"another sweep is at work in {directory}: wait for it, or name another --run") from None
        found = _read(directory)["points"]
        kept = {point.name for point in todo if is_whole(directory, notebook, point)}
        entries = {
            point.name: {
                **(found.get(point.name, {}) if point.name in kept else {}),
                "parameters": point.parameters,
                "cpus": point.cpus,
                "gpus": point.gpus,
                "state": "whole" if point.name in kept else "waiting",
            }
            for point in todo
        }
        book = {"notebook": str(notebook), "points": entries}
        results.write_json(directory / "sweep.json", book)
        print(f"results go to {directory}\n{len(todo)} points, {len(kept)} of them whole already", flush=True)
        others = {entries[name].get("code") for name in kept} - {code(), None}
        if others:
            print("note: other code of nwor made some of those; name another --run to make them anew", flush=True)
        remaining = [point for point in todo if point.name not in kept]
        made = (_on_ray if ray_address else _here)(directory, notebook, remaining)
        for number, (point, problem) in enumerate(made, 1):
            folder = directory / point.name
            if not problem and not is_whole(directory, notebook, point):
                problem = "the notebook changed while it ran"
            entry = _entry(folder if not problem else directory / "unfinished" / point.name, notebook)
            entries[point.name] |= {
                "state": "failed" if problem else "whole",
                "error": problem,
                "seconds": entry.get("seconds"),
                "code": code(),
            }
            results.write_json(directory / "sweep.json", book)
            said = f"FAILED: {problem}" if problem else "whole"
            print(f"point {number} of {len(remaining)}: {point.name}: {said}", flush=True)
    return _summary(directory, todo, entries)


def _here(directory: Path, notebook: Path, todo: list[Point]) -> Iterator[tuple[Point, str | None]]:
    for point in todo:
        with unfinished(directory, notebook, point) as folder:
            problem = reproduce.run_notebook(notebook, folder, point.parameters)
        yield point, problem


def _summary(directory: Path, todo: list[Point], entries: Mapping[str, Mapping[str, Any]]) -> int:
    frame = pd.DataFrame({"point": name, **entries[name]} for name in (point.name for point in todo))
    print(f"\n{frame.reindex(columns=['point', 'state', 'seconds']).to_string(index=False)}\n\nresults: {directory}")
    failed = [name for name, entry in entries.items() if entry["state"] != "whole"]
    for name in failed:
        logs = directory / "unfinished" / name / "logs"
        print(f"FAILED {name}: {entries[name].get('error')}\n  logs: {logs}", file=sys.stderr)
    if failed:
        print(f"{len(failed)} of {len(todo)} points failed; run them again with --resume", file=sys.stderr)
    return 1 if failed else 0


def read_table(name: str, directory: Path | str) -> pd.DataFrame:
    """Return `<name>.parquet` of all whole points of a sweep as one table; `run_id` is the point's name.

    Raises:
        FileNotFoundError: no whole point has that table.
    """
    whole = [point for point, entry in _read(Path(directory))["points"].items() if entry["state"] == "whole"]
    tables = [path for point in whole if (path := Path(directory) / point / f"{name}.parquet").exists()]
    if not tables:
        raise FileNotFoundError(f"no whole point in {directory} has a table {name}")
    return pd.concat([pd.read_parquet(path) for path in tables], ignore_index=True)


def code() -> str:
    """Return the SHA-256 of both packages' Python sources: what a node must share, and what made a point."""
    digest = hashlib.sha256()
    for path in sorted(path for package in ("nwor", "nwor_lab") for path in (paths.ROOT / package).rglob("*.py")):
        digest.update(path.relative_to(paths.ROOT).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def _read(directory: Path) -> dict[str, Any]:
    path = directory / "sweep.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"notebook": "", "points": {}}


def _entry(folder: Path, notebook: Path) -> dict[str, Any]:
    return results.read_manifest(folder)["notebooks"].get(notebook.stem, {})


# -- on a Ray cluster --------------------------------------------------------------------------------------------------


def _connect(address: str, todo: list[Point]) -> None:
    try:
        import ray
    except ImportError:
        raise RuntimeError(INSTALL_RAY) from None
    ray.init(address=address, log_to_driver=False, logging_level="WARNING")
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    for point in todo:
        if not any(node.get("CPU", 0) >= point.cpus and node.get("GPU", 0) >= point.gpus for node in nodes):
            ray.shutdown()
            has = "; ".join(f"{node.get('CPU', 0):g} CPUs, {node.get('GPU', 0):g} GPUs" for node in nodes)
            raise RuntimeError(
                f"no node has the {point.cpus:g} CPUs and {point.gpus:g} GPUs that {point.name} asks for "
                f"(nodes: {has}): give --cpus and --gpus that fit"
            )


def _on_ray(directory: Path, notebook: Path, todo: list[Point]) -> Iterator[tuple[Point, str | None]]:
    """Run the points as Ray tasks. They come back as archives, so the nodes need this kit and no shared disk."""
    import ray

    try:
        ours = {name: value for name, value in results.environment().items() if not name.startswith(("OMP_", "CUDA_"))}
        task = ray.remote(max_retries=0, runtime_env={"env_vars": ours})(_run_and_pack)
        running = {
            task.options(num_cpus=point.cpus, num_gpus=point.gpus, name=point.name).remote(
                notebook.read_bytes(), notebook.name, point.name, point.parameters, code()
            ): point
            for point in todo
        }
        while running:
            (done,), _ = ray.wait(list(running), num_returns=1)
            point = running.pop(done)
            with unfinished(directory, notebook, point) as folder:
                try:
                    problem, archive = ray.get(done)
                except ray.exceptions.RayError as error:
                    problem, archive = reproduce.reason(getattr(error, "cause", None) or error), b""
                    results.write_text(folder / "logs" / "ray.log", str(error))
                if archive:
                    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
                        tar.extractall(folder, filter="data")
            yield point, problem
    finally:
        ray.shutdown()


def _run_and_pack(
    source: bytes, file: str, name: str, parameters: dict[str, Any], expected: str
) -> tuple[str | None, bytes]:
    """On a node: run the notebook in a folder of its own;
    return the reason it failed, or None, and the folder as tar."""
    if code() != expected:
        raise RuntimeError(f"the nwor in {paths.ROOT} on this node is not the one that asks: install the same commit")
    with tempfile.TemporaryDirectory() as folder:
        notebook, made, archive = Path(folder) / file, Path(folder) / name, io.BytesIO()
        notebook.write_bytes(source)
        problem = reproduce.run_notebook(notebook, made, parameters)
        with tarfile.open(fileobj=archive, mode="w") as tar:
            tar.add(made, arcname=".")
        return problem, archive.getvalue()


def _find(name: str) -> Path:
    path = Path(name).resolve()
    if path.suffix == ".ipynb" and path.exists():
        return path
    return reproduce.notebooks([name])[0]


def _as_before(directory: Path) -> tuple[Path, list[Point]]:
    """The notebook as it stands now and the points that `directory` was made for."""
    book = _read(directory)
    notebook = _find(book["notebook"])
    todo = []
    for name, entry in book["points"].items():
        mark = reproduce.fingerprint(notebook, entry["parameters"])[:8]
        todo.append(Point(f"{name[:-8]}{mark}", entry["parameters"], entry["cpus"], entry["gpus"]))
    return notebook, todo


# -- the command -------------------------------------------------------------------------------------------------------


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="nwor sweep", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("notebook", nargs="?", help="a notebook of the kit by name, or a path")
    parser.add_argument("--grid", type=Path, help="YAML or JSON file: a mapping of parameters to values")
    parser.add_argument("-p", "--parameter", action="append", default=[], metavar="NAME=VALUE,VALUE")
    parser.add_argument("--run", help="name under results/, or a path, for what the sweep leaves (default: the time)")
    parser.add_argument(
        "--resume", action="store_true", help="go on with --run: keep its whole points, make the others"
    )
    parser.add_argument(
        "--ray", metavar="ADDRESS", default="", help="run the points on this Ray cluster; auto: the one here"
    )
    parser.add_argument("--cpus", default="1", help="CPUs a point asks of Ray: a number, or the parameter that says it")
    parser.add_argument("--gpus", default="0", help="GPUs a point asks of Ray: a number, or the parameter that says it")
    options = parser.parse_args(argv)
    run = options.run or f"sweep-{datetime.datetime.now():%Y%m%d-%H%M%S}"
    directory = paths.RESULTS / run if os.sep not in run else Path(run).resolve()
    there = (directory / "sweep.json").exists()
    if there != options.resume:
        hint = "holds a sweep: add --resume, or name another --run" if there else "holds no sweep to resume"
        parser.error(f"{directory} {hint}")
    try:
        if options.resume and not (options.notebook or options.grid or options.parameter):
            notebook, todo = _as_before(directory)
        else:
            notebook = _find(options.notebook or (_read(directory)["notebook"] if there else ""))
            grid = read_grid(options.grid, options.parameter, reproduce.declared(notebook))
            todo = points(notebook, grid, options.cpus, options.gpus)
        return sweep(directory, notebook, todo, options.ray)
    except (OSError, ValueError, RuntimeError) as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        print(f"\ninterrupted; go on with: nwor sweep --run {run} --resume", file=sys.stderr)
        return 130
