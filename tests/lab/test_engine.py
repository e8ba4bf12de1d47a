# SPDX-License-Identifier: Apache-2.0
"""An engine's configuration: what of it reaches vLLM, and what is refused before one starts."""

import pytest

from nwor.settings import Settings
from nwor_lab import paths
from nwor_lab.engines.engine import Engine, EngineError, EngineSpec

PAIR = (str(paths.PAIR_TARGET), str(paths.PAIR_EAGLE))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"k": 0}, "k must be .* got 0"),
        ({"k": 129}, "k must be .* at most 128"),
        ({"runner": "v3"}, "runner must be v1, v2 or empty"),
        ({"cudagraph_mode": "FULL"}, "leave out enforce_eager"),
        ({"cudagraph_capture_sizes": (9, 18)}, "leave out enforce_eager"),
    ],
)
def test_a_spec_that_cannot_be_served_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        EngineSpec(**{"model": PAIR[0], "draft": PAIR[1]} | fields)


def test_a_version_of_flash_attention_arrives_in_vllms_config():
    arg_utils = pytest.importorskip("vllm.engine.arg_utils", reason="vLLM is not installed")
    forced = {"attention_backend": "FLASH_ATTN", "flash_attn_version": 2}
    for given, expected in (({}, (None, None)), (forced, ("FLASH_ATTN", 2))):
        arguments = arg_utils.EngineArgs(**EngineSpec(*PAIR, **given).llm_arguments())
        found = arguments.create_engine_config().attention_config
        assert (found.backend and found.backend.name, found.flash_attn_version) == expected


@pytest.mark.parametrize(
    ("fields", "expected"),
    [({"enforce_eager": False}, True), ({"enforce_eager": False, "deterministic": False}, False), ({}, False)],
)
def test_engines_that_compile_time_no_choice_of_their_own(fields, expected):
    """By it two engines round differently; the option is one that TorchInductor has."""
    from torch._inductor import config as inductor
    from vllm.engine.arg_utils import EngineArgs

    assert inductor.deterministic is False
    given = EngineArgs(**EngineSpec(*PAIR, **fields).llm_arguments()).compilation_config.inductor_compile_config
    assert given.get("deterministic", False) is expected


@pytest.mark.parametrize(("up", "at"), [(False, "start"), (True, "report")])
def test_an_engine_that_was_killed_is_named_with_its_log(up, at, tmp_path):
    """By the kernel for want of memory, say, between two calls too."""
    with Engine(EngineSpec(*PAIR), Settings(mode="cow"), log=tmp_path / "log") as engine:
        engine._process.kill()
        engine._process.join()
        engine._ready = up
        with pytest.raises(EngineError, match=f"{at}.* -9"):
            engine.report()
