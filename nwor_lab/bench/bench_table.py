# SPDX-License-Identifier: Apache-2.0
"""The table of a bench: tidy rows of what its engines did, and their summary."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from typing import Any

import pandas as pd

from nwor_lab.bench.gpu_steps import compared, step_ratios
from nwor_lab.bench.plan import Plan
from nwor_lab.engines.engine import Generation


def rows_of_generation(generation: Generation) -> list[dict[str, Any]]:
    """Tidy rows of one generation: step times, tokens that the user gets, the verifier's counts of drafts."""
    seconds, count = generation.step_seconds, generation.counters
    totals = [
        ("tokens", sum(map(len, generation.tokens)), "tokens"),
        ("wall", sum(seconds), "s"),
        ("windows", count["drafts"], "windows"),
        ("draft_tokens", count["draft_tokens"], "tokens"),
        ("accepted_tokens", count["accepted_tokens"], "tokens"),
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
    """Tidy rows of each rank's audit, of the whole run."""
    return [
        {"metric": f"audit.{name}", "value": value, "unit": "count", "rank": rank["rank"]}
        for rank in ranks
        for name, value in rank["audit"].items()
        if not isinstance(value, list)
    ]


SHOWN = (
    "equal_requests", "requests", "largest_gap", "shift", "acceptance_length", "step_ms", "ratio", "low", "high",
    "tokens_per_s",
)  # fmt: skip
TIMES = ["step_ms", "ratio", "low", "high", "tokens_per_s"]


def summary(frame: pd.DataFrame, plan: Plan) -> pd.DataFrame:
    """One line a draft length, load and mode: parity, and where steps were timed what `step_ratios` says of them.

    Times of a load in which a mode is not at parity with the first one are missing.
    """
    if (frame["metric"] == "step_ms").any():
        table = step_ratios(frame, plan.modes[0], plan.tolerance)
        table[TIMES] = table[TIMES].where(table["at_parity"])
    else:
        table = compared(frame, plan.tolerance).dropna(subset="requests").reset_index()
    table = table.astype({"equal_requests": int, "requests": int})
    load = [name for name in ("k", "prompt", "batch") if name in table]
    table = table.sort_values([*load, "mode"], key=lambda x: x.map(plan.modes.index) if x.name == "mode" else x)
    return table[["mode", *load, *(name for name in SHOWN if name in table)]].reset_index(drop=True)


def verdicts(table: pd.DataFrame, plan: Plan) -> list[str]:
    """What a `summary` says, a sentence a mode other than the first: its tokens, its steps, and where that is noise."""
    base, said = plan.modes[0], []
    for mode in plan.modes[1:]:
        rows = table[table["mode"] == mode]
        equal, requests = rows["equal_requests"].sum(), rows["requests"].sum()
        parts = [f"{equal} of {requests} texts are those of {base}"]
        if equal < requests:
            parts.append(f"the others part where tokens lie {rows['largest_gap'].max():.3f} nats apart at most")
        if "ratio" in rows and len(timed := rows.dropna(subset="ratio")):
            noise = int(((timed["low"] <= 1) & (timed["high"] >= 1)).sum())
            parts.append(f"a step takes {timed['ratio'].min():.3f} to {timed['ratio'].max():.3f} of that of {base}")
            parts.append(f"repeats from {timed['low'].min():.3f} to {timed['high'].max():.3f}")
            parts.append(f"in {noise} of {len(timed)} loads they do not agree on which is faster")
            parts += ["one repeat does not tell noise"] if plan.repeats < 2 else []
        if "ratio" in rows and (left := int(rows["ratio"].isna().sum())):
            parts.append(f"{left} loads are not at parity (tolerance {plan.tolerance:g} nats) and have no times")
        said.append(f"{mode}: {'; '.join(parts)}.")
    return said
