# SPDX-License-Identifier: Apache-2.0
"""Whole steps on a GPU: from the tables that benches leave to one ratio a setting and mode."""

from __future__ import annotations

from dataclasses import asdict

import pandas as pd

from nwor_lab.bench.parity import of_rows, tolerance
from nwor_lab.bench.plan import UNPATCHED
from nwor_lab.bench.survival import lengths, tokens_per_s
from nwor_lab.cost.ratios import abba_ratio, is_stable

SETTING = ["gpu", "attention", "tp", "kv_heads", "kv_cache_dtype", "k", "prompt", "batch"]
"""Columns that identify a measured setting of whole steps, those of them that a table has."""
MAIN = "k == 8 and prompt == 512 and kv_cache_dtype == 'auto'"
"""The settings that one line of a table or a figure shows, by batch and KV heads."""
VANILLA = ("off", UNPATCHED)
COUNTED = ["tokens", "wall", "windows", "accepted_tokens"]


def step_ratios(steps: pd.DataFrame, over: str = "") -> pd.DataFrame:
    """Steps over those of vLLM never patched, in the same run: one line a setting and mode.

    Where a table has no such engine the baseline is `off`, which patches nothing either; in tables recorded before
    there was one, the mode's own engine with the mode paused.

    Args:
        steps: rows of one or more benches on GPUs, in bf16; filter them, or the result, for some settings.
        over: another mode to hold against. If both engines ran paused too, each is taken over itself so: two engines
            of one setting differ by more than such a difference.

    Returns:
        Columns of `SETTING` that there are, and `mode`; `step`, the `ratios.abba_ratio` of median steps, NaN unless
        `at_parity` (by `parity.tolerance`) and `stable` (by `ratios.is_stable`); `low` and `high`, its range over
        repeats; `step_ms`, the median of the repeats' median steps; `tokens_per_s` that users get, over all repeats,
        and `tokens`, those over the baseline's; `acceptance_length` by the verifier; and `parity`'s `equal_requests`,
        `requests`, `largest_gap`, `largest_shift` and `shift`, NaN where nothing was compared.
    """
    keys = [name for name in SETTING if name in steps]
    if "engine" not in steps:
        steps = steps.assign(engine="")
    timed = steps[steps["metric"] == "step_ms"]
    medians = timed.groupby([*keys, "repeat", "mode", "engine"])["value"].median().unstack(["mode", "engine"])
    sums = steps.groupby([*keys, "mode", "engine", "metric"])["value"].sum().unstack("metric").reindex(columns=COUNTED)
    compared = steps.groupby([*keys, "mode", "engine"])[["metric", "value"]].apply(of_rows)
    engines = {mode: engine for mode, engine in medians if mode not in VANILLA or not engine}
    first = over or UNPATCHED
    parts = []
    for mode, engine in engines.items():
        own = ("off", engine)
        beside = (first, engines[first]) if first in engines else own
        ratios = medians[mode, engine] / medians[beside]
        if over and own in medians and ("off", engines[over]) in medians:
            ratios *= medians["off", engines[over]] / medians[own]
        every = ratios.dropna().groupby(keys)
        line = pd.DataFrame({"step": every.apply(lambda one: abba_ratio(one.droplevel(keys)))})
        line = line.assign(low=every.min(), high=every.max(), step_ms=medians[mode, engine].groupby(keys).median())
        total, vanilla = (sums.xs(which, level=("mode", "engine")) for which in ((mode, engine), beside))
        rates = [tokens_per_s(each) for each in (total, vanilla)]
        line = line.assign(tokens_per_s=rates[0], tokens=rates[0] / rates[1])
        line["acceptance_length"] = lengths(total)["acceptance_length"]
        line["stable"] = is_stable(line)
        line["at_parity"] = _at_parity(compared.xs((mode, engine), level=("mode", "engine")))
        if over:
            line["at_parity"] &= _at_parity(compared.xs(beside, level=("mode", "engine")))
        line["step"] = line["step"].where(line["at_parity"] & line["stable"])
        parts.append(line.join(_parity(compared.xs((mode, engine), level=("mode", "engine")))).assign(mode=mode))
    found = pd.concat(parts).reset_index()
    return found.astype({"prompt": int}) if "prompt" in keys else found  # beside rows without one it is a float


def _parity(compared: pd.Series) -> pd.DataFrame:
    table = pd.DataFrame(map(asdict, compared), compared.index).rename(columns={"equal": "equal_requests"})
    table["shift"] = (table.pop("sum_p4") / table.pop("places")) ** 0.25
    return table[table["requests"] > 0]


def _at_parity(compared: pd.Series) -> pd.Series:
    """Whether each of these is within `parity.tolerance` of bf16 and random weights on a GPU."""
    caches = compared.index.get_level_values("kv_cache_dtype")
    bounds = [tolerance("bfloat16", cache, random_weights=True, on_gpu=True) for cache in caches]
    return pd.Series([parity.within(bound) for parity, bound in zip(compared, bounds, strict=True)], compared.index)
