# SPDX-License-Identifier: Apache-2.0
"""The first lines of a run's page: what it found, a sentence a table, with its numbers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pandas as pd

from nwor_lab.cost.ratios import abba_ratio
from nwor_lab.run import claims as claim_table
from nwor_lab.run import results


def sentences(directory: Path) -> list[str]:
    """What does not hold, and what the tables of a run say."""
    claims = results.claims(directory)
    failed = [f"Does not hold: {claim_table.sentence(row)}." for row in claims[claims["holds"].eq(False)].itertuples()]
    paths = {directory / f"{name}.parquet": of for name, of in TABLES.items()}
    return failed + [said for path, of in paths.items() if path.exists() and (said := of(pd.read_parquet(path)))]


def cache(bench: pd.DataFrame) -> str:
    """Of the bench with every byte audited."""
    total = bench.groupby(["mode", "metric"])["value"].sum().unstack()
    names = ["audit.dirty_layer_steps", "audit.layer_steps"]
    if not set(names) <= set(total):
        return ""
    vanilla, *modes = _baseline_first(total.index)
    left = {mode: "{:,.0f} of {:,.0f}".format(*total.loc[mode, names]) for mode in (vanilla, *modes)}
    clean = ", ".join(f"under {mode} in {left[mode]}" for mode in modes)
    return f"vLLM left rejected rows in its cache in {left[vanilla]} layer-steps (one layer in one step); {clean}."


def steps(table: pd.DataFrame) -> str:
    """Of the repeats of that bench, one rank."""
    wide = table.query("tp == 1").pivot(index="repeat", columns="mode", values="value")
    vanilla, *modes = _baseline_first(wide.columns)
    ratios = [f"{abba_ratio(wide[mode] / wide[vanilla]):.2f} under {mode}" for mode in modes if vanilla in wide]
    return f"On this machine a step takes {' and '.join(ratios)} of the time of vLLM's." if ratios else ""


def _baseline_first(modes: pd.Index) -> list[str]:
    """vLLM never patched, or else with its mode off; then the modes that keep the cache clean."""
    return ["vllm" if "vllm" in modes else "off", *(mode for mode in ("cow", "stage") if mode in modes)]


def blind(table: pd.DataFrame) -> str:
    """Of the reference model."""
    length = table[table["metric"] == "acceptance_length"].set_index("mode")["value"]
    return (
        f"In the reference model a step yields {length['off']:.2f} tokens in vanilla, {length['cow']:.2f} under cow, "
        f"{length['stage']:.2f} under stage, and {length['blind']:.2f} where drafts are hidden from attention."
    )


def price(table: pd.DataFrame) -> str:
    """Of launches and bytes, over the batch."""
    of_stage = table[table["mode"] == "stage"].sort_values("batch")
    cheaper, dearer = (of_stage.loc[rows, "batch"] for rows in (of_stage["value"] < 0, of_stage["value"] > 0))
    wins = f"is cheaper than vanilla's at batches of {cheaper.min()} to {cheaper.max()}" if len(cheaper) else ""
    loses = f"dearer from {dearer.min()} on" if len(dearer) else "dearer at none"
    model, k = of_stage[["model", "k"]].iloc[0]
    told = ", and ".join(part for part in (wins, loses) if part)
    return f"By launches and bytes, a step of stage ({model}, k={k}, 0.95 of drafts accepted) {told}."


def wasted(table: pd.DataFrame) -> str:
    """Of the drafts that vLLM accepted."""
    rows = table[table["temperature"] == table["temperature"].min()].query("k == k.max()").set_index("metric")["value"]
    length, share = rows["acceptance_length"], rows["rejected_share"]
    return (
        f"With {table['k'].max()} drafts a window yields {length:.2f} tokens, and {share:.0%} of its rows are rejected."
    )


def bytes_apart(table: pd.DataFrame) -> str:
    """Of the operators beside plain Python."""
    total = table.groupby("metric")["value"].sum()
    compared, differing = total["bytes_compared"], total["bytes_differing"]
    return f"Operators beside plain Python: {differing:,.0f} of {compared:,.0f} bytes differ."


TABLES: dict[str, Callable[[pd.DataFrame], str]] = {
    "modes_tp1": cache,
    "steps": steps,
    "reference": blind,
    "acceptance": wasted,
    "kernels": bytes_apart,
    "price": price,
}
"""By table of a run, what is said of it."""
