# SPDX-License-Identifier: Apache-2.0
"""Where a notebook's samples of a GPU come from: taken now, or recorded in `data/recorded`."""

from collections.abc import Callable

import pandas as pd
import torch

from nwor_lab import paths, results
from nwor_lab.microbench import counters


def _measures(source: str) -> bool:
    """Whether `source`, a parameter of the GPU notebooks, means measuring here."""
    if source not in ("", "measure", "recorded"):
        raise ValueError(f"source is measure, recorded or empty, got {source!r}")
    if source == "measure" and not torch.cuda.is_available():
        raise ValueError("source is measure, but there is no NVIDIA GPU here; the recorded results need none")
    return source != "recorded" and torch.cuda.is_available()


def obtain(run: results.Run, name: str, measure: Callable[[], pd.DataFrame], source: str = "") -> pd.DataFrame:
    """What `measure` returns, kept as the table `name` of `run`, or that table as recorded.

    Args:
        source: `measure` or `recorded`; empty: measure where there is a GPU, and where counters cannot be read there,
            take the recorded ones and say so.

    Raises:
        ValueError: another source, or `measure` without a GPU.
        counters.Unreadable: counters are to be measured, and cannot be read here.
    """
    if _measures(source):
        try:
            return run.table(name, measure())
        except counters.Unreadable as error:
            if source:
                raise
            print(f"{name} is what was recorded on an H200, since {error}")
    return results.read_table(name, paths.RECORDED)
