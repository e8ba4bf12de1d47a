# SPDX-License-Identifier: Apache-2.0
"""A random pair for engines on a GPU, and what vanilla makes of it: each module has its own."""

import functools
from pathlib import Path

import pytest

from nwor.settings import Settings
from tests.checkpoints import random_pair
from tests.nwor.gpu.on_gpu import LAYERS, spec_of


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("pair")
    random_pair(path, noise=0.3, num_hidden_layers=LAYERS, head_dim=64)
    return path


@pytest.fixture(scope="module")
def vanilla(engines, model):
    """Vanilla's outcomes by stack; its audit is the negative control."""
    return functools.cache(lambda stack: engines.run(spec_of(model, stack), Settings(audit=True), logprobs=5))
