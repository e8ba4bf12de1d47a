# SPDX-License-Identifier: Apache-2.0
"""A conversation whose blocks vLLM's `OffloadingConnector` copies to the host and brings back."""

from dataclasses import replace
from typing import Any

from nwor.settings import Settings
from nwor_lab.engines.engine import EngineSpec
from nwor_lab.machine import on_cpu
from tests.engines import Outcome
from tests.nwor.specs import with_connector

BLOCK = 32
FIRST, OTHERS = ([[(7 * i + 13 * j + seed) % 250 + 3 for j in range(BLOCK)] for i in range(4)] for seed in (0, 1))


def offloading(spec: EngineSpec, offload: int = 64) -> EngineSpec:
    """A cache that holds one of the calls below, and no two; blocks go to `offload` MiB of host memory, if any."""
    spec = replace(spec, batch=4, block_size=BLOCK, num_blocks=20, prefix_caching=True, k=6)
    options: dict[str, Any] = {"cpu_bytes_to_use": offload << 20, "offload_prompt_only": False}
    if on_cpu():
        options |= {"spec_name": "HostOffloadingSpec", "spec_module_path": "tests.nwor.host_offload"}
    return with_connector(spec, "OffloadingConnector", options) if offload else spec


def converse(
    engines, spec: EngineSpec, mode: str, answers: list[list[int]], fault=None, logprobs: int = 0, **others
) -> Outcome:
    """Prompts whose answers end with a block; others, for which these are evicted; and the first ones' next turn.

    others: settings that differ; the audit is on, and a mode compares what it commits with the scheduler's counts.
    """
    again = [prompt + answer + [9, 8, 7] for prompt, answer in zip(FIRST, answers, strict=True)]
    calls = [{"prompts": prompts} for prompts in (FIRST, OTHERS, again)]
    settings = Settings(**{"mode": mode, "audit": True, "debug_sync": mode != "off", **others})
    return engines.run(spec, settings, fault, calls, max_tokens=2 * BLOCK, logprobs=logprobs)


def first_answers(engines, spec: EngineSpec) -> list[list[int]]:
    return engines.run(spec, Settings(), prompts=FIRST, max_tokens=2 * BLOCK).tokens


def assert_shipped_and_served(outcome: Outcome, mode: str) -> None:
    """Blocks have left and come back, no dirty slot among them, and the mode has served all along."""
    audit, [rank] = outcome.audit, outcome.ranks
    layers = audit["layer_steps"] // audit["steps"]
    assert outcome.metrics["external_prefix_cache_hits"] >= len(FIRST) * BLOCK
    assert audit["shipped_slots"] >= len(FIRST) * 2 * BLOCK * layers
    assert audit["shipped_rejected"] == audit["shipped_unwritten"] == 0
    assert audit["stray_slots"] == audit["wrong_rows"] == audit["unwritten_rows"] == 0, rank["dirty_examples"]
    assert (audit["dirty_slots"] > 0) == (mode == "off")
    if mode != "off":
        assert rank["serving"] == mode, rank["reason"]
        assert rank["counters"]["windows"] > 0 == rank["counters"]["fallbacks"]
