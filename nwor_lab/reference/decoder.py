# SPDX-License-Identifier: Apache-2.0
"""Greedy speculative decoding with a chain of k drafts, batched as vLLM batches it: prefill chunks beside verifies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from nwor_lab.reference.cache import Batch, PagedCache
from nwor_lab.reference.ledger import Traffic
from nwor_lab.reference.policies import WriteAll, make_policy
from nwor_lab.reference.staging import Counts

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""Attention over whatever cache the caller keeps: of the layer's number, `query [B, T, Hq, D]` and `key, value
[B, T, Hkv, D]`, all after RoPE; returns `[B, T, Hq, D]`. Layers count from 0; an EAGLE head's follow the target's, as
in vLLM."""


@dataclass
class ChunkedWindow:
    """A window that `nwor_lab.reference.chunks` verifies in several steps, and what has become of it so far.

    Attributes:
        waiting: drafts that no step has taken yet; the first is judged by the step that runs now.
        accepted: drafts accepted so far.
        forwards, rows: steps it took part in, and the rows that it brought to them.
    """

    waiting: list[int]
    accepted: int = 0
    forwards: int = 0
    rows: int = 0


@dataclass
class Request:
    """One prompt and what it has become. `tokens` are known, the first `num_computed_tokens` of them in the cache."""

    tokens: list[int]
    num_prompt_tokens: int
    block_table: Tensor
    num_computed_tokens: int = 0
    drafts: list[int] = field(default_factory=list)
    window: ChunkedWindow | None = None

    @property
    def output(self) -> list[int]:
        return self.tokens[self.num_prompt_tokens :]

    def is_active(self, max_tokens: int) -> bool:
        """Whether it has fewer than `max_tokens`, or is between two chunks of a window, which is always ended."""
        return len(self.output) < max_tokens or (self.window is not None and self.window.forwards > 0)


@dataclass
class Step:
    """What one step did, in rows as `nwor_lab.cost.traffic.Window` takes them.

    Attributes:
        requests, draft_rows, rejected_rows: those that verified drafts, their drafts, and the rejected ones of these.
        context_rows: rows that attention reads, this step's among them, of all requests.
        prefill_rows: rows of requests that verified nothing.
        accepted: accepted drafts of each request that verified some.
        traffic: what the target's cache counted.
        dirty_bytes: bytes of the target's pages, outside kept rows, that the step changed and left so.
    """

    requests: int
    draft_rows: int
    rejected_rows: int
    context_rows: int
    prefill_rows: int
    accepted: list[int]
    traffic: Traffic
    dirty_bytes: int


@dataclass
class Generation:
    """The tokens of each prompt, `[R][max_tokens]`, the steps they took, and the cache as these left it."""

    mode: str
    cache: PagedCache
    k: int
    tokens: list[list[int]]
    steps: list[Step]
    counts: Counts

    @property
    def accepted(self) -> list[int]:
        """Accepted drafts of each verification, in order."""
        return [n for step in self.steps for n in step.accepted]

    @property
    def acceptance_length(self) -> float:
        """Mean tokens that a verification yields, the bonus token included; as vLLM's metrics have it."""
        return 1 + sum(self.accepted) / max(1, len(self.accepted))

    @property
    def survival(self) -> list[float]:
        """Of each draft position, the share of verifications that accepted the draft there and all before it."""
        return survival(self.accepted, self.k)

    @property
    def dirty_bytes(self) -> int:
        return sum(step.dirty_bytes for step in self.steps)


def survival(accepted: list[int], k: int) -> list[float]:
    """Of each of `k` draft positions, the share of windows that accepted the draft there and all before it."""
    return [sum(n > position for n in accepted) / max(1, len(accepted)) for position in range(k)]


class Drafter:
    """Proposes at most `k` drafts a request; one without a cache of its own has no `start`."""

    k: int

    def start(self, cache: PagedCache) -> None:
        """Begin a generation over the target's `cache`."""

    def propose(self, requests: list[Request], batch: Batch, hidden: Tensor, num_rejected: Tensor) -> None:
        """Set `drafts` of every request that has a sampled token; called after the window is closed.

        `hidden [T, hidden]` is the target's for `batch`; `num_rejected` is int64 `[R]`.
        """
        raise NotImplementedError


