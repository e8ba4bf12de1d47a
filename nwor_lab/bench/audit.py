# SPDX-License-Identifier: Apache-2.0
"""Run each mode under the audit of the whole cache, byte by byte, and say what it left there.

    nwor audit --modes off,stage --model FOLDER --draft FOLDER

With ``VLLM_KV_AUDIT=full`` or ``sample=N`` in the environment the sampled auditor (`kv_audit/`) looks too, whose word
comes last. The exit status is 1 where `cow` or `stage` leaves the cache dirty, or it finds something.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pandas as pd

from nwor.settings import CLEAN, MODES
from nwor_lab.audit.auditor import FAULTS, AuditReport
from nwor_lab.bench import bench, options
from nwor_lab.bench.plan import Plan, Workload
from nwor_lab.engines.spec import EngineOptions

COLUMNS = ("layer_steps", "kept_rows", "dirty_slots", *FAULTS)


@dataclass(frozen=True, kw_only=True)
class Audit:
    modes: options.Modes = MODES
    """modes to audit, of off, cow, direct and stage, and vllm without the plugin"""
    ks: options.Ks = (4,)
    """draft lengths"""
    workload: Workload = field(default_factory=Workload)
    engine: EngineOptions = field(default_factory=EngineOptions)
    output: options.Output = field(default_factory=partial(options.Output, name="audit"))

    @property
    def plan(self) -> Plan:
        return Plan(modes=self.modes, ks=self.ks, repeats=0, **vars(self.workload))


def main(argv: list[str] | None = None) -> int:
    """The command; 0 when `cow` and `stage` are clean, 1 when one is dirty."""
    return bench.bench_command("audit", Audit, __doc__, argv, show_verdict)


def show_verdict(frame: pd.DataFrame, plan: Plan, report: dict[str, Any]) -> int:
    """Print what the audit counted on each rank, the first dirty slots of a mode that must leave none, and a sentence a
    mode; return how the command ends."""
    ranks = [(name, rank, AuditReport(**rank["audit"])) for name, each in report["ranks"].items() for rank in each]
    lines = [
        {"mode": name, "rank": rank["rank"], **{column: getattr(found, column) for column in COLUMNS}}
        for name, rank, found in ranks
    ]
    print(pd.DataFrame(lines).to_string(index=False))
    for name in report["ranks"]:
        print(verdict(name, [(rank, found) for mode, rank, found in ranks if mode == name]))
    dirty = any(rank["mode"] in CLEAN and not found.clean for _, rank, found in ranks)
    for name, each in report["ranks"].items():
        if sampled := [rank["sampled"] for rank in each if rank.get("sampled")]:
            from vllm_kv_audit import verdict as sampled_verdict

            print(f"{name}: {sampled_verdict(sampled)}")
            dirty |= any(one["findings"] for one in sampled)
    return int(dirty)


def verdict(name: str, ranks: list[tuple[dict[str, Any], AuditReport]]) -> str:
    """What the audit says of a mode, in a sentence, and beneath it the first faults where there should be none."""
    steps = sum(found.layer_steps for _, found in ranks)
    seen = {fault: sum(getattr(found, fault) for _, found in ranks) for fault in FAULTS}
    words = ", ".join(f"{count:,} {fault.replace('_', ' ')}" for fault, count in seen.items() if count)
    if not all(found.steps for _, found in ranks):
        return f"{name}: NOT AUDITED on every rank."
    if not words:
        return f"{name}: clean, no byte outside the kept rows changed in {steps:,} layer-steps."
    if ranks[0][0]["mode"] not in CLEAN:
        return f"{name}: {words}, of {steps:,} layer-steps; as expected, it leaves rejected rows in the pages."
    examples = [f"       {example}" for rank, _ in ranks for example in rank["dirty_examples"]]
    return "\n".join([f"{name}: DIRTY, and must not be: {words}, of {steps:,} layer-steps.", *examples])
