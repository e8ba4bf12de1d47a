# SPDX-License-Identifier: Apache-2.0
"""Time of the all-layer operators on a GPU, of what a user has today, and the bytes that the hardware counts.

    python -m nwor_lab.microbench.operators --out results/kernels

One timer for all: the calls are captured in a CUDA graph, and each sample is one replay between two events, after a
write of 256 MiB that leaves nothing else in the L2 cache. What is compared is sampled in turns. Every sample is kept.

A window has 9 rows a request, at random places of a pool of 1,024 blocks of 16 slots a layer, and the first `kept` of
them are accepted. The operators move raw bytes between the pool and rows that already have the cache's format. Peers
get the same rows to write and nothing else: rejected rows have slot -1, or are left out beforehand.

    commit, restore, log   this kit's, one launch for all layers
    vllm                   `reshape_and_cache_flash`, one launch a layer
    vllm triton            `triton_reshape_and_cache_flash`, one launch a layer
    flashinfer             `append_paged_kv_cache`, one launch a layer; rejected rows left out beforehand
    index_copy, index_put  torch's, on a view [slots, row], one call a layer; rejected rows left out beforehand
    stream                 one kernel of torch (`bitwise_not`) that reads and writes as many bytes, side by side
    empty                  one kernel of one thread that does nothing
    copy                   a device-to-device copy of 4 GiB, not in a graph: the copy bandwidth
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from nwor import ops
from nwor_lab import results
from nwor_lab.microbench import nsight
from nwor_lab.model.traffic import Shape

LAYERS, HEAD_SIZE, BLOCK_SIZE, BLOCKS, QUERY = 32, 128, 16, 1024, 9
ROWS = (9, 72, 144, 576, 2304)
SHAPES = tuple((kv_heads, cache) for kv_heads in (32, 8) for cache in ("bf16", "fp8"))
KEPT = (0, 3, 9)
OURS = ("commit", "restore", "log")
PEERS = ("vllm", "vllm triton", "flashinfer", "index_copy", "index_put")
METRICS = {"dram__bytes_read.sum": "dram_read", "dram__bytes_write.sum": "dram_written"}

Call = Callable[[], object]


def shape_of(kv_heads: int, cache: str) -> Shape:
    """The cache of a Llama-2-7B (32 KV heads) or of its like with fewer, in bf16 or fp8 (e4m3)."""
    return Shape(LAYERS, kv_heads, HEAD_SIZE, cache_bytes={"bf16": 2, "fp8": 1}[cache], model_bytes=2)


def rows_moved(op: str, rows: int, kept: int) -> int:
    """Rows of a layer that `op` has to move in a window of `rows`, of which each request keeps `kept`."""
    share = {"log": QUERY, "restore": QUERY - kept}.get(op, kept)
    return rows // QUERY * share


def bytes_moved(op: str, shape: Shape, rows: int, kept: int) -> int:
    """Bytes read plus bytes written, each row once: what has to move, and nothing more."""
    return 2 * shape.num_layers * shape.row * rows_moved(op, rows, kept)


# -- the timer -----------------------------------------------------------------------------------------------------


class Timer:
    """Graph replay with a cold L2 cache, sampled in turns.

    clean: the cache is filled by reading, so that no line of it is written back in a sample's time; else by writing.
    """

    def __init__(self, clean: bool = False) -> None:
        self.clean = clean
        self.flush = torch.zeros(64 << 20, dtype=torch.float32, device="cuda")

    def capture(self, call: Call) -> torch.cuda.CUDAGraph:
        """`call` as a graph; it runs twice before, so that nothing is compiled or loaded in the capture."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            call(), call()
            graph.capture_begin()
            call()
            graph.capture_end()
        torch.cuda.current_stream().wait_stream(stream)
        return graph

    def sample(self, calls: dict[str, Call], repeats: int) -> Iterator[tuple[str, int, float]]:
        """Yield (name, repeat, microseconds): all calls once a turn, two turns of warm-up, then `repeats` turns."""
        graphs = {name: self.capture(call) for name, call in calls.items()}
        for repeat in range(-2, repeats):
            torch.cuda._sleep(2_000_000)  # a millisecond in which the turn is queued: no sample waits for the host
            turn = [(name, self._one(graph)) for name, graph in graphs.items()]
            torch.cuda.synchronize()
            if repeat >= 0:
                yield from ((name, repeat, 1e3 * begin.elapsed_time(end)) for name, (begin, end) in turn)

    def _one(self, graph: torch.cuda.CUDAGraph) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.flush.sum() if self.clean else self.flush.zero_()
        begin.record()
        graph.replay()
        end.record()
        return begin, end


