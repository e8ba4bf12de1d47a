# SPDX-License-Identifier: Apache-2.0
"""Engines with arguments of vLLM that only tests give."""

from dataclasses import dataclass
from typing import Any

from nwor_lab.engines.spec import EngineSpec

LENGTHS = [{"max_tokens": length} for length in (12, 24, 60, 60)]
"""Requests that end one after the other, so that the batch shrinks."""
SCHEDULES = {
    "fewer drafts in larger batches": ((1, 2, 4), (3, 8, 2)),
    "no drafts in larger batches": ((1, 2, 4), (3, 8, 0)),
}


@dataclass(frozen=True)
class ByBatch(EngineSpec):
    """vLLM shortens the drafts as the batch grows: (least requests, most requests, drafts)."""

    schedule: tuple[tuple[int, int, int], ...] = ()

    def llm_arguments(self) -> dict[str, Any]:
        arguments = super().llm_arguments()
        arguments["speculative_config"]["num_speculative_tokens_per_batch_size"] = list(self.schedule)
        return arguments


@dataclass(frozen=True)
class OnRay(EngineSpec):
    """Ranks are Ray's actors."""

    def llm_arguments(self) -> dict[str, Any]:
        return {**super().llm_arguments(), "distributed_executor_backend": "ray"}


@dataclass(frozen=True)
class MicroBatched(EngineSpec):
    """vLLM is to split batches in two; the transport between experts is named and not used."""

    def llm_arguments(self) -> dict[str, Any]:
        return {**super().llm_arguments(), "ubatch_size": 2, "all2all_backend": "deepep_low_latency"}
