# SPDX-License-Identifier: Apache-2.0
"""Modes on vLLM's AVX2 library, whatever CPU this is: processes look like one by `tests/nwor/avx2`."""

import functools
import platform
from dataclasses import replace
from pathlib import Path

import pytest

from nwor.settings import Settings
from nwor_lab import machine, paths
from nwor_lab.bench.parity import compare, tolerance
from nwor_lab.engines.engine import EngineSpec
from tests.engines import Engines, Outcome

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(900),
    pytest.mark.skipif(platform.machine() != "x86_64", reason="only an x86 CPU can look like one with AVX2"),
    pytest.mark.skipif(not machine.on_cpu(), reason="vLLM's build for GPUs has no AVX2 library"),
]


@pytest.fixture(scope="module")
def run():
    """Engines of the shipped pair, one after the other, each mode and dtype once."""
    spec = EngineSpec(str(paths.PAIR_TARGET), str(paths.PAIR_EAGLE), max_num_batched_tokens=96, num_blocks=64)
    engines = Engines()

    @functools.cache
    def outcome(mode: str, dtype: str) -> Outcome:
        settings = Settings(mode=mode, audit=True, debug_sync=mode != "off")
        return engines.run(replace(spec, dtype=dtype), settings, logprobs=5)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parent / "avx2"))
        yield outcome
    engines.close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_stage_on_vllms_avx2_library(run, dtype):
    """The library that served is AVX2's and no other; tokens are vanilla's there, and the cache is clean."""
    vanilla, treated = run("off", dtype), run("stage", dtype)
    assert vanilla.libraries == treated.libraries == ["_C_AVX2.abi3.so"]
    assert treated.audit["layer_steps"] > 80 and treated.audit["unwritten_rows"] == 0
    assert treated.audit["dirty_layer_steps"] == 0 < vanilla.audit["dirty_layer_steps"]
    assert treated.ranks[0]["serving"] == "stage"
    parity = compare(vanilla.generation, treated.generation)
    assert parity.within(tolerance(dtype)), parity
    if dtype == "float32":
        assert parity.equal == parity.requests == 13
