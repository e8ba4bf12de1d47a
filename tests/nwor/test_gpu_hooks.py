# SPDX-License-Identifier: Apache-2.0
"""Which of vLLM's attention and ours runs, for each kind of batch on a GPU: the hooks alone, on stand-ins."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from nwor import ways
from nwor.layout import CacheLayout
from nwor.manager import DraftCommitManager
from nwor.vllm import attention_gpu
from nwor.vllm.context import LayerContext
from nwor.ways import Way
from tests.nwor.paged import Paged

WIDTH = 4


class Layer:
    """One attention layer behind its hooks, and what it called.

    way: of the window that is open, a class of `nwor.ways`; None where none is. mode: as a manager's; "logs" is `stage`
    where our attention does not serve.
    """

    layer_name = "layers.0"

    def __init__(self, monkeypatch, mode: str, way: type[Way] | None, dummy: bool) -> None:
        self.calls: list[str] = []
        ours = ModuleType("nwor.attention.verify")
        self.masks: list[tuple] = []

        def make(**fixed):
            self.masks.append((fixed["alibi_slopes"], fixed["sinks"]))
            return lambda *step: self.calls.append(f"ours {step[-1][0]:.0f}")

        ours.LayerAttention = make
        monkeypatch.setitem(sys.modules, "nwor.attention.verify", ours)
        manager = DraftCommitManager(
            CacheLayout.from_kv_caches(Paged().targets()), "stage" if mode == "logs" else mode, 4, WIDTH - 1, 64,
            attends=mode != "logs",
        )  # fmt: skip
        manager.is_dummy_or_capture = dummy
        if way is not None:
            (manager.way,) = [one for one in manager.ways if type(one) is way]
            manager.serves_attention = way.attends
        if manager.page_slots is not None:
            manager.page_slots.fill_(7)
        self.nwor = LayerContext(manager, 0)
        self._q_scale = self._k_scale = self._v_scale = None
        self.impl = SimpleNamespace(
            scale=1.0, logits_soft_cap=0.0, sliding_window=(-1, -1), kv_cache_dtype="auto",
            alibi_slopes="the slopes", sinks="the sinks",
        )  # fmt: skip

    def run(self, monkeypatch, max_query_len: int) -> list[str]:
        metadata = SimpleNamespace(
            max_query_len=max_query_len, seq_lens=torch.zeros(8), query_start_loc=None, block_table=None,
            slot_mapping=torch.full((8,), 3),
        )  # fmt: skip
        monkeypatch.setattr(attention_gpu, "attention_metadata", lambda layer_name: metadata)
        update = attention_gpu._make_update(
            lambda impl, layer, key, value, cache, slots: self.calls.append(f"write {slots[0]}")
        )
        forward = attention_gpu._make_forward(lambda *arguments: self.calls.append("vLLM"))
        update(self.impl, self, None, None, None, metadata.slot_mapping)
        query = torch.zeros(16, 1, 1)  # padded further than the slots
        forward(self.impl, self, query, None, None, None, metadata, query)
        return self.calls


STAGED, DIRECT, VLLMS = ["ours 7"], ["ours 3"], ["write 3", "vLLM"]
# The mode, the way of the open window, whether it is a dummy run or a capture, its longest query, and what is called.
CASES = {
    "windows": ("stage", ways.Staged, False, WIDTH, STAGED),
    "windows beside a prefill": ("stage", ways.Logged, False, 30, VLLMS),
    "no window": ("stage", None, False, WIDTH, VLLMS),
    "a captured decode": ("stage", None, True, WIDTH, STAGED),
    "a captured batch of any queries": ("stage", None, True, WIDTH + 1, VLLMS),
    "windows of the control": ("direct", ways.WrittenThrough, False, WIDTH, DIRECT),
    "no window of the control": ("direct", None, False, WIDTH, VLLMS),
    "a captured decode of the control": ("direct", None, True, WIDTH, DIRECT),
    "windows where every step is logged": ("logs", ways.Logged, False, WIDTH, VLLMS),
    "windows of cow": ("cow", ways.Logged, False, WIDTH, VLLMS),
    "a capture of cow": ("cow", None, True, WIDTH, VLLMS),
}


@pytest.mark.parametrize("case", CASES)
def test_what_serves_a_batch(case, monkeypatch):
    """Ours or vLLM's writes and attends, never both: by the slots of the window, or by vLLM's, which stay as they are.

    Where vLLM's runs, a row that is to be restored has to be in its page: held rows were masked out of its write once.
    """
    mode, way, dummy, max_query_len, called = CASES[case]
    layer = Layer(monkeypatch, mode, way, dummy)
    assert layer.run(monkeypatch, max_query_len) == called
    assert layer.nwor.manager._staged[0] is (called is not VLLMS), "or the commit must not be"


@pytest.mark.parametrize(("mode", "way"), [("stage", ways.Staged), ("direct", ways.WrittenThrough)])
def test_a_query_longer_than_a_window_stops_a_step_of_windows(mode, way, monkeypatch):
    """Our kernel would leave its last rows out; nothing has been written by then."""
    layer = Layer(monkeypatch, mode, way, dummy=False)
    with pytest.raises(RuntimeError, match="query"):
        layer.run(monkeypatch, WIDTH + 1)
    assert not layer.calls


def test_slopes_and_sinks_reach_the_kernel(monkeypatch):
    """The layer's attention is made once, and anew where the layer is served anew."""
    layer = Layer(monkeypatch, "stage", ways.Staged, dummy=False)
    for made in (1, 1, 2):
        if made == 2:
            layer.nwor = LayerContext(layer.nwor.manager, 0)
        layer.run(monkeypatch, WIDTH)
        assert layer.masks == made * [("the slopes", "the sinks")]
