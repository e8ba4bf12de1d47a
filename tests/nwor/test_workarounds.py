# SPDX-License-Identifier: Apache-2.0
"""The repairs of vLLM that a user may ask for: an EAGLE head's biases, and the CPU's sampling."""

from functools import wraps
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("vllm", reason="vLLM is not installed: there is nothing to repair")

from vllm.model_executor.model_loader.weight_utils import default_weight_loader

from nwor.settings import Settings
from nwor.vllm import patch, worker
from nwor.vllm.workarounds import cpu_sampling, eagle_bias

# -- sampling on the CPU -----------------------------------------------------------------------------------------------

DTYPES = [torch.float32, torch.float64, torch.int32, torch.int64]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    requests=st.lists(st.tuples(st.sampled_from([0, 1, 2, 5]), st.integers(0, 5)), min_size=1, max_size=6),
    replaced=st.sampled_from([(0, 0), (0, 1), (2, 7)]),
    dtype=st.sampled_from(DTYPES),
)
def test_expansion_against_a_plain_loop(requests, replaced, dtype):
    """Requests without tokens have none; a replaced value is replaced, and every other kept as it is."""
    values = [value + (0.25 if dtype.is_floating_point and value == 5 else 0) for value, _ in requests]
    counts = torch.tensor([count for _, count in requests])
    expected = [
        replaced[1] if value == replaced[0] else value
        for value, (_, count) in zip(values, requests, strict=True)
        for _ in range(count)
    ]
    x = torch.tensor(values, dtype=dtype)
    found = cpu_sampling.expand_batch_to_tokens(x, counts.cumsum(0).int(), len(expected), *replaced)
    assert found.dtype == dtype
    assert found.tolist() == expected


def test_the_sampler_calls_the_repaired_one():
    """Through the very name vLLM's sampler looks up, with the example of its docstring; and it comes off again."""
    from vllm.v1.sample import rejection_sampler

    original = rejection_sampler.expand_batch_to_tokens
    cpu_sampling.install()
    try:
        x, ends = torch.tensor([0.7, 0.0, 1.3]), torch.tensor([2, 5, 6], dtype=torch.int32)
        found = rejection_sampler.expand_batch_to_tokens(x, ends, 6, replace_from=0, replace_to=1)
        assert torch.equal(found, torch.tensor([0.7, 0.7, 1, 1, 1, 1.3]))
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


def one_by_one(load, head, *weights):
    """As vLLM's weight transfer does, which calls `load_weights` for each tensor."""
    for weight in weights:
        load(head, [weight])


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
    if at_once:
        load(head, iter(tensors))
    else:
        one_by_one(load, head, *tensors)
    qkv, fc = head.model["layers"][0]["self_attn"]["qkv_proj"].bias, head.model["fc"].bias
    assert (qkv.tolist(), fc.tolist()) == ([1, 1, 2, 2, 3, 3], [4, 4])
    one_by_one(load, head, (ATTENTION + "k_proj.bias", torch.zeros(2)), ("fc.weight", torch.zeros(2, 6)))
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


@pytest.mark.parametrize("built", [False, True])
def test_a_layer_that_vllm_is_updating_gets_no_place(built):
    """It ends with the parameters that it had: the place was lost, and the next forward failed for want of it."""
    from vllm.model_executor.model_loader import reload

    class Updated(Eagle3):
        def load_weights(self, weights):
            for name, tensor in weights:
                owner, _, kind = name.rpartition(".")
                parameter = getattr(self.model.get_submodule(owner), kind)
                getattr(parameter, "weight_loader", default_weight_loader)(parameter, tensor)

    fc = [("fc.bias", torch.ones(2)), ("fc.weight", torch.ones(2, 6))]
    head, load = Updated().requires_grad_(False), eagle_bias._make_load(Updated.load_weights, True)
    reload.record_metadata_for_reloading(head)
    load(head, fc if built else fc[1:])
    reload.initialize_layerwise_reload(head)
    if not built:
        with pytest.raises(ValueError, match="fc.bias"):
            load(head, fc)
        return
    one_by_one(load, head, (fc[0][0], torch.full((2,), 2.0)), fc[1])
    reload.finalize_layerwise_reload(head, None)
    assert head.model["fc"](torch.ones(6)).tolist() == [8, 8]


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
