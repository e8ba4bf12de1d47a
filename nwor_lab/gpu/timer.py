# SPDX-License-Identifier: Apache-2.0
"""The one timer: replays of CUDA graphs with a cold L2 cache, everything that is compared interleaved.

`triton.testing.do_bench_cudagraph` times one call after another, so that a clock that moves meanwhile moves their
ratio. Here each repeat samples every call once, and the ratios are of neighbours. Every sample is kept.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from nwor_lab.run import results

Call = Callable[[], object]


def empty() -> None:
    """A kernel of one thread that does nothing."""
    torch.cuda._sleep(0)


def capture(call: Call) -> torch.cuda.CUDAGraph:
    """`call` as a graph; it runs twice before, so that nothing is compiled or loaded in the capture."""
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call(), call()
        graph.capture_begin()
        call()
        graph.capture_end()
    torch.cuda.current_stream().wait_stream(stream)
    return graph


def interleaved(calls: dict[str, Call], repeats: int, clean: bool = False) -> Iterator[tuple[str, int, float]]:
    """Yield (name, repeat, microseconds): two repeats of warm-up, then in each of `repeats` every call once.

    Args:
        clean: before each sample the L2 cache is filled by reading 256 MiB, so that none of its lines is written back
            in a sample's time; else by writing them.
    """
    flush = torch.zeros(64 << 20, dtype=torch.float32, device="cuda")
    graphs = {name: capture(call) for name, call in calls.items()}
    for repeat in range(-2, repeats):
        events = {name: [torch.cuda.Event(enable_timing=True) for _ in range(2)] for name in graphs}
        torch.cuda._sleep(2_000_000)  # a millisecond in which the repeat is queued: no sample waits for the host
        for name, (begin, end) in events.items():
            flush.sum() if clean else flush.zero_()
            begin.record()
            graphs[name].replay()
            end.record()
        torch.cuda.synchronize()
        if repeat >= 0:
            yield from ((name, repeat, 1e3 * begin.elapsed_time(end)) for name, (begin, end) in events.items())


def numbers(text: str) -> list[int]:
    """Numbers that commas divide."""
    return [_at_least_one(number) for number in text.split(",")]


def caches(text: str) -> list[str]:
    """Of bf16 and fp8, those that are wanted."""
    found = text.split(",")
    if unknown := set(found) - {"bf16", "fp8"}:
        raise argparse.ArgumentTypeError(f"{', '.join(sorted(unknown))} is not of bf16 and fp8")
    return found


def pairs(text: str) -> list[tuple[int, int]]:
    """Query heads and KV heads: 32x8,16x4."""
    both = (pair.split("x") for pair in text.split(","))
    return [(_at_least_one(heads), _at_least_one(kv_heads)) for heads, kv_heads in both]


def _at_least_one(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"each number is at least 1, got {text}")
    return int(text)


def options(
    module: str, doc: str, argv: list[str] | None, values: Mapping[str, Callable[[str], Any]] | None = None,
    **switches: str,
) -> argparse.Namespace:  # fmt: skip
    """Read the command line of `python -m nwor_lab.gpu.<module>`: `out`, `repeats`, `values` by what reads them,
    None where they are not given, and `switches` with their help. It ends here with status 2 and a line where there is
    no GPU."""
    parser = argparse.ArgumentParser(prog=f"python -m nwor_lab.gpu.{module}", description=doc.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for the table and what made it")
    parser.add_argument("--repeats", type=int, default=30, help="samples of each call that is timed (default: 30)")
    for name, read in (values or {}).items():
        parser.add_argument(f"--{name}", type=read, help=(read.__doc__ or "").strip(".") if read is not str else None)
    for name, said in switches.items():
        parser.add_argument(f"--{name}", action="store_true", help=said)
    found = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error("no NVIDIA GPU here; the recorded results are in data/recorded")
    return found


def write(found: argparse.Namespace, name: str, frame: pd.DataFrame) -> None:
    """Write table `name` and what made it to the folder asked for: words as categories, values in single precision."""
    texts = [column for column in frame if frame[column].dtype == object]
    path = found.out / f"{name}.parquet"
    results.write_table(path, frame.astype(dict.fromkeys(texts, "category") | {"value": "float32"}))
    results.write_provenance(path, vars(found))
