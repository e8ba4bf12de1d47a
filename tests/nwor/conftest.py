# SPDX-License-Identifier: Apache-2.0
"""Engines on a CPU, one after the other in one process, of a random pair: each module has its own."""

import functools
from pathlib import Path

import pytest

from nwor.settings import Settings
from tests.checkpoints import random_pair
from tests.engines import Engines, Outcome
from tests.nwor.on_cpu import spec_of


@pytest.fixture(scope="module")
def engines():
    made = Engines()
    yield made
    made.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("pair")
    random_pair(path, noise=0.3)
    return path


@pytest.fixture(scope="module")
def vanilla(engines, model):
    @functools.cache
    def run(dtype: str, kv_cache_dtype: str, logprobs: int) -> Outcome:
        return engines.run(spec_of(model, dtype, kv_cache_dtype), Settings(audit=not logprobs), logprobs=logprobs)

    return lambda dtype="float32", kv_cache_dtype="auto", logprobs=0: run(dtype, kv_cache_dtype, logprobs)
