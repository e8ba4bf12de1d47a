# SPDX-License-Identifier: Apache-2.0
"""The repairs of vLLM that a user may ask for: an EAGLE head's biases, and the CPU's sampling."""

from functools import wraps
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed: there is nothing to repair")


from nwor.settings import Settings
from nwor.vllm import patch, worker
from nwor.vllm.workarounds import cpu_sampling, eagle_bias

# -- sampling on the CPU -----------------------------------------------------------------------------------------------


def test_the_sampler_calls_the_repaired_one():
    """Through the very name vLLM's sampler looks up, with the example of its docstring; and it comes off again."""
    from vllm.v1.sample import rejection_sampler

    original = rejection_sampler.expand_batch_to_tokens
    cpu_sampling.install()
    try:
        x, ends = torch.tensor([0.7, 0.0, 1.3]), torch.tensor([2, 5, 6], dtype=torch.int32)
        found = rejection_sampler.expand_batch_to_tokens(x, ends, 6, replace_from=0, replace_to=1)
        assert torch.equal(found, torch.tensor([0.7, 0.7, 1, 1, 1, 1.3]))
        found = rejection_sampler.expand_batch_to_tokens(torch.tensor([2, 5, 0]), torch.tensor([0, 1, 3]), 3, 0, 7)
        assert found.tolist() == [5, 7, 7] and found.dtype == torch.int64
    finally:
        patch.undo_all()
    assert rejection_sampler.expand_batch_to_tokens is original


# -- one drafter in all modes ------------------------------------------------------------------------------------------


@pytest.fixture
def warned(monkeypatch):
    """What is said of a head's biases."""
    said = []
    logger = SimpleNamespace(warning_once=lambda text, *values: said.append(text % values))
    monkeypatch.setattr("vllm.logger.init_logger", lambda name: logger)
    return said


class Eagle3(torch.nn.Module):
    """An EAGLE-3 head's first layer, whose projections vLLM stacks, loaded as vLLM does: into the places there."""

    def __init__(self, rotated: bool = False, promised: bool = False) -> None:
        super().__init__()
        attention = torch.nn.ModuleDict({"qkv_proj": torch.nn.Linear(2, 6, bias=promised)})
        layer = torch.nn.ModuleDict({"self_attn": attention, "norm": torch.nn.LayerNorm(2, bias=False)})
        self.model = torch.nn.ModuleDict({"layers": torch.nn.ModuleList([layer]), "fc": torch.nn.Linear(6, 2, False)})
        if rotated:
            self.permute_qk_weight_for_rotary = None

    def load_weights(self, weights):
        places = dict(self.model.named_parameters())
        for name, tensor in weights:
            place, shard = name.replace("midlayer", "layers.0"), slice(None)
            for number, letter in enumerate("qkv"):
                if f".{letter}_proj" in name:
                    place, shard = place.replace(f".{letter}_proj", ".qkv_proj"), slice(2 * number, 2 * number + 2)
            if place in places:
                places[place].data[shard] = tensor


ATTENTION = "midlayer.self_attn."


WHOLE = [(ATTENTION + f"{letter}_proj.weight", torch.ones(2, 2)) for letter in "qkv"] + [
    ("fc.weight", torch.ones(2, 6))
]
BIASED = [(ATTENTION + f"{letter}_proj.bias", torch.full((2,), 1.0 + n)) for n, letter in enumerate("qkv")]
BIASED += [("fc.bias", torch.full((2,), 4.0))]


