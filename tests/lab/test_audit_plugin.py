# SPDX-License-Identifier: Apache-2.0
"""The auditor as a plugin: which layers it looks at, what it learns from vLLM's writer, and its hooks."""

import functools
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from vllm.distributed import kv_transfer
from vllm.model_executor.layers import attention as layer_classes
from vllm.model_executor.layers.mamba.short_conv import ShortConv

from nwor_lab.audit import hooks


def attention_layer(kind: type = layer_classes.Attention) -> nn.Module:
    layer = object.__new__(kind)
    nn.Module.__init__(layer)
    layer.kv_cache_dtype = "auto"
    return layer


States, Rows = type("MambaSpec", (), {}), type("FullAttentionSpec", (), {})


def runner_of(
    layers: dict[str, nn.Module], drafter: nn.Module, groups: list[list[str]], mamba_cache_mode: str = "none"
) -> SimpleNamespace:
    """A runner whose target model holds all `layers` and whose drafter is the layer `drafter` alone."""
    target = nn.ModuleList(layer for layer in layers.values() if layer is not drafter)
    of_groups = [
        SimpleNamespace(layer_names=names, kv_cache_spec=(States if names == ["state"] else Rows)()) for names in groups
    ]
    return SimpleNamespace(
        get_model=lambda: target,
        get_draft_model=lambda: drafter,
        compilation_config=SimpleNamespace(static_forward_context=layers),
        kv_cache_config=SimpleNamespace(kv_cache_groups=of_groups),
        vllm_config=SimpleNamespace(cache_config=SimpleNamespace(mamba_cache_mode=mamba_cache_mode)),
    )


class OfOneModel(layer_classes.Attention):
    """A model's own attention, which may write wherever it likes."""


@pytest.mark.parametrize("other", [layer_classes.CrossAttention, layer_classes.StaticSinkAttention, OfOneModel])
def test_an_audit_of_a_part_is_refused(other):
    layers = {"a": attention_layer(), "b": attention_layer(other), "draft": attention_layer()}
    runner = runner_of(layers, layers["draft"], [["a", "b", "draft"]])
    with pytest.raises(RuntimeError, match=other.__name__):
        hooks._initialize(lambda self: None, runner)
    assert runner.cache_audit is None
    two = {"a": attention_layer(), "b": attention_layer(), "draft": attention_layer()}
    stray = runner_of({"a": two["a"]}, two["draft"], [["a", "elsewhere"]])
    with pytest.raises(RuntimeError, match="elsewhere"):
        hooks.target_groups(stray)


@pytest.mark.parametrize("stored", ["nvfp4", "unheard_of"])
def test_an_audit_of_slots_that_may_be_no_rows_is_refused(stored):
    layers = {"a": attention_layer(), "b": attention_layer(), "draft": attention_layer()}
    layers["b"].kv_cache_dtype = stored
    with pytest.raises(RuntimeError, match=stored):
        hooks.target_groups(runner_of(layers, layers["draft"], [["a", "b", "draft"]]))


def test_recurrent_layers_beside_others_in_a_group_or_of_another_spec_are_refused():
    layers = {"a": attention_layer(), "state": object.__new__(ShortConv), "draft": attention_layer()}
    nn.Module.__init__(layers["state"])
    of_rows = runner_of(layers, layers["draft"], [["state"], ["a", "draft"]])
    assert hooks.recurrent_groups(of_rows) == {0}
    of_rows.kv_cache_config.kv_cache_groups[0].kv_cache_spec = Rows()
    for other in (runner_of(layers, layers["draft"], [["state", "a", "draft"]]), of_rows):
        with pytest.raises(RuntimeError, match="ShortConv"):
            hooks.target_groups(other)


def test_block_tables_that_do_not_tell_who_has_a_block_are_refused():
    layers = {"a": attention_layer(), "state": object.__new__(ShortConv)}
    with pytest.raises(RuntimeError, match="align"):
        hooks.recurrent_groups(runner_of(layers, attention_layer(), [["state"], ["a"]], mamba_cache_mode="align"))


def test_a_cpu_cache_whose_layout_its_writer_does_not_tell_is_refused():
    layer = SimpleNamespace(
        kv_cache=torch.zeros(2, 1, 4, 8), impl=SimpleNamespace(do_kv_cache_update=lambda *row: None)
    )
    with pytest.raises(RuntimeError, match="slot"):
        hooks.slot_parts(layer)


