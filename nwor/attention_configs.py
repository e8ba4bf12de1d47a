# SPDX-License-Identifier: Apache-2.0
"""How the verify attention is run on a shape: configurations found by a sweep, kept as data (`data/attention`)."""

from __future__ import annotations

import functools
import json
import math
from dataclasses import dataclass, replace
from typing import Any

from nwor import paths

HEAD_SIZES = (64, 96, 128, 256)
LARGEST_TILE = 128  # packed rows of one tile; more make more tiles, each of which reads the pages
LARGEST_APART = 1 << 11  # sums that each warp keeps of its own keys: of more, the registers would spill
COMBINED = 1 << 14  # partial sums that are added at a time: of more, the registers would spill


def next_power_of_2(number: int) -> int:
    return 1 << (number - 1).bit_length()


@dataclass(frozen=True)
class Config:
    """How a shape is run; it changes no result beyond the order of sums.

    tile: positions read at a time. warps, stages: as Triton means them. registers: of a thread at most, 0 for no bound.
    splits: programs of a window, KV head and tile of rows, at most. least: tiles of positions for which one more split
    is worth its sums. apart: each warp attends to keys of its own, for tiles of few rows.
    """

    tile: int = 64
    warps: int = 4
    stages: int = 3
    registers: int = 0
    splits: int = 1
    least: int = 1
    apart: bool = False


def row_tiles(max_query_len: int, group: int) -> tuple[int, int]:
    """How the window's rows for each of the `group` query heads of a KV head are packed: (rows of a tile, tiles)."""
    packed = max_query_len * group
    rows = min(LARGEST_TILE, max(16, next_power_of_2(packed)))
    return rows, -(-packed // rows)


@functools.cache
def tuned() -> list[dict[str, Any]]:
    """The tuned configurations in `data/attention`, each with the shape it was found for; none where none are."""
    folder = paths.DATA / "attention"
    return [entry for path in sorted(folder.glob("*.json")) for entry in json.loads(path.read_text())["configurations"]]


def nearest(
    requests: int, kv_heads: int, group: int, head_size: int, cache_bytes: int, max_query_len: int
) -> dict[str, Any] | None:
    """The entry of the nearest tuned shape, None where nothing is tuned.

    Nearest by factors between shapes: of bytes of an element, rows of a window, query heads of a KV head, head size,
    and programs without splits.
    """
    shape = {
        "cache_bytes": cache_bytes, "query": max_query_len, "group": group, "head_size": head_size,
        "programs": requests * kv_heads,
    }  # fmt: skip
    weights = {"cache_bytes": 8, "query": 4, "group": 4, "head_size": 4, "programs": 1}

    def distance(entry: dict[str, Any]) -> float:
        return sum(weight * abs(math.log2(shape[name] / entry[name])) for name, weight in weights.items())

    return min(tuned(), key=distance, default=None)


@functools.cache
def choose(requests: int, kv_heads: int, group: int, head_size: int, cache_bytes: int, max_query_len: int) -> Config:
    """The configuration of the nearest tuned shape, or one that fills 132 multiprocessors twice."""
    entry = nearest(requests, kv_heads, group, head_size, cache_bytes, max_query_len)
    if entry is None:
        config = Config(splits=max(1, min(64, 264 // (requests * kv_heads))), least=2)
    else:
        config = Config(**{name: entry[name] for name in Config.__dataclass_fields__})
        # The number of programs is what a number of splits is good for.
        splits = max(1, round(config.splits * entry["programs"] / (requests * kv_heads)))
        config = replace(config, splits=splits)
    rows, _ = row_tiles(max_query_len, group)
    return _fitting(config, rows, next_power_of_2(head_size), cache_bytes)


def slower_batches(
    max_requests: int, max_context: int, kv_heads: int, group: int, head_size: int, cache_bytes: int, max_query_len: int
) -> dict[int, int]:
    """Batches, in requests, with which little or nothing is to be won at a context they may reach,
    by the nearest tuned shape beside vLLM's write and attention.

    Returns:
        For each the context from which on that is so: half of the least one swept at which it was, since the one swept
        before is a fourth of that.
    """
    found = {}
    for requests in range(1, max_requests + 1):
        entry = nearest(requests, kv_heads, group, head_size, cache_bytes, max_query_len)
        since = entry["slower_from"] // 2 if entry else 0
        if 0 < since <= max_context:
            found[requests] = since
    return found


def _fitting(config: Config, rows: int, width: int, cache_bytes: int, limit: int = 200 << 10) -> Config:
    """`config`, or the like of it whose tiles fit into shared memory, and whose sums into registers."""
    tile, stages = max(config.tile, 32), config.stages
    warps = 8 if rows * width > 8192 else config.warps
    registers = config.registers if width <= 128 else 0
    while stages * tile * 2 * width * cache_bytes + rows * width * 2 > limit and (stages > 2 or tile > 32):
        stages, tile = (stages - 1, tile) if stages > 2 else (stages, tile // 2)
    apart = config.apart and rows * width <= LARGEST_APART and tile >= 16 * warps
    return replace(config, tile=tile, stages=stages, warps=warps, registers=registers, apart=apart)


def division(splits: int, windows: int, rows: int, head_size: int, processors: int) -> tuple[int, bool, int, int]:
    """How splits are combined: (splits, whether all meet, bound of splits compiled for, rows combined at a time).

    They meet, that is wait for each other and share the work, where there is a multiprocessor for each program; a
    cooperative launch then promises that all run at once.
    """
    splits = min(splits, 64)
    meet = 1 < splits <= processors // windows
    most = next_power_of_2(splits)
    # A row for each of four warps at least; of more than eight, a window's few rows would be left to few splits.
    chunk = 8 if rows > 4 * most else 4
    return splits, meet, most, min(chunk, COMBINED // (most * next_power_of_2(head_size)))
