# SPDX-License-Identifier: Apache-2.0
"""`nwor measure`: the commands that measure on a GPU what `data/recorded` holds; run them, and record what they left.

    nwor measure --list                   the commands, sized to this machine's GPU, each with the table it makes
    nwor measure results/gpu              run them one after another, each into a folder of its own, with its log
    nwor measure --record results/gpu     copy what is finished to data/recorded

What has a table already is not run again. One that fails does not stop the others. Recorded is only what was measured
from a clean commit, with enough repeats; else nothing is, and one line says why. On a machine that was sent the files
without their history, NWOR_COMMIT="<sha> clean" names the commit. `--record` also takes a whole reproduction run
(`results/<run>`) and a run of `nwor soak`.
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pandas as pd

from nwor_lab import paths
from nwor_lab.run import builds, provenance, results

MADE_BY = "measured.json"
"""What the folder of a command says of the commit, the machine and the time."""


@dataclass(frozen=True)
class Measurement:
    """A line of the list.

    name: of its folder. table: the table of `data/recorded` that it makes, alone or with others of that table.
    command: of `python -m`; `{out}` is its folder, `{cache}` the MiB of cache for each of its engines, which are all up
        at once, and `{modes}` those that the GPU's memory holds.
    least_repeats: of each setting, below which it is not recorded. engines: of Llama-2-7B's size that it starts.
    columns: further columns of its rows.
    """

    name: str
    table: str
    command: str
    least_repeats: int = 0
    engines: int = 0
    columns: Mapping[str, str] | None = None


AUDIT = (
    "nwor_lab.run.cli bench --mode off,cow,stage --k 4 --batch 4 --num-prompts 128 --max-tokens 256 --repeats 0 "
    "--num-blocks 256 --max-num-batched-tokens 2048 --kv-cache-memory 2048 --no-enforce-eager --name {name} "
    "--run-dir {out}"
)
PAIR = (
    "nwor_lab.run.cli bench --mode off,cow,direct,stage --k 8 --batch 16 --num-prompts 64 --max-tokens 512 "
    "--max-model-len 1024 --max-num-batched-tokens 4096 --kv-cache-memory 1024 --no-enforce-eager --no-audit "
    "--repeats 10 --name {name} --run-dir {out}"
)
# Graphs are captured for every batch's verify and draft steps; vLLM's own would end below 64 requests.
STEPS = (
    "nwor_lab.run.cli bench --shape {shape} --mode {modes} --k 8,3 --acceptance-length 3 --kv-cache-memory {cache} "
    "--cudagraph-capture-sizes 1,2,4,8,9,16,18,32,36,64,72,128,144,256,288,576 --batch 64 --batches 1,4,16,64 "
    "--random-prompts 512,2048,8192 --num-prompts 8 --max-tokens 96 --max-model-len 8448 "
    "--max-num-batched-tokens 8192 --prefix-caching --no-enforce-eager --no-audit --repeats 5 --profile --name {name} "
    "--run-dir {out}"
)
# Attention that does not split a window's context, as an A100 has it; forced here.
CLIFF = (
    "nwor_lab.run.cli bench --shape llama-2-7b-8kv --mode {modes} --k 8 --acceptance-length 3 "
    "--kv-cache-memory {cache} --attention-backend FLASH_ATTN --flash-attn-version 2 "
    "--cudagraph-capture-sizes 1,2,4,8,9,16,18,36,72,144 "
    "--batch 16 --batches 1,4,16 --random-prompts 2048,8192,32768 --num-prompts 4 --max-tokens 48 "
    "--max-model-len 33024 --max-num-batched-tokens 8192 --prefix-caching --no-enforce-eager --no-audit --repeats 5 "
    "--name {name} --run-dir {out}"
)
LAYERS = "nwor_lab.gpu.attention --repeats 30 --name {name} --out {out}"
SERVING = (
    "nwor_lab.run.cli serving --model pair@llama-2-7b-8kv --modes off,stage,cow --k 4 --dtype bfloat16 "
    "--concurrency 1,16,64 --rates 8,20 --requests 40,400,640,64,160 --answer 128 --shortest 60 --longest 1500 "
    "--orders 4 --kv-cache-memory 6144 --warmup 64 --name {name} --run-dir {out}"
)
TESTS = "pytest -q -m gpu tests --junitxml {out}/{name}.xml"
MEASUREMENTS = (
    Measurement("gpu_tests", "gpu_tests", TESTS),
    Measurement("gpu_audit", "gpu_audit", AUDIT),
    Measurement("kernel_times", "kernel_times", "nwor_lab.gpu.operators --repeats 30 --out {out}", 30),
    Measurement("attention", "attention", LAYERS, 30),
    Measurement(
        "gpu_cliff",
        "gpu_cliff",
        LAYERS + " --heads 32x8,32x32 --contexts 2048,8192,32768 --batches 1,4,16 --ks 8,3 --caches bf16",
        30,
    ),
    Measurement(
        "gpu_long",
        "gpu_long",
        LAYERS + " --heads 32x8,16x4 --contexts 32768,131072 --batches 1,4 --ks 8,3 --caches bf16,fp8",
        30,
    ),
    Measurement("steps_8kv", "gpu_direct", STEPS.replace("{shape}", "llama-2-7b-8kv"), 5, engines=3),
    Measurement("steps_32kv", "gpu_direct", STEPS.replace("{shape}", "llama-2-7b"), 5, engines=3),
    Measurement("gpu_cliff_steps_k8", "gpu_cliff_steps_k8", CLIFF, 5, engines=3, columns={"attention": "flash2"}),
    Measurement("gpu_pair", "gpu_pair", PAIR, 10),
    Measurement("gpu_acceptance", "gpu_acceptance", "nwor_lab.run.cli acceptance --name {name} --run-dir {out}"),
    Measurement("gpu_serving", "gpu_serving", SERVING),
)

# -- measuring ---------------------------------------------------------------------------------------------------------

ENGINE_GIB, LEAST_CACHE_GIB = 17.0, 2.0
"""What an engine of Llama-2-7B's size takes beside its cache: weights, head, graphs, workspace; and a useful cache."""


