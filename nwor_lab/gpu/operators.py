# SPDX-License-Identifier: Apache-2.0
"""Time of the all-layer operators on a GPU, of what a user has today, and the bytes that the hardware counts.

    python -m nwor_lab.gpu.operators --out results/kernels
    python -m nwor_lab.gpu.operators --out results/kernels --counters

Each sample is one replay of a CUDA graph after a write of 256 MiB that leaves nothing else in the L2 cache; what is
compared is interleaved (`timer`).

A window has 9 rows a request, at random places of a pool of 1,024 blocks of 16 slots a layer, and the first `kept` of
them are accepted. The operators move raw bytes between the pool and rows that already have the cache's format. Peers
get the same rows to write and nothing else: rejected rows have slot -1, or are left out beforehand.

    commit, restore, log   this kit's, one launch for all layers
    vllm                   `reshape_and_cache_flash`, one launch a layer
    vllm triton            `triton_reshape_and_cache_flash`, one launch a layer
    flashinfer             `append_paged_kv_cache`, one launch a layer; rejected rows left out beforehand
    empty                  one kernel of one thread that does nothing
    copy                   one kernel of torch (`bitwise_not`) on 4 GiB: the copy bandwidth
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch
from tyro.conf import FlagCreatePairsOff

from nwor import ops
from nwor_lab.cost.traffic import Shape
from nwor_lab.gpu import counters, timer
from nwor_lab.gpu.attention_case import LAYERS
from nwor_lab.gpu.operator_case import QUERY, OperatorCase, shape_of
from nwor_lab.gpu.timer import Call, interleaved
from nwor_lab.run import results

BATCHES = (1, 8, 16, 64, 256)
ROWS = tuple(QUERY * batch for batch in BATCHES)
SHAPES = tuple((kv_heads, cache) for kv_heads in (32, 8) for cache in ("bf16", "fp8"))
OURS = ("commit", "restore", "log")
PEERS = ("vllm", "vllm triton", "flashinfer")
METRICS = {"dram__bytes_read.sum": "dram_read", "dram__bytes_write.sum": "dram_written"}


def bytes_moved(op: str, shape: Shape, rows: int, kept: int, query: int = QUERY) -> int:
    """Bytes that `op` has to read and write of `rows` a layer, `query` a request, of which each keeps `kept`."""
    moved = {"log": query, "restore": query - kept}.get(op, kept)
    return 2 * shape.num_layers * shape.row * (rows // query * moved)


# -- measuring -----------------------------------------------------------------------------------------------------


def measure(
    repeats: int = 30,
    batches: Sequence[int] = BATCHES,
    seed: int = 0,
    shapes: Sequence[tuple[int, str]] = SHAPES,
    k: int = QUERY - 1,
) -> pd.DataFrame:
    """Time everything. One row a sample: op, kv_heads, cache, rows, kept, launches, bytes, and the tidy columns.

    `bytes_differing` rows say how many bytes of the accepted slots an op left other than vLLM's writer would.

    Args:
        batches: requests, each with a token and `k` drafts. shapes: (KV heads, cache) of each cache.
    """
    query = k + 1
    rows = [batch * query for batch in batches]
    ops.load()
    found = _copies(repeats)
    for kv_heads, cache in shapes:
        case = OperatorCase(kv_heads, cache, seed, query)
        for number in rows:
            case.fill(number)
            for kept in sorted({0, query // 3, query}):
                found += _samples(case, case.calls(kept), number, kept, repeats)
            print(f"{kv_heads} KV heads, {cache}, {number} rows", flush=True)
        if (kv_heads, cache) == tuple(shapes[0]):
            case.fill(min(rows))
            found += _launches(case, cache, repeats)
        del case
        torch.cuda.empty_cache()
    counts = dict.fromkeys(("kv_heads", "rows", "kept", "launches", "bytes"), 0)
    frame = pd.DataFrame(found).fillna({"metric": "time", "cache": ""} | counts)
    frame = frame.astype(dict.fromkeys(counts, "int64"))
    frame["unit"] = frame["metric"].map({"time": "us", "bytes_differing": "bytes"})
    return results.tidy(frame, mode="", model="", seed=seed, k=k)


def _copies(repeats: int) -> list[dict[str, Any]]:
    """Samples of a kernel that reads 4 GiB once and writes 4 GiB once.

    In a graph `Tensor.copy_` goes to the GPU's copy engines, whose rate is not the memory's: 2.7 TB/s on one H200.
    """
    source, target = (torch.zeros(1 << 30, dtype=torch.int32, device="cuda") for _ in range(2))
    timed = interleaved({"copy": functools.partial(torch.bitwise_not, source, out=target)}, repeats)
    return [{"op": op, "repeat": repeat, "value": value, "bytes": 8 << 30} for op, repeat, value in timed]


def _samples(case: OperatorCase, calls: dict[str, Call], rows: int, kept: int, repeats: int) -> list[dict[str, Any]]:
    common = {"kv_heads": case.heads, "cache": case.cache, "rows": rows, "kept": kept}
    moved = {op: bytes_moved(op, case.shape, rows, kept, case.query) if op != "empty" else 0 for op in calls}
    timed = [
        {**common, "op": op, "launches": LAYERS if op in PEERS else 1, "bytes": moved[op], "repeat": n, "value": us}
        for op, n, us in interleaved(calls, repeats)
    ]
    written = [op for op in calls if kept and (op == "commit" or op in PEERS)]
    return timed + [
        {**common, "op": op, "metric": "bytes_differing", "value": case.differing(calls[op], kept)} for op in written
    ]


def _launches(case: OperatorCase, cache: str, repeats: int) -> list[dict[str, Any]]:
    """vLLM's writer on the first n layers, for growing n: what one launch more costs."""
    slots = case.slots.flatten()
    common = {"op": "vllm launches", "kv_heads": case.heads, "cache": cache, "rows": slots.numel(), "kept": case.query}
    calls = {str(n): case.writes(n, slots) for n in (1, 2, 4, 8, 16, 32)}
    return [
        common
        | {"launches": int(n), "bytes": 2 * int(n) * case.shape.row * slots.numel(), "repeat": repeat, "value": us}
        for n, repeat, us in interleaved(calls, repeats)
    ]


