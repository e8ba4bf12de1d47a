# SPDX-License-Identifier: Apache-2.0
"""The model of launches and bytes (`breakeven`) against whole steps that were measured on a GPU; none is left out."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pandas as pd

from nwor_lab.cost.breakeven import H200, MODELS, step_difference
from nwor_lab.cost.ratios import abba_ratio
from nwor_lab.cost.traffic import Shape, Window, served_traffic

NO_SETTING = ("mode", "attempt", "repeat", "metric", "value", "unit", "step", "position", "rank", "seed", "temperature")
"""Columns of a bench table that do not identify a setting."""
COUNTS = ["windows", "draft_tokens", "accepted_tokens"]
"""Metrics that give the mean window of a step."""
SAME_ATTENTION = ("cow",)
"""Modes that attend with vanilla's kernel: launches and bytes are all by which their steps differ from vanilla's."""
PREDICTIONS = {"launches and bytes": "predicted", "with its attention measured": "with_attention"}
"""Two ways to predict a step, and the column of `against_measured` that has it."""


def against_measured(bench: pd.DataFrame, attention: pd.DataFrame | None = None) -> pd.DataFrame:
    """Predicted and measured step-time ratio, on an H200, of every point of a bench table, none left out.

    A point is a mode other than vanilla (`vllm`, or `off`) under one setting: all columns but `NO_SETTING`. Its window
    is the mean step of vanilla's own runs, and the prediction is 1 + difference / vanilla's step. The measured ratio is
    the `abba_ratio` of (median step of the mode / median step of vanilla in the same repeat).

    Args:
        bench: tidy rows as `nwor_lab.bench.bench` writes them. `kv_heads` and `kv_cache_dtype`, where there are such
            columns, hold over the model's own.
        attention: table `attention` of `nwor_lab.gpu.attention`, for `stage` and `direct`: their attention kernel is
            another than vanilla's, and with the time of both, measured by the same build, the prediction is of the
            whole step.

    Returns:
        The setting's columns, `mode`, `predicted`, `measured` and its range `low`, `high` over repeats. Where
        `attention` has the setting, `with_attention` is the ratio predicted with it, and NaN elsewhere.

    Raises:
        ValueError: a model is unknown, or vanilla's steps or counts are missing; the message says which.
    """
    setting = [column for column in bench if column not in NO_SETTING]
    runs = bench.loc[bench["metric"].isin(["step_ms", *COUNTS]), [*setting, "mode", "repeat", "metric", "value"]]
    if attention is not None:
        times = attention[attention["metric"] == "time"]
        shape_and_op = ["build", "kv_heads", "cache", "batch", "k", "context", "op"]
        attention = times.groupby(shape_and_op, observed=True, as_index=False)["value"].median()
    points = []
    for values, part in runs.groupby(setting, dropna=False, sort=False):
        where = dict(zip(setting, values, strict=True))
        modes = set(part["mode"])
        vanilla = part[part["mode"] == ("vllm" if "vllm" in modes else "off")]
        steps = _medians(vanilla)
        count = vanilla.groupby("metric")["value"].sum().reindex(COUNTS, fill_value=0.0)
        if steps.empty or not count["windows"]:
            raise ValueError(f"{where}: mode off has no step times or no windows, and all others are held against it")
        number, off_ms = int((vanilla["metric"] == "step_ms").sum()), steps.median()
        requests, drafts = count["windows"] / number, count["draft_tokens"] / number
        window = Window(requests, drafts, drafts - count["accepted_tokens"] / number, requests + drafts)
        shape = shape_of(where)
        for mode in sorted(modes - {"off", "vllm"}):
            ratios = (_medians(part[part["mode"] == mode]) / steps).dropna()
            us, whole = H200.us(step_difference(mode, shape, window)), math.nan
            if attention is not None and mode not in SAME_ATTENTION:
                whole = _with_attention(mode, where, shape, window, attention)
            point = {"predicted": 1 + us / 1e3 / off_ms, "with_attention": 1 + whole / 1e3 / off_ms}
            found = {"measured": abba_ratio(ratios), "low": ratios.min(), "high": ratios.max()}
            points.append({**where, "mode": mode, **point, **found})
    return pd.DataFrame(points)


def beside_no_effect(points: pd.DataFrame) -> pd.DataFrame:
    """How far the model is off, and how far who predicts 1.00 for every setting ("no effect"), as shares of a step.

    Args:
        points: of `against_measured`, none left out.

    Returns:
        A line a mode and `prediction` (`launches and bytes`, or `with its attention measured`): `settings`, `effect`
        (median of |measured - 1|), and the root mean square errors `model` and `no_effect`. By launches and bytes the
        model says nothing of attention, and so knows a whole step of `SAME_ATTENTION` alone.
    """
    lines = []
    for prediction, column in PREDICTIONS.items():
        for mode, rows in points.dropna(subset=column).groupby("mode"):
            effect = rows["measured"] - 1
            line = {"mode": mode, "prediction": prediction, "settings": len(rows), "effect": effect.abs().median()}
            lines.append(line | {"model": _rms(rows[column] - rows["measured"]), "no_effect": _rms(effect)})
    return pd.DataFrame(lines)


def _rms(errors: pd.Series) -> float:
    return float((errors**2).mean() ** 0.5)


def _with_attention(
    mode: str, where: Mapping[str, Any], shape: Shape, window: Window, attention: pd.DataFrame
) -> float:
    """Microseconds of a step over vanilla's: attention and write of each layer as measured alone, by the medians of
    `attention`, and the price of opening and commit. Of the contexts measured, the one nearest the prompt; NaN where
    there is none of the same build."""
    prompt = float(where.get("prompt", math.nan))
    cache = "fp8" if shape.cache_bytes == 1 else "bf16"
    rows = attention[(attention["build"] == where.get("build")) & (attention["cache"] == cache)]
    rows = rows[(rows["kv_heads"] == shape.heads) & (rows["batch"] == where["batch"]) & (rows["k"] == where["k"])]
    if rows.empty or math.isnan(prompt):
        return math.nan
    nearest = min(rows["context"].unique(), key=lambda context: abs(math.log(context / max(1.0, prompt))))
    us = rows[rows["context"] == nearest].set_index("op")["value"]
    around = [moved for kind, moved in served_traffic(mode, shape, window).items() if kind in ("open", "commit")]
    return shape.num_layers * (us["nwor"] - us["flash"]) + sum(map(H200.us, around))


def _medians(rows: pd.DataFrame) -> pd.Series:
    return rows[rows["metric"] == "step_ms"].groupby("repeat")["value"].median()


def shape_of(where: Mapping[str, Any]) -> Shape:
    """The cache on one rank of a setting's model, whose name begins as that of one of `MODELS` does.

    Raises:
        ValueError: the model is unknown.
    """
    model = str(where["model"])
    shape = next((shape for name, shape in MODELS.items() if model.startswith(name)), None)
    if shape is None:
        raise ValueError(f"no cache is known of model {model!r}; known: {', '.join(MODELS)}")
    kv_heads = where.get("kv_heads", math.nan)
    return replace(
        shape,
        num_kv_heads=int(kv_heads) if pd.notna(kv_heads) else shape.num_kv_heads,
        cache_bytes=1 if str(where.get("kv_cache_dtype")).startswith("fp8") else shape.cache_bytes,
        model_bytes=shape.model_bytes or shape.cache_bytes,
        tp=int(where["tp"]),
    )
