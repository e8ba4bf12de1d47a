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


class Head(torch.nn.Module):
    """An EAGLE head as vLLM builds it: `fc` without a bias, attention with one where the config promises it."""

    def __init__(self, promised: bool) -> None:
        super().__init__()
        self.model = torch.nn.ModuleDict(
            {"fc": torch.nn.Linear(4, 2, bias=False), "qkv_proj": torch.nn.Linear(2, 2, bias=promised)}
        )

    def load_weights(self, weights):
        return {name for name, _ in weights}


@pytest.fixture
def warned(monkeypatch):
    """What is said of a head's biases."""
    said = []
    logger = SimpleNamespace(warning=lambda text, *values: said.append(text % values))
    monkeypatch.setattr("vllm.logger.init_logger", lambda name: logger)
    return said


@pytest.mark.parametrize(
    ("bias", "promised", "said"),
    [(0.0, False, ""), (1.0, False, "fc.bias, which vLLM's EAGLE head drops"), (0.0, True, "qkv_proj.bias, which ")],
)
def test_a_head_is_repaired_when_asked_for_and_only_then(bias, promised, said, warned):
    """Modes repaired the head unasked, and were compared with a baseline that drafts otherwise."""
    weights = [("fc.weight", torch.ones(2, 4)), ("fc.bias", torch.full((2,), bias)), ("q_proj.weight", torch.ones(2))]
    head = Head(promised)
    before = {name: parameter.clone() for name, parameter in head.named_parameters()}
    assert eagle_bias._make_watch(Head.load_weights)(head, iter(weights)) == {name for name, _ in weights}
    after = dict(head.named_parameters())
    assert after.keys() == before.keys() and all(torch.equal(after[name], before[name]) for name in before)
    assert len(warned) == bool(said)
    if said:
        assert said in warned[0] and "VLLM_NWOR_EAGLE_BIAS=1 repairs it" in warned[0]
    head = Head(promised)
    eagle_bias._make_load(Head.load_weights)(head, iter(weights))
    assert ("model.fc.bias" in dict(head.named_parameters())) == bool(bias)
    assert not promised or not head.model["qkv_proj"].bias.any()


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
    head, load = Eagle3(promised=promised), eagle_bias._make_load(Eagle3.load_weights)
    if at_once:
        load(head, iter(tensors))
    else:
        one_by_one(load, head, *tensors)
    qkv, fc = head.model["layers"][0]["self_attn"]["qkv_proj"].bias, head.model["fc"].bias
    assert (qkv.tolist(), fc.tolist()) == ([1, 1, 2, 2, 3, 3], [4, 4])
    one_by_one(load, head, (ATTENTION + "k_proj.bias", torch.zeros(2)), ("fc.weight", torch.zeros(2, 6)))
    assert (qkv.tolist(), fc.tolist()) == ([1, 1, 0, 0, 3, 3], [4, 4])
    assert not head.model["fc"].weight.any()
    assert len(warned) == (1 if promised else 2) and all("is applied" in text for text in warned)


def test_zeros_without_a_place_are_skipped_with_one_notice(warned):
    head, load = Eagle3(), eagle_bias._make_load(Eagle3.load_weights)
    one_by_one(load, head, *3 * [("fc.bias", torch.zeros(2))])
    assert head.model["fc"].bias is None
    assert warned == ["NWOR: fc.bias, which vLLM's EAGLE head has no place for, is skipped: zeros."]


def test_a_bias_that_no_load_brings_is_zero_from_the_first_one_on():
    """vLLM's memory for it is filled by nobody; that it has a value later is not the checkpoint's doing."""
    head, load = Eagle3(promised=True), eagle_bias._make_load(Eagle3.load_weights)
    bias = head.model["layers"][0]["self_attn"]["qkv_proj"].bias
    bias.data.fill_(float("nan"))
    one_by_one(load, head, WHOLE[0], BIASED[1], *WHOLE[1:])
    assert bias.tolist() == [0, 0, 2, 2, 0, 0]


def test_a_dropped_bias_is_warned_of_once_however_often_it_comes(warned):
    head, watch = Eagle3(), eagle_bias._make_watch(Eagle3.load_weights)
    for _ in range(2):
        one_by_one(watch, head, *WHOLE, *BIASED)
        watch(head, iter([*WHOLE, *BIASED]))
    assert [text.partition(",")[0] for text in warned] == ["NWOR: layers.0.self_attn.qkv_proj.bias", "NWOR: fc.bias"]
    assert all("drops, though not zero" in text for text in warned)
    watch(Eagle3(), iter([*WHOLE, *BIASED]))
    assert len(warned) == 3, "another head"


