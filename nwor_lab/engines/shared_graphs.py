# SPDX-License-Identifier: Apache-2.0
"""The same compiled graphs for all engines that are compared: vLLM keeps them under one key, and one engine compiles.

Why: engines that compile for themselves need not round alike: TorchInductor times some of its choices. vLLM's key
holds every variable that it knows: which plugins to load, and by name those that plugins make known.
How: `vllm.envs.compile_factors` leaves out the list of plugins and the names of variables of the mode and of the
sampled auditor; an EAGLE head's biases, which change a graph, stay in. And engines of one configuration compile and
capture one after another, by a lock beside the graphs, so that all but the first find them; not ranks of data
parallelism, which wait for each other. This alone is not enough: engines time block sizes again when they load a graph,
unless they are `deterministic`.
When it can go: when what plugins declare is not in vLLM's key.
"""

import fcntl
import functools
from pathlib import Path
from typing import Any

OF_PLUGINS = ("VLLM_NWOR_", "VLLM_KV_AUDIT")


@functools.cache
def install() -> None:
    from vllm import envs
    from vllm.v1.engine.core import EngineCore

    envs.compile_factors = without_plugins(envs.compile_factors)
    EngineCore._initialize_kv_caches = one_at_a_time(EngineCore._initialize_kv_caches)


def without_plugins(original: Any) -> Any:
    """vLLM's variables that its key of compiled graphs is made of, but for those of plugins that change no graph."""

    @functools.wraps(original)
    def compile_factors() -> dict[str, Any]:
        return {name: value for name, value in original().items() if not of_plugins(name, value)}

    return compile_factors


def of_plugins(name: str, value: Any) -> bool:
    return name == "VLLM_PLUGINS" or (name.startswith(OF_PLUGINS) and not value)


def one_at_a_time(original: Any) -> Any:
    """An engine's compilation and capture, behind those of others of its configuration."""

    @functools.wraps(original)
    def _initialize_kv_caches(self: Any, vllm_config: Any) -> Any:
        from vllm import envs
        from vllm.config import CompilationMode

        alone = vllm_config.parallel_config.data_parallel_size == 1
        if vllm_config.compilation_config.mode == CompilationMode.NONE or not alone:
            return original(self, vllm_config)
        folder = Path(envs.VLLM_CACHE_ROOT)
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / f"nwor_lab-{vllm_config.compute_hash()}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            return original(self, vllm_config)

    return _initialize_kv_caches
