# SPDX-License-Identifier: Apache-2.0
"""Engines that are compared run the same compiled graphs: vLLM's key is one, and one engine at a time compiles."""

import fcntl
import inspect
from types import SimpleNamespace

import pytest
from vllm import envs
from vllm.config import CompilationMode
from vllm.config.utils import hash_factors

from nwor import vllm as plugin
from nwor_lab.bench.plan import UNPATCHED, settings_of
from nwor_lab.engines import shared_graphs


@pytest.fixture
def variables(monkeypatch):
    """vLLM's variables as it knows them without a plugin; what is made known in a test is forgotten after it."""
    monkeypatch.setattr(envs, "environment_variables", dict(envs.environment_variables))
    for name in [name for name in envs.environment_variables if name.startswith(shared_graphs.OF_PLUGINS)]:
        del envs.environment_variables[name]


@pytest.mark.parametrize("shared", [True, False])
def test_modes_take_the_graphs_of_vllm_never_patched(shared, variables, monkeypatch):
    """By vLLM's own key they would not."""
    factors = inspect.unwrap(envs.compile_factors)
    factors = shared_graphs.without_plugins(factors) if shared else factors
    never_patched = hash_factors(factors())
    plugin._declare_variables()
    monkeypatch.setenv("VLLM_NWOR_MODE", "stage")
    monkeypatch.setenv("VLLM_PLUGINS", "nwor,nwor_lab")
    assert (hash_factors(factors()) == never_patched) == shared


@pytest.mark.parametrize(("name", "value"), [("VLLM_NWOR_EAGLE_BIAS", "1"), ("VLLM_USE_LAYERNAME", "0")])
def test_what_changes_a_graph_stays_in_the_key(name, value, variables, monkeypatch):
    factors = shared_graphs.without_plugins(inspect.unwrap(envs.compile_factors))
    plugin._declare_variables()
    before = hash_factors(factors())
    monkeypatch.setenv(name, value)
    assert hash_factors(factors()) != before


@pytest.mark.parametrize(
    ("mode", "ranks", "other", "expected"),
    [
        ("VLLM_COMPILE", 1, "same", True),
        ("VLLM_COMPILE", 1, "another", False),
        ("NONE", 1, "same", False),
        ("VLLM_COMPILE", 2, "same", False),
    ],
)
def test_engines_of_one_configuration_compile_one_after_another(mode, ranks, other, expected, tmp_path, monkeypatch):
    """But for those that compile nothing, and those of data parallelism, which would wait for each other for ever."""
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "new"))
    waits = []

    def other_engine_would_wait(core, config):
        (tmp_path / "new").mkdir(exist_ok=True)
        with open(tmp_path / "new" / f"nwor_lab-{other}.lock", "a") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                waits.append(False)
            except BlockingIOError:
                waits.append(True)

    config = SimpleNamespace(
        parallel_config=SimpleNamespace(data_parallel_size=ranks),
        compilation_config=SimpleNamespace(mode=CompilationMode[mode]),
        compute_hash=lambda: "same",
    )
    shared_graphs.one_at_a_time(other_engine_would_wait)(None, config)
    assert waits == [expected]


def test_beside_vllm_never_patched_no_mode_has_a_repaired_drafter():
    assert settings_of("stage", False).eagle_bias
    assert not settings_of("stage", False, repaired=False).eagle_bias
    assert not settings_of(UNPATCHED, False).eagle_bias