def test_a_piece_of_a_head_is_not_warned_of_as_if_it_were_the_whole(warned):
    """Each piece lacks what the others bring, and an update what it leaves as it is."""
    watch = eagle_bias._make_watch(Eagle3.load_weights)
    one_by_one(watch, Eagle3(promised=True), *WHOLE, *BIASED[:3])
    head = Eagle3(promised=True)
    watch(head, iter([*WHOLE, *BIASED[:3]]))
    watch(head, iter(WHOLE))
    one_by_one(watch, head, *WHOLE)
    assert warned == []
    head = Eagle3(promised=True)
    for _ in range(2):
        watch(head, iter(WHOLE))
    assert len(warned) == 1 and "qkv_proj.bias, which vLLM's EAGLE head has and no checkpoint fills" in warned[0]


def test_biases_of_stacked_layers_go_where_vllm_would_have_them():
    """A checkpoint may have some of a place's parts alone: the others are zero, and whole zeros make no place."""
    head = Eagle3()
    ones, zeros = torch.ones(2), torch.zeros(2)
    weights = [(ATTENTION + "q_proj.bias", ones), (ATTENTION + "v_proj.bias", zeros), ("fc.bias", zeros)]
    eagle_bias._make_load(Eagle3.load_weights)(head, iter(weights))
    attention = head.model["layers"][0]["self_attn"]
    assert attention["qkv_proj"].bias.tolist() == [1, 1, 0, 0, 0, 0] and head.model["fc"].bias is None
    assert attention["qkv_proj"](zeros).tolist() == [1, 1, 0, 0, 0, 0]


def test_a_part_that_is_not_zero_is_warned_of_though_the_last_one_is(warned):
    weights = [(ATTENTION + "q_proj.bias", torch.ones(2)), (ATTENTION + "v_proj.bias", torch.zeros(2))]
    eagle_bias._make_watch(Eagle3.load_weights)(Eagle3(), iter(weights))
    assert len(warned) == 1 and "layers.0.self_attn.qkv_proj.bias, which vLLM's EAGLE head drops" in warned[0]


@pytest.mark.parametrize(
    ("name", "rotated"), [("midlayer.norm.bias", False), ("lm_head.bias", False), (ATTENTION + "k_proj.bias", True)]
)
def test_a_bias_that_cannot_be_applied_stops_the_load_unless_it_is_zero(name, rotated):
    """A norm's, the logits', and those that Llama 4 would have to turn as it turns their weights."""
    load = eagle_bias._make_load(Eagle3.load_weights)
    load(Eagle3(rotated), iter([(name, torch.zeros(2))]))
    with pytest.raises(ValueError, match="bias is not zero, and vLLM has no place for it"):
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
    head, load = Updated().requires_grad_(False), eagle_bias._make_load(Updated.load_weights)
    reload.record_metadata_for_reloading(head)
    load(head, fc if built else fc[1:])
    reload.initialize_layerwise_reload(head)
    if not built:
        with pytest.raises(ValueError, match=r"fc.bias is not zero, and vLLM has no place for it"):
            load(head, fc)
        return
    one_by_one(load, head, (fc[0][0], torch.full((2,), 2.0)), fc[1])
    reload.finalize_layerwise_reload(head, None)
    assert head.model["fc"](torch.ones(6)).tolist() == [8, 8]


@pytest.mark.parametrize("mode", ["off", "cow", "stage"])
@pytest.mark.parametrize("asked", [False, True])
def test_no_mode_has_a_drafter_of_its_own(mode, asked, monkeypatch):
    """The same switch, whatever the mode."""
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    installed = []
    monkeypatch.setattr(eagle_bias, "install", installed.append)
    monkeypatch.setattr(WorkerWrapperBase, "init_device", wraps(WorkerWrapperBase.init_device)(lambda self: None))
    made = object.__new__(WorkerWrapperBase)
    made.vllm_config = SimpleNamespace(device_config=SimpleNamespace(device_type="cpu"), use_v2_model_runner=False)
    try:
        worker.install(Settings(mode=mode, eagle_bias=asked))
        made.init_device()
    finally:
        patch.undo_all()
    assert installed == [asked]


@pytest.mark.parametrize("v2", [False, True])
def test_a_workaround_alone_leaves_the_runner_as_it_is(v2, monkeypatch):
    """Only what was asked for is patched in a worker whose mode is off."""
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    monkeypatch.setattr(WorkerWrapperBase, "init_device", wraps(WorkerWrapperBase.init_device)(lambda self: None))
    made = object.__new__(WorkerWrapperBase)
    made.vllm_config = SimpleNamespace(device_config=SimpleNamespace(device_type="cpu"), use_v2_model_runner=v2)
    found = {}
    for mode in ("off", "cow"):
        try:
            worker.install(Settings(mode=mode, eagle_bias=True))
            made.init_device()
            found[mode] = patch.wrapped()
        finally:
            patch.undo_all()
    assert not any("Runner" in name for name in found["off"]) and any("Runner" in name for name in found["cow"])
    assert any("load_weights" in name for name in found["off"])
