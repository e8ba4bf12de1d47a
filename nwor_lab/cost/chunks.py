# SPDX-License-Identifier: Apache-2.0
"""Chunk-based verification (SCV): expected forwards, rows, bytes and time of a long window, and where chunks pay.

A window of 1 + k rows is cut into chunks of c rows, a forward each. Row i judges draft i + 1, so chunk j is run where
the first jc drafts held. With S(i) the share of windows in which i drafts and more are accepted, S(0) = 1, and
n_j = min(c, 1 + k - jc) rows in chunk j,

    forwards       sum over j of S(jc)
    rows computed  sum over j of S(jc) n_j
    rows kept      sum over i of S(i), whatever c is: the drafts accepted and the token sampled last

Each is linear in S. So survival counted over windows gives their mean exactly, and that of one window (ones, then
zeros) its own counts; the reference model (`nwor_lab.reference.chunks`) has the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from nwor_lab.cost.breakeven import H200, MODELS, Chip
from nwor_lab.cost.traffic import Window, served_traffic

PRICED, LINEAR_WEIGHTS = "llama-3.1-8b", 7.504e9
"""The model whose time `window_us` gives, and how many weights its linear layers have by the shapes in its
`config.json`: projections, MLP and output layer."""


@dataclass(frozen=True)
class WindowRows:
    """Forwards of a window, and rows computed in them and written to pages; whole numbers, but for an expected one."""

    forwards: float
    computed: float
    written: float


def chunk_steps(
    survival: Sequence[float], chunk: int, batch: int = 1, context: float = 0
) -> list[tuple[float, Window]]:
    """Of each chunk that is reached: the share of windows that reach it, and the mean step of `batch` that do.

    Args:
        survival: [k], as `Window.expected` takes it.
        chunk: rows of a chunk.
        context: `num_computed_tokens` of a request before the window.

    Raises:
        ValueError: a chunk of no row, or survival that rises or leaves [0, 1].
    """
    if chunk < 1:
        raise ValueError(f"a chunk has at least 1 row, got {chunk}")
    Window.expected(1, survival)
    reached, steps = [1.0, *survival], []
    for start in range(0, len(reached), chunk):
        part = reached[start : start + chunk]
        if not part[0]:
            break
        rows, end = batch * len(part), batch * (context + start + len(part))
        rejected = batch * sum(1 - share / part[0] for share in part)
        # A chunk of one row has no draft: to vLLM it is a request that verifies nothing.
        step = Window(batch, rows - batch, rejected, end) if len(part) > 1 else Window(0, 0, 0, end, rows)
        steps.append((part[0], step))
    return steps


def window_rows(mode: str, survival: Sequence[float], chunk: int) -> WindowRows:
    """What a request's window takes on average; `chunk > k` is one forward of all its rows.

    `off` and `direct` write the rows they compute, `cow` writes the rejected ones twice, `stage` the kept ones alone.
    """
    steps = chunk_steps(survival, chunk)
    computed = sum(share * (step.rows + step.prefill_rows) for share, step in steps)
    rejected = sum(share * step.rejected_rows for share, step in steps)
    extra = {"off": 0, "direct": 0, "cow": 1, "stage": -1}[mode]
    return WindowRows(sum(share for share, _ in steps), computed, computed + extra * rejected)


def break_even_rows(survival: Sequence[float], chunk: int) -> float:
    """Rows saved for each forward added. Chunks pay where a forward costs less than this many rows do; inf where no
    forward is added."""
    parts = window_rows("off", survival, chunk)
    added = parts.forwards - 1
    return (1 + len(survival) - parts.computed) / added if added else inf


def window_us(survival: Sequence[float], chunk: int, batch: int, context: float, chip: Chip = H200) -> float:
    """Microseconds that the windows of `batch` requests take under `off`, all chunks of them, of `PRICED` on one rank;
    they bring as many tokens whatever `chunk` is.

    A forward is its linear layers (weights of bf16, read once, or two operations a weight and row, whichever takes
    longer: the roofline of Williams et al., CACM 2009) and the bytes and launches of `served_traffic`, which the KV
    cache is read in. Operations of attention, drafting, sampling and the host are left out.
    """
    total = 0.0
    for share, step in chunk_steps(survival, chunk, batch, context):
        rows = step.rows + step.prefill_rows
        layers = 2 * LINEAR_WEIGHTS * max(1 / chip.copy_bytes_per_s, rows / chip.flop_per_s) * 1e6
        total += share * (layers + chip.us(served_traffic("off", MODELS[PRICED], step).total()))
    return total


def time_ratio(survival: Sequence[float], chunk: int, batch: int, context: int, chip: Chip = H200) -> float:
    """`window_us` in chunks over that in one forward; chunks pay below 1."""
    one, many = (window_us(survival, rows, batch, context, chip) for rows in (1 + len(survival), chunk))
    return many / one
