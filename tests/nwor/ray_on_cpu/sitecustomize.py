# SPDX-License-Identifier: Apache-2.0
"""With this folder on ``PYTHONPATH`` vLLM's Ray executor takes a CPU: a worker is placed on what Ray counts as a GPU.

Python imports `sitecustomize` at start-up, in Ray's workers too. vLLM 0.32 refuses Ray on a CPU since that platform has
no name for the resource of a worker; it asks for the name before any plugin is loaded. `ray.init(num_gpus=2)` counts
two GPUs without looking for one.
"""

import importlib.util
import sys


class _FindCpuPlatform:
    """A finder that changes vLLM's CPU platform as it is imported."""

    def find_spec(self, name, path=None, target=None):
        if name != "vllm.platforms.cpu":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            module.CpuPlatform.ray_device_key = "GPU"

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, _FindCpuPlatform())
