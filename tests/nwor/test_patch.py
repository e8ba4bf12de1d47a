# SPDX-License-Identifier: Apache-2.0
"""Patches go on once, only where vLLM is the one they were written for, and come off whole."""

import inspect
import re

import pytest

from nwor.vllm import patch, releases

pytestmark = pytest.mark.usefixtures("unpatched")


class Base:
    def inherited(self, x: int) -> int:
        return x


class Runner(Base):
    def step(self, tokens: int, scale: int = 1) -> int:
        """One step."""
        return tokens * scale

    def other(self) -> str:
        return "other"


ORIGINALS = dict(vars(Runner))


@pytest.fixture
def known(monkeypatch):
    """What the kit knows of the functions here: releases 0.32.0 and 0.33.0 have them as they are."""
    table = {
        patch.full_name(Runner, name): dict.fromkeys(("0.32.0", "0.33.0"), releases.of_object(ORIGINALS[name]))
        for name in ("step", "other")
    }
    monkeypatch.setattr(releases, "KNOWN", table)
    return table[patch.full_name(Runner, "step")]


def adding(number: int, module: str = __name__):
    """A patch that adds to the result, as if it were written in `module`."""

    def make(original):
        return lambda self, *args, **kwargs: original(self, *args, **kwargs) + number

    make.__module__ = module
    return make


def test_patches_go_on_once_and_come_off_together(known):
    """vLLM loads plugins several times in a process; two layers of one patch would count everything twice."""
    for _ in range(3):
        patch.wrap(Runner, "step", adding(1))
    assert Runner().step(3, scale=2) == 7
    assert (Runner.step.__name__, Runner.step.__doc__) == ("step", "One step.")
    patch.wrap(Runner, "step", adding(100, "elsewhere"))  # the original is seen through the first patch
    patch.wrap(Runner, "other", adding("!", "elsewhere"))
    assert (Runner().step(3), Runner().other()) == (104, "other!")
    assert patch.wrapped() == ["Runner.other", "Runner.step"]
    patch.undo_all()
    patch.undo_all()
    assert dict(vars(Runner)) == ORIGINALS and patch.wrapped() == []
    patch.wrap(Runner, "step", adding(5))
    assert Runner().step(3) == 8, "what was undone can be put on again"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"parameters": "self tokens"}, "new: scale"),
        ({"parameters": "self scale tokens"}, "another order"),
        ({"parameters": "self tokens scale more"}, "gone: more"),
        ({"body": "another"}, "body"),
    ],
)
def test_a_function_of_no_release_is_refused(known, environment, change, says):
    """Whether the release is unknown, or known and changed here: what was read is not what would run."""
    environment("0.33.0+cu130")
    known.update({release: function._replace(**change) for release, function in known.items()})
    with pytest.raises(patch.IncompatibleVLLM, match=rf"Runner.step of vLLM 0.33.0\+cu130 .*{says}"):
        patch.wrap(Runner, "step", adding(1))
    del releases.KNOWN[patch.full_name(Runner, "step")]
    with pytest.raises(patch.IncompatibleVLLM, match="Runner.step"):
        patch.wrap(Runner, "step", adding(1))
    assert dict(vars(Runner)) == ORIGINALS


@pytest.mark.parametrize("name", ["missing", "inherited"])
def test_a_method_the_class_does_not_define_is_refused(name):
    """An inherited one would be patched on the wrong class, and shadow its base's later changes."""
    with pytest.raises(patch.IncompatibleVLLM, match=name):
        patch.wrap(Runner, name, adding(1))
    assert dict(vars(Runner)) == ORIGINALS


def test_a_source_that_cannot_be_read_is_no_known_body(known, monkeypatch):
    monkeypatch.setattr("inspect.linecache.getlines", lambda *file: [])
    with pytest.raises(patch.IncompatibleVLLM, match="source"):
        patch.wrap(Runner, "step", adding(1))


@pytest.mark.parametrize("version", ["0.32.0", "0.32.1", "0.32.0+cpu", "0.33.0", "0.33.1"])
def test_a_known_series_is_served(environment, version):
    environment(version)
    patch.check_version()


# -- vLLM is the one the hooks were written for ------------------------------------------------------------------------


def test_every_hook_fits_the_installed_vllm_and_the_known_releases():
    """Each function is known, as it is installed; and each wrapper takes what the function does in every release."""
    from nwor.settings import Settings
    from nwor.vllm import attention_cpu, batch, runner_v1, runner_v2, stats, worker
    from nwor.vllm.workarounds import cpu_sampling, eagle_bias

    settings = Settings(mode="stage", audit=True, debug_sync=True)
    for module in (worker, stats, runner_v1, runner_v2):
        module.install(settings)
    for module in (attention_cpu, batch, cpu_sampling):
        module.install()
    for on_cpu in (True, False):
        worker._watch_memory("stage", on_cpu)
    eagle_bias.install(repair=True)
    wrappers = {patch.full_name(owner, name): vars(owner)[name] for owner, name, _ in patch._originals}
    of_gpus = {name for name in releases.KNOWN if re.search("(FlashA|Triton|FlashInfer)", name)}
    assert wrappers.keys() | of_gpus == releases.KNOWN.keys()
    for name, wrapper in wrappers.items():
        for release, function in releases.KNOWN[name].items():
            assert takes(wrapper, function.parameters.split()), (name, release)
    assert {*releases.RELEASES} == {"0.32.0", "0.33.0"} == {*releases.KNOWN[name]}


def test_vllm_gives_caches_back_where_we_look():
    """By the functions that are wrapped, called by their names."""
    from vllm.v1.worker import gpu_model_runner
    from vllm.v1.worker.gpu import cudagraph_utils

    profile, shutdown = cudagraph_utils.profile_cudagraph_memory, gpu_model_runner.GPUModelRunner.shutdown
    assert "_teardown_profiling_state" in inspect.unwrap(profile).__code__.co_names
    assert "_cleanup_profiling_kv_cache" in inspect.unwrap(shutdown).__code__.co_names


def takes(wrapper, parameters: list[str]) -> bool:
    """Whether a wrapper names the first of these parameters, in their order, and passes on the rest if there is one."""
    found = inspect.signature(wrapper, follow_wrapped=False).parameters.values()
    named = [one.name for one in found if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)]
    return parameters[: len(named)] == named and (len(named) == len(parameters) or len(named) < len(found))
