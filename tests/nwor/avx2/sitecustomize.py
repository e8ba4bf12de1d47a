# SPDX-License-Identifier: Apache-2.0
"""With this folder on ``PYTHONPATH`` a process, and every Python process it starts, looks like a CPU with AVX2 alone.

    PYTHONPATH=tests/nwor/avx2 python -m pytest tests/nwor/test_vllm_modes.py
    PYTHONPATH=tests/nwor/avx2 make reproduce

Python imports `sitecustomize` at start-up, in vLLM's workers too. vLLM asks `torch.cpu` which of its libraries to load
and what its attention can do, so `torch.cpu.get_capabilities`, on which those answers rest, loses all that came after
AVX2; torch's own kernels and oneDNN's are held down by environment variables. Does nothing on a CPU other than x86.
"""

import importlib.util
import os
import platform
import sys
import tempfile
from types import MappingProxyType

HIDDEN = ("avx512", "avx10", "avx_vnni", "avx_ne", "amx")


class _FindTorchCpu:
    """A finder that changes `torch.cpu` as it is imported: importing torch here would cost every process a second."""

    def find_spec(self, name, path=None, target=None):
        if name != "torch.cpu":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            found = module.get_capabilities()
            seen = {name: value if not name.startswith(HIDDEN) else False for name, value in found.items()}
            module.get_capabilities = lambda: MappingProxyType(seen)

        spec.loader.exec_module = exec_module
        return spec


if platform.machine() == "x86_64":
    os.environ["ATEN_CPU_CAPABILITY"] = "avx2"
    os.environ["ONEDNN_MAX_CPU_ISA"] = "AVX2"
    # Inductor's cache does not ask for which CPU a graph was compiled.
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.path.join(tempfile.gettempdir(), f"torchinductor_avx2_{os.getuid()}")
    sys.meta_path.insert(0, _FindTorchCpu())
