# SPDX-License-Identifier: Apache-2.0
"""What a runner's context does with its windows and its memory where a step fails or the caches go, on stand-ins."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed: there is nothing to hook into")

from nwor.counters import Counters
from nwor.vllm import worker
from nwor.vllm.context import RunnerContext, ServedGroup
from nwor.vllm.initialize import _log, held_bytes
from tests.nwor import faults
from tests.nwor.stepping import DRAFTS, Stepping
from tests.nwor.steps import ways


@ways
@pytest.mark.parametrize("where", ["forward", "sampler"])
def test_a_step_that_fails_is_cancelled(where, way):
    """The error goes on to vLLM; no window stays open, the drafts' slots are as they were."""
    made = Stepping(way)
    with pytest.raises(MemoryError, match=where.replace("forward", "third layer")):
        made.run(None, **({"fail": True} if where == "forward" else {}))
    assert not made.manager.is_open
    assert made.manager.counters.read() == Counters(cancelled=1)
    made.step.expect(made.batch.kept(DRAFTS), layers=(0, 1) if where == "forward" else (0, 1, 2))
    made.step.assert_pool()


@pytest.mark.parametrize("way", ["cow", "logged"])
@pytest.mark.parametrize("failing", ["log_all_layers", "restore_all_layers"])
def test_what_fails_in_a_logged_window_leaves_none_open(failing, way, monkeypatch):
    """Neither a log that was never taken nor one that cannot be restored hides the error, or stops the next step."""

    def fail(run: object, arguments: object) -> None:
        raise RuntimeError(f"{failing} failed")

    made = Stepping(way)
    faults.instead_of(failing, fail, monkeypatch)
    said = failing if failing == "log_all_layers" else "third layer"
    with pytest.raises((MemoryError, RuntimeError), match=said) as error:
        made.run(None, fail=True)
    assert not made.manager.is_open
    notes = getattr(error.value, "__notes__", [])
    assert notes == (
        [] if failing == "log_all_layers" else [f"NWOR could not cancel the step's window: {failing} failed"]
    )
    if failing == "log_all_layers":
        made.step.assert_pool()  # nothing is restored from a log that was not taken
    monkeypatch.undo()
    assert made.step.begin(), "the next step has a window"


def test_all_groups_are_cancelled_though_one_fails():
    open_groups = [Stepping("cow"), Stepping("logged"), Stepping("staged")]

    def fail() -> None:
        raise RuntimeError("the second")

    for made in open_groups:
        made.step.begin()
    open_groups[1].manager.cancel = fail
    context = RunnerContext(groups=[ServedGroup(0, (), made.manager) for made in open_groups])
    with pytest.raises(RuntimeError, match="the second"):
        context.cancel()
    assert [made.manager.is_open for made in open_groups] == [False, True, False]


def test_what_is_held_beside_the_cache_is_counted_once():
    """Rows, slots, counts and the workspace that groups share; no view twice, and not the cache."""
    made = Stepping("staged")
    manager = made.manager
    manager.attention = SimpleNamespace(partials=torch.empty(1000, dtype=torch.float32), some=manager.rows[:1])
    held = manager.rows, manager.slots, manager.staging_rows, manager.page_slots, manager.attention.partials
    counts = 2 * 6 * 8 + 2 * 4 * len(manager.slots)
    group = ServedGroup(0, (), manager)
    assert held_bytes([group, group]) == sum(tensor.nbytes for tensor in held) + counts


def test_what_serves_and_why_not_is_said_for_each_engine_of_a_process(caplog, monkeypatch):
    """By one rank of a machine, also where the engine before said the same; by each that serves nothing, a warning."""
    parallel_state = pytest.importorskip("vllm.distributed.parallel_state")
    caplog.set_level("INFO", "vllm.nwor")
    serving, logging, nothing = Stepping("staged").nwor, Stepping("logged").nwor, RunnerContext(reason="of nothing")
    logging.reason = "of a log"
    for first in (True, True, False):
        monkeypatch.setattr(parallel_state, "is_local_first_rank", lambda first=first: first)
        for context in (serving, logging, nothing):
            _log("stage", context)
    said = [(line.levelname, line.getMessage()) for line in caplog.records]
    assert [level for level, _ in said] == [*2 * ["INFO", "INFO", "WARNING"], "WARNING"]
    assert "3 layers, for 4 requests of 3 drafts, and holds 0.0 MiB" in said[0][1] and "logged" not in said[0][1]
    assert "logged, for of a log" in said[1][1] and "of nothing" in said[2][1]


@pytest.mark.parametrize("on_gpu", [True, False])
@pytest.mark.parametrize(
    ("asked_for", "available", "planned", "left"),
    [(None, 900, 300, 600), (None, 900, 0, 900), (500, 500, 300, 500), (None, 300, 300, None)],
    ids=["planned", "nothing is held", "a user's own number stands", "no room"],
)
def test_what_a_mode_holds_is_taken_from_what_vllm_plans_with(asked_for, available, planned, left, on_gpu, monkeypatch):
    """What vLLM advises for the size of the cache, on a GPU, counts it too."""
    monkeypatch.setattr(worker, "planned_bytes", lambda runner, mode: planned)
    made = SimpleNamespace(cache_config=SimpleNamespace(kv_cache_memory_bytes=asked_for), model_runner=None)
    if on_gpu:
        made.total_consumed, made.available_kv_cache_memory_bytes = 100, available
    determine = worker._make_available(lambda self: available, "stage")
    if left is None:
        with pytest.raises(RuntimeError, match="max_num_seqs"):
            determine(made)
        return
    assert determine(made) == left
    if on_gpu:
        assert (made.total_consumed, made.available_kv_cache_memory_bytes) == (100 + available - left, left)
