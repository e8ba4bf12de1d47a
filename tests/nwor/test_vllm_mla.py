# SPDX-License-Identifier: Apache-2.0
"""DeepSeek's attention (MLA) in real vLLM on the CPU: ``cow`` serves its latent rows, other modes say that they do not.

Three target layers and, as the drafter, the model's own MTP layer, whose cache is of the same kind and group.
"""

from pathlib import Path

import pytest
from vllm.v1.attention.backends.mla.amx_mla import AMXMLAImpl
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLAImpl

from nwor.settings import Settings
from nwor_lab.engines.engine import EngineSpec
from tests import checkpoints
from tests.engines import PROMPTS, Outcome
from tests.nwor.on_cpu import assert_clean_and_counted, planned_is_held

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory) -> Path:
    return checkpoints.random_deepseek(tmp_path_factory.mktemp("deepseek"))


@pytest.fixture(scope="module")
def plain(engines, deepseek) -> Outcome:
    return treated(engines, deepseek, "off")


def treated(engines, model: Path, mode: str, fault=None) -> Outcome:
    spec = EngineSpec(
        str(model), method="mtp", k=3, batch=4, dtype="bfloat16", num_blocks=128, max_num_batched_tokens=512,
    )  # fmt: skip
    settings = Settings(mode=mode, audit=True, debug_sync=mode != "off" and not fault)
    return engines.run(spec, settings, fault, prompts=PROMPTS[:6], max_tokens=30)


def test_cow_keeps_rejected_latent_rows_out_of_the_cache(engines, deepseek, plain):
    outcome = treated(engines, deepseek, "cow", planned_is_held)
    assert outcome.tokens == plain.tokens
    assert plain.audit["dirty_layer_steps"] > 0, "the audit's negative control: vLLM leaves them"
    assert outcome.audit["kept_rows"] > 300
    assert_clean_and_counted(outcome, "cow", width=576, element=2, checks=10)


def test_stage_logs_every_step_and_names_mla(engines, deepseek, plain):
    outcome = treated(engines, deepseek, "stage")
    assert outcome.tokens == plain.tokens
    [rank] = outcome.ranks
    assert rank["reason"].startswith("MLA") and rank["ways"] == ["logged"]
    assert_clean_and_counted(outcome, "stage", width=576, element=2, checks=10)


def wrong_latent_row(patch: pytest.MonkeyPatch) -> None:
    """Each call zeroes the latent part of its first row in the cache, and not in the audit's scratch."""
    for backend in (CPUMLAImpl, AMXMLAImpl):  # vLLM takes the second where the CPU has AMX
        patch.setattr(backend, "do_kv_cache_update", spoiled(backend.do_kv_cache_update))


def spoiled(write):  # type: ignore[no-untyped-def]
    def spoil(self, kv_c_normed, k_pe, kv_cache, slot_mapping, *more):  # type: ignore[no-untyped-def]
        write(self, kv_c_normed, k_pe, kv_cache, slot_mapping, *more)
        if kv_cache.untyped_storage().nbytes() > kv_cache.nbytes and slot_mapping[0] >= 0:  # layers share an allocation
            kv_cache.flatten(0, 1)[slot_mapping[0], :512] = 0

    return spoil


def test_rows_with_other_bytes_turn_the_audit_red(engines, deepseek):
    """The audit has vLLM's own writer make each latent row once more, and compares the bytes."""
    audit = treated(engines, deepseek, "off", fault=wrong_latent_row).audit
    assert audit["wrong_rows"] > 0 and audit["content_checked"] == audit["kept_rows"]
