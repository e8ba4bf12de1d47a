# SPDX-License-Identifier: Apache-2.0
"""What `nwor doctor --vllm` says of a vLLM's sources: of the installed one, and of small ones made here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nwor.vllm import releases
from nwor_lab.run import doctor

STEP = "vllm.v1.runner.Runner.step"
SAMPLE = "vllm.v1.runner.sample"
SOURCE = """
class Runner:
    @traced
    async def other(self): ...

    @traced
    def step(self, tokens, *, scale=1):
        return tokens * scale


def sample(logits, **more):
    return logits
"""


def tree(folder: Path, version: str, source: str) -> Path:
    """Sources of a vLLM of this version, with one module."""
    package = folder / version / "vllm"
    (package / "v1").mkdir(parents=True)
    (package / "v1" / "runner.py").write_text(source)
    (package / "_version.py").write_text(f"__version__: str\n__version__ = version = '{version}'\n")
    return package.parent


@pytest.fixture
def known(tmp_path, monkeypatch):
    """Two releases that are known, recorded by the command."""
    monkeypatch.setattr(releases, "FILE", tmp_path / "releases.json")
    releases.FILE.write_text(json.dumps({STEP: {}, SAMPLE: {}}))
    for version, source in (("1.0.0+cpu", SOURCE), ("1.1.0", SOURCE.replace("self, tokens", "self, tokens, drafts"))):
        assert doctor.main(["--vllm", str(tree(tmp_path, version, source)), "--record"]) == 0
    stored = json.loads(releases.FILE.read_text())
    table = {name: {one: releases.Function(*f) for one, f in of.items()} for name, of in stored.items()}
    monkeypatch.setattr(releases, "KNOWN", table)
    monkeypatch.setattr(releases, "RELEASES", ["1.0.0", "1.1.0"])
    return table


def test_recorded_releases_are_written_line_by_line(known):
    assert known[STEP]["1.0.0"].parameters == "self tokens scale"
    assert known[STEP]["1.1.0"].parameters == "self tokens drafts scale"
    assert known[SAMPLE]["1.0.0"] == known[SAMPLE]["1.1.0"]
    lines = releases.FILE.read_text().splitlines()
    assert len(lines) == 10 and lines[6].startswith('    "1.0.0": ["logits more", "')


@pytest.mark.parametrize(
    ("old", "new", "said", "unknown"),
    [
        ("", "", f"unchanged          changed signature  {STEP[5:]} (gone: drafts)", 0),
        ("self, tokens", "self, tokens, drafts", f"changed signature  unchanged          {STEP[5:]} (new: drafts)", 0),
        ("tokens * scale", "tokens + scale", f"changed body       changed signature  {STEP[5:]} (gone: drafts)", 1),
        (
            "tokens * scale",
            "(tokens  *\n  scale)  # twice",
            f"unchanged          changed signature  {STEP[5:]} (gone: drafts)",
            0,
        ),
        ("@traced\n    def", "def", f"changed body       changed signature  {STEP[5:]}", 1),
        ("self, tokens", "self, rows", f"changed signature  changed signature  {STEP[5:]} (new: rows; gone: ", 1),
        ("def step", "def stepped", f"missing            missing            {STEP[5:]}", 1),
        ("\n\ndef sample", "\n\nasync def sample", f"missing            missing            {SAMPLE[5:]}", 1),
    ],
    ids=lambda value: value.partition("\n")[0][:30] if isinstance(value, str) else str(value),
)
def test_a_function_is_unchanged_or_what_changed_is_named(known, tmp_path, capsys, old, new, said, unknown):
    """Beside each release; only what is as in none of them counts."""
    root = tree(tmp_path, "1.2.0", SOURCE.replace(old, new))
    assert doctor.main(["--vllm", str(root)]) == min(unknown, 1)
    text = capsys.readouterr().out
    assert said in text and "vLLM 1.2.0, beside each known release" in text
    assert f"{unknown} of 2 functions are as in no known release" in text


def test_the_installed_vllm_is_a_known_release(capsys, tmp_path, monkeypatch):
    """Read as any other sources; `tests/nwor/test_patch.py` holds what is imported to the same."""
    pytest.importorskip("vllm", reason="vLLM is not installed: there is nothing to read")
    assert doctor.main(["--vllm"]) == 0
    text = capsys.readouterr().out
    count = len(releases.KNOWN)
    assert f"beside 0.32.0: {count} unchanged\n" in text
    assert "unchanged          changed body       v1.worker.gpu.model_runner.GPUModelRunner.prepare_attn" in text
    stored = releases.FILE.read_text()
    monkeypatch.setattr(releases, "FILE", tmp_path / "releases.json")
    releases.FILE.write_text(stored)
    assert doctor.main(["--vllm", "--record"]) == 0
    assert releases.FILE.read_text() == stored


@pytest.mark.parametrize("words", [["--vllm", "nowhere"], ["--record"]], ids=" ".join)
def test_what_the_command_cannot_do_it_says(words, capsys):
    assert doctor.main(words) == 2
    assert ("no vLLM in nowhere" if "nowhere" in words else "--record needs --vllm") in capsys.readouterr().err


def test_the_doctor_tells_a_release_that_no_test_ran_on(monkeypatch):
    versions = {"nwor": "0.1.0", "vllm": "0.33.0"}
    monkeypatch.setattr(doctor, "_version", lambda package: versions.get(package, ""))
    found = doctor.vllm()
    assert found.ok and found.value == "0.33.0: tests run on 0.32.0; docs/modes.md says what ran on others"
    versions["vllm"] = "0.34.0"
    found = doctor.vllm()
    assert not found.ok
    versions["vllm"] = releases.TESTED
    found = doctor.vllm()
    assert found.ok and found.value == "0.32.0"
