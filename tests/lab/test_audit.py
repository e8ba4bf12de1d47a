# SPDX-License-Identifier: Apache-2.0
"""The auditor must see one changed bit anywhere, and one kept row that was not written."""

from types import SimpleNamespace

import pytest
import torch
from devices import each_device
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from vllm.model_executor.layers import attention as layer_classes

from nwor_lab.audit import hooks
from nwor_lab.audit.auditor import AuditReport, CacheAudit, injected_faults
from tests.nwor.paged import BITS, BLOCK_SIZE, MEMORY, NUM_BLOCKS, NUM_HEADS, WIDTH, Paged, write_rows

STEP = torch.tensor([9, 4, 2, 17, 21])  # the slots of the step's rows, one request's
KEPT, REJECTED = STEP[:3], STEP[3:]
ROWS, GONE = (0, 5), (2,)
memory = pytest.mark.parametrize("kind", MEMORY)


def offsets(packing: torch.Tensor | None) -> torch.Tensor | None:
    """The slot that each element of a chunk belongs to."""
    if packing is None:
        return None
    offset_of = torch.empty(packing.numel(), dtype=torch.int64)
    for offset, places in enumerate(packing):
        offset_of[places.long()] = offset
    return offset_of


class Audited:
    """Three target layers, poisoned, and their audit."""

    def __init__(self, kind: str, device: str = "cpu") -> None:
        if device == "cuda" and MEMORY[kind].get("packed"):
            pytest.skip("a packing describes vLLM's CPU caches")
        self.paged = Paged(**MEMORY[kind], device=device)
        found = self.paged.pool.clone()
        self.audit = CacheAudit(self.paged.targets(), offsets(self.paged.packing))
        self.paged.pool.copy_(found)

    def write(self, layer: int, slots: torch.Tensor, seed: int = 50) -> None:
        rows = self.paged.new_rows(len(slots), seed + layer)
        write_rows(self.paged.targets()[layer], slots, rows, self.paged.packing)

    def flip(self, layer: int, slot: int, head: int, place: int) -> None:
        """Change one bit of one element of one slot."""
        cache = self.paged.targets()[layer]
        chunk = cache.view(BITS[cache.element_size()])[slot // BLOCK_SIZE, head]
        if self.paged.packing is None:
            chunk[slot % BLOCK_SIZE, place] ^= 1
        else:
            chunk.view(-1)[self.paged.packing[slot % BLOCK_SIZE, place].long()] ^= 1


@memory
@each_device
def test_kept_rows_written_and_nothing_else_is_clean(kind, device):
    """Rejected rows untouched, a padding slot, other layers, and what happens between steps are no dirt."""
    audited = Audited(kind, device)
    padding = torch.tensor([-1])
    for step in range(2):
        audited.audit.before((0, 5, 6), torch.cat([STEP, padding]).to(device))
        for layer in range(3):
            audited.write(layer, KEPT)
        audited.audit.after((2, 0))
        if step == 0:
            audited.paged.pool.bitwise_xor_(255)
    assert audited.audit.report == AuditReport(steps=2, layer_steps=6, kept_rows=18, dirty_by_step=[0, 0])
    assert audited.audit.report.clean


@memory
def test_a_row_written_with_the_bytes_it_held_is_written(kind):
    """A request that runs again after preemption writes what its blocks may still hold."""
    audited = Audited(kind)
    for layer in range(3):
        audited.write(layer, KEPT)
    audited.audit.before(ROWS, STEP)
    for layer in range(3):
        audited.write(layer, KEPT)
    audited.audit.after(GONE)
    assert audited.audit.report.clean


@memory
@each_device
def test_the_steps_rows_are_poisoned_and_no_others(kind, device):
    """The poison is a finite number: attention multiplies what lies beyond a sequence by zero."""
    audited = Audited(kind, device)
    expected = audited.paged.pool.clone()
    poison = torch.full((5, NUM_HEADS, WIDTH * audited.paged.dtype.itemsize), 0x55, dtype=torch.uint8, device=device)
    for cache in audited.paged.targets(expected):
        write_rows(cache, STEP, poison.view(audited.paged.dtype), audited.paged.packing)
    audited.audit.before((0, 6), torch.cat([STEP, torch.tensor([-1, 3])]).to(device))
    assert torch.equal(audited.paged.pool, expected)
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2):
        assert poison.view(dtype).float().isfinite().all()


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    kind=st.sampled_from(sorted(MEMORY)),
    layer=st.integers(0, 2),
    slot=st.integers(0, NUM_BLOCKS * BLOCK_SIZE - 1),
    head=st.integers(0, NUM_HEADS - 1),
    place=st.integers(0, WIDTH - 1),
)
def test_one_bit_anywhere_is_seen(kind, layer, slot, head, place):
    """A changed bit in a slot that is not kept makes that layer dirty; in a kept one it is part of the write."""
    audited = Audited(kind)
    audit = audited.audit
    audit.before(ROWS, STEP)
    before = [cache.clone() for cache in audited.paged.targets()]
    audited.flip(layer, slot, head, place)
    together = zip(audited.paged.targets(), before, strict=True)
    changed = [audit.changed_slots(cache, old).nonzero().flatten().tolist() for cache, old in together]
    assert changed == [[slot] if index == layer else [] for index in range(3)]
    audit.after(GONE)
    kept = slot in KEPT.tolist()
    assert audit.report.dirty_slots == audit.report.dirty_layer_steps == int(not kept)
    assert audit.report.unwritten_rows == 3 * len(KEPT) - int(kept)
    assert not audit.report.clean


