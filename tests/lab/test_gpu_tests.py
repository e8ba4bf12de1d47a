# SPDX-License-Identifier: Apache-2.0
"""The record of the tests that need a GPU, made of tests that need none."""

import os
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from nwor_lab import paths

TESTS = """
import os, pytest
pytestmark = pytest.mark.gpu

def test_good(): pass
def test_bad(): assert not {bad}
@pytest.mark.skip
def test_not_here(): pass
@pytest.fixture
def lost(): raise OSError
def test_without_its_fixture(lost): pass
def test_last(): os._exit(9) if {dies} else None
"""


def run(folder: Path, text: str, table: str = "gpu_tests", **environ: str) -> tuple[int, pd.DataFrame]:
    (folder / "test_some.py").write_text(text)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = gpu: a GPU\n")
    code = "import sys; from pathlib import Path; from nwor_lab import gpu_tests; "
    code += "f = gpu_tests.run(*map(Path, sys.argv[1:]))"
    code += "; raise SystemExit(int((f.outcome == 'failed').any()))"
    command = [sys.executable, "-c", code, str(folder / "out"), str(folder)]
    done = subprocess.run(command, cwd=paths.ROOT, check=False, env=os.environ | {"PYTHONPATH": "."} | environ)
    return done.returncode, pd.read_parquet(folder / "out" / f"{table}.parquet").set_index("test").outcome


def test_what_came_of_each_is_kept(tmp_path):
    code, outcome = run(tmp_path, TESTS.format(bad=True, dies=False))
    names = [name.partition("::")[2].removeprefix("test_") for name in outcome.index]
    assert dict(zip(names, outcome, strict=True)) == {
        "good": "passed", "bad": "failed", "not_here": "skipped", "without_its_fixture": "failed", "last": "passed"
    }  # fmt: skip
    assert code == 1


def test_a_process_that_ends_too_early_leaves_what_had_ended(tmp_path):
    code, outcome = run(tmp_path, TESTS.format(bad=False, dies=True), "gpu_tests.part")
    assert not (tmp_path / "out" / "gpu_tests.parquet").exists(), "it would be taken for whole"
    assert code == 9 and outcome.value_counts().to_dict() == {"passed": 2, "skipped": 1, "failed": 1}


def test_a_file_that_cannot_be_read_is_a_failure(tmp_path):
    (tmp_path / "test_other.py").write_text("import nothing_of_this_name")
    code, outcome = run(tmp_path, TESTS.format(bad=False, dies=False))
    assert code == 1 and outcome.to_dict() == {"test_other.py": "failed"}


WORKERS = """
import os, pytest
pytestmark = pytest.mark.gpu

@pytest.mark.parametrize("n", range(6))
def test_place(n, worker_id):
    assert os.environ["CUDA_VISIBLE_DEVICES"] == {"gw0": "5,7", "gw1": "7,5", "gw2": "5,7"}[worker_id]
    assert os.environ["VLLM_CACHE_ROOT"] == "/cache/" + worker_id
"""


@pytest.mark.parametrize("outer", ["", "gw1"])
def test_workers_share_the_gpus(outer, tmp_path):
    """Also where it is started by a worker itself."""
    places = {"CUDA_VISIBLE_DEVICES": "5,7", "VLLM_CACHE_ROOT": "/cache", "PYTEST_XDIST_WORKER": outer}
    code, outcome = run(tmp_path, WORKERS, PYTEST_ADDOPTS="-n 3", **places)
    assert code == 0 and outcome.value_counts().to_dict() == {"passed": 6}


def test_a_folder_without_such_tests_is_an_error(tmp_path):
    from nwor_lab import gpu_tests

    with pytest.raises(RuntimeError, match="no test below"):
        gpu_tests.run(tmp_path / "out", tmp_path / "nothing")
