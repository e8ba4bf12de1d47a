# SPDX-License-Identifier: Apache-2.0
"""Run the points of a grid as Ray tasks. Nodes have Ray, and see this checkout and its results by the same path."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from nwor_lab.run import parameters, provenance

RunPoint = Callable[[Path, list[Path], parameters.Values], int]


def connect(address: str, gpus: float) -> None:
    """Join the cluster at `address`, of whose nodes one must have as many GPUs as a point asks for.

    Raises:
        OSError: Ray is not installed, or no node has that many GPUs.
    """
    try:
        import ray
    except ImportError:
        raise OSError("no Ray: `pip install --no-deps -r requirements/ray.lock`, here and on every node") from None
    variables = {k: v for k, v in provenance.environment().items() if not k.startswith(("OMP_", "CUDA_"))}
    ray.init(address=address, logging_level="WARNING", runtime_env={"env_vars": variables})
    most = max(node["Resources"].get("GPU", 0) for node in ray.nodes() if node["Alive"])
    if gpus > most:
        ray.shutdown()
        raise OSError(f"a point asks for {gpus:g} GPUs, and the largest node has {most:g}")


def run(gpus: float, run_point: RunPoint, notebooks: list[Path], folders: dict[Path, parameters.Values]) -> int:
    """Run each point on the cluster that was joined, and leave it; return how many notebooks failed."""
    import ray

    try:
        task, total = ray.remote(max_retries=0, num_gpus=gpus)(lambda *point: run_point(*point)), 0
        running = {task.remote(folder, notebooks, values): folder for folder, values in folders.items()}
        while running:
            (done,), _ = ray.wait(list(running))
            folder = running.pop(done)
            try:
                failed = ray.get(done)
            except ray.exceptions.RayError as error:
                failed = len(notebooks)
                print(f"  FAILED: {folder.name}: {error}", file=sys.stderr)
            print(f"{folder.name}: {failed or 'no'} notebooks failed", flush=True)
            total += failed
        return total
    finally:
        ray.shutdown()
