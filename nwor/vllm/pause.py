# SPDX-License-Identifier: Apache-2.0
"""Pause a mode in a worker that is up, and resume it: vanilla and treatment in one engine, between requests.

Why: engines of one configuration differ, by up to a percent of a step, in kernels that no mode touches. One engine differs
from itself, paused, in nothing but where two captures put their buffers.
How: hooks without a manager call vLLM's own code alone. What a FULL graph holds of them was captured, so for mode
``stage`` vLLM captures its graphs anew, at the first pause without the mode and at the first resume with it. The set of
the start-up is given up: beside it buffers lay so that the same kernels took 1.4 % of a step less, and now 0.8 %.
When it can go: when vLLM can switch a hook off.
"""

from typing import Any

from nwor.vllm import graphs
from nwor.vllm.runner import serve_by


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
    if graphs.hold(manager) and not worker.use_v2_model_runner:
        raise RuntimeError(
            "the V1 runner's FULL graphs hold mode stage: pause it under the V2 runner, or with enforce_eager"
        )
    first = not hasattr(runner, "nwor_paused")
    runner.nwor_paused = manager
    serve_by(runner, None)
    if graphs.hold(manager):
        if first:
            runner.nwor_graphs = {}
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
    runner.nwor_paused = None
    serve_by(runner, manager)
    if graphs.hold(manager):
        _replay(runner, manager.mode)


def _replay(runner: Any, mode: str) -> None:
    """Replay the graphs of `mode`, captured anew the first time."""
    (graphs.replay if mode in runner.nwor_graphs else graphs.capture)(runner, mode)