@memory
def test_a_rejected_row_that_was_written_is_seen(kind):
    """What vanilla vLLM leaves behind: the audit's negative control."""
    audited = Audited(kind)
    audited.audit.before(ROWS, STEP)
    for layer in range(3):
        audited.write(layer, STEP if layer == 1 else KEPT)
    audited.audit.after(GONE)
    dirt = len(REJECTED)
    expected = AuditReport(
        steps=1, layer_steps=3, dirty_layer_steps=1, dirty_slots=dirt, kept_rows=9, dirty_by_step=[dirt]
    )
    assert audited.audit.report == expected
    assert not audited.audit.report.clean


@memory
def test_a_kept_row_that_was_not_written_is_seen(kind):
    """A commit that leaves out one row of one layer."""
    audited = Audited(kind)
    audited.audit.before(ROWS, STEP)
    for layer in range(3):
        audited.write(layer, KEPT[: 2 if layer == 1 else 3])
    audited.audit.after(GONE)
    assert audited.audit.report == AuditReport(steps=1, layer_steps=3, kept_rows=9, unwritten_rows=1, dirty_by_step=[0])
    assert not audited.audit.report.clean


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_bits_are_compared_not_numbers(dtype):
    """NaN equals itself, another NaN is a change, and so is the sign of zero."""
    cache = torch.full((2, 1, 4, 8), float("nan"), dtype=dtype)
    audit = CacheAudit([cache])
    cache[0], cache[1] = float("nan"), 0
    nothing = torch.empty(0, dtype=torch.int64)
    audit.before((0,), nothing)
    audit.after(())
    assert audit.report == AuditReport(steps=1, layer_steps=1, dirty_by_step=[0])
    audit.before((0,), nothing)
    cache.view(BITS[dtype.itemsize])[0, 0, 1, 3] ^= 1
    assert bool(cache[0].isnan().all())
    cache[1, 0, 2, 5] = -0.0
    audit.after(())
    assert audit.report.dirty_slots == 2
    assert not audit.report.clean


def test_dirt_is_counted_by_step():
    """One row of each of two layers in the second of three steps, and none in the others."""
    audited = Audited("HND")
    for step in range(3):
        audited.audit.before(ROWS, STEP)
        for layer in range(3):
            audited.write(layer, STEP[:4] if step == 1 and layer else KEPT)
        audited.audit.after(GONE)
    assert audited.audit.report.dirty_by_step == [0, 2, 0]
    assert audited.audit.report.dirty_slots == 2


