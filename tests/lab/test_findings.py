# SPDX-License-Identifier: Apache-2.0
"""A run's page opens with what does not hold, and what its tables say."""

from pathlib import Path
from typing import Any

import pytest

from nwor_lab.run import findings, results


@pytest.fixture
def run(tmp_path: Path) -> results.Run:
    return results.Run(tmp_path / "run", "01_x", {})


def bench(run: results.Run, **dirty: int) -> None:
    rows: list[dict[str, Any]] = []
    for mode, count in dirty.items():
        rows += [{"mode": mode, "metric": "audit.dirty_layer_steps", "value": count}]
        rows += [{"mode": mode, "metric": "audit.layer_steps", "value": 110}]
    run.table("modes_tp1", rows, unit="1")


def test_what_does_not_hold_comes_before_what_tables_say(run: results.Run) -> None:
    run.claim("good", 1, 1, True)
    run.claim("bad", 1, 2, False)
    bench(run, vllm=90, stage=0, cow=0)
    run.table(
        "kernels", [{"metric": "bytes_compared", "value": 5e6}, {"metric": "bytes_differing", "value": 0}], unit="1"
    )
    failed, audited, operators = findings.sentences(run.directory)
    assert (
        failed.startswith("Does not hold: bad")
        and audited.index("90 of 110") < audited.index("cow in 0 of 110")
        and "0 of 5,000,000" in operators
    )


def test_steps_are_beside_vllm_never_patched(run: results.Run) -> None:
    step = {"vllm": 10.0, "off": 5.0, "cow": 11.0, "stage": 15.0}
    rows = [{"mode": mode, "metric": "step_ms", "value": ms, "repeat": n} for mode, ms in step.items() for n in (0, 1)]
    run.table("steps", rows, tp=1, unit="ms")
    (sentence,) = findings.sentences(run.directory)
    assert "1.10 under cow" in sentence and "1.50 under stage" in sentence


def test_the_price_says_from_which_batch_stage_is_dearer(run: results.Run) -> None:
    us = {1: -100.0, 128: -30.0, 256: 3.0, 512: 80.0}
    rows = [{"mode": "stage", "batch": batch, "metric": "price", "value": value} for batch, value in us.items()]
    run.table("price", rows, model="llama-2-7b", k=8, unit="us")
    (sentence,) = findings.sentences(run.directory)
    assert "1 to 128" in sentence and "from 256" in sentence
