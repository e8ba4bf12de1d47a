# SPDX-License-Identifier: Apache-2.0
"""How far rounding moves mode `stage`'s log-probabilities from vanilla's, and how far three injected faults do.

    python -m nwor_lab.bench.parity_margin --out DIR

On a GPU at shapes that are timed, Llama-2-7B's with random weights, k=8, prompts of 512, batch 1 and 16, with a bf16
and an fp8 cache, about 2 minutes; on a CPU with the shipped pair and a small shape. One engine is its own vanilla, its
mode paused. What DIR's `parity_margin.parquet` has of other configurations stays. Tolerances are in
`nwor_lab.bench.parity`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from nwor.settings import Settings
from nwor_lab import command_line, faults, machine, pair, paths
from nwor_lab.bench import options
from nwor_lab.bench.parity import Parity, compare
from nwor_lab.bench.plan import Plan
from nwor_lab.engines import pause, shapes
from nwor_lab.engines.engine import Engine, EngineError, EngineSpec, Generation
from nwor_lab.engines.random_weights import FORMAT
from nwor_lab.run import results

NAME = "parity_margin"
NOISE = "none"
"""What `fault` says of rounding alone."""
GROUP = 8
"""Requests of each row at least: as many as a bench compares of each load."""
PROMPTS = 4 * GROUP
TOKENS = 32
WHERE = ["device", "weights", "dtype", "kv_cache_dtype"]
"""Columns that identify a configuration."""


def measure(spec: EngineSpec, prompts: Sequence[list[int]], batches: Sequence[int]) -> pd.DataFrame:
    """Rows `shift` and `largest_shift` in nats, of `places`, by `fault`, `batch` and `repeat` (a group of prompts)."""
    rows: list[dict[str, Any]] = []
    with Engine(spec, Settings(mode="stage", eagle_bias=True)) as engine:

        def generate(batch: int) -> list[Generation]:
            parts = [prompts[first : first + batch] for first in range(0, len(prompts), batch)]
            return [engine.generate(part, TOKENS, logprobs=20) for part in parts]

        engine.on_every_rank(pause.pause)
        vanilla = {batch: generate(batch) for batch in batches}
        engine.on_every_rank(pause.resume)
        for fault in (NOISE, *faults.MARGIN):
            engine.on_every_rank(faults.end if fault == NOISE else partial(faults.start, name=fault))
            engine.on_every_rank(pause.recapture_graphs)
            for batch in batches:
                alike = partial(compare, drafted=spec.acceptance_length > 0)
                compared, together = list(map(alike, vanilla[batch], generate(batch))), max(1, GROUP // batch)
                for first in range(0, len(compared), together):
                    found = sum(compared[first : first + together], Parity())
                    row = {"fault": fault, "batch": batch, "repeat": first // together, "places": found.places}
                    values = {"shift": found.shift, "largest_shift": found.largest_shift}
                    rows += [{**row, "metric": name, "value": value} for name, value in values.items()]
                    print(f"{fault}, batch {batch}: {found.shift:.4g} nats", flush=True)
    return results.tidy(
        rows,
        mode="stage",
        unit="nats",
        device="CPU" if machine.on_cpu() else torch.cuda.get_device_name(),
        weights="random weights" if spec.load_format == FORMAT else "shipped pair",
        model=Path(spec.model).parent.name,
        dtype=spec.dtype,
        kv_cache_dtype=spec.kv_cache_dtype,
        k=spec.k,
        prompt=max(map(len, prompts)),
    )


def of_shape(shape: str, prompt: int, cache: str, **more: Any) -> tuple[EngineSpec, list[list[int]]]:
    """Random weights of a shape and prompts of that length."""
    target, head = shapes.write_shape(shape, paths.RESULTS / "shapes", 1024)
    fields = {"draft": str(head), "k": 8, "max_model_len": 1024, "load_format": FORMAT, **more}
    spec = EngineSpec(str(target), kv_cache_dtype=cache, **fields)
    return spec, options.random_prompts(Plan(num_prompts=PROMPTS, random_prompts=(prompt,)))


def on_gpu(cache: str) -> tuple[EngineSpec, list[list[int]]]:
    """A timed configuration."""
    return of_shape(
        "llama-2-7b", 512, cache, acceptance_length=3.0, batch=16, max_num_batched_tokens=8192, kv_cache_memory=12000,
        enforce_eager=False, cudagraph_capture_sizes=(1, 9, 16, 144),
    )  # fmt: skip


def of_pair(dtype: str, cache: str) -> tuple[EngineSpec, list[list[int]]]:
    """The shipped pair and its prompts, on a CPU."""
    spec = EngineSpec(
        str(paths.PAIR_TARGET), str(paths.PAIR_EAGLE), dtype=dtype, kv_cache_dtype=cache, block_size=32,
        max_num_batched_tokens=512,
    )  # fmt: skip
    return spec, options.tokenized(spec, Plan(), pair.load_prompts(count=PROMPTS))


def small(cache: str) -> tuple[EngineSpec, list[list[int]]]:
    """A small shape on a CPU, where acceptance cannot be synthetic: the drafter is the target itself."""
    target, _ = shapes.write_shape("small", paths.RESULTS / "shapes", 1024)
    return of_shape("small", 256, cache, draft=str(target), method="draft_model", block_size=32, batch=GROUP)


def configurations() -> Iterator[tuple[EngineSpec, list[list[int]], tuple[int, ...]]]:
    """What is measured on this machine: spec, prompts, and requests at once."""
    caches = [cache for cache in ("auto", "fp8") if not machine.refuse_cache(cache)]
    if not machine.on_cpu():
        yield from ((*on_gpu(cache), (1, 2 * GROUP)) for cache in caches)
        return
    yield *of_pair("float32", "auto"), (1, GROUP)
    for make in (partial(of_pair, "bfloat16"), small):
        yield from ((*make(cache), (1, GROUP)) for cache in caches)


@dataclass(frozen=True)
class Margin:
    out: Path
    """folder of the table"""


def main(argv: list[str] | None = None) -> int:
    try:
        path = results.check_folder(command_line.parse(Margin, argv, NAME, __doc__ or "").out) / f"{NAME}.parquet"
        for configuration in configurations():
            table = measure(*configuration)
            write(path, table)
            shifts = table[table["metric"] == "shift"].groupby("fault")["value"].agg(["min", "max"])
            print(", ".join(map(str, table[WHERE].iloc[0])), shifts.to_string(), sep="\n", flush=True)
    except (ValueError, OSError, EngineError) as error:
        return command_line.fail(NAME, error, 1 if isinstance(error, EngineError) else 2)
    print(f"written: {path}")
    return 0


def write(path: Path, table: pd.DataFrame) -> None:
    """Put the rows of one configuration into the table at `path`, in place of those that it has of the same one."""
    if path.exists():
        before = pd.read_parquet(path)
        same = (before[WHERE] == table[WHERE].iloc[0]).all(axis=1)
        table = pd.concat([before[~same], table], ignore_index=True)
    if "build" in table:  # rows made on a CPU are of none
        table["build"] = table["build"].fillna("")
    results.write_table(path, table)


if __name__ == "__main__":
    sys.exit(main())
