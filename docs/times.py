# SPDX-License-Identifier: Apache-2.0
"""Numbers of the documents about time: whole steps, kernels and attention, from the tables of `data/recorded`.

The templates see each public function of this module and of `docs/values.py` by its name.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import numpy as np
import pandas as pd

from docs.values import table, value
from nwor_lab.experiments.gpu_steps import (
    MAIN,
    SETTING,
    beside_control,
    beside_unsplit,
    between_engine_spread,
    gpu_steps,
    of_pair,
    of_stage,
    ratios_to_paused,
    unsplit_steps,
)
from nwor_lab.microbench.attention import net
from nwor_lab.microbench.inputs import KEYS
from nwor_lab.model.breakeven import H200, published_differences, published_survival
from nwor_lab.model.predicted import against_measured, beside_no_effect
from nwor_lab.model.ratios import abba_ratio
from nwor_lab.plots import kernels
from nwor_lab.plots.attention import EACH, frame, over_each, saved


def slashes(ratios: Iterable[float]) -> str:
    """Ratios of steps, by batch as a rule, between slashes; a dash where a mode was not at parity."""
    return " / ".join("-" if np.isnan(ratio) else f"{ratio:.3f}" for ratio in ratios)


# -- whole steps -----------------------------------------------------------------------------------------------------


@functools.cache
def steps() -> pd.DataFrame:
    """One line a setting and mode, as `gpu_steps` has it: `step` over vanilla's in the same engine, `low` and `high`.

    `step` is missing where the mode was not at parity (column `at_parity`) or repeats lie too far apart (`stable`);
    `nwor_share` is the part of the GPU time that NWOR's own kernels take; `tuned_on` says whether the tuning was
    searched on the batch and prompt.
    """
    found = gpu_steps(table("gpu_steps"), table("gpu_kernels")).query("mode != 'off'").copy()
    found["nwor_share"] = found["nwor_us"] / found["gpu_ms"] / 1e3
    searched = table("gpu_steps").groupby(["prompt", "batch"])["tuned_on"].first()
    return found.join(searched, on=["prompt", "batch"])


def step(mode: str, batch: int, column: str = "step", **other: Any) -> float:
    """A value of one setting; of Llama-2-7B's shape, k=8, prompts of 512, bf16, one rank, unless said otherwise."""
    where = {"tp": 1, "kv_heads": 32, "kv_cache_dtype": "auto", "k": 8, "prompt": 512}
    return value(steps(), column, mode=mode, batch=batch, **{**where, **other})


def step_row(mode: str, column: str = "step", batches: tuple[int, ...] = (1, 4, 16, 64), **other: Any) -> str:
    """`step` by batch, between slashes."""
    return slashes(step(mode, batch, column, **other) for batch in batches)


def engines_timed() -> list[tuple[Any, ...]]:
    """Mode, k, KV heads, dtype of the cache and ranks of each engine in `steps`, `stage` and long windows first."""
    keys = ["mode", "k", "kv_heads", "kv_cache_dtype", "tp"]
    lines = steps().query("prompt == 512")[keys].drop_duplicates()
    lines = lines.sort_values(
        ["mode", "k", "tp", "kv_heads", "kv_cache_dtype"], ascending=[False, False, True, False, True]
    )
    return list(lines.itertuples(index=False, name=None))


@functools.cache
def controls() -> pd.DataFrame:
    """The lines of `beside_control`: one a setting and pair of modes."""
    return beside_control(table("gpu_direct"))


def control(mode: str, beside: str, batches: tuple[int, ...] = (1, 4, 16, 64), **other: Any) -> str:
    """A mode's step over another's in a run with the control, by batch, between slashes; see `beside_control`.

    Of Llama-2-7B's shape, k=8, prompts of 512 and a bf16 cache, unless said otherwise.
    """
    where = {"mode": mode, "beside": beside, "kv_heads": 32, "kv_cache_dtype": "auto", "k": 8, "prompt": 512} | other
    return slashes(value(controls(), "ratio", batch=batch, **where) for batch in batches)


def no_write() -> str:
    """`stage` over its control, each over its own engine paused: median, least and greatest of a setting."""
    ratios = controls().query("beside == 'direct'")["ratio"]
    if ratios.isna().any():
        raise LookupError("a setting of gpu_direct is not at parity")
    return f"{ratios.median():.3f} (median of {len(ratios)} settings, {ratios.min():.3f} to {ratios.max():.3f})"


def no_write_by(column: str) -> str:
    """The median of these by batch or by `k`, between slashes."""
    return slashes(controls().query("beside == 'direct'").groupby(column)["ratio"].median())


