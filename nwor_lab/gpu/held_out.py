# SPDX-License-Identifier: Apache-2.0
"""Which settings the search of `nwor tune` has timed, and which are held out: what is won on those was not tuned for.

Column `tuned_on` of the table `attention`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from nwor_lab.gpu.attention_case import AttentionShape

CONTEXTS = (560, 2096, 3120, 8240, 32816, 131120)
"""Contexts that searches of the shipped table timed, 3,120 the last alone: no multiples of a tile, as most are not."""
HELD_OUT_BATCHES, HELD_OUT_CONTEXTS = (34, 42, 54), (1024, 4096)
"""Batches and contexts between those of the search. What a table knows of a batch is its programs, requests times KV
heads: those of the H200's are powers of 2, with k of 4 and 8 also 3, 5 and 7 times such, and for some caches and
heads those of nearly every batch to 32 and of multiples of 4 to 60."""


def is_tuned_on(shape: AttentionShape, table: Iterable[Mapping[str, Any]]) -> bool:
    """Return whether the search timed this shape: it has an entry of its own, and its context is within 10 % of one."""
    near = any(abs(math.log(context / max(1, shape.context))) < math.log(1.1) for context in CONTEXTS)
    return near and any(shape.entry.items() <= one.items() for one in table)
