# SPDX-License-Identifier: Apache-2.0
"""A random pair for engines on a CPU, and what vanilla makes of it; vLLM unpatched."""

import functools
import os
from pathlib import Path

import pytest

from nwor.settings import PREFIX, Settings
from nwor.vllm import patch
from tests.checkpoints import random_pair
from tests.engines import Outcome
from tests.nwor.on_cpu import spec_of


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("pair")
    random_pair(path, noise=0.3)
    return path


@pytest.fixture(scope="session")
def vanilla(engines, model):
    @functools.cache
    def run(dtype: str, kv_cache_dtype: str) -> Outcome:
        return engines.run(spec_of(model, dtype, kv_cache_dtype), Settings(audit=True), logprobs=5)

    return lambda dtype="float32", kv_cache_dtype="auto": run(dtype, kv_cache_dtype)


@pytest.fixture
def unpatched():
    """No hook is on before, and none stays."""
    assert patch.wrapped() == []
    yield
    patch.undo_all()


@pytest.fixture
def environment(monkeypatch):
    """Sets the version that vLLM says it is, and our settings, of which the environment has no others."""
    vllm = pytest.importorskip("vllm", reason="vLLM is not installed: there is nothing to patch")
    for name in list(os.environ):
        if name.startswith(PREFIX):
            monkeypatch.delenv(name)

    def ask(version: str = "", **settings: str) -> None:
        if version:
            monkeypatch.setattr(vllm, "__version__", version)
        for name, value in settings.items():
            monkeypatch.setenv(PREFIX + name, value)

    return ask
