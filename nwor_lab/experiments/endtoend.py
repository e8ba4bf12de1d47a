# SPDX-License-Identifier: Apache-2.0
"""What the end-to-end runs must show, judged from a bench run's table and report."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import pandas as pd
from transformers import AutoConfig

from nwor_lab.experiments.acceptance import same_share
from nwor_lab.experiments.bench import from_options
from nwor_lab.experiments.bench_table import summary
from nwor_lab.experiments.parity import Parity, of_rows
from nwor_lab.experiments.plan import Plan
from nwor_lab.model.ratios import abba_ratio, is_stable
from nwor_lab.model.traffic import Shape
from nwor_lab.results import Run, tidy


def overview(bench: pd.DataFrame, report: Mapping[str, Any]) -> pd.DataFrame:
    """One line a mode: parity, acceptance, dirty layer-steps, rejected bytes avoided and, beside parity, step time."""
    plan = report["plan"]
    table = summary(bench, from_options(Plan, plan))
    audits = [report["ranks"][mode][0]["audit"] for mode in table["mode"]]
    counters = [report["ranks"][mode][0]["counters"] for mode in table["mode"]]
    table["layer_steps"] = [audit.get("layer_steps", 0) for audit in audits]
    table["dirty"] = [audit.get("dirty_layer_steps", 0) for audit in audits]
    table["MB_avoided"] = [counter.get("bytes_avoided", 0) / 1e6 for counter in counters]
    table.insert(0, "tp", report["spec"]["tp"])
    return table


def step_rows(bench: pd.DataFrame, report: Mapping[str, Any]) -> pd.DataFrame:
    """Rows `step_ms` for the figure: the median step of each repeat, for modes at parity alone."""
    good = [mode for mode, found in report["parity"].items() if Parity(**found).within(report["plan"]["logit_gap"])]
    rows = bench[(bench.metric == "step_ms") & bench["mode"].isin(good)]
    medians = rows.groupby(["mode", "model", "tp", "k", "batch", "seed", "repeat"], as_index=False).value.median()
    return medians.assign(metric="step_ms", unit="ms")


def rank_rows(report: Mapping[str, Any]) -> pd.DataFrame:
    """Proof of treatment: each rank's mode, layers and counters, one line a rank."""
    lines = [
        {
            "asked": mode,
            "rank": rank["rank"],
            "serving": rank["serving"],
            "layers": rank["target_layers"],
            **rank["counters"],
        }
        for mode, ranks in report["ranks"].items()
        for rank in ranks
    ]
    return pd.DataFrame(lines)


def claim(run: Run, bench: pd.DataFrame, report: Mapping[str, Any]) -> None:
    """Record what must hold of one bench run with modes off, cow and stage, audited."""
    spec, plan = report["spec"], report["plan"]
    where = f"TP={spec['tp']}, {spec['dtype']}"
    ranks, parity = report["ranks"], {mode: Parity(**found) for mode, found in report["parity"].items()}
    serving = sorted({(mode, rank["serving"]) for mode, found in ranks.items() for rank in found})
    run.claim(
        f"{where}: every rank serves the mode asked for",
        [(mode, mode) for mode in sorted(ranks)],
        serving,
        all(served == mode for mode, served in serving) and all(len(found) == spec["tp"] for found in ranks.values()),
    )
    cow, stage = parity["cow"], parity["stage"]
    run.claim(f"{where}: cow's greedy tokens are vanilla's", cow.requests, cow.equal, cow.equal == cow.requests)
    run.claim(
        f"{where}: a token of stage that differs is a near tie (nats)",
        f"<= {plan['logit_gap']}",
        stage.largest_gap,
        stage.largest_gap <= plan["logit_gap"],
    )
    run.claim(
        f"{where}: stage shifts no log-probability of vanilla's best tokens further (nats)",
        f"<= {plan['logit_gap']}",
        stage.largest_shift,
        stage.largest_shift <= plan["logit_gap"],
    )
    counts = {mode: acceptance(bench, mode) for mode in plan["modes"]}
    z = same_share((counts["off"], counts["stage"]))
    run.claim(f"{where}: stage accepts as many drafts as vanilla (|z|)", "< 3", abs(z), abs(z) < 3)
    for mode in ("cow", "stage"):
        same = all(rank["counters"] == ranks[mode][0]["counters"] for rank in ranks[mode])
        run.claim(f"{where}: {mode}'s counts are the same on every rank", True, same, same)
        metrics = report["metrics"][mode]
        checks, wrong = metrics["nwor_scheduler_checks"], metrics["nwor_scheduler_mismatches"]
        run.claim(f"{where}: {mode}'s commits are the scheduler's in every step", 0, wrong, checks > 0 and wrong == 0)
    claim_clean(run, where, audited(report))
    least, most = rejected_bytes(report)
    predicted = least if least == most else f"{least} to {most}"
    avoided = ranks["stage"][0]["counters"]["bytes_avoided"]
    run.claim(f"{where}: stage avoids the rejected rows' bytes, no more", predicted, avoided, least <= avoided <= most)


