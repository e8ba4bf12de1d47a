# SPDX-License-Identifier: Apache-2.0
"""Patches go on once, only where vLLM is the one they were written for, and come off whole."""

import inspect
import os
import re
from types import ModuleType

import pytest

from nwor.settings import PREFIX
from nwor.vllm import patch, releases


@pytest.fixture(autouse=True)
def unpatched():
    assert patch.wrapped() == []
    yield
    patch.undo_all()


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


def adding(number: int, module: str = __name__):
    """A patch that adds to the result, as if it were written in `module`."""

    def make(original):
        return lambda self, *args, **kwargs: original(self, *args, **kwargs) + number

    make.__module__ = module
    return make


def test_wrap_and_undo(known):
    patch.wrap(Runner, "step", adding(1))
    assert Runner().step(3, scale=2) == 7
    assert (Runner.step.__name__, Runner.step.__doc__) == ("step", "One step.")
    assert patch.wrapped() == ["Runner.step"]
    patch.undo_all()
    assert vars(Runner)["step"] is ORIGINALS["step"]
    assert patch.wrapped() == []
    patch.undo_all()
    assert dict(vars(Runner)) == ORIGINALS


def test_a_module_wraps_a_method_once(known):
    """vLLM loads plugins several times in a process; two layers of one patch would count everything twice."""
    for _ in range(3):
        patch.wrap(Runner, "step", adding(1))
    assert Runner().step(3) == 4
    patch.undo_all()
    patch.wrap(Runner, "step", adding(5))
    assert Runner().step(3) == 8, "what was undone can be put on again"


def test_two_modules_nest_and_come_off_together(known):
    """The audit wraps what the runner's patch wrapped: the signature seen through the first is still the original's."""
    patch.wrap(Runner, "step", adding(1))
    patch.wrap(Runner, "step", lambda original: lambda self, tokens, scale=1: 10 * original(self, tokens))
    assert Runner().step(3) == 4, "the same module again: the first patch stays alone"
    patch.wrap(Runner, "step", adding(100, "elsewhere"))
    patch.wrap(Runner, "other", adding("!", "elsewhere"))
    assert Runner().step(3) == 104
    assert Runner().other() == "other!"
    assert patch.wrapped() == ["Runner.other", "Runner.step"]
    patch.undo_all()
    assert dict(vars(Runner)) == ORIGINALS


def sample(logits: int) -> int:
    return logits + 1


def test_functions_of_a_module(monkeypatch):
    module = ModuleType("some.sampler")
    module.sample = sample
    monkeypatch.setitem(releases.KNOWN, "some.sampler.sample", {"0.32.0": releases.of_object(sample)})
    patch.wrap(module, "sample", lambda sample: lambda logits: 10 * sample(logits))
    assert module.sample(1) == 20
    assert patch.wrapped() == ["sampler.sample"]
    patch.undo_all()
    assert module.sample is sample


@pytest.mark.parametrize(
    ("parameters", "difference"),
    [
        ("self tokens", "new: scale"),
        ("self scale tokens", "in another order"),
        ("self tokens scale more", "gone: more"),
        ("self tokens factor", "new: scale; gone: factor"),
    ],
)
def test_a_signature_of_no_release_is_refused(known, parameters, difference):
    """The message names the function, what it takes, and how each release's differs."""
    of_the_older = known["0.32.0"]._replace(parameters="self")
    known.update({"0.32.0": of_the_older, "0.33.0": known["0.33.0"]._replace(parameters=parameters)})
    message = (
        r"Runner.step takes self tokens scale; NWOR knows vLLM 0.32.0's self \(new: tokens, scale\), "
        rf"vLLM 0.33.0's {parameters} \({difference}\); install vllm==0.32.0, or run with VLLM_NWOR_MODE=off"
    )
    with pytest.raises(patch.IncompatibleVLLM, match=message):
        patch.wrap(Runner, "step", adding(1))
    assert dict(vars(Runner)) == ORIGINALS


def test_a_function_that_no_release_names_is_refused(known):
    del releases.KNOWN[patch.full_name(Runner, "step")]
    with pytest.raises(patch.IncompatibleVLLM, match=r"Runner.step takes self tokens scale; NWOR knows none; install"):
        patch.wrap(Runner, "step", adding(1))


@pytest.mark.parametrize("name", ["missing", "inherited"])
def test_a_method_the_class_does_not_define_is_refused(name):
    """An inherited one would be patched on the wrong class, and shadow its base's later changes."""
    with pytest.raises(patch.IncompatibleVLLM, match=f"Runner defines no {name}"):
        patch.wrap(Runner, name, adding(1))
    assert dict(vars(Runner)) == ORIGINALS
    assert patch.wrapped() == []


# -- bodies ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["0.32.0", "0.33.0+cu130", "0.32.1"])
def test_a_body_of_no_release_is_refused(known, environment, version):
    """Whether the release is unknown, or known and changed here: what was read is not what would run."""
    environment(version)
    patch.wrap(Runner, "step", adding(1))
    patch.undo_all()
    known.update({release: function._replace(body="another") for release, function in known.items()})
    message = f"Runner.step of vLLM {version} has a body that is none of 0.32.0, 0.33.0's; install vllm==0.32.0, "
    with pytest.raises(patch.IncompatibleVLLM, match=re.escape(message) + ".*nwor doctor --vllm --record"):
        patch.wrap(Runner, "step", adding(1))
    assert dict(vars(Runner)) == ORIGINALS


def test_a_source_that_cannot_be_read_is_no_known_body(known, environment, monkeypatch):
    environment("0.32.0")
    monkeypatch.setattr("inspect.linecache.getlines", lambda *file: [])
    with pytest.raises(patch.IncompatibleVLLM, match=r"Runner.step of vLLM 0.32.0 has no source to compare with"):
        patch.wrap(Runner, "step", adding(1))
    assert releases.of_object(ORIGINALS["step"]) == ("self tokens scale", "")