def command_of(one: Measurement, out: Path, gib: float) -> list[str]:
    """The words after `python -m`, sized to a GPU of so many GiB; none where its engines do not fit.

    Where there is room for one engine more, `cow` is timed too.
    """

    def cache(engines: int) -> float:
        return (0.92 * gib - engines * ENGINE_GIB) / max(1, engines)

    engines = one.engines + (one.engines > 0 and cache(one.engines + 1) > 4 * LEAST_CACHE_GIB)
    if engines and cache(engines) < LEAST_CACHE_GIB:
        return []
    modes = "vllm,direct,cow,stage" if engines > one.engines else "vllm,direct,stage"
    words = {"name": one.name, "out": out, "modes": modes, "cache": int(1024 * cache(engines))}
    return shlex.split(one.command.format(**words))


def gpu_gib() -> float:
    """Memory of this machine's first GPU in GiB, an H200's where there is none."""
    import torch

    return torch.cuda.get_device_properties(0).total_memory / 2**30 if torch.cuda.is_available() else 139.0


def measure(directory: Path, chosen: Iterable[Measurement]) -> list[str]:
    """Run what has left nothing in `directory` yet, one after another; return the names of those without a table."""
    missing, gib = [], gpu_gib()
    for one in chosen:
        out = directory / one.name
        if find_table(out, one.name):
            continue
        if not (words := command_of(one, out, gib)):
            print(
                f"{one.name}: left out, {one.engines} engines of Llama-2-7B's size do not fit {gib:.0f} GiB", flush=True
            )
            continue
        results.write_json(out / MADE_BY, results.provenance({"command": words}))
        print(f"{one.name}: {shlex.join(['python', '-m', *words])}", flush=True)
        with open(out / "log.txt", "w") as log:
            command = [sys.executable, "-m", *words]
            done = subprocess.run(command, check=False, stdout=log, stderr=subprocess.STDOUT, cwd=paths.ROOT)
        if done.returncode:
            print(f"{one.name}: exit status {done.returncode}, see {out / 'log.txt'}", flush=True)
        missing += [] if find_table(out, one.name) else [one.name]
    return missing


