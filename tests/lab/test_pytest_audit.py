# SPDX-License-Identifier: Apache-2.0
"""The fixture that holds engines to the audit, what passes, and what must fail."""

from dataclasses import asdict

import pytest

from nwor_lab import paths
from nwor_lab.audit.auditor import AuditReport
from nwor_lab.engines.engine import EngineSpec
from nwor_lab.pytest_plugin import audited_engine, require_clean  # noqa: F401  (the fixture)


def rank(**counts: int) -> dict:
    return {"rank": 0, "audit": asdict(AuditReport(**counts)), "dirty_examples": ["step 1, layer 0, slot 3"]}


def test_clean_and_vanilla_pass():
    require_clean("stage", [rank(steps=3, layer_steps=9, kept_rows=9)])
    require_clean("off", [rank(steps=3, layer_steps=9, dirty_layer_steps=4)])


@pytest.mark.parametrize(
    ("mode", "counts", "says"),
    [
        ("cow", {"steps": 3, "layer_steps": 9, "dirty_layer_steps": 1}, "left the cache dirty.*slot 3"),
        ("stage", {"steps": 3, "layer_steps": 9, "unwritten_rows": 1}, "left the cache dirty"),
        ("stage", {"steps": 3, "layer_steps": 9, "wrong_rows": 1}, "left the cache dirty"),
        ("off", {"steps": 3, "layer_steps": 9, "dirty_layer_steps": 4, "stray_slots": 1}, "left the cache dirty"),
        ("stage", {}, "ran no audited step"),
        ("off", {}, "ran no audited step"),
    ],
)
def test_dirt_and_no_proof_fail(mode, counts, says):
    clean = rank(steps=3, layer_steps=9)
    with pytest.raises(pytest.fail.Exception, match=says):
        require_clean(mode, [clean, rank(**counts)])


@pytest.mark.engine
@pytest.mark.timeout(300)
def test_an_engine_under_the_fixture(audited_engine):  # noqa: F811
    spec = EngineSpec(str(paths.PAIR_TARGET), str(paths.PAIR_EAGLE), num_blocks=64)
    engine = audited_engine(spec, "cow")
    engine.generate([[5, 6, 7, 8] * 8], 24)
    assert engine.report()[0]["audit"]["steps"] > 3
