# SPDX-License-Identifier: Apache-2.0
"""`python tools/record.py results/<run>`: keep a run's small tables in `data/recorded/`, with where they came from.

Copies the tables the paper figures and the README are made of, all claims and the first figure. The manifest keeps
parameters, versions, git state, CPU, GPU and hashes, and leaves out commands, folders and the kernel's name, which are
of one machine.
"""

import shutil
import sys
from pathlib import Path

from nwor import figures, paths, results

TABLES = (*figures.TABLES, "reference", "claims")


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


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    record(Path(sys.argv[1]).resolve())
