# SPDX-License-Identifier: Apache-2.0
"""Whole steps on a GPU: from bench tables to ratios to vanilla, by setting."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

import pandas as pd

from nwor_lab import paths
from nwor_lab.builds import join
from nwor_lab.experiments.parity import of_rows, tolerance
from nwor_lab.experiments.survival import lengths, tokens_per_s
from nwor_lab.model.ratios import abba_ratio, is_stable
from nwor_lab.results import Run, read_table, tidy

SETTING = ["tp", "kv_heads", "kv_cache_dtype", "k", "prompt", "batch"]
"""Columns that identify a measured setting of whole steps on a GPU."""
BESIDE = [*SETTING, "engine"]
"""The same, and the engine where it is compared with itself, its mode paused."""


def gpu_tables(benches: Sequence[pd.DataFrame]) -> dict[str, pd.DataFrame]:
    """Tables `gpu_steps`, `gpu_kernels` and `kv_write_share` from bench tables of whole steps on a GPU.

    The share is that of the paged write's GPU time in the median step of vanilla, of the same run and setting; there is
    none where vanilla's repeats are not stable.

    Raises:
        ValueError: the benches are of different builds.
    """
    every = join(benches)
    profiled = every["metric"] == "kernel_us"
    kernels = every[profiled].drop(columns=["step", "position", "rank", "temperature"], errors="ignore")
    steps = every[~profiled & (every["metric"] != "accepted_at")].drop(columns=["kind", "position"], errors="ignore")
    keys = ["run_id", "mode", "model", "seed", *BESIDE, *({"build"} & set(every))]
    writes = kernels[(kernels["mode"] == "off") & (kernels["kind"] == "KV write")].groupby(keys)["value"].mean()
    runs = steps[steps["metric"] == "step_ms"].groupby([*keys, "repeat"])["value"].median().groupby(keys)
    whole = runs.median()
    stable = is_stable(pd.DataFrame({"low": runs.min() / whole, "high": runs.max() / whole}))
    share = (writes / (1e3 * whole[stable])).dropna().rename("value").reset_index()
    share = tidy(share.assign(metric="kv_write_share", unit="share"))
    return {"gpu_steps": steps, "gpu_kernels": kernels, "kv_write_share": share}


def ratios_to_paused(steps: pd.DataFrame) -> pd.DataFrame:
    """The step's time over vanilla's, a line a setting, engine and mode, which are the index.

    Args:
        steps: rows of table `gpu_steps`, or of another bench on GPUs, in bf16 with random weights, of engines beside
            themselves paused.

    Returns:
        `step` is the `ratios.abba_ratio` of the ratios of median steps, NaN unless `at_parity` (by `parity.tolerance`)
        and `stable` (every mode of the setting, by `ratios.is_stable`); `low` and `high` are their range over repeats;
        `equal_requests`, `requests`, `largest_gap`, `largest_shift` and `shift` are `parity`'s, NaN where the setting
        was not compared.
    """
    medians = steps[steps.metric == "step_ms"].groupby([*BESIDE, "repeat", "mode"]).value.median().unstack("mode")
    every = medians.div(medians["off"], axis=0).stack().dropna().groupby([*BESIDE, "mode"])
    ratios = pd.DataFrame(
        {
            "step": every.apply(lambda setting: abba_ratio(setting.droplevel([*BESIDE, "mode"]))),
            "low": every.min(),
            "high": every.max(),
        }
    )
    ratios["stable"] = is_stable(ratios).groupby(BESIDE).transform("all")
    compared = _compared(steps)
    found = pd.DataFrame(map(asdict, compared), compared.index).rename(columns={"equal": "equal_requests"})
    found["shift"] = (found.pop("fourth_powers") / found.pop("places")) ** 0.25
    ratios = ratios.join(found[found["requests"] > 0])
    ratios["at_parity"] = _at_parity(compared)
    return ratios.assign(step=ratios["step"].where(ratios["at_parity"] & ratios["stable"]))


def of_stage(steps: pd.DataFrame) -> pd.DataFrame:
    """The lines of `ratios_to_paused` under `stage`, their settings in columns."""
    return ratios_to_paused(steps).query("mode == 'stage'").reset_index().astype({"prompt": int})


def gpu_steps(steps: pd.DataFrame, kernels: pd.DataFrame) -> pd.DataFrame:
    """One line a setting, engine and mode: `ratios_to_paused`, and where profiled its GPU time.

    Args:
        steps, kernels: tables `gpu_steps` and `gpu_kernels`, of the same settings.

    Returns:
        The columns of `ratios_to_paused`; `gpu_ms` is the sum of all kernels of a decode step, `gpu` its ratio to
        vanilla's, and `write_us`, `attention_us`, `nwor_us` parts of it.
    """
    parts = kernels.pivot_table(index=[*BESIDE, "mode"], columns="kind", values="value")
    total = parts.sum(axis=1).unstack("mode")
    kinds = pd.DataFrame(
        {
            "gpu_ms": total.stack() / 1e3,
            "gpu": total.div(total["off"], axis=0).stack(),
            "write_us": parts["KV write"],
            "attention_us": parts["attention"],
            "nwor_us": parts["NWOR"],
        }
    )
    ratios = ratios_to_paused(steps)
    return ratios.join(kinds).reset_index().astype({"prompt": int})  # beside rows without one it is read as a float


def _compared(steps: pd.DataFrame) -> pd.Series:
    """The `Parity` of each setting, engine and mode."""
    return steps.groupby([*BESIDE, "mode"])[["metric", "value"]].apply(of_rows)


def _at_parity(compared: pd.Series) -> pd.Series:
    """Whether each of these is within `parity.tolerance` of bf16 and random weights on a GPU."""
    caches = compared.index.get_level_values("kv_cache_dtype")
    bounds = [tolerance("bfloat16", cache, random_weights=True, on_gpu=True) for cache in caches]
    return pd.Series([parity.within(bound) for parity, bound in zip(compared, bounds, strict=True)], compared.index)


COMPARED = (("stage", "vllm"), ("direct", "vllm"), ("stage", "direct"))
"""Modes whose steps are compared in table `gpu_direct`; ``vllm`` is an engine that was never patched."""


MAIN = "k == 8 and prompt == 512 and kv_cache_dtype == 'auto'"
"""The settings of `gpu_direct` that one line of a table or a figure shows, by batch and KV heads."""


def beside_control(table: pd.DataFrame) -> pd.DataFrame:
    """One line a setting and pair of modes of `COMPARED`: the first one's step over the other's, in table `gpu_direct`.

    ``direct`` over ``vllm`` is what NWOR's attention gains; ``stage`` over ``direct``, which has the same attention, is
    what holding rows back costs or saves. For that each is taken over its own engine with its mode paused: two engines
    of one setting differ by more.

    Returns:
        Columns `SETTING`, `mode` and `beside`; `ratio`, the `ratios.abba_ratio` of median steps, NaN where a mode is
        not at parity; `low` and `high`, the range over repeats.
    """
    steps = table[table["metric"] == "step_ms"]
    medians = steps.groupby([*SETTING, "repeat", "engine", "mode"])["value"].median().unstack(["engine", "mode"])
    good = _at_parity(_compared(table)).groupby([*SETTING, "mode"]).all().unstack("mode")
    parts = []
    for mode, beside in COMPARED:
        ratios = medians[mode, mode] / (medians["", "vllm"] if beside == "vllm" else medians[beside, beside])
        if beside != "vllm":
            ratios *= medians[beside, "off"] / medians[mode, "off"]
        every = ratios.dropna().groupby(SETTING)
        ratio = every.apply(lambda setting: abba_ratio(setting.droplevel(SETTING)))
        part = pd.DataFrame({"ratio": ratio.where(good[mode] & good[beside]), "low": every.min(), "high": every.max()})
        parts.append(part.reset_index().assign(mode=mode, beside=beside))
    return pd.concat(parts, ignore_index=True).astype({"prompt": int})


def claim(run: Run, table: pd.DataFrame, origin: str = "recorded") -> None:
    """Record what must hold of the steps beside the control."""
    points = beside_control(table)
    worst = points.groupby(["mode", "beside"])["ratio"].max()  # a setting without parity has no ratio
    whole = bool(points["ratio"].notna().all())
    for mode, words in (("stage", "stage's step"), ("direct", "its control's step (direct)")):
        ratio, text = worst[mode, "vllm"], f"{words} over that of vLLM never patched, worst setting timed beside it"
        run.claim(text, "< 1", ratio, whole and ratio < 1, origin)
    costs = points[points["beside"] == "direct"].groupby("batch")["ratio"].median().max()
    text = "stage's step over its control's, each over its own engine paused: median of a batch's settings, worst batch"
    run.claim(text, "<= 1.002", costs, whole and costs <= 1.002, origin)


UNSPLIT = {"flash2": "FlashAttention 2, forced", "triton": "Triton"}
"""Attentions of vLLM that do not split a window's context, by their names in column `attention`."""


