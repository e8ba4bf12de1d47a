# SPDX-License-Identifier: Apache-2.0
"""Which of vLLM's attention and ours runs, for each kind of batch on a GPU: the hooks alone, on stand-ins."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from nwor.vllm import attention_gpu
from nwor.vllm.context import LayerContext

WIDTH = 4


class Layer:
    """One attention layer behind its hooks, and what it called."""

    layer_name = "layers.0"

    def __init__(self, monkeypatch, is_open: bool, capture: bool, direct: bool = False) -> None:
        self.calls: list[str] = []
        ours = ModuleType("nwor.attention.verify")
        self.masks: list[tuple] = []

        def make(**fixed):
            self.masks.append((fixed["alibi_slopes"], fixed["sinks"]))
            return lambda *step: self.calls.append(f"ours {step[-1][0]:.0f}")

        ours.LayerAttention = make
        monkeypatch.setitem(sys.modules, "nwor.attention.verify", ours)
        manager = SimpleNamespace(
            max_query_len=WIDTH, is_open=is_open, is_dummy_or_capture=capture,
            page_slots=None if direct else torch.full((64,), 7),
            staging_rows=None, staging_of=lambda index: None, mark_staged=lambda index: None, attention=None,
            writes_first=False, graphs_of_prefills=False,
        )  # fmt: skip
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


# A capture or a real step, a window open or not, its longest query, and what is called.
CASES = {
    "windows": (False, True, 4, ["ours 7"]),
    "no window": (False, False, 4, ["write 7", "vLLM"]),
    "no drafts": (False, False, 1, ["write 7", "vLLM"]),
    "prefill beside windows": (False, True, 30, ["write 7", "vLLM", "ours 7"]),
    "prefill alone": (False, False, 30, ["write 7", "vLLM"]),
    "a captured decode": (True, False, 4, ["ours 7"]),
    "a captured mixed batch": (True, False, 30, ["write 7", "vLLM", "ours 7"]),
}


@pytest.mark.parametrize(("mode", "slot"), [("stage", "7"), ("direct", "3")])
@pytest.mark.parametrize("case", CASES)
def test_what_serves_a_batch(case, mode, slot, monkeypatch):
    """Every row is written once, by the slots of the window and under direct vLLM's, and attended to once it is."""
    capture, is_open, max_query_len, called = CASES[case]
    layer = Layer(monkeypatch, is_open, capture, direct=mode == "direct")
    assert layer.run(monkeypatch, max_query_len) == [call.replace("7", slot) for call in called]


@pytest.mark.parametrize("is_open", [True, False])
def test_rows_are_stored_before_a_query_that_reads_them(is_open, monkeypatch):
    """Our kernel stores rows while it attends, so where one may read another's, vLLM's writer runs first."""
    layer = Layer(monkeypatch, is_open, capture=False)
    layer.nwor.manager.writes_first = True
    assert layer.run(monkeypatch, 4) == ["write 7", "vLLM", "ours 7"][: 3 if is_open else 2]


@pytest.mark.parametrize(("capture", "called"), [(True, ["write 7", "vLLM", "ours 7"]), (False, ["ours 7"])])
def test_a_graph_that_any_batch_may_replay(capture, called, monkeypatch):
    """It is captured with small queries, and has to serve long ones."""
    layer = Layer(monkeypatch, not capture, capture)
    layer.nwor.manager.graphs_of_prefills = True
    assert layer.run(monkeypatch, 4) == called


def test_slopes_and_sinks_reach_the_kernel(monkeypatch):
    """The layer's attention is made once, and anew where the layer is served anew."""
    layer = Layer(monkeypatch, is_open=True, capture=False)
    for made in (1, 1, 2):
        if made == 2:
            layer.nwor = LayerContext(layer.nwor.manager, 0)
        layer.run(monkeypatch, 4)
        assert layer.masks == made * [("the slopes", "the sinks")]