def rejected_bytes(report: Mapping[str, Any]) -> tuple[int, int]:
    """The least and the most bytes that a rank's rejected rows take, by the scheduler's counts of mode `stage`.

    They are the same on a CPU. A GPU runs a step ahead of the scheduler, which never hears of the last windows of
    requests that have just finished: as many as the device counted more, each of which may have rejected all drafts.
    """
    metrics, shape = report["metrics"]["stage"], cache_shape(report["spec"])
    rejected = rejected_rows(metrics)
    unheard = report["ranks"]["stage"][0]["counters"]["windows"] - metrics["spec_decode_num_drafts"]
    row = shape.num_layers * shape.row
    return rejected * row, int(rejected + unheard * report["spec"]["k"]) * row


def rejected_rows(metrics: Mapping[str, float]) -> int:
    """Rows of a layer that the scheduler, whose `metrics` these are, has heard were rejected."""
    return int(metrics["spec_decode_num_draft_tokens"] - metrics["spec_decode_num_accepted_tokens"])


def audited(report: Mapping[str, Any]) -> pd.DataFrame:
    """`audit_rows` over all ranks, as a recorded audit has them: one row a metric, one column a mode."""
    return audit_rows(report).drop(columns="rank").groupby("mode").sum().add_prefix("audit.").T


def claim_clean(run: Run, where: str, table: pd.DataFrame) -> None:
    """Record what must hold of an audit: vanilla is dirty, the modes are not and have written all they kept.

    table: one row a metric, one column a mode, as `audited` makes it.
    """
    wrong = table.loc["audit.dirty_layer_steps"] + table.loc["audit.unwritten_rows"]
    for mode in ("cow", "stage"):
        steps, found = int(table.loc["audit.layer_steps", mode]), int(wrong[mode])
        run.claim(f"{where}: {mode} leaves no layer-step dirty, of {steps}", 0, found, steps > 0 and found == 0)
    dirty = int(table.loc["audit.dirty_layer_steps", "off"])
    run.claim(f"{where}: vanilla leaves dirty layer-steps behind", "> 0", dirty, dirty > 0)


def claim_recorded(run: Run, where: str, table: pd.DataFrame) -> None:
    """The same of a recorded audit, that `cow` gave vanilla's tokens, and that `stage` accepts as many drafts."""
    claim_clean(run, where, table)
    equal, requests = (int(table.loc[metric, "cow"]) for metric in ("equal_requests", "requests"))
    run.claim(f"{where}: cow's greedy tokens are vanilla's", requests, equal, equal == requests)
    accepted, drafts = (table.loc[f"counters.{name}_tokens"] for name in ("committed", "staged"))  # none of vanilla
    z = same_share([(int(accepted[mode]), int(drafts[mode])) for mode in ("cow", "stage")])
    claim = f"{where}: stage accepts as many of {drafts['stage']:.0f} drafts as cow (|z|)"
    run.claim(claim, "< 3", abs(z), abs(z) < 3)


