# SPDX-License-Identifier: Apache-2.0
"""What one run of all modes must show, from the table and the report that a bench leaves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd
from pandas.io.formats.style import Styler
from transformers import AutoConfig

from nwor.settings import ATTENDING, CLEAN
from nwor_lab.audit.auditor import FAULTS
from nwor_lab.bench.bench_table import summary
from nwor_lab.bench.parity import OUTLIER_FACTOR, Parity
from nwor_lab.bench.plan import UNPATCHED, Plan
from nwor_lab.bench.survival import same_share
from nwor_lab.cost.traffic import Shape
from nwor_lab.run.results import Run

Report = Mapping[str, Any]
ACCEPTED = "spec_decode_num_accepted_tokens"


# -- tables to look at -------------------------------------------------------------------------------------------------


def readable(table: pd.DataFrame) -> Styler:
    """The table for a page: whole numbers in columns of counts, else three decimals; nothing where there is none."""
    return table.convert_dtypes().style.format(precision=3, thousands=",", na_rep="")


def overview(bench: pd.DataFrame, report: Report) -> pd.DataFrame:
    """One line a mode beside the first, the baseline: tokens, cache, commits and, beside parity, steps.

    `equal`: requests with the baseline's tokens. `gap_nats`: how much less likely the baseline thought a token that
    differs, at most. `dirty`: layer-steps of rank 0 that left a byte outside the kept rows. `accepted`: drafts by
    vLLM's scheduler; `committed`: by the mode, where it commits. `step`: the repeats' ratio of steps, and its range.
    """
    table = summary(bench, Plan(**report["plan"])).set_index("mode")
    lines = []
    for mode, (rank, *_) in report["ranks"].items():
        line, audit = table.loc[mode], rank["audit"]
        accepted, committed = (report["metrics"][mode][ACCEPTED], rank["counters"].get("committed_tokens", 0))
        made = {
            "TP": report["spec"]["tp"],
            "mode": mode,
            "equal": f"{line['equal_requests']:.0f}/{line['requests']:.0f}",
        }
        made["gap_nats"] = f"{line['largest_gap']:.3f}"
        made["dirty"] = f"{audit['dirty_layer_steps']:,} of {audit['layer_steps']:,}" if audit else ""
        made |= {"accepted": int(accepted), "committed": f"{committed:,}" if mode in CLEAN else ""}
        if "ratio" in line and pd.notna(line["ratio"]):
            made |= {"step": f"{line['ratio']:.3f}", "low to high": f"{line['low']:.3f} to {line['high']:.3f}"}
        lines.append(made)
    return pd.DataFrame(lines).fillna("")


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
    good = [mode for mode, found in report["parity"].items() if Parity(**found).within(report["plan"]["tolerance"])]
    rows = bench[(bench.metric == "step_ms") & bench["mode"].isin(good)]
    medians = rows.groupby(["mode", "model", "tp", "k", "batch", "seed", "repeat"], as_index=False).value.median()
    return medians.assign(metric="step_ms", unit="ms")


def dirty_rows(report: Report) -> pd.DataFrame:
    """Rows `dirty_slots` for the figure: slots that each step left dirty, all layers, by mode and rank."""
    rows = _audits(report)[["mode", "rank", "dirty_by_step"]].explode("dirty_by_step")
    rows["step"] = rows.groupby(["mode", "rank"]).cumcount()
    return rows.rename(columns={"dirty_by_step": "value"}).assign(metric="dirty_slots", unit="slots")


def _audits(report: Report) -> pd.DataFrame:
    """What the audit counted, one line a mode and rank."""
    ranks = report["ranks"].items()
    return pd.DataFrame([{"mode": mode, "rank": r["rank"], **r["audit"]} for mode, found in ranks for r in found])


# -- claims ------------------------------------------------------------------------------------------------------------


def claim(run: Run, bench: pd.DataFrame, report: Report) -> None:
    """Record what must hold of one bench run with modes off, cow, direct and stage, audited, maybe behind `vllm`."""
    spec, plan = report["spec"], report["plan"]
    where, most = f"TP={spec['tp']}, {spec['dtype']}", plan["tolerance"]
    bound = OUTLIER_FACTOR * most
    ranks, parity = report["ranks"], {mode: Parity(**found) for mode, found in report["parity"].items()}
    serving = sorted({(mode, rank["serving"]) for mode, found in ranks.items() for rank in found})
    asked = [(mode, "off" if mode == UNPATCHED else mode) for mode in sorted(ranks)]
    whole = all(len(found) == spec["tp"] for found in ranks.values())
    run.claim(f"{where}: every rank serves the mode asked for", asked, serving, serving == asked and whole)
    cow = parity["cow"]
    run.claim(f"{where}: cow's greedy tokens are vanilla's", cow.requests, cow.equal, cow.equal == cow.requests > 0)
    for mode in ATTENDING:
        found = parity[mode]
        text = f"{where}: {mode} differs from vanilla as rounding does: mean shift, largest shift and gap (nats)"
        values = f"{found.shift:.3g}, {found.largest_shift:.3g}, {found.largest_gap:.3g}"
        holds = found.places > 0 and found.within(most)
        run.claim(text, f"<= {most:g}, {bound:g}, {bound:g}", values, holds)
    first = bench[bench.repeat == 0].pivot_table("value", "mode", "metric", "sum")  # greedy repeats are the same again
    counts = first.loc[[next(iter(ranks)), "stage"], ["accepted_tokens", "draft_tokens"]].to_numpy().tolist()
    z, some = abs(same_share(counts)), counts[0][0] > 0
    run.claim(f"{where}: stage accepts as many drafts as vanilla (|z|)", "< 3", z, z < 3 and some)
    for mode in ("cow", "stage"):
        if spec["tp"] > 1:
            same = all(rank["counters"] == ranks[mode][0]["counters"] for rank in ranks[mode])
            run.claim(f"{where}: {mode}'s counts are the same on every rank", True, same, same)
        metrics = report["metrics"][mode]
        checked, wrong = int(metrics["nwor_scheduler_checks"]), int(metrics["nwor_scheduler_mismatches"])
        holds = checked > 0 and wrong == 0
        run.claim(f"{where}: {mode}'s commits are the scheduler's in every step", 0, wrong, holds)
    claim_clean(run, where, report)


def claim_clean(run: Run, where: str, report: Report) -> None:
    """Record what must hold of the audit: vanilla and `direct` are dirty, the other modes show none of its faults."""
    table = _audits(report).drop(columns="dirty_by_step").groupby("mode").sum()
    for mode in ("cow", "stage"):
        steps, found = int(table.loc[mode, "layer_steps"]), int(table.loc[mode, list(FAULTS)].sum())
        text = f"{where}: {mode} leaves no layer-step dirty, of {steps}"
        run.claim(text, 0, found, steps > 0 and found == 0)
    names = {UNPATCHED: "vLLM never patched", "off": "vanilla", "direct": "direct, the control,"}
    for mode in (mode for mode in names if mode in table.index):
        dirty = int(table.loc[mode, "dirty_layer_steps"])
        run.claim(f"{where}: {names[mode]} leaves dirty layer-steps behind", "> 0", dirty, dirty > 0)


def claim_left(run: Run, where: str, report: Report) -> None:
    """Record that what vanilla leaves is the rejected rows, in every layer and on every rank, and nothing else.

    Vanilla's own scheduler counts them. It does not hear of a GPU's last windows: theirs `cow` counts on the device.
    """
    ranks, audited = report["ranks"], report["audited"]
    vanilla = next(iter(ranks))  # the baseline
    names = ("spec_decode_num_draft_tokens", ACCEPTED)
    drafts, accepted = (audited[vanilla][name] - audited["cow"][name] for name in names)
    rejected = int(drafts - accepted + audited["cow"]["rejected_tokens"])
    layers = [rank["audit"]["layer_steps"] // rank["audit"]["steps"] for rank in ranks[vanilla]]
    predicted = rejected * sum(layers)
    dirty = sum(rank["audit"]["dirty_slots"] for rank in ranks[vanilla])
    run.claim(f"{where}: slots that vanilla leaves dirty are its rejected rows", predicted, dirty, dirty == predicted)


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