def test_injected_faults_are_found():
    """The notebook's control: a rejected row written in one layer, a kept one left out in the other."""
    assert injected_faults() == AuditReport(
        steps=1,
        layer_steps=2,
        dirty_layer_steps=1,
        dirty_slots=1,
        kept_rows=4,
        unwritten_rows=1,
        dirty_by_step=[1],
    )


def test_no_step_is_no_proof():
    assert not AuditReport().clean


def test_a_step_that_was_not_opened_is_an_error():
    """After a step the copy is gone: a second judgement needs a second copy."""
    audit = Audited("HND").audit
    audit.before(ROWS, STEP)
    audit.after(GONE)
    with pytest.raises(ValueError, match="no step is open"):
        audit.after(GONE)


@memory
@each_device
def test_slots_nobody_wrote_are_poisoned(kind, device):
    """A kernel that reads beyond a sequence reads huge numbers, not the zeros that hide it."""
    paged = Paged(**(MEMORY[kind] | {"packed": False}), device=device)
    CacheAudit(paged.targets())
    for cache in paged.targets():
        assert cache.contiguous().view(torch.uint8).eq(0x55).all()


def test_examples_name_step_layer_slot_and_request():
    audited = Audited("HND")
    audited.audit.before((0, 3, 5), STEP)
    audited.write(0, STEP)
    audited.write(1, torch.tensor([0]))
    audited.audit.after((0, 2))
    assert audited.audit.examples == [
        "step 0, layer 0, slot 17, of request 1 of the batch",
        "step 0, layer 0, slot 21, of request 1 of the batch",
        "step 0, layer 1, slot 0, of no row of the step",
    ]
    audited.audit.reset_counters()
    assert (audited.audit.report, audited.audit.examples) == (AuditReport(), [])


def test_the_first_requests_steps_are_remembered():
    audited = Audited("HND")
    audited.audit.before((0, 4, 6), torch.cat([STEP, torch.tensor([-1])]))
    audited.write(0, STEP[:3])
    audited.audit.after((2, 0))
    expected = {"slots": STEP[:4].tolist(), "num_rejected": 2, "changed": [True, True, True, False]}
    assert audited.audit.history == [expected]


# -- the plugin --------------------------------------------------------------------------------------------------


def attention_layer(kind: type = layer_classes.Attention) -> nn.Module:
    layer = object.__new__(kind)
    nn.Module.__init__(layer)
    return layer


def runner_of(layers: dict[str, nn.Module], drafter: nn.Module, groups: list[list[str]]) -> SimpleNamespace:
    """A runner whose target model holds all `layers` and whose drafter is the layer `drafter` alone."""
    target = nn.ModuleList(layer for layer in layers.values() if layer is not drafter)
    return SimpleNamespace(
        get_model=lambda: target,
        get_draft_model=lambda: drafter,
        compilation_config=SimpleNamespace(static_forward_context=layers),
        kv_cache_config=SimpleNamespace(kv_cache_groups=[SimpleNamespace(layer_names=names) for names in groups]),
    )


class OfOneModel(layer_classes.Attention):
    """A model's own attention, which may write wherever it likes."""


def test_target_layers_are_those_of_the_target_model():
    layers = {"b": attention_layer(), "a": attention_layer(), "draft": attention_layer()}
    assert list(hooks.target_layers(runner_of(layers, layers["draft"], [["b", "draft", "a"]]))) == ["b", "a"]
    assert list(hooks.target_layers(runner_of(layers, layers["draft"], [["b", "a"], ["draft"]]))) == ["b", "a"]


