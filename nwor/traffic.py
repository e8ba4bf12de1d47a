# SPDX-License-Identifier: Apache-2.0
"""Bytes and launches of one verify step: counted as they happen, and predicted by closed formulas.

Counted is what an operator must move at least: each row of keys and values that it reads or writes, once. Indices,
queries, re-reads inside a kernel and caches are left out. All numbers are for one rank. The kinds are

    attention  one launch a layer: the rows it reads from the pages, the window's own left out
    tail       the window's own rows, read from the pages in the same launch
    write      vLLM's own paged write, one launch a layer
    stage      the window's keys and values read once and left in staging
    commit     kept rows, staging -> pages
    log        draft slots, pages -> log, before the forward
    restore    rejected rows, log -> pages

`stage` in mode `stage` is no launch of its own and has no `tail`: the attention kernel reads the window's keys and
values from where the projections left them, attends to them and leaves them in staging, on one read.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

MODES = ("off", "blind", "cow", "stage")
KINDS = ("attention", "tail", "write", "stage", "commit", "log", "restore")


@dataclass(frozen=True)
class Moved:
    """Bytes read, bytes written and kernel launches of one kind."""

    read: int = 0
    written: int = 0
    launches: int = 0

    def __add__(self, other: "Moved") -> "Moved":
        return Moved(self.read + other.read, self.written + other.written, self.launches + other.launches)


class Traffic(dict[str, Moved]):
    """What each kind moved; also the ledger that the reference model's operators write in as they run.

    Kinds that moved nothing are absent, so a ledger and a formula are equal as dictionaries.
    """

    def count(self, kind: str, *, read: int = 0, written: int = 0, launches: int = 0) -> None:
        if kind not in KINDS:
            raise ValueError(f"{kind!r} is no kind of traffic; the kinds are {', '.join(KINDS)}")
        if read or written or launches:
            self[kind] = self.get(kind, Moved()) + Moved(read, written, launches)

    def total(self) -> Moved:
        return sum(self.values(), Moved())

    def __add__(self, other: "Traffic") -> "Traffic":
        both = Traffic(self)
        for kind, moved in other.items():
            both.count(kind, read=moved.read, written=moved.written, launches=moved.launches)
        return both


@dataclass(frozen=True)
class Shape:
    """What a model's cache looks like.

    Attributes:
        num_layers: layers whose pages the window concerns: the target's, never the drafter's.
        num_kv_heads: KV heads of the whole model; with more ranks than heads each rank holds one, as in vLLM.
        head_size: elements of one head's key, and of its value.
        cache_bytes: bytes an element in the cache (1 for fp8).
        model_bytes: bytes an element as the model computes keys and values; 0 means the same as the cache.
        tp: tensor-parallel ranks. TP shards heads, not layers.
    """

    num_layers: int
    num_kv_heads: int
    head_size: int
    cache_bytes: int = 2
    model_bytes: int = 0
    tp: int = 1

    def __post_init__(self) -> None:
        if self.num_kv_heads % self.tp and self.tp % self.num_kv_heads:
            raise ValueError(f"{self.num_kv_heads} KV heads do not spread evenly over {self.tp} ranks")

    @property
    def heads(self) -> int:
        """KV heads on one rank."""
        return max(1, self.num_kv_heads // self.tp)

    @property
    def row(self) -> int:
        """Bytes in the cache of one token's key and value in one layer on one rank: 2 x heads x head size."""
        return 2 * self.heads * self.head_size * self.cache_bytes

    @property
    def fresh_row(self) -> int:
        """The same as the model computes it, before it is converted to the cache's dtype."""
        return 2 * self.heads * self.head_size * (self.model_bytes or self.cache_bytes)


@dataclass(frozen=True)
class Window:
    """One step's rows, summed over the batch. A request that verifies k drafts brings 1 + k rows.

    Attributes:
        requests: requests that verify drafts in this step; without one there is no window.
        draft_rows: their drafts.
        rejected_rows: drafts that the verifier rejects.
        context_rows: rows that attention reads: the sequence lengths, this step's rows among them, of all requests.
        prefill_rows: rows of requests that verify nothing; always written at once.
    """

    requests: int
    draft_rows: int
    rejected_rows: int
    context_rows: int
    prefill_rows: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.rejected_rows <= self.draft_rows:
            raise ValueError(f"{self.rejected_rows} rejected of {self.draft_rows} drafts")
        if self.context_rows < self.rows + self.prefill_rows:
            raise ValueError(f"attention reads at least the step's own rows, got context_rows={self.context_rows}")

    @classmethod
    def of(cls, k: int, accepted: Iterable[int], computed: Iterable[int], prefill_rows: int = 0) -> "Window":
        """The window of requests that bring `k` drafts each, `accepted[r]` of which hold.

        `computed[r]` is the request's `num_computed_tokens` before the step.
        """
        accepted, computed = list(accepted), list(computed)
        if len(accepted) != len(computed):
            raise ValueError(f"{len(accepted)} accepted counts for {len(computed)} requests")
        n = len(accepted)
        context = sum(computed) + n * (1 + k) + prefill_rows
        return cls(n, n * k, n * k - sum(accepted), context, prefill_rows)

    @property
    def rows(self) -> int:
        """Rows of the window: the drafts and each request's last sampled token."""
        return self.requests + self.draft_rows

    @property
    def kept_rows(self) -> int:
        return self.rows - self.rejected_rows


