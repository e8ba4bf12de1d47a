# SPDX-License-Identifier: Apache-2.0
"""Time of one layer's verify attention and write on a GPU, beside what vLLM does in the same place.

    python -m nwor.attention_bench --out results/attention
    python -m nwor.attention_bench --sweep data/attention/h200.json

Each sample is one replay of a CUDA graph after a read of 256 MiB, as a layer's weights are read before its attention; what
is compared is sampled in turns. Every request has k + 1 rows (a token and k drafts) behind `context` positions in pages
of 16 slots, at random places of the cache. What a sample has to do is the same for all: read the prefix, attend, and
leave the rows stored.

    nwor             `nwor.gpu_attention`, rows to staging, the tuned configuration; one launch
    flash            `reshape_and_cache_flash`, then FlashAttention 3 as vLLM calls it in a full graph: a schedule made
                     outside the graph for at most 32 splits
    flash 1 ... 16   the same with that many splits fixed, without a schedule: "best split" is the fastest of all
    triton           `triton_reshape_and_cache_flash`, then vLLM's `unified_attention`
    write            `reshape_and_cache_flash` alone
    empty            one kernel of one thread that does nothing

Metric `between` is what a layer takes between its neighbours: projection, rope, this, output projection, eight layers with
weights of their own in one graph, whose replay is divided by eight; `none` is the same without it. There the new rows
lie in the L2 cache, and each launch waits for the kernel before.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import math
import multiprocessing
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from nwor import paths, results
from nwor.attention_configs import LARGEST_APART, Config, division, packed_rows
from nwor.kernel_bench import Call, Timer, compact, empty, measures

HEAD_SIZE, BLOCK_SIZE = 128, 16
HIDDEN, LAYERS = 4096, 8  # of `between`
HEADS = ((32, 32), (32, 8), (16, 16), (16, 4))  # (query heads, KV heads): 32 and 8 KV heads, whole and at TP=2
BATCHES, CONTEXTS, CACHES = (1, 4, 16, 64), (512, 2048, 8192), ("bf16", "fp8")
SWEPT = (560, 2096, 8240)  # no multiples of a tile, as most are not
FLASH_SPLITS = (1, 2, 4, 8, 16)
NOISE = 1.02  # two medians of a sweep that are no further apart are called equal


@dataclass(frozen=True)
class Shape:
    """One layer's attention of `batch` windows of a token and k drafts.

    cache: bf16 or fp8 (e4m3, with the query in fp8 as vLLM has it).
    """

    heads: int
    kv_heads: int
    batch: int
    context: int
    cache: str = "bf16"
    k: int = 8

    @property
    def query(self) -> int:
        """Rows of a window."""
        return self.k + 1

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.heads // self.kv_heads

    @property
    def element(self) -> int:
        return {"bf16": 2, "fp8": 1}[self.cache]

    @property
    def bytes(self) -> int:
        """What has to move: prefix and query read, new rows read and stored, output written."""
        row = self.kv_heads * 2 * HEAD_SIZE
        query = self.query * self.heads * HEAD_SIZE * (self.element + 2)
        return self.batch * (self.context * row * self.element + self.query * row * (2 + self.element) + query)


KEYS = list(Shape.__dataclass_fields__)
"""Columns that tell a shape in a table."""


class Windows:
    """The tensors of one layer and step, the cache laid out as vLLM's (block, slot, head, key and value): "NHD"."""

    def __init__(self, shape: Shape, seed: int = 0) -> None:
        from nwor.gpu_attention import Workspace

        generator = torch.Generator(device="cuda").manual_seed(seed)
        random = functools.partial(torch.randn, device="cuda", generator=generator)
        self.shape, self.fp8 = shape, shape.cache == "fp8"
        batch, length, tokens = shape.batch, shape.context + shape.query, shape.batch * shape.query
        pages = -(-length // BLOCK_SIZE)
        self.kv_cache = self.cache(batch * pages, generator)
        self.staging = self.cache(-(-tokens // BLOCK_SIZE), generator)
        table = torch.randperm(batch * pages, device="cuda", generator=generator).view(batch, pages)
        self.block_table = torch.zeros(batch, 1024, dtype=torch.int32, device="cuda")  # room for 16k positions
        self.block_table[:, :pages] = table
        self.qkv = random(tokens, shape.heads + 2 * shape.kv_heads, HEAD_SIZE).bfloat16()
        query, self.key, self.value = self.qkv.split([shape.heads, shape.kv_heads, shape.kv_heads], dim=1)
        self.query = query.to(torch.float8_e4m3fn) if self.fp8 else query
        self.output = torch.empty(tokens, shape.heads, HEAD_SIZE, dtype=torch.bfloat16, device="cuda")
        self.query_start_loc = torch.arange(0, tokens + 1, shape.query, dtype=torch.int32, device="cuda")
        self.seq_lens = torch.full((batch,), length, dtype=torch.int32, device="cuda")
        positions = torch.arange(shape.context, length, device="cuda")
        self.slots = (table[:, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE).flatten()
        self.nowhere = torch.full_like(self.slots, -1)
        self.rows = torch.arange(tokens, device="cuda")
        self.one = torch.ones(1, device="cuda")
        self.scale = HEAD_SIZE**-0.5
        self.workspace = Workspace(max(BATCHES), shape.query, shape.heads, HEAD_SIZE, "cuda")

    def cache(self, blocks: int, generator: torch.Generator) -> Tensor:
        """[blocks, H, N, 2 * D] of random numbers around 1."""
        size = (blocks, BLOCK_SIZE, self.shape.kv_heads, 2 * HEAD_SIZE)
        if self.fp8:
            cache = torch.randint(0, 256, size, dtype=torch.uint8, device="cuda", generator=generator)
            cache &= 0xBF  # numbers under 2
        else:
            cache = torch.empty(size, dtype=torch.bfloat16, device="cuda").normal_(generator=generator)
        return cache.transpose(1, 2)

    def split_cache(self) -> tuple[Tensor, Tensor]:
        """Keys and values [blocks, N, H, D], as vLLM passes them."""
        cache = self.kv_cache.view(torch.float8_e4m3fn) if self.fp8 else self.kv_cache
        keys, values = cache.transpose(1, 2).split(HEAD_SIZE, -1)
        return keys, values

    def nwor(self, config: Config | None = None) -> Call:
        from nwor.gpu_attention import verify_attention

        return functools.partial(
            verify_attention, self.query, self.key, self.value, self.kv_cache, self.output,
            query_start_loc=self.query_start_loc, seq_lens=self.seq_lens, block_table=self.block_table,
            page_slots=self.nowhere, staging=self.staging, staging_rows=self.rows, max_query_len=self.shape.query,
            scale=self.scale, kv_cache_dtype="fp8" if self.fp8 else "auto", workspace=self.workspace, config=config,
            **dict.fromkeys(("q_scale", "k_scale", "v_scale"), self.one if self.fp8 else None),
        )  # fmt: skip

    def write(self) -> None:
        from vllm import _custom_ops

        keys, values = self.kv_cache.transpose(1, 2).split(HEAD_SIZE, -1)
        dtype = "fp8" if self.fp8 else "auto"
        _custom_ops.reshape_and_cache_flash(self.key, self.value, keys, values, self.slots, dtype, self.one, self.one)

    def flash(self, splits: int) -> Call:
        """vLLM's write and FlashAttention 3; 32 splits mean at most, by a schedule as vLLM makes it for full graphs."""
        from vllm.vllm_flash_attn.flash_attn_interface import flash_attn_varlen_func, get_scheduler_metadata

        keys, values = self.split_cache()
        shape, longest = self.shape, self.block_table.shape[1] * BLOCK_SIZE
        schedule = None
        if splits == 32:
            schedule = get_scheduler_metadata(
                batch_size=shape.batch, max_seqlen_q=self.shape.query, max_seqlen_k=longest, num_heads_q=shape.heads,
                num_heads_kv=shape.kv_heads, headdim=HEAD_SIZE, cache_seqlens=self.seq_lens,
                qkv_dtype=self.query.dtype, cu_seqlens_q=self.query_start_loc, page_size=BLOCK_SIZE, causal=True,
                window_size=(-1, -1), num_splits=splits,
            )  # fmt: skip
        descale = self.one.expand(shape.batch, shape.kv_heads) if self.fp8 else None

        def call() -> None:
            self.write()
            flash_attn_varlen_func(
                q=self.query, k=keys, v=values, out=self.output, cu_seqlens_q=self.query_start_loc,
                max_seqlen_q=self.shape.query, seqused_k=self.seq_lens, max_seqlen_k=longest, softmax_scale=self.scale,
                causal=True, block_table=self.block_table, scheduler_metadata=schedule, num_splits=splits,
                fa_version=3, q_descale=descale, k_descale=descale, v_descale=descale,
            )  # fmt: skip

        return call

    def triton(self) -> Call:
        from vllm.v1.attention.ops.triton_reshape_and_cache_flash import triton_reshape_and_cache_flash as write
        from vllm.v1.attention.ops.triton_unified_attention import unified_attention
        from vllm.v1.kv_cache_interface import KVQuantMode

        keys, values = self.split_cache()
        mode = KVQuantMode.FP8_PER_TENSOR if self.fp8 else KVQuantMode.NONE
        descale = self.one.expand(self.shape.batch, self.shape.kv_heads)

        def call() -> None:
            write(self.key, self.value, keys, values, self.slots, "fp8" if self.fp8 else "auto", self.one, self.one)
            unified_attention(
                q=self.query, k=keys, v=values, out=self.output, cu_seqlens_q=self.query_start_loc,
                max_seqlen_q=self.shape.query, seqused_k=self.seq_lens, max_seqlen_k=self.block_table.shape[1] * BLOCK_SIZE,
                softmax_scale=self.scale, causal=True, window_size=(-1, -1), block_table=self.block_table, softcap=0,
                q_descale=self.one if self.fp8 else None, k_descale=descale, v_descale=descale, kv_quant_mode=mode,
            )  # fmt: skip

        return call

    def calls(self) -> dict[str, Call]:
        """Everything that is compared, by name."""
        return {
            "empty": empty,
            "nwor": self.nwor(),
            "flash": self.flash(32),
            **{f"flash {splits}": self.flash(splits) for splits in FLASH_SPLITS},
            "triton": self.triton(),
            "write": self.write,
        }

    def between(self, layers: Sequence[tuple[Tensor, Tensor]]) -> dict[str, Call]:
        """All that `layers` (their weights) run around the attention, with ours, vLLM's two and none, by name."""
        from vllm import _custom_ops

        tokens, shape = len(self.qkv), self.shape
        hidden = torch.randn(tokens, HIDDEN, device="cuda").bfloat16()
        after, rows = torch.empty_like(hidden), self.qkv.view(tokens, -1)
        query, key, _ = rows.split([n * HEAD_SIZE for n in (shape.heads, shape.kv_heads, shape.kv_heads)], dim=1)
        angles = torch.rand(shape.context + shape.query, HEAD_SIZE, device="cuda").bfloat16()
        positions = torch.arange(shape.context, len(angles), device="cuda").repeat(shape.batch)

        def run(attend: Call) -> None:
            for projection, output in layers:
                torch.mm(hidden, projection, out=rows)
                _custom_ops.rotary_embedding(positions, query, key, HEAD_SIZE, angles, True)
                if self.fp8:
                    self.query.copy_(query.view(self.query.shape))
                attend()
                torch.mm(self.output.view(tokens, -1), output, out=after)

        attends = {"none": lambda: None, "nwor": self.nwor(), "flash": self.flash(32), "triton": self.triton()}
        return {name: functools.partial(run, attend) for name, attend in attends.items()}

    def error(self, call: Call, requests: int = 2) -> float:
        """Relative error of a call's output for the first requests against fp32 softmax over what the cache reads."""
        self.write()
        self.output.fill_(float("nan"))
        call()
        keys, values = self.split_cache()
        found, wanted = [], []
        seen = torch.arange(self.shape.context + self.shape.query, device="cuda")
        seen = seen <= self.shape.context + torch.arange(self.shape.query, device="cuda")[:, None]
        for request in range(min(requests, self.shape.batch)):
            pages = self.block_table[request, : -(-len(seen[0]) // BLOCK_SIZE)].long()
            rows = slice(request * self.shape.query, (request + 1) * self.shape.query)
            key, value = (
                half[pages].float().flatten(0, 1)[: seen.shape[1]].repeat_interleave(self.shape.group, dim=1)
                for half in (keys, values)
            )
            scores = torch.einsum("thd,phd->htp", self.query[rows].float(), key) * self.scale
            weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
            wanted.append(torch.einsum("htp,phd->thd", weights, value))
            found.append(self.output[rows].float())
        difference = torch.cat(found) - torch.cat(wanted)
        return float(difference.norm() / torch.cat(wanted).norm())


# -- measuring -----------------------------------------------------------------------------------------------------


def shapes(
    heads: Iterable[tuple[int, int]] = HEADS, batches: Iterable[int] = BATCHES, contexts: Iterable[int] = CONTEXTS,
    caches: Iterable[str] = CACHES, ks: Iterable[int] = (8,),
) -> list[Shape]:  # fmt: skip
    """Every shape of the grid."""
    return [
        Shape(*pair, batch, context, cache, k)
        for k, cache, pair, batch, context in itertools.product(ks, caches, heads, batches, contexts)
    ]


def measure(chosen: Sequence[Shape] | None = None, repeats: int = 30, seed: int = 0) -> pd.DataFrame:
    """Time everything on every shape. One row a sample: op, the shape, bytes, and the tidy columns.

    Metric `error` is the relative error of each call's output against fp32, `between` the time of a layer as a whole.
    """
    torch.backends.cuda.matmul.allow_tf32 = False
    timer, found = Timer(clean=True), []
    layers = functools.cache(weights)
    for shape in chosen or shapes():
        windows = Windows(shape, seed)
        calls = windows.calls()
        common = asdict(shape) | {"bytes": shape.bytes}
        found += [
            common | {"op": op, "repeat": repeat, "metric": "time", "unit": "us", "value": value}
            for op, repeat, value in timer.sample(calls, repeats)
        ]
        found += [
            common | {"op": op, "metric": "error", "unit": "relative", "value": windows.error(call)}
            for op, call in calls.items()
            if op not in ("empty", "write")
        ]
        found += [
            common | {"op": op, "repeat": repeat, "metric": "between", "unit": "us", "value": value / LAYERS}
            for op, repeat, value in timer.sample(windows.between(layers(shape.heads, shape.kv_heads)), repeats)
        ]
        print(shape, ratio(found), flush=True)
        del windows, calls
    return results.tidy(found, mode="", model="", seed=seed)


def weights(heads: int, kv_heads: int) -> list[tuple[Tensor, Tensor]]:
    """Weights before and after the attention, of each layer of `between`."""
    widths = (HIDDEN, (heads + 2 * kv_heads) * HEAD_SIZE), (heads * HEAD_SIZE, HIDDEN)
    random = functools.partial(torch.empty, dtype=torch.bfloat16, device="cuda")
    return [tuple(random(*width).normal_(std=0.02) for width in widths) for _ in range(LAYERS)]


def net(frame: pd.DataFrame) -> pd.DataFrame:
    """Median times with the empty kernel's taken off: one row a shape, one column an op, us.

    `vanilla` is the faster of vLLM's two backends (any split of FlashAttention 3), `ratio` is nwor's time over it.
    """
    times = frame[frame["metric"] == "time"]
    table = times.pivot_table(index=KEYS, columns="op", values="value", aggfunc="median")
    table = table.sub(table["empty"], axis=0).drop(columns="empty")
    table["vanilla"] = table.drop(columns=["nwor", "write"]).min(axis=1)
    table["ratio"] = table["nwor"] / table["vanilla"]
    return table


def ratio(found: list[dict[str, Any]]) -> str:
    """The last shape's figures, to look at while it runs."""
    frame = pd.DataFrame(found)
    last = frame[(frame[KEYS] == frame.iloc[-1][KEYS]).all(axis=1)]
    table = net(last).iloc[0]
    errors = last[last["metric"] == "error"].set_index("op")["value"]
    shown = ", ".join(f"{op} {value:.1f}" for op, value in table.items() if op != "ratio")
    return f"ratio {table['ratio']:.3f} ({shown}) errors " + ", ".join(f"{op} {e:.1e}" for op, e in errors.items())


# -- the sweep -----------------------------------------------------------------------------------------------------


def kernels(shape: Shape) -> list[Config]:
    """The binaries that are tried: tiles, warps, stages, bounds of registers, warps apart; whole and split."""
    most = (2, 3) if shape.element == 1 else (2,)  # what fits into shared memory
    kept = {(32, 4): (3, 4), (64, 4): (3, 4), (128, 4): most, (128, 8): most}
    found = [Config(tile, warps, stage) for (tile, warps), stages in kept.items() for stage in stages]
    if shape.heads == shape.kv_heads:
        found += [Config(32, 4, stage, registers=128) for stage in kept[32, 4]]
    if packed_rows(shape.query, shape.group) * HEAD_SIZE <= LARGEST_APART:
        few = ((64, 4, 3), (64, 4, 4), (128, 4, 2), (128, 4, 3), (128, 8, 2), (128, 8, 3))
        found += [Config(tile, warps, stage, apart=True) for tile, warps, stage in few]
    return [replace(kernel, splits=splits) for splits in (1, 2) for kernel in found]


def divisions(shape: Shape, kernel: Config, least: Sequence[int] = (64, 128, 256, 512, 2048, 4096)) -> list[Config]:
    """The kernel with every worthwhile number of splits and of tiles that one has at least."""
    if kernel.splits == 1:
        return [kernel]
    programs = shape.batch * shape.kv_heads
    splits = {2} | {int(fill * 132 / programs) for fill in (0.5, 1, 2)}
    return [
        replace(kernel, splits=number, least=positions // kernel.tile)
        for number in sorted(splits & set(range(2, 65)))
        for positions in least
        if positions >= kernel.tile
    ]


def _compile(job: tuple[Shape, list[Config]]) -> None:
    shape, configs = job
    windows = Windows(replace(shape, context=64))
    for config in configs:
        windows.nwor(config)()
    torch.cuda.synchronize()


def compile_all(jobs: Sequence[tuple[Shape, list[Config]]], workers: int) -> None:
    """Fill Triton's cache with each configuration of each job, on a small problem like its shape."""
    parts = [(shape, configs[n::workers]) for shape, configs in jobs for n in range(workers)]
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        pool.map(_compile, [part for part in parts if part[1]], chunksize=1)


def sweep(chosen: Sequence[Shape], repeats: int = 5, workers: int = 14) -> pd.DataFrame:
    """Time of every candidate on every shape: the shape, the configuration, `value` in us with the empty kernel off.

    `vanilla` is, in the same turns, the time of vLLM's faster backend with its write, as vLLM calls them.
    First every kernel, whole and in some splits; then the fastest few of each kind with every division of the prefix.
    """
    kinds = {(s.heads, s.kv_heads, s.cache, s.k): kernels(s) for s in chosen}
    jobs, known = {replace(shape, context=0): list[Config]() for shape in chosen}, set()
    for shape, configs in jobs.items():
        for kernel in kinds[shape.heads, shape.kv_heads, shape.cache, shape.k]:
            for config in divisions(shape, kernel, (512,)):
                rows = shape.query * shape.group
                combined = division(config.splits, shape.batch * shape.kv_heads, rows, HEAD_SIZE, 132)[1:]
                binary = (
                    shape.group,
                    shape.query,
                    shape.cache,
                    replace(config, splits=config.splits > 1, least=0),
                    combined,
                )
                if binary not in known:
                    known.add(binary)
                    configs.append(config)
    compile_all(list(jobs.items()), workers)
    timer, found = Timer(clean=True), []

    def time(shape: Shape, windows: Windows, configs: list[Config]) -> None:
        calls = {"empty": empty, "flash": windows.flash(32), "triton": windows.triton()}
        calls |= {str(n): windows.nwor(config) for n, config in enumerate(configs)}
        frame = pd.DataFrame(timer.sample(calls, repeats), columns=["op", "repeat", "value"])
        medians = frame.groupby("op")["value"].median()
        medians -= medians["empty"]
        vanilla = medians[["flash", "triton"]].min()
        for n, config in enumerate(configs):
            value = medians[str(n)] if medians[str(n)] > 0 else math.nan  # not above the empty kernel: disturbed
            found.append(asdict(shape) | asdict(config) | {"value": value, "vanilla": vanilla})

    for key, same in itertools.groupby(chosen, key=lambda s: (s.heads, s.kv_heads, s.cache, s.k)):
        for batch, contexts in itertools.groupby(same, key=lambda s: s.batch):
            everywhere = list(contexts)
            fill = min(64, max(2, 132 // (batch * key[1])))
            first = [replace(k, splits=fill, least=128 // k.tile) if k.splits > 1 else k for k in kinds[key]]
            for shape in everywhere:
                time(shape, Windows(shape), first)
            frame = pd.DataFrame(found[-len(first) * len(everywhere) :])
            logs = frame["value"].map(math.log).groupby(frame.index % len(first)).mean().to_numpy()
            second = []
            for split in (False, True):
                ranked = [n for n in logs.argsort() if (first[n].splits > 1) == split]
                second += [config for n in ranked[:3] for config in divisions(everywhere[0], first[n])]
            for shape in everywhere:
                time(shape, Windows(shape), second)
                print(min(found[-len(second) :], key=lambda row: row["value"]), flush=True)
    return pd.DataFrame(found)


def best(swept: pd.DataFrame) -> list[dict[str, Any]]:
    """Of each (heads, batch, cache, k) the configuration that loses least where it loses most.

    What it loses at a context is its time over that of the fastest there: one configuration serves all contexts, since
    a captured graph does not know them. Those that nowhere take `NOISE` times vLLM's time come first. `slower_from` is
    the least context at which the chosen one does, 0 for none.
    """
    knobs, found = {name: type(value) for name, value in asdict(Config()).items()}, []
    for (heads, kv_heads, batch, cache, k), group in swept.groupby(["heads", "kv_heads", "batch", "cache", "k"]):
        table = group.pivot_table(
            index=list(knobs), columns="context", values=["value", "vanilla"], aggfunc="min"
        ).dropna()
        times, lost = table["value"], (table["value"] / table["value"].min()).max(axis=1)
        slower = times > NOISE * table["vanilla"].min()
        chosen = lost[~slower.any(axis=1)].idxmin() if not slower.any(axis=1).all() else lost.idxmin()
        contexts = times.columns[slower.loc[chosen]]
        shape = Shape(heads, kv_heads, batch, 0, cache, k)
        entry = {"cache_bytes": shape.element, "query": shape.query, "group": shape.group, "head_size": HEAD_SIZE}
        entry |= {"programs": batch * kv_heads, "slower_from": int(min(contexts, default=0))}
        found.append(entry | {name: kind(value) for (name, kind), value in zip(knobs.items(), chosen, strict=True)})
    return found


# -- the command ---------------------------------------------------------------------------------------------------


def obtain(run: results.Run, source: str = "") -> pd.DataFrame:
    """Times measured now and kept as a table of `run`, or as recorded in `data/recorded`.

    Args:
        run: where measured tables go.
        source: see `nwor.kernel_bench.measures`, whose errors are raised.
    """
    if not measures(source):
        return results.read_table("attention", paths.RECORDED)
    return run.table("attention", measure())


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m nwor.attention_bench", description="Time the verify attention.")
    parser.add_argument("--out", type=Path, help="folder for attention.parquet and a manifest")
    parser.add_argument("--sweep", type=Path, help="tune instead, and write the best configurations to this JSON file")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--caches", default=",".join(CACHES))
    parser.add_argument("--heads", default=",".join(f"{q}x{kv}" for q, kv in HEADS), help="query heads x KV heads")
    parser.add_argument("--ks", default="8", help="drafts of a window")
    parser.add_argument("--batches", default=",".join(map(str, BATCHES)))
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error("no NVIDIA GPU here; the recorded results are in data/recorded")
    if not (options.out or options.sweep):
        parser.error("--out says where the results go")
    pairs = [(int(q), int(kv)) for q, kv in (pair.split("x") for pair in options.heads.split(","))]
    batches, ks = ([int(number) for number in text.split(",")] for text in (options.batches, options.ks))
    chosen = shapes(pairs, batches, SWEPT if options.sweep else CONTEXTS, options.caches.split(","), ks)
    if options.sweep:
        swept = sweep(chosen, min(options.repeats, 7))
        text = {"gpu": torch.cuda.get_device_name(), "configurations": best(swept)}
        results.write_json(options.sweep, text)
        results.write_table(options.sweep.with_name(f"{options.sweep.stem}_sweep.parquet"), swept)
        return 0
    times = measure(chosen, options.repeats)
    results.write_table(options.out / "attention.parquet", compact(times))
    results.write_json(options.out / "attention_manifest.json", results.provenance(vars(options)))
    print(json.dumps({str(key): round(value, 3) for key, value in net(times)["ratio"].items()}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