@pytest.mark.parametrize(
    "other", [layer_classes.MLAAttention, layer_classes.CrossAttention, layer_classes.StaticSinkAttention, OfOneModel]
)
def test_an_audit_of_a_part_is_refused(other):
    layers = {"a": attention_layer(), "b": attention_layer(other), "draft": attention_layer()}
    runner = runner_of(layers, layers["draft"], [["a", "b", "draft"]])
    with pytest.raises(RuntimeError, match=f"would not see the whole cache: b is a {other.__name__}"):
        hooks._initialize(lambda self: None, runner)
    assert runner.cache_audit is None
    two = {"a": attention_layer(), "b": attention_layer(), "draft": attention_layer()}
    with pytest.raises(RuntimeError, match="several cache groups"):
        hooks.target_layers(runner_of(two, two["draft"], [["a"], ["b", "draft"]]))
    stray = runner_of({"a": two["a"]}, two["draft"], [["a", "elsewhere"]])
    with pytest.raises(RuntimeError, match="elsewhere is a NoneType"):
        hooks.target_layers(stray)


class Writer:
    """A CPU writer that packs a block by `packing`; with a `fault` one element is never written."""

    def __init__(self, packing: torch.Tensor, fault: bool = False) -> None:
        self.packing, self.fault = packing, fault

    def do_kv_cache_update(self, layer, key, value, kv_cache, slots) -> None:
        rows = torch.cat((key, value), dim=-1)
        write_rows(kv_cache, slots, rows.to(kv_cache.dtype), self.packing)
        if self.fault:
            kv_cache.view(*kv_cache.shape[:2], -1)[..., 5] = 0


def test_the_layout_of_a_cpu_cache_is_learned_from_its_writer():
    paged = Paged(**MEMORY["packed"])
    layer = SimpleNamespace(kv_cache=paged.targets()[0], impl=Writer(paged.packing))
    assert torch.equal(hooks.slot_offsets(layer), offsets(paged.packing))
    layer.impl.fault = True
    with pytest.raises(RuntimeError, match="no slot or to several"):
        hooks.slot_offsets(layer)


def test_hooks_fit_the_installed_vllm_and_come_off_again():
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    before = dict(vars(GPUModelRunner))
    try:
        hooks.install()
        hooks.install_v1()
        hooks.install_v1()
        assert GPUModelRunner._sample is not before["_sample"]
        with pytest.raises(RuntimeError, match="_sample takes self logits"):
            hooks._wrapped.pop((GPUModelRunner, "_sample"))
            GPUModelRunner._sample = before["_sample"]
            hooks._wrap(GPUModelRunner, "_sample", "self logits", hooks._sample)
    finally:
        hooks.uninstall()
    assert dict(vars(GPUModelRunner)) == before


@pytest.mark.parametrize(
    ("sampled", "drafts", "expected"),
    [([[5, 6, 7, 8]], [3], [0]), ([[5, 6, -1], [9, -1, -1]], [2, 0], [1, 0]), ([[0, 0, -1]], [2], [1])],
)
def test_rejections_are_counted_from_the_sampled_tokens(sampled, drafts, expected):
    metadata = SimpleNamespace(num_draft_tokens=drafts)
    assert hooks.rejected(torch.tensor(sampled), metadata) == expected
    assert hooks.rejected(torch.tensor(sampled), None) == [0] * len(sampled)


def test_the_plugin_installs_the_other_plugins_first(monkeypatch):
    """The audit's hooks lie around those of the modes, whichever plugin vLLM calls first."""
    from vllm import plugins

    from nwor_lab import plugin

    called = []
    others = {"nwor_lab": plugin.register, "nwor": lambda: called.append("nwor")}
    monkeypatch.setattr(plugins, "load_plugins_by_group", lambda group: others)
    monkeypatch.setattr(hooks, "install", lambda: called.append("audit"))
    plugin.register()
    assert called == []
    monkeypatch.setenv("VLLM_NWOR_AUDIT", "1")
    plugin.register()
    assert called == ["nwor", "audit"]
    monkeypatch.setenv("VLLM_NWOR_AUDIT", "yes")
    with pytest.raises(ValueError, match="must be 0 or 1"):
        plugin.register()
