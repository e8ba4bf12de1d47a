# SPDX-License-Identifier: Apache-2.0
"""The operators are built, CUDA ones where nvcc is found, with every warning an error."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from torch.utils import cpp_extension

from nwor import ops
from nwor_lab import paths

OPERATORS = [name for name in ops.OPERATORS if name != "verify_attention"]  # which only CPUs have
# A folder named by -isystem, too, is none of whose warnings are ours.
TORCH = " ".join(f"-isystem {path}" for path in cpp_extension.include_paths())
STRICT = {
    "CXXFLAGS": f"-Wall -Wextra -Werror {TORCH}",
    "NVCC_APPEND_FLAGS": f"-Werror=all-warnings -Xcompiler=-Wall,-Wextra,-Werror {TORCH}",
}


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """A copy of what setup.py reads, so that nothing is left in the checkout."""
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(paths.ROOT / name, tmp_path / name)
    for name in ("kernels", "nwor"):
        shutil.copytree(paths.ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    return tmp_path


def build(sources: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "setup.py", "build_ext", "--inplace"],
        cwd=sources, env=os.environ | STRICT | environ, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if "no CUDA toolkit was found" in done.stderr and not shutil.which("nvcc"):
        pytest.skip("no nvcc here: the CUDA kernels are not compiled")
    return done


def test_the_operators_are_built_without_a_warning(sources: Path) -> None:
    """All sources for one chip, linked and loaded: none of them has lines for a chip alone."""
    done = build(sources, NWOR_CUDA="1", NWOR_CUDA_ARCHS="90")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "built CPU+CUDA for sm_90" in done.stdout
    (library,) = (sources / "nwor").glob("_C*.so")
    code = f"""
import torch
torch.ops.load_library({str(library)!r})
for name in {OPERATORS!r}:
    for device in ("CPU", "CUDA"):
        assert torch._C._dispatch_has_kernel_for_dispatch_key("_C_cache_ops::" + name, device), (name, device)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(("source", "cuda"), [("kernels/cuda/all_layers.cu", "1"), ("kernels/cpu/all_layers.cpp", "0")])
def test_a_warning_is_an_error(sources: Path, source: str, cuda: str) -> None:
    with (sources / source).open("a") as file:
        file.write("\nstatic int never_called(int unused_parameter) { return 0; }\n")
    done = build(sources, NWOR_CUDA=cuda, NWOR_CUDA_ARCHS="90")
    assert done.returncode != 0
    assert "never_called" in done.stdout + done.stderr
