# SPDX-License-Identifier: Apache-2.0
"""The table of a serving run: each mode beside vLLM never patched, in the same pass over the loads."""

from __future__ import annotations

import math

import pandas as pd

from nwor_lab.cost.ratios import median_between
from nwor_lab.engines.random_weights import FORMAT

NOISE = 0.02
"""Share by which acceptance may differ where vLLM's own passes differ by less: some hundred windows say no more."""
AT_A_RATE = " a second"
"""End of a load's name whose requests come at a rate."""
SETTING = ["gpu", "tp", "k", "kv_cache_dtype", "load_format"]
"""Columns that tell servers apart whose lines are not to be mixed."""
RATIOS = {"itl": "median_itl_ms", "itl_p99": "p99_itl_ms", "ttft": "median_ttft_ms", "ttft_p99": "p99_ttft_ms"}


def summary(frame: pd.DataFrame) -> pd.DataFrame:
    """One line a load and mode of the tidy rows of a run.

    `passes`: over the load. `tokens_per_s`: output tokens a second, median of the passes. `ratio`: that over off's of
    the same pass, median, with the `lowest` and `highest` of the passes, and `low` and `high`, between which their
    median lies (by `ratios.median_between`; of fewer than five passes it says little). Where requests come at a rate,
    which sets how many tokens a second there are, the ratio is of an answer's own tokens a second, by the median time a
    token (TPOT). `itl`, `itl_p99`, `ttft`, `ttft_p99`: ratios of the median and 99th percentile of the time between an
    answer's chunks (a chunk has the tokens of a step), and to its first. `equal`: share of requests with off's text of
    the same pass; for off with its own of the pass before, which is the noise. `acceptance`: tokens a window, median;
    `spread`: highest less lowest of the passes. `parity`: texts are equal as often as off's own, or acceptance differs
    from off's by no more than its spread or `NOISE`; without it a mode has no speed. `fallbacks`: windows that vLLM's
    own write served, missing where nothing was counted. Recorded rows, which have a column `gpu`, are told apart by
    `SETTING`, whose columns the lines keep.
    """
    if "gpu" in frame:
        frame = told_apart(frame)
        of = [name for name in SETTING if name in frame]
        apart = [
            summary(rows.drop(columns=of)).assign(**dict(zip(of, values, strict=True)))
            for values, rows in frame.groupby(of, sort=False)
        ]
        return pd.concat(apart, ignore_index=True)
    wide = frame.pivot_table(index=["load", "repeat"], columns=["metric", "mode"], values="value", sort=False)
    lines = []
    for load in frame["load"].dropna().unique():
        passes = wide.loc[load]
        modes = [mode for mode in frame["mode"].unique() if ("tokens_per_s", mode) in passes]
        acceptance, equal = passes["acceptance_length"], passes.get("equal")
        off = acceptance["off"]
        speed = 1e3 / passes["median_tpot_ms"] if load.endswith(AT_A_RATE) else passes["tokens_per_s"]
        allowed = max(off.max() - off.min(), NOISE * off.median())
        for mode in modes:
            ratio = speed[mode] / speed["off"]
            alike = equal[mode].median() if equal is not None and mode in equal else math.nan
            own = equal["off"].median() if equal is not None and "off" in equal else 1.0
            good = bool(alike >= own or abs(acceptance[mode].median() - off.median()) <= allowed) or mode == "off"
            line = {"load": load, "mode": mode, "tokens_per_s": passes["tokens_per_s"][mode].median()}
            low, high = median_between(ratio)
            line |= {"ratio": ratio.median(), "low": low, "high": high}
            line |= {"lowest": ratio.min(), "highest": ratio.max()}
            line |= {name: (passes[of][mode] / passes[of]["off"]).median() for name, of in RATIOS.items()}
            line = {name: value if good or isinstance(value, str) else math.nan for name, value in line.items()}
            line |= {"passes": ratio.count(), "equal": alike, "acceptance": acceptance[mode].median()}
            line |= {"spread": acceptance[mode].max() - acceptance[mode].min(), "parity": good}
            lines.append(line)
    table = pd.DataFrame(lines)
    counted = frame[frame["metric"] == "nwor.fallbacks_total"].groupby("mode")["value"].sum()
    counted["off"] = 0
    return table.assign(fallbacks=table["mode"].map(counted).astype("Int64"))


def told_apart(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows with a `load_format`: "auto", a checkpoint's weights, where a row has no word of it."""
    return rows.assign(load_format=rows.get("load_format", "auto")).fillna({"load_format": "auto"})


def setting(lines: pd.DataFrame) -> pd.Series:
    """What each line of a summary of several servers ran with, such as "k=4, bf16" or "k=8, fp8, TP=2"."""
    ranks = (", TP=" + lines["tp"].astype(str)).where(lines["tp"] > 1, "")
    caches = lines["kv_cache_dtype"].replace("auto", "bf16")
    return "k=" + lines["k"].astype(str) + ", " + caches + ranks + random_weights(lines)


def random_weights(lines: pd.DataFrame) -> pd.Series:
    """By line what its server's name has of random weights, nothing where they are a checkpoint's."""
    return (lines["load_format"] == FORMAT).map({True: ", random weights", False: ""})


def open_load(lines: pd.DataFrame) -> pd.Series:
    """By line the load, such as ", 8 a second", where `at_once` does not say it; else nothing."""
    return (", " + lines["load"]).where(at_once(lines).isna(), "")


def at_once(lines: pd.DataFrame) -> pd.Series:
    """The requests in flight of each line's load; NaN for an open load."""
    return lines["load"].str.extract(r"(\d+) at once")[0].astype(float)


def verdict(table: pd.DataFrame) -> str:
    """What a summary says, a sentence a mode: how often it is faster or slower in every pass, and at which parity."""
    sentences = []
    off = table[table["mode"] == "off"].set_index("load")
    for mode in (mode for mode in table["mode"].unique() if mode != "off"):
        lines = table[table["mode"] == mode].set_index("load")
        good = lines[lines["parity"]]
        parts = []
        if len(good):
            faster, slower = (good["lowest"] > 1).sum(), (good["highest"] < 1).sum()
            parts.append(f"{good['ratio'].min():.3f} to {good['ratio'].max():.3f} of vLLM's tokens a second")
            parts.append(f"in every pass faster under {faster} of {len(good)} loads and slower under {slower}")
        if len(good) < len(lines):
            parts.append(f"no parity, and no speed, under {len(lines) - len(good)}")
        parts.append(f"{lines['equal'].mean():.1%} of texts equal vLLM's")
        if off["equal"].notna().any():
            parts.append(f"{off['equal'].mean():.1%} of vLLM's equal its own")
        gap, spread = (lines["acceptance"] - off["acceptance"]).abs().max(), off["spread"].max()
        parts.append(f"acceptance differs by {gap:.3f} tokens a window at most, by {spread:.3f} between vLLM's passes")
        sentences.append(f"{mode}: {'; '.join(parts)}.")
    return "\n".join(sentences)
