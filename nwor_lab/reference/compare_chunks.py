# SPDX-License-Identifier: Apache-2.0
"""Long windows verified whole and in chunks, side by side: what was counted, the formula, and what must hold."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nwor_lab import results
from nwor_lab.model import chunks as model
from nwor_lab.model.breakeven import H200, Chip
from nwor_lab.plots import chunks as plots
from nwor_lab.reference.chunks import ChunkedDrafter, LookupDrafter
from nwor_lab.reference.compare import one_thread
from nwor_lab.reference.decoder import ChunkedWindow, Generation, SpeculativeDecoder, survival

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class ChunkedRun:
    """What `mode` made of the same prompts with windows of `k` drafts in chunks of `chunk` rows."""

    mode: str
    k: int
    chunk: int
    generation: Generation
    windows: list[ChunkedWindow]

    @property
    def survival(self) -> list[float]:
        return survival([window.accepted for window in self.windows], self.k)

    @property
    def counted(self) -> model.WindowRows:
        """Forwards, rows computed and rows written of all windows. Rows written are those that the cache's ledger
        holds beyond the rows of prompts and of steps without a window, which are written once."""
        rows = sum(window.rows for window in self.windows)
        steps = [(step.window, step.traffic) for step in self.generation.steps]
        bytes_written = sum(moved[kind].written for _, moved in steps for kind in model.PAGES if kind in moved)
        others = sum(window.rows + window.prefill_rows for window, _ in steps) - rows
        shape = self.generation.shape
        written = bytes_written / (shape.num_layers * shape.row) - others
        return model.WindowRows(sum(window.forwards for window in self.windows), rows, written)

    @property
    def predicted(self) -> model.WindowRows:
        """The same by the closed formula, from survival alone."""
        mean, n = model.window_rows(self.mode, self.survival, self.chunk), len(self.windows)
        return model.WindowRows(*(round(n * each, 6) for each in (mean.forwards, mean.computed, mean.written)))


def compare_chunks(
    target: PreTrainedModel, prompts: list[list[int]], *, k: int, chunk: int, max_tokens: int, seed: int = 0
) -> list[ChunkedRun]:
    """Decode `prompts` (token ids) with `k` drafts looked up in the text: first vanilla with one forward a window, then
    `off`, `cow` and `stage` in chunks of `chunk` rows.

    Raises:
        ValueError: `chunk` or `k` below 1, or no window: no prompt repeats itself.
    """
    runs = []
    for mode, rows in (("off", 1 + k), *((mode, chunk) for mode in ("off", "cow", "stage"))):
        drafter = ChunkedDrafter(LookupDrafter(k), rows)
        with one_thread():
            found = SpeculativeDecoder(target, mode, drafter, seed=seed).generate(prompts, max_tokens)
        if not drafter.windows:
            raise ValueError(f"no window in {max_tokens} tokens: decode more, or give prompts that repeat themselves")
        runs.append(ChunkedRun(mode, k, rows, found, drafter.windows))
    return runs


def counts(runs: list[ChunkedRun]) -> list[dict[str, Any]]:
    """Tidy rows of a window's means, counted, with its rows saved for each forward added over one forward."""
    return [
        {"mode": run.mode, "chunk": run.chunk, "metric": metric, "value": value, "unit": unit}
        for run in runs
        for metric, value, unit in (
            ("forwards", run.counted.forwards / len(run.windows), "1"),
            ("rows_computed", run.counted.computed / len(run.windows), "rows"),
            ("rows_written", run.counted.written / len(run.windows), "rows"),
            ("windows", len(run.windows), "1"),
            ("steps", len(run.generation.steps), "1"),
        )
    ]


def claim(run: results.Run, runs: list[ChunkedRun], chip: Chip = H200) -> None:
    """Record what must hold of the runs of `compare_chunks`, and where chunks are expected to pay on `chip`."""
    whole, *chunked = runs
    off = chunked[0]
    said = [each.generation.tokens for each in runs]
    same, prompts = sum(len(set(map(tuple, texts))) == 1 for texts in zip(*said, strict=True)), len(said[0])
    run.claim("long drafts: prompts whose tokens in chunks equal vanilla's", prompts, same, same == prompts)
    accepted = [sorted(window.accepted for window in each.windows) for each in runs]
    alike, n = sum(each == accepted[0] for each in accepted[1:]), len(chunked)
    run.claim("long drafts: modes that accept the same drafts in chunks", n, alike, alike == n)
    right = sum(each.counted == each.predicted for each in runs)
    text = "long drafts: runs whose forwards, rows computed and rows written equal the formula"
    run.claim(text, len(runs), right, right == len(runs))
    computed, at_once = off.counted.computed, whole.counted.computed
    run.expect("long drafts: rows computed in chunks", f"< {at_once}", computed, computed < at_once)
    for batch, costs in ((1, True), (64, False)):
        ratio = model.time_ratio(off.survival, off.chunk, batch, 512, chip)
        said_of = f"time of a window in chunks over one forward's, batch {batch}, {model.PRICED}, {chip.name}"
        run.expect(said_of, "> 1" if costs else "< 1", ratio, (ratio > 1) if costs else (ratio < 1), "model")


def figure(run: results.Run | Path, runs: list[ChunkedRun]) -> Path:
    """Draw when chunks pay, from the runs of `compare_chunks`."""
    whole, chunked = runs[0], runs[1]
    share = chunked.counted.computed / whole.counted.computed
    return plots.when_they_pay(run, chunked.survival, chunked.chunk, share)