def attend_through(policy: WriteAll) -> Attend:
    """A model's attention over `policy`'s cache; the rows of all requests are one sequence of the model's batch."""

    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        policy.stage(layer, key[0], value[0])
        return policy.attend(layer, query[0])[None]

    return attend


def make_batch(cache: PagedCache, requests: list[Request], starts: list[int], ids: list[list[int]]) -> Batch:
    """The batch in which request r computes the tokens `ids[r]` at positions `starts[r]` and on.

    A request with drafts is taken to verify them.
    """
    lens = [len(row) for row in ids]
    sequences = [
        cache.slots(request.block_table, torch.arange(start + n))
        for request, start, n in zip(requests, starts, lens, strict=True)
    ]
    return Batch(
        input_ids=torch.tensor([token for row in ids for token in row]),
        positions=torch.cat([torch.arange(start, start + n) for start, n in zip(starts, lens, strict=True)]),
        slot_mapping=torch.cat([slots[start:] for slots, start in zip(sequences, starts, strict=True)]),
        query_start_loc=torch.tensor([0, *lens]).cumsum(0),
        num_drafts=torch.tensor([len(request.drafts) for request in requests]),
        sequence_slots=sequences,
    )


class EagleDrafter(Drafter):
    """Drafts a chain of `k` tokens with an EAGLE head, whose own cache is written at once and is part of no window."""

    def __init__(self, head: nn.Module, k: int) -> None:
        self.head, self.k = head, k

    def start(self, cache: PagedCache) -> None:
        """Pages of the head's own, as many as the target's and at layer numbers behind them."""
        config, dtype = self.head.config, self.head.fc.weight.dtype
        shape = config.num_hidden_layers, config.num_key_value_heads, config.head_dim, cache.num_blocks
        self.policy = WriteAll(PagedCache(*shape, cache.block_size, dtype, first_layer=cache.num_layers))

    def propose(self, requests: list[Request], batch: Batch, hidden: Tensor, num_rejected: Tensor) -> None:
        kept = batch.kept(num_rejected)
        lens = torch.bincount(batch.row_request[kept], minlength=len(requests)).tolist()
        for request in requests:
            request.drafts = []
        # The head's row p holds the target's feature of token p and the embedding of token p + 1.
        starts = [request.num_computed_tokens - n for request, n in zip(requests, lens, strict=True)]
        ids = [r.tokens[start + 1 : start + 1 + n] for r, start, n in zip(requests, starts, lens, strict=True)]
        features = self._forward(requests, starts, ids, hidden[kept])[torch.tensor(lens).cumsum(0) - 1]

        sampled = [n for n, request in enumerate(requests) if len(request.tokens) > request.num_prompt_tokens]
        active, features = [requests[n] for n in sampled], features[sampled]
        chains: list[list[int]] = [[] for _ in active]
        for step in range(self.k if active else 0):
            if step:
                starts = [request.num_computed_tokens - 1 + step for request in active]
                features = self._forward(active, starts, [chain[-1:] for chain in chains], features)
            for chain, token in zip(chains, self.head.lm_head(features).argmax(-1).tolist(), strict=True):
                chain.append(token)
        for request, chain in zip(active, chains, strict=True):
            request.drafts = chain

    def _forward(self, requests: list[Request], starts: list[int], ids: list[list[int]], hidden: Tensor) -> Tensor:
        batch = make_batch(self.policy.cache, requests, starts, ids)
        self.policy.begin(batch)
        return self.head(batch.input_ids[None], batch.positions[None], hidden[None], attend_through(self.policy))[0]


