# SPDX-License-Identifier: Apache-2.0
"""The build that a recorded row was measured with, in its column `build`: rows of different builds never go together.

A build is what git calls the trees of `kernels` and `nwor/attention` (which holds the tuning tables) in the commit
that was measured. Rows without that column are of the build `unknown`.
"""

from __future__ import annotations

import functools
import subprocess
from collections.abc import Iterable
from typing import Any

import pandas as pd

from nwor.attention import configs
from nwor_lab import paths

UNKNOWN = "unknown"
TREES = {"kernels": "kernels", "attention": "nwor/attention"}


def of_commit(commit: str) -> str:
    """Return the build of a commit of this checkout, such as `kernels:1a2b3c4d attention:5e6f7a8b`.

    Raises:
        ValueError: git here does not know the commit.
    """
    command = ["git", "rev-parse", *(f"{commit}:{folder}" for folder in TREES.values())]
    done = subprocess.run(command, cwd=paths.ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ValueError(f"git does not know commit {commit} here: record in the checkout that has it")
    return " ".join(f"{name}:{tree[:8]}" for name, tree in zip(TREES, done.stdout.split(), strict=True))


@functools.cache
def tuning() -> list[dict[str, Any]]:
    """Return the tuning table that this machine's GPU uses; an empty one where there is no GPU."""
    import torch

    return configs.tuned(configs.Device.of("cuda")) if torch.cuda.device_count() else []


def require_one_build(*frames: pd.DataFrame) -> None:
    """Raise ValueError, naming the builds, unless all rows of these tables are of one build."""
    columns = [frame["build"].astype(object) if "build" in frame else pd.Series([UNKNOWN]) for frame in frames]
    found = sorted({str(build) for column in columns for build in column.fillna(UNKNOWN).unique()} - {""})
    if len(found) > 1:
        raise ValueError(f"rows of different builds do not go together: {', '.join(found)}; measure them with one")


def join(frames: Iterable[pd.DataFrame]) -> pd.DataFrame:
    """Return the rows of all tables as one.

    Raises:
        ValueError: they are of different builds.
    """
    frames = list(frames)
    require_one_build(*frames)
    return pd.concat(frames, ignore_index=True)
