# SPDX-License-Identifier: Apache-2.0
"""Engines on a GPU, one after the other in one process, of a random pair: each module has its own."""

import functools
from pathlib import Path

import pytest
import torch

from nwor.settings import Settings
from tests.checkpoints import random_pair
from tests.engines import Engines
from tests.nwor.gpu.on_gpu import LAYERS, spec_of


@pytest.fixture(scope="module")
def engines():
    if not torch.cuda.is_available():
        pytest.skip("no NVIDIA GPU here")
    made = Engines()
    yield made
    made.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("pair")
    random_pair(path, noise=0.3, num_hidden_layers=LAYERS, head_dim=64)
    return path


@pytest.fixture(scope="module")
def vanilla(engines, model):
    """Vanilla's outcomes by stack; its audit is the negative control."""
    return functools.cache(lambda stack: engines.run(spec_of(model, stack), Settings(audit=True), logprobs=5))
