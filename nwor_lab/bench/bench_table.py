# SPDX-License-Identifier: Apache-2.0
"""The table of a bench: tidy rows of what its engines did, and their summary."""

import itertools
import math
import re
from collections.abc import Sequence
from typing import Any

import pandas as pd

from nwor_lab.bench import parity
from nwor_lab.bench.plan import Plan
from nwor_lab.bench.survival import lengths, tokens_per_s
from nwor_lab.cost.ratios import abba_ratio, is_stable
from nwor_lab.engines.engine import Generation


def rows_of_generation(generation: Generation) -> list[dict[str, Any]]:
    """Tidy rows of one generation: step times, tokens, acceptance by position.

    `tokens` are those that the user gets, and `emitted_drafts` the accepted drafts among them: the end of an answer
    cuts the rest of its last window off, which `accepted_tokens`, the verifier's count, still has.
    """
    seconds, count = generation.step_seconds, generation.counters
    tokens, answers = sum(map(len, generation.tokens)), len(generation.tokens)
    totals = [
        ("tokens", tokens, "tokens"),
        ("wall", sum(seconds), "s"),
        ("windows", count["drafts"], "windows"),
        ("draft_tokens", count["draft_tokens"], "tokens"),
        ("accepted_tokens", count["accepted_tokens"], "tokens"),
        ("emitted_drafts", tokens - answers - count["decode_steps"], "tokens"),
    ]
    return [
        *({"metric": "step_ms", "value": 1e3 * s, "unit": "ms", "step": step} for step, s in enumerate(seconds)),
        *({"metric": metric, "value": value, "unit": unit} for metric, value, unit in totals),
        *(
            {"metric": "accepted_at", "value": accepted, "unit": "windows", "position": position}
            for position, accepted in enumerate(generation.accepted_at)
        ),
    ]


KINDS = {
    "KV write": r"reshape_and_cache",
    "attention": r"flash|unified_attention|verify_windows|fmha|FlashAttn",
    "NWOR": r"nwor::",
    "communication": r"nccl|(?i:all_?reduce)|cross_device_reduce|multimem",
    "matmul": r"gemm|nvjet|cutlass|cublas|splitK",
}


def kernel_rows(ranks: Sequence[dict[str, float]], steps: int) -> list[dict[str, Any]]:
    """GPU microseconds of a step by kind of kernel, mean of the ranks; what a name does not tell is ``other``."""
    sums = dict.fromkeys([*KINDS, "other"], 0.0)
    for name, microseconds in itertools.chain.from_iterable(times.items() for times in ranks):
        kind = next((kind for kind, pattern in KINDS.items() if re.search(pattern, name)), "other")
        sums[kind] += microseconds / steps / len(ranks)
    return [{"metric": "kernel_us", "value": value, "kind": kind} for kind, value in sums.items()]


