# SPDX-License-Identifier: Apache-2.0
"""The reference model's policies side by side on one pair and one set of prompts, whole windows and chunks of them.

What is counted stands beside the closed formulas of `nwor_lab.cost`, from which it must not differ.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from nwor_lab.cost import chunks
from nwor_lab.cost.traffic import MODES, Shape, Traffic, Window, step_traffic
from nwor_lab.reference.chunks import ChunkedDrafter, LookupDrafter
from nwor_lab.reference.decoder import ChunkedWindow, EagleDrafter, Generation, SpeculativeDecoder, Step, survival
from nwor_lab.run import results

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from nwor_lab.pair.model import EagleHead

Rows = list[dict[str, Any]]


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Compute on one core: sums then do not depend on the number of cores, and operators this small gain none."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def formula(run: Generation, step: Step) -> Traffic:
    """What `step_traffic` says of a step's rows, the cache's dtype being the model's."""
    cache = run.cache
    shape = Shape(cache.num_layers, cache.num_heads, cache.head_size, cache.dtype.itemsize)
    rows = step.requests, step.draft_rows, step.rejected_rows, step.context_rows, step.prefill_rows
    return step_traffic(run.mode, shape, Window(*rows))


# -- four policies -------------------------------------------------------------------------------------------------


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

    Pages never written hold NaN, but in `blind`, which reads them, zeros, as in a cache that vLLM has just made.
    """
    decoders = {mode: SpeculativeDecoder(target, mode, EagleDrafter(head, k), seed=seed) for mode in modes}
    with one_thread():
        return {mode: decoder.generate(prompts, max_tokens) for mode, decoder in decoders.items()}


def outcome(runs: dict[str, Generation]) -> Rows:
    """Tidy rows of what came out: tokens against `off`, acceptance, and bytes left behind.

    Metrics: `same_tokens` (share of prompts), `acceptance_length` (bonus token included), `survival` by `position`
    from 0, `dirty_bytes` (mean of a step), `steps`.
    """
    rows: Rows = []
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


def traffic_of_a_window(runs: dict[str, Generation]) -> Rows:
    """Tidy rows of what a step that only verifies moves on average: `counted`, and by the `formula`, by kind."""
    rows: Rows = []
    for mode, run in runs.items():
        steps = [step for step in run.steps if step.requests and not step.prefill_rows]
        counted, predicted = [step.traffic for step in steps], [formula(run, step) for step in steps]
        for origin, traffic in (("counted", counted), ("formula", predicted)):
            for kind, moved in sum(traffic, Traffic()).items():
                common = {"mode": mode, "kind": kind, "origin": origin}
                rows += [
                    {**common, "metric": "bytes_read", "unit": "B", "value": moved.read / len(steps)},
                    {**common, "metric": "bytes_written", "unit": "B", "value": moved.written / len(steps)},
                    {**common, "metric": "launches", "unit": "1", "value": moved.launches / len(steps)},
                ]
    return rows


def claim(run: results.Run, runs: dict[str, Generation]) -> None:
    """Record what must hold of the four policies on the same prompts."""
    off, blind, cow, stage = (runs[mode] for mode in MODES)
    same = sum(a == b == c for a, b, c in zip(off.tokens, cow.tokens, stage.tokens, strict=True))
    prompts = len(off.tokens)
    run.claim("prompts whose tokens in cow and stage equal vanilla's, fp32", prompts, same, same == prompts)
    drafts = [each.acceptance_length - 1 for each in (off, cow, stage)]
    alike = drafts[0] == drafts[1] == drafts[2] > 0
    found = ", ".join(f"{each:.4g}" for each in drafts[1:])
    run.claim("drafts accepted a window, cow and stage as vanilla", drafts[0], found, alike)
    exact = [step.traffic == formula(each, step) for each in runs.values() for step in each.steps]
    text = "steps whose counted bytes and launches equal the formula"
    run.claim(text, len(exact), sum(exact), all(exact))
    left = cow.dirty_bytes + stage.dirty_bytes
    run.claim("unaccepted bytes left in the pages, cow and stage", 0, left, left == 0)
    run.claim("unaccepted bytes left in the pages, vanilla", "> 0", off.dirty_bytes, off.dirty_bytes > 0)
    whole, half = blind.survival[-1], off.survival[-1] / 2
    run.expect("windows accepted whole, blind staging", f"< {half:.4g}", whole, whole < half)


def claim_by_hand(run: results.Run, tokens: dict[str, list[list[int]]], runs: dict[str, Generation]) -> None:
    """Record that a decoder written by hand gave the `tokens` of these, by mode, for the first of the prompts."""
    pairs = [both for mode, mine in tokens.items() for both in zip(mine, runs[mode].tokens, strict=False)]
    same = sum(mine == theirs for mine, theirs in pairs)
    text = "prompts x modes whose tokens the lesson's decoder gives as the library's"
    run.expect(text, len(pairs), same, same == len(pairs) > 0)


# -- chunks --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ChunkedRun:
    """What `generation.mode` made of the same prompts with windows in chunks of `chunk` rows."""

    chunk: int
    generation: Generation
    windows: list[ChunkedWindow]

    @property
    def survival(self) -> list[float]:
        return survival([window.accepted for window in self.windows], self.generation.k)

    @property
    def counted(self) -> tuple[int, int]:
        """Forwards of all windows, and the rows computed in them."""
        return sum(window.forwards for window in self.windows), sum(window.rows for window in self.windows)

    @property
    def predicted(self) -> chunks.WindowRows:
        """The mean window by the closed formula, from survival alone."""
        return chunks.window_rows(self.generation.mode, self.survival, self.chunk)

    @property
    def exact(self) -> bool:
        """Whether the formula gives the counts themselves, as it must: it is linear in survival."""
        mean, n = self.predicted, len(self.windows)
        return self.counted == (round(n * mean.forwards, 6), round(n * mean.computed, 6))


def compare_chunks(
    target: PreTrainedModel, prompts: list[list[int]], *, k: int, chunk: int, max_tokens: int, seed: int = 0
) -> list[ChunkedRun]:
    """Decode `prompts` (token ids) with `k` drafts looked up in the text: first vanilla with one forward a window, then
    `off`, `cow` and `stage` in chunks of `chunk` rows.

    Raises:
        ValueError: `chunk` or `k` below 1, or no window: no prompt repeats itself.
    """
    runs = []
    for mode, rows in (("off", 1 + k), ("off", chunk), ("cow", chunk), ("stage", chunk)):
        drafter = ChunkedDrafter(LookupDrafter(k), rows)
        with one_thread():
            generation = SpeculativeDecoder(target, mode, drafter, seed=seed).generate(prompts, max_tokens)
        if not drafter.windows:
            raise ValueError(f"no window in {max_tokens} tokens: decode more, or give prompts that repeat themselves")
        runs.append(ChunkedRun(rows, generation, drafter.windows))
    return runs


def rows_of_a_window(runs: list[ChunkedRun]) -> Rows:
    """Tidy rows of a window's means by `mode` and `chunk`: forwards and rows computed as counted, and rows written."""
    return [
        {"mode": run.generation.mode, "chunk": run.chunk, "metric": metric, "value": value, "unit": unit}
        for run in runs
        for metric, value, unit in (
            ("windows", len(run.windows), "1"),
            ("forwards", run.counted[0] / len(run.windows), "1"),
            ("rows_computed", run.counted[1] / len(run.windows), "rows"),
            ("rows_written", run.predicted.written, "rows"),
        )
    ]


def claim_chunks(run: results.Run, runs: list[ChunkedRun]) -> None:
    """Record what must hold of the runs of `compare_chunks`, and that chunks are expected to save rows."""
    whole, *chunked = runs
    texts = [each.generation.tokens for each in runs]
    same, prompts = sum(len(set(map(tuple, each))) == 1 for each in zip(*texts, strict=True)), len(texts[0])
    run.claim("long drafts: prompts whose tokens in chunks equal vanilla's", prompts, same, same == prompts)
    accepted = [sorted(window.accepted for window in each.windows) for each in runs]
    alike, n = sum(each == accepted[0] for each in accepted[1:]), len(chunked)
    run.claim("long drafts: modes that accept the same drafts in chunks", n, alike, alike == n)
    exact = sum(each.exact for each in runs)
    text = "long drafts: runs whose forwards and rows computed equal the formula"
    run.claim(text, len(runs), exact, exact == len(runs))
    computed, at_once = chunked[0].counted[1], whole.counted[1]
    run.expect("long drafts: rows computed in chunks", f"< {at_once}", computed, computed < at_once)
