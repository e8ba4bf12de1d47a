# SPDX-License-Identifier: Apache-2.0
"""Hardware counters of kernels, read by Nsight Compute; those of the verify attention and of vLLM's FlashAttention 3.

    python -m nwor_lab.microbench.counters --out results/counters

Needs a GPU, vLLM and Nsight Compute. Each kernel runs with its caches flushed, as the profiler does by itself.
"""

from __future__ import annotations

import csv
import itertools
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import pandas as pd
import torch

from nwor_lab import results
from nwor_lab.microbench import timer
from nwor_lab.microbench.inputs import KEYS, AttentionCase, AttentionShape

METRICS = {
    "gpu__time_duration.sum": "time",
    "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed": "dram",
    "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed": "tensor",
    "sm__issue_active.avg.pct_of_peak_sustained_elapsed": "issue",
    "sm__warps_active.avg.per_cycle_active": "warps",
    "launch__grid_size": "programs",
}
"""Names in the table: us, % of the peak of memory, tensor cores and issue slots, warps that a multiprocessor holds."""
KERNELS = {"verify_windows": "nwor", "reshape_and_cache": "write", "FlashAttnFwdCombine": "combine", "Flash": "flash"}
"""Names of kernels in the table, by the first pattern that the kernel name matches."""


BASE = {
    **{unit: ("byte", factor) for unit, factor in {"byte": 1, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9}.items()},
    **{unit: ("us", factor) for unit, factor in {"ns": 1e-3, "us": 1, "ms": 1e3}.items()},
    **{unit: (unit, 1) for unit in ("", "%", "warp")},
}
"""Units in which `ncu` may print a value: the one used here instead, and the factor."""
FORBIDDEN = ("ERR_NVGPUCTRPERM", "LibraryNotLoaded")
"""What `ncu` prints where a user, or a sandbox, may not read counters."""


class Unreadable(results.Unmeasurable):
    """Counters cannot be read on this machine."""


