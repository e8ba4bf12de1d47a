# SPDX-License-Identifier: Apache-2.0
"""Hardware counters of kernels, read by Nsight Compute; those of the verify attention and of vLLM's FlashAttention 3.

    python -m nwor_lab.gpu.counters --out results/counters

Needs a GPU, vLLM and Nsight Compute. Each kernel runs with its caches flushed, as the profiler does by itself.
"""

from __future__ import annotations

import io
import itertools
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict

import pandas as pd
import torch

from nwor_lab.gpu import timer
from nwor_lab.gpu.attention_case import AttentionCase, AttentionShape
from nwor_lab.run import results

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
LAUNCHES = {("nwor", "write", "flash"), ("nwor", "write", "flash", "combine")}
"""Those of a shape: FlashAttention combines where it has split the prefix."""

TO_BASE = {
    "Kbyte": ("byte", 1e3),
    "Mbyte": ("byte", 1e6),
    "Gbyte": ("byte", 1e9),
    "ns": ("us", 1e-3),
    "ms": ("us", 1e3),
}
"""Units in which `ncu` may print a value: the one used here instead, and the factor."""
FORBIDDEN = ("ERR_NVGPUCTRPERM", "LibraryNotLoaded")
"""What `ncu` prints where a user, or a sandbox, may not read counters."""


class Unreadable(results.Unmeasurable):
    """Counters cannot be read on this machine."""


def read(code: str, metrics: Sequence[str], kernels: str, options: Sequence[str] = ()) -> pd.DataFrame:
    """Run `python -c code` under the profiler and read `metrics` of each launch.

    Clocks are left as they are.

    Args:
        kernels: regular expression of the kernels' whole names, template arguments included.
        options: further ones of `ncu`.

    Returns:
        As `parse`.

    Raises:
        Unreadable: there is no such profiler, or none that may read counters.
        RuntimeError: it failed, or a launch lacks a metric.
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


def parse(text: str, metrics: Sequence[str]) -> pd.DataFrame:
    """What `ncu --csv` prints, which is a line a launch and metric: rows `launch`, `kernel`, `metric`, `value`, `unit`,
    bytes in ``byte`` and times in ``us``, in the order of launches.

    Raises:
        RuntimeError: a launch lacks a metric.
    """
    _, header, lines = text.partition('"ID"')
    names = {"ID": "launch", "Kernel Name": "kernel", "Metric Name": "metric", "Metric Value": "value"}
    if not header:
        return pd.DataFrame(columns=[*names.values(), "unit"])
    frame = pd.read_csv(io.StringIO(header + lines), thousands=",", keep_default_na=False)
    frame = frame.rename(columns=names | {"Metric Unit": "unit"})[[*names.values(), "unit"]]
    frame = frame[frame["metric"].isin(metrics)].reset_index(drop=True)
    base = frame["unit"].map(lambda unit: TO_BASE.get(unit, (unit, 1)))
    frame["value"] = frame["value"].astype(float) * base.str[1]
    frame["unit"] = base.str[0]
    if (frame.groupby("launch")["metric"].nunique() < len(metrics)).any():
        raise RuntimeError(f"the profiler did not give each of {', '.join(metrics)} of every launch")
    return frame


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
    run, late = "from nwor_lab.gpu import counters; counters.launch()", ("--profile-from-start", "off")
    return table(read(run, metrics=list(METRICS), kernels="|".join(KERNELS), options=late))


def table(seen: pd.DataFrame) -> pd.DataFrame:
    """Rows of the launches as `read` gives them, in the order of `shapes`."""
    every = shapes()
    op = seen["kernel"].map(lambda name: next(op for pattern, op in KERNELS.items() if re.search(pattern, name)))
    launches = seen.assign(op=op).drop_duplicates("launch").set_index("launch")["op"]
    number = (launches == "nwor").cumsum()
    each = launches.groupby(number).agg(tuple)
    if [*each.index] != [*range(1, len(every) + 1)] or not set(each) <= LAUNCHES:
        wanted = f"this kit's kernel, vLLM's write and FlashAttention of {len(every)} shapes"
        raise RuntimeError(f"the profiler saw {len(launches)} launches, which are not {wanted}")
    of_shape = pd.DataFrame([asdict(every[n - 1]) for n in seen["launch"].map(number)], index=seen.index)
    frame = of_shape.assign(op=op, metric=seen["metric"].map(METRICS), value=seen["value"])
    frame["unit"] = seen["unit"].replace("", "count")
    return results.tidy(frame, mode="", model="")


def shown(frame: pd.DataFrame) -> pd.DataFrame:
    """One line a shape and kernel, one column a metric; the writes, which are vLLM's own, are left out."""
    return frame[frame["op"] != "write"].pivot_table(
        index=["cache", "kv_heads", "context", "batch", "op"], columns="metric", values="value", observed=True
    )[list(METRICS.values())]


def main(argv: list[str] | None = None) -> int:
    asked, frame = timer.options(timer.Command, "counters", __doc__, argv), measure()
    timer.write(asked, "attention_counters", frame)
    print(shown(frame).round(1).to_string())
    return 0


if __name__ == "__main__":
    sys.exit(main())
