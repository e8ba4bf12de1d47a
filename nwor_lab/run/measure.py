# SPDX-License-Identifier: Apache-2.0
"""The commands that measure on a GPU what `data/recorded` holds; run them, and record what they left.

    nwor measure --list                   the commands, sized to this machine's GPU, each with the table it makes
    nwor measure results/gpu              run them one after another, each into a folder of its own, with its log
    nwor measure --record results/gpu     copy what is finished to data/recorded

What has a whole table already is not run again. One that fails does not stop the others.
Recorded is only what was measured from a clean commit, with as many repeats as were asked for; else nothing is, and one
line says why. On a machine that was sent the files without their history, NWOR_COMMIT="<sha> clean" names the commit.
`--record` also takes a whole reproduction run (`results/<run>`) and a run of `nwor soak`.
"""

from __future__ import annotations

import json
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Annotated, Any

import pandas as pd
from tyro.conf import FlagCreatePairsOff, Positional, arg

from nwor_lab import command_line, machine, paths, progress
from nwor_lab.run import provenance, results

NWOR = "nwor_lab.run.cli"
# Graphs are captured for every batch's verify and draft steps; vLLM's own would end below 64 requests.
STEPS = (
    f"{NWOR} bench --shape {{shape}} --modes {{modes}} --k 8,3 --acceptance-length 3 --kv-cache-memory {{cache}} "
    "--cudagraph-capture-sizes 1,2,4,8,9,16,18,32,36,64,72,128,144,256,288,576 --batch 64 --batches 1,4,16,64 "
    "--random-prompts 512,2048,8192 --num-prompts 8 --max-tokens 96 --max-model-len 8448 "
    "--max-num-batched-tokens 8192 --prefix-caching --no-enforce-eager --no-audit --repeats 5 --profile"
)
MEASUREMENTS = {
    "gpu_audit": f"{NWOR} bench --modes off,cow,stage --k 4 --batch 4 --num-prompts 128 --max-tokens 256 --repeats 0 "
    "--num-blocks 256 --max-num-batched-tokens 2048 --kv-cache-memory 2048 --no-enforce-eager",
    "kernel_times": "nwor_lab.gpu.operators --repeats 30",
    "attention": "nwor_lab.gpu.attention --repeats 30",
    "gpu_cliff": "nwor_lab.gpu.attention --repeats 30 --heads 32x8,32x32 --contexts 2048,8192,32768 --batches 1,4,16 "
    "--k 8,3 --caches bf16",
    "gpu_long": "nwor_lab.gpu.attention --repeats 30 --heads 32x8,16x4 --contexts 32768,131072 --batches 1,4 --k 8,3 "
    "--caches bf16,fp8",
    "gpu_decode": STEPS.replace("{shape}", "llama-2-7b-8kv"),
    "gpu_direct": STEPS.replace("{shape}", "llama-2-7b"),
    # Attention that does not split a window's context, as an A100 has it; forced here.
    "gpu_cliff_steps_k8": f"{NWOR} bench --shape llama-2-7b-8kv --modes {{modes}} --k 8 --acceptance-length 3 "
    "--kv-cache-memory {cache} --attention-backend FLASH_ATTN --flash-attn-version 2 "
    "--cudagraph-capture-sizes 1,2,4,8,9,16,18,36,72,144 --batch 16 --batches 1,4,16 "
    "--random-prompts 2048,8192,32768 --num-prompts 4 --max-tokens 48 --max-model-len 33024 "
    "--max-num-batched-tokens 8192 --prefix-caching --no-enforce-eager --no-audit --repeats 5",
    "gpu_pair": f"{NWOR} bench --modes off,cow,direct,stage --k 8 --batch 16 --num-prompts 64 --max-tokens 512 "
    "--max-model-len 1024 --max-num-batched-tokens 4096 --kv-cache-memory 1024 --no-enforce-eager --no-audit "
    "--repeats 10",
    "gpu_acceptance": f"{NWOR} acceptance",
    "gpu_serving": f"{NWOR} serving --model pair@llama-2-7b-8kv --modes off,stage,cow --k 4 --dtype bfloat16 "
    "--concurrency 1,16,64 --rates 8,20 --requests 40,400,640,64,160 --answer 128 --shortest 60 --longest 1500 "
    "--orders 4 --kv-cache-memory 6144 --warmup 64",
    "gpu_audit_serving": f"{NWOR} serving --model pair@llama-2-7b-8kv --modes off --audit sample=16 --k 4 "
    "--dtype bfloat16 --concurrency 1,16,64 --requests 40,400,640 --answer 128 --shortest 60 --longest 1500 "
    "--orders 4 --kv-cache-memory 6144 --warmup 64",
}
"""Words after `python -m`, by the name of the folder and table; `{cache}` is the MiB of cache for each engine of
Llama-2-7B's size, which are all up at once, and `{modes}` those that the GPU's memory holds."""
MADE_BY = "measured.json"
"""What the folder of a command says of the commit, the machine and the time."""

# -- measuring ---------------------------------------------------------------------------------------------------------

