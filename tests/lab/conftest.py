# SPDX-License-Identifier: Apache-2.0
"""What several files of these tests share."""

from pathlib import Path

import hypothesis
import pytest
from fake_engine import FakeEngine

from nwor_lab import paths
from nwor_lab.bench import bench

hypothesis.settings.register_profile("lab", deadline=None)  # a busy machine is no failure
hypothesis.settings.load_profile("lab")


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> type[FakeEngine]:
    """`FakeEngine` in place of the bench's engines, nothing noted yet."""
    monkeypatch.setattr(bench, "Engine", FakeEngine)
    for name, value in (("calls", []), ("every", []), ("bad_batch", 0)):
        monkeypatch.setattr(FakeEngine, name, value)
    return FakeEngine


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the notebook `01_book`, which fails for k=2 until there is a file `mended`."""
    from books import write_notebook

    monkeypatch.setattr(paths, "NOTEBOOKS", tmp_path)
    monkeypatch.setattr(paths, "RESULTS", tmp_path / "results")
    write_notebook(tmp_path, "01_book")
    return tmp_path