def check_mode(mode: str) -> None:
    if mode not in MODES:
        raise ValueError(f"{mode!r} is no mode; choose one of {', '.join(MODES)}")


def step_traffic(mode: str, shape: Shape, window: Window) -> Traffic:
    """Bytes and launches of one step on one rank, all layers; one layer is `Shape(num_layers=1)`.

    With L layers, W window rows of which K are kept and R rejected, D drafts, P prefill rows, C context rows, and
    r (r' before conversion) bytes a row:

        mode   tail    write                 held back                   after sampling
        off    L W r   L(W+P)(r' -> r), L
        cow    L W r   L(W+P)(r' -> r), L    log     L D (r -> r), 1     restore L R (r -> r), 1
        blind  L W r   L P(r' -> r), L       stage   L W (r' -> r), L    commit  L K (r -> r), L
        stage  0       L P(r' -> r), L       stage   L W (r' -> r), 0    commit  L K (r -> r), 1

    where `(a -> b), n` reads a and writes b bytes in n launches. Attention reads L(C-W) r in L launches in every
    mode; a write of no rows is not launched. All follow from what each operator is. A step without drafts is `off`.

    Raises:
        ValueError: an unknown mode.
    """
    check_mode(mode)
    L, r, fresh = shape.num_layers, shape.row, shape.fresh_row
    rows, kept, rejected = window.rows, window.kept_rows, window.rejected_rows
    if not window.requests:
        mode = "off"
    at_once = window.prefill_rows + (rows if mode in ("off", "cow") else 0)

    traffic = Traffic()
    traffic.count("attention", read=L * (window.context_rows - rows) * r, launches=L)
    traffic.count("tail", read=L * rows * r if mode != "stage" else 0)
    traffic.count("write", read=L * at_once * fresh, written=L * at_once * r, launches=L if at_once else 0)
    if mode == "cow":
        traffic.count("log", read=L * window.draft_rows * r, written=L * window.draft_rows * r, launches=1)
        traffic.count("restore", read=L * rejected * r, written=L * rejected * r, launches=1)
    if mode in ("blind", "stage"):
        per_layer = mode == "blind"
        traffic.count("stage", read=L * rows * fresh, written=L * rows * r, launches=L if per_layer else 0)
        traffic.count("commit", read=L * kept * r, written=L * kept * r, launches=L if per_layer else 1)
    return traffic


def step_difference(mode: str, shape: Shape, window: Window) -> tuple[int, int]:
    """`(launches, bytes)` of a step in `mode`, less the same in `off`; bytes are those read and those written."""
    ours, vanilla = (step_traffic(m, shape, window).total() for m in (mode, "off"))
    moved = ours.read + ours.written - vanilla.read - vanilla.written
    return ours.launches - vanilla.launches, moved


def predicted_step_difference(
    mode: str, shape: Shape, window: Window, *, launch_us: float, bandwidth_gb_s: float
) -> float:
    """Microseconds that a step in `mode` takes longer than in `off`; negative where it is faster.

    The model: launches x `launch_us`, plus bytes at `bandwidth_gb_s` (1e9 bytes a second). Nothing overlaps and the
    attention kernel is as good in both modes, so this is the difference that the write policy alone makes.
    """
    launches, moved = step_difference(mode, shape, window)
    return launches * launch_us + moved / (bandwidth_gb_s * 1e3)


def break_even(mode: str, shape: Shape, window: Window, *, bandwidth_gb_s: float) -> float:
    """The launch cost, in microseconds, above which `mode` is faster than `off`.

    0 means faster whatever a launch costs; `math.inf` that there is no such cost, since `mode` launches no less.
    """
    launches, moved = step_difference(mode, shape, window)
    if launches >= 0:
        return 0.0 if moved < 0 and not launches else math.inf
    return max(0.0, moved / (bandwidth_gb_s * 1e3) / -launches)
