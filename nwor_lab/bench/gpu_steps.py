# SPDX-License-Identifier: Apache-2.0
"""From the rows that benches leave to one line a setting and mode: what parity says, and the ratio of steps."""

from __future__ import annotations

from dataclasses import asdict

import pandas as pd

from nwor_lab.bench.parity import of_rows, tolerance
from nwor_lab.bench.plan import UNPATCHED
from nwor_lab.cost.ratios import abba_ratio, is_stable

SETTING = ["gpu", "attention", "tp", "kv_heads", "kv_cache_dtype", "k", "prompt", "batch"]
"""Columns that identify a measured setting of whole steps, those of them that a table has."""
MAIN = "k == 8 and prompt == 512 and kv_cache_dtype == 'auto'"
"""The settings that one line of a table or a figure shows, by batch and KV heads."""
VANILLA = ("off", UNPATCHED)
COUNTED = ["tokens", "wall", "windows", "accepted_tokens"]


def compared(rows: pd.DataFrame, nats: float | None = None) -> pd.DataFrame:
    """What parity says, by setting and mode: `equal_requests`, `requests`, `largest_gap`, `largest_shift` and `shift`,
    NaN where nothing was compared; and whether the mode is `at_parity`.

    nats: the tolerance; None for `parity.tolerance` of bf16 and random weights on a GPU.
    """
    found = rows.groupby([*_keys(rows), "mode"])[["metric", "value"]].apply(of_rows)
    table = pd.DataFrame(map(asdict, found), found.index).rename(columns={"equal": "equal_requests"})
    table["shift"] = (table.pop("sum_p4") / table.pop("places")) ** 0.25
    table = table.where(table["requests"] > 0)
    bounds = pd.Series(nats, found.index)
    if nats is None:
        caches = found.index.get_level_values("kv_cache_dtype")
        bounds[:] = [tolerance("bfloat16", cache, random_weights=True, on_gpu=True) for cache in caches]
    return table.assign(at_parity=[one.within(bound) for one, bound in zip(found, bounds, strict=True)])


def step_ratios(steps: pd.DataFrame, over: str = "", nats: float | None = None) -> pd.DataFrame:
    """Steps over those of vLLM never patched, in the same run: one line a timed setting and mode.

    Args:
        steps: rows of one or more benches; filter them, or the result, for some settings.
        over: another mode to hold against; none: vLLM never patched, or where a table has no such engine `off`, which
            patches nothing either.
        nats: as `compared` takes it.

    Returns:
        Columns of `SETTING` that there are, and `mode`; `ratio`, the `ratios.abba_ratio` of median steps, and `low` and
        `high`, its range over repeats; `step`, the ratio where both modes are `at_parity` and it is `stable` (by
        `ratios.is_stable`), else NaN; `step_ms`, the median of the repeats' median steps; `tokens_per_s` that users
        get, over all repeats, and `tokens`, those over the baseline's; `acceptance_length`, the tokens that the
        verifier yields of a window; and what `compared` says.
    """
    keys = _keys(steps)
    timed = steps[steps["metric"] == "step_ms"]
    medians = timed.groupby([*keys, "repeat", "mode"])["value"].median().unstack("mode")
    over = over or (UNPATCHED if UNPATCHED in medians else "off")
    every = medians.div(medians[over], axis=0).stack().dropna().groupby([*keys, "mode"])
    lines = pd.DataFrame({"ratio": every.apply(lambda one: abba_ratio(one.droplevel([*keys, "mode"])))})
    lines = lines.assign(low=every.min(), high=every.max(), step_ms=medians.stack().groupby([*keys, "mode"]).median())
    sums = steps.groupby([*keys, "mode", "metric"])["value"].sum().unstack("metric").reindex(columns=COUNTED)
    rates = (sums["tokens"] / sums["wall"]).unstack("mode")
    lines = lines.assign(tokens_per_s=rates.stack(), tokens=rates.div(rates[over], axis=0).stack())
    lines["acceptance_length"] = 1 + sums["accepted_tokens"] / sums["windows"].clip(lower=1)
    parity = compared(steps, nats)
    good = parity["at_parity"].unstack("mode", fill_value=True)
    parity["at_parity"] = good.mul(good[over], axis=0).stack()
    lines = lines.join(parity).assign(stable=is_stable(lines))
    lines["step"] = lines["ratio"].where(lines["at_parity"] & lines["stable"])
    found = lines.reset_index()
    return found.astype({"prompt": int}) if "prompt" in keys else found  # beside rows without one it is a float


def _keys(rows: pd.DataFrame) -> list[str]:
    return [name for name in SETTING if name in rows]
