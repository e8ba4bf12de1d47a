# SPDX-License-Identifier: Apache-2.0
"""`docs/extend.md` by following it: its policy, added to a copy of the kit, serves and is judged by the audit."""

import os
import re
import shutil
import subprocess
import sys

import pandas as pd
import pytest

from nwor_lab import paths

BLOCK = re.compile(r"```python\n# (\S+), at the end\n(.*?)```", re.DOTALL)


@pytest.fixture
def extended(tmp_path):
    """A copy of the kit with the page's code in it."""
    for package in ("nwor", "nwor_lab", "data"):
        ignored = shutil.ignore_patterns("__pycache__", "recorded")
        shutil.copytree(paths.ROOT / package, tmp_path / package, ignore=ignored)
    for name, code in BLOCK.findall((paths.ROOT / "docs" / "extend.md").read_text()):
        with open(tmp_path / name, "a") as file:
            file.write("\n\n" + code)
    return tmp_path


def python(folder, *arguments: str) -> subprocess.CompletedProcess:
    environ = os.environ | {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *arguments]
    return subprocess.run(command, check=False, cwd=folder, env=environ, capture_output=True, text=True)


REFERENCE = """
from nwor_lab.reference.tour import TinyWindow
last = [cell["position"] for cell in TinyWindow(k=3).run("scrub", 1) if cell["moment"] == "after sampling"]
print(last.count(0), max(cell for cell in last if cell == cell))  # rows hold their position, and position 0 is one
"""


def test_the_policy_in_the_reference_model(extended):
    done = python(extended, "-c", REFERENCE)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["2", "5.0"], "of drafts 4, 5 and 6 the last was rejected, and its slot holds 0"


@pytest.mark.engine
def test_the_policy_in_vllm_is_judged_by_the_audit(extended):
    command = "-m", "nwor_lab.run.cli", "audit", "--mode", "off,scrub", "--num-prompts", "2", "--max-tokens", "24"
    done = python(extended, *command, "--run-dir", str(extended / "run"))
    assert done.returncode == 1, done.stderr
    found = pd.read_parquet(extended / "run" / "audit.parquet").set_index(["mode", "metric"])["value"]
    dirty = {mode: found[mode, "audit.dirty_slots"] for mode in ("off", "scrub")}
    assert dirty["scrub"] == dirty["off"] > 0, done.stdout
