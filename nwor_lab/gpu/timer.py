# SPDX-License-Identifier: Apache-2.0
"""The one timer: replays of CUDA graphs with a cold L2 cache, everything that is compared interleaved.

`triton.testing.do_bench_cudagraph` times one call after another, so that a clock that moves meanwhile moves their
ratio. Here each repeat samples every call once, and the ratios are of neighbours. Every sample is kept.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import pandas as pd
import torch
from tyro.conf import arg

from nwor_lab import command_line
from nwor_lab.run import results

Call = Callable[[], object]
T = TypeVar("T", bound="Command")


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


@dataclass(frozen=True, kw_only=True)
class Command:
    """What every `python -m nwor_lab.gpu.<module>` is asked."""

    out: Path
    """folder for the table and what made it"""
    repeats: int = 30
    """samples of each call that is timed"""


@dataclass(frozen=True, kw_only=True)
class Axes:
    """Shapes of an attention: all combinations of these."""

    heads: tuple[str, ...] = ()
    """query heads x KV heads, such as 32x8,16x4"""
    ks: Annotated[tuple[int, ...], arg(name="k", aliases=("--ks",))] = ()
    """drafts of a window"""
    batches: tuple[int, ...] = ()
    """requests"""
    contexts: tuple[int, ...] = ()
    """positions before the window"""
    caches: tuple[Literal["bf16", "fp8"], ...] = ()
    """dtypes of the cache"""

    def __post_init__(self) -> None:
        if min([*itertools.chain(*self.pairs), *self.ks, *self.batches, *self.contexts], default=1) < 1:
            raise ValueError("each number of heads, drafts, requests and positions is at least 1")

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """Query heads and KV heads."""
        try:
            return [(int(heads), int(kv_heads)) for heads, kv_heads in (pair.split("x") for pair in self.heads)]
        except ValueError:
            raise ValueError(f"--heads are written 32x8,16x4, got {','.join(self.heads)}") from None


def options(kind: type[T], module: str, doc: str, argv: list[str] | None) -> T:
    """Read the command line of `python -m nwor_lab.gpu.<module>`. It ends here with status 2 and a line where that
    cannot be, there is no GPU, or results cannot be written."""
    command = f"python -m nwor_lab.gpu.{module}"
    try:
        asked = command_line.parse(kind, argv, command, doc)
        if not torch.cuda.is_available():
            raise ValueError("no NVIDIA GPU here; the recorded results are in data/recorded")
        results.check_folder(asked.out)
    except (ValueError, OSError) as error:
        raise SystemExit(command_line.fail(command, error)) from None
    return asked


def write(asked: Command, name: str, frame: pd.DataFrame) -> None:
    """Write table `name` and what made it to the folder asked for: words as categories, values in single precision."""
    texts = [column for column in frame if frame[column].dtype == object]
    path = asked.out / f"{name}.parquet"
    results.write_table(path, frame.astype(dict.fromkeys(texts, "category") | {"value": "float32"}))
    results.write_provenance(path, asdict(asked))
