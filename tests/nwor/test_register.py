# SPDX-License-Identifier: Apache-2.0
"""What the plugin's call does to a process of vLLM, and to each engine that is made there."""

import pytest

from nwor.settings import PREFIX, Settings
from nwor.vllm import patch

pytestmark = pytest.mark.usefixtures("unpatched")

FRONT_AND_CORE = ["EngineCore._initialize_kv_caches", "WorkerWrapperBase.init_device"]
COUNTS = ["Scheduler.update_from_output"]
READERS, METRICS = ["Scheduler.schedule"], ["StatLoggerManager.__init__"]


@pytest.mark.parametrize(
    ("asked", "patched"),
    [
        ({}, []),
        ({"MODE": "off"}, []),
        ({"AUDIT": "1"}, []),
        ({"EAGLE_BIAS": "1"}, FRONT_AND_CORE),
        ({"FIX_CPU_SAMPLING": "1"}, FRONT_AND_CORE),
        ({"MODE": "cow"}, FRONT_AND_CORE + COUNTS + METRICS),
        ({"MODE": "stage"}, FRONT_AND_CORE + COUNTS + METRICS + READERS),
        ({"MODE": "direct"}, FRONT_AND_CORE + COUNTS + METRICS + READERS),
        ({"MODE": "stage", "EMIT_METRICS": "0"}, FRONT_AND_CORE + COUNTS + READERS),
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


@pytest.fixture
def make_engine(environment, monkeypatch, tmp_path):
    """Lets vLLM take the arguments of a process's first engine, or of a later one; returns what is wrapped then."""
    from vllm import EngineArgs, plugins

    from nwor import register

    to_call = [register]  # once, as vLLM's own does
    monkeypatch.setattr(plugins, "load_general_plugins", lambda: to_call.pop()() if to_call else None)

    def make(**asked: str) -> list[str]:
        environment(**asked)
        EngineArgs(str(tmp_path))
        return patch.wrapped()

    return make


def test_each_engine_of_a_process_has_its_own_settings(make_engine):
    """vLLM calls a plugin once a process: what the first engine had must not be another's, unsaid; nor a mistake's."""
    with pytest.raises(ValueError, match="stgae"):
        make_engine(MODE="stgae")
    assert make_engine(MODE="off") == []
    of_cow = sorted(FRONT_AND_CORE + COUNTS + METRICS)
    of_stage = sorted(of_cow + READERS)
    assert make_engine(MODE="stage") == of_stage
    methods = vllm_methods()
    assert make_engine(MODE="stage") == of_stage and vllm_methods() == methods, "once for the same"
    assert make_engine(MODE="cow") == of_cow and vllm_methods() != methods
    assert make_engine(EMIT_METRICS="0") == sorted(FRONT_AND_CORE + COUNTS)
    assert make_engine(MODE="off") == []


def test_a_worker_of_this_process_keeps_its_settings(make_engine):
    from nwor.vllm import runner_v1

    make_engine(MODE="stage")
    runner_v1.install(Settings(mode="stage"))
    hooks = make_engine(MODE="stage")
    for asked in ({"MODE": "cow"}, {"MODE": "off"}, {"MODE": "stage", "EMIT_METRICS": "0", "TUNING": "/"}):
        with pytest.raises(RuntimeError, match="made in this process"):
            make_engine(**asked)
    assert make_engine(MODE="stage", EMIT_METRICS="1", TUNING="") == hooks


def test_a_registration_that_fails_half_way_leaves_no_hook(make_engine, monkeypatch):
    """So that what the message says can be done: run with the mode off."""
    from nwor.vllm import stats

    def fail(settings):
        raise patch.IncompatibleVLLM("another scheduler")

    with monkeypatch.context() as for_once:
        for_once.setattr(stats, "install", fail)
        with pytest.raises(patch.IncompatibleVLLM, match="another scheduler"):
            make_engine(MODE="stage")
    assert patch.wrapped() == make_engine(MODE="off") == []
    assert make_engine(MODE="cow") != []


@pytest.mark.parametrize(
    ("version", "asked", "error", "says"),
    [
        *((version, {"MODE": "stage"}, patch.IncompatibleVLLM, version)
          for version in ("0.31.0", "0.34.0", "0.3.32", "0.320.1", "1.32.0", "0.33")),
        *(("", asked, ValueError, PREFIX) for asked in ({"MODE": "stagee"}, {"MODUS": "stage"}, {"AUDIT": "yes"})),
        ("", {"MODE": "stage"}, ImportError, "not built"),
    ],
    ids=str,
)  # fmt: skip
def test_what_cannot_be_had_stops_the_registration(environment, monkeypatch, version, asked, error, says):
    """Another vLLM, a misspelt setting, no operators: no baseline under the treatment's name."""
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
    from vllm.v1.metrics.loggers import StatLoggerManager
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    owners = {owner.__qualname__: owner for owner in (EngineCore, Scheduler, StatLoggerManager, WorkerWrapperBase)}
    names = [name.split(".") for name in FRONT_AND_CORE + COUNTS + METRICS + READERS]
    return {f"{owner}.{name}": vars(owners[owner])[name] for owner, name in names}
