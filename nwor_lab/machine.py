# SPDX-License-Identifier: Apache-2.0
"""What the machine at hand can do, asked the way vLLM 0.32 asks: a GPU by torch, a CPU by `torch.cpu`.

vLLM's CPU build has one library for AVX2, one for AVX-512 and one for AVX-512 with bf16 and AMX; those answers choose.
"""

import os
import platform
import sys
import tempfile
from pathlib import Path

ENDING_WITH_PARENT = (
    sys.executable,
    "-c",
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 15); os.execvp(sys.argv[1], sys.argv[1:])",
)
"""Before a command's words: Linux sends it SIGTERM (15) where the thread that started it is killed, which could not
(PR_SET_PDEATHSIG, 1, of linux/prctl.h)."""
CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "VLLM_CACHE_ROOT")
"""Variables that name a folder without which an engine stops."""


def missing_folders() -> list[str]:
    """Which folders that a run cannot do without cannot be written, in words that say what to set."""
    found = []
    try:
        Path.home()
    except RuntimeError:
        found.append(
            "HOME is not set: set it to a folder that can be written, where Jupyter, vLLM and torch keep files"
        )
    try:
        tempfile.gettempdir()
    except FileNotFoundError:
        found.append("TMPDIR and /tmp cannot be written: set TMPDIR to a folder that can")
    for name in filter(os.environ.get, CACHES):
        folder = Path(os.environ[name]).absolute()
        there = next(place for place in (folder, *folder.parents) if place.exists())
        if not (there.is_dir() and os.access(there, os.W_OK | os.X_OK)):
            found.append(f"{name}={folder} cannot be written")
    return found


def on_cpu() -> bool:
    """Whether vLLM will run on the CPU here."""
    import torch

    return not torch.cuda.is_available()


def why_no_fp8_cache() -> str:
    """Why vLLM cannot hold an fp8 cache on this machine, in one line; empty where it can.

    The rule of vLLM's `cpu_attn._get_attn_isa`, which raises `NotImplementedError` late, in the engine's child.
    """
    import torch

    if not on_cpu() or torch.cpu._is_avx512_supported() or torch.cpu._is_amx_tile_supported():
        return ""
    return f"vLLM has no fp8 cache on this CPU ({platform.machine()} without AVX-512 and AMX)"


def refuse_cache(kv_cache_dtype: str) -> str:
    """Why a cache of this dtype, by vLLM's name, cannot be held on this machine, in one line; empty where it can."""
    return why_no_fp8_cache() if kv_cache_dtype.startswith("fp8") else ""


def has_bf16() -> bool:
    """Whether this machine multiplies bfloat16 in hardware."""
    import torch

    if not on_cpu():
        return True
    arm = platform.machine() == "aarch64" and torch.cpu.get_capabilities().get("bf16", False)
    return bool(arm or torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def model_dtype(asked: str = "") -> str:
    """The dtype of weights, by vLLM's name: `asked`, or if that is empty bfloat16 where `has_bf16`, else float32."""
    other_names = {"float": "float32", "half": "float16"}
    return other_names.get(asked, asked) or ("bfloat16" if has_bf16() else "float32")


def summary(dtype: str = "") -> str:
    """The dtype that runs here, as `model_dtype` has it, and what this machine cannot do, in one line."""
    device, has = "CPU" if on_cpu() else "GPU", "has" if has_bf16() else "has no"
    chosen = "as asked" if dtype else f"this {device} {has} bf16 instructions"
    return "; ".join(filter(None, [f"{model_dtype(dtype)} ({chosen})", why_no_fp8_cache()]))
