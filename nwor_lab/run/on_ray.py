# SPDX-License-Identifier: Apache-2.0
"""Run the points of a grid as Ray tasks. Nodes need Ray and this commit of the kit, and no shared disk."""

from __future__ import annotations

import hashlib
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from nwor_lab import paths
from nwor_lab.run import parameters, provenance, results

RunPoint = Callable[[Path, list[Path], parameters.Values], int]


def run(
    address: str,
    gpus: float,
    run_point: RunPoint,
    notebooks: list[Path],
    folders: dict[Path, parameters.Values],
    begin: Callable[[], object],
) -> int:
    """Run each point on the cluster at `address` and bring its folder back; return how many notebooks failed.

    Args:
        gpus: how many GPUs a point asks for.
        begin: called once the cluster has what is asked for.

    Raises:
        OSError: Ray is not installed, or no node has that many GPUs.
    """
    try:
        import ray
    except ImportError:
        raise OSError("no Ray: `pip install --no-deps -r requirements/ray.lock`, here and on every node") from None
    variables = {k: v for k, v in provenance.environment().items() if not k.startswith(("OMP_", "CUDA_"))}
    ray.init(address=address, log_to_driver=False, logging_level="WARNING", runtime_env={"env_vars": variables})
    try:
        most = max(node["Resources"].get("GPU", 0) for node in ray.nodes() if node["Alive"])
        if gpus > most:
            raise OSError(f"a point asks for {gpus:g} GPUs, and the largest node has {most:g}")
        begin()
        task, sources = ray.remote(max_retries=0)(_on_node), {path.name: path.read_bytes() for path in notebooks}
        running = {
            task.options(num_gpus=gpus).remote(run_point, folder.name, sources, values, code()): folder
            for folder, values in folders.items()
        }
        total = 0
        while running:
            (done,), _ = ray.wait(list(running))
            folder = running.pop(done)
            try:
                failed, files = ray.get(done)
            except ray.exceptions.RayError as error:
                failed, files = len(notebooks), {"logs/ray.log": str(error).encode()}
            for name, content in files.items():
                with results.whole_file(folder / name) as part:
                    part.write_bytes(content)
            print(f"{folder.name}: {failed or 'no'} notebooks failed", flush=True)
            for name, entry in results.read_manifest(folder)["notebooks"].items():
                if entry.get("error"):
                    print(f"  FAILED: {name}: {entry['error']}", file=sys.stderr, flush=True)
            total += failed
        return total
    finally:
        ray.shutdown()


def _on_node(
    run_point: RunPoint, name: str, sources: dict[str, bytes], values: parameters.Values, expected: str
) -> tuple[int, dict[str, bytes]]:
    """Run a point in a temporary folder; return how many notebooks failed, and what it left, by relative path."""
    if code() != expected:
        raise RuntimeError(f"the nwor in {paths.ROOT} on this node is not the one that asks: install the same commit")
    with tempfile.TemporaryDirectory() as folder:
        notebooks = [Path(folder) / file for file in sources]
        for notebook in notebooks:
            notebook.write_bytes(sources[notebook.name])
        made = Path(folder) / name
        failed = run_point(made, notebooks, values)
        return failed, {
            path.relative_to(made).as_posix(): path.read_bytes() for path in made.rglob("*") if path.is_file()
        }


def code() -> str:
    """Return the SHA-256 of both packages' Python sources, which every node must share."""
    digest = hashlib.sha256()
    for path in sorted(path for package in ("nwor", "nwor_lab") for path in (paths.ROOT / package).rglob("*.py")):
        digest.update(path.relative_to(paths.ROOT).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()
