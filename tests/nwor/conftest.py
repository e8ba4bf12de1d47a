# SPDX-License-Identifier: Apache-2.0
"""Engines on a CPU, one after the other in one process, of a random pair: each module has its own."""

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
    cache: dict[tuple, Outcome] = {}

    def run(dtype: str = "float32", kv_cache_dtype: str = "auto", logprobs: int = 0) -> Outcome:
        key = dtype, kv_cache_dtype, logprobs
        if key not in cache:
            settings = Settings(audit=not logprobs)
            cache[key] = engines.run(spec_of(model, dtype, kv_cache_dtype), settings, logprobs=logprobs)
            assert not cache[key].error, cache[key].error
        return cache[key]

    return run
