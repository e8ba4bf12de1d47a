# SPDX-License-Identifier: Apache-2.0
"""Find the fastest configurations of `stage`'s attention on this GPU, in a file that vLLM takes.

    nwor tune --heads 32x8,16x4 --head-size 128 --k 8 --out tuning
    VLLM_NWOR_TUNING=$PWD/tuning VLLM_NWOR_MODE=stage vllm serve ...

The file is named after the GPU, and what it lacks is taken from the package's tables. Each k, cache and pair of heads
takes one or two minutes. Nothing else should run on the GPU meanwhile. vLLM must be installed: its own attention is
interleaved with the candidates. A model's heads are `num_attention_heads`, `num_key_value_heads` and `head_dim` of its
`config.json`; ranks share both kinds, so 16x4 is a model of 32x8 with tensor_parallel_size=2.
"""

from __future__ import annotations

import itertools
import json
import math
import multiprocessing
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import pandas as pd
import torch
from tyro.conf import arg

from nwor.attention.configs import (
    H200,
    HEAD_SIZES,
    MAX_SPLITS,
    MAX_SUMS_OF_FOUR_WARPS,
    MAX_SUMS_PER_WARP,
    WARPGROUP_ROWS,
    Config,
    Device,
    file_name,
    fit_side_by_side,
    next_power_of_2,
    read,
    shrunk,
    split_combine,
)
from nwor.settings import PREFIX, Settings
from nwor_lab import command_line
from nwor_lab.engines.shapes import SHAPES
from nwor_lab.gpu.attention import shapes
from nwor_lab.gpu.attention_case import ENTRY, HEAD_SIZE, KEYS, LAYERS, AttentionCase, AttentionShape
from nwor_lab.gpu.held_out import CONTEXTS
from nwor_lab.gpu.timer import Axes, Call, empty, interleaved
from nwor_lab.run import results

THREE_AT_ONCE = 168  # registers of a thread at most, if three programs of four warps are to share a multiprocessor
ATTEMPTS = 5  # at timing, before the GPU is taken for busy
BATCHES = tuple(sorted(odd << n for odd in (1, 3, 5, 7) for n in range(7) if odd << n <= 64))
"""With powers of 2 alone, batches between them would run in splits that keep part of the GPU idle."""
ENTRY_KEYS = [name for name in KEYS if name != "context"]  # one entry serves all contexts


# -- the search ----------------------------------------------------------------------------------------------------


def kernels(shape: AttentionShape, device: Device = H200) -> list[Config]:
    """The binaries that are tried: tiles, warps, stages, bounds of registers, keys per warp; whole and split."""
    most = (2, 3) if shape.element == 1 else (2,)
    rows, width = rows_of(shape, device)[0], next_power_of_2(shape.head_size)
    if rows * width > MAX_SUMS_OF_FOUR_WARPS:
        kept = {(32, 8): (3, 4), (64, 8): (2, 3), (128, 8): most}
        bounded = [Config(tile, 8, 2, registers=128) for tile in (32, 64)]
    else:
        kept = {(32, 4): (3, 4), (64, 4): (3, 4), (128, 4): most, (128, 8): most}
        bounded = []
        if shape.element == 1 and rows == WARPGROUP_ROWS:
            bounded = [Config(64, 4, stage, registers=THREE_AT_ONCE) for stage in (2, 3)]
        elif shape.heads == shape.kv_heads:
            bounded = [Config(32, 4, stage, registers=128) for stage in kept[32, 4]]
    found = [Config(tile, warps, stage) for (tile, warps), stages in kept.items() for stage in stages] + bounded
    if rows * width <= MAX_SUMS_PER_WARP:
        few = ((64, 4, 3), (64, 4, 4), (128, 4, 2), (128, 4, 3), (128, 8, 2), (128, 8, 3))
        found += [Config(tile, warps, stage, keys_per_warp=True) for tile, warps, stage in few]
    found = list(dict.fromkeys(shrunk(kernel, rows, shape.head_size, shape.element, device) for kernel in found))
    return [replace(kernel, splits=splits) for splits in (1, 2) for kernel in found]


def rows_of(shape: AttentionShape, device: Device) -> tuple[int, int]:
    """Packed rows of a tile, and tiles of a window and KV head."""
    return device.row_tiles(shape.query, shape.group, shape.head_size, shape.cache == "fp8")


