# SPDX-License-Identifier: Apache-2.0
"""The four policies side by side on one pair and one set of prompts: runs, tidy tables and the figure."""

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from tokenizers import Tokenizer
from tqdm.auto import tqdm

from nwor_lab import results
from nwor_lab.model.traffic import MODES, Traffic
from nwor_lab.pair.llama import EagleHead, LlamaTarget
from nwor_lab.plots import style
from nwor_lab.reference.decoder import Generation, SpeculativeDecoder

EXACT = ("off", "cow", "stage")
METRICS = {"read": ("bytes_read", "B"), "written": ("bytes_written", "B"), "launches": ("launches", "1")}


def compare(
    target: LlamaTarget,
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
    runs = {}
    with one_thread():
        for mode in tqdm(list(modes), desc="write policies", unit="mode"):
            decoder = SpeculativeDecoder(target, mode, head=head, k=k, poison=mode != "blind", seed=seed)
            runs[mode] = decoder.generate(prompts, max_tokens)
    return runs


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Give torch one thread: its sums then do not depend on the number of cores, and operators this small gain none."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def load_tokenizer(model: str | Path) -> Tokenizer:
    """The `tokenizer.json` in the checkpoint folder `model`."""
    file = Path(model) / "tokenizer.json"
    if not file.is_file():
        raise FileNotFoundError(f"{file} is missing: give the folder of a checkpoint with its tokenizer")
    return Tokenizer.from_file(str(file))


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
    """Tidy rows of the mean traffic of a step that verifies and does nothing else, by mode, `kind` and `origin`.

    `origin` is `counted`, as the operators ran, or `formula`, from `nwor_lab.model.traffic.step_traffic`.
    """
    rows: list[dict[str, Any]] = []
    for mode, run in runs.items():
        pure = [n for n, step in enumerate(run.steps) if step.window.requests and not step.window.prefill_rows]
        for origin, traffic in (("counted", run.counted_traffic()), ("formula", run.predicted_traffic())):
            total = sum((traffic[n] for n in pure), Traffic())
            for kind, moved in total.items():
                for field, (metric, unit) in METRICS.items():
                    value = getattr(moved, field) / len(pure)
                    rows.append(
                        {"mode": mode, "kind": kind, "origin": origin, "metric": metric, "value": value, "unit": unit}
                    )
    return rows


def exact_steps(run: Generation) -> tuple[int, int]:
    """In how many steps bytes and launches of every kind are those of the formula, and how many steps there are."""
    pairs = zip(run.counted_traffic(), run.predicted_traffic(), strict=True)
    return sum(counted == predicted for counted, predicted in pairs), len(run.steps)


def claim(run: results.Run, runs: dict[str, Generation]) -> pd.DataFrame:
    """Record what the reference model claims in the run's table of claims; return these claims."""
    tokens = {mode: each.tokens for mode, each in runs.items()}
    accepted = {mode: each.acceptance_length - 1 for mode, each in runs.items()}
    dirty = {mode: each.dirty_bytes for mode, each in runs.items()}
    exact, steps = (sum(n) for n in zip(*map(exact_steps, runs.values()), strict=True))
    prompts = len(tokens["off"])
    same = sum(off == cow == stage for off, cow, stage in zip(*(tokens[m] for m in EXACT), strict=True))

    run.claim("prompts whose tokens in cow and stage equal vanilla's, fp32", prompts, same, same == prompts)
    alike = accepted["off"] == accepted["cow"] == accepted["stage"]
    run.claim("drafts accepted a window, cow and stage as vanilla", accepted["off"], accepted["stage"], alike)
    whole = {mode: each.survival[-1] for mode, each in runs.items()}
    collapsed = whole["blind"] < whole["off"] / 2
    run.claim("windows accepted whole, blind staging", f"< {whole['off'] / 2:.4g}", whole["blind"], collapsed)
    run.claim("steps whose counted bytes and launches equal the formula", steps, exact, exact == steps)
    clean = dirty["cow"] == dirty["stage"] == 0
    run.claim("unaccepted bytes left in the pages, cow and stage", 0, dirty["cow"] + dirty["stage"], clean)
    run.claim("unaccepted bytes left in the pages, vanilla", "> 0", dirty["off"], dirty["off"] > 0)
    every = results.claims(run.directory)
    return every[every["notebook"] == run.name]


def figure(run: results.Run | Path, frame: pd.DataFrame) -> Path:
    """Draw acceptance by draft position and the bytes a step leaves behind, by mode, from the rows of `outcome`."""
    survival = frame[frame["metric"] == "survival"]
    survival = survival.assign(position=survival["position"].astype(int) + 1)
    dirty = frame[frame["metric"] == "dirty_bytes"].set_index("mode")["value"] / 1e3
    fig, (left, right) = style.figure(width=style.TWO_COLUMNS, ncols=2, width_ratios=(3, 2))
    style.bars(left, survival, x="position")
    left.set(xlabel="draft position", ylabel="share of windows accepted", ylim=(0, 1))
    modes = style.ordered(dirty.index)
    for n, mode in enumerate(modes):
        look = style.MODE_STYLE[mode]
        right.bar(n, dirty[mode], color=look.color, hatch=look.hatch, edgecolor="white")
        right.text(n, dirty[mode], f"{dirty[mode]:.3g}", ha="center", va="bottom", fontsize=7)
    right.set(ylabel="unaccepted kB left by a step", ylim=(0, 1.15 * dirty.max() or 1))
    right.set_xticks(range(len(modes)), modes)
    right.grid(axis="x", visible=False)
    style.legend(left, ncols=len(modes))
    first = frame.iloc[0]
    caption = (
        f"Reference model, greedy, k={first['k']}, {first['batch']} prompts. Left: share of verify windows in which "
        "the draft at each position was accepted; off, copy-on-write and stage coincide. Right: bytes outside the kept "
        f"rows that a step changes in the target's pages and leaves so, mean of a step. Run {first['run_id']}."
    )
    return style.save(fig, run, "reference_policies", frame, caption)
