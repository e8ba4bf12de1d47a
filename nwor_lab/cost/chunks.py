# SPDX-License-Identifier: Apache-2.0
"""Chunk-based verification (SCV): expected forwards and rows of a long window, and where chunks pay.

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

from nwor_lab.cost.traffic import Window


@dataclass(frozen=True)
class WindowRows:
    """Forwards of a window, and rows computed in them and written to pages; whole numbers, but for an expected one."""

    forwards: float
    computed: float
    written: float


def chunk_steps(survival: Sequence[float], chunk: int, context: float = 0) -> list[tuple[float, Window]]:
    """Of each chunk that is reached: the share of windows that reach it, and the mean step of a request that does;
    `nwor_lab.cost.traffic` has its bytes and launches.

    Args:
        survival: [k], as `Window.expected` takes it.
        chunk: rows of a chunk.
        context: `num_computed_tokens` of the request before the window.
    """
    reached, steps = [1.0, *survival], []
    for start in range(0, len(reached), chunk):
        part = reached[start : start + chunk]
        if not part[0]:
            break
        rows, end = len(part), context + start + len(part)
        rejected = sum(1 - share / part[0] for share in part)
        # A chunk of one row has no draft: to vLLM it is a request that verifies nothing.
        step = Window(1, rows - 1, rejected, end) if rows > 1 else Window(0, 0, 0, end, rows)
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
