# SPDX-License-Identifier: Apache-2.0
"""Faults of what a mode moves, by mode, and the fields of the audit that each makes red."""

from functools import partial

from nwor.settings import Settings
from nwor_lab.audit.auditor import FAULTS
from nwor_lab.engines.engine import EngineSpec
from tests.engines import PROMPTS, Engines
from tests.nwor import faults

DIRTY, UNWRITTEN, WRONG, STRAY, *_ = FAULTS
commit_with = partial(partial, faults.moved_with, "commit_all_layers")
restore_with = partial(partial, faults.moved_with, "restore_all_layers")
STAGE = {
    "bytes of another layer": (commit_with(faults.another_layer), {WRONG}),
    "bytes of another request": (commit_with(faults.another_request), {WRONG}),
    "bytes of another head": (commit_with(faults.another_head), {WRONG}),
    "keys without values": (faults.keys_without_values, {UNWRITTEN}),
    "one head only": (faults.one_head_only, {UNWRITTEN}),
    "one row too many": (commit_with(faults.one_less_rejected), {DIRTY}),
    "one row too few": (commit_with(faults.one_more_rejected), {UNWRITTEN}),
    "a commit in the next step": (faults.late_commit, {UNWRITTEN, DIRTY}),
    "a write between two steps": (faults.write_between_steps, {STRAY}),
    "logged: nothing": (faults.no_log, {DIRTY}),
    "logged: bytes of another layer": (restore_with(faults.another_layer), {DIRTY}),
    "logged: one row too many": (restore_with(faults.one_more_rejected), {UNWRITTEN}),
    "logged: one row too few": (restore_with(faults.one_less_rejected), {DIRTY}),
}
COW = {
    "a stale log entry": (faults.stale_log, {DIRTY}),
    "bytes of another layer": (restore_with(faults.another_layer), {DIRTY}),
    "bytes of another request": (restore_with(faults.another_request), {DIRTY}),
    "bytes of another head": (restore_with(faults.another_head), {DIRTY}),
    "one row too many": (restore_with(faults.one_more_rejected), {UNWRITTEN}),
    "one row too few": (restore_with(faults.one_less_rejected), {DIRTY}),
    "a write between two steps": (faults.write_between_steps, {STRAY}),
}
FP8 = {"a restore that requantises": (restore_with(faults.requantised), {DIRTY})}


def red(audit: dict[str, int]) -> set[str]:
    return {fault for fault in FAULTS if audit[fault]}


def check_each_is_seen(engines: Engines, spec: EngineSpec, mode: str, injected: dict) -> None:
    """One engine, a call for each fault between two without: those are clean."""
    each = {"none": (faults.none, set()), **injected, "none any more": (faults.none, set())}
    calls = [{"fault": fault} for fault, _ in each.values()]
    outcome = engines.run(spec, Settings(mode=mode, audit=True), calls=calls, prompts=PROMPTS[:6], max_tokens=24)
    found = {name: red(audited["audit"]) for name, audited in zip(each, outcome.audits, strict=True)}
    assert found == {name: fields for name, (_, fields) in each.items()}
    for audited in outcome.audits:
        assert audited["audit"]["steps"] > 5
        assert audited["audit"]["content_checked"] == audited["audit"]["kept_rows"] > 0