ENGINE_GIB, LEAST_CACHE_GIB = 17.0, 2.0
"""What an engine of Llama-2-7B's size takes beside its cache: weights, head, graphs, workspace; and a useful cache."""


def command_of(name: str, out: Path, gib: float) -> list[str]:
    """The words after `python -m`, sized to a GPU of so many GiB; none where its engines do not fit.

    Three engines of Llama-2-7B's size, and where there is room for one more, `cow` is timed too.
    """
    command = MEASUREMENTS[name]
    caches = {engines: (0.92 * gib - engines * ENGINE_GIB) / engines for engines in (3, 4)}
    engines = 4 if caches[4] > 4 * LEAST_CACHE_GIB else 3
    if "{cache}" in command and caches[engines] < LEAST_CACHE_GIB:
        return []
    modes = "vllm,direct,cow,stage" if engines == 4 else "vllm,direct,stage"
    words = shlex.split(command.format(modes=modes, cache=int(1024 * caches[engines])))
    named = [] if words[0] == "nwor_lab.gpu.operators" else ["--name", name]
    return [*words, *named, "--run-dir" if words[0] == NWOR else "--out", str(out)]


def gpu_gib() -> float:
    """Memory of this machine's first GPU in GiB, an H200's where there is none."""
    import torch

    return torch.cuda.get_device_properties(0).total_memory / 2**30 if torch.cuda.is_available() else 139.0


def measure(directory: Path, names: Iterable[str]) -> list[str]:
    """Run what has no whole table in `directory` yet, one after another; return the names of what has none then."""
    missing, gib = [], gpu_gib()
    for name in names:
        out = directory / name
        table = out / f"{name}.parquet"
        if is_whole(table):
            continue
        if not (words := command_of(name, out, gib)):
            print(f"{name}: left out, three engines of Llama-2-7B's size do not fit {gib:.0f} GiB", flush=True)
            continue
        results.write_json(out / MADE_BY, results.provenance({"command": words}))
        print(f"{name}: {shlex.join(['python', '-m', *words])}", flush=True)
        with progress.moving(), open(out / "log.txt", "w") as log:
            progress.say(f"{name}, log: {out / 'log.txt'}", plain=False)
            command = [sys.executable, "-m", *words]
            status = run_one(command, log)
        if status:
            print(f"{name}: exit status {status}, see {out / 'log.txt'}", flush=True)
        missing += [] if is_whole(table) else [name]
    return missing


def is_whole(table: Path) -> bool:
    """Whether this table is there, of a command that came to its end."""
    return table.exists() and not interrupted(table)


def interrupted(table: Path) -> bool:
    """Whether the command that left this table was stopped or failed, by its report; it kept what was whole by then."""
    report = table.with_suffix(".json")
    return report.exists() and "interrupted" in json.loads(report.read_text())


def run_one(command: list[str], log: IO[str]) -> int:
    """Run a command and return its exit status. Ctrl-C reaches it once, and it has the time that it takes to keep what
    is whole and to end its servers.
    """
    with subprocess.Popen(
        [*machine.ENDING_WITH_PARENT, *command],
        stdout=log,
        stderr=subprocess.STDOUT,
        cwd=paths.ROOT,
        start_new_session=True,
    ) as child:
        try:
            return child.wait()
        except KeyboardInterrupt:
            child.send_signal(signal.SIGINT)
            child.wait()
            raise


# -- recording ---------------------------------------------------------------------------------------------------------

REPRODUCED = ("reference", "acceptance", "traffic", "steps")
"""Tables that a reproduction run makes."""
BUILD = {"kernels": "kernels", "attention": "nwor/attention"}
"""Folders whose trees in git say with which build a row was measured; in a setting one kind of GPU is of one build."""


def record(run: Path, recorded: Path = paths.RECORDED) -> list[str]:
    """Copy what a folder holds to `recorded`, tables whole or not at all; return the names of those that were written.

    Rows of other kinds of GPU (column `gpu`) stay in them.

    Raises:
        ValueError: there is nothing to record, or something that is not to be recorded; then nothing is written.
        OSError: a file cannot be read.
    """
    if not run.is_dir():
        raise ValueError(f"no folder {run}")
    if (run / "manifest.json").exists():
        return record_run(run, recorded)
    if (run / "soak.json").exists():
        return record_soak(run, recorded)
    tables, path = dict[str, pd.DataFrame](), recorded / "gpu_runs.json"
    runs = json.loads(path.read_text()) if path.exists() else []
    for name in (name for name in MEASUREMENTS if (run / name / f"{name}.parquet").exists()):
        made = json.loads((run / name / MADE_BY).read_text())
        kept = checked(name, made)
        build, gpu = build_of(kept["git"]["commit"]), kind_of(kept["gpu"])
        frame = results.read_table(name, run / name).assign(run_id=run.name, build=build, gpu=gpu)
        command = made["parameters"]["command"]
        asked = [command[at + 1] for at, word in enumerate(command) if word in ("--repeats", "--orders")]
        least = int(asked[0]) if asked else 0
        if frame["repeat"].nunique() < least:
            raise ValueError(f"{name} is not recorded: {frame['repeat'].nunique()} repeats where {least} are needed")
        if interrupted(run / name / f"{name}.parquet"):
            raise ValueError(f"{name} is not recorded: it was interrupted")
        before = recorded / f"{name}.parquet"
        others = pd.read_parquet(before) if before.exists() else frame[:0]
        others = others[others["gpu"] != gpu] if "gpu" in others else frame[:0]  # none of an older form
        tables[name] = pd.concat([others, frame], ignore_index=True) if len(others) else frame
        runs = [other for other in runs if other["table"] != name or kind_of(other["gpu"]) not in {gpu, ""}]
        runs.append({"table": name, "run_id": run.name, "build": build, **kept})
    if not tables:
        raise ValueError(f"no finished measurement is in {run}: `nwor measure {run}` makes them")
    for name, table in tables.items():
        results.write_table(recorded / f"{name}.parquet", table)
    results.write_json(path, runs)
    return sorted(tables)


