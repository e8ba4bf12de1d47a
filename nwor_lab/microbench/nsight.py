# SPDX-License-Identifier: Apache-2.0
"""Hardware counters of kernels, read by Nsight Compute's command line from a Python module that launches them."""

import csv
import shutil
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from nwor_lab import results

BASE = {
    **{unit: ("byte", factor) for unit, factor in {"byte": 1, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9}.items()},
    **{unit: ("us", factor) for unit, factor in {"ns": 1e-3, "us": 1, "ms": 1e3}.items()},
    **{unit: (unit, 1) for unit in ("", "%", "warp")},
}
"""Units in which it may print a value: the one that stands for them here, and by what to multiply."""
FORBIDDEN = ("ERR_NVGPUCTRPERM", "LibraryNotLoaded")
"""What it prints where a user, or a sandbox, may not read counters."""


class Unreadable(results.Unmeasurable):
    """Counters cannot be read on this machine."""


def read(
    module: str, *arguments: str, metrics: Sequence[str], kernels: str, options: Sequence[str] = (), ncu: str = "ncu"
) -> list[dict[str, Any]]:
    """Run `python -m module arguments` under the profiler and read `metrics` of each launch.

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
    if not shutil.which(ncu):
        raise Unreadable(f"no {ncu} on the PATH: install Nsight Compute, or say where it is")
    command = [ncu, "--csv", "--clock-control", "none", "--kernel-name-base", "demangled"]
    command += ["--kernel-name", f"regex:{kernels}", *options]
    command += ["--metrics", ",".join(metrics), sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        said = done.stdout + done.stderr
        error = Unreadable if any(reason in said for reason in FORBIDDEN) else RuntimeError
        raise error(f"{ncu} failed with {done.returncode}: {said[-2000:]}")
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
