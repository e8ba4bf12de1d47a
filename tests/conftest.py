# SPDX-License-Identifier: Apache-2.0
"""What all tests share: nothing is fetched, and what needs a GPU is skipped, loudly, where there is none."""

import os
from contextlib import closing

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("MPLBACKEND", "Agg")
# Of helpers' assertions too pytest says what was compared.
pytest.register_assert_rewrite(
    "tests.nwor.faults", "tests.nwor.gpu.on_gpu", "tests.nwor.offloading", "tests.nwor.on_cpu"
)


@pytest.fixture(scope="session")
def engines():
    """Engines one after the other in one process, for all modules."""
    from tests.engines import Engines

    with closing(Engines()) as made:
        yield made


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that start engines come first: one that came last would leave the other worker idle for minutes."""
    items.sort(key=lambda item: item.get_closest_marker("engine") is None)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("no NVIDIA GPU here")
