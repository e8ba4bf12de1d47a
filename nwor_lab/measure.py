# SPDX-License-Identifier: Apache-2.0
"""`nwor measure results/gpu`: measure on GPUs what `data/recorded/` holds of them; `--record` keeps it.

Not `gpu_cow`, an older run, nor what notebooks leave: `kernel_check` of 02, `gpu_claims` of 04.

Each measurement is one command with a log of its own, on a GPU of its own: those of one rank run beside each other,
as many as there are GPUs, each on its share of the cores, and those of two ranks after them, alone. One whose table is
there already is skipped, so that an interrupted run goes on; one that fails does not stop the others, and the end
fails. With fewer than two GPUs what needs two is left out, and said. A bench of whole steps takes four to eight
minutes on an H200.

`--record` writes no table of which a part is missing: what is recorded stays as it is.
"""

import argparse
import contextlib
import json
import os
import queue
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pandas as pd

from nwor_lab import paths, results
from nwor_lab.experiments import endtoend

GPU = ["--no-enforce-eager", "--max-num-batched-tokens", "2048", "--k", "4", "--batch", "4", "--num-blocks", "256"]
AUDIT = ["nwor_lab.cli", "bench", *GPU, "--repeats", "0", "--name", "{name}", "--run-dir", "{out}"]


def steps(shape: str, k: int, modes: str, mib: int, *more: str) -> list[str]:
    """The bench of whole steps, each engine beside itself as vanilla; `mib` of cache for each, all up at once.

    Graphs are captured for these numbers of requests, in verify and draft steps; vLLM's own choice would leave out 64.
    """
    requests = (1, 2, 4, 8, 16, 32, 64)
    bound = str(endtoend.PARITY_TOLERANCE_NATS["fp8" if "fp8" in more else "auto"])
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
    """Where the measurement `name` leaves its table."""
    return directory / name / f"{name}.parquet"


def measure(directory: Path, only: list[str]) -> list[str]:
    """Run what has left no table yet; returns the names of those that failed or were left out."""
    import torch

    gpus = torch.cuda.device_count()
    visible = (os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(gpus)))).split(",")[:gpus]
    wanted = [name for name in MEASUREMENTS if (not only or name in only) and not table(directory, name).exists()]
    of_two = [name for name in wanted if "--tp" in MEASUREMENTS[name]]
    waiting: queue.SimpleQueue[str] = queue.SimpleQueue()
    for name in wanted if gpus else ():
        if name not in of_two:
            waiting.put(name)
    done: dict[str, bool] = {}
    cores = sorted(os.sched_getaffinity(0))

    def lane(index: int) -> None:
        share = max(1, len(cores) // gpus)
        os.sched_setaffinity(0, cores[index * share % len(cores) :][:share])  # of this thread, and of what it starts
        with contextlib.suppress(queue.Empty):
            while True:
                name = waiting.get_nowait()
                done[name] = run(directory, name, [visible[index]])

    with ThreadPoolExecutor(max(1, gpus)) as pool:
        list(pool.map(lane, range(gpus)))
    done |= {name: run(directory, name, visible[:2]) for name in of_two if gpus >= 2}
    for name in wanted:
        if name not in done:
            print(f"{name}: left out, {1 + (name in of_two)} NVIDIA GPUs are needed", flush=True)
    return [name for name in wanted if not done.get(name)]


def run(directory: Path, name: str, gpus: list[str]) -> bool:
    """Whether the measurement `name`, on these GPUs, ended well; what it says goes to a log beside its table."""
    out = directory / name
    out.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", *(word.format(out=out, name=name) for word in MEASUREMENTS[name])]
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": ",".join(gpus)}
    with open(out / "log.txt", "w") as log:
        failed = subprocess.run(
            command, check=False, stdout=log, stderr=subprocess.STDOUT, env=environ, cwd=paths.ROOT
        ).returncode
    print(f"{name}: {'failed, see ' + str(out / 'log.txt') if failed else 'done'}", flush=True)
    return not failed


def manifest(directory: Path, name: str) -> Path:
    """Where the measurement `name` says how it was made, if it does."""
    return table(directory, name).with_suffix(".json")


def made_by(directory: Path, name: str) -> dict[str, Any]:
    """Of the measurement `name`: when, from which commit, with what and on what."""
    report = json.loads(manifest(directory, name).read_text())["provenance"]
    kept = {key: report[key] for key in ("time", "versions", "python", "gpu", "cpu")}
    git = report["git"]  # a sentence where git did not tell
    kept["git"] = git if isinstance(git, str) else {key: git[key] for key in ("commit", "clean")}
    return {"run_id": directory.name, "name": name, **kept}


def record(directory: Path, recorded: Path = paths.RECORDED) -> list[str]:
    """Write the tables of `data/recorded/` that are whole; returns the names of those that are not."""
    made = {name: [name] for name in ALONE}
    made |= {"gpu_audit": [*AUDITS, *AUDITS_OF_TWO], "gpu_steps": [*STEPS, *STEPS_OF_TWO]}
    made["gpu_audited_steps"] = list(AUDITED_STEPS)
    runs, kept = recorded / "gpu_runs.json", list[str]()
    known = {run["name"]: run for run in json.loads(runs.read_text())} if runs.exists() else {}
    for name, parts in made.items():
        if all(table(directory, part).exists() for part in parts):
            kept.append(name)
            known |= {part: made_by(directory, part) for part in parts if manifest(directory, part).exists()}
            read = [results.read_table(part, directory / part).assign(run_id=directory.name) for part in parts]
            tables = endtoend.gpu_tables(read) if name == "gpu_steps" else {name: pd.concat(read, ignore_index=True)}
            for one, frame in tables.items():
                results.write_table(recorded / f"{one}.parquet", frame)
    if kept:
        results.write_json(runs, list(known.values()))
    if "kernel_times" in kept:
        counters = results.read_table("kernel_counters", directory / "kernel_times")
        results.write_table(recorded / "kernel_counters.parquet", counters)
    return [name for name in made if name not in kept]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="folder for what is measured")
    parser.add_argument("--only", nargs="+", default=[], choices=list(MEASUREMENTS), metavar="NAME")
    parser.add_argument(
        "--record", action="store_true", help="keep what is whole in data/recorded, and measure nothing"
    )
    options = parser.parse_args(argv)
    directory = options.directory.resolve()
    missing = record(directory) if options.record else measure(directory, options.only)
    print(f"{'not recorded' if options.record else 'missing'}: {', '.join(missing) or 'none'}")
    return int(bool(missing))


if __name__ == "__main__":
    sys.exit(main())
