# SPDX-License-Identifier: Apache-2.0
"""How far rounding moves mode `stage`'s log-probabilities from vanilla's, and how far injected faults do.

    python -m nwor_lab.experiments.parity_margin --out DIR

On a GPU at shapes that are timed, Llama-2-7B's with random weights, k=8, prompts of 512, batch 1 and 16, with a bf16
and an fp8 cache, about 4 minutes; on a CPU with the shipped pair and a small shape. One engine is its own vanilla, its
mode paused. What DIR's `parity_margin.parquet` has of other configurations stays, of other devices say. Tolerances are
in `experiments.parity`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from nwor.settings import Settings
from nwor_lab import machine, pair, paths, results
from nwor_lab.engines import shapes
from nwor_lab.engines.engine import Engine, EngineError, EngineSpec, Generation
from nwor_lab.engines.random_weights import FORMAT
from nwor_lab.experiments import options, parity_faults
from nwor_lab.experiments.parity import Parity, compare
from nwor_lab.experiments.plan import Plan

NAME = "parity_margin"
NOISE = "none"
"""What `fault` says of rounding alone."""
GROUP = 8
"""Requests of each row at least: as many as a bench compares of each load."""
PROMPTS = 4 * GROUP
WHERE = ["device", "weights", "dtype", "kv_cache_dtype"]
"""Columns that identify a configuration."""


def measure(
    spec: EngineSpec, prompts: Sequence[list[int]], max_tokens: int, batches: Sequence[int], at: Sequence[int]
) -> list[dict[str, Any]]:
    """Rows `shift` and `largest_shift` by `fault`, `batch` and `repeat` (a group of prompts), in nats, of `places`.

    Rows `self_check` of each fault say whether the check at start-up fails by it.

    batches: requests at once, without a fault; `at`, with one.
    """
    rows: list[dict[str, Any]] = []
    faults = [name for name in parity_faults.FAULTS if spec.kv_cache_dtype == "fp8" or name != "key_scale_ignored"]
    with Engine(spec, Settings(mode="stage", eagle_bias=True)) as engine:

        def generate(batch: int) -> list[Generation]:
            parts = [prompts[first : first + batch] for first in range(0, len(prompts), batch)]
            return [engine.generate(part, max_tokens, logprobs=20) for part in parts]

        engine.pause()
        vanilla = {batch: generate(batch) for batch in batches}
        engine.resume()
        for fault in (NOISE, *faults):
            engine.on_every_rank(partial(parity_faults.inject, name=fault if fault != NOISE else ""))
            failed = any(engine.on_every_rank(parity_faults.check))
            about = {"mode": "stage", "fault": fault}
            rows.append({**about, "metric": "self_check", "value": failed, "unit": "failures"})
            engine.capture_anew()
            for batch in batches if fault == NOISE else at:
                alike = partial(compare, drafted=spec.acceptance_length > 0)
                compared, together = list(map(alike, vanilla[batch], generate(batch))), max(1, GROUP // batch)
                for first in range(0, len(compared), together):
                    found = sum(compared[first : first + together], Parity())
                    row = {**about, "batch": batch, "repeat": first // together, "unit": "nats", "places": found.places}
                    values = {"shift": found.shift, "largest_shift": found.largest_shift}
                    rows += [{**row, "metric": name, "value": value} for name, value in values.items()]
                    print(f"{fault}, batch {batch}: {found.shift:.4g} nats, check fails: {failed}", flush=True)
    return rows


def of_shape(shape: str, prompt: int, cache: str, **more: Any) -> tuple[EngineSpec, list[list[int]]]:
    """Random weights of a shape and prompts of that length."""
    target, head = shapes.write_shape(shape, paths.RESULTS / "shapes", 1024)
    fields = {"draft": str(head), "k": 8, "max_model_len": 1024, "load_format": FORMAT, **more}
    spec = EngineSpec(str(target), kv_cache_dtype=cache, **fields)
    return spec, options.random_prompts(Plan(num_prompts=PROMPTS, random_prompts=(prompt,)))


def on_gpu(cache: str) -> tuple[EngineSpec, list[list[int]]]:
    """A timed configuration."""
    sizes = tuple(sorted({rows * batch for rows in (1, 9) for batch in (1, 2 * GROUP)}))
    return of_shape(
        "llama-2-7b", 512, cache, acceptance_length=3.0, batch=16, max_num_batched_tokens=8192, kv_cache_memory=12000,
        enforce_eager=False, cudagraph_capture_sizes=sizes,
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


def main(argv: list[str] | None = None) -> int:
    described = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog=NAME, description=__doc__, formatter_class=described)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder of the table")
    try:
        folder = results.check_folder(parser.parse_args(argv).out)
    except OSError as error:
        print(f"{NAME}: {error}", file=sys.stderr)
        return 2
    path, on_cpu = folder / f"{NAME}.parquet", machine.on_cpu()
    caches = [cache for cache in ("auto", "fp8") if not machine.refuse_cache(cache)]
    kinds = [partial(on_gpu, cache) for cache in caches]
    if on_cpu:
        kinds = [partial(of_pair, "float32", "auto"), *(partial(of_pair, "bfloat16", cache) for cache in caches)]
        kinds += [partial(small, cache) for cache in caches]

    def measured(make: Callable[[], tuple[EngineSpec, list[list[int]]]]) -> pd.DataFrame:
        spec, prompts = make()
        batches = (1, GROUP) if on_cpu else (1, 2 * GROUP)
        return results.tidy(
            measure(spec, prompts, 32, batches, batches[1:] if on_cpu else batches),
            device="CPU" if on_cpu else torch.cuda.get_device_name(),
            weights="random weights" if spec.load_format == FORMAT else "shipped pair",
            model=Path(spec.model).parent.name,
            dtype=spec.dtype,
            kv_cache_dtype=spec.kv_cache_dtype,
            k=spec.k,
            prompt=max(map(len, prompts)),
        )

    try:
        with ThreadPoolExecutor(1 if on_cpu else len(kinds)) as pool:
            for table in pool.map(measured, kinds):
                write(path, table)
    except EngineError as error:
        print(f"{NAME}: {error}", file=sys.stderr)
        return 1
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
