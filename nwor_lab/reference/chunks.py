# SPDX-License-Identifier: Apache-2.0
"""Chunk-based verification (SCV): which rows of a long window are computed at all. It goes with every write policy.

A window of 1 + k rows is cut into chunks of c rows, a forward each. The last row of a chunk judges the draft that the
next chunk begins with. The first chunk with a rejection ends the window: rows behind it are neither computed nor
written. vLLM 0.32 has nothing like it; nearest is its dynamic draft length, `num_speculative_tokens_per_batch_size`,
which sets k by the size of the batch, before anything is verified.
"""

from __future__ import annotations

from torch import Tensor

from nwor_lab.reference.cache import Batch, PagedCache
from nwor_lab.reference.decoder import ChunkedWindow, Drafter, Request


class LookupDrafter(Drafter):
    """Drafts `k` tokens without a model: what followed the last `n` tokens where they first stood (vLLM's `ngram`).

    A text that ends before `k` tokens goes on with the draft itself. A request whose last `n` tokens are new to it has
    no drafts.
    """

    def __init__(self, k: int, n: int = 3) -> None:
        self.k, self.n = k, n

    def propose(self, requests: list[Request], batch: Batch, hidden: Tensor, num_rejected: Tensor) -> None:
        for request in requests:
            request.drafts = self.look_up(request.tokens) if request.output else []

    def look_up(self, tokens: list[int]) -> list[int]:
        """The drafts `[k]` after `tokens`, or none."""
        places = range(len(tokens) - self.n)
        start = next((at for at in places if tokens[at : at + self.n] == tokens[-self.n :]), None)
        if start is None:
            return []
        text = list(tokens)
        for position in range(start + self.n, start + self.n + self.k):
            text.append(text[position])
        return text[len(tokens) :]


class ChunkedDrafter(Drafter):
    """Hands the drafts of another drafter to the decoder chunk by chunk.

    Args:
        drafter: proposes the drafts of whole windows.
        chunk: rows c of a chunk; the last of a window may have fewer. From 1 + k on a window is one forward.

    Attributes:
        windows: those that have ended, in order.
    """

    def __init__(self, drafter: Drafter, chunk: int) -> None:
        self.drafter, self.chunk, self.k = drafter, chunk, drafter.k
        self.windows: list[ChunkedWindow] = []

    def start(self, cache: PagedCache) -> None:
        self.drafter.start(cache)

    def propose(self, requests: list[Request], batch: Batch, hidden: Tensor, num_rejected: Tensor) -> None:
        """Each step's drafts: the next chunk of a window that goes on, else the first of a new one."""
        self.drafter.propose(requests, batch, hidden, num_rejected)
        steps = zip(requests, batch.query_lens.tolist(), num_rejected.tolist(), strict=True)
        for request, rows, rejected in steps:
            if window := request.window:
                window.forwards += 1
                window.rows += rows
                window.accepted += rows - 1 - rejected
                if not rejected and window.waiting[:1] == request.tokens[-1:]:
                    window.accepted += 1
                    request.drafts = window.waiting[1 : self.chunk]
                    window.waiting = window.waiting[self.chunk :]
                    continue
                self.windows.append(window)
            drafts, request.window = request.drafts, None
            if drafts:
                request.drafts = drafts[: self.chunk - 1]
                request.window = ChunkedWindow(drafts[self.chunk - 1 :])
