# SPDX-License-Identifier: Apache-2.0
"""Pause a mode in a worker that is up, and resume it: vanilla and treatment in one engine, between requests.

Why: engines of one configuration differ, by up to a percent of a step, in kernels that no mode touches. One engine differs
from itself, paused, in nothing else.
How: hooks without a manager call vLLM's own code alone. What a FULL graph holds of them was captured, so for mode
``stage`` vLLM captures its graphs anew, at the first pause without the mode and at the first resume with it. The set of
the start-up is given up: its buffers lie where those of no later capture do, which alone is worth 2 % of a GEMM.
When it can go: when vLLM can switch a hook off.
"""

from typing import Any

from nwor.manager import DraftCommitManager
from nwor.vllm.runner import target_layers


def pause(worker: Any) -> None:
    """Leave this worker to vLLM alone until `resume`; sent to every rank through vLLM's ``collective_rpc``.

    Raises:
        RuntimeError: there is no mode to pause, a window is open, or the runner's graphs cannot be captured again.
    """
    runner = worker.model_runner
    manager = getattr(runner, "nwor", None)
    if manager is None:
        raise RuntimeError("no mode serves here, or it is paused already")
    if manager.is_open:
        raise RuntimeError("a window is open: pause between requests")
    if _in_graphs(manager) and not worker.use_v2_model_runner:
        raise RuntimeError(
            "the V1 runner's FULL graphs hold mode stage: pause it under the V2 runner, or with enforce_eager"
        )
    runner.nwor_paused, runner.nwor = manager, None
    for layer in target_layers(runner).values():
        layer.nwor_paused, layer.nwor = layer.nwor, None
    if _in_graphs(manager):
        _replay(runner, "off")


def resume(worker: Any) -> None:
    """Undo `pause`.

    Raises:
        RuntimeError: no mode is paused here.
    """
    runner = worker.model_runner
    manager = getattr(runner, "nwor_paused", None)
    if manager is None:
        raise RuntimeError("no mode is paused here")
    manager.clear()
    runner.nwor, runner.nwor_paused = manager, None
    for layer in target_layers(runner).values():
        layer.nwor, layer.nwor_paused = layer.nwor_paused, None
    if _in_graphs(manager):
        _replay(runner, manager.mode)


def _in_graphs(manager: DraftCommitManager) -> bool:
    """Whether FULL graphs hold the mode: all that ``cow`` launches comes before and after them."""
    return manager.mode == "stage" and manager.replayed


def _replay(runner: Any, mode: str) -> None:
    """Replay FULL graphs of the target's forward that hold `mode`, which is active already; the first time, capture them."""
    sets = vars(runner).setdefault("nwor_graphs", {})
    runner.cudagraph_manager.graphs = sets.setdefault(mode, {})
    if not sets[mode]:
        speculator, runner.speculator = runner.speculator, None  # its graphs know nothing of a mode
        try:
            runner.capture_model()
        finally:
            runner.speculator = speculator
