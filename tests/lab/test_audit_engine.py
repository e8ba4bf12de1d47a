# SPDX-License-Identifier: Apache-2.0
"""The audit of real vLLM on a CPU: each fault injected into a mode makes its own fields red, and no others."""

from functools import partial

import pytest

from nwor.settings import Settings
from nwor_lab.audit.auditor import FAULTS
from tests.checkpoints import random_pair
from tests.devices import needs_fp8_cache
from tests.engines import PROMPTS, Engines
from tests.nwor import faults
from tests.nwor.on_cpu import spec_of

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

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


@pytest.fixture(scope="module")
def engines():
    made = Engines()
    yield made
    made.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("pair")
    random_pair(path, noise=0.3)
    return path


def red(audit: dict[str, int]) -> set[str]:
    return {fault for fault in FAULTS if audit[fault]}


@pytest.mark.parametrize(
    ("mode", "cache", "injected"),
    [
        ("stage", ("float32",), STAGE),
        ("cow", ("float32",), COW),
        pytest.param("cow", ("bfloat16", "fp8"), FP8, marks=needs_fp8_cache),
    ],
    ids=["stage", "cow", "cow fp8"],
)
def test_each_fault_is_seen_for_what_it_is(engines, model, mode, cache, injected):
    """One engine, a call for each fault between two without: those are clean."""
    each = {"none": (faults.none, set()), **injected, "none any more": (faults.none, set())}
    calls = [{"fault": fault} for fault, _ in each.values()]
    settings = Settings(mode=mode, audit=True)
    outcome = engines.run(spec_of(model, *cache), settings, calls=calls, prompts=PROMPTS[:6], max_tokens=24)
    assert not outcome.error, outcome.error
    found = {name: red(audited["audit"]) for name, audited in zip(each, outcome.audits, strict=True)}
    assert found == {name: fields for name, (_, fields) in each.items()}
    for audited in outcome.audits:
        assert audited["audit"]["steps"] > 5
        assert audited["audit"]["content_checked"] == audited["audit"]["kept_rows"] > 0


def test_vanilla_is_dirty_by_its_rejected_rows_alone(engines, model):
    outcome = engines.run(spec_of(model), Settings(audit=True), prompts=PROMPTS[:6], max_tokens=24)
    assert not outcome.error, outcome.error
    counters = outcome.generation.counters
    assert red(outcome.audit) == {DIRTY}
    assert outcome.audit["dirty_slots"] == 3 * (counters["draft_tokens"] - counters["accepted_tokens"]) > 0
    assert outcome.audit["content_checked"] == outcome.audit["kept_rows"] > 0


def test_rows_that_a_model_writes_itself_are_not_said_to_be_checked(engines, model):
    """Nothing passes vLLM's hook of the cache write, so there is nothing to compare with."""
    outcome = engines.run(spec_of(model), Settings(audit=True), faults.writes_its_own, prompts=PROMPTS[:2])
    assert not outcome.error, outcome.error
    assert outcome.audit["content_checked"] == 0 < outcome.audit["kept_rows"]
