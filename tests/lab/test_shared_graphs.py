# SPDX-License-Identifier: Apache-2.0
"""Engines that are compared run the same compiled graphs: vLLM's key is one, and the first engine compiles."""

import inspect
from dataclasses import replace

import pytest
from vllm import envs
from vllm.config.utils import hash_factors

from nwor import vllm as plugin
from nwor_lab.bench import bench
from nwor_lab.bench.plan import UNPATCHED, settings_of
from nwor_lab.engines import shared_graphs
from nwor_lab.engines.spec import EngineSpec


@pytest.fixture
def key(monkeypatch):
    monkeypatch.setattr(envs, "environment_variables", dict(envs.environment_variables))
    monkeypatch.setattr(envs, "compile_factors", inspect.unwrap(envs.compile_factors))
    for name in [name for name in envs.environment_variables if name.startswith("VLLM_NWOR_")]:
        del envs.environment_variables[name]
    return lambda: hash_factors(envs.compile_factors())


def change(monkeypatch, mode: str) -> None:
    """What an engine of a mode has in its environment, and vLLM never patched has not."""
    plugin._declare_variables()
    monkeypatch.setenv("VLLM_NWOR_MODE", mode)
    monkeypatch.setenv("VLLM_PLUGINS", "nwor,nwor_lab")


def test_modes_take_the_graphs_of_vllm_never_patched(key, monkeypatch):
    shared_graphs.install.__wrapped__()
    never_patched = key()
    change(monkeypatch, "stage")
    assert key() == never_patched
    monkeypatch.setenv("VLLM_NWOR_EAGLE_BIAS", "1")
    assert key() != never_patched, "a bias is in the graph"
    monkeypatch.delenv("VLLM_NWOR_EAGLE_BIAS")
    monkeypatch.setenv("VLLM_USE_LAYERNAME", "0" if envs.VLLM_USE_LAYERNAME else "1")
    assert key() != never_patched, "vLLM's own variables stay in the key"


def test_by_vllms_own_key_they_would_not(key, monkeypatch):
    never_patched = key()
    change(monkeypatch, "stage")
    assert key() != never_patched


@pytest.mark.parametrize("eager", [True, False])
def test_where_vllm_compiles_the_first_engine_is_up_before_others_start(engines, eager):
    spec = replace(EngineSpec("target", "eagle"), enforce_eager=eager)
    with bench.started({mode: (spec, settings_of(mode, False), 0) for mode in ("off", "cow")}, ""):
        pass
    before = engines.calls[: engines.calls.index(("cow", "start"))]
    assert (("off", "wait") in before) == (not eager)


def test_beside_vllm_never_patched_no_mode_has_a_repaired_drafter():
    assert settings_of("stage", False).eagle_bias
    assert not settings_of("stage", False, repaired=False).eagle_bias
    assert not settings_of(UNPATCHED, False).eagle_bias