def paused_over_unpatched() -> str:
    """Steps of the paused engines of `gpu_direct` over those of vLLM never patched: medians by batch."""
    rows = table("gpu_direct").query("metric == 'step_ms' and mode in ('off', 'vllm')")
    medians = rows.groupby([*SETTING, "repeat", "engine"])["value"].median().unstack("engine")
    ratios = medians[["direct", "stage"]].div(medians[""], axis=0).stack()
    return slashes(ratios.groupby("batch").median())


@functools.cache
def unsplit() -> pd.DataFrame:
    """The lines of `beside_unsplit`."""
    return beside_unsplit(unsplit_steps())


def unsplit_row(beside: str, prompt: int, batches: tuple[int, ...] = (1, 4, 16), k: int = 8) -> str:
    """A step of `stage` over vanilla's with an attention that splits no context, by batch, between slashes."""
    return slashes(value(unsplit(), "step", beside=beside, prompt=prompt, batch=batch, k=k) for batch in batches)


@functools.cache
def next_steps() -> pd.DataFrame:
    """The lines of `ratios_to_paused` for vLLM 0.33."""
    return ratios_to_paused(table("gpu_next_steps")).reset_index()


def next_row(mode: str, prompt: int) -> str:
    """A step over vanilla's in vLLM 0.33, by batch, between slashes."""
    return slashes(value(next_steps(), "step", mode=mode, prompt=prompt, batch=batch) for batch in (1, 4, 16))


@functools.cache
def long_steps() -> pd.DataFrame:
    """The lines of `of_stage` at long contexts."""
    return of_stage(table("gpu_long_steps"))


def long_step_row(**where: Any) -> str:
    """A step of `stage` over vanilla's at long contexts, at batch 1 and 4, between slashes."""
    return slashes(value(long_steps(), "step", batch=batch, **where) for batch in (1, 4))


@functools.cache
def pair(tp: int, beside: str = "off") -> pd.DataFrame:
    """The lines of `of_pair` on so many ranks, by mode, over mode `beside`."""
    return of_pair(table("gpu_pair"), beside).loc[tp]


def pair_rates(tp: int) -> str:
    """Tokens a second of `pair` over vanilla's, under each other mode."""
    return ", ".join(f"{ratio:.2f} under `{mode}`" for mode, ratio in pair(tp)["rate"].drop("off").items())


def pair_by_attempt(tp: int, mode: str) -> str:
    """The `rate` of `of_pair` in each attempt alone, between slashes."""
    attempts = table("gpu_pair").query("tp == @tp").groupby("attempt")
    return " / ".join(f"{of_pair(rows).loc[(tp, mode), 'rate']:.2f}" for _, rows in attempts)


def pair_loss(mode: str) -> float:
    """The share of vanilla's tokens a second that the shipped pair loses under a mode, on one rank."""
    return float(1 - pair(1)["rate"][mode])


def pair_texts(metric: str) -> float:
    """The sum of `equal_requests` or `requests`, or the `largest_gap`, of `stage` in the runs of the trained pair.

    What was measured again gave the same texts, which count once.
    """
    runs = pd.concat([table(name) for name in ("gpu_audit", "gpu_next_audit", "gpu_pair")])
    rows = runs.query("mode == 'stage' and metric == @metric and attempt == 1")["value"]
    return float(rows.max() if metric == "largest_gap" else rows.sum())


def control_us(kind: str, mode: str, batch: int) -> float:
    """GPU microseconds of a decode step in kernels of a kind, in the run with the control, 32 KV heads."""
    rows = table("gpu_direct").query(MAIN).query("metric == 'kernel_us' and batch == @batch and kv_heads == 32")
    return float(rows.loc[(rows["kind"] == kind) & (rows["mode"] == mode), "value"].mean())


def settings(mode: str) -> pd.DataFrame:
    """The lines of `steps` of one mode that have a ratio."""
    return steps().query("mode == @mode and step.notna()")


def faster(tuned_on: bool) -> str:
    """In how many settings `stage` is faster, of how many on which the tuning was searched, or was not."""
    rows = steps().query("mode == 'stage' and tuned_on == @tuned_on")
    return f"{(rows['step'] < 1).sum()} of {len(rows)}"


def timed_texts(mode: str, beside: str = "") -> str:
    """How many texts of the timed loads of whole steps are vanilla's under a mode, of how many, counted in each repeat.

    beside: an attention of `UNSPLIT` in words, for the loads with that one; empty: those of `gpu_steps`.
    """
    rows = (unsplit().query("beside == @beside") if beside else steps()).query("mode == @mode")
    return f"{rows['equal_requests'].sum():,.0f} of {rows['requests'].sum():,.0f}"