def find_table(out: Path, name: str) -> Path | None:
    """The table that a command left in its folder, or pytest's report."""
    return next((path for path in (out / f"{name}.parquet", out / f"{name}.xml") if path.exists()), None)


# -- recording ---------------------------------------------------------------------------------------------------------

TABLES = ("reference", "acceptance", "traffic", "steps")
"""Tables that a reproduction run makes."""
TIMES = ("step_ms", "time", "between")
"""Metrics whose repeats are counted."""
NOT_A_SETTING = ("repeat", "value", "step", "position", "rank", "low", "high", "run_id")


def record(run: Path, recorded: Path = paths.RECORDED) -> list[str]:
    """Copy what a folder holds to `recorded`, tables whole or not at all; return the names of those that were written.

    Raises:
        ValueError: there is nothing to record, or something that is not to be recorded; then nothing is written.
        OSError: a file cannot be read.
    """
    if not run.is_dir():
        raise ValueError(f"no folder {run}")
    if (run / "manifest.json").exists():
        return record_run(run, recorded)
    if (run / "soak.parquet").exists():
        made = checked("soak", json.loads((run / "soak.json").read_text())["provenance"])
        name = "gpu_soak" if isinstance(made["gpu"], list) else "soak"  # else why there is none
        results.write_table(recorded / f"{name}.parquet", results.read_table("soak", run))
        results.write_json(recorded / f"{name}.json", made)
        return [name]
    there = [one for one in MEASUREMENTS if find_table(run / one.name, one.name)]
    whole = {one.table for one in there} - {one.table for one in MEASUREMENTS if one not in there}
    if not whole:
        raise ValueError(f"no finished measurement is in {run}: `nwor measure {run}` makes them")
    parts, runs = dict[str, list[pd.DataFrame]](), list[dict[str, Any]]()
    for one in (one for one in there if one.table in whole):
        made = checked(one.name, json.loads((run / one.name / MADE_BY).read_text()))
        build = builds.of_commit(made["git"]["commit"])
        frame = read(one, run / one.name).assign(run_id=run.name, build=build)
        if why := too_few_repeats(frame, one.least_repeats):
            raise ValueError(f"{one.name} is not recorded: {why}")
        parts.setdefault(one.table, []).append(frame)
        runs.append({"table": one.table, "name": one.name, "run_id": run.name, "build": build, **made})
    joined = {table: builds.join(frames) for table, frames in parts.items()}
    for table, frame in joined.items():
        results.write_table(recorded / f"{table}.parquet", frame)
    path = recorded / "gpu_runs.json"
    known = json.loads(path.read_text()) if path.exists() else []
    results.write_json(path, [*(other for other in known if other["table"] not in joined), *runs])
    return sorted(joined)


def read(one: Measurement, out: Path) -> pd.DataFrame:
    """A command's table with the columns that the list adds; of pytest's report a row a test, and its time in s."""
    path = find_table(out, one.name)
    assert path is not None
    if path.suffix == ".parquet":
        return pd.read_parquet(path).assign(**one.columns or {})
    rows = []
    for case in ElementTree.parse(path).iter("testcase"):
        found = {child.tag for child in case}
        outcome = "failed" if found & {"failure", "error"} else "skipped" if "skipped" in found else "passed"
        test = f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}"
        rows.append({"test": test, "outcome": outcome, "value": case.get("time"), "metric": "test_time", "unit": "s"})
    return results.tidy(rows, model="")


def checked(name: str, made: Mapping[str, Any]) -> dict[str, Any]:
    """What is kept of a provenance: when, with what, on what and of which commit.

    Raises:
        ValueError: nothing of this state of git is to be recorded.
    """
    if why := unrecordable(made["git"]):
        raise ValueError(f"{name} is not recorded: {why}")
    found = {key: made[key] for key in ("time", "parameters", "versions", "python", "gpu", "cpu")}
    return {**found, "git": {key: made["git"][key] for key in ("commit", "clean")}}


