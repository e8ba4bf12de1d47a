# SPDX-License-Identifier: Apache-2.0
"""The wheel, installed where there is no checkout: it is complete, and `doctor` says so."""

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from torch.utils import cpp_extension

from nwor.ops import OPERATORS
from nwor_lab import paths

PROJECT = tomllib.loads((paths.ROOT / "pyproject.toml").read_text())["project"]
SOURCES = {package: sorted((paths.ROOT / package).rglob("*.py")) for package in ("nwor", "nwor_lab")}
DATA = {".json", ".toml", ".j2"}
NVCC = shutil.which("nvcc") is not None
OF_THE_ENVIRONMENT = {"vllm_kv_audit", "torch", "vllm", "triton", "flashinfer"}
"""vLLM, and what vLLM pins itself."""


def run(command: list[str | Path], cwd: Path, **environ: str) -> str:
    """Output of a command that knows nothing of this checkout and reaches no network; its errors fail the test."""
    ours = ("PYTHON", "VLLM_", "NWOR_", "VIRTUAL_ENV")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    offline = {"HF_HUB_OFFLINE": "1", "PIP_NO_INDEX": "1"}
    done = subprocess.run(
        command, cwd=cwd, env=clean | offline | environ, capture_output=True, text=True, timeout=400, check=False
    )
    assert done.returncode == 0, f"{command}: {done.returncode}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Built from a copy of the sources, since a build leaves files beside them; every warning of ours is an error."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    for name in (*SOURCES, "kernels"):
        shutil.copytree(paths.ROOT / name, source / name, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(paths.ROOT / name, source)
    build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", folder, source]
    torch = " ".join(f"-isystem {path}" for path in cpp_extension.include_paths())  # none of whose warnings are ours
    host = f"-Wall -Wextra -Werror {torch}"
    device = f"-Werror=all-warnings -Xcompiler=-Wall,-Wextra,-Werror {torch}"
    cuda = {"NWOR_CUDA": str(int(NVCC)), "NWOR_CUDA_ARCHS": "90"}  # none of the sources has lines for a chip alone
    run(build, folder, **cuda, CXXFLAGS=host, NVCC_APPEND_FLAGS=device)
    (found,) = folder.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    """A folder that holds what the wheel does; all else is found where this Python has it."""
    folder = tmp_path_factory.mktemp("elsewhere")
    zipfile.ZipFile(wheel).extractall(folder)
    return folder


def test_one_wheel_for_every_python_with_all_it_needs(wheel):
    assert re.fullmatch(r"nwor-[\d.]+-cp311-abi3-linux_\w+\.whl", wheel.name)
    names = zipfile.ZipFile(wheel).namelist()
    beside = {path for package in SOURCES for path in (paths.ROOT / package).rglob("*.*") if path.suffix in DATA}
    tracked = {path.relative_to(paths.ROOT).as_posix() for path in [*beside, *SOURCES["nwor"], *SOURCES["nwor_lab"]]}
    held = {name for name in names if ".dist-info/" not in name}
    assert held == tracked | {"nwor/_C.abi3.so"}
    assert wheel.stat().st_size < 5e6


def test_every_operator_is_there_for_cpus_and_where_nvcc_is_found_for_gpus(installed):
    code = f"""
import torch
torch.ops.load_library({str(installed / "nwor" / "_C.abi3.so")!r})
for name in {[*OPERATORS]}:
    for device in ("CPU", "CUDA")[: 1 + ({NVCC} and name != "verify_attention")]:
        assert torch._C._dispatch_has_kernel_for_dispatch_key("_C_cache_ops::" + name, device), (name, device)
"""
    run([sys.executable, "-c", code], installed)


def imports(package: str) -> dict[str, str]:
    """Top-level names that the package's modules import, at their top or within, but the standard library's."""
    found: dict[str, str] = {}
    for path in SOURCES[package]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [str(node.module)]
            else:
                continue
            found |= {name.partition(".")[0]: path.name for name in names}
    return {name: path for name, path in found.items() if name not in sys.stdlib_module_names | OF_THE_ENVIRONMENT}


def test_serving_needs_vllm_alone():
    assert imports("nwor").keys() == {"nwor"}
    assert PROJECT["dependencies"] == []


def test_every_import_of_the_lab_is_in_an_extra():
    listed = [requirement for extra in PROJECT["optional-dependencies"].values() for requirement in extra]
    known = {re.match(r"[\w.-]+", requirement).group().lower().replace("_", "-") for requirement in listed}
    others = {name: path for name, path in imports("nwor_lab").items() if name not in SOURCES}
    distributions = {
        name: {"zmq": "pyzmq", "PIL": "pillow"}.get(name, name).replace("_", "-").lower() for name in others
    }
    assert {name: path for name, path in others.items() if distributions[name] not in known} == {}


DRAWING = {"matplotlib", "seaborn", "papermill", "ipywidgets", "ray", "yaml", "pytest"}
MEASURING = ("run.doctor", "bench.audit", "bench.acceptance", "bench.bench", "gpu.tune")


def test_measuring_needs_neither_notebooks_nor_figures(installed):
    blocked = f"sys.modules.update(dict.fromkeys({sorted(DRAWING)}))"  # importing one of these raises
    imported = ", ".join(f"nwor_lab.{name}" for name in MEASURING)
    code = f"import sys; {blocked}; import nwor, {imported}; print(nwor.__file__)"
    said = run([sys.executable, "-c", code], installed, PYTHONPATH=str(installed))
    assert said.strip().startswith(str(installed))


def test_the_doctor_finds_all_there(installed):
    said = run([sys.executable, "-m", "nwor_lab.run.cli", "doctor"], installed, PYTHONPATH=str(installed))
    assert "MISSING" not in said and re.search(r"ok +stage", said)
    assert all(re.search(rf"ok +{name} +CPU", said) for name in OPERATORS)
