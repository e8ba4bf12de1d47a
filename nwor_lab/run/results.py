# SPDX-License-Identifier: Apache-2.0
"""Results of a run: tidy tables, claims and where they came from, under `results/<run>/`.

A notebook begins, right after its parameters cell, with

    run = results.start(globals(), "01_reference_model")

then writes tables (`run.table`), figures (`nwor_lab.figures.style.save`) and claims (`run.claim`, or `run.expect` where
one is of the default parameters alone). Its last cell is `run.finish()`, which shows the claims and raises when one
does not hold. A file is written whole or not at all. `start` refuses parameters that the notebook does not declare, of
which papermill only warns.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from nwor_lab import paths, progress
from nwor_lab.run import claims as claim_table
from nwor_lab.run import parameters
from nwor_lab.run.provenance import provenance

MUTE = "from nwor_lab.run.results import mute; mute()"
ENOUGH = 200e6
"""Bytes that must be free before a run begins; a whole reproduction run leaves about a quarter of that."""
_WORDS, _INTEGERS = ("run_id", "mode", "model"), ("tp", "k", "batch", "seed", "repeat")
_DEFAULTS: dict[str, Any] = dict.fromkeys(_WORDS, "") | dict.fromkeys(_INTEGERS, 0) | {"tp": 1}
COLUMNS = (*_DEFAULTS, "metric", "value", "unit")


# -- whole files or none -----------------------------------------------------------------------------------------


@contextlib.contextmanager
def whole_file(path: Path | str) -> Iterator[Path]:
    """Yield a temporary path beside `path` and move it into place when the block ends well.

    The temporary name ends in `.part`, so no reader's `*.parquet` takes what a killed writer left for a result. A
    block that raises leaves `path` as it was.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.part")
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
    with whole_file(path) as part:
        if Path(path).suffix == ".csv":
            frame.to_csv(part, index=False)
        else:
            # Of measured numbers, which hardly repeat, a dictionary would be larger than they are.
            repeating = [name for name in frame if not pd.api.types.is_float_dtype(frame[name])]
            frame.to_parquet(part, index=False, compression="zstd", compression_level=19, use_dictionary=repeating)
    return Path(path)


def check_folder(directory: Path | str) -> Path:
    """Make a folder for results and return its path.

    Raises:
        OSError: it cannot be written, or its disk is all but full; the message says so in one line.
    """
    directory = Path(directory)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory) as file:
            file.write(bytes(1 << 20))
        free = shutil.disk_usage(directory).free
        why = f"{free / 1e6:.0f} MB are free where {ENOUGH / 1e6:.0f} are needed" if free < ENOUGH else ""
    except OSError as error:
        why = str(error.strerror)
    if why:
        raise OSError(f"cannot write results to {directory}: {why}; name another folder")
    return directory


