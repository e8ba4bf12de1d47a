# SPDX-License-Identifier: Apache-2.0
"""Settings come from ``VLLM_NWOR_*`` alone, and what is not understood stops the run."""

from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nwor.settings import MODES, PREFIX, WORDS, Settings

FLAGS = [field.name for field in fields(Settings) if field.name not in WORDS]


def test_nothing_set_is_off():
    assert Settings.from_env({}) == Settings()
    assert Settings().mode == "off"


@pytest.mark.parametrize("mode", ["Off", "on", "stagee", "COW", "", " cow", "1"])
def test_a_misspelt_mode_is_an_error(mode):
    """Compared as `!= "off"`, a typo once switched it on."""
    with pytest.raises(ValueError, match="VLLM_NWOR_MODE"):
        Settings.from_env({"VLLM_NWOR_MODE": mode})
    with pytest.raises(ValueError, match="mode"):
        Settings(mode=mode)


@pytest.mark.parametrize("name", ["VLLM_NWOR_MODUS", "VLLM_NWOR_", "VLLM_NWOR_mode", "VLLM_NWOR_DEBUG"])
def test_an_unknown_setting_is_an_error(name):
    """A misspelt name must not leave its setting at the default; the error lists the names there are."""
    with pytest.raises(ValueError, match=name):
        Settings.from_env({name: "stage"})


@pytest.mark.parametrize("value", ["yes", "true", "", "2", "-1", "01", "off"])
@pytest.mark.parametrize("flag", [name.upper() for name in FLAGS])
def test_a_flag_is_0_or_1(flag, value):
    with pytest.raises(ValueError, match=PREFIX + flag):
        Settings.from_env({PREFIX + flag: value})


@pytest.mark.parametrize("flag", FLAGS)
@pytest.mark.parametrize("value", [False, True])
def test_each_variable_reaches_its_own_field(value, flag):
    asked = {"VLLM_NWOR_MODE": "cow", PREFIX + flag.upper(): str(int(value))}
    assert Settings.from_env(asked) == Settings(**{"mode": "cow", flag: value})


def test_other_variables_are_not_looked_at():
    assert Settings.from_env({"VLLM_USE_V1": "x", "NWOR_MODE": "stage", "vllm_nwor_mode": "stage"}) == Settings()


@given(mode=st.sampled_from(MODES), flags=st.fixed_dictionaries({name: st.booleans() for name in FLAGS}))
def test_round_trip(mode, flags):
    """What `environ` writes for a child process is what the child reads, every field of it."""
    settings = Settings(mode, **flags)
    assert Settings.from_env(settings.environ()) == settings
    assert all(name.startswith(PREFIX) and isinstance(value, str) for name, value in settings.environ().items())


def test_ray_takes_every_setting_to_its_workers(monkeypatch):
    """vLLM copies variables to Ray's actors by prefix; ours bear it for that reason."""
    ray_env = pytest.importorskip("vllm.ray.ray_env")
    for name, value in Settings("stage").environ().items():
        monkeypatch.setenv(name, value)
    assert Settings("stage").environ().keys() <= ray_env.get_env_vars_to_copy()
