# SPDX-License-Identifier: Apache-2.0
"""Time of one layer's verify attention and write on a GPU, beside what vLLM does in the same place.

    python -m nwor_lab.gpu.attention --out results/attention

Each sample is one replay of a CUDA graph after a read of 256 MiB, as a layer's weights are read before its attention;
what is compared is interleaved (`timer`). Every request has k + 1 rows (a token and k drafts) behind `context`
positions in pages of 16 slots, at random places of the cache. What a sample has to do is the same for all: read the
prefix, attend, and leave the rows stored.

    nwor             `nwor.attention.verify`, rows to staging, the tuned configuration; one launch
    flash            `reshape_and_cache_flash`, then FlashAttention 3 as vLLM calls it in a full graph: a schedule made
                     outside the graph for at most 32 splits
    flash 1 ... 16   the same with that many splits fixed, without a schedule: "best split" is the fastest of all
    flash2           `reshape_and_cache_flash`, then FlashAttention 2, which vLLM takes on an A100: forced on a Hopper,
                     and left out with an fp8 cache and where vLLM comes without it
    triton           `triton_reshape_and_cache_flash`, then vLLM's `unified_attention`
    xqa              `reshape_and_cache_flash`, then FlashInfer's XQA as vLLM's FlashInfer backend calls it on a Hopper;
                     left out where there is no FlashInfer
    write            `reshape_and_cache_flash` alone
    empty            one kernel of one thread that does nothing

The grid has settings that `nwor tune` searched, and others between them (`held_out`): column `tuned_on`. Options
name others: `--heads 32x8 --contexts 2048,131072 --batches 1,4 --k 8,48 --caches bf16`.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import pandas as pd
import torch

from nwor.attention import configs
from nwor_lab.gpu import timer
from nwor_lab.gpu.attention_case import BATCHES, HEAD_SIZE, AttentionCase, AttentionShape
from nwor_lab.gpu.held_out import HELD_OUT_BATCHES, HELD_OUT_CONTEXTS, is_tuned_on
from nwor_lab.gpu.layer_times import EACH, net, over_each, verdict
from nwor_lab.gpu.timer import interleaved
from nwor_lab.run import results

HEADS = ((32, 32), (32, 8), (16, 16), (16, 4))  # (query heads, KV heads): 32 and 8 KV heads, whole and at TP=2
CONTEXTS, CACHES = (512, 2048, 8192), ("bf16", "fp8")


def shapes(
    heads: Iterable[tuple[int, int]] = HEADS, batches: Iterable[int] = BATCHES, contexts: Iterable[int] = CONTEXTS,
    caches: Iterable[str] = CACHES, ks: Iterable[int] = (8,), head_size: int = HEAD_SIZE,
) -> list[AttentionShape]:  # fmt: skip
    """Every shape that these values make."""
    return [
        AttentionShape(*pair, batch, context, cache, k, head_size)
        for k, cache, pair, batch, context in itertools.product(ks, caches, heads, batches, contexts)
    ]


def grid(
    heads: Sequence[tuple[int, int]] = HEADS, batches: Sequence[int] = (), contexts: Sequence[int] = (),
    caches: Sequence[str] = CACHES, ks: Sequence[int] = (8, 3, 1),
) -> list[AttentionShape]:  # fmt: skip
    """What is recorded of these values: where no batches and contexts are given, shapes that are tuned on and others
    that are held out; of several k heads at TP=2 with k=8 alone, as whole steps are measured."""
    if batches or contexts:
        return shapes(heads, batches or BATCHES, contexts or CONTEXTS, caches, ks)
    return [
        shape
        for k in ks
        for batches, contexts in ((BATCHES, CONTEXTS), (HELD_OUT_BATCHES, HELD_OUT_CONTEXTS))
        for shape in shapes(
            [pair for pair in heads if k == 8 or pair[0] == 32 or len(ks) == 1], batches, contexts, caches, [k]
        )
    ]


def measure(chosen: Sequence[AttentionShape], repeats: int) -> pd.DataFrame:
    """Time everything on every shape. One row a sample: op, the shape, bytes, `tuned_on`, and the tidy columns.

    Metric `error` is the relative error of each call's output against fp32.
    """
    torch.backends.cuda.matmul.allow_tf32 = False
    tuning = configs.own_table(configs.Device.of("cuda")) if torch.cuda.device_count() else []
    found: list[dict[str, Any]] = []
    for shape in chosen:
        case = AttentionCase(shape)
        calls = case.calls()
        common = asdict(shape) | {"bytes": shape.bytes, "tuned_on": is_tuned_on(shape, tuning)}
        rows = interleaved(calls, repeats, clean=True)
        timed = [common | {"op": op, "repeat": n, "metric": "time", "unit": "us", "value": us} for op, n, us in rows]
        found += timed
        found += [
            common | {"op": op, "metric": "error", "unit": "relative", "value": case.error(call)}
            for op, call in calls.items()
            if op not in ("empty", "write")
        ]
        over = over_each(pd.DataFrame(timed))[[*EACH.values()]].iloc[0].dropna()
        print(f"{shape}: nwor over {', '.join(f'{name} {ratio:.3f}' for name, ratio in over.items())}", flush=True)
        del case, calls
    return results.tidy(found, mode="", model="", seed=0)


@dataclass(frozen=True, kw_only=True)
class Attention(timer.Axes, timer.Command):
    name: str = "attention"
    """of the table"""


def main(argv: list[str] | None = None) -> int:
    asked = timer.options(Attention, "attention", __doc__, argv)
    axes = {field.name: getattr(asked, field.name) for field in fields(timer.Axes)} | {"heads": asked.pairs}
    times = measure(grid(**{name: values for name, values in axes.items() if values}), asked.repeats)
    timer.write(asked, asked.name, times)
    print(over_each(times).round(3).to_string(index=False))
    print(verdict(net(times)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
