# SPDX-License-Identifier: Apache-2.0
"""How the verify attention is run on a shape: by a table found by a sweep on that very device, or by its limits.

There is one table a device, named after it: `configs/NVIDIA_H200.json` is that of ``NVIDIA H200``. A table in the
folder that ``VLLM_NWOR_TUNING`` names is used instead of the one shipped here. What a table lacks comes from those
shipped for devices with the same limits, as an H100 has an H200's; no table is used on any other device.
"""

from __future__ import annotations

import functools
import json
import logging
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nwor.settings import Settings

SHIPPED = Path(__file__).parent / "configs"

HEAD_SIZES = (64, 96, 128, 256)
LARGEST_TILE = 128  # packed rows of one tile; more make more tiles, each of which reads the pages
MAX_SUMS_PER_WARP = 1 << 11  # sums that each warp keeps of its own keys: of more, the registers would spill
MAX_SUMS_OF_FOUR_WARPS = 1 << 13  # of a tile; more are those of eight
WARPGROUP_ROWS = 64  # of a tile, from which four warps multiply together, with keys from where they were copied to
MAX_SPLITS = 64  # of a window, KV head and tile of rows
MAX_COMBINED_SUMS = 1 << 14  # partial sums that are added at a time: of more, the registers would spill


def next_power_of_2(number: int) -> int:
    return 1 << (number - 1).bit_length()


@dataclass(frozen=True)
class Device:
    """What a configuration depends on.

    name: as `torch.cuda.get_device_name` has it. multiprocessors: their number; 0 is no GPU (Triton's interpreter).
    shared_memory: bytes that one block can have at most (opt-in). warpgroups: whether four warps multiply a tile of
    `WARPGROUP_ROWS` together, as on a Hopper (wgmma) and a B200 (tcgen05).
    """

    name: str
    multiprocessors: int
    shared_memory: int
    warpgroups: bool = False

    @property
    def usable(self) -> int:
        """Bytes of shared memory that tiles may take: the compiler takes some for sums that change hands."""
        return self.shared_memory * 200 // 227

    def largest_tile(self, head_size: int) -> int:
        """Packed rows of a tile at most: their sums, of 4 bytes, pass through shared memory in padded rows."""
        rows = LARGEST_TILE
        while rows > 16 and rows * (next_power_of_2(head_size) + 16) * 4 > self.usable:
            rows //= 2
        return rows

    def row_tiles(self, max_query_len: int, group: int, head_size: int, query_fp8: bool) -> tuple[int, int]:
        """As `row_tiles` has them, with the tiles that suit this device."""
        return row_tiles(max_query_len, group, self.largest_tile(head_size), self.warpgroups or query_fp8)

    @classmethod
    def of(cls, device: Any) -> Device:
        """The limits of a torch device; those of a GPU are asked of CUDA."""
        import torch

        if torch.device(device).type != "cuda":
            return cls("", 0, H200.shared_memory, H200.warpgroups)
        found = torch.cuda.get_device_properties(device)
        return cls(found.name, found.multi_processor_count, found.shared_memory_per_block_optin, found.major in (9, 10))


H200 = Device("NVIDIA H200", multiprocessors=132, shared_memory=227 << 10, warpgroups=True)


@dataclass(frozen=True)
class Config:
    """How a shape is run; it changes no result beyond the order of sums.

    tile: positions read at a time. warps, stages: as Triton means them. registers: of a thread at most, 0 for no bound.
    splits: programs of a window, KV head and tile of rows, at most. min_tiles_per_split: tiles of positions for which
    one more split is worth its sums. keys_per_warp: each warp attends to keys of its own, for tiles of few rows.
    side_by_side: programs that share a multiprocessor where all splits are to run at once: one computes while another
    waits for memory.
    """

    tile: int = 64
    warps: int = 4
    stages: int = 3
    registers: int = 0
    splits: int = 1
    min_tiles_per_split: int = 1
    keys_per_warp: bool = False
    side_by_side: int = 1


