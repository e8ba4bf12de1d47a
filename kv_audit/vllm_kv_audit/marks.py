# SPDX-License-Identifier: Apache-2.0
"""The marks beside the pages: what was written to each slot, how a step marks its rows, and how slots are checked.

Two hashes of 32 bits, so one fault in four billion passes unseen:

* *identity*, of all tokens up to a position: the sum over i <= p of ``mix(token_i, i)``. A sum makes the rows of a
  prefill one running sum, and needs nothing but the identity before a step's first row.
* *content*, of a slot's bytes in one layer: the upper half of the sum of ``key_j * unit_j`` modulo 2**64, in which two
  slots that differ meet with a probability of 2**-32 over the choice of the keys (Lemire and Kaser, 2014).

Beside each slot lie 8 + 4 * layers bytes, beside each position of each running request 4: the identity that it must
have by the request's own tokens. A row's identity is that of the tokens which vLLM fed to the model; a request's comes
from its prompt and from what was sampled for it. Nothing here waits for the device.

`cpu` and `kernels` have what marks and what checks, for each kind of device; they are held to each other bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .pages import Pages

KEPT, REJECTED, REPORTED = 1, 2, 4  # of a slot's state; 0 where nothing was written. A fault is reported once.
BYTES, TOKEN, REJECTED_ROW, UNWRITTEN = range(4)  # kinds of findings, as `settings.KINDS` names them
CHECKED_AT, FINDINGS_AT, KINDS_AT, ADOPTED_AT = 0, 1, 2, 6  # of the counters that begin a ring
COUNTERS, RING, FIELDS = 8, 64, 8  # a finding: step, row, position, pages, layer (-1: all), kind, slot, 0
A, B, C, D = 0x2545F4914F6CDD1D, -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15  # odd: of `mix`


def mix(token: Any, position: Any) -> Any:
    """int64, each of 32 bits, of two int64 tensors or arrays; shifts keep the sign, as everywhere here."""
    x = token * A + position * B
    x = (x ^ (x >> 31)) * C
    x = (x ^ (x >> 29)) * D
    return x >> 32


def content_keys(count: int, device: torch.device) -> Tensor:
    """int64 [count], a key for each unit of a slot."""
    place = torch.arange(count, dtype=torch.int64, device=device)
    return (mix(place, place + 1) << 32) ^ mix(place + 1, place)


def new_ring(device: torch.device) -> Tensor:
    """int64 [COUNTERS + RING * FIELDS]: slots checked, findings in all, by kind, slots adopted; the last findings."""
    return torch.zeros(COUNTERS + RING * FIELDS, dtype=torch.int64, device=device)


@dataclass(frozen=True)
class Marks:
    """The marks of some `Pages`.

    state, identity: int32 [slots]. content: int32 [layers, slots]. keys: int64 [heads * width].
    """

    pages: Pages
    index: int
    state: Tensor
    identity: Tensor
    content: Tensor
    keys: Tensor

    @classmethod
    def of(cls, pages: Pages, index: int) -> Marks:
        device, slots = pages.units.device, pages.num_slots
        return cls(
            pages,
            index,
            state=torch.zeros(slots, dtype=torch.int32, device=device),
            identity=torch.zeros(slots, dtype=torch.int32, device=device),
            content=torch.zeros(len(pages.names), slots, dtype=torch.int32, device=device),
            keys=content_keys(pages.heads * pages.width, device),
        )

    @property
    def nbytes(self) -> int:
        return self.state.nbytes + self.identity.nbytes + self.content.nbytes

    def contents(self, slots: Tensor) -> Tensor:
        """int32 [layers, n], the hash of what lies in the slots now."""
        places = self.pages.addresses(slots) + self.pages.offsets[:, None, None]
        return ((self.pages.units[places] * self.keys).sum(2) >> 32).int()


class Batch(NamedTuple):
    """What vLLM has prepared for a step of R requests and T tokens.

    rows: int [R], where in the table of expected identities each request is. query_start_loc: int32 [R + 1] or longer.
    seq_lens: int32 [R], the tokens of each with those of this step. input_ids: int32 [T] or longer.
    """

    rows: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor
    input_ids: Tensor
    num_requests: int
    num_tokens: int

    def computed(self) -> Tensor:
        """int64 [R], tokens of each request whose rows are in the pages before the step."""
        return (self.seq_lens[: self.num_requests] - self.query_start_loc[: self.num_requests + 1].diff()).long()


class Outcome(NamedTuple):
    """What came of the step. num_rejected, num_sampled: int32 [R]. sampled: int [R, k + 1], num_sampled of each row."""

    num_rejected: Tensor
    num_sampled: Tensor
    sampled: Tensor


class Sample(NamedTuple):
    """Which slots to check: the newest half of them, and one of each of as many parts of what is older.

    The bytes of the newest quarter, and of all where all are asked for, are looked at in every layer; those of any
    other slot in one, another for the next slot and in the next step: a row that is wrong in all layers, or a layer
    that is wrong in many rows, is met at once.

    size: of each request, at most; 0 for all. seed: changes from step to step.

    requests: int64 [n], those of the batch to look at. most: no request has more slots to look at.
    """

    requests: Tensor
    size: int
    most: int
    seed: int

    @property
    def everywhere(self) -> int:
        """So many of the newest slots of a request are looked at in every layer."""
        return (self.size + 3) // 4 if self.size else self.most
