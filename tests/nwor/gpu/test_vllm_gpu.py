# SPDX-License-Identifier: Apache-2.0
"""Modes in real vLLM on a GPU: under both runners, the attention backends at hand, CUDA graphs and fp8 caches.

Thirteen prompts of 10 to 149 tokens, eight at a time, 96 tokens a batch:
chunked prefill runs beside decodes throughout.
"""

from functools import partial

import pytest

from nwor.settings import Settings
from nwor_lab.bench import options
from nwor_lab.bench.parity import compare, tolerance
from nwor_lab.bench.plan import Plan, settings_of
from nwor_lab.engines import shapes
from nwor_lab.engines.engine import Engine, EngineSpec
from nwor_lab.engines.random_weights import FORMAT
from nwor_lab.gpu.attention_case import has_flash2
from tests.checkpoints import random_pair
from tests.devices import A100, L40S, limit
from tests.engines import PROMPTS, in_child, serve_and_end, serve_in_turn
from tests.nwor import faults
from tests.nwor.gpu.on_gpu import (
    LAYERS,
    STACKS,
    assert_clean_and_counted,
    assert_parity,
    both,
    spec_of,
    stacks,
    treated,
)

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]


@pytest.mark.parametrize(("fault", "close"), [(None, True), (faults.no_commit, False)])
def test_parity_of_a_shape_alone_can_fail(engines, tmp_path, fault, close):
    """With synthetic acceptance too, as steps are timed; under vLLM's own dummy weights no fault showed."""
    target, head = shapes.write_shape("tiny", tmp_path, max_model_len=512)
    more = {"load_format": FORMAT, "acceptance_length": 3.0, "enforce_eager": False}
    spec = EngineSpec(str(target), str(head), num_blocks=96, kv_cache_memory=256, **more)
    prompts = options.random_prompts(Plan(num_prompts=6, random_prompts=(100,)))
    plain = engines.run(spec, settings_of("off", False), prompts=prompts, logprobs=5)
    settings = Settings(mode="stage", eagle_bias=True)  # the scheduler's check would end the run before parity does
    outcome = engines.run(spec, settings, fault, prompts=prompts, logprobs=5)
    parity = compare(plain.generation, outcome.generation, drafted=True)
    assert parity.within(tolerance("bfloat16")) == close, parity


@stacks
def test_vanilla_leaves_rejected_bytes_behind(vanilla, stack):
    audit = vanilla(stack).audit
    assert audit["layer_steps"] > 60
    assert audit["dirty_layer_steps"] > audit["layer_steps"] // 2
    assert audit["unwritten_rows"] == 0


@both
@stacks
def test_a_mode_is_exact_and_leaves_the_cache_clean(engines, model, vanilla, stack, mode):
    outcome = treated(engines, model, mode, stack)
    assert_clean_and_counted(outcome, mode)
    assert_parity(vanilla(stack), outcome, stack)
    if mode == "cow":
        assert outcome.tokens == vanilla(stack).tokens


@pytest.mark.parametrize("stack", [name for name in STACKS if "FlashInfer" not in name and "one graph" not in name])
def test_direct_leaves_what_vanilla_leaves(engines, model, vanilla, stack):
    """The control: stage's attention, and every row written, so that rejected rows stay."""
    outcome = treated(engines, model, "direct", stack)
    [rank] = outcome.ranks
    assert rank["serving"] == "direct", rank["reason"]
    assert not any(rank["counters"].values())
    assert outcome.audit["dirty_layer_steps"] > outcome.audit["layer_steps"] // 2
    assert outcome.audit["unwritten_rows"] == 0
    assert_parity(vanilla(stack), outcome, stack)


@pytest.mark.parametrize("device", [A100, L40S], ids=lambda device: device.name)
def test_stage_serves_within_the_limits_of_a_smaller_device(engines, model, vanilla, device):
    """The check at start-up included: what it finds wrong would fall back."""
    outcome = treated(engines, model, "stage", "v2 FA graphs", partial(limit, device))
    assert_clean_and_counted(outcome, "stage")
    assert_parity(vanilla("v2 FA graphs"), outcome)


@pytest.mark.parametrize(("stack", "logs"), [("v2 FA eager", True), ("v2 Triton graphs", False)])
def test_long_windows_are_left_to_flash_attention_3(engines, model, stack, logs):
    """32 drafts and a token for two query heads of a KV head: 66 rows."""
    outcome = treated(engines, model, "stage", stack, k=32, max_num_batched_tokens=512)
    [rank] = outcome.ranks
    assert rank["ways"] == (["logged"] if logs else ["staged", "logged"])
    assert rank["reason"].startswith("windows of 33 rows for 2 query heads" if logs else "")
    assert outcome.audit["dirty_layer_steps"] == outcome.audit["unwritten_rows"] == 0


@both
def test_a_mode_is_exact_beside_flash_attention_2(engines, tmp_path, mode):
    """Forced on a GPU that would take another version. Heads of 128: vLLM may have been packed with no other."""
    if not has_flash2():
        pytest.skip("vLLM comes without FlashAttention 2 here")
    random_pair(tmp_path, noise=0.3, num_hidden_layers=LAYERS, head_dim=128)
    forced = {"flash_attn_version": 2, "attention_backend": "FLASH_ATTN"}
    plain = engines.run(spec_of(tmp_path, "v2 FA graphs", **forced), Settings(), logprobs=5)
    outcome = treated(engines, tmp_path, mode, "v2 FA graphs", **forced)
    assert_clean_and_counted(outcome, mode)
    assert_parity(plain, outcome)


@both
def test_under_batch_invariance_a_request_is_the_same_alone_and_in_company(model, monkeypatch, mode):
    """Since vLLM attends: stage logs every step. vLLM's CPU build has none."""
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    with Engine(spec_of(model), Settings(mode=mode)) as engine:
        company = engine.generate(PROMPTS, 40).tokens
        assert [engine.generate([prompt], 40).tokens[0] for prompt in PROMPTS[:4]] == company[:4]
        [rank] = engine.report()
    assert rank["ways"] == ["logged"]
    assert ("batch invariance" in rank["reason"]) == (mode == "stage")


@both
def test_no_step_waits_for_the_device(model, monkeypatch, mode):
    """vLLM's own guard, which makes every synchronisation of a step an error."""
    monkeypatch.setenv("VLLM_GPU_SYNC_CHECK", "error")
    with Engine(spec_of(model, "v2 FA graphs"), Settings(mode=mode)) as engine:
        engine.generate([[5, 6, 7, 8] * 8, [9, 10, 11] * 5], 24)
        assert engine.report()[0]["counters"]["windows"] > 0


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        (faults.plugin_missing_in_worker, "not active on ranks"),
        (faults.gpu_layer_without_hook, "staged nothing"),
        (faults.v2_scheduler_disagrees, "accepted"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_run_that_asked_for_a_mode_and_did_not_get_it_stops(engines, model, fault, says):
    with pytest.raises(RuntimeError, match=says):
        engines.run(spec_of(model), Settings(mode="stage", debug_sync=True), fault)


@pytest.mark.parametrize("stack", ["v2 FA graphs", "v1 FA graphs"])
@both
def test_an_engine_that_ends_gives_its_caches_back(model, mode, stack):
    assert in_child(serve_and_end, spec_of(model, stack), Settings(mode=mode)) == (True, False)


def test_engines_of_one_script_have_their_own_modes(model):
    modes = ["off", "stage", "cow", "off"]
    assert in_child(serve_in_turn, spec_of(model), modes) == [(mode, mode != "off") for mode in modes]