@dataclass
class SpeculativeDecoder:
    """Target, drafter, paged cache and write policy. Blocks are handed out in a shuffled order, so layout errors show.

    Attributes:
        target: the model that verifies: one of transformers whose attention is an `Attend` that it is called with, as
            `nwor_lab.pair.model.load_target` gives it.
        mode: `off`, `blind`, `cow` or `stage`.
        drafter: for `target`, such as an `EagleDrafter`.
        block_size: of the paged cache.
        prefill_chunk: most prompt tokens a request computes in a step.
        seed: of the shuffle.
    """

    target: nn.Module
    mode: str
    drafter: Drafter
    block_size: int = 16
    prefill_chunk: int = 64
    seed: int = 0

    @torch.inference_mode()
    def generate(self, prompts: list[list[int]], max_tokens: int) -> Generation:
        """Decode `max_tokens` greedy tokens after each prompt, all prompts in one batch.

        Raises:
            ValueError: no or an empty prompt.
        """
        if not prompts or not all(prompts):
            raise ValueError("give at least one prompt, and no empty one")
        k = self.drafter.k
        needed = [-(-(len(prompt) + max_tokens + 2 * k + 1) // self.block_size) for prompt in prompts]
        num_blocks = sum(needed) + 1
        blocks = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(self.seed))
        tables = blocks[: sum(needed)].split(needed)
        requests = [Request(list(p), len(p), table) for p, table in zip(prompts, tables, strict=True)]

        config, dtype = self.target.config, self.target.lm_head.weight.dtype
        sizes = config.num_hidden_layers, config.num_key_value_heads, config.head_dim, num_blocks, self.block_size
        # Blind staging reads pages that nobody has written: in NaN it would say nothing.
        cache = PagedCache(*sizes, dtype, poison=self.mode != "blind")
        policy = make_policy(self.mode, cache, capacity=len(requests) * (1 + k))
        self.drafter.start(cache)
        steps = []
        while active := [request for request in requests if request.is_active(max_tokens)]:
            steps.append(self._step(active, cache, policy))
        tokens = [request.output[:max_tokens] for request in requests]
        return Generation(self.mode, cache, k, tokens, steps, policy.counts)

    def _step(self, requests: list[Request], cache: PagedCache, policy: WriteAll) -> Step:
        starts = [request.num_computed_tokens for request in requests]
        batch = make_batch(cache, requests, starts, [self._next_ids(request) for request in requests])
        before = cache.pool.clone()
        cache.traffic.clear()

        policy.begin(batch)
        try:
            ids, positions, attend = batch.input_ids[None], batch.positions[None], attend_through(policy)
            output = self.target.model(ids, position_ids=positions, attend=attend, use_cache=False)
            hidden = output.last_hidden_state[0]
        except BaseException:
            policy.cancel()
            raise
        num_rejected, sampled = self._verify(batch, requests, hidden)
        policy.commit(num_rejected)

        dirty = cache.changed_bytes(before, batch.slot_mapping[batch.kept(num_rejected)])
        kept_lens = (batch.query_lens - num_rejected).tolist()
        for request, new, kept in zip(requests, sampled, kept_lens, strict=True):
            request.num_computed_tokens += kept
            request.tokens += new
        self.drafter.propose(requests, batch, hidden, num_rejected)

        verified = batch.num_drafts > 0
        return Step(
            requests=int(verified.sum()),
            draft_rows=int(batch.num_drafts.sum()),
            rejected_rows=int(num_rejected.sum()),
            context_rows=sum(len(slots) for slots in batch.sequence_slots),
            prefill_rows=len(batch.input_ids) - len(batch.window_rows),
            accepted=(batch.num_drafts - num_rejected)[verified].tolist(),
            traffic=Traffic(cache.traffic),
            dirty_bytes=dirty,
        )

    def _next_ids(self, request: Request) -> list[int]:
        start = request.num_computed_tokens
        if start < request.num_prompt_tokens:
            return request.tokens[start : min(start + self.prefill_chunk, request.num_prompt_tokens)]
        return request.tokens[start:] + request.drafts

    def _verify(self, batch: Batch, requests: list[Request], hidden: Tensor) -> tuple[Tensor, list[list[int]]]:
        """`num_rejected` int64 `[R]`, and what each request gains: accepted drafts and one token of the target's."""
        num_rejected = torch.zeros_like(batch.num_drafts)
        greedy = self.target.lm_head(hidden).argmax(-1).split(batch.query_lens.tolist())
        sampled: list[list[int]] = []
        for n, (request, choices) in enumerate(zip(requests, greedy, strict=True)):
            if request.num_computed_tokens + len(choices) < request.num_prompt_tokens:
                sampled.append([])
                continue
            ours = choices[-1 - len(request.drafts) :].tolist()
            alike = [draft == own for draft, own in zip(request.drafts, ours, strict=False)]
            accepted = [*alike, False].index(False)
            num_rejected[n] = len(request.drafts) - accepted
            sampled.append(ours[: accepted + 1])
        return num_rejected, sampled
