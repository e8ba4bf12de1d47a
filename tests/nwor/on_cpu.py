# SPDX-License-Identifier: Apache-2.0
"""What the engines of these tests have in common on a CPU."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from nwor.vllm.context import ServedGroup
from nwor_lab.bench.parity import tolerance
from nwor_lab.engines.engine import EngineSpec
from tests.engines import Outcome

ROUNDING = tolerance("float32")


def spec_of(model: Path, dtype: str = "float32", kv_cache_dtype: str = "auto", **more) -> EngineSpec:
    return EngineSpec(
        model=str(model / "target"),
        draft=str(model / "eagle"),
        dtype=dtype,
        kv_cache_dtype=kv_cache_dtype,
        max_num_batched_tokens=96,
        num_blocks=64,
        **more,
    )


def planned_is_held(patch: pytest.MonkeyPatch) -> None:
    """The engine stops unless its managers hold just what was planned before it had caches."""
    from nwor.vllm import initialize

    serve = initialize.set_served_groups

    def checked(runner: Any, groups: Sequence[ServedGroup]) -> None:
        serve(runner, groups)
        if groups:
            planned = initialize.planned_bytes(runner, groups[0].manager.mode)
            assert planned == initialize.held_bytes(groups) > 0

    patch.setattr(initialize, "set_served_groups", checked)


def assert_clean_and_counted(
    outcome: Outcome, mode: str, layers: int = 3, width: int = 128, element: int = 4, checks: int = 20
) -> None:
    """A mode has served all along, left every byte as it must be, and counts as vLLM does.

    Each token is counted once, whatever the number of cache groups; operations and bytes count all layers.

    width: numbers of a slot in a layer, keys and values. element: bytes of one. checks: steps with drafts, at least.
    """
    rank, metrics, audit = outcome.ranks[0], outcome.metrics, outcome.audit
    counters = rank["counters"]
    assert (rank["mode"], rank["serving"], rank["target_layers"]) == (mode, mode, layers), rank["reason"]
    assert audit["dirty_layer_steps"] == audit["dirty_slots"] == audit["unwritten_rows"] == 0
    assert audit["wrong_rows"] == audit["stray_slots"] == 0
    assert audit["layer_steps"] == layers * audit["steps"] > 4 * checks
    assert audit["content_checked"] == audit["kept_rows"] > 0
    assert not any(outcome.counters_after_start.values()), "warm-up must not count"
    kept, rejected, staged = (counters[f"{fate}_tokens"] for fate in ("committed", "rejected", "staged"))
    assert counters["windows"] == metrics["spec_decode_num_drafts"]
    assert staged == metrics["spec_decode_num_draft_tokens"] == kept + rejected
    assert kept == metrics["spec_decode_num_accepted_tokens"] > 0 and rejected > 0
    assert counters["stage_operations"] == layers * staged, "layers x rows, once each"
    assert counters["fallbacks"] == counters["cancelled"] == 0
    row = layers * width * element
    copied = counters["bytes_written"] // row - counters["windows"] - staged
    assert counters["bytes_written"] % row == 0 and counters["bytes_avoided"] == -2 * copied * row, "both move more"
    logged, restored = counters["logged_steps"], counters["restored_tokens"]
    assert copied == kept + 2 * restored, "what logged steps reject is logged and restored"
    if mode == "cow" or rank["ways"] == ["logged"]:
        assert restored == rejected and counters["staged_steps"] == 0 < logged
    else:
        assert counters["staged_steps"] > 0 and restored < rejected and (logged > 0 or restored == 0)
    for name in counters:
        assert metrics[f"nwor_{name}"] == counters[name], f"the front end must see the worker's {name}"
    assert metrics["nwor_scheduler_checks"] > checks and metrics["nwor_scheduler_mismatches"] == 0
    assert metrics["nwor_acceptance_rate"] == kept / staged
    assert 0 < metrics["nwor_unique_tokens"] <= 8 * 4, "of the last step alone: 8 requests of 4 drafts at most"