def unsplit_steps() -> pd.DataFrame:
    """The recorded steps beside each attention of `UNSPLIT`, with 1, 3, 8 and 15 drafts."""
    return join([read_table(f"gpu_cliff_steps_k{k}", paths.RECORDED) for k in (1, 3, 8, 15)])


def beside_unsplit(table: pd.DataFrame) -> pd.DataFrame:
    """One line a setting: `of_stage` with each attention of `UNSPLIT`, which column `beside` names.

    Args:
        table: `unsplit_steps`.
    """
    each = [of_stage(table[table["attention"] == name]).assign(beside=words) for name, words in UNSPLIT.items()]
    return pd.concat(each, ignore_index=True)


def claim_unsplit(run: Run, points: pd.DataFrame, origin: str = "recorded") -> None:
    """Record what was aimed at where contexts are long and batches small: `beside_unsplit`."""
    for beside in UNSPLIT.values():
        steps = points.query("beside == @beside and prompt >= 8192 and batch <= 4")["step"]
        whole = bool(steps.notna().all())  # without parity there is no ratio
        text = (
            f"stage's step over vanilla's with {beside}, k of 1 to 15, prompts of 8,192 and more, batch 1 and 4, worst"
        )
        run.claim(text, "<= 0.85", steps.max(), whole and steps.max() <= 0.85, origin)