# Of an entry's shape, what a factor between two shapes counts; most of all that of the rows of a tile.
_WEIGHTS = {"cache_bytes": 8, "query": 4, "group": 4, "head_size": 4, "programs": 1}
_ROWS_WEIGHT = 8


def of_entry(entry: Mapping[str, Any]) -> Config:
    """The configuration of a table's entry; a field that the entry lacks has its default."""
    return Config(**{name: entry[name] for name in Config.__dataclass_fields__ if name in entry})


def row_tiles(max_query_len: int, group: int, largest: int = LARGEST_TILE, wide: bool = False) -> tuple[int, int]:
    """How the window's rows for each of the `group` query heads of a KV head are packed: (rows of a tile, tiles).

    wide: whether more than 16 rows fill `WARPGROUP_ROWS` at least. That is worth rows that are empty where a device has
    warpgroups, and for a query in fp8, whose keys then need no conversion. Up to 16 rows are better served with keys of
    each warp's own.
    """
    packed = max_query_len * group
    rows = max(16, next_power_of_2(packed))
    if wide and rows > 16:
        rows = max(WARPGROUP_ROWS, rows)
    rows = min(largest, rows)
    return rows, -(-packed // rows)


def file_name(device_name: str) -> str:
    """The name of the file with a device's table."""
    return re.sub(r"[^A-Za-z0-9]+", "_", device_name).strip("_") + ".json"


def read(path: Path) -> list[dict[str, Any]]:
    """The configurations of one file, each with the shape it was found for.

    Raises:
        ValueError: the file is no such table, or named after another device than it was found on.
    """
    try:
        table = json.loads(path.read_text())
        gpu, entries = table["gpu"], table["configurations"]
        whole = all(_WEIGHTS.keys() <= entry.keys() for entry in entries)
    except (ValueError, KeyError, TypeError, AttributeError):
        whole = False
    if not whole:
        raise ValueError(f"{path} is no table of configurations; remove it, or let `nwor tune` write it anew")
    if file_name(gpu) != path.name:
        raise ValueError(f"{path} was found on {gpu!r} and belongs into {file_name(gpu)}")
    return entries


@functools.cache
def shipped(device_name: str) -> list[dict[str, Any]]:
    """The table that comes with the package for the device of that name; none where there is none."""
    path = SHIPPED / file_name(device_name)
    return read(path) if path.exists() else []


def own_table(device: Device) -> list[dict[str, Any]]:
    """The device's own table, of the user's folder before the one shipped; none where there is none."""
    folder = Settings.from_env().tuning
    path = Path(folder) / file_name(device.name)
    return read(path) if folder and path.exists() else shipped(device.name)


@functools.cache
def tuned(device: Device) -> list[dict[str, Any]]:
    """The device's own table, and for shapes that it lacks those of devices with its limits; a warning where there is
    none of either.
    """
    entries = list(own_table(device))
    for path in sorted(SHIPPED.glob("*.json")):
        table = json.loads(path.read_text())
        if table["limits"] == [device.multiprocessors, device.shared_memory]:
            entries += table["configurations"]
    found: dict[tuple, dict[str, Any]] = {}
    for entry in entries:
        found.setdefault(tuple(entry[name] for name in _WEIGHTS), entry)
    if not found and device.multiprocessors:
        logging.getLogger(__name__).warning(
            "No tuning for %r (no %s in %s): configurations of the verify attention are derived from the device's "
            "limits and may be slow. `nwor tune` finds better ones in minutes.",
            device.name, file_name(device.name), " or ".join(filter(None, [Settings.from_env().tuning, str(SHIPPED)])),
        )  # fmt: skip
    return list(found.values())


def nearest(
    table: Iterable[dict[str, Any]],
    requests: int,
    kv_heads: int,
    group: int,
    head_size: int,
    cache_bytes: int,
    max_query_len: int,
    warpgroups: bool,
) -> dict[str, Any] | None:
    """The entry of the table for the nearest shape, None where the table is empty.

    Nearest by factors between shapes: of rows of a tile, bytes of an element, rows of a window, query heads of a KV
    head, head size, and programs without splits. warpgroups: as `Device` has it.
    """
    shape = {
        "cache_bytes": cache_bytes, "query": max_query_len, "group": group, "head_size": head_size,
        "programs": requests * kv_heads,
    }  # fmt: skip

    def rows(of: Mapping[str, Any]) -> int:
        return row_tiles(of["query"], of["group"], wide=warpgroups or of["cache_bytes"] == 1)[0]

    own_rows = rows(shape)

    def distance(entry: dict[str, Any]) -> float:
        of_tile = _ROWS_WEIGHT * abs(math.log2(own_rows / rows(entry)))
        return of_tile + sum(weight * abs(math.log2(shape[name] / entry[name])) for name, weight in _WEIGHTS.items())

    return min(table, key=distance, default=None)


@functools.cache
def choose(
    device: Device, requests: int, kv_heads: int, group: int, head_size: int, cache_bytes: int, max_query_len: int
) -> Config:
    """The configuration of the nearest shape of the device's table; without one, what fills the device twice."""
    shape = requests, kv_heads, group, head_size, cache_bytes, max_query_len
    entry = nearest(tuned(device), *shape, device.warpgroups)
    if entry is None:
        splits = max(1, min(MAX_SPLITS, 2 * device.multiprocessors // (requests * kv_heads)))
        config = Config(splits=splits, min_tiles_per_split=2)
    else:
        config = of_entry(entry)
        # The number of programs is what a number of splits is good for.
        splits = max(1, round(config.splits * entry["programs"] / (requests * kv_heads)))
        config = replace(config, splits=splits)
    rows, _ = device.row_tiles(max_query_len, group, head_size, cache_bytes == 1)
    return _fitting(config, rows, head_size, cache_bytes, device)


def tile_bytes(config: Config, rows: int, head_size: int, cache_bytes: int) -> int:
    """Bytes of shared memory that tiles of pages and queries take."""
    width = next_power_of_2(head_size)
    return config.stages * config.tile * 2 * width * cache_bytes + rows * width * 2


def shrunk(config: Config, rows: int, head_size: int, cache_bytes: int, device: Device) -> Config:
    """`config`, or the like of it whose tiles of pages and queries fit into shared memory."""
    while tile_bytes(config, rows, head_size, cache_bytes) > device.usable and (config.stages > 1 or config.tile > 32):
        if config.stages > 2 or config.tile <= 32:
            config = replace(config, stages=config.stages - 1)
        else:
            config = replace(config, tile=config.tile // 2)
    return config


def _fitting(config: Config, rows: int, head_size: int, cache_bytes: int, device: Device) -> Config:
    """`config`, or the like of it whose tiles fit into shared memory, and whose sums into registers."""
    width = next_power_of_2(head_size)
    warps = 8 if rows * width > MAX_SUMS_OF_FOUR_WARPS else config.warps
    registers = config.registers if width <= 128 else 0
    config = shrunk(replace(config, tile=max(config.tile, 32)), rows, head_size, cache_bytes, device)
    keys_per_warp = config.keys_per_warp and rows * width <= MAX_SUMS_PER_WARP and config.tile >= 16 * warps
    config = replace(config, warps=warps, registers=registers, keys_per_warp=keys_per_warp)
    most = fit_side_by_side(config, rows, head_size, cache_bytes, device)
    return replace(config, side_by_side=max(1, min(config.side_by_side, most)))


def fit_side_by_side(config: Config, rows: int, head_size: int, cache_bytes: int, device: Device) -> int:
    """How many programs fit on a multiprocessor.

    It has 64 Ki registers, and 1 KiB of shared memory more than a block can have; each block takes 1 KiB of its own.
    """
    converted = config.tile * next_power_of_2(head_size) * 2 if cache_bytes == 1 else 0
    taken = tile_bytes(config, rows, head_size, cache_bytes) + converted + 1024
    registers = config.warps * 32 * (config.registers or 255)
    return min((device.shared_memory + 1024) // taken, (1 << 16) // registers)


def split_combine(
    config: Config, room: int, windows: int, rows: int, head_size: int, multiprocessors: int
) -> tuple[int, bool, int, int]:
    """How a window is split and combined: (splits, grid barrier, most splits compiled for, rows combined at a time).

    Behind a grid barrier all splits share the work. It takes room on the multiprocessors for all programs at once, and
    a cooperative launch, which promises that they run so; else the last split to arrive combines alone.

    Args:
        room: splits at most. windows: programs without splits. rows: of a tile.
    """
    splits = min(config.splits, room, MAX_SPLITS)
    grid_barrier = 1 < splits <= config.side_by_side * multiprocessors // windows
    max_splits = next_power_of_2(splits)
    # A row for each of four warps at least; of more than eight, a window's few rows would be left to few splits.
    wanted = 8 if rows > 4 * max_splits else 4
    combine_rows = min(wanted, MAX_COMBINED_SUMS // (max_splits * next_power_of_2(head_size)))
    return splits, grid_barrier, max_splits, combine_rows


@dataclass(frozen=True)
class Compiled:
    """What the kernel is compiled for beside a layer's own shape: two plans that share it share the machine code.

    rows, row_tiles: as `row_tiles` has them. The others: as `Config` and `split_combine` have them.
    """

    rows: int
    row_tiles: int
    tile: int
    warps: int
    stages: int
    registers: int
    keys_per_warp: bool
    split: bool
    grid_barrier: bool
    max_splits: int
    combine_rows: int


@dataclass(frozen=True)
class Plan:
    """How a batch of one shape is launched: the kernel, and two numbers that it reads."""

    compiled: Compiled
    splits: int
    min_tiles_per_split: int


@functools.cache
def plan(
    device: Device,
    partial_rows: int,
    requests: int,
    heads: int,
    kv_heads: int,
    head_size: int,
    cache_bytes: int,
    max_query_len: int,
    query_fp8: bool,
    config: Config | None = None,
) -> Plan:
    """The plan of a batch.

    Args:
        partial_rows: rows of sums that splits may leave (`verify.Workspace`).
        requests: of the batch. heads, kv_heads, head_size: of the layer. cache_bytes: of an element of its cache.
        max_query_len: rows of a window at most. query_fp8: whether the query is in fp8.
        config: instead of the one of the device's table.
    """
    group = heads // kv_heads
    if config is None:
        config = choose(device, requests, kv_heads, group, head_size, cache_bytes, max_query_len)
    rows, tiles = device.row_tiles(max_query_len, group, head_size, query_fp8)
    room = max(1, partial_rows // (requests * heads * max_query_len))
    packed = min(rows, max_query_len * group)
    splits, grid_barrier, max_splits, combine_rows = split_combine(
        config, room, kv_heads * requests * tiles, packed, head_size, device.multiprocessors
    )
    compiled = Compiled(
        rows, tiles, config.tile, config.warps, config.stages, config.registers, config.keys_per_warp,
        splits > 1, grid_barrier, max_splits, combine_rows,
    )  # fmt: skip
    return Plan(compiled, splits, config.min_tiles_per_split)


def batches_of_each_kernel(max_requests: int, compiled: Callable[[int], Compiled]) -> list[int]:
    """The smallest batch that needs each kernel, in order; compiled: of a batch of so many requests."""
    first: dict[Compiled, int] = {}
    for requests in range(1, max_requests + 1):
        first.setdefault(compiled(requests), requests)
    return list(first.values())