def build_of(commit: str) -> str:
    """The build of a commit of this checkout, such as `kernels:1a2b3c4d attention:5e6f7a8b`.

    Raises:
        ValueError: git here does not know the commit.
    """
    command = ["git", "rev-parse", *(f"{commit}:{folder}" for folder in BUILD.values())]
    done = subprocess.run(command, cwd=paths.ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ValueError(f"git does not know commit {commit} here: record in the checkout that has it")
    return " ".join(f"{name}:{tree[:8]}" for name, tree in zip(BUILD, done.stdout.split(), strict=True))


def kind_of(gpu: Any) -> str:
    """The kind of the first GPU of a provenance, such as `H200`; empty where it has none."""
    return gpu[0].split(",")[0].removeprefix("NVIDIA ") if gpu and isinstance(gpu, list) else ""


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


def record_soak(run: Path, recorded: Path) -> list[str]:
    """Copy what a soak counted."""
    made = checked("soak", json.loads((run / "soak.json").read_text())["provenance"])
    name = "gpu_soak" if isinstance(made["gpu"], list) else "soak"  # else why there is none
    results.write_table(recorded / f"{name}.parquet", results.read_table("soak", run))
    results.write_json(recorded / f"{name}.json", made)
    return [name]


def record_run(run: Path, recorded: Path) -> list[str]:
    """Copy a whole reproduction run's small tables, claims, animation and manifest; of one on GPUs what it compared."""
    manifest = results.read_manifest(run)
    every = {name: entry["provenance"] for name, entry in manifest["notebooks"].items() if entry["state"] == "done"}
    if unfinished := set(manifest["notebooks"]) - set(every):
        raise ValueError(f"{run} is not whole: {', '.join(sorted(unfinished))}; go on with `nwor reproduce --resume`")
    for name, made in every.items():
        checked(name, made)
        made["parameters"].pop("run_dir", None)
    if any(isinstance(made["gpu"], list) for made in every.values()):
        compared = results.read_table("kernels", run)
        results.write_table(recorded / "kernel_check.parquet", compared[compared["device"] == "cuda"])
        return ["kernel_check"]
    tables = {name: results.read_table(name, run) for name in (*REPRODUCED, "claims")}
    for name, table in tables.items():
        results.write_table(recorded / f"{name}.parquet", table)
    for picture in ("tour_pages.gif", "tour_pages.png"):
        shutil.copy(run / "figures" / picture, recorded)
    results.write_json(recorded / "manifest.json", manifest)
    return sorted(tables)


@dataclass(frozen=True)
class Measure:
    directory: Positional[Path] = paths.RESULTS / "gpu"
    """folder for what is measured"""
    only: Annotated[tuple[str, ...], arg(help=f"of {', '.join(MEASUREMENTS)}; none: all")] = ()
    list: FlagCreatePairsOff[bool] = False
    """show the commands, and measure nothing"""
    record: Annotated[Path | None, arg(metavar="RUN", help_behavior_hint="")] = None
    """record this folder, and measure nothing"""


def main(argv: list[str] | None = None) -> int:
    """The command; 1 where a table is missing at its end, 2 for wrong input and what is not to be recorded."""
    try:
        asked = command_line.parse(Measure, argv, "nwor measure", __doc__ or "")
        command_line.check_names("--only", asked.only, MEASUREMENTS)
        names = asked.only or MEASUREMENTS
        if asked.list:
            for name in names:
                words = command_of(name, asked.directory / name, gpu_gib())
                print(f"# {name}{'' if words else ': does not fit this GPU'}")
                print(*([shlex.join(["python", "-m", *words])] if words else []), sep="\n", end="\n\n")
            return 0
        if asked.record:
            print(f"recorded: {', '.join(record(asked.record.resolve()))}")
            return 0
        if machine.on_cpu():
            raise ValueError("no NVIDIA GPU here; --list says what would be measured on one")
        if why := unrecordable(provenance.probe(provenance.git)):
            print(f"what is measured now cannot be recorded: {why}", flush=True)
        missing = measure(results.check_folder(asked.directory).resolve(), names)
    except (OSError, ValueError) as error:
        return command_line.fail("nwor measure", error)
    print(f"missing: {', '.join(missing) or 'none'}")
    return int(bool(missing))


if __name__ == "__main__":
    sys.exit(main())
