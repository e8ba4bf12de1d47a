# SPDX-License-Identifier: Apache-2.0
"""What a machine can do in vLLM, and what is said and refused where it cannot."""

import pytest
import torch

from nwor_lab import machine
from nwor_lab.bench import bench
from nwor_lab.operators import check


@pytest.mark.parametrize(
    ("can", "fp8", "dtype"),
    [
        (set(), False, "float32"),
        ({"avx512_f"}, True, "float32"),
        ({"avx512_f", "avx512_bf16"}, True, "bfloat16"),
        ({"avx512_f", "avx512_bf16", "amx_tile"}, True, "bfloat16"),
    ],
)
def test_what_is_chosen_by_what_the_cpu_can(can, fp8, dtype, monkeypatch):
    monkeypatch.setattr(machine, "on_cpu", lambda: True)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: dict.fromkeys(can, True))
    assert (machine.why_no_fp8_cache() == "") == fp8
    assert (machine.refuse_cache("fp8_e5m2") == "") == fp8
    assert machine.refuse_cache("auto") == ""
    assert machine.model_dtype() == dtype
    assert [machine.model_dtype(name) for name in ("float16", "half", "float")] == ["float16", "float16", "float32"]


@pytest.mark.parametrize("can", [set(), {"avx512_f"}, {"amx_tile"}])
def test_vllm_refuses_what_we_say_it_refuses(can, monkeypatch):
    """The rule is vLLM's own; were it to change there, this fails."""
    attention = pytest.importorskip("vllm.v1.attention.backends.cpu_attn")
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: dict.fromkeys(can, True))
    refused = ""
    try:
        attention._get_attn_isa(torch.bfloat16, 128, 64, "fp8")
    except NotImplementedError as error:
        refused = str(error)
    assert bool(refused) == bool(machine.why_no_fp8_cache())


def test_an_fp8_cache_that_cannot_be_is_refused_in_one_line(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(machine, "on_cpu", lambda: True)
    monkeypatch.setattr(torch.cpu, "get_capabilities", dict)
    assert bench.main(["--kv-cache-dtype", "fp8", "--run-dir", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "without AVX-512 and AMX" in said and not list(tmp_path.iterdir())


def test_bytes_of_vllms_writer_are_compared_for_the_caches_that_it_has(monkeypatch):
    pytest.importorskip("vllm")
    monkeypatch.setattr(machine, "on_cpu", lambda: True)
    monkeypatch.setattr(torch.cpu, "get_capabilities", dict)
    assert set(check.against_vllm("cpu", 0)["cache"]) == {"auto"}