def read(code: str, metrics: Sequence[str], kernels: str, options: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Run `python -c code` under the profiler and read `metrics` of each launch.

    Clocks are left as they are.

    Args:
        kernels: regular expression of the kernels' whole names, template arguments included.
        options: further ones of `ncu`.

    Returns:
        A dict a launch, in order: `kernel`, its name, and each metric as (value, unit), bytes in ``byte`` and times in
        ``us``.

    Raises:
        Unreadable: there is no such profiler, or none that may read counters.
        RuntimeError: it failed, or a launch lacks a metric or has it in an unknown unit.
    """
    if not shutil.which("ncu"):
        raise Unreadable("no ncu on the PATH: install Nsight Compute, or add its folder there")
    command = ["ncu", "--csv", "--clock-control", "none", "--kernel-name-base", "demangled"]
    command += ["--kernel-name", f"regex:{kernels}", *options]
    command += ["--metrics", ",".join(metrics), sys.executable, "-c", code]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        said = done.stdout + done.stderr
        error = Unreadable if any(reason in said for reason in FORBIDDEN) else RuntimeError
        raise error(f"ncu failed with {done.returncode}: {said[-2000:]}")
    return parse(done.stdout, metrics)


def parse(text: str, metrics: Sequence[str]) -> list[dict[str, Any]]:
    """Launches from what `ncu --csv` prints: a line a launch and metric. Returns and raises as `read`."""
    lines = text.splitlines()
    begin = next((number for number, line in enumerate(lines) if line.startswith('"ID"')), len(lines))
    launches: dict[int, dict[str, Any]] = {}
    for line in csv.DictReader(lines[begin:]):
        launch = launches.setdefault(int(line["ID"]), {"kernel": line["Kernel Name"]})
        if line["Metric Name"] in metrics:
            if line["Metric Unit"] not in BASE:
                raise RuntimeError(f"{line['Metric Name']} is in {line['Metric Unit']}, not in {', '.join(BASE)}")
            unit, factor = BASE[line["Metric Unit"]]
            launch[line["Metric Name"]] = float(line["Metric Value"].replace(",", "")) * factor, unit
    for number, launch in launches.items():
        if missing := set(metrics) - launch.keys():
            raise RuntimeError(f"the profiler gave no {', '.join(sorted(missing))} of launch {number}")
    return [launches[number] for number in sorted(launches)]


# -- the attention -------------------------------------------------------------------------------------------------


def shapes() -> list[AttentionShape]:
    """Short and long contexts from few programs to many, and where the kernel loses most: an fp8 cache and 8 KV heads.

    64 requests of 8k on 32 KV heads, 9 GB, are left out: the profiler saves and restores memory around every pass.
    """
    every = [AttentionShape(32, *rest) for rest in itertools.product((32, 8), (1, 16, 64), (512, 8192))]
    few = [AttentionShape(32, 8, 1, 512, "fp8"), AttentionShape(32, 8, 16, 8192, "fp8")]
    return [shape for shape in every if (shape.kv_heads, shape.batch, shape.context) != (32, 64, 8192)] + few


def launch() -> None:
    """Ours and vLLM's two or three kernels of every shape, once each after a call that is not seen."""
    for shape in shapes():
        case = AttentionCase(shape)
        for call in (case.nwor(), case.flash(32)):
            call()
            torch.cuda.synchronize()
            torch.cuda.cudart().cudaProfilerStart()
            call()
            torch.cuda.synchronize()
            torch.cuda.cudart().cudaProfilerStop()
        del case, call


def measure() -> pd.DataFrame:
    """One row a shape, kernel (`op`) and metric.

    Raises:
        Unreadable: counters cannot be read here.
        RuntimeError: the profiler saw other launches than the shapes make.
    """
    run, late = "from nwor_lab.microbench import counters; counters.launch()", ("--profile-from-start", "off")
    return table(read(run, metrics=list(METRICS), kernels="|".join(KERNELS), options=late))


def table(seen: list[dict[str, Any]]) -> pd.DataFrame:
    """Rows of the launches as `read` gives them, in the order of `shapes`; each shape's first is ours."""
    every, found, at = shapes(), [], -1
    for launched in seen:
        op = next(op for pattern, op in KERNELS.items() if re.search(pattern, launched["kernel"]))
        at += op == "nwor"
        shape = asdict(every[at]) if 0 <= at < len(every) else {}
        for metric, name in METRICS.items():
            value, unit = launched[metric]
            found.append({**shape, "op": op, "metric": name, "value": value, "unit": unit or "count"})
    frame = pd.DataFrame(found, columns=[*KEYS, "op", "metric", "value", "unit"])
    each = frame[frame["metric"] == "time"].groupby(KEYS)["op"].agg(sorted)
    whole = each.map(lambda ops: [op for op in ops if op != "combine"] == ["flash", "nwor", "write"])
    if len(whole) != len(every) or not whole.all() or frame["heads"].isna().any():
        wanted = f"this kit's kernel, vLLM's write and FlashAttention of {len(every)} shapes"
        raise RuntimeError(f"the profiler saw {len(seen)} launches, which are not {wanted}")
    return results.tidy(frame, mode="", model="")


def shown(frame: pd.DataFrame) -> pd.DataFrame:
    """One line a shape and kernel, one column a metric; the writes, which are vLLM's own, are left out."""
    return frame[frame["op"] != "write"].pivot_table(
        index=["cache", "kv_heads", "context", "batch", "op"], columns="metric", values="value", observed=True
    )[list(METRICS.values())]


def main(argv: list[str] | None = None) -> int:
    found, frame = timer.options("counters", __doc__, argv), measure()
    timer.write(found, "attention_counters", frame)
    print(shown(frame).round(1).to_string())
    return 0


if __name__ == "__main__":
    sys.exit(main())
