# SPDX-License-Identifier: Apache-2.0
"""`nwor acceptance`: count accepted drafts in vanilla vLLM at many draft lengths.

    nwor acceptance --k 1,2,4,8 --temperature 0,1

A bench that counts, with defaults for counts at scale on a GPU: one engine a draft length, all up at once. What is
written are counts: windows, drafts, accepted drafts, and the windows in which the draft at each position was accepted,
of every pass. Long greedy answers repeat themselves, and what repeats is drafted well: answers have 64 tokens.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pandas as pd

from nwor_lab import paths, results
from nwor_lab.experiments.survival import mean_accepted, predict_rejected, same_share, summary, survival

__all__ = ["mean_accepted", "predict_rejected", "same_share", "summary", "survival"]

RECORDED = "gpu_acceptance"
"""Table of the counts at scale, in a run and in `data/recorded/`."""

AT_SCALE: dict[str, Any] = {
    "count": True,
    "ks": (1, 2, 3, 4, 5, 6, 7, 8),
    "temperatures": (0.0, 1.0),
    "num_prompts": 0,
    "repeats": 8,
    "batch": 64,
    "max_num_batched_tokens": 8192,
    "kv_cache_memory": 1024,  # with a cache of a given size engines start side by side
    "gpu_memory_utilization": 0.1,
    "name": RECORDED,
}


def checks(table: pd.DataFrame) -> list[tuple[str, object, object, bool]]:
    """What must hold of a survival table, as (claim, predicted, measured, holds)."""
    by_position = table[table.metric == "survival"].sort_values("position")
    falling = all(part.value.is_monotonic_decreasing for _, part in by_position.groupby(["k", "temperature"]))
    predicted = predict_rejected(table).set_index(["temperature", "k"]).value
    measured = table[table.metric == "rejected_share"]
    off = max(abs(row.value - predicted[row.temperature, row.k]) for row in measured.itertuples())
    rejected = "rejected share of written rows: counted against predicted from survival"
    return [
        ("survival never rises with position", True, falling, falling),
        (rejected, "<= 0.08 apart", off, off <= 0.08),
    ]


def checks_at_scale(table: pd.DataFrame, windows: int = 100_000) -> list[tuple[str, object, object, bool]]:
    """`checks` of the survival table of counts at scale, and that there are as many windows."""
    counted = int(table.loc[table.metric == "windows", "value"].sum())
    lines: list[tuple[str, object, object, bool]] = [("windows", f">= {windows}", counted, counted >= windows)]
    return [(f"at scale: {claim}", predicted, found, holds) for claim, predicted, found, holds in lines + checks(table)]


def beside_published(
    table: pd.DataFrame, model: str, dataset: str, published: pd.DataFrame | None = None
) -> pd.DataFrame:
    """Greedy acceptance beside what was published of the same model, chain drafts of the same k and the same prompts.

    Args:
        table: of `survival`; model: a name on the hub, of which the last part counts; dataset: as `published` names it.

    Returns:
        columns ``k``, ``metric`` (``acceptance_length`` or ``survival``), ``position``, ``published``, ``value``,
        ``low``, ``high`` and ``difference``, relative; no rows where nothing comparable was published.
    """
    known = pd.read_csv(paths.PUBLISHED_ACCEPTANCE) if published is None else published
    known = known[(known["model"] == Path(model).name) & (known["dataset"] == dataset) & (known["temperature"] == 0)]
    known = known.assign(
        k=pd.to_numeric(known["draft"].str.extract(r"^chain k=(\d+)$")[0]),
        metric=known["metric"].replace("tau", "acceptance_length"),
        published=known["value"],
    ).dropna(subset="k")
    keys = ["k", "metric", "position"]
    greedy = table.loc[table["temperature"] == 0, [*keys, "value", "low", "high"]]
    both = known[[*keys, "published"]].merge(greedy, on=keys)
    return both.assign(difference=both["value"] / both["published"] - 1)


def checks_of_published(beside: pd.DataFrame) -> list[tuple[str, object, object, bool]]:
    """What vLLM's own test asks of `beside_published`: a length within 5 %, survival no more than 5 % less."""
    lines: list[tuple[str, object, object, bool]] = []
    for row in beside.itertuples():
        place = "" if math.isnan(row.position) else f", position {row.position:.0f}"
        close = (abs(row.difference) if row.metric == "acceptance_length" else -row.difference) <= 0.05
        claim = f"{row.metric.replace('_', ' ')} at k={row.k:.0f}{place} beside the published"
        lines.append((claim, row.published, row.value, close))
    return lines


def measure(run: results.Run) -> pd.DataFrame:
    """Counts at scale, which the command `nwor acceptance` takes on a GPU and keeps as a table of `run`."""
    run.command("acceptance", "--run-dir", run.directory, "--name", RECORDED)
    return results.read_table(RECORDED, run.directory)


def main(argv: list[str] | None = None) -> int:
    """The command."""
    from nwor_lab.experiments import bench

    return bench.main(argv, "acceptance", __doc__ or "", **AT_SCALE)
