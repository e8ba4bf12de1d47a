# SPDX-License-Identifier: Apache-2.0
"""Pause a mode in a worker that is up, and resume it: vanilla and treatment in one engine, between requests.

Why: engines of one configuration differ, by up to a percent of a step, in kernels that no mode touches. One engine
differs from itself, paused, in nothing but where the captures of its graphs put their buffers.
How: hooks without a manager call vLLM's own code alone. What a FULL graph holds of them was captured, so beside the
graphs of modes that attend a set of vLLM's own is kept, captured by vLLM's own `capture_model`; vLLM's graph manager
replays out of one dict, which is exchanged for that of the set wanted. Two captures of the same kernels do not take
quite as long: who compares them captures both sets anew now and then.
When it can go: when vLLM can switch a hook off.
"""

from typing import Any

from nwor.manager import DraftCommitManager
from nwor.vllm.context import context_of, manager_of, set_served_groups


def pause(worker: Any) -> None:
    """Leave this worker to vLLM alone until `resume`; sent to every rank through vLLM's ``collective_rpc``.

    Raises:
        RuntimeError: there is no mode to pause, a window is open, or the runner's graphs cannot be captured again.
    """
    runner, manager = worker.model_runner, _serving(worker)
    if _hold(manager):
        if not _graphs(runner):
            _capture_vanilla(runner)
        _replay(runner, "off")
    runner.nwor_paused = context_of(runner).groups
    set_served_groups(runner, ())


def resume(worker: Any) -> None:
    """Undo `pause`.

    Raises:
        RuntimeError: no mode is paused here.
    """
    runner = worker.model_runner
    paused = getattr(runner, "nwor_paused", ())
    if not paused:
        raise RuntimeError("no mode is paused here")
    runner.nwor_paused = ()
    set_served_groups(runner, paused)
    context_of(runner).hold_nothing()
    if _hold(manager := paused[0].manager):
        _replay(runner, manager.mode)


def recapture_graphs(worker: Any) -> None:
    """Capture the mode's FULL graphs and vLLM's own again, where they hold the mode; the sets before are given up.

    Each time takes as much memory for graphs as the first: what a set has had is not used for another.

    Raises:
        RuntimeError: as `pause`.
    """
    runner, manager = worker.model_runner, _serving(worker)
    if _hold(manager):
        _capture(runner, manager.mode)
        _capture_vanilla(runner)


def _serving(worker: Any) -> DraftCommitManager:
    """The manager of a mode that may be paused now."""
    manager = manager_of(worker.model_runner)
    if manager is None:
        raise RuntimeError("no mode serves here, or it is paused already")
    if manager.is_open:
        raise RuntimeError("a window is open: pause between requests")
    if _hold(manager) and not worker.use_v2_model_runner:
        raise RuntimeError(
            "the V1 runner's FULL graphs hold the mode: pause it under the V2 runner, or with enforce_eager"
        )
    return manager


def _hold(manager: DraftCommitManager) -> bool:
    """Whether FULL graphs hold the mode: all that logged steps launch comes before and after them."""
    return manager.attends and manager.uses_full_cudagraphs


def _graphs(runner: Any) -> dict[str, Any]:
    """The sets captured so far by mode, ``off`` for vLLM's own; empty before the first."""
    return vars(runner).setdefault("nwor_graphs", {})


def _replay(runner: Any, mode: str) -> None:
    """Replay the set of `mode` from now on, ``off`` for vLLM's own; it has been captured."""
    runner.cudagraph_manager.graphs = _graphs(runner)[mode]


def _capture(runner: Any, mode: str) -> None:
    """Capture the set of `mode`, which the hooks are serving, and replay it from now on."""
    _graphs(runner)[mode] = {}
    _replay(runner, mode)
    speculator, runner.speculator = runner.speculator, None  # its graphs know nothing of a mode
    try:
        runner.capture_model()
    finally:
        runner.speculator = speculator


def _capture_vanilla(runner: Any) -> None:
    """Capture vLLM's own set beside that of the mode, just captured, which is replayed again."""
    groups = context_of(runner).groups
    mode = groups[0].manager.mode
    _graphs(runner)[mode] = runner.cudagraph_manager.graphs
    set_served_groups(runner, ())
    try:
        _capture(runner, "off")
    finally:
        set_served_groups(runner, groups)
        _replay(runner, mode)
