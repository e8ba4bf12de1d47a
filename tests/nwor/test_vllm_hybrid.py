# SPDX-License-Identifier: Apache-2.0
"""Modes in real vLLM on the CPU, for models whose layers lie in several cache groups over one memory."""

import functools
from dataclasses import replace

import pytest

from nwor.settings import Settings
from nwor_lab.faults import GROUPS, injectable
from tests import checkpoints, hybrids
from tests.devices import needs_fp8_cache
from tests.engines import Outcome
from tests.nwor import faults
from tests.nwor.faults import check_each_is_seen
from tests.nwor.on_cpu import assert_clean_and_counted, planned_is_held, spec_of
from tests.nwor.specs import With

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

LAYERS = hybrids.PAIR["num_hidden_layers"]
both = pytest.mark.parametrize("mode", ["cow", "stage"])


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return hybrids.hybrid_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def spec(model):
    """A cache too small for its batch: preempted requests and windows that move on leave blocks that others take."""
    return replace(spec_of(model, block_size=32), num_blocks=36)


@pytest.fixture(scope="module")
def vanilla(engines, spec):
    return engines.run(spec, Settings(audit=True))


def treated(engines, spec, mode: str, fault=None, **call) -> Outcome:
    return engines.run(spec, Settings(mode=mode, audit=True, debug_sync=True), fault, **call)


def test_vanilla_leaves_rejected_bytes_in_every_group(vanilla):
    """The audit's negative control; and the model is what it is to be, three groups of which two have windows."""
    rejected = vanilla.generation.counters["draft_tokens"] - vanilla.generation.counters["accepted_tokens"]
    assert vanilla.metrics["num_preemptions"] > 0 and vanilla.audit["dirty_slots"] == LAYERS * rejected > 0
    assert vanilla.audit["unwritten_rows"] == vanilla.audit["wrong_rows"] == vanilla.audit["stray_slots"] == 0
    assert {text[:8] for text in vanilla.ranks[0]["dirty_examples"]} == {"group 0,", "group 1,", "group 2,"}


@both
def test_every_group_is_held_back_and_committed(engines, spec, vanilla, mode):
    outcome = treated(engines, spec, mode, faults.held_in_block_0)
    assert outcome.tokens == vanilla.tokens
    assert_clean_and_counted(outcome, mode, LAYERS)


def test_a_group_without_its_own_slots_or_verdict_is_seen(engines, spec):
    """Under stage in an engine of its own: windows that are dropped and not closed stop the next prefill."""
    roomy = replace(spec, num_blocks=64)
    check_each_is_seen(engines, roomy, "cow", GROUPS)
    [fault] = injectable("stage", GROUPS)
    outcome = engines.run(roomy, Settings(mode="stage", audit=True), fault)
    assert all(outcome.audit[field] > 0 for field in fault.red)


def test_eagle3(engines, tmp_path):
    """Hidden states of three layers for the head, and a draft vocabulary smaller than the target's."""
    types = [hybrids.FULL, hybrids.SLIDING, hybrids.SLIDING]
    pair = hybrids.hybrid_pair(tmp_path, num_hidden_layers=3, layer_types=types, head_dim=64)
    head = checkpoints.random_eagle3(tmp_path / "eagle3", pair / "target", draft_vocab_size=288)
    spec = replace(spec_of(pair, block_size=32), draft=str(head), method="eagle3")
    plain = engines.run(spec, Settings())
    assert plain.generation.counters["accepted_tokens"] > plain.generation.counters["drafts"]
    outcome = treated(engines, spec, "stage", planned_is_held)
    assert outcome.tokens == plain.tokens
    assert_clean_and_counted(outcome, "stage", width=256)


