# SPDX-License-Identifier: Apache-2.0
"""Engines with arguments of vLLM that only tests give."""

from dataclasses import dataclass, field
from typing import Any

from nwor_lab.engines.spec import EngineSpec

LENGTHS = [{"max_tokens": length} for length in (12, 24, 60, 60)]
"""Requests that end one after the other, so that the batch shrinks."""
SCHEDULES = {
    "fewer drafts in larger batches": ((1, 2, 4), (3, 8, 2)),
    "no drafts in larger batches": ((1, 2, 4), (3, 8, 0)),
}


@dataclass(frozen=True)
class With(EngineSpec):
    """Arguments of `vllm.LLM`, and variables of its process, that `EngineSpec` has no field for."""

    arguments: dict[str, Any] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict)

    def llm_arguments(self) -> dict[str, Any]:
        return {**super().llm_arguments(), **self.arguments}

    def environ(self, core: int = 0) -> dict[str, str]:
        return super().environ(core) | self.variables


def by_batch(spec: EngineSpec, schedule: tuple[tuple[int, int, int], ...]) -> With:
    """vLLM shortens the drafts as the batch grows: (least requests, most requests, drafts)."""
    drafts = spec.llm_arguments()["speculative_config"] | {"num_speculative_tokens_per_batch_size": list(schedule)}
    return With(**vars(spec), arguments={"speculative_config": drafts})


def with_connector(spec: EngineSpec, name: str, options: dict[str, Any], path: str | None = None) -> With:
    """Beside another KV connector of vLLM's than `EngineSpec` has a field for.

    path: of the module it is taken from, as another's would be; None for vLLM's own list.
    """
    config = {"kv_connector": name, "kv_role": "kv_both", "kv_connector_extra_config": options}
    config |= {"kv_connector_module_path": path} if path else {}
    return With(**vars(spec), arguments={"kv_transfer_config": config})
