# SPDX-License-Identifier: Apache-2.0
"""Bytes and launches of one verify step: counted as they happen, and predicted by closed formulas.

Counted is what an operator must move at least: each row of keys and values that it reads or writes, once. Indices,
queries, re-reads inside a kernel and caches are left out. All numbers are for one rank. The kinds are

    attention  one launch a layer: the rows it reads from the pages, the window's own left out
    tail       the window's own rows, read from the pages in the same launch
    write      rows written to their pages in the forward, one launch of vLLM's writer a layer
    stage      held rows' keys and values read once and left in staging
    commit     kept rows, staging -> pages
    log        draft slots, pages -> log, before the forward
    restore    rejected rows, log -> pages
    open       what a step needs on the device, filled in one launch; indices alone

`stage` in mode `stage` is no launch of its own and has no `tail`: the attention kernel reads the window's keys and
values from where the projections left them, attends to them and leaves the drafts in staging, on one read. The row of
the token sampled last is not held: the same launch writes it to its page. Mode `direct`, the control, has that
attention, and it writes all of the window's rows to their pages.

`step_traffic` is exact against the reference model, which counts the same kinds as it runs. `served_traffic` is the
same step as vLLM serves it on a GPU, with the launch that opens the window.
What the bytes and launches cost is the business of `nwor_lab.cost.breakeven`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from nwor.attention.configs import next_power_of_2
from nwor.settings import ATTENDING
from nwor_lab.reference.ledger import Moved, Traffic

MODES = ("off", "blind", "cow", "stage")  # of the reference model
SERVED = ("off", "cow", "direct", "stage")


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
            heads = self.num_kv_heads
            raise ValueError(
                f"{heads} KV heads do not spread evenly over {self.tp} ranks: tp divides {heads} or is a multiple of it"
            )

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

    One step's are whole numbers; an expected step's, or the mean of many, need not be.
    """

    requests: float
    draft_rows: float
    rejected_rows: float
    context_rows: float
    prefill_rows: float = 0

    @classmethod
    def expected(cls, batch: float, survival: Sequence[float], context: float = 0) -> "Window":
        """The mean step of `batch` requests that bring `len(survival)` drafts each; nothing is prefilled.

        Args:
            survival: [k], the share of windows in which drafts 0 to i were all accepted. A window accepts as many
                drafts as its first rejection leaves, so the sum over positions is the mean number accepted (EAGLE,
                arXiv 2401.15077, calls one more than that tau).
            context: mean `num_computed_tokens` of a request before the step.
        """
        k = len(survival)
        return cls(batch, batch * k, batch * (k - sum(survival)), batch * context + (batch + batch * k))

    @property
    def rows(self) -> float:
        """Rows of the window: the drafts and each request's last sampled token."""
        return self.requests + self.draft_rows

    @property
    def kept_rows(self) -> float:
        return self.rows - self.rejected_rows


def step_traffic(mode: str, shape: Shape, window: Window) -> Traffic:
    """Bytes and launches of one step on one rank, all layers; one layer is `Shape(num_layers=1)`.

    With L layers, W window rows of which K are kept, D drafts of which A are accepted and R rejected, S = W - D
    sampled tokens, P prefill rows, C context rows, and r (r' before conversion) bytes a row:

        mode   tail    write                 held back                   after sampling
        off    L W r   L(W+P)(r' -> r), L
        cow    L W r   L(W+P)(r' -> r), L    log     L D (r -> r), 1     restore L R (r -> r), 1
        direct 0       L(W+P)(r' -> r), L
        blind  L W r   L P(r' -> r), L       stage   L W (r' -> r), L    commit  L K (r -> r), L
        stage  0       L(S+P)(r' -> r), L    stage   L D (r' -> r), 0    commit  L A (r -> r), 1

    where `(a -> b), n` reads a and writes b bytes in n launches. Attention reads L(C-W) r in L launches in every
    mode. A write of no rows is not launched, nor under `direct` and `stage` one of no prefill rows: attention's launch
    makes it.
    All follow from what each operator is. A step without drafts is `off`.

    Raises:
        ValueError: an unknown mode.
    """
    if mode not in (*MODES, *SERVED):
        raise ValueError(f"{mode!r} is no mode; choose one of {', '.join(dict.fromkeys((*MODES, *SERVED)))}")
    L, r, fresh = shape.num_layers, shape.row, shape.fresh_row
    rows, drafts, rejected = window.rows, window.draft_rows, window.rejected_rows
    if not window.requests:
        mode = "off"
    # What waits for the verifier, and what of it is written then.
    held, taken = {"blind": (rows, window.kept_rows), "stage": (drafts, drafts - rejected)}.get(mode, (0, 0))
    at_once = window.prefill_rows + rows - held
    launched = window.prefill_rows if mode in ATTENDING else at_once

    traffic = Traffic()
    traffic.count("attention", read=L * (window.context_rows - rows) * r, launches=L)
    traffic.count("tail", read=L * rows * r if mode not in ATTENDING else 0)
    traffic.count("write", read=L * at_once * fresh, written=L * at_once * r, launches=L if launched else 0)
    if mode == "cow":
        traffic.count("log", read=L * drafts * r, written=L * drafts * r, launches=1)
        traffic.count("restore", read=L * rejected * r, written=L * rejected * r, launches=1)
    if held:
        per_layer = mode == "blind"
        traffic.count("stage", read=L * held * fresh, written=L * held * r, launches=L if per_layer else 0)
        traffic.count("commit", read=L * taken * r, written=L * taken * r, launches=L if per_layer else 1)
    return traffic


def served_traffic(mode: str, shape: Shape, window: Window) -> Traffic:
    """Bytes and launches of one decode step on one rank as vLLM serves it on a GPU, all layers.

    To `step_traffic` come, and of `cow` in place of its log, in the letters used there (of `direct` nothing):

        mode   open    log
        cow    0, 1    L K (r -> r), 1
        stage  0, 1

    The log of `cow` keeps a slot's bytes until one of its drafts is accepted. Of a request that keeps K of its rows,
    K - 1 of them drafts, the next window begins K slots on, and so many of its slots are logged for the first time;
    all D where less than one draft is rejected. That is a batch whose requests stay the same; after another step all D
    are logged. A step that holds prefill rows too is logged whole under `stage`, and vLLM's own under `direct`.

    Raises:
        ValueError: an unknown mode.
    """
    if mode not in SERVED:
        raise ValueError(f"{mode!r} is not served; choose one of {', '.join(SERVED)}")
    mixed = window.prefill_rows > 0
    way = {"stage": "cow", "direct": "off"}.get(mode, mode) if mixed else mode
    traffic = step_traffic(way, shape, window)
    if way in ("off", "direct") or not window.requests:
        return traffic
    traffic.count("open", launches=1)
    if way == "cow" and not mixed:
        moved = shape.num_layers * min(window.kept_rows, window.draft_rows) * shape.row
        traffic["log"] = Moved(moved, moved, 1)
    return traffic


def staging_bytes(mode: str, shape: Shape, requests: int, k: int) -> int:
    """Device memory, in bytes, that a rank sets aside for windows of `requests` requests with at most `k` drafts.

    `cow` holds the drafts' old rows: L k r a request, k rounded up to a power of two. `stage` holds their new ones:
    L k r. The manager's buffers are this, rounded up to whole blocks.
    """
    rows = {"off": 0, "direct": 0, "cow": next_power_of_2(k), "stage": k}[mode]
    return shape.num_layers * requests * rows * shape.row