def empty() -> None:
    torch.cuda._sleep(0)


@functools.cache
def flashinfer_writer() -> Callable[..., None] | None:
    """FlashInfer's `append_paged_kv_cache`, which is compiled when first used, or None where it is not to be had."""
    try:
        from flashinfer.page import append_paged_kv_cache, get_page_module

        get_page_module()
    except Exception as error:  # noqa: BLE001 - a peer that is missing is a row less
        print(f"flashinfer is left out: {type(error).__name__}: {error}", flush=True)
        return None
    return append_paged_kv_cache


def copy_bandwidth(repeats: int) -> list[dict[str, Any]]:
    """Samples of a device-to-device copy of 4 GiB."""
    source, target = (torch.empty(4 << 30, dtype=torch.uint8, device="cuda") for _ in range(2))
    source.view(torch.int64).random_()
    found = []
    for repeat in range(-2, repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        if repeat >= 0:
            found.append({"op": "copy", "repeat": repeat, "value": 1e3 * begin.elapsed_time(end), "bytes": 8 << 30})
    return found


# -- a window ------------------------------------------------------------------------------------------------------


class Window:
    """The tensors of one step on a pool laid out as vLLM's (layer, block, slot, head, key and value): "NHD"."""

    def __init__(self, kv_heads: int, cache: str, seed: int = 0) -> None:
        self.shape, self.fp8, self.heads = shape_of(kv_heads, cache), cache == "fp8", kv_heads
        self.generator = torch.Generator().manual_seed(seed)
        self.dtype = torch.uint8 if self.fp8 else torch.bfloat16
        width = 2 * HEAD_SIZE * self.shape.cache_bytes  # bytes of a slot and head
        row = self.shape.row
        self.pool = torch.empty(LAYERS * BLOCKS * BLOCK_SIZE * row, dtype=torch.uint8, device="cuda")
        self.pool.view(torch.int64).random_()
        self.layer_offsets = torch.arange(LAYERS, device="cuda") * (BLOCKS * BLOCK_SIZE * row)
        self.strides = (BLOCK_SIZE * row, width, row)
        self.layers = self.pool.view(self.dtype).view(LAYERS, BLOCKS, BLOCK_SIZE, kv_heads, 2 * HEAD_SIZE)
        self.scale = torch.ones(1, device="cuda")

    def fill(self, rows: int) -> None:
        """Draw the slots, keys and values of `rows` rows; the mini-cache holds what vLLM's writer makes of them."""
        requests = rows // QUERY
        blocks = torch.randperm(BLOCKS, generator=self.generator)[: 2 * requests].view(requests, 2)
        query = torch.arange(QUERY)
        first = torch.randint(0, BLOCK_SIZE, (requests, 1), generator=self.generator)
        self.positions = (first + query).int()
        self.blocks = blocks
        self.slots = (
            blocks.gather(1, (first + query) // BLOCK_SIZE) * BLOCK_SIZE + (first + query) % BLOCK_SIZE
        ).cuda()
        self.key, self.value = torch.randn(2, LAYERS, rows, self.heads, HEAD_SIZE, device="cuda").bfloat16()
        mini = -(-rows // BLOCK_SIZE)
        packed = torch.empty(LAYERS, mini, BLOCK_SIZE, self.heads, 2 * HEAD_SIZE, dtype=self.dtype, device="cuda")
        row_slots = torch.arange(rows, device="cuda")
        for layer in range(LAYERS):
            self.write(layer, packed[layer], row_slots)
        self.packed = packed.flatten(1, 2)[:, :rows].flatten(2)  # [L, M, 2 * H * D]
        self.rows = packed.view(torch.uint8).transpose(2, 3)
        self.num_rejected, self.kept = torch.zeros(2, requests, dtype=torch.int32, device="cuda")
        self.num_drafts = torch.full_like(self.kept, QUERY)
        self.counts = torch.zeros(5, dtype=torch.int64, device="cuda")

    def write(self, layer: int, cache: Tensor, slots: Tensor) -> None:
        """One layer's keys and values to `cache` [blocks, N, H, 2 * D] at `slots`, by vLLM's writer."""
        from vllm import _custom_ops

        keys, values = cache.split(HEAD_SIZE, -1)
        dtype = "fp8" if self.fp8 else "auto"
        key, value = self.key[layer], self.value[layer]
        _custom_ops.reshape_and_cache_flash(key, value, keys, values, slots, dtype, self.scale, self.scale)

    def writes(self, layers: int, slots: Tensor) -> Call:
        """vLLM's writer on the first `layers` layers, a launch each."""

        def each_layer() -> None:
            for layer in range(layers):
                self.write(layer, self.layers[layer], slots)

        return each_layer

    def calls(self, kept: int) -> dict[str, Call]:
        """Every operator and peer at hand on the present window, each request keeping its first `kept` rows."""
        self.num_rejected.fill_(QUERY - kept)
        where = (self.pool, self.layer_offsets, self.strides, self.slots, None, self.rows)
        decisions = (self.num_drafts, self.num_rejected, self.kept, self.counts)
        found: dict[str, Call] = {
            "empty": empty,
            "commit": functools.partial(ops.commit_all_layers, *where, *decisions),
            "restore": functools.partial(ops.restore_all_layers, *where, *decisions),
            "log": functools.partial(ops.log_all_layers, *where),
        }
        accepted = torch.arange(QUERY) < kept
        masked = torch.where(accepted.cuda(), self.slots, -1).flatten()
        found["vllm"] = self.writes(LAYERS, masked)
        found["vllm triton"] = self._triton(masked)
        if not kept:
            return found  # the others launch nothing for no rows
        index = self.slots[:, :kept].flatten()
        chosen = torch.arange(self.slots.numel()).view(-1, QUERY)[:, :kept].flatten().cuda()
        flat, source = self.layers.flatten(3).flatten(1, 2), self.packed[:, chosen].contiguous()
        found["index_copy"] = lambda: [to.index_copy_(0, index, rows) for to, rows in zip(flat, source, strict=True)]
        found["index_put"] = lambda: [to.index_put_((index,), rows) for to, rows in zip(flat, source, strict=True)]
        words = self.pool.view(torch.int32)[: 2 * source.view(torch.uint8).numel() // 4].chunk(2)
        found["stream"] = functools.partial(torch.bitwise_not, words[0], out=words[1])
        if flashinfer := self._flashinfer(kept, chosen):
            found["flashinfer"] = flashinfer
        return found

    def _triton(self, slots: Tensor) -> Call:
        from vllm.v1.attention.ops.triton_reshape_and_cache_flash import triton_reshape_and_cache_flash as write

        def all_layers() -> None:
            for key, value, cache in zip(self.key, self.value, self.layers, strict=True):
                write(key, value, *cache.split(HEAD_SIZE, -1), slots, "fp8" if self.fp8 else "auto", *2 * [self.scale])

        return all_layers

    def _flashinfer(self, kept: int, chosen: Tensor) -> Call | None:
        if not (append_paged_kv_cache := flashinfer_writer()):
            return None
        requests = len(self.blocks)
        request = torch.arange(requests).repeat_interleave(kept).int().cuda()
        positions = self.positions[:, :kept].flatten().contiguous().cuda()
        pages = self.blocks.flatten().int().cuda()
        indptr = (2 * torch.arange(requests + 1)).int().cuda()
        last = torch.full((requests,), BLOCK_SIZE, dtype=torch.int32, device="cuda")
        dtype = torch.float8_e4m3fn if self.fp8 else torch.bfloat16
        keys, values = (tensor[:, chosen].to(dtype).contiguous() for tensor in (self.key, self.value))

        def all_layers() -> None:
            for key, value, cache in zip(keys, values, self.layers.view(dtype), strict=True):
                pair = cache.split(HEAD_SIZE, -1)
                append_paged_kv_cache(key, value, request, positions, pair, pages, indptr, last)

        return all_layers

    def differing(self, call: Call, kept: int) -> int:
        """Bytes of the accepted slots that are not what vLLM's writer makes, after `call` on a pool without them."""
        slots = self.slots[:, :kept].flatten()
        flat = self.layers.flatten(3).flatten(1, 2).view(torch.uint8)
        for layer in flat:
            layer[slots] = 0x55
        call()
        wanted = self.packed.view(torch.uint8).unflatten(1, (-1, QUERY))[:, :, :kept].flatten(1, 2)
        return sum(int((layer[slots] != rows).sum()) for layer, rows in zip(flat, wanted, strict=True))


# -- measuring -----------------------------------------------------------------------------------------------------


def measure(repeats: int = 30, rows: tuple[int, ...] = ROWS, seed: int = 0) -> pd.DataFrame:
    """Time everything. One row a sample: op, kv_heads, cache, rows, kept (of 9), launches, bytes, and the tidy columns.

    `bytes_differing` rows say how many bytes of the accepted slots an op left other than vLLM's writer would.
    """
    ops.load()
    timer, found = Timer(), copy_bandwidth(repeats)
    for kv_heads, cache in SHAPES:
        window = Window(kv_heads, cache, seed)
        for number in rows:
            window.fill(number)
            swept = range(QUERY + 1) if (kv_heads, cache) == (32, "bf16") and number in (min(rows), max(rows)) else KEPT
            for kept in swept:
                calls = window.calls(kept)
                if kept not in KEPT:
                    calls = {op: calls[op] for op in ("commit", "restore", "stream")}
                found += _timed(timer, calls, window.shape, cache, number, kept, repeats)
                if kept:
                    found += _compared(window, calls, cache, number, kept)
            print(f"{kv_heads} KV heads, {cache}, {number} rows", flush=True)
        if (kv_heads, cache) == SHAPES[0]:
            window.fill(min(rows))
            found += _launches(timer, window, repeats)
        del window
        torch.cuda.empty_cache()
    frame = pd.DataFrame(found)
    frame["metric"] = frame.get("metric", pd.Series(dtype=object)).fillna("time")
    frame["unit"] = frame["metric"].map({"time": "us", "bytes_differing": "bytes"})
    for column in ("kv_heads", "rows", "kept", "launches", "bytes"):
        frame[column] = frame[column].fillna(0).astype("int64")
    frame["cache"] = frame["cache"].fillna("")
    return results.tidy(frame, mode="", model="", seed=seed)


def _timed(
    timer: Timer, calls: dict[str, Call], shape: Shape, cache: str, rows: int, kept: int, repeats: int
) -> list[dict[str, Any]]:
    common = {"kv_heads": shape.num_kv_heads, "cache": cache, "rows": rows, "kept": kept}
    launches = {op: LAYERS if op in PEERS else 1 for op in calls}
    moved = {op: 0 if op == "empty" else bytes_moved(op, shape, rows, kept) for op in calls}
    return [
        {**common, "op": op, "repeat": repeat, "value": value, "launches": launches[op], "bytes": moved[op]}
        for op, repeat, value in timer.sample(calls, repeats)
    ]


def _compared(window: Window, calls: dict[str, Call], cache: str, rows: int, kept: int) -> list[dict[str, Any]]:
    common = {"kv_heads": window.heads, "cache": cache, "rows": rows, "kept": kept, "metric": "bytes_differing"}
    return [
        {**common, "op": op, "value": window.differing(call, kept)}
        for op, call in calls.items()
        if op == "commit" or op in PEERS
    ]


def _launches(timer: Timer, window: Window, repeats: int) -> list[dict[str, Any]]:
    """vLLM's writer on the first n layers, for growing n: what one launch more costs."""
    slots = window.slots.flatten()

    calls = {str(n): window.writes(n, slots) for n in (1, 2, 4, 8, 16, 32)}
    rows = slots.numel()
    return [
        {
            "op": "vllm launches", "kv_heads": window.heads, "cache": "bf16", "rows": rows, "kept": QUERY,
            "launches": int(n), "bytes": 2 * int(n) * window.shape.row * rows, "repeat": repeat, "value": value,
        }
        for n, repeat, value in timer.sample(calls, repeats)
    ]  # fmt: skip


# -- hardware counters ---------------------------------------------------------------------------------------------


def counted() -> list[tuple[int, str, int, int, str]]:
    """(kv_heads, cache, rows, kept, op) whose data exceeds any L2 cache: at least 96 MiB read."""
    cases = [
        (kv_heads, cache, rows, kept, op)
        for kv_heads, cache in SHAPES
        for rows in ROWS
        for op in OURS
        for kept in ((9,) if op == "log" else (3, 6) if op == "restore" else (3, 9))
    ]
    return [case for case in cases if bytes_moved(case[4], shape_of(*case[:2]), *case[2:4]) >= 192 << 20]


def run_counted() -> None:
    """Every counted case once, each after a write of 256 MiB, for a profiler to watch."""
    ops.load()
    timer = Timer()
    for (kv_heads, cache), cases in itertools.groupby(counted(), key=lambda case: case[:2]):
        window = Window(kv_heads, cache)
        for _, _, rows, kept, op in cases:
            window.fill(rows)
            call = window.calls(kept)[op]
            timer.flush.zero_()
            call()
            torch.cuda.synchronize()
        del window, call


def count_bytes(ncu: str = "ncu") -> pd.DataFrame:
    """DRAM bytes of each counted case as Nsight Compute reads them. One row a case and metric; `bytes`: the model's.

    Neither clocks nor caches are touched by the profiler: the cache is full of another kernel's bytes before, as when
    timed, so that what is written back of those stands for what this kernel leaves in the cache.

    Raises:
        nsight.Unreadable: counters cannot be read here.
        RuntimeError: the profiler saw other launches than the cases make.
    """
    seen = nsight.read(
        "nwor_lab.microbench.operators", "--counted", metrics=list(METRICS), kernels="move_rows",
        options=("--cache-control", "none"), ncu=ncu,
    )  # fmt: skip
    cases = counted()
    if len(seen) != len(cases):
        raise RuntimeError(f"{ncu} saw {len(seen)} launches, expected {len(cases)}")
    found = []
    for (kv_heads, cache, rows, kept, op), launch in zip(cases, seen, strict=True):
        half = bytes_moved(op, shape_of(kv_heads, cache), rows, kept) // 2
        case = {"op": op, "kv_heads": kv_heads, "cache": cache, "rows": rows, "kept": kept, "bytes": half}
        found += [
            case | {"metric": name, "value": launch[metric][0], "unit": "bytes"} for metric, name in METRICS.items()
        ]
    return results.tidy(found, mode="", model="")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m nwor_lab.microbench.operators", description="Time the all-layer operators."
    )
    parser.add_argument(
        "--out", type=Path, help="folder for kernel_times.parquet, kernel_counters.parquet and what made them"
    )
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--counters", action="store_true", help="read the DRAM counters too (needs ncu)")
    parser.add_argument("--counted", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error("no NVIDIA GPU here; the recorded results are in data/recorded")
    if options.counted:
        run_counted()
        return 0
    if not options.out:
        parser.error("--out says where the results go")
    times = measure(options.repeats)
    results.write_table(options.out / "kernel_times.parquet", compact(times))
    results.write_provenance(options.out / "kernel_times.parquet", vars(options))
    print(json.dumps(summary(times), indent=1))
    if options.counters:
        counters = count_bytes()
        results.write_table(options.out / "kernel_counters.parquet", compact(counters))
        total = counters.groupby(["op", "kv_heads", "cache", "rows", "kept"])[["value", "bytes"]].sum()
        print((total["value"] / total["bytes"]).describe())
    return 0


def compact(frame: pd.DataFrame) -> pd.DataFrame:
    """The same with words as categories and values in single precision."""
    words = [column for column in frame if frame[column].dtype == object]
    return frame.astype(dict.fromkeys(words, "category") | {"value": "float32"})


def summary(times: pd.DataFrame) -> dict[str, float]:
    """A few medians in microseconds, to look at while it runs."""
    some = times[(times["metric"] == "time") & times["rows"].isin([0, 9, 2304]) & times["kept"].isin([0, 3, 9])]
    medians = some.groupby(["op", "kv_heads", "cache", "rows", "kept"])["value"].median().round(2)
    return {" ".join(map(str, key)): float(value) for key, value in medians.items()}


if __name__ == "__main__":
    sys.exit(main())
