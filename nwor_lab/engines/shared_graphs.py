# SPDX-License-Identifier: Apache-2.0
"""One key for the compiled graphs of engines that are compared, so that each runs what vLLM compiled for the first.

Why: engines that compile for themselves need not round alike. On an H200 with an fp8 cache and random weights ``cow``,
which attends as vLLM does, gave vLLM's tokens where nothing was compiled, and in two of three runs with compilation it
was 0.05 to 0.065 nats away from vLLM, as far as another attention kernel is. vLLM's key holds every variable that it
knows: which plugins to load, and by name those that plugins make known.
How: `vllm.envs.compile_factors` leaves out the list of plugins, and variables of the mode and of the sampled auditor
that are not set there, as those are that change no graph. An engine that starts when another of its model is up loads
that one's graphs.
When it can go: when what plugins declare is not in vLLM's key.
"""

import functools
from typing import Any

OF_PLUGINS = ("VLLM_NWOR_", "VLLM_KV_AUDIT")


def of_plugins(name: str, value: Any) -> bool:
    """Whether a variable in vLLM's key says of plugins what changes no graph."""
    return name == "VLLM_PLUGINS" or (name.startswith(OF_PLUGINS) and not value)


@functools.cache
def install() -> None:
    from vllm import envs

    original = envs.compile_factors

    @functools.wraps(original)
    def compile_factors() -> dict[str, Any]:
        return {name: value for name, value in original().items() if not of_plugins(name, value)}

    envs.compile_factors = compile_factors
