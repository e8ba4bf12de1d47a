# SPDX-License-Identifier: Apache-2.0
"""Modes on vLLM's AVX2 library, whatever CPU this is: processes look like one by `tests/nwor/avx2`."""

import functools
import platform
import re
from dataclasses import replace

import pytest

from nwor.settings import Settings
from nwor_lab import machine, paths
from nwor_lab.engines.engine import EngineSpec
from nwor_lab.experiments.parity import compare, tolerance
from tests.engines import Engines, Outcome
from tests.lab.test_machine import AVX2, on_avx2

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
        patch.setenv("PYTHONPATH", str(AVX2))
        yield outcome
    engines.close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("mode", ["off", "cow", "stage"])
def test_a_mode_on_vllms_avx2_library(run, mode, dtype):
    """The library that served is AVX2's and no other; tokens are vanilla's there, and the cache is clean."""
    vanilla, treated = run("off", dtype), run(mode, dtype)
    assert treated.libraries == ["_C_AVX2.abi3.so"]
    audit = treated.audit
    assert audit["layer_steps"] > 80 and audit["unwritten_rows"] == 0
    assert (audit["dirty_layer_steps"] == 0) == (mode != "off")
    assert treated.ranks[0]["serving"] == mode
    parity = compare(vanilla.generation, treated.generation)
    assert parity.within(tolerance(dtype)), parity
    if mode == "cow" or dtype == "float32":
        assert parity.equal == parity.requests == 13


def test_packings_and_our_attention_on_vllms_avx2_library():
    """The operators' own tests of vLLM's CPU cache, there; fp8 caches are skipped with their reason."""
    chosen = "packing_of_vllms_writer or attention_is_vllms or sinks_are_vllms or backends_methods"
    words = ["-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", "tests/kernels/test_cpu_attention.py", "-k", chosen]
    done = on_avx2(*words)
    assert done.returncode == 0, done.stdout[-3000:]
    counts = re.search(r"(\d+) passed, (\d+) skipped", done.stdout)
    assert counts, done.stdout[-500:]
    passed, skipped = map(int, counts.groups())
    assert skipped == 2 * passed > 90, "of three caches two are fp8"
    assert "vLLM has no fp8 cache on this CPU (x86_64 without AVX-512 and AMX)" in done.stdout
