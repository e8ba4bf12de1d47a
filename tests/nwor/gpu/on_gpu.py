# SPDX-License-Identifier: Apache-2.0
"""What the engines of these tests have in common on a GPU."""

import importlib.util
from pathlib import Path

import pytest

from nwor.settings import Settings
from nwor_lab.bench.parity import compare
from nwor_lab.engines.engine import EngineSpec
from tests.checkpoints import GAPS
from tests.engines import Outcome

LAYERS = 3
# Both runners, all backends, FULL and PIECEWISE graphs (uniform decodes, and everything else) and none.
STACKS = {
    "v2 FA graphs": {"enforce_eager": False},
    "v2 FA graphs fp8": {"enforce_eager": False, "kv_cache_dtype": "fp8"},
    "v2 Triton graphs": {"enforce_eager": False, "attention_backend": "TRITON_ATTN"},
    "v2 Triton graphs fp8": {"enforce_eager": False, "attention_backend": "TRITON_ATTN", "kv_cache_dtype": "fp8"},
    "v2 FA one graph": {"enforce_eager": False, "cudagraph_mode": "FULL"},
    "v2 FA piecewise": {"enforce_eager": False, "cudagraph_mode": "PIECEWISE"},
    "v2 FA eager": {},
    "v2 FA eager fp8": {"kv_cache_dtype": "fp8"},
    "v1 FA graphs": {"enforce_eager": False, "runner": "v1"},
    "v1 Triton eager": {"runner": "v1", "attention_backend": "TRITON_ATTN"},
    "v2 FlashInfer graphs": {"enforce_eager": False, "attention_backend": "FLASHINFER"},
    "v2 FlashInfer eager fp8": {"attention_backend": "FLASHINFER", "kv_cache_dtype": "fp8"},
}
no_flashinfer = pytest.mark.skipif(importlib.util.find_spec("flashinfer") is None, reason="no FlashInfer here")
stacks = pytest.mark.parametrize(
    "stack", [pytest.param(name, marks=no_flashinfer if "FlashInfer" in name else ()) for name in STACKS]
)
both = pytest.mark.parametrize("mode", ["cow", "stage"])


def spec_of(model: Path, stack: str = "v2 FA eager", **more) -> EngineSpec:
    fields = {"max_num_batched_tokens": 96, "num_blocks": 96, "kv_cache_memory": 256, **STACKS[stack], **more}
    return EngineSpec(model=str(model / "target"), draft=str(model / "eagle"), **fields)


def treated(engines, model, mode: str, stack: str, fault=None, **more) -> Outcome:
    settings = Settings(mode=mode, audit=True, debug_sync=True)
    return engines.run(spec_of(model, stack, **more), settings, fault, logprobs=5)


def assert_clean_and_counted(
    outcome: Outcome, mode: str, layers: int = LAYERS, checks: int = 20, logged: bool = True
) -> None:
    """logged: whether some step must have been; where no step has windows beside other queries, stage logs none."""
    assert outcome.audit["layer_steps"] > 60
    assert outcome.audit["dirty_layer_steps"] == outcome.audit["unwritten_rows"] == 0, outcome.ranks[0]
    rank, metrics = outcome.ranks[0], outcome.metrics
    counters = rank["counters"]
    assert (rank["mode"], rank["serving"], rank["target_layers"]) == (mode, mode, layers), rank["reason"]
    assert not any(outcome.counters_after_start.values()), "warm-up must not count"
    # A step ahead of the scheduler, the device also runs a last window of requests that have just finished.
    ahead = counters["windows"] - metrics["spec_decode_num_drafts"]
    assert ahead >= 0
    assert counters["committed_tokens"] >= metrics["spec_decode_num_accepted_tokens"] > 0
    assert counters["rejected_tokens"] == counters["staged_tokens"] - counters["committed_tokens"] > 0
    assert counters["stage_operations"] == layers * counters["staged_tokens"], "layers x rows, once each"
    assert counters["fallbacks"] == counters["cancelled"] == 0
    assert counters["logged_steps"] > 0 or not logged
    assert (counters["staged_steps"] > 0) == ("staged" in rank["ways"])
    unheard = counters["committed_tokens"] - metrics["nwor_committed_tokens"]
    assert 0 <= unheard <= 8 * ahead, "the front end must see all else"
    assert 0 <= counters["stage_operations"] - metrics["nwor_stage_operations"] <= layers * 9 * ahead
    assert metrics["nwor_scheduler_checks"] > checks
    assert metrics["nwor_scheduler_mismatches"] == 0


def assert_parity(vanilla: Outcome, outcome: Outcome, stack: str = "") -> None:
    """Within rounding."""
    for theirs, ours in zip(vanilla.generations, outcome.generations, strict=True):
        parity = compare(theirs, ours)
        assert parity.within(GAPS[STACKS.get(stack, {}).get("kv_cache_dtype", "auto")]), parity