@pytest.mark.parametrize("tensors", [[*BIASED, *WHOLE], [*WHOLE, *BIASED]], ids=["weights last", "biases last"])
@pytest.mark.parametrize("promised", [False, True])
@pytest.mark.parametrize("at_once", [False, True])
def test_a_later_load_keeps_the_biases_that_it_lacks(tensors, promised, at_once, warned):
    """Every load zeroed them all, so that of a head updated tensor by tensor the last bias alone was left."""
    head, load = Eagle3(promised=promised), eagle_bias._make_load(Eagle3.load_weights, True)
    for part in [tensors] if at_once else [[tensor] for tensor in tensors]:
        load(head, iter(part))
    qkv, fc = head.model["layers"][0]["self_attn"]["qkv_proj"].bias, head.model["fc"].bias
    assert (qkv.tolist(), fc.tolist()) == ([1, 1, 2, 2, 3, 3], [4, 4])
    load(head, [(ATTENTION + "k_proj.bias", torch.zeros(2)), ("fc.weight", torch.zeros(2, 6))])
    assert (qkv.tolist(), fc.tolist()) == ([1, 1, 0, 0, 3, 3], [4, 4])
    assert not head.model["fc"].weight.any()
    assert len(warned) == (1 if promised else 2) and all("applied" in text for text in warned)


def test_zeros_without_a_place_are_skipped_with_a_notice(warned):
    head, load = Eagle3(), eagle_bias._make_load(Eagle3.load_weights, True)
    load(head, [("fc.bias", torch.zeros(2))])
    assert head.model["fc"].bias is None
    assert len(warned) == 1 and "fc.bias" in warned[0] and "skipped" in warned[0]


@pytest.mark.parametrize("promised", [False, True])
def test_a_bias_is_warned_of_and_nothing_else_is_changed(promised, warned):
    """Modes repaired the head unasked, and were compared with a baseline that drafts otherwise."""
    watch, head = eagle_bias._make_load(Eagle3.load_weights, False), Eagle3(promised=promised)
    places = [name for name, _ in head.named_parameters()]
    watch(head, iter([*WHOLE, *BIASED, ("lm_head.bias", torch.zeros(2))]))
    assert [name for name, _ in head.named_parameters()] == places
    *projections, fc = (name for name, _ in BIASED)
    assert [fc in text for text in warned] == ([True] if promised else [False, True])
    assert promised or all(name in warned[0] for name in projections)
    assert all("VLLM_NWOR_EAGLE_BIAS=1" in text for text in warned)


@pytest.mark.parametrize(
    ("name", "rotated"), [("midlayer.norm.bias", False), ("lm_head.bias", False), (ATTENTION + "k_proj.bias", True)]
)
def test_a_bias_that_cannot_be_applied_stops_the_load_unless_it_is_zero(name, rotated):
    """A norm's, the logits', and those that Llama 4 would have to turn as it turns their weights."""
    load = eagle_bias._make_load(Eagle3.load_weights, True)
    load(Eagle3(rotated), iter([(name, torch.zeros(2))]))
    with pytest.raises(ValueError, match="bias"):
        load(Eagle3(rotated), iter([(name, torch.ones(2))]))


@pytest.mark.parametrize("v2", [False, True])
@pytest.mark.parametrize("repairs", [False, True])
def test_no_mode_has_a_drafter_of_its_own(repairs, v2, monkeypatch):
    """The same switch, whatever the mode; with the mode off nothing else of a worker is patched."""
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    monkeypatch.setattr(WorkerWrapperBase, "init_device", wraps(WorkerWrapperBase.init_device)(lambda self: None))
    install, asked = eagle_bias.install, []
    monkeypatch.setattr(eagle_bias, "install", lambda repair: (asked.append(repair), install(repair)))
    made = object.__new__(WorkerWrapperBase)
    made.vllm_config = SimpleNamespace(device_config=SimpleNamespace(device_type="cpu"), use_v2_model_runner=v2)
    for mode in ("off", "cow", "stage"):
        try:
            worker.install(Settings(mode=mode, eagle_bias=repairs))
            made.init_device()
            assert any("Runner" in name for name in patch.wrapped()) == (mode != "off")
            assert any("load_weights" in name for name in patch.wrapped())
        finally:
            patch.undo_all()
    assert asked == 3 * [repairs]
