# SPDX-License-Identifier: Apache-2.0
"""Settings come from ``VLLM_NWOR_*`` alone, and what is not understood stops the run."""

from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nwor.settings import MODES, PREFIX, WORDS, Settings

FLAGS = [field.name for field in fields(Settings) if field.name not in WORDS]


def test_what_is_not_ours_is_not_looked_at_and_nothing_set_is_off():
    assert Settings.from_env({"VLLM_USE_V1": "x", "NWOR_MODE": "stage", "vllm_nwor_mode": "stage"}) == Settings()
    assert Settings().mode == "off"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("MODE", mode) for mode in ("Off", "on", "stagee", "COW", "", " cow", "1")),  # "!= off" once switched one on
        *((name, "stage") for name in ("MODUS", "", "mode", "DEBUG")),  # a misspelt name must not leave a default
        *((FLAGS[0].upper(), value) for value in ("yes", "true", "", "2", "-1", "01", "off")),
        *((flag.upper(), "yes") for flag in FLAGS),
        ("TUNING", "/no/such/folder"),
    ],
)
def test_what_is_not_understood_is_an_error(name, value):
    with pytest.raises(ValueError, match=PREFIX + name):
        Settings.from_env({PREFIX + name: value})


@given(mode=st.sampled_from(MODES), flags=st.fixed_dictionaries({name: st.booleans() for name in FLAGS}))
def test_each_variable_reaches_its_own_field_and_a_child(mode, flags):
    """What `environ` writes for a child process is what the child reads, every field of it."""
    settings = Settings(mode, **flags)
    asked = {PREFIX + "MODE": mode, **{PREFIX + name.upper(): str(int(value)) for name, value in flags.items()}}
    assert Settings.from_env(asked) == Settings.from_env(settings.environ()) == settings


def test_ray_takes_every_setting_to_its_workers(monkeypatch):
    """vLLM copies variables to Ray's actors by prefix; ours bear it for that reason."""
    ray_env = pytest.importorskip("vllm.ray.ray_env")
    for name, value in Settings("stage").environ().items():
        monkeypatch.setenv(name, value)
    assert Settings("stage").environ().keys() <= ray_env.get_env_vars_to_copy()
