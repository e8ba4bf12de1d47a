# SPDX-License-Identifier: Apache-2.0
"""That the audit sees each fault of the catalogue for what it is."""

from nwor.settings import Settings
from nwor_lab.audit.auditor import AuditReport
from nwor_lab.engines.engine import EngineSpec
from nwor_lab.faults import injectable
from tests.engines import PROMPTS, Engines
from tests.nwor import faults


def check_each_is_seen(engines: Engines, spec: EngineSpec, mode: str, needs: str = "") -> None:
    """One engine, a call for each fault between two without: those are clean."""
    injected = {fault.name: fault for fault in injectable(mode, needs)}
    calls = [{"fault": fault} for fault in (faults.none, *injected.values(), faults.none)]
    outcome = engines.run(spec, Settings(mode=mode, audit=True), calls=calls, prompts=PROMPTS[:6], max_tokens=24)
    names = ["none", *injected, "none any more"]
    found = {name: AuditReport(**audited["audit"]).red for name, audited in zip(names, outcome.audits, strict=True)}
    wanted = {"none": set(), **{name: set(fault.red) for name, fault in injected.items()}, "none any more": set()}
    assert found == wanted and len(injected) > 0
    for audited in outcome.audits:
        assert audited["audit"]["steps"] > 5
        assert audited["audit"]["content_checked"] == audited["audit"]["kept_rows"] > 0