def in_words(lines: pd.DataFrame) -> str:
    """The settings of some lines of `steps`, in words."""
    caches = {"auto": "bf16", "fp8": "fp8"}
    return "; ".join(
        f"{line.kv_heads} KV heads, {caches[line.kv_cache_dtype]} cache, TP={line.tp}, k={line.k}, "
        f"prompts of {line.prompt:,}, batch {line.batch}"
        for line in lines.itertuples()
    )


def shift(kv_cache_dtype: str) -> float:
    """The largest shift of a log-probability under `stage`, in nats, in timed loads and in the audits before them."""
    timed = steps().query("mode == 'stage' and kv_cache_dtype == @kv_cache_dtype")["largest_shift"].max()
    audits = table("gpu_audited_steps").query("mode == 'stage' and engine == mode and metric == 'largest_shift'")
    return float(max(timed, audits.loc[audits["kv_cache_dtype"] == kv_cache_dtype, "value"].max()))


def repeat_spread(quantile: float = 1.0) -> float:
    """How far repeats of `stage` lie from their ratio, as a factor less 1, up to batch 16."""
    rows = steps().query("mode == 'stage' and batch <= 16")
    return float((np.maximum(rows["high"] / rows["step"], rows["step"] / rows["low"]) - 1).quantile(quantile))


def engine_spread(name: str) -> float:
    """How far apart vanilla's steps lie in engines of one setting of table `name`, at the worst: a factor less 1."""
    return float(between_engine_spread(table(name)).max().max())


def order_bias() -> float:
    """Over settings of batch 64, prompts of 512: the median ratio in one order of variants over the other order's."""
    rows = table("gpu_steps").query("metric == 'step_ms' and batch == 64 and prompt == 512")
    medians = rows.groupby([*SETTING, "engine", "repeat", "mode"])["value"].median().unstack("mode")
    ratios = (medians["stage"] / medians["off"]).dropna().reset_index("repeat", name="ratio")
    orders = ratios.groupby([*SETTING, ratios["repeat"] % 2])["ratio"].median().unstack()
    return float((orders[0] / orders[1] - 1).median())


@functools.cache
def measured_steps() -> pd.DataFrame:
    """Every whole step of `gpu_steps` beside its prediction."""
    return against_measured(table("gpu_steps"), attention=table("attention"))


@functools.cache
def predictions() -> pd.DataFrame:
    """Whole steps predicted from launches, bytes and each layer's attention: `with_attention`, `measured`, `off`."""
    points = measured_steps().dropna(subset="with_attention")
    return points.assign(off=points["measured"] - points["with_attention"])


@functools.cache
def model_errors() -> pd.DataFrame:
    """Errors of the model for whole steps and of predicting 1.00, by mode and prediction: `beside_no_effect`."""
    return beside_no_effect(measured_steps())


def model_error(column: str, mode: str = "stage", with_attention: bool = False) -> float:
    """A value of one line of `model_errors`."""
    prediction = "with its attention measured" if with_attention else "launches and bytes"
    return value(model_errors(), column, mode=mode, prediction=prediction)


@functools.cache
def faster_points(mode: str) -> tuple[int, int]:
    """At how many published models, k and batches a mode is predicted to be faster, and how many there are."""
    points = published_differences(published_survival(), (1, 16, 64, 256), modes=(mode,))
    return int(points["is_faster"].sum()), len(points)


def matmul_ratio(batch: int) -> float:
    """GPU time of the matmuls under `stage` over vanilla's, which no mode touches: 32 KV heads, bf16, one rank."""
    rows = table("gpu_kernels").query("tp == 1 and kv_heads == 32 and kv_cache_dtype == 'auto' and engine == 'stage'")
    rows = rows.query("k == 8 and prompt == 512 and batch == @batch and kind == 'matmul'")
    means = rows.groupby("mode")["value"].mean()
    return float(means["stage"] / means["off"])


def write_share(batch: int, tp: int = 1, kv_cache_dtype: str = "auto") -> float:
    """The paged KV write's share of vanilla's step, mean of the engines that were profiled."""
    rows = table("kv_write_share").query("kv_heads == 32 and tp == @tp and batch == @batch")
    return float(rows.loc[rows["kv_cache_dtype"] == kv_cache_dtype, "value"].mean())


