# SPDX-License-Identifier: Apache-2.0
"""Builds the operators, `nwor._C`: one shared library against libtorch's stable ABI (torch 2.11 and later, any Python).

The CUDA kernels are built wherever nvcc is found, with or without a GPU in the machine.

    python setup.py build_ext --inplace

Environment: NWOR_CUDA=0 leaves CUDA out, NWOR_CUDA=1 insists on it; NWOR_CUDA_ARCHS="90" builds for fewer chips (the
last one named is also kept as PTX for later chips); CUDA_HOME or PATH say where nvcc is.
"""

import os
import shutil
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from torch.utils import cpp_extension

ROOT = Path(__file__).parent
TORCH_TARGET = "-DTORCH_TARGET_VERSION=0x020b000000000000"  # the stable ABI of torch 2.11
CUDA_ARCHS = os.environ.get("NWOR_CUDA_ARCHS", "80 90 100").split()


def find_cuda_home() -> Path | None:
    """The CUDA toolkit's folder, judged by the headers beside its nvcc; None where there is none, or none is wanted."""
    wanted = os.environ.get("NWOR_CUDA", "")
    if wanted not in ("", "0", "1"):
        raise SystemExit(f"NWOR_CUDA must be 0 or 1, got {wanted!r}")
    if wanted == "0":
        return None
    nvcc = shutil.which("nvcc")
    named = [
        os.environ.get("CUDA_HOME"),
        os.path.realpath(nvcc) and Path(os.path.realpath(nvcc)).parent.parent if nvcc else None,
    ]
    homes = [
        Path(home)
        for home in (*named, "/usr/local/cuda", *sorted(Path("/usr/local").glob("cuda-*"), reverse=True))
        if home
    ]
    for home in homes:
        if (home / "bin/nvcc").exists() and (home / "include/cuda_runtime.h").exists():
            return home
    if wanted == "1":
        raise SystemExit("NWOR_CUDA=1, but no CUDA toolkit was found: put nvcc on the PATH or set CUDA_HOME")
    return None


CUDA_HOME = find_cuda_home()


class BuildOperators(build_ext):
    """build_ext that hands the .cu files to nvcc and says what it built."""

    def build_extension(self, ext: Extension) -> None:
        cuda_sources = [source for source in ext.sources if source.endswith(".cu")]
        ext.sources = [source for source in ext.sources if not source.endswith(".cu")]
        ext.extra_objects = [self.compile_cuda(source, ext) for source in cuda_sources]
        super().build_extension(ext)
        built = "CPU+CUDA for " + " ".join(f"sm_{arch}" for arch in CUDA_ARCHS) if cuda_sources else "CPU"
        print(f"\n*** nwor._C: built {built} -> {self.get_ext_fullpath(ext.name)}\n", flush=True)

    def compile_cuda(self, source: str, ext: Extension) -> str:
        target = Path(self.build_temp, source).with_suffix(".cu.o")
        target.parent.mkdir(parents=True, exist_ok=True)
        chips = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in CUDA_ARCHS]
        chips.append(f"-gencode=arch=compute_{CUDA_ARCHS[-1]},code=compute_{CUDA_ARCHS[-1]}")
        includes = [f"-I{path}" for path in ext.include_dirs]
        flags = ["-O3", "-std=c++20", "-Xcompiler=-fPIC", "--threads=2", "--expt-relaxed-constexpr", TORCH_TARGET]
        self.spawn([str(CUDA_HOME / "bin/nvcc"), "-c", source, "-o", str(target), *flags, *chips, *includes])
        return str(target)


def operators() -> Extension:
    sources = ["kernels/*.cpp", "kernels/cpu/*.cpp"] + (["kernels/cuda/*.cu"] if CUDA_HOME else [])
    # cudart is linked statically: a machine without CUDA loads the library all the same.
    cuda_link = ["-l:libcudart_static.a", "-lrt", "-lpthread", "-ldl"] if CUDA_HOME else ["-ldl"]
    cuda_lib_dirs = (
        [str(path) for path in (CUDA_HOME / "lib64", CUDA_HOME / "lib") if path.exists()] if CUDA_HOME else []
    )
    return Extension(
        "nwor._C",
        sources=sorted(str(path.relative_to(ROOT)) for pattern in sources for path in ROOT.glob(pattern)),
        depends=[str(path.relative_to(ROOT)) for path in ROOT.glob("kernels/**/*.h")],
        include_dirs=cpp_extension.include_paths(),
        library_dirs=cpp_extension.library_paths() + cuda_lib_dirs,
        libraries=["torch", "torch_cpu"],
        define_macros=[("NWOR_CUDA", None)] if CUDA_HOME else [],
        extra_compile_args=["-O3", "-g0", "-std=c++20", "-fvisibility=hidden", "-Wall", TORCH_TARGET],
        extra_link_args=cuda_link,
        language="c++",
        py_limited_api=True,
    )


setup(ext_modules=[operators()], cmdclass={"build_ext": BuildOperators})
