# SPDX-License-Identifier: Apache-2.0
"""Where a notebook's samples of a GPU come from: taken now, or recorded in `data/recorded`."""

from collections.abc import Callable

import pandas as pd
import torch

from nwor import nsight, paths, results


def measures(source: str) -> bool:
    """Whether `source`, a parameter of the GPU notebooks, means measuring here.

    Args:
        source: `measure` or `recorded`; empty: measure where there is a GPU.

    Raises:
        ValueError: another source, or `measure` without a GPU.
    """
    if source not in ("", "measure", "recorded"):
        raise ValueError(f"source is measure, recorded or empty, got {source!r}")
    if source == "measure" and not torch.cuda.is_available():
        raise ValueError("source is measure, but there is no NVIDIA GPU here; the recorded results need none")
    return source != "recorded" and torch.cuda.is_available()


def obtain(run: results.Run, name: str, measure: Callable[[], pd.DataFrame], source: str = "") -> pd.DataFrame:
    """What `measure` returns, kept as the table `name` of `run`, or that table as recorded.

    Args:
        source: see `measures`, whose errors are raised. If it is empty, counters that cannot be read here are the
            recorded ones, and a line says why.

    Raises:
        nsight.Unreadable: counters are to be measured, and cannot be read here.
    """
    if measures(source):
        try:
            return run.table(name, measure())
        except nsight.Unreadable as error:
            if source:
                raise
            print(f"{name} is what was recorded on an H200, since {error}")
    return results.read_table(name, paths.RECORDED)
