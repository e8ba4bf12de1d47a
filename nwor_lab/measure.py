# SPDX-License-Identifier: Apache-2.0
"""`nwor measure [DIR]`: measure on GPUs what `data/recorded/` holds; `nwor measure --record RUN`: record a run there.

Each measurement is a command with its own GPU, share of the cores and log. Those of one rank run side by side, one on
each GPU; those of two ranks follow, alone, and are left out where there is one GPU. A measurement whose table exists is
skipped, so an interrupted run goes on; one that fails does not stop the others, and the exit code is then 1. A bench of
whole steps takes four to eight minutes on an H200.

`--record` takes either such a folder or a whole reproduction run (`results/<run>`). It writes a table only when all of
its parts are there; what is recorded stays as it is otherwise.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pandas as pd

from nwor_lab import paths, results
from nwor_lab.experiments.gpu_steps import PARITY_TOLERANCE_NATS, gpu_tables
from nwor_lab.plots import paper

GPU = ["--no-enforce-eager", "--max-num-batched-tokens", "2048", "--k", "4", "--batch", "4", "--num-blocks", "256"]
AUDIT = ["nwor_lab.cli", "bench", *GPU, "--repeats", "0", "--name", "{name}", "--run-dir", "{out}"]


def steps(shape: str, k: int, modes: str, mib: int, *more: str) -> list[str]:
    """Return the bench of whole steps: each mode's engine beside itself with the mode paused, which is vanilla.

    Graphs are captured for every batch's verify and draft steps; by default vLLM's would end below 64 requests.

    Args:
        mib: MiB of cache for each engine; all are up at once.
    """
    requests = (1, 2, 4, 8, 16, 32, 64)
    bound = str(PARITY_TOLERANCE_NATS["fp8" if "fp8" in more else "auto"])
    captured = ",".join(map(str, sorted({rows * number for number in requests for rows in (1, k + 1)})))
    return [
        *("nwor_lab.cli", "bench", "--shape", shape, "--k", str(k), "--mode", modes, "--kv-cache-memory", str(mib)),
        *("--acceptance-length", "1.5" if k == 1 else "3", "--batch", "64", "--batches", "1,4,16,64"),
        *("--random-prompts", "512,2048,8192", "--num-prompts", "8", "--max-tokens", "96", "--max-model-len", "8448"),
        *("--max-num-batched-tokens", "8192", "--prefix-caching", "--no-enforce-eager", "--no-audit", "--paused"),
        *("--cudagraph-capture-sizes", captured, "--repeats", "6", "--logit-gap", bound),
        *("--name", "{name}", "--run-dir", "{out}", *more),
    ]


SHAPES = {"32": "llama-2-7b", "8": "llama-2-7b-8kv"}
FP8 = ["--kv-cache-dtype", "fp8"]
CACHES: dict[str, list[str]] = {"": [], "-fp8": FP8}
STEPS = {
    **{
        f"steps-k8-{heads}{ending}": steps(shape, 8, "stage", 72000, *dtype, "--profile")
        for ending, dtype in CACHES.items()
        for heads, shape in SHAPES.items()
    },
    **{f"steps-k8-{heads}-cow": steps(shape, 8, "cow", 36000, "--profile") for heads, shape in SHAPES.items()},
    **{
        f"steps-k{k}-{heads}{ending}": steps(shape, k, "stage", 72000, *dtype)
        for ending, dtype in CACHES.items()
        for k in (1, 3)
        for heads, shape in SHAPES.items()
    },
}
"""72,000 MiB hold all but 64 prompts of 8k of 32 KV heads."""
STEPS_OF_TWO = {
    f"steps-k8-{heads}{ending}-tp2": steps(shape, 8, "cow,stage", 36000, "--tp", "2", *dtype, "--profile")
    for ending, dtype in CACHES.items()
    for heads, shape in SHAPES.items()
}
AUDITED = ["--audit", "--num-prompts", "16", "--batches", "1,4,16", "--random-prompts", "512", "--repeats", "3"]
"""The first pass shows parity and every byte of the cache; the same engines are timed after it."""
AUDITED_STEPS = {
    "audited-32": steps(SHAPES["32"], 8, "off,cow,stage", 9000, *AUDITED),
    "audited-8-fp8": steps(SHAPES["8"], 8, "off,cow,stage", 4000, *AUDITED, *FP8),
}
AUDITS = {"audit": [*AUDIT, "--kv-cache-memory", "2048", "--num-prompts", "128", "--max-tokens", "256"]}
AUDITS_OF_TWO = {
    "audit-tp2": [*AUDIT, "--kv-cache-memory", "1024", "--num-prompts", "24", "--max-tokens", "128", "--tp", "2"]
}
ALONE = {
    "kernel_times": ["nwor_lab.microbench.operators", "--counters", "--out", "{out}"],
    "attention_counters": ["nwor_lab.microbench.counters", "--out", "{out}"],
    "attention": ["nwor_lab.microbench.attention", "--repeats", "11", "--ks", "1,3,8", "--out", "{out}"],
    "gpu_acceptance": ["nwor_lab.cli", "acceptance", "--run-dir", "{out}"],
    "gpu_tests": ["nwor_lab.gpu_tests", "--out", "{out}"],
}
MEASUREMENTS = {**ALONE, **AUDITS, **AUDITED_STEPS, **STEPS, **AUDITS_OF_TWO, **STEPS_OF_TWO}


def table(directory: Path, name: str) -> Path:
    """Return the path of the table of measurement `name`; beside it, as `.json`, lies what made it."""
    return directory / name / f"{name}.parquet"


def measure(directory: Path, only: list[str]) -> list[str]:
    """Run every measurement that has no table yet; return the names of those that failed or were left out."""
    import torch

    gpus = torch.cuda.device_count()
    visible = (os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(gpus)))).split(",")[:gpus]
    wanted = [name for name in MEASUREMENTS if (not only or name in only) and not table(directory, name).exists()]
    on_two = [name for name in wanted if "--tp" in MEASUREMENTS[name]]
    waiting: queue.SimpleQueue[str] = queue.SimpleQueue()
    for name in (name for name in wanted if gpus and name not in on_two):
        waiting.put(name)
    done: dict[str, bool] = {}
    cores = sorted(os.sched_getaffinity(0))

    def run_on(index: int) -> None:
        share = max(1, len(cores) // gpus)
        os.sched_setaffinity(0, cores[index * share % len(cores) :][:share])  # of this thread and what it starts
        with contextlib.suppress(queue.Empty):
            while True:
                name = waiting.get_nowait()
                done[name] = run(directory, name, [visible[index]])

    with ThreadPoolExecutor(max(1, gpus)) as pool:
        list(pool.map(run_on, range(gpus)))
    done |= {name: run(directory, name, visible[:2]) for name in on_two if gpus >= 2}
    for name in (name for name in wanted if name not in done):
        print(f"{name}: left out, {1 + (name in on_two)} NVIDIA GPUs are needed", flush=True)
    return [name for name in wanted if not done.get(name)]


def run(directory: Path, name: str, gpus: list[str]) -> bool:
    """Run the measurement `name` on these GPUs, its output into a log beside its table; return whether it succeeded."""
    out = directory / name
    out.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", *(word.format(out=out, name=name) for word in MEASUREMENTS[name])]
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": ",".join(gpus)}
    with open(out / "log.txt", "w") as log:
        done = subprocess.run(command, check=False, stdout=log, stderr=subprocess.STDOUT, env=environ, cwd=paths.ROOT)
    print(f"{name}: {'failed, see ' + str(out / 'log.txt') if done.returncode else 'done'}", flush=True)
    return not done.returncode


def record(directory: Path, recorded: Path = paths.RECORDED) -> list[str]:
    """Write those tables of `recorded` that `directory` holds whole; return the names of those that it does not."""
    parts = {name: [name] for name in ALONE}
    parts |= {"gpu_audit": [*AUDITS, *AUDITS_OF_TWO], "gpu_steps": [*STEPS, *STEPS_OF_TWO]}
    parts["gpu_audited_steps"] = list(AUDITED_STEPS)
    whole = [name for name in parts if all(table(directory, part).exists() for part in parts[name])]
    runs = recorded / "gpu_runs.json"
    known = {run["name"]: run for run in json.loads(runs.read_text())} if runs.exists() else {}
    for name in whole:
        for path in (table(directory, part).with_suffix(".json") for part in parts[name]):
            if path.exists():
                made = json.loads(path.read_text())["provenance"]
                git = made["git"]  # a sentence where git could not be asked
                made["git"] = git if isinstance(git, str) else {key: git[key] for key in ("commit", "clean")}
                kept = {key: made[key] for key in ("time", "versions", "python", "gpu", "cpu", "git")}
                known[path.stem] = {"run_id": directory.name, "name": path.stem, **kept}
        read = [results.read_table(part, directory / part).assign(run_id=directory.name) for part in parts[name]]
        tables = gpu_tables(read) if name == "gpu_steps" else {name: pd.concat(read, ignore_index=True)}
        if name == "kernel_times":
            tables["kernel_counters"] = results.read_table("kernel_counters", directory / name)
        for each, frame in tables.items():
            results.write_table(recorded / f"{each}.parquet", frame)
    if whole:
        results.write_json(runs, list(known.values()))
    return [name for name in parts if name not in whole]


def record_run(run: Path, recorded: Path = paths.RECORDED) -> None:
    """Copy a whole reproduction run's small tables, claims, first figure and manifest to `recorded`.

    The manifest loses what is of one machine: commands, folders and the kernel's name.

    Raises:
        ValueError: a notebook of the run did not end well.
    """
    manifest = results.read_manifest(run)
    unfinished = [name for name, entry in manifest["notebooks"].items() if entry["state"] != "done"]
    if unfinished:
        raise ValueError(f"{run} is not whole: {', '.join(unfinished)}; go on with `nwor reproduce --resume`")
    for name in (*paper.TABLES, "claims"):
        results.write_table(recorded / f"{name}.parquet", results.read_table(name, run))
    shutil.copy(run / "figures" / "reference_policies.png", recorded)
    for made in (entry["provenance"] for entry in manifest["notebooks"].values()):
        for name in ("command", "platform"):
            made.pop(name, None)
        made["parameters"].pop("run_dir", None)
    results.write_json(recorded / "manifest.json", manifest)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="nwor measure", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = paths.RESULTS / "gpu"
    parser.add_argument("directory", nargs="?", type=Path, default=default, help="folder for what is measured")
    parser.add_argument(
        "--only", nargs="+", default=[], choices=list(MEASUREMENTS), metavar="NAME", help="measure these"
    )
    parser.add_argument("--record", type=Path, metavar="RUN", help="record this folder, and measure nothing")
    options = parser.parse_args(argv)
    try:
        if options.record and (options.record / "manifest.json").exists():
            record_run(options.record.resolve())
            return 0
        if options.record and not options.record.is_dir():
            raise FileNotFoundError(f"no folder {options.record}")
        directory = options.record or results.check_folder(options.directory)
        missing = record(directory.resolve()) if options.record else measure(directory.resolve(), options.only)
    except (OSError, ValueError) as error:
        print(f"nwor measure: {error}", file=sys.stderr)
        return 2
    print(f"{'not recorded' if options.record else 'missing'}: {', '.join(missing) or 'none'}")
    return int(bool(missing))


if __name__ == "__main__":
    sys.exit(main())