def unrecordable(git: str | Mapping[str, Any]) -> str:
    """Why nothing of this state of git, or failure to ask it, can be recorded; empty where it can."""
    if isinstance(git, str):
        return f"git could not be asked ({git}): set NWOR_COMMIT"
    changed = ", ".join(git["changed"][:3]) or "says NWOR_COMMIT"
    return "" if git["clean"] else f"files differ from the commit ({changed}): commit them"


def too_few_repeats(frame: pd.DataFrame, least: int) -> str:
    """Which setting of a table has the fewest repeats, if they are less than `least`; empty where none has."""
    timed = frame[frame["metric"].isin(TIMES)]
    if not least or timed.empty:
        return "it has no times" if least else ""
    setting = [column for column in timed if column not in NOT_A_SETTING and timed[column].nunique() > 1]
    counts = timed.groupby(setting or ["metric"], dropna=False, observed=True)["repeat"].nunique()
    where = counts.idxmin() if isinstance(counts.idxmin(), tuple) else (counts.idxmin(),)
    said = ", ".join(f"{name} {value}" for name, value in zip(setting, where, strict=False))
    return f"{counts.min()} repeats where {least} are needed ({said or 'everywhere'})" if counts.min() < least else ""


def record_run(run: Path, recorded: Path) -> list[str]:
    """Copy a whole reproduction run's small tables, claims, animation and manifest; of one on GPUs what it compared.

    The manifest loses what is of one machine: commands, folders and the kernel's name.
    """
    manifest = results.read_manifest(run)
    every = {name: entry["provenance"] for name, entry in manifest["notebooks"].items() if entry["state"] == "done"}
    if unfinished := set(manifest["notebooks"]) - set(every):
        raise ValueError(f"{run} is not whole: {', '.join(sorted(unfinished))}; go on with `nwor reproduce --resume`")
    for name, made in every.items():
        checked(name, made)
        made["parameters"].pop("run_dir", None)
        for of_the_machine in ("command", "platform"):
            made.pop(of_the_machine, None)
    if any(isinstance(made["gpu"], list) for made in every.values()):
        compared = results.read_table("kernels", run)
        results.write_table(recorded / "kernel_check.parquet", compared[compared["device"] == "cuda"])
        return ["kernel_check"]
    tables = {name: results.read_table(name, run) for name in (*TABLES, "claims")}
    for name, table in tables.items():
        results.write_table(recorded / f"{name}.parquet", table)
    for picture in ("tour_pages.gif", "tour_pages.png"):
        shutil.copy(run / "figures" / picture, recorded)
    results.write_json(recorded / "manifest.json", manifest)
    return sorted(tables)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="nwor measure", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = paths.RESULTS / "gpu"
    parser.add_argument("directory", nargs="?", type=Path, default=default, help="folder for what is measured")
    names = [one.name for one in MEASUREMENTS]
    parser.add_argument("--only", nargs="+", default=names, choices=names, metavar="NAME", help="measure these")
    parser.add_argument("--list", action="store_true", help="show the commands, and measure nothing")
    parser.add_argument("--record", type=Path, metavar="RUN", help="record this folder, and measure nothing")
    options = parser.parse_args(argv)
    chosen = [one for one in MEASUREMENTS if one.name in options.only]
    try:
        if options.list:
            for one in chosen:
                words = command_of(one, options.directory / one.name, gpu_gib())
                print(f"# {one.table}{'' if words else ': does not fit this GPU'}")
                print(*([shlex.join(["python", "-m", *words])] if words else []), sep="\n", end="\n\n")
            return 0
        if options.record:
            print(f"recorded: {', '.join(record(options.record.resolve()))}")
            return 0
        if why := unrecordable(provenance.probe(provenance.git)):
            print(f"what is measured now cannot be recorded: {why}", flush=True)
        missing = measure(results.check_folder(options.directory).resolve(), chosen)
    except (OSError, ValueError) as error:
        print(f"nwor measure: {error}", file=sys.stderr)
        return 2
    print(f"missing: {', '.join(missing) or 'none'}")
    return int(bool(missing))


if __name__ == "__main__":
    sys.exit(main())
