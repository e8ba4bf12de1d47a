# SPDX-License-Identifier: Apache-2.0
"""What several files of these tests share."""

import pytest
from fake_engine import FakeEngine

from nwor_lab.experiments import bench


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> type[FakeEngine]:
    """`FakeEngine` in place of the bench's engines, nothing noted yet."""
    monkeypatch.setattr(bench, "Engine", FakeEngine)
    for name, value in (("calls", []), ("every", []), ("good_captures", 99), ("bad_batch", 0)):
        monkeypatch.setattr(FakeEngine, name, value)
    return FakeEngine
