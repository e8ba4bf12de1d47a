# SPDX-License-Identifier: Apache-2.0
"""Builds the operators, `nwor._C`: one shared library against libtorch's stable ABI (torch 2.11 and later, any Python).

The CUDA kernels are built wherever nvcc is found, with or without a GPU in the machine.

    python setup.py build_ext --inplace

Environment: NWOR_CUDA=0 leaves CUDA out, NWOR_CUDA=1 insists on it; NWOR_CUDA_ARCHS="90" builds for fewer chips (the
last one named is also kept as PTX for later chips); CUDA_HOME or PATH say where nvcc is.
"""

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from torch.utils import cpp_extension

ROOT = Path(__file__).parent
TORCH_TARGET = "-DTORCH_TARGET_VERSION=0x020b000000000000"  # the stable ABI of torch 2.11


def find_cuda_home() -> Path | None:
    """The CUDA toolkit's folder, judged by the headers beside its nvcc; None where there is none, or none is wanted."""
    wanted = os.environ.get("NWOR_CUDA", "")
    if wanted not in ("", "0", "1"):
        raise SystemExit(f"NWOR_CUDA must be 0 or 1, got {wanted!r}")
    if wanted == "0":
        return None
    nvcc = shutil.which("nvcc")
    homes = [os.environ.get("CUDA_HOME"), nvcc and Path(nvcc).resolve().parents[1]]
    homes += ["/usr/local/cuda", *sorted(Path("/usr/local").glob("cuda-*"), reverse=True)]
    for home in map(Path, filter(None, homes)):
        if all((home / part).exists() for part in ("bin/nvcc", "include/cuda_runtime.h", "lib64/libcudart_static.a")):
            return home
    if wanted == "1":
        raise SystemExit("NWOR_CUDA=1, but no CUDA toolkit was found: put nvcc on the PATH or set CUDA_HOME")
    if nvcc:
        print(f"*** nwor._C: {nvcc} has no headers or no libcudart_static.a beside it: CPU alone", flush=True)
    return None


CUDA_HOME = find_cuda_home()


def wanted_archs(nvcc: Path) -> list[str]:
    """The chips to build for, less those that this nvcc does not know, each named loudly."""
    known = subprocess.run([nvcc, "--list-gpu-arch"], check=True, capture_output=True, text=True).stdout
    archs = os.environ.get("NWOR_CUDA_ARCHS", "80 90 100").split()
    for arch in [arch for arch in archs if f"compute_{arch}" not in known.split()]:
        print(f"*** nwor._C: {nvcc} does not know sm_{arch}: left out", flush=True)
        archs.remove(arch)
    if not archs:
        raise SystemExit(f"{nvcc} knows none of the chips asked for; name others in NWOR_CUDA_ARCHS or set NWOR_CUDA=0")
    return archs


class BuildOperators(build_ext):
    """build_ext that hands the .cu files to nvcc, builds everything each time, and says what it built."""

    def build_extension(self, ext: Extension) -> None:
        self.force = True  # whether CUDA is in, and for which chips, shows in no file's date
        self.archs = wanted_archs(CUDA_HOME / "bin/nvcc") if CUDA_HOME else []
        cuda_sources = [source for source in ext.sources if source.endswith(".cu")]
        ext.sources = [source for source in ext.sources if not source.endswith(".cu")]
        ext.extra_objects = [self.compile_cuda(source, ext) for source in cuda_sources]
        super().build_extension(ext)
        built = "CPU+CUDA for " + " ".join(f"sm_{arch}" for arch in self.archs) if cuda_sources else "CPU"
        print(f"\n*** nwor._C: built {built}\n", flush=True)

    def compile_cuda(self, source: str, ext: Extension) -> str:
        target = Path(self.build_temp, source).with_suffix(".cu.o")
        target.parent.mkdir(parents=True, exist_ok=True)
        chips = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in self.archs]
        chips.append(f"-gencode=arch=compute_{self.archs[-1]},code=compute_{self.archs[-1]}")
        includes = [f"-I{path}" for path in ext.include_dirs]
        flags = ["-O3", "-std=c++20", "-lineinfo", "-Xcompiler=-fPIC", "--threads=2", TORCH_TARGET]
        self.spawn([str(CUDA_HOME / "bin/nvcc"), "-c", source, "-o", str(target), *flags, *chips, *includes])
        return str(target)


def sources_hash() -> str:
    """Eight digits of the hash of the kernels' sources. The library carries them: two builds of one source differ."""
    files = sorted(path for path in (ROOT / "kernels").rglob("*") if path.suffix in (".h", ".cpp", ".cu"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:8]


def operators() -> Extension:
    sources = ["kernels/*.cpp", "kernels/cpu/*.cpp"] + (["kernels/cuda/*.cu"] if CUDA_HOME else [])
    # cudart is linked statically: a machine without CUDA loads the library all the same.
    cudart = ["-l:libcudart_static.a", "-lrt", "-lpthread"] if CUDA_HOME else []
    return Extension(
        "nwor._C",
        sources=sorted(str(path.relative_to(ROOT)) for pattern in sources for path in ROOT.glob(pattern)),
        depends=[str(path.relative_to(ROOT)) for path in ROOT.glob("kernels/**/*.h")],
        include_dirs=cpp_extension.include_paths(),
        library_dirs=cpp_extension.library_paths() + ([str(CUDA_HOME / "lib64")] if CUDA_HOME else []),
        libraries=["torch", "torch_cpu"],
        define_macros=[("NWOR_SOURCES", f'"{sources_hash()}"'), *([("NWOR_CUDA", None)] if CUDA_HOME else [])],
        extra_compile_args=["-O3", "-g0", "-std=c++20", "-fvisibility=hidden", "-Wall", TORCH_TARGET],
        # What is linked statically stays inside: cudart, and libstdc++ where the toolchain has no shared one, would
        # otherwise mix with the copies of other libraries in the process.
        extra_link_args=[*cudart, "-ldl", "-Wl,--exclude-libs,ALL"],
        language="c++",
        py_limited_api=True,
    )


setup(
    ext_modules=[operators()],
    cmdclass={"build_ext": BuildOperators},
    options={"bdist_wheel": {"py_limited_api": "cp311"}},  # the library knows torch's stable ABI and no Python at all
)
