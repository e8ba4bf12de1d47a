# SPDX-License-Identifier: Apache-2.0
"""`nwor tune`: find the fastest configurations of `stage`'s attention on this GPU, in a file that vLLM takes.

    nwor tune --model meta-llama/Llama-3.1-8B-Instruct --tp 1,2 --out tuning
    VLLM_NWOR_TUNING=$PWD/tuning VLLM_NWOR_MODE=stage vllm serve ...

The file is named after the GPU, and holds what was known of it before as well. Each k, cache and number of ranks takes
about half a minute. Nothing else should run on the GPU meanwhile. vLLM must be installed: its own attention is timed in
the same turns, and batches with which it is as fast as ours are left to it.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from nwor.attention.configs import HEAD_SIZES, Device, file_name, read, tuned
from nwor.settings import PREFIX, Settings
from nwor_lab import results
from nwor_lab.engines.shapes import SHAPES
from nwor_lab.microbench import attention
from nwor_lab.microbench.attention_inputs import BATCHES, HEAD_SIZE

SHAPE_OF_ENTRY = ("cache_bytes", "query", "group", "head_size", "programs")


def heads_of(model: str) -> tuple[int, int, int]:
    """Query heads, KV heads and head size of a model, by a key of `SHAPES`, its folder or its name on the Hub.

    Raises:
        OSError: no such model.
    """
    if model in SHAPES:
        shape = SHAPES[model]
        return shape["num_attention_heads"], shape["num_key_value_heads"], shape["head_dim"]
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model).get_text_config()
    heads = config.num_attention_heads
    head_size = getattr(config, "head_dim", None) or config.hidden_size // heads
    return heads, getattr(config, "num_key_value_heads", None) or heads, head_size


def of_rank(heads: int, kv_heads: int, tp: int) -> tuple[int, int]:
    """Query and KV heads of one of `tp` ranks; KV heads fewer than ranks are repeated, as vLLM does.

    Raises:
        ValueError: the heads do not divide among the ranks.
    """
    if heads % tp or (kv_heads % tp and tp % kv_heads):
        raise ValueError(f"{heads} query heads and {kv_heads} KV heads do not divide among {tp} ranks")
    return heads // tp, max(1, kv_heads // tp)


def merge(known: Iterable[dict[str, Any]], found: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """What was found, and of what was known the shapes that were not swept again."""
    return list({tuple(entry[name] for name in SHAPE_OF_ENTRY): entry for entry in [*known, *found]}.values())


def write(folder: Path, gpu: str, known: Iterable[dict[str, Any]], found: Iterable[dict[str, Any]]) -> Path:
    """Write the table of the device named `gpu`, whole or not at all; one that lies there is added to, not lost."""
    path = folder / file_name(gpu)
    known = read(path) if path.exists() else known
    return results.write_json(path, {"gpu": gpu, "configurations": merge(known, found)})


def numbers(text: str) -> list[int]:
    """Numbers that commas divide."""
    return [int(number) for number in text.split(",")]


def pair(text: str) -> tuple[int, int]:
    """Query heads and KV heads: 32x8."""
    heads, kv_heads = text.split("x")
    return int(heads), int(kv_heads)


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="nwor tune", description=__doc__.split("\n")[0].split(": ")[1])
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--model", help="a folder or a name on the Hub, of which the config alone is read")
    which.add_argument("--shape", choices=SHAPES, help="the shape of a model")
    which.add_argument("--heads", help="query heads x KV heads of a rank, as many as you like: 32x8,16x4")
    parser.add_argument("--head-size", type=int, choices=HEAD_SIZES, default=HEAD_SIZE, help="with --heads")
    parser.add_argument("--tp", type=numbers, default=[1], help="ranks that share the heads: 1,2 (default: 1)")
    parser.add_argument("--ks", type=numbers, default=[8], help="drafts of a window: 1,3,8 (default: 8)")
    parser.add_argument("--caches", default="bf16,fp8", help="of bf16 and fp8, those to tune for (default: both)")
    parser.add_argument("--batches", type=numbers, default=list(BATCHES), help="requests (default: 1,4,16,64)")
    parser.add_argument("--repeats", type=int, default=5, help="samples of each candidate (default: 5)")
    parser.add_argument("--steps", type=Path, help="CSV of whole steps (`attention_bench.best`) that have a say too")
    parser.add_argument(
        "--out", type=Path, default=Settings.from_env().tuning or "tuning",
        help=f"folder of the file; default ${PREFIX}TUNING, or tuning/",
    )  # fmt: skip
    return parser


def main(argv: list[str] | None = None) -> int:
    options = parser().parse_args(argv)
    if not torch.cuda.is_available():
        print("nwor tune: no NVIDIA GPU here, and a table is of the GPU it was found on", file=sys.stderr)
        return 2
    if options.heads:
        heads, head_size = [pair(text) for text in options.heads.split(",")], options.head_size
    else:
        *whole, head_size = heads_of(options.model or options.shape)
        heads = [(whole[0], whole[1])]
    ranks = list(dict.fromkeys(of_rank(*one, tp) for one in heads for tp in options.tp))
    if head_size not in HEAD_SIZES:
        print(f"nwor tune: stage serves no heads of size {head_size}", file=sys.stderr)
        return 2
    caches = options.caches.split(",")
    if "fp8" in caches and torch.cuda.get_device_capability() < (8, 9):
        print("nwor tune: this GPU has no fp8: bf16 alone")
        caches.remove("fp8")
    device = Device.of("cuda")
    chosen = attention.shapes(ranks, options.batches, attention.SWEPT, caches, options.ks, head_size=head_size)
    known = tuned(device)
    swept = attention.sweep(chosen, options.repeats, workers=min(14, os.cpu_count() or 1))
    steps = pd.read_csv(options.steps) if options.steps else None
    path = write(options.out, device.name, known, attention.best(swept, steps, head_size))
    results.write_table(path.with_name(f"{path.stem}_sweep.parquet"), swept)
    print(f"{path}: taken where {PREFIX}TUNING={path.parent.resolve()} is set")
    return 0
