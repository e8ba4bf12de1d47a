# SPDX-License-Identifier: Apache-2.0
"""The four policies side by side on one pair and one set of prompts, as tidy tables and a figure."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
import torch

from nwor_lab import results
from nwor_lab.model.traffic import MODES, Traffic
from nwor_lab.plots import style
from nwor_lab.reference.decoder import EagleDrafter, Generation, SpeculativeDecoder

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from nwor_lab.pair.model import EagleHead

METRICS = {"read": ("bytes_read", "B"), "written": ("bytes_written", "B"), "launches": ("launches", "1")}


def compare(
    target: PreTrainedModel,
    head: EagleHead,
    prompts: list[list[int]],
    *,
    k: int,
    max_tokens: int,
    seed: int = 0,
    modes: Iterable[str] = MODES,
) -> dict[str, Generation]:
    """Decode `prompts` (token ids) once in each mode; returns the generations by mode.

    Pages never written hold NaN, except in `blind`: it reads them, and would show nothing but NaN. There they hold
    zeros, as in a cache that vLLM has just made.
    """
    decoders = {
        mode: SpeculativeDecoder(target, mode, EagleDrafter(head, k), poison=mode != "blind", seed=seed)
        for mode in modes
    }
    with one_thread():
        return {mode: decoder.generate(prompts, max_tokens) for mode, decoder in decoders.items()}


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Compute on one core: sums then do not depend on the number of cores, and operators this small gain none."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def outcome(runs: dict[str, Generation]) -> list[dict[str, Any]]:
    """Tidy rows of what came out: tokens against `off`, acceptance, and bytes left behind.

    Metrics: `same_tokens` (share of prompts), `acceptance_length` (bonus token included), `survival` by `position`
    from 0, `dirty_bytes` (mean of a step), `steps`.
    """
    rows: list[dict[str, Any]] = []
    for mode, run in runs.items():
        same = [ours == vanilla for ours, vanilla in zip(run.tokens, runs["off"].tokens, strict=True)]
        rows += [
            {"mode": mode, "metric": "same_tokens", "value": sum(same) / len(same), "unit": "share"},
            {"mode": mode, "metric": "acceptance_length", "value": run.acceptance_length, "unit": "tokens"},
            {"mode": mode, "metric": "dirty_bytes", "value": run.dirty_bytes / len(run.steps), "unit": "B"},
            {"mode": mode, "metric": "steps", "value": len(run.steps), "unit": "1"},
        ]
        rows += [
            {"mode": mode, "metric": "survival", "value": share, "unit": "share", "position": position}
            for position, share in enumerate(run.survival)
        ]
    return rows


def traffic_of_a_window(runs: dict[str, Generation]) -> list[dict[str, Any]]:
    """Tidy rows of what a step that only verifies moves on average: `counted`, and by the `formula`, by kind."""
    rows: list[dict[str, Any]] = []
    for mode, run in runs.items():
        pure = [step for step in run.steps if step.window.requests and not step.window.prefill_rows]
        for origin, name in (("counted", "traffic"), ("formula", "formula")):
            for kind, moved in sum((getattr(step, name) for step in pure), Traffic()).items():
                rows += [
                    {"mode": mode, "kind": kind, "origin": origin, "metric": metric, "unit": unit}
                    | {"value": getattr(moved, field) / len(pure)}
                    for field, (metric, unit) in METRICS.items()
                ]
    return rows


def claim(run: results.Run, runs: dict[str, Generation]) -> None:
    """Record what must hold of the four policies on the same prompts."""
    off, blind, cow, stage = (runs[mode] for mode in ("off", "blind", "cow", "stage"))
    same = sum(a == b == c for a, b, c in zip(off.tokens, cow.tokens, stage.tokens, strict=True))
    prompts = len(off.tokens)
    run.claim("prompts whose tokens in cow and stage equal vanilla's, fp32", prompts, same, same == prompts)
    drafts = [each.acceptance_length - 1 for each in (off, cow, stage)]
    alike = drafts[0] == drafts[1] == drafts[2] > 0
    found = ", ".join(f"{each:.4g}" for each in drafts[1:])
    run.claim("drafts accepted a window, cow and stage as vanilla", drafts[0], found, alike)
    exact = [step.traffic == step.formula for each in runs.values() for step in each.steps]
    text = "steps whose counted bytes and launches equal the formula"
    run.claim(text, len(exact), sum(exact), all(exact))
    left = cow.dirty_bytes + stage.dirty_bytes
    run.claim("unaccepted bytes left in the pages, cow and stage", 0, left, left == 0)
    run.claim("unaccepted bytes left in the pages, vanilla", "> 0", off.dirty_bytes, off.dirty_bytes > 0)
    whole, half = blind.survival[-1], off.survival[-1] / 2
    run.expect("windows accepted whole, blind staging", f"< {half:.4g}", whole, whole < half)


def figure(run: results.Run | Path, frame: pd.DataFrame) -> Path:
    """Draw acceptance by draft position and the bytes a step leaves behind, by mode, from the rows of `outcome`."""
    survival = frame[frame["metric"] == "survival"]
    survival = survival.assign(position=survival["position"].astype(int) + 1)
    dirty = frame[frame["metric"] == "dirty_bytes"].assign(value=lambda rows: rows["value"] / 1e3, position="")
    fig, (left, right) = style.figure(width=style.TWO_COLUMNS, ncols=2, width_ratios=(3, 2))
    style.bars(left, survival, x="position")
    left.set(xlabel="draft position", ylabel="share of windows accepted", ylim=(0, 1))
    style.bars(right, dirty, x="position")
    right.set(ylabel="unaccepted kB left", xlabel="after a step; only vanilla leaves any")
    style.legend(left, ncols=4)
    first = frame.iloc[0]
    caption = (
        f"Reference model, greedy, k={first['k']}, {first['batch']} prompts. Left: share of verify windows in which "
        "the draft at each position was accepted; off, copy-on-write and stage coincide. Right: bytes outside the kept "
        "rows that a step changes in the target's pages and leaves so, mean of a step."
    )
    return style.save(fig, run, "reference_policies", frame, caption)