# -- the plugin --------------------------------------------------------------------------------------------------------


FRONT_AND_CORE = ["EngineCore._initialize_kv_caches", "WorkerWrapperBase.init_device"]
COUNTS = ["Scheduler.make_spec_decoding_stats", "Scheduler.update_from_output"]
METRICS = ["PrometheusStatLogger.__init__", "StatLoggerManager.record"]


@pytest.mark.parametrize("version", ["0.32.0", "0.32.1", "0.32.0+cpu", "0.33.0", "0.33.1"])
def test_a_known_series_is_served(environment, version):
    environment(version)
    patch.check_version()


@pytest.mark.parametrize(
    ("asked", "patched"),
    [
        ({}, []),
        ({"MODE": "off"}, []),
        ({"AUDIT": "1"}, []),
        ({"EAGLE_BIAS": "1"}, FRONT_AND_CORE),
        ({"FIX_CPU_SAMPLING": "1"}, FRONT_AND_CORE),
        ({"MODE": "cow"}, FRONT_AND_CORE + COUNTS + METRICS),
        ({"MODE": "stage"}, FRONT_AND_CORE + COUNTS + METRICS),
        ({"MODE": "stage", "EMIT_METRICS": "0"}, FRONT_AND_CORE + COUNTS),
    ],
    ids=str,
)
def test_what_a_process_is_patched_with(environment, asked, patched):
    """Off is vLLM untouched; whatever was put on comes off by one call,
    and a second registration changes nothing."""
    from nwor import register

    environment(**asked)
    originals = vllm_methods()
    register()
    after_one = vllm_methods()
    register()
    assert patch.wrapped() == sorted(patched)
    assert vllm_methods() == after_one
    changed = {name for name, method in after_one.items() if method is not originals[name]}
    assert changed == set(patched)
    patch.undo_all()
    assert vllm_methods() == originals


def test_without_its_variables_the_lab_patches_nothing(environment):
    from nwor_lab import plugin

    environment(MODE="off")
    plugin.register()
    assert patch.wrapped() == []


@pytest.mark.parametrize(
    ("version", "asked", "error", "says"),
    [
        *[
            (
                version,
                {"MODE": "stage"},
                patch.IncompatibleVLLM,
                f"vLLM {version} is none of 0.32.x, 0.33.x.*install vllm",
            )
            for version in ("0.31.0", "0.34.0", "0.3.32", "0.320.1", "1.32.0", "0.33")
        ],
        *[("", asked, ValueError, PREFIX) for asked in ({"MODE": "stagee"}, {"MODUS": "stage"}, {"AUDIT": "yes"})],
        ("", {"MODE": "stage"}, ImportError, "not built"),
    ],
    ids=str,
)
def test_what_cannot_be_had_stops_the_registration(environment, monkeypatch, version, asked, error, says):
    """Another vLLM, a misspelt setting, no operators: an exception of the plugin's call, which vLLM lets through, and
    no baseline under the treatment's name."""
    from nwor import ops, register

    def fail() -> None:
        raise ImportError("the operators are not built")

    environment(version, **asked)
    monkeypatch.setattr(ops, "load", fail)
    with pytest.raises(error, match=says):
        register()
    assert patch.wrapped() == []


def test_vllm_knows_our_variables(environment, monkeypatch, tmp_path):
    """vLLM warns of every VLLM_* variable it does not list; what it compiled for one mode it takes for another."""
    from vllm import envs

    from nwor import register
    from nwor.settings import Settings

    theirs = {name: get for name, get in envs.environment_variables.items() if not name.startswith(PREFIX)}

    def factors(**asked: str) -> dict[str, object]:
        """Of a process that vLLM starts anew."""
        patch.undo_all()
        monkeypatch.setattr(envs, "environment_variables", dict(theirs))
        environment(**asked)
        register()
        assert envs.environment_variables.keys() >= Settings().environ().keys()
        return envs.compile_factors()

    of_off = factors()
    assert factors(MODE="stage", DEBUG_SYNC="1", AUDIT="1", EMIT_METRICS="0", TUNING=str(tmp_path)) == of_off
    assert factors(MODE="cow", EAGLE_BIAS="0") == of_off
    assert factors(EAGLE_BIAS="1") == factors(MODE="stage", EAGLE_BIAS="1") != of_off, "biases are in a drafter's graph"


def vllm_methods() -> dict[str, object]:
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.metrics.loggers import PrometheusStatLogger, StatLoggerManager
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    owners = {
        owner.__qualname__: owner
        for owner in (EngineCore, PrometheusStatLogger, Scheduler, StatLoggerManager, WorkerWrapperBase)
    }
    names = [name.split(".") for name in FRONT_AND_CORE + COUNTS + METRICS]
    return {f"{owner}.{name}": vars(owners[owner])[name] for owner, name in names}


# -- vLLM is the one the hooks were written for ------------------------------------------------------------------------


def test_every_hook_fits_the_installed_vllm_and_the_known_releases():
    """Each function is known, as it is installed; and each wrapper takes what the function does in every release."""
    from nwor.settings import Settings
    from nwor.vllm import attention_cpu, metrics, runner_v1, runner_v2, scheduler, worker
    from nwor.vllm.workarounds import cpu_sampling, eagle_bias

    settings = Settings(mode="stage", audit=True)
    for module in (worker, scheduler, runner_v1, runner_v2):
        module.install(settings)
    for module in (attention_cpu, cpu_sampling, metrics):
        module.install()
    worker._reset_after_warm_up()
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
