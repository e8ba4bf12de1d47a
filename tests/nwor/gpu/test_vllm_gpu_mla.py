# SPDX-License-Identifier: Apache-2.0
"""DeepSeek's attention (MLA) in real vLLM on a GPU, with its own MTP layer: every step is logged."""

from pathlib import Path

import pytest

from nwor.settings import Settings
from nwor_lab.engines.engine import EngineSpec
from tests import checkpoints
from tests.engines import Outcome
from tests.nwor.gpu.on_gpu import assert_clean_and_counted

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]

STACKS = {
    "v2 graphs": {"enforce_eager": False},
    "v2 eager": {},
    "v2 graphs fp8": {"enforce_eager": False, "kv_cache_dtype": "fp8"},
    "v2 Triton eager": {"attention_backend": "TRITON_MLA"},
    "v1 eager": {"runner": "v1"},
}


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory) -> Path:
    return checkpoints.random_deepseek(tmp_path_factory.mktemp("deepseek"))


def treated(engines, model: Path, mode: str, stack: str, fault=None) -> Outcome:
    more = {"num_blocks": 96, "kv_cache_memory": 256, **STACKS[stack]}
    spec = EngineSpec(str(model), method="mtp", k=3, max_num_batched_tokens=96, **more)
    # With a fault the audit is to say so, before the scheduler's own check ends the run over other counts.
    return engines.run(spec, Settings(mode=mode, audit=True, debug_sync=mode != "off" and not fault), fault)


@pytest.mark.parametrize("stack", STACKS)
def test_modes_are_exact_and_leave_the_cache_clean(engines, deepseek, stack):
    plain = treated(engines, deepseek, "off", stack)
    assert plain.audit["dirty_layer_steps"] > 0 == plain.audit["unwritten_rows"] + plain.audit["wrong_rows"]
    for mode in ("cow", "stage"):
        outcome = treated(engines, deepseek, mode, stack)
        assert outcome.tokens == plain.tokens
        assert_clean_and_counted(outcome, mode)
        [rank] = outcome.ranks
        assert rank["ways"] == ["logged"] and rank["reason"].startswith("MLA" if mode == "stage" else "")
        if STACKS[stack].get("enforce_eager", True):
            assert outcome.audit["content_checked"] > 0 == outcome.audit["wrong_rows"]