def rows_of_ranks(ranks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Tidy rows of what holds for the whole run: each rank's counters and audit."""
    counts = [
        (f"{kind}.{name}", value, rank["rank"])
        for rank in ranks
        for kind in ("counters", "audit")
        for name, value in rank[kind].items()
        if not isinstance(value, list)
    ]
    units = {True: "bytes", False: "count"}
    return [{"metric": m, "value": v, "unit": units[".bytes" in m], "rank": rank} for m, v, rank in counts]


def summary(frame: pd.DataFrame, plan: Plan) -> pd.DataFrame:
    """One line a draft length, load and mode: parity, tokens, step time and its ratio to the first mode's.

    Tokens of a window are the verifier's and the user's (`survival.lengths`), those of a second the user's.
    A step's time is the median over steps, of the median repeat; the ratio is the repeats' `abba_ratio`, `low` and
    `high` their range. Where a mode is without parity its speed columns stay empty, and everywhere if a pass that is
    not timed, as the first, is without.
    """
    if len(plan.ks) == 1:
        return _summary(frame, plan)
    parts = [_summary(part, plan).assign(k=k) for k, part in frame.groupby("k")]
    return pd.concat(parts, ignore_index=True)


def _summary(frame: pd.DataFrame, plan: Plan) -> pd.DataFrame:
    lines: list[dict[str, Any]] = []
    timed = frame[frame.metric == "step_ms"]
    loads = timed[[name for name in ("prompt", "batch") if name in timed]].drop_duplicates()
    parts = {mode: frame[frame["mode"] == mode] for mode in plan.modes}
    untimed = {mode: parity.of_rows(_without(part, loads)) for mode, part in parts.items()}
    for _, load in loads.iterrows() if len(timed) else [(0, pd.Series())]:
        baseline: Any = None
        for mode, part in parts.items():
            rows = part[(part[load.index] == load).all(axis=1)]
            compared, total = parity.of_rows(rows), rows.groupby("metric")["value"].sum()
            line = {"mode": mode, **{str(name): int(value) for name, value in load.items()}}
            line["equal"] = f"{compared.equal}/{compared.requests}"
            line |= {"gap_nats": compared.largest_gap, "shift_nats": compared.shift}
            if len(timed):
                line |= lengths(total)
                steps = rows[rows.metric == "step_ms"].groupby("repeat").value.median()
                good = (compared + untimed[mode]).within(plan.tolerance)
                baseline = steps if baseline is None else baseline
                ratios = (steps if good else steps[:0]) / baseline
                line["step_ms"] = steps.median() if good else math.nan
                line["ratio"] = abba_ratio(ratios) if good and len(ratios) else math.nan
                line |= {"low": ratios.min(), "high": ratios.max()}
                line["tokens_per_s"] = tokens_per_s(total) if good else math.nan
            lines.append(line)
    return pd.DataFrame(lines)


def verdicts(table: pd.DataFrame, plan: Plan) -> list[str]:
    """What a `summary` says, a sentence a mode other than the first: its tokens, its steps, and where that is noise."""
    base, said = plan.modes[0], []
    for mode in plan.modes[1:]:
        rows = table[table["mode"] == mode]
        equal, requests = rows["equal"].str.split("/", expand=True).astype(int).sum()
        texts = f"{equal} of {requests} texts are those of {base}"
        gap, shift = rows["gap_nats"].max(), rows["shift_nats"].max()
        if equal < requests:
            texts += f", the others part where tokens lie {gap:.3f} nats apart at most (mean shift {shift:.3f})"
        if "ratio" not in rows:
            said.append(f"{mode}: {texts}.")
            continue
        timed = rows.dropna(subset="ratio")
        if not len(timed):
            said.append(f"{mode}: {texts}; that is not parity (tolerance {plan.tolerance:g} nats), so it has no times.")
            continue
        low, high = timed["ratio"].min(), timed["ratio"].max()
        takes = f"{low:.3f}" if len(timed) == 1 else f"{low:.3f} to {high:.3f} in {len(timed)} loads"
        unclear = int(((timed["low"] <= 1) & (timed["high"] >= 1)).sum())
        if plan.repeats < 2:
            noise = "one repeat does not tell noise"
        else:
            spread = f"from {timed['low'].min():.3f} to {timed['high'].max():.3f}"
            where = "this is noise" if unclear == len(timed) else f"{unclear} of these are noise"
            noise = f"all repeats ({spread}) agree on which is faster"
            if unclear:
                noise = f"repeats ({spread}) do not agree on which is faster: {where}"
            elif not is_stable(timed).all():
                noise += ", but lie far apart"
        left = len(rows) - len(timed)
        noise += f"; {left} loads are not at parity and have no times" if left else ""
        said.append(f"{mode}: a step takes {takes} of that of {base}; {noise}. {texts[0].upper()}{texts[1:]}.")
    return said


def _without(rows: pd.DataFrame, loads: pd.DataFrame) -> pd.DataFrame:
    """The rows of no load of `loads`."""
    beside = rows.merge(loads, on=list(loads), how="left", indicator=True)["_merge"]
    return rows[(beside == "left_only").to_numpy()]
