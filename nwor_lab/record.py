# SPDX-License-Identifier: Apache-2.0
"""`nwor record results/<run>`: keep a run's small tables in `data/recorded/`, with where they came from.

Copies the tables the paper figures and the README are made of, all claims and the first figure. The manifest keeps
parameters, versions, git state, CPU, GPU and hashes, and leaves out commands, folders and the kernel's name, which are
of one machine.
"""

import argparse
import shutil
from pathlib import Path

from nwor_lab import paths, results
from nwor_lab.plots import paper

TABLES = (*paper.TABLES, "reference", "claims")


def record(run: Path) -> None:
    manifest = results.read_manifest(run)
    unfinished = [name for name, entry in manifest["notebooks"].items() if entry["state"] != "done"]
    if unfinished:
        raise SystemExit(f"{run} is not whole: {', '.join(unfinished)}; run `make reproduce` to its end")
    for name in TABLES:
        results.write_table(paths.RECORDED / f"{name}.parquet", results.read_table(name, run))
    shutil.copy(run / "figures" / "reference_policies.png", paths.RECORDED)
    for entry in manifest["notebooks"].values():
        for name in ("command", "platform"):
            entry["provenance"].pop(name, None)
        entry["provenance"]["parameters"].pop("run_dir", None)
    results.write_json(paths.RECORDED / "manifest.json", manifest)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="nwor record", description=__doc__)
    parser.add_argument("run", type=Path, help="folder of a whole run: results/<run>")
    record(parser.parse_args(argv).run.resolve())