def test_a_write_that_a_mode_takes_over_is_seen_on_the_v2_runner(monkeypatch):
    """There a mode's hooks go on around the audit's, but for the write's. Each engine of a CPU shows V1."""

    class Writer:
        def do_kv_cache_update(self, layer, key, value, kv_cache, slot_mapping): ...

    def mode_goes_on() -> None:
        write = Writer.do_kv_cache_update
        Writer.do_kv_cache_update = functools.wraps(write)(lambda *arguments: None)

    layer = SimpleNamespace(
        impl=Writer(),
        kv_cache=torch.zeros(2, 1, 4, 8),
        attn_backend=SimpleNamespace(forward_includes_kv_cache_update=False),
    )
    group = SimpleNamespace(kv_cache_spec=SimpleNamespace(block_size=4))
    runner = SimpleNamespace(
        device=SimpleNamespace(type="cuda"),
        kv_cache_config=SimpleNamespace(kv_cache_groups=[group], num_blocks=2),
        vllm_config=SimpleNamespace(use_v2_model_runner=True),
    )
    for name, found in (("target_groups", {0: {"a": layer}}), ("recurrent_groups", set())):
        monkeypatch.setattr(hooks, name, lambda runner, found=found: found)
    monkeypatch.setattr(hooks, "_watch_connector", lambda runner: None)
    try:
        hooks._initialize(lambda runner: None, runner)
        mode_goes_on()
        hooks._warm_up(lambda worker: None, SimpleNamespace(model_runner=runner))
        slots = torch.arange(2)
        runner.cache_audit.before((0, 2), {0: slots}, {})
        key = torch.ones(2, 1, 4)
        layer.impl.do_kv_cache_update(layer, key, key, layer.kv_cache, slots)
        runner.cache_audit.after((0,))
    finally:
        hooks.uninstall()
    report = runner.cache_audit.report
    assert report.content_checked == report.kept_rows == report.unwritten_rows == 2


def test_a_parameter_that_some_releases_lack_is_passed_on():
    """vLLM 0.33's `postprocess_sampled` has `draft_tokens`; an earlier one has not, and no other has more."""
    passed: list = []
    runner = SimpleNamespace(cache_audit=SimpleNamespace(enabled=True, after=passed.append))
    rows = torch.tensor([4])
    hooks._postprocess_sampled(lambda *given, **named: passed.append(named), runner, 1, 2, 3, rows, 5, draft_tokens=6)
    assert passed == [{"draft_tokens": 6}, [4]]

    class Runner:
        def older(self, query_start_loc=None): ...
        def newer(self, query_start_loc=None, draft_tokens=None): ...
        def newest(self, query_start_loc=None, drafts=None): ...

    for name in ("older", "newer"):
        hooks._wrap(Runner, name, "self query_start_loc", hooks._sample, optional="draft_tokens")
    with pytest.raises(RuntimeError, match="newest"):
        hooks._wrap(Runner, "newest", "self query_start_loc", hooks._sample, optional="draft_tokens")
    hooks.uninstall()


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


def test_an_audit_that_came_too_late_is_no_clean_one(monkeypatch):
    worker = SimpleNamespace(model_runner=SimpleNamespace())
    assert hooks.report(worker)["audit"] == {}
    monkeypatch.setenv("VLLM_NWOR_AUDIT", "1")
    with pytest.raises(RuntimeError, match="VLLM_NWOR_AUDIT"):
        hooks.report(worker)


def test_a_connector_that_the_audit_does_not_follow_is_refused(monkeypatch):
    """It may bring blocks back, which would count as stray writes, and ship others unseen."""
    monkeypatch.setattr(kv_transfer, "has_kv_transfer_group", lambda: True)
    unknown = type("NixlConnector", (), {})()
    for loaded in (unknown, SimpleNamespace(_connectors=[unknown])):
        monkeypatch.setattr(kv_transfer, "get_kv_transfer_group", lambda loaded=loaded: loaded)
        with pytest.raises(RuntimeError, match="NixlConnector"):
            hooks._watch_connector(SimpleNamespace())
    monkeypatch.setattr(kv_transfer, "has_kv_transfer_group", lambda: False)
    hooks._watch_connector(SimpleNamespace())
