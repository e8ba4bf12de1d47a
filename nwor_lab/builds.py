# SPDX-License-Identifier: Apache-2.0
"""The build that a row was measured with, in its column `build`: rows of different builds are never put together.

A build is three short hashes, `k:1a2b3c4d t:... x:...`: of the kernels' sources, of the tuning table that this
machine's GPU uses, and of the sources that the extension was built from. Tables recorded before rows had one are of the
build `unknown`.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pandas as pd

from nwor.attention import configs
from nwor_lab import paths
from nwor_lab.provenance import probe, sha256

UNKNOWN = "unknown"


@functools.cache
def tuning() -> list[dict[str, Any]]:
    """Return the tuning table that this machine's GPU uses; an empty one where there is no GPU."""
    import torch

    return configs.tuned(configs.Device.of("cuda")) if torch.cuda.device_count() else []


@functools.cache
def build() -> str:
    """Return this machine's build; empty without a GPU, and `unavailable: <why>` where a file cannot be read."""
    import torch

    return str(probe(_build)) if torch.cuda.device_count() else ""


def _build() -> str:
    kernels = [path for path in (paths.ROOT / "kernels").rglob("*") if path.suffix in (".h", ".cpp", ".cu")]
    kernels += (paths.ROOT / "nwor" / "attention").glob("*.py")
    table = hashlib.sha256(json.dumps(tuning(), sort_keys=True).encode()).hexdigest()
    return f"k:{_short(kernels)} t:{table[:8]} x:{built_from()}"


def built_from() -> str:
    """Return the hash of the sources that the extension was built from, which `setup.py` puts into it.

    Raises:
        ValueError: there is no extension that says so.
    """
    library = b"".join(path.read_bytes() for path in (paths.ROOT / "nwor").glob("_C*.so"))
    if not (found := re.search(rb"nwor sources ([0-9a-f]{8})", library)):
        raise ValueError("no extension here says what it was built from: run `make kernels`")
    return found[1].decode()


def _short(files: Iterable[Path]) -> str:
    """Return eight digits of the hash of these files, names and contents."""
    lines = [f"{path.relative_to(paths.ROOT).as_posix()} {sha256(path)}" for path in sorted(files)]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:8]


def of_rows(*frames: pd.DataFrame) -> list[str]:
    """Return the builds of all rows of these tables, sorted; rows that were made without a GPU have none."""
    columns = [frame["build"].astype(object) if "build" in frame else pd.Series([UNKNOWN]) for frame in frames]
    return sorted({str(build) for column in columns for build in column.fillna(UNKNOWN).unique()} - {""})


def require_one_build(*frames: pd.DataFrame) -> None:
    """Raise ValueError, naming the builds, unless all rows of these tables are of one build."""
    if len(found := of_rows(*frames)) > 1:
        raise ValueError(f"rows of different builds do not go together: {', '.join(found)}; measure them with one")


def join(frames: Iterable[pd.DataFrame]) -> pd.DataFrame:
    """Return the rows of all tables as one.

    Raises:
        ValueError: they are of different builds.
    """
    frames = list(frames)
    require_one_build(*frames)
    return pd.concat(frames, ignore_index=True)
