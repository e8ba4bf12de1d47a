# SPDX-License-Identifier: Apache-2.0
"""Which settings the search of `nwor tune` has timed, and which are held out: what is won on those was not tuned for.

Column `tuned_on` of the tables `attention`, `gpu_direct` and `gpu_decode`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping
from typing import Any

import pandas as pd
import torch

from nwor.attention import configs
from nwor_lab.gpu.inputs import AttentionShape

CONTEXTS = (560, 2096, 8240, 32816, 131120)
"""Contexts that the search of the shipped table timed: no multiples of a tile, as most are not."""
HELD_OUT_BATCHES, HELD_OUT_CONTEXTS = (3, 12, 48), (1024, 4096)
"""Batches and contexts between those of the search. Batches of 2, 8 and 32 would not be held out: a table knows their
programs, requests times KV heads, from twice the batch of half the heads."""


@functools.cache
def tuning() -> list[dict[str, Any]]:
    """Return the tuning table that this machine's GPU uses; an empty one where there is no GPU."""
    return configs.tuned(configs.Device.of("cuda")) if torch.cuda.device_count() else []


def is_tuned_on(shape: AttentionShape, table: Iterable[Mapping[str, Any]]) -> bool:
    """Return whether the search timed this shape: it has an entry of its own, and its context is within 10 % of one."""
    near = any(abs(math.log(context / max(1, shape.context))) < math.log(1.1) for context in CONTEXTS)
    return near and any(shape.entry.items() <= one.items() for one in table)


def mark_steps(steps: pd.DataFrame, heads: int, head_size: int) -> pd.DataFrame:
    """Return a bench table of random prompts with column `tuned_on`, where this machine's GPU has a tuning table.

    heads: query heads of the model, which the ranks share. Rows of no prompt length are not tuned on.
    """
    if not (table := tuning()):
        return steps
    names = ["tp", "kv_heads", "batch", "prompt", "kv_cache_dtype", "k"]
    settings = steps[names].drop_duplicates()
    shapes = [
        AttentionShape(
            heads // line.tp, max(1, line.kv_heads // line.tp), line.batch,
            0 if math.isnan(line.prompt) else int(line.prompt),
            "fp8" if line.kv_cache_dtype.startswith("fp8") else "bf16", line.k, head_size,
        )
        for line in settings.itertuples()
    ]  # fmt: skip
    marked = settings.assign(tuned_on=[is_tuned_on(shape, table) for shape in shapes])
    return steps.merge(marked, how="left", on=names)