# -- hardware counters ---------------------------------------------------------------------------------------------


def beyond_cache() -> list[tuple[int, str, int, int, str]]:
    """(kv_heads, cache, rows, kept, op) whose data exceeds any L2 cache: at least 96 MiB read."""
    accepted = {"log": (9,), "restore": (3, 6), "commit": (3, 9)}
    cases = [(*shape, rows, kept, op) for shape in SHAPES for rows in ROWS for op in OURS for kept in accepted[op]]
    return [case for case in cases if bytes_moved(case[4], shape_of(*case[:2]), *case[2:4]) >= 192 << 20]


def run_beyond_cache() -> None:
    """Every counted case once, each after a write of 256 MiB, for a profiler to watch."""
    ops.load()
    flush = torch.zeros(64 << 20, dtype=torch.float32, device="cuda")
    for (kv_heads, cache), cases in itertools.groupby(beyond_cache(), key=lambda case: case[:2]):
        case = OperatorCase(kv_heads, cache)
        for _, _, rows, kept, op in cases:
            case.fill(rows)
            call = case.calls(kept)[op]
            flush.zero_()
            call()
            torch.cuda.synchronize()
        del case, call


def count_bytes() -> pd.DataFrame:
    """DRAM bytes of each counted case as Nsight Compute reads them. One row a case and metric; `bytes`: the model's.

    Neither clocks nor caches are touched by the profiler: the cache is full of another kernel's bytes before, as when
    timed, so that what is written back of those stands for what this kernel leaves in the cache.

    Raises:
        counters.Unreadable: counters cannot be read here.
        RuntimeError: the profiler saw other launches than the cases make.
    """
    run, untouched = "from nwor_lab.gpu import operators; operators.run_beyond_cache()", ("--cache-control", "none")
    seen = counters.read(run, metrics=list(METRICS), kernels="move_rows", options=untouched)
    if seen["launch"].nunique() != len(beyond_cache()):
        raise RuntimeError(f"ncu saw {seen['launch'].nunique()} launches, expected {len(beyond_cache())}")
    found = []
    for case, (_, launch) in zip(beyond_cache(), seen.groupby("launch"), strict=True):
        kv_heads, cache, rows, kept, op = case
        half = bytes_moved(op, shape_of(kv_heads, cache), rows, kept) // 2
        about = {"op": op, "kv_heads": kv_heads, "cache": cache, "rows": rows, "kept": kept, "bytes": half}
        of_metric = launch.set_index("metric")["value"]
        found += [about | {"metric": name, "value": of_metric[one], "unit": "bytes"} for one, name in METRICS.items()]
    return results.tidy(found, mode="", model="")


@dataclass(frozen=True, kw_only=True)
class Operators(timer.Command):
    counters: FlagCreatePairsOff[bool] = False
    """read the DRAM counters, and no times (needs ncu)"""


def main(argv: list[str] | None = None) -> int:
    asked = timer.options(Operators, "operators", __doc__, argv)
    name, frame = ("kernel_counters", count_bytes()) if asked.counters else ("kernel_times", measure(asked.repeats))
    timer.write(asked, name, frame)
    print(frame.groupby(["metric", "op", "kv_heads", "cache", "rows", "kept"])["value"].median().round(2).to_string())
    return 0


if __name__ == "__main__":
    sys.exit(main())