@contextlib.contextmanager
def alone(directory: Path, option: str, name: str = "") -> Iterator[Path]:
    """Hold a folder for results, or in it what has one name; yields the folder.

    option: which names another.

    Raises:
        OSError: another run is at work there, or it cannot be written.
    """
    path = check_folder(directory) / f".{name}lock"
    with open(path, "a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            ours = path.samefile(f"/proc/self/fd/{lock.fileno()}")  # it may have gone with a run that has just ended
        except (BlockingIOError, FileNotFoundError):
            ours = False
        if not ours:
            raise OSError(f"another run is at work in {directory}: wait for it, or name another {option}")
        try:
            yield directory
        finally:
            path.unlink(missing_ok=True)


# -- tidy rows ---------------------------------------------------------------------------------------------------


def tidy(rows: pd.DataFrame | Iterable[Mapping[str, Any]], **common: Any) -> pd.DataFrame:
    """Return `rows` as a tidy frame: the columns `COLUMNS`, then any further ones (`position`).

    Args:
        rows: a frame or mappings, each with at least `metric`, `value` and `unit`; `value` is a number.
        common: columns that hold for all rows (`mode="stage"`); a row's own value wins.

    Raises:
        ValueError: a row lacks `metric`, `value` or `unit`, or a value is no number.
    """
    frame = pd.DataFrame(rows if isinstance(rows, pd.DataFrame) else list(rows))
    for column, value in {**_DEFAULTS, **common}.items():
        frame[column] = frame[column].where(frame[column].notna(), value) if column in frame else value
    missing = [column for column in ("metric", "value", "unit") if column not in frame or frame[column].isna().any()]
    if missing:
        raise ValueError(f"each tidy row needs metric, value and unit; missing: {', '.join(missing)}")
    frame["value"] = pd.to_numeric(frame["value"]).astype(float)
    frame = frame.astype(dict.fromkeys(_INTEGERS, "int64"))
    return frame[[*COLUMNS, *(column for column in frame if column not in COLUMNS)]]


def write_provenance(table: Path, given: Mapping[str, Any] | None = None) -> Path:
    """Say beside a table, in JSON of its name, what made it: `provenance`, under that key."""
    return write_json(table.with_suffix(".json"), {"provenance": provenance(given)})


# -- runs --------------------------------------------------------------------------------------------------------


class Run:
    """One run's folder. Tables, figures and claims of several notebooks may share it.

    Attributes:
        directory: the folder, `results/<run>/`.
        id: its name, the `run_id` of every tidy row.
        name: the notebook or command writing now.
        at_defaults: the notebook was passed no parameters, so that it has the values that it declares.
    """

    def __init__(
        self, directory: Path | str, name: str, given: Mapping[str, Any] | None = None, at_defaults: bool = True
    ):
        self.directory = Path(directory)
        self.id = self.directory.name
        self.name = name
        self.at_defaults = at_defaults
        self._claims: list[dict[str, Any]] = []
        # Claims of an earlier pass are gone before this one makes its own.
        check_folder(self.directory)
        self._claims_file.unlink(missing_ok=True)
        update_manifest(self.directory, name, state="running", whole=None, provenance=provenance(given))

    @property
    def _claims_file(self) -> Path:
        return self.directory / "claims" / f"{self.name}.parquet"

    def finish(self) -> Any:
        """End the notebook, note that in the manifest, and return its table of claims, styled for the page.

        Raises:
            AssertionError: a claim does not hold; the message has a line for each.
        """
        broken = [line for line in self._claims if line["holds"] is False]
        update_manifest(self.directory, self.name, state="failed" if broken else "done")
        lines = [f"{one['claim']}: expected {one['expected']}, found {one['found']}" for one in broken]
        assert not broken, f"does not hold: {'; '.join(lines)}"
        return claim_table.styled(pd.DataFrame(self._claims, columns=list(claim_table.COLUMNS)))

    def table(self, name: str, rows: pd.DataFrame | Iterable[Mapping[str, Any]], **common: Any) -> pd.DataFrame:
        """Write tidy `rows` (see `tidy`) to `<run>/<name>.parquet` and return them."""
        frame = tidy(rows, **common)
        frame["run_id"] = self.id
        write_table(self.directory / f"{name}.parquet", frame)
        return frame

    def claim(self, text: str, expected: object, value: object, holds: bool | None) -> None:
        """Record at once one line of the table of claims: what must hold whatever the parameters.

        A claim made again under the same words replaces the earlier one, so a cell may be run twice.

        Args:
            holds: None where it cannot be judged; the reason is then part of `value`.
        """
        expected, value = map(claim_table.show, (expected, value))
        found = (self.name, text, expected, value, None if holds is None else bool(holds))
        line = dict(zip(claim_table.COLUMNS, found, strict=True))
        self._claims = [other for other in self._claims if other["claim"] != text] + [line]
        write_table(self._claims_file, pd.DataFrame(self._claims, columns=list(claim_table.COLUMNS)))

    def expect(self, text: str, expected: object, value: object, holds: bool) -> None:
        """Claim what is expected where no parameters were given; where some were, it is shown and not judged."""
        if self.at_defaults:
            self.claim(text, expected, value, holds)
        else:
            self.claim(text, expected, f"{claim_table.show(value)} (parameters were given)", None)

    def skip(self, text: str, expected: object, reason: str) -> None:
        """Record that a claim cannot be judged on this machine, and why."""
        self.claim(text, expected, reason, None)

    def command(self, *argv: object) -> None:
        """Run `nwor *argv` in a child process, show in one line what it does just now, and keep what it says in a log.

        Raises:
            RuntimeError: the command failed; the message carries the end of its log.
        """
        from IPython.display import display

        words = [str(word) for word in argv]
        logs = self.directory / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        log = logs / f"{self.name}-{len(list(logs.glob(self.name + '-*')))}.log"
        print(f"nwor {words[0]}, with its log in logs/{log.name}", flush=True)
        command = [sys.executable, "-u", "-m", "nwor_lab.run.cli", *words]
        environ = {**os.environ, "VLLM_LOGGING_STREAM": "ext://sys.stderr"}
        with (
            open(log, "a", encoding="utf-8", buffering=1) as file,
            subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=file, text=True, errors="replace", env=environ, cwd=paths.ROOT
            ) as child,
        ):
            assert child.stdout is not None
            shown = display({"text/plain": "starting"}, raw=True, display_id=True)
            for line in child.stdout:
                file.write(line)
                if shown and progress.PLAIN.match(line):
                    shown.update({"text/plain": line.rstrip()}, raw=True)
        if child.returncode:
            end = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-30:])
            raise RuntimeError(f"`nwor {' '.join(words)}` failed with {child.returncode}; log {log}, its end:\n{end}")