def claim_left(run: Run, where: str, report: Mapping[str, Any]) -> None:
    """Record that what vanilla leaves is the rejected rows, in every layer and on every rank, and nothing else.

    Vanilla's own scheduler counts them. It does not hear of a GPU's last windows: theirs `cow` counts on the device.
    """
    heard, ranks = {mode: rejected_rows(report["metrics"][mode]) for mode in ("off", "cow")}, report["ranks"]
    unheard = ranks["cow"][0]["counters"]["rejected_tokens"] - heard["cow"]
    layers = [rank["audit"]["layer_steps"] // rank["audit"]["steps"] for rank in ranks["off"]]
    predicted = (heard["off"] + unheard) * sum(layers)
    dirty = sum(rank["audit"]["dirty_slots"] for rank in ranks["off"])
    run.claim(f"{where}: slots that vanilla leaves dirty are its rejected rows", predicted, dirty, dirty == predicted)


def audit_rows(report: Mapping[str, Any]) -> pd.DataFrame:
    """What the audit counted, one line a mode and rank."""
    lines = [
        {"mode": mode, "rank": rank["rank"], **rank["audit"]}
        for mode, ranks in report["ranks"].items()
        for rank in ranks
    ]
    return pd.DataFrame(lines).drop(columns="dirty_by_step")


def dirty_rows(report: Mapping[str, Any]) -> pd.DataFrame:
    """Rows `dirty_slots` for the figure: slots that each step left dirty, all layers, by mode and rank."""
    lines = [
        {"mode": mode, "rank": rank["rank"], "step": step, "metric": "dirty_slots", "value": dirty, "unit": "slots"}
        for mode, ranks in report["ranks"].items()
        for rank in ranks
        for step, dirty in enumerate(rank["audit"]["dirty_by_step"])
    ]
    return pd.DataFrame(lines)


def examples(report: Mapping[str, Any], mode: str = "off") -> pd.DataFrame:
    """The first dirty slots that a mode left:
    rank, step, layer, slot, and the request of the batch whose row it was."""
    said = pd.DataFrame(
        [(rank["rank"], text) for rank in report["ranks"][mode] for text in rank["dirty_examples"]],
        columns=["rank", "text"],
    )
    found = said["text"].str.extract(
        r"step (?P<step>\d+), layer (?P<layer>\d+), slot (?P<slot>\d+)(?:, of request (?P<request>\d+))?"
    )
    return said[["rank"]].join(found.astype("Int64"))


SETTING = ["tp", "kv_heads", "kv_cache_dtype", "k", "prompt", "batch"]
"""Columns that tell one measured setting of whole steps on a GPU from another."""
BESIDE = [*SETTING, "engine"]
"""The same, and the engine where it is compared with itself, its mode paused."""
PARITY_TOLERANCE_NATS = {"auto": 0.15, "fp8": 0.75}
"""Nats of a near tie under random weights, by `kv_cache_dtype`: FlashAttention rounds attention weights to fp8 too."""


def gpu_tables(benches: Sequence[pd.DataFrame]) -> dict[str, pd.DataFrame]:
    """Tables `gpu_steps`, `gpu_kernels` and `kv_write_share` from bench tables of whole steps on a GPU.

    The share is that of the paged write's GPU time in the median step of vanilla, of the same run and setting, and
    there is none where vanilla's repeats are not `stable`.
    """
    every = pd.concat(benches, ignore_index=True)
    profiled = every["metric"] == "kernel_us"
    kernels = every[profiled].drop(columns=["step", "position", "rank", "temperature"], errors="ignore")
    steps = every[~profiled & (every["metric"] != "accepted_at")].drop(columns=["kind", "position"], errors="ignore")
    keys = ["run_id", "mode", "model", "seed", *BESIDE]
    writes = kernels[(kernels["mode"] == "off") & (kernels["kind"] == "KV write")].groupby(keys)["value"].mean()
    runs = steps[steps["metric"] == "step_ms"].groupby([*keys, "repeat"])["value"].median().groupby(keys)
    whole = runs.median()
    told = is_stable(pd.DataFrame({"low": runs.min() / whole, "high": runs.max() / whole}))
    share = (writes / (1e3 * whole[told])).dropna().rename("value").reset_index()
    share = tidy(share.assign(metric="kv_write_share", unit="share"))
    return {"gpu_steps": steps, "gpu_kernels": kernels, "kv_write_share": share}


def gpu_steps(steps: pd.DataFrame, kernels: pd.DataFrame) -> pd.DataFrame:
    """One line a setting, engine and mode: the step's time over vanilla's, and where profiled its GPU time.

    Args:
        steps, kernels: tables `gpu_steps` and `gpu_kernels`, of the same settings.

    Returns:
        `step` is the `ratios.abba_ratio` of the ratios of median steps, NaN where the mode is not at parity by
        `PARITY_TOLERANCE_NATS`, `low` and `high` their range over repeats; `stable` says whether every mode of the
        setting is, by `ratios.is_stable`; `equal_requests`, `requests`, `largest_gap` and `largest_shift` are
        `parity`'s, NaN where the setting was not judged; `gpu_ms` is the sum of all kernels of a decode step, `gpu` its ratio to
        vanilla's, and `write_us`, `attention_us`, `nwor_us` parts of it.
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
    judged = steps.groupby([*BESIDE, "mode"])[["metric", "value"]].apply(of_rows)
    found = pd.DataFrame(map(asdict, judged), judged.index).rename(columns={"equal": "equal_requests"})
    ratios = ratios.join(found[found["requests"] > 0])
    bound = ratios.index.get_level_values("kv_cache_dtype").map(PARITY_TOLERANCE_NATS)
    ratios["step"] = ratios["step"].mask(ratios[["largest_gap", "largest_shift"]].max(axis=1) > bound)
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
    return ratios.join(kinds).reset_index().astype({"prompt": int})  # beside rows without one it is read as a float


def clocks(steps: pd.DataFrame) -> pd.DataFrame:
    """Median SM clock (MHz) and power (W) of timed turns, by ranks, engine and mode, and by batch.

    The turns of one engine are of the same settings.

    Args:
        steps: table `gpu_steps`.
    """
    rows = steps[steps["metric"].isin(["sm_clock", "power"])]
    return rows.pivot_table("value", ["tp", "engine", "mode"], ["metric", "batch"], "median").round()


def claim_timed(run: Run, table: pd.DataFrame) -> None:
    """Record what must hold of the timed loads of `gpu_steps`, in the graphs that were timed: within `PARITY_TOLERANCE_NATS`."""
    cow, stage = (table[table["mode"] == mode] for mode in ("cow", "stage"))
    judged = int(table["requests"].notna().sum())
    run.claim("recorded on GPUs: settings timed are judged", len(table), judged, judged == len(table))
    equal, requests = int(cow["equal_requests"].sum()), int(cow["requests"].sum())
    run.claim("recorded on GPUs: cow's tokens in all timed loads are vanilla's", requests, equal, equal == requests > 0)
    for cache, bound in PARITY_TOLERANCE_NATS.items():
        here = stage[stage["kv_cache_dtype"] == cache]
        known = here.loc[here["step"].notna(), ["largest_gap", "largest_shift"]].max(axis=1).max()
        what = f"recorded on GPUs: gap or shift under stage where a time is told, cache {cache}, at most (nats)"
        run.claim(what, bound, known, known <= bound)
    untold = int(stage["step"].isna().sum())
    run.claim("recorded on GPUs: settings of stage that are not at parity, and no time told", 0, untold, untold == 0)


def between_engine_spread(steps: pd.DataFrame) -> pd.DataFrame:
    """How far apart vanilla's median steps lie in the engines of one setting: largest over least, less 1.

    Args:
        steps: table `gpu_steps`, of settings that more than one engine ran, each with its mode paused.
    """
    vanilla = steps[(steps["metric"] == "step_ms") & (steps["mode"] == "off")]
    medians = vanilla.groupby([*BESIDE, "repeat"])["value"].median().groupby(BESIDE).median().unstack("engine")
    several = medians[medians.notna().sum(axis=1) > 1]
    return (several.max(axis=1) / several.min(axis=1) - 1).unstack("batch")


def step_table(table: pd.DataFrame) -> pd.DataFrame:
    """`gpu_steps` as one line a mode, cache, k and prompt, one column a batch; ratios of stable settings alone."""
    treated = table[table["mode"] != "off"]
    columns = [name for name in SETTING if name != "batch"]
    return (
        treated.assign(step=treated["step"].where(treated["stable"]))
        .pivot_table(index=["mode", *columns], columns="batch", values="step", dropna=False)
        .dropna(how="all")
    )


def cache_shape(spec: Mapping[str, Any]) -> Shape:
    """The target's cache as its own config describes it, for a spec as a bench report holds it."""
    config = AutoConfig.from_pretrained(spec["model"])
    heads = config.num_attention_heads
    return Shape(
        num_layers=config.num_hidden_layers,
        num_kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_size=getattr(config, "head_dim", None) or config.hidden_size // heads,
        cache_bytes=1 if spec["kv_cache_dtype"].startswith("fp8") else 4 if spec["dtype"] == "float32" else 2,
        tp=spec["tp"],
    )


def acceptance(bench: pd.DataFrame, mode: str) -> tuple[int, int]:
    """Accepted and offered drafts of one mode, in the first repeat: greedy repeats are the same drafts again."""
    rows = bench[(bench["mode"] == mode) & (bench.repeat == 0)].groupby("metric").value.sum()
    return int(rows["accepted_tokens"]), int(rows["draft_tokens"])


# Earlier names, for modules that still use them.
BOUNDS, engines_apart = PARITY_TOLERANCE_NATS, between_engine_spread
