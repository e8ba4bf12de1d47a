# SPDX-License-Identifier: Apache-2.0
"""How far rounding moves mode `stage`'s log-probabilities from vanilla's, and how far three injected faults do.

    python -m nwor_lab.bench.parity_margin --out DIR

On a GPU at Llama-2-7B's shape with random weights, k=8, prompts of 512, batch 1 and 16, with a bf16 and an fp8 cache;
on a CPU with the shipped pair and a small shape. Vanilla and `stage` are up side by side, without CUDA graphs, which
would hold what was captured before a fault. What DIR's `parity_margin.parquet` has of other configurations stays.
Tolerances are in `nwor_lab.bench.parity`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from nwor_lab import command_line, faults, machine, pair, paths
from nwor_lab.bench import options
from nwor_lab.bench.bench import started
from nwor_lab.bench.parity import Parity, compare
from nwor_lab.bench.plan import Plan, settings_of
from nwor_lab.engines import shapes
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
Configuration = tuple[EngineSpec, list[list[int]], tuple[int, ...]]
"""A spec, prompts, and numbers of requests at once."""


def measure(spec: EngineSpec, prompts: Sequence[list[int]], batches: Sequence[int]) -> pd.DataFrame:
    """Rows `shift` and `largest_shift` in nats, of `places`, by `fault`, `batch` and `repeat` (a group of prompts)."""

    def generate(engine: Engine, batch: int) -> list[Generation]:
        parts = [prompts[first : first + batch] for first in range(0, len(prompts), batch)]
        return [engine.generate(part, TOKENS, logprobs=20) for part in parts]

    alike = partial(compare, drafted=spec.acceptance_length > 0)
    # The scheduler's check would end the run at a fault, before parity is compared.
    settings = {mode: replace(settings_of(mode, audit=False), debug_sync=False) for mode in ("off", "stage")}
    rows: list[dict[str, Any]] = []
    with started({mode: (spec, one, 0) for mode, one in settings.items()}, "") as engines:
        vanilla = {batch: generate(engines["off"], batch) for batch in batches}
        for fault in (NOISE, *faults.MARGIN):
            engines["stage"].on_every_rank(faults.end if fault == NOISE else partial(faults.start, name=fault))
            for batch in batches:
                every = list(map(alike, vanilla[batch], generate(engines["stage"], batch)))
                together = max(1, GROUP // batch)
                for first in range(0, len(every), together):
                    found = sum(every[first : first + together], Parity())
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


def of_pair(dtype: str, cache: str) -> Configuration:
    """The shipped pair and its prompts, on a CPU."""
    spec = EngineSpec(
        str(paths.PAIR_TARGET), str(paths.PAIR_EAGLE), dtype=dtype, kv_cache_dtype=cache, block_size=32,
        max_num_batched_tokens=512,
    )  # fmt: skip
    return spec, list(map(options.load_tokenizer(spec.model).encode, pair.load_prompts(count=PROMPTS))), (1, GROUP)


def of_shape(cache: str) -> Configuration:
    """Random weights of a shape; on a CPU, where acceptance cannot be synthetic, the drafter is the target itself."""
    on_cpu = machine.on_cpu()
    target, head = shapes.write_shape("small" if on_cpu else "llama-2-7b", paths.RESULTS / "shapes", 1024)
    if on_cpu:
        more: dict[str, Any] = {"draft": str(target), "method": "draft_model", "block_size": 32, "batch": GROUP}
    else:
        more = {"draft": str(head), "acceptance_length": 3.0, "batch": 2 * GROUP, "max_num_batched_tokens": 8192}
        more["kv_cache_memory"] = 12000
    spec = EngineSpec(str(target), k=8, kv_cache_dtype=cache, max_model_len=1024, load_format=FORMAT, **more)
    prompts = options.random_prompts(Plan(num_prompts=PROMPTS, random_prompts=(256 if on_cpu else 512,)))
    return spec, prompts, (1, spec.batch)


def configurations() -> Iterator[Configuration]:
    """What is measured on this machine."""
    caches = [cache for cache in ("auto", "fp8") if not machine.refuse_cache(cache)]
    if machine.on_cpu():
        yield of_pair("float32", "auto")
        yield from (of_pair("bfloat16", cache) for cache in caches)
    yield from map(of_shape, caches)


def write(path: Path, table: pd.DataFrame) -> None:
    """Put the rows of one configuration into the table at `path`, in place of those that it has of the same one."""
    if path.exists():
        before = pd.read_parquet(path)
        same = (before[WHERE] == table[WHERE].iloc[0]).all(axis=1)
        table = pd.concat([before[~same], table], ignore_index=True)
    results.write_table(path, table)


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


if __name__ == "__main__":
    sys.exit(main())
