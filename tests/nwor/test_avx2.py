# SPDX-License-Identifier: Apache-2.0
"""Modes on vLLM's AVX2 library, whatever CPU this is: processes look like one by `tests/nwor/avx2`."""

import platform
from contextlib import closing
from pathlib import Path

import pytest

from nwor.settings import Settings
from nwor_lab import machine, paths
from nwor_lab.engines.engine import EngineSpec
from tests.engines import Engines

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(900),
    pytest.mark.skipif(platform.machine() != "x86_64", reason="only an x86 CPU can look like one with AVX2"),
    pytest.mark.skipif(not machine.on_cpu(), reason="vLLM's build for GPUs has no AVX2 library"),
]


def test_stage_on_vllms_avx2_library(monkeypatch):
    """The library that served is AVX2's and no other; tokens are vanilla's there, and the cache is clean."""
    spec = EngineSpec(
        str(paths.PAIR_TARGET), str(paths.PAIR_EAGLE), dtype="float32", max_num_batched_tokens=96, num_blocks=64
    )
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent / "avx2"))
    with closing(Engines()) as engines:
        vanilla, treated = (engines.run(spec, Settings(mode=mode, audit=True)) for mode in ("off", "stage"))
    assert vanilla.libraries == treated.libraries == ["_C_AVX2.abi3.so"]
    assert treated.audit["layer_steps"] > 80 and treated.audit["unwritten_rows"] == 0
    assert treated.audit["dirty_layer_steps"] == 0 < vanilla.audit["dirty_layer_steps"]
    assert treated.ranks[0]["serving"] == "stage"
    assert treated.tokens == vanilla.tokens