@needs_fp8_cache
@pytest.mark.parametrize(("skipped", "serves"), [("sliding_window", True), ("1", False)])
def test_layers_whose_cache_stays_bf16_beside_fp8(engines, model, tmp_path, skipped, serves):
    """Sliding windows are groups of their own; where all layers are alike, one of them stays in the others' group."""
    if not serves:
        checkpoints.random_pair(tmp_path, noise=0.3)
    spec = replace(spec_of(model if serves else tmp_path, "bfloat16", "fp8", block_size=32), num_blocks=80)
    spec = With(**vars(spec), arguments={"kv_cache_dtype_skip_layers": [skipped]})
    outcome = treated(engines, spec, "stage")
    [rank], audit = outcome.ranks, outcome.audit
    assert (rank["serving"], "bfloat16" in rank["reason"]) == (("stage", False) if serves else ("off", True))
    assert outcome.tokens == engines.run(spec, Settings()).tokens
    assert (audit["dirty_slots"] == 0) == serves
    assert audit["unwritten_rows"] == audit["wrong_rows"] == audit["stray_slots"] == 0


@pytest.fixture(scope="module")
def beside_states(engines, tmp_path_factory):
    """Outcomes by mode of Qwen3-Next's shape and its MTP, in a cache too small for its batch: blocks go from states to
    rows and back. In bf16, as vLLM's kernels of recurrent layers ask."""
    path = tmp_path_factory.mktemp("recurrent")
    spec = hybrids.shape("qwen3-next", path, "bfloat16", method="mtp", num_blocks=23)

    @functools.cache
    def run(mode: str, fault=None) -> Outcome:
        call = {"prompts": hybrids.PROMPTS, "max_tokens": 48}
        if mode in ("cow", "stage"):
            return treated(engines, spec, mode, faults.held_in_block_0, **call)
        return engines.run(spec, Settings(mode=mode, audit=True), fault, **call)

    return run


@pytest.mark.parametrize("mode", ["direct", "off"])
def test_rejected_rows_stay_beside_recurrent_layers(beside_states, mode):
    """The audit's negative control; the states, which vLLM writes as it likes, make nothing red."""
    outcome = beside_states(mode)
    counters, audit = outcome.generation.counters, outcome.audit
    assert outcome.metrics["num_preemptions"] > 0 and len(set(map(tuple, outcome.tokens))) == len(hybrids.PROMPTS)
    assert audit["dirty_slots"] == counters["draft_tokens"] - counters["accepted_tokens"] > 300
    assert counters["accepted_tokens"] > 0
    assert audit["unwritten_rows"] == audit["wrong_rows"] == audit["stray_slots"] == 0


@pytest.mark.parametrize(("mode", "control"), [("cow", "off"), ("stage", "direct")])
def test_recurrent_layers_are_left_alone(beside_states, mode, control):
    """Tokens are those of the same attention that writes every row."""
    outcome = beside_states(mode)
    assert outcome.tokens == beside_states(control).tokens
    assert_clean_and_counted(outcome, mode, 1, width=256, element=2)


def test_a_touched_state_changes_tokens(beside_states):
    """The negative control of tokens, which alone say whether a state was left alone: one number of each is off."""
    assert beside_states("off", faults.states_touched).tokens != beside_states("off").tokens


# Layers with a cache; why stage logs every step, where it does.
ARCHITECTURES = {
    "gemma3": (6, ""),
    "gemma3n": (4, "model.layers.4"),
    "gpt-oss": (4, ""),
    "bloom": (4, ""),
}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_architectures(engines, tmp_path, name):
    """Random weights of a real shape; drafts are what was said before."""
    layers, why = ARCHITECTURES[name]
    spec = hybrids.shape(name, tmp_path, block_size=32)
    call = {"prompts": hybrids.PROMPTS, "max_tokens": 60}
    outcome = treated(engines, spec, "stage", **call)
    assert outcome.tokens == engines.run(spec, Settings(), **call).tokens
    assert_clean_and_counted(outcome, "stage", layers, width=256, checks=10)
    [rank] = outcome.ranks
    assert rank["ways"] == (["logged"] if why else ["staged", "logged"])
    assert why in rank["reason"] and bool(rank["reason"]) == bool(why)
