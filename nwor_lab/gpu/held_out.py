# SPDX-License-Identifier: Apache-2.0
"""Which settings the search of `nwor tune` has timed, and which are held out: what is won on those was not tuned for.

Column `tuned_on` of the table `attention`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from nwor_lab.gpu.attention_case import AttentionShape

CONTEXTS = (560, 2096, 8240, 32816, 131120)
"""Contexts that the search of the shipped table timed: no multiples of a tile, as most are not."""
HELD_OUT_BATCHES, HELD_OUT_CONTEXTS = (3, 12, 48), (1024, 4096)
"""Batches and contexts between those of the search. Batches of 2, 8 and 32 would not be held out: a table knows their
programs, requests times KV heads, from twice the batch of half the heads."""


def is_tuned_on(shape: AttentionShape, table: Iterable[Mapping[str, Any]]) -> bool:
    """Return whether the search timed this shape: it has an entry of its own, and its context is within 10 % of one."""
    near = any(abs(math.log(context / max(1, shape.context))) < math.log(1.1) for context in CONTEXTS)
    return near and any(shape.entry.items() <= one.items() for one in table)
