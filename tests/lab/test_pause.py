# SPDX-License-Identifier: Apache-2.0
"""Sets of graphs and the pause of a mode, on a stand-in for the worker: what is captured, full_graphs and refused."""

from types import SimpleNamespace

import pytest

from tests.nwor.paged import Paged

pytest.importorskip("vllm", reason="vLLM is not installed: there is nothing to pause")

from nwor.layout import CacheLayout
from nwor.manager import DraftCommitManager
from nwor.vllm.context import LayerContext, RunnerContext, ServedGroup, manager_of
from nwor_lab.engines import pause


class Worker:
    """Two layers, and a runner whose capture notes what it saw."""

    def __init__(self, mode: str, full_graphs: bool = True, v2: bool = True) -> None:
        layout = CacheLayout.from_kv_caches(Paged().targets())
        manager = DraftCommitManager(layout, mode, 4, 3, 32, uses_full_cudagraphs=full_graphs)
        self.manager = manager
        self.layers = {str(index): SimpleNamespace(nwor=LayerContext(manager, index)) for index in range(2)}
        self.captured: list[list] = []
        self.model_runner = SimpleNamespace(
            nwor=RunnerContext(groups=[ServedGroup(0, list(self.layers.values()), manager)]),
            speculator="drafter",
            cudagraph_manager=SimpleNamespace(graphs={"a batch": "the start-up's"}),
            capture_model=self.capture,
        )
        self.use_v2_model_runner = v2

    def capture(self) -> None:
        runner = self.model_runner
        assert not runner.cudagraph_manager.graphs and runner.speculator is None
        self.captured.append([manager_of(runner), *(layer.nwor for layer in self.layers.values())])
        runner.cudagraph_manager.graphs["a batch"] = "vanilla" if manager_of(runner) is None else "treated"

    @property
    def state(self) -> tuple:
        runner = self.model_runner
        return manager_of(runner), [layer.nwor for layer in self.layers.values()], dict(runner.cudagraph_manager.graphs)


HOLD = pytest.mark.parametrize(
    ("mode", "full_graphs", "hold"), [("stage", True, True), ("stage", False, False), ("cow", True, False)]
)


@HOLD
def test_where_graphs_hold_a_mode_vllms_own_are_captured_at_the_first_pause(mode, full_graphs, hold):
    worker = Worker(mode, full_graphs)
    serving = worker.state
    for _ in range(2):
        pause.pause(worker)
        assert worker.state == (None, [None, None], {"a batch": "vanilla" if hold else "the start-up's"})
        pause.resume(worker)
        assert worker.state == serving
    assert worker.captured == ([[None, None, None]] if hold else []) and worker.model_runner.speculator == "drafter"


@HOLD
@pytest.mark.parametrize("paused_before", [True, False])
def test_both_sets_are_captured_anew_where_graphs_hold_a_mode(mode, full_graphs, hold, paused_before):
    """Where one capture put its buffers must not pass for what a mode takes or saves."""
    worker = Worker(mode, full_graphs)
    manager, layers, _ = worker.state
    if paused_before:
        pause.pause(worker)
        with pytest.raises(RuntimeError, match="paused already"):
            pause.recapture_graphs(worker)
        pause.resume(worker)
    vanilla = getattr(worker.model_runner, "nwor_graphs", {}).get("off")
    worker.captured.clear()
    pause.recapture_graphs(worker)
    assert worker.state == (manager, layers, {"a batch": "treated" if hold else "the start-up's"})
    assert worker.captured == ([[manager, *layers], [None, None, None]] if hold else [])
    assert not hold or worker.model_runner.nwor_graphs["off"] is not vanilla
    pause.pause(worker)
    assert worker.state == (None, [None, None], {"a batch": "vanilla" if hold else "the start-up's"})


def test_what_cannot_be_paused_is_refused_and_left_as_it_was():
    worker = Worker("stage", v2=False)
    before = worker.state
    for refused in (pause.pause, pause.recapture_graphs):
        with pytest.raises(RuntimeError, match="enforce_eager"):
            refused(worker)
    assert worker.state == before and not worker.captured

    worker = Worker("cow")
    manager = manager_of(worker.model_runner)
    manager.way = manager.ways[0]
    with pytest.raises(RuntimeError, match="between requests"):
        pause.pause(worker)
    manager.way = None
    with pytest.raises(RuntimeError, match="paused"):
        pause.resume(worker)
    pause.pause(worker)
    with pytest.raises(RuntimeError, match="paused already"):
        pause.pause(worker)
    worker.model_runner.nwor_paused = None
    with pytest.raises(RuntimeError, match="serves"):
        pause.pause(worker)
