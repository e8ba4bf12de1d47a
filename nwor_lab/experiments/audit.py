# SPDX-License-Identifier: Apache-2.0
"""`nwor audit`: run each mode under the audit of the whole cache; fails when `cow` or `stage` leaves it dirty.

A bench that ends with its first pass. Takes the options of `nwor bench` but those of what it times or counts.
"""

from __future__ import annotations

from typing import Any

import pandas as pd

from nwor.settings import CLEAN
from nwor_lab.audit.auditor import AuditReport
from nwor_lab.experiments import bench
from nwor_lab.experiments.plan import Plan


def main(argv: list[str] | None = None) -> int:
    """The command; 0 when `cow` and `stage` are clean, 1 when one is dirty."""
    return bench.main(argv, "audit", __doc__, show_verdict, fixed=("audit", "count", "repeats"), repeats=0)


def show_verdict(frame: pd.DataFrame, plan: Plan, report: dict[str, Any]) -> int:
    """Print what the audit found on each rank, with the first dirty slots, and return how the command ends."""
    dirty = False
    for name, ranks in report["ranks"].items():
        for rank in ranks:
            found = AuditReport(**rank["audit"])
            print(f"{name:6} rank {rank['rank']}: {'clean' if found.clean else 'DIRTY'}  {found}")
            print("".join(f"       {example}\n" for example in rank["dirty_examples"]), end="")
            dirty |= rank["mode"] in CLEAN and not found.clean
    return int(dirty)