def programs(shape: AttentionShape, device: Device) -> int:
    """How many there are without splits."""
    return shape.batch * shape.kv_heads * rows_of(shape, device)[1]


def filled(device: Device) -> int:
    """Programs that nearly fill the device, a power of 2: splits are combined by such."""
    return 1 << (device.multiprocessors.bit_length() - 1)


def rounded(programs: int, device: Device) -> set[int]:
    """Numbers of splits, up to 8, whose rounds of all multiprocessors, several, are 3 % shorter in sum than any smaller
    number's: 544 programs take 5 rounds of 132; in two splits 9, each half as long; in three 13, each a third as long.
    """
    rounds = {splits: -(-programs * splits // device.multiprocessors) for splits in range(1, 9)}
    shares = {splits: number / splits for splits, number in rounds.items()}
    shorter = {n for n in range(2, 9) if all(shares[n] < 0.97 * shares[fewer] for fewer in range(1, n))}
    return {n for n in shorter if rounds[n] > 1}


def divisions(
    shape: AttentionShape,
    kernel: Config,
    device: Device = H200,
    positions_per_split: Sequence[int] = (64, 128, 256, 512, 2048, 4096),
) -> list[Config]:
    """The kernel with every worthwhile number of splits, and of tiles for one at least.

    Where more splits than multiprocessors fit side by side, they meet or leave it to the last one: both are tried.

    positions_per_split: those that are tried, in positions.
    """
    if kernel.splits == 1:
        return [kernel]
    fills = (0.5, 1, 2, 3) if kernel.registers == THREE_AT_ONCE else (0.5, 1, 2)
    places = filled(device), device.multiprocessors
    splits = {2} | {int(fill * place / programs(shape, device)) for fill in fills for place in places}
    splits |= rounded(programs(shape, device), device)
    found = [
        replace(kernel, splits=number, min_tiles_per_split=positions // kernel.tile)
        for number in sorted(splits & set(range(2, MAX_SPLITS + 1)))
        for positions in positions_per_split
        if positions >= kernel.tile
    ]
    fit = fit_side_by_side(kernel, rows_of(shape, device)[0], shape.head_size, shape.element, device)
    wanted = [-(-config.splits * programs(shape, device) // device.multiprocessors) for config in found]
    together = [(config, number) for config, number in zip(found, wanted, strict=True) if 1 < number <= fit]
    return found + [replace(config, side_by_side=number) for config, number in together]


def filling(shape: AttentionShape, kernel: Config, device: Device = H200) -> Config:
    """The kernel as it is, or, if it is to be split, with as many splits as fill the GPU once."""
    if kernel.splits == 1:
        return kernel
    splits = min(64, max(2, filled(device) // programs(shape, device)))
    return replace(kernel, splits=splits, min_tiles_per_split=128 // kernel.tile)


def _compile(job: tuple[AttentionShape, list[Config]]) -> None:
    shape, configs = job
    case = AttentionCase(replace(shape, context=64))
    for config in configs:
        case.nwor(config)()
    torch.cuda.synchronize()


def compile_all(jobs: Sequence[tuple[AttentionShape, list[Config]]], workers: int) -> None:
    """Fill Triton's cache with each configuration of each job, on a small problem like its shape."""
    parts = [(shape, configs[n::workers]) for shape, configs in jobs for n in range(workers)]
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        pool.map(_compile, [part for part in parts if part[1]], chunksize=1)


class BusyGpuError(RuntimeError):
    """Something else runs on the GPU, so no time can be told."""


def above_empty(calls: dict[str, Call], repeats: int) -> pd.Series:
    """Median time of each call in us, less that of the call named `empty`; all are timed again where one is below it.

    Raises:
        BusyGpuError: it was so each time.
    """
    for _ in range(ATTEMPTS):
        frame = pd.DataFrame(interleaved(calls, repeats, clean=True), columns=["op", "repeat", "value"])
        medians = frame.groupby("op")["value"].median()
        above = medians.drop("empty") - medians["empty"]
        if (above > 0).all():
            return above
    raise BusyGpuError(f"an empty kernel took longer than an attention, {ATTEMPTS} times: stop what else the GPU runs")


def search(chosen: Sequence[AttentionShape], repeats: int = 5, workers: int = 14) -> pd.DataFrame:
    """Time of every candidate on every shape: the shape, the configuration, `value` in us with the empty kernel off.

    `vanilla` is, interleaved with it, the time of vLLM's faster backend with its write, as vLLM calls them.
    First every kernel, whole and in some splits; then the fastest few of each kind with every division of the prefix.

    Raises:
        BusyGpuError: as `above_empty`.
    """
    device = Device.of("cuda")
    kinds = {(s.heads, s.kv_heads, s.cache, s.k): kernels(s, device) for s in chosen}
    jobs, known = {replace(shape, context=0): list[Config]() for shape in chosen}, set()
    for shape, configs in jobs.items():
        for kernel in kinds[shape.heads, shape.kv_heads, shape.cache, shape.k]:
            for config in divisions(shape, kernel, device, (512,)):
                size = shape.query * shape.group, shape.head_size, device.multiprocessors
                _, *combined = split_combine(config, MAX_SPLITS, programs(shape, device), *size)
                undivided = replace(config, splits=config.splits > 1, min_tiles_per_split=0, side_by_side=1)
                binary = undivided, *combined, shape.group, shape.query, shape.cache
                if binary not in known:
                    known.add(binary)
                    configs.append(config)
    compile_all(list(jobs.items()), workers)
    found: list[dict[str, Any]] = []

    def time(shape: AttentionShape, case: AttentionCase, configs: list[Config]) -> None:
        backends = case.vanilla()
        calls = {"empty": empty, **backends}
        calls |= {str(n): case.nwor(config) for n, config in enumerate(configs)}
        us = above_empty(calls, repeats)
        vanilla = us[[*backends]].min()
        for n, config in enumerate(configs):
            found.append(asdict(shape) | asdict(config) | {"value": us[str(n)], "vanilla": vanilla})

    for key, same in itertools.groupby(chosen, key=lambda s: (s.heads, s.kv_heads, s.cache, s.k)):
        for _, contexts in itertools.groupby(same, key=lambda s: s.batch):
            everywhere = list(contexts)
            first = [filling(everywhere[0], kernel, device) for kernel in kinds[key]]
            for shape in everywhere:
                time(shape, AttentionCase(shape), first)
            frame = pd.DataFrame(found[-len(first) * len(everywhere) :])
            logs = frame["value"].map(math.log).groupby(frame.index % len(first)).mean().to_numpy()
            second = []
            for split in (False, True):
                ranked = [n for n in logs.argsort() if (first[n].splits > 1) == split]
                second += [config for n in ranked[:5] for config in divisions(everywhere[0], first[n], device)]
            for shape in everywhere:
                time(shape, AttentionCase(shape), second)
                fastest = min(found[-len(second) :], key=lambda row: row["value"])
                us, vllm = fastest["value"], fastest["vanilla"]
                print(f"{shape}: {us:.1f} us, vLLM {vllm:.1f} us; {in_words(fastest)}", flush=True)
    return pd.DataFrame(found)


def best(searched: pd.DataFrame, head_size: int = HEAD_SIZE) -> list[dict[str, Any]]:
    """Of each (heads, batch, cache, k) the configuration that loses least where it loses most.

    What it loses at a context is how much longer it takes than the fastest there, as a share of vLLM's time: one
    configuration serves all contexts, since a captured graph does not know them. Those that are nowhere slower than
    vLLM come first.

    Args:
        searched: as `search` makes it. head_size: of all its shapes.
    """
    knobs, found = {name: type(value) for name, value in asdict(Config()).items()}, []
    for (heads, kv_heads, batch, cache, k), group in searched.groupby(ENTRY_KEYS):
        table = group.pivot_table(["value", "vanilla"], list(knobs), "context", aggfunc="min").dropna()
        times, vanilla = table["value"], table["vanilla"].min()
        lost = ((times - times.min()) / vanilla).max(axis=1)
        slower = (times > vanilla).any(axis=1)
        chosen = lost[~slower].idxmin() if not slower.all() else lost.idxmin()
        entry = AttentionShape(heads, kv_heads, batch, 0, cache, k, head_size).entry
        found.append(entry | {name: kind(value) for (name, kind), value in zip(knobs.items(), chosen, strict=True)})
    return found


def in_words(config: dict[str, Any]) -> str:
    """A configuration as a line, such as `tile 64, warps 4, stages 3, splits 2`; what is off is left out."""
    knobs = {name: config[name] for name in asdict(Config())}
    return ", ".join(name if value is True else f"{name} {value}" for name, value in knobs.items() if value)


# -- the command ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Tune(Axes):
    heads: tuple[str, ...] = ()
    """query heads x KV heads of a rank, such as 32x8,16x4"""
    shape: Annotated[str, arg(help=f"of a model on one rank, in place of --heads: {', '.join(SHAPES)}")] = ""
    head_size: int = HEAD_SIZE
    """of --heads"""
    ks: Annotated[tuple[int, ...], arg(name="k", aliases=("--ks",))] = (8,)
    batches: tuple[int, ...] = BATCHES
    contexts: tuple[int, ...] = CONTEXTS
    caches: tuple[Literal["bf16", "fp8"], ...] = ("bf16", "fp8")
    repeats: int = 5
    """samples of each candidate"""
    out: Path = field(default_factory=lambda: Path(Settings.from_env().tuning or "tuning"))
    """folder of the file, $VLLM_NWOR_TUNING where that is set"""

    def __post_init__(self) -> None:
        super().__post_init__()
        if bool(self.heads) == bool(self.shape):
            raise ValueError("give --heads or --shape, and one of them")
        if self.shape:
            command_line.check_names("--shape", (self.shape,), SHAPES)
        if any(heads % kv_heads for heads, kv_heads in self.layer[0]) or self.layer[1] not in HEAD_SIZES:
            raise ValueError(f"stage serves heads of size {HEAD_SIZES}, and so many a KV head as divide them evenly")

    @property
    def layer(self) -> tuple[list[tuple[int, int]], int]:
        """Query and KV heads, of each layer that was asked for, and their size."""
        if not self.shape:
            return self.pairs, self.head_size
        shape = SHAPES[self.shape]
        return [(shape["num_attention_heads"], shape["num_key_value_heads"])], shape["head_dim"]


def write(folder: Path, device: Device, found: Iterable[dict[str, Any]]) -> Path:
    """Write the device's table, whole or not at all; one that lies there is added to, not lost."""
    path = folder / file_name(device.name)
    entries = {tuple(entry[name] for name in ENTRY): entry for entry in [*_known(folder, device), *found]}
    lines = ",\n".join(map(json.dumps, entries.values()))  # a line an entry, for who compares two tables
    head = f'"gpu": {json.dumps(device.name)}, "limits": [{device.multiprocessors}, {device.shared_memory}]'
    return results.write_text(path, f'{{{head}, "configurations": [\n{lines}\n]}}\n')


def _known(folder: Path, device: Device) -> list[dict[str, Any]]:
    """What the device's table in a folder has already; ValueError where it is none."""
    path = folder / file_name(device.name)
    return read(path) if path.exists() else []


def main(argv: list[str] | None = None) -> int:
    """The command; 2 for wrong input and where there is no GPU, 1 where it is busy."""
    fail = partial(command_line.fail, "nwor tune")
    try:
        asked = command_line.parse(Tune, argv, "nwor tune", __doc__)
    except ValueError as error:
        return fail(error)
    if not torch.cuda.is_available():
        return fail("no NVIDIA GPU here, and a table is of the GPU it was found on")
    caches = asked.caches
    if "fp8" in caches and torch.cuda.get_device_capability() < (8, 9):
        print("nwor tune: this GPU has no fp8: bf16 alone")
        caches = ("bf16",)
    device, (heads, head_size) = Device.of("cuda"), asked.layer
    try:  # now, for a search takes minutes
        results.check_folder(asked.out)
        _known(asked.out, device)
    except (ValueError, OSError) as error:
        return fail(error)
    chosen = shapes(heads, asked.batches, asked.contexts, caches, asked.ks, head_size=head_size)
    memory = torch.cuda.get_device_properties("cuda").total_memory
    chosen = [shape for shape in chosen if LAYERS * shape.bytes < memory]
    try:
        searched = search(chosen, asked.repeats, workers=min(14, os.cpu_count() or 1))
    except BusyGpuError as error:
        return fail(error, 1)
    found = best(searched, head_size)
    path = write(asked.out, device, found)
    results.write_table(path.with_name(f"{path.stem}_search.parquet"), searched)
    for entry in found:
        shape = ", ".join(f"{name} {entry[name]}" for name in ENTRY)
        print(f"chosen for {shape}: {in_words(entry)}")
    print(f"{path}: used by vLLM where {PREFIX}TUNING={path.parent.resolve()} is set")
    return 0