def share_row(**other: Any) -> str:
    """`write_share` by batch, between slashes."""
    return " / ".join(f"{100 * write_share(batch, **other):.1f} %" for batch in (1, 4, 16, 64))


@functools.cache
def cpu_ratios() -> pd.DataFrame:
    """Steps over vanilla's in the recorded run on a CPU, one rank: a row a repeat, a column a mode."""
    wide = table("steps").query("tp == 1").pivot(index="repeat", columns="mode", values="value")
    return wide[["cow", "stage"]].div(wide["off"], axis=0)


def cpu_step(mode: str) -> float:
    """A mode's step over vanilla's in the recorded run on a CPU."""
    return abba_ratio(cpu_ratios()[mode])


# -- kernels alone ---------------------------------------------------------------------------------------------------


def commit_speedup(*peers: str) -> float:
    """How many times faster one commit of all layers is than the fastest of these peers, in its worst shape.

    Of 9 rows, a third of them kept.
    """
    ratios = kernels.speedups(table("kernel_times"))[list(peers)]
    return float(ratios.xs(9, level="rows").xs(3, level="kept").min().min())


def held(metric: str, all_move: bool = False) -> pd.Series:
    """Of commit, restore and log, by shape: a share of a copy's bandwidth of 2,304 rows, or `empties` of 9 rows.

    `gross` has the launch in it, `net` has not; `empties` is the time over the empty kernel's. `all_move` leaves the
    shapes in which every row moves.
    """
    times = table("kernel_times")
    rows = kernels.modelled(times).query("kept in (0, 3, 9)")
    rows["empties"] = rows["us"] / kernels.ceilings(times)[1]
    rows = rows[rows["rows"] == (9 if metric == "empties" else 2304)]
    return (kernels.all_move(rows) if all_move else rows)[metric]


@functools.cache
def attention() -> pd.DataFrame:
    """One line a shape: `ratio` of attention and write of a layer in one launch to the faster backend of vLLM's.

    `alone` and `between`: us saved beside FlashAttention 3, in samples of a layer alone and in a chain of kernels.
    """
    rows = table("attention")
    return net(rows).reset_index().merge(saved(rows))


@functools.cache
def layers(name: str) -> pd.DataFrame:
    """One line a shape of a table: `beside`, one of `EACH`, and the `ratio` of a layer in one launch to it alone."""
    over = over_each(table(name))
    return over.melt(KEYS, list(EACH.values()), "beside", "ratio").dropna(subset="ratio")


def layer_row(name: str, beside: str, batches: tuple[int, ...] = (1, 4, 16), **where: Any) -> str:
    """`ratio` of `layers` by batch, between slashes; of 8 KV heads, k=8 and a bf16 cache, unless said otherwise."""
    where = {"beside": beside, "kv_heads": 8, "k": 8, "cache": "bf16"} | where
    return " / ".join(f"{value(layers(name), 'ratio', batch=batch, **where):.2f}" for batch in batches)


def met(cache: str, context: int) -> str:
    """In how many of the long contexts' shapes a layer takes at most what was aimed at beside FlashAttention 3."""
    rows = layers("gpu_long").query("beside == 'FlashAttention 3' and cache == @cache and context == @context")
    aims = rows["batch"].map({1: 0.85, 4: 0.95})
    return f"{(rows['ratio'] <= aims).sum()} of {len(rows)}"


def layer_range(name: str, beside: str, where: str = "ratio > 0") -> str:
    """The least and the greatest `ratio` of `layers` beside that attention, in the lines of a query."""
    ratios = layers(name).query("beside == @beside").query(where)["ratio"]
    return f"{ratios.min():.2f} to {ratios.max():.2f}"


def layer_rate(batch: int, op: str = "nwor") -> float:
    """Terabytes a second at which a layer moves what it has to: 131,072 positions, 8 KV heads, k=8, a bf16 cache."""
    shapes = frame(table("gpu_long"), bandwidth=1.0)
    where = {"batch": batch, "context": 131072, "kv_heads": 8, "k": 8, "cache": "bf16"}
    return value(shapes, "bytes", **where) / value(shapes, op, **where) / 1e6


def copy_rate() -> float:
    """Terabytes a second, read and written, of a large copy on an H200."""
    return H200.copy_bytes_per_s / 1e12


def busy() -> float:
    """Percent of their peak at most that memory, tensor cores and issue slots reach at batch 1, context 512."""
    rows = table("attention_counters").query(
        "unit == '%' and context == 512 and batch == 1 and op in ('nwor', 'flash')"
    )
    return float(rows["value"].max())
