# SPDX-License-Identifier: Apache-2.0
"""What one run of all modes must show, from the table and the report that a bench leaves, and recorded audits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd
from transformers import AutoConfig

from nwor_lab import paths
from nwor_lab.experiments.bench_table import summary
from nwor_lab.experiments.gpu_steps import PARITY_TOLERANCE_NATS
from nwor_lab.experiments.options import from_options
from nwor_lab.experiments.parity import Parity
from nwor_lab.experiments.plan import Plan
from nwor_lab.experiments.survival import same_share
from nwor_lab.model.traffic import Shape
from nwor_lab.results import Run, read_table

Report = Mapping[str, Any]


# -- tables to look at -------------------------------------------------------------------------------------------------


def readable(table: pd.DataFrame) -> pd.DataFrame:
    """The table as text: whole numbers in columns of counts, else three decimals; nothing where there is no value."""

    def text_of(column: pd.Series) -> pd.Series:
        numbers = pd.to_numeric(column, errors="coerce")
        digits = 0 if (numbers.dropna() % 1 == 0).all() else 3
        written = numbers.map(f"{{:,.{digits}f}}".format)
        return written.where(numbers.notna(), column.astype(object).where(column.notna(), ""))

    return table.apply(text_of)


def overview(bench: pd.DataFrame, report: Report) -> pd.DataFrame:
    """One line a mode: parity, acceptance, dirty layer-steps, rejected bytes avoided and, beside parity, step time."""
    table = summary(bench, from_options(Plan, report["plan"])).drop(columns=["batch", "spread_ms"], errors="ignore")
    ranks = [report["ranks"][mode][0] for mode in table["mode"]]
    table["layer_steps"] = [rank["audit"].get("layer_steps", 0) for rank in ranks]
    table["dirty"] = [rank["audit"].get("dirty_layer_steps", 0) for rank in ranks]
    table["MB_avoided"] = [rank["counters"].get("bytes_avoided", 0) / 1e6 for rank in ranks]
    table.insert(0, "tp", report["spec"]["tp"])
    return table


def rank_table(report: Report) -> pd.DataFrame:
    """Proof of treatment: the mode served, target layers and counters, one column a mode and rank."""
    columns = {
        (mode, f"rank {rank['rank']}"): {
            "mode served": rank["serving"],
            "target layers": rank["target_layers"],
            **rank["counters"],
        }
        for mode, ranks in report["ranks"].items()
        for rank in ranks
    }
    return pd.DataFrame(columns)


def step_rows(bench: pd.DataFrame, report: Report) -> pd.DataFrame:
    """Rows `step_ms` for the figure: the median step of each repeat, for modes at parity alone."""
    good = [mode for mode, found in report["parity"].items() if Parity(**found).within(report["plan"]["logit_gap"])]
    rows = bench[(bench.metric == "step_ms") & bench["mode"].isin(good)]
    medians = rows.groupby(["mode", "model", "tp", "k", "batch", "seed", "repeat"], as_index=False).value.median()
    return medians.assign(metric="step_ms", unit="ms")


def audit_rows(report: Report) -> pd.DataFrame:
    """What the audit counted, one line a mode and rank."""
    lines = [
        {"mode": mode, "rank": rank["rank"], **rank["audit"]}
        for mode, ranks in report["ranks"].items()
        for rank in ranks
    ]
    return pd.DataFrame(lines).drop(columns="dirty_by_step")


def dirty_rows(report: Report) -> pd.DataFrame:
    """Rows `dirty_slots` for the figure: slots that each step left dirty, all layers, by mode and rank."""
    lines = [
        {"mode": mode, "rank": rank["rank"], "step": step, "metric": "dirty_slots", "value": dirty, "unit": "slots"}
        for mode, ranks in report["ranks"].items()
        for rank in ranks
        for step, dirty in enumerate(rank["audit"]["dirty_by_step"])
    ]
    return pd.DataFrame(lines)


def audited(report: Report) -> pd.DataFrame:
    """`audit_rows` over all ranks: one row a metric, one column a mode."""
    return audit_rows(report).drop(columns="rank").groupby("mode").sum().add_prefix("audit.").T


def recorded_audits() -> dict[str, pd.DataFrame]:
    """Audits recorded on H200s, by what ran: one row a metric, one column a mode.

    The shipped pair over one rank and over two, where the counts are those of one rank, and the configurations of whole
    steps that were timed after their audit, summed over their passes.
    """
    small = read_table("gpu_audit", paths.RECORDED)
    found = {}
    for tp, rows in small.groupby("tp"):
        found[f"shipped pair, TP={tp}"] = table = _by_mode(rows, "max")
        table.attrs["same_on_ranks"] = bool((rows.groupby(["metric", "mode"]).value.nunique() == 1).all())
    timed = read_table("gpu_audited_steps", paths.RECORDED).query("engine == '' or engine == mode")
    for (heads, cache), rows in timed.groupby(["kv_heads", "kv_cache_dtype"], sort=False):
        where = f"Llama-2-7B's shape, {heads} KV heads, {'fp8' if cache == 'fp8' else 'bf16'} cache"
        found[where] = _by_mode(rows, "sum")
        found[where].attrs["tolerance"] = PARITY_TOLERANCE_NATS[cache]
    return found


def _by_mode(rows: pd.DataFrame, how: str) -> pd.DataFrame:
    both = rows.groupby(["metric", "mode"]).value.agg(["max", how]).set_axis(["max", "all"], axis=1)
    largest = both.index.get_level_values("metric").str.startswith("largest")
    return both["max"].where(largest, both["all"]).unstack("mode")


# -- claims ------------------------------------------------------------------------------------------------------------


def claim(run: Run, bench: pd.DataFrame, report: Report) -> None:
    """Record what must hold of one bench run with modes off, cow and stage, audited."""
    spec, plan = report["spec"], report["plan"]
    where, bound = f"TP={spec['tp']}, {spec['dtype']}", plan["logit_gap"]
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
    gap, shift = stage.largest_gap, stage.largest_shift
    run.claim(f"{where}: a token of stage that differs is a near tie (nats)", f"<= {bound}", gap, gap <= bound)
    moved = f"{where}: stage shifts no log-probability of vanilla's best tokens further (nats)"
    run.claim(moved, f"<= {bound}", shift, shift <= bound)
    z = same_share([accepted_drafts(bench, mode) for mode in ("off", "stage")])
    run.claim(f"{where}: stage accepts as many drafts as vanilla (|z|)", "< 3", abs(z), abs(z) < 3)
    for mode in ("cow", "stage"):
        same = all(rank["counters"] == ranks[mode][0]["counters"] for rank in ranks[mode])
        run.claim(f"{where}: {mode}'s counts are the same on every rank", True, same, same)
        metrics = report["metrics"][mode]
        checked, wrong = int(metrics["nwor_scheduler_checks"]), int(metrics["nwor_scheduler_mismatches"])
        holds = checked > 0 and wrong == 0
        run.claim(f"{where}: {mode}'s commits are the scheduler's in every step", 0, wrong, holds)
    claim_clean(run, where, audited(report))
    least, most = rejected_bytes(report)
    predicted = least if least == most else f"{least} to {most}"
    avoided = ranks["stage"][0]["counters"]["bytes_avoided"]
    run.claim(f"{where}: stage avoids the rejected rows' bytes, no more", predicted, avoided, least <= avoided <= most)


def claim_clean(run: Run, where: str, table: pd.DataFrame, origin: str = "measured") -> None:
    """Record what must hold of an audit: vanilla is dirty, the modes are not and have written all they kept.

    table: one row a metric, one column a mode, as `audited` makes it.
    """
    wrong = table.loc["audit.dirty_layer_steps"] + table.loc["audit.unwritten_rows"]
    for mode in ("cow", "stage"):
        steps, found = int(table.loc["audit.layer_steps", mode]), int(wrong[mode])
        text = f"{where}: {mode} leaves no layer-step dirty, of {steps}"
        run.claim(text, 0, found, steps > 0 and found == 0, origin)
    dirty = int(table.loc["audit.dirty_layer_steps", "off"])
    run.claim(f"{where}: vanilla leaves dirty layer-steps behind", "> 0", dirty, dirty > 0, origin)


def claim_left(run: Run, where: str, report: Report) -> None:
    """Record that what vanilla leaves is the rejected rows, in every layer and on every rank, and nothing else.

    Vanilla's own scheduler counts them. It does not hear of a GPU's last windows: theirs `cow` counts on the device.
    """
    heard, ranks = {mode: rejected_rows(report["metrics"][mode]) for mode in ("off", "cow")}, report["ranks"]
    unheard = ranks["cow"][0]["counters"]["rejected_tokens"] - heard["cow"]
    layers = [rank["audit"]["layer_steps"] // rank["audit"]["steps"] for rank in ranks["off"]]
    predicted = (heard["off"] + unheard) * sum(layers)
    dirty = sum(rank["audit"]["dirty_slots"] for rank in ranks["off"])
    run.claim(f"{where}: slots that vanilla leaves dirty are its rejected rows", predicted, dirty, dirty == predicted)


def claim_recorded(run: Run, where: str, table: pd.DataFrame) -> None:
    """Record what must hold of one of `recorded_audits`: clean modes, `cow`'s tokens, `stage`'s acceptance.

    Of the shipped pair also that what vanilla leaves is the rejected rows; of steps under random weights, whose texts
    part more easily, that `stage` stays within their tolerance.
    """
    where = f"H200, {where}"
    claim_clean(run, where, table, "recorded")
    equal, requests = (int(table.loc[metric, "cow"]) for metric in ("equal_requests", "requests"))
    run.claim(f"{where}: cow's greedy tokens are vanilla's", requests, equal, equal == requests, "recorded")
    accepted, drafts = (table.loc[f"counters.{name}_tokens"] for name in ("committed", "staged"))  # none of vanilla
    z = same_share([(int(accepted[mode]), int(drafts[mode])) for mode in ("cow", "stage")])
    text = f"{where}: stage accepts as many of {drafts['stage']:.0f} drafts as cow (|z|)"
    run.claim(text, "< 3", abs(z), abs(z) < 3, "recorded")
    if bound := table.attrs.get("tolerance"):
        furthest = float(table.loc[["largest_gap", "largest_shift"], "stage"].max())
        text = f"{where}: gap or shift under stage, at most (nats)"
        run.claim(text, f"<= {bound}", furthest, furthest <= bound, "recorded")
    else:
        layers = table.loc["audit.layer_steps", "off"] // table.loc["audit.steps", "off"]
        rows = int(table.loc["counters.rejected_tokens", "cow"] * layers)
        slots = int(table.loc["audit.dirty_slots", "off"])
        text = f"{where}: slots that vanilla leaves dirty are its rejected rows"
        run.claim(text, rows, slots, rows == slots, "recorded")
        same = table.attrs["same_on_ranks"]
        run.claim(f"{where}: every rank counts the same", True, same, same, "recorded")


def claim_timed(run: Run, table: pd.DataFrame) -> None:
    """Record what must hold of the timed loads of `gpu_steps.gpu_steps`: each was compared in the graphs that were
    timed, and is within `PARITY_TOLERANCE_NATS`."""
    cow, stage = (table[table["mode"] == mode] for mode in ("cow", "stage"))

    def say(text: str, expected: object, value: object, holds: bool) -> None:
        run.claim(f"recorded on GPUs: {text}", expected, value, holds, "recorded")

    compared = int(table["requests"].notna().sum())
    say("timed settings whose tokens were compared", len(table), compared, compared == len(table))
    equal, requests = int(cow["equal_requests"].sum()), int(cow["requests"].sum())
    say("cow's tokens in all timed loads are vanilla's", requests, equal, equal == requests > 0)
    for cache, bound in PARITY_TOLERANCE_NATS.items():
        rows = stage[(stage["kv_cache_dtype"] == cache) & stage["step"].notna()]
        furthest = float(rows[["largest_gap", "largest_shift"]].max(axis=1).max())
        text = f"gap or shift under stage where a time is reported, cache {cache}, at most (nats)"
        say(text, f"<= {bound}", furthest, furthest <= bound)
    unreported = int(stage["step"].isna().sum())
    say("settings of stage that are not at parity, and have no time", 0, unreported, unreported == 0)


# -- what the claims predict -------------------------------------------------------------------------------------------


def rejected_bytes(report: Report) -> tuple[int, int]:
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


def accepted_drafts(bench: pd.DataFrame, mode: str) -> tuple[int, int]:
    """Accepted and offered drafts of one mode, in the first repeat: greedy repeats are the same drafts again."""
    rows = bench[(bench["mode"] == mode) & (bench.repeat == 0)].groupby("metric").value.sum()
    return int(rows["accepted_tokens"]), int(rows["draft_tokens"])


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
