# SPDX-License-Identifier: Apache-2.0
"""Sets of FULL graphs of the target's forward under the V2 runner: with mode ``stage`` in them, and vLLM's own.

Why: a FULL graph replays the attention that was captured, and who attends is decided anew in each step: where contexts
are long vLLM's attention may be as good, and a mode may be paused.
How: vLLM's graph manager replays out of one dict, which is exchanged for that of the set wanted. Sets are captured by
vLLM's own `capture_model`, with the hooks going through the manager or not.
When it can go: when the key of a graph can say who attends.
"""

from typing import Any

from nwor.manager import DraftCommitManager
from nwor.vllm.runner import serve_by


def hold(manager: DraftCommitManager) -> bool:
    """Whether FULL graphs hold the mode: all that ``cow`` launches comes before and after them."""
    return manager.mode == "stage" and manager.replayed


def replay(runner: Any, mode: str) -> None:
    """Replay the set of `mode` from now on, ``off`` for vLLM's own; it has been captured."""
    runner.cudagraph_manager.graphs = runner.nwor_graphs[mode]


def capture(runner: Any, mode: str) -> None:
    """Capture the set of `mode`, which the hooks are serving, and replay it from now on."""
    runner.nwor_graphs[mode] = {}
    replay(runner, mode)
    speculator, runner.speculator = runner.speculator, None  # its graphs know nothing of a mode
    try:
        runner.capture_model()
    finally:
        runner.speculator = speculator


def capture_vanilla(runner: Any) -> None:
    """Capture vLLM's own set beside that of the mode, just captured, which is replayed again."""
    manager = runner.nwor
    runner.nwor_graphs = {manager.mode: runner.cudagraph_manager.graphs}
    serve_by(runner, None)
    try:
        capture(runner, "off")
    finally:
        serve_by(runner, manager)
        replay(runner, manager.mode)
