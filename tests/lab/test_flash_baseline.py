# SPDX-License-Identifier: Apache-2.0
"""The microbenchmark's FlashAttention 2 is called as vLLM's backend calls it, where vLLM comes with it."""

import importlib.util
import inspect
import sys
from pathlib import Path

import pytest
import torch

from nwor_lab.microbench import inputs
from nwor_lab.microbench.inputs import AttentionCase, AttentionShape
from nwor_lab.microbench.timer import empty

vllm = importlib.util.find_spec("vllm")
pytestmark = pytest.mark.skipif(vllm is None, reason="vLLM is not installed: there is no baseline")
NAME = "vllm.vllm_flash_attn.flash_attn_interface"


@pytest.fixture
def interface(monkeypatch):
    """vLLM's own file, which can be read without the compiled extensions that its package wants."""
    inputs.has_flash2.cache_clear()
    assert vllm is not None and vllm.submodule_search_locations
    path = Path(vllm.submodule_search_locations[0]) / "vllm_flash_attn" / "flash_attn_interface.py"
    spec = importlib.util.spec_from_file_location("flash_attn_interface", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setitem(sys.modules, NAME, module)
    monkeypatch.setattr(module, "fa_version_unsupported_reason", lambda version: None)
    monkeypatch.setattr(module, "is_fa_version_supported", lambda version: True)
    monkeypatch.setattr(module, "get_scheduler_metadata", lambda **values: "a schedule")
    for name in ("nwor", "triton"):
        monkeypatch.setattr(AttentionCase, name, lambda case: empty)
    monkeypatch.setattr(AttentionCase, "write", lambda case: None)
    yield module
    inputs.has_flash2.cache_clear()


def case(cache: str = "bf16") -> AttentionCase:
    made = object.__new__(AttentionCase)
    made.shape, made.fp8, made.scale = AttentionShape(8, 2, 2, 64, cache, k=3), cache == "fp8", 1.0
    made.kv_cache = torch.zeros(8, 2, 16, 256, dtype=torch.uint8 if made.fp8 else torch.bfloat16)
    made.one, made.block_table, made.query = torch.ones(1), torch.zeros(2, 4), torch.zeros(8, 8, 128)
    made.output = made.query_start_loc = made.seq_lens = None
    return made


@pytest.mark.parametrize("unsupported", [2, 3])
def test_each_version_is_given_what_it_takes(interface, monkeypatch, unsupported):
    """Where there is no FlashAttention 3, `flash` is version 2 as well, as in vLLM."""
    given, known = [], inspect.signature(interface.flash_attn_varlen_func)
    monkeypatch.setattr(interface, "flash_attn_varlen_func", lambda **values: given.append(values))
    if unsupported == 3:
        monkeypatch.setattr(interface, "is_fa_version_supported", lambda version: version == 2)
    calls = case().calls()
    for name in ("flash", "flash 8", "flash2"):
        calls[name]()
    for values in given:
        known.bind(**values)
        assert values["block_table"].shape == (2, 4) and values["max_seqlen_k"] == 64 and values["causal"]
    named = [(values["fa_version"], values["num_splits"], values["scheduler_metadata"]) for values in given]
    flash = [(2, 0, None)] * 2 if unsupported == 3 else [(3, 32, "a schedule"), (3, 8, None)]
    assert named == [*flash, (2, 0, None)]


def test_where_it_cannot_be_called_it_is_left_out_in_a_line(interface, monkeypatch, capsys):
    monkeypatch.setattr(interface, "flash_attn_varlen_func", empty)
    assert "flash2" in case().calls() and "flash2" not in case("fp8").calls() and not capsys.readouterr().out
    inputs.has_flash2.cache_clear()
    monkeypatch.setattr(interface, "fa_version_unsupported_reason", lambda version: f"no version {version}")
    assert not {"flash2"} & {*case().calls(), *case().calls()}
    assert capsys.readouterr().out == "flash2 is left out: no version 2\n"