def mute() -> None:
    """Keep the warnings of libraries off a notebook's page, here and in the processes it starts; errors are shown."""
    warnings.simplefilter("ignore")
    for name, value in {"PYTHONWARNINGS": "ignore", "VLLM_LOGGING_LEVEL": "ERROR", "TORCH_LOGS": "-all"}.items():
        os.environ.setdefault(name, value)
    for name in ("torch", "triton", "transformers"):
        logging.getLogger(name).setLevel(logging.ERROR)
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)  # a kernel that ends tells of tasks that it drops


def start(scope: dict[str, Any], name: str) -> Run:
    """Begin notebook `name`: check the parameters it was given and open its run folder.

    Call it first thing after the parameters cell as `start(globals(), "01_reference_model")`. The parameters cell
    declares each parameter as `name: type = value  # comment`, `run_dir: str = ""` among them: the folder to write
    to, where empty means `results/interactive-<time>`.

    Raises:
        NameError, ValueError, OSError: as `parameters.check`.
    """
    if "get_ipython" in scope:
        mute()
        pd.options.display.max_colwidth = None
    given, at_defaults = parameters.check(scope, name)
    stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    directory = Path(given["run_dir"]).expanduser().resolve() if given["run_dir"] else None
    return Run(directory or paths.RESULTS / f"interactive-{stamp}", name, given, at_defaults)


# -- the manifest ------------------------------------------------------------------------------------------------


def update_manifest(directory: Path, notebook: str = "", **fields: Any) -> None:
    """Merge `fields` into the entry of `notebook` in `<directory>/manifest.json`, or into the manifest itself.

    The runner and the notebook it runs take turns here.
    """
    manifest = read_manifest(directory)
    (manifest["notebooks"].setdefault(notebook, {}) if notebook else manifest).update(fields)
    write_json(directory / "manifest.json", manifest)


def read_manifest(directory: Path) -> dict[str, Any]:
    """Return `<directory>/manifest.json`, or an empty manifest where there is none that can be read."""
    with contextlib.suppress(OSError, ValueError):
        return json.loads((directory / "manifest.json").read_text(encoding="utf-8"))
    return {"run_id": directory.name, "notebooks": {}}


# -- reading back ------------------------------------------------------------------------------------------------


def read_table(name: str, run: Path) -> pd.DataFrame:
    """Read `<name>.parquet` of a folder; FileNotFoundError where there is none."""
    return pd.read_parquet(run / f"{name}.parquet")


def measure_or_load_recorded(
    run: Run, name: str, measure: Callable[[], pd.DataFrame], source: str = ""
) -> pd.DataFrame:
    """Return what `measure` measures, kept as the table `name` of `run`, or that table as recorded.

    Args:
        source: `measure` or `recorded`, as the notebook's parameters have checked; empty measures where there is a GPU,
            and takes what is recorded where there is none or where it cannot be measured (hardware counters a user may
            not read), which is then said.

    Raises:
        Unmeasurable: asked to measure what cannot be measured here.
    """
    import torch

    if source != "recorded" and torch.cuda.is_available():
        try:
            return run.table(name, measure())
        except Unmeasurable as error:
            if source:
                raise
            print(f"{name} is what was recorded on an H200, since {error}")
    return read_table(name, paths.RECORDED)


class Unmeasurable(RuntimeError):
    """What is asked for cannot be measured on this machine."""


def claims(run: Path | str) -> pd.DataFrame:
    """Return the table of claims (`nwor_lab.run.claims.COLUMNS`) of a run, in the order of its notebooks."""
    parts = [pd.read_parquet(path) for path in sorted(Path(run).glob("claims/*.parquet"))]
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame(columns=list(claim_table.COLUMNS))