def of_pair(table: pd.DataFrame, beside: str = "off") -> pd.DataFrame:
    """The shipped pair with its own acceptance, a line a number of ranks and mode.

    Args:
        table: `gpu_pair`.
        beside: the mode that the others are held against; vanilla.

    Returns:
        `tokens_per_s`, the tokens that users got over the seconds of all repeats; `rate`, that over the one of
        `beside`, and `slower`, in how many of the `repeats` less than 1; `acceptance_length`, the verifier's tokens of
        a window; and `step_ms`, the median step of the median repeat, with `least_ms` and `most_ms`, that of the
        fastest and of the slowest one.
    """
    keys = ["tp", "mode"]
    total = _sums(table, keys)
    verified = lengths(total)["acceptance_length"]
    lines = pd.DataFrame({"tokens_per_s": tokens_per_s(total), "acceptance_length": verified})
    lines["rate"] = lines["tokens_per_s"] / lines["tokens_per_s"].xs(beside, level="mode")
    each = tokens_per_s(_sums(table, [*keys, "repeat"]))
    over = each.div(each.xs(beside, level="mode")).groupby(keys)
    lines = lines.assign(slower=over.agg(lambda rates: (rates < 1).sum()), repeats=over.size())
    steps = table[table["metric"] == "step_ms"].groupby([*keys, "repeat"])["value"].median().groupby(keys)
    return lines.assign(step_ms=steps.median(), least_ms=steps.min(), most_ms=steps.max())


def _sums(table: pd.DataFrame, keys: list[str]) -> pd.DataFrame:
    return table.groupby([*keys, "metric"])["value"].sum().unstack("metric")


def step_table(table: pd.DataFrame) -> pd.DataFrame:
    """`gpu_steps` as one line a mode, cache, k and prompt, one column a batch."""
    treated = table[table["mode"] != "off"]
    columns = [name for name in SETTING if name != "batch"]
    wide = treated.pivot_table(index=["mode", *columns], columns="batch", values="step", dropna=False)
    return wide.dropna(how="all")


def between_engine_spread(steps: pd.DataFrame) -> pd.DataFrame:
    """How far apart the median steps of paused engines lie in one setting: largest over least, less 1.

    Args:
        steps: table `gpu_steps` or another of settings that more than one engine ran, each with its mode paused.
    """
    vanilla = steps[(steps["metric"] == "step_ms") & (steps["mode"] == "off")]
    medians = vanilla.groupby([*BESIDE, "repeat"])["value"].median().groupby(BESIDE).median().unstack("engine")
    several = medians[medians.notna().sum(axis=1) > 1]
    return (several.max(axis=1) / several.min(axis=1) - 1).unstack("batch")
