# SPDX-License-Identifier: Apache-2.0
"""Modes in real vLLM on a GPU, for models whose layers lie in several cache groups."""

import functools
import itertools

import pytest

from nwor.settings import Settings
from nwor_lab.faults import FAULTS
from tests import hybrids
from tests.nwor import faults
from tests.nwor.gpu.on_gpu import STACKS, assert_clean_and_counted, assert_parity, both, spec_of, treated

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]

LAYERS = hybrids.PAIR["num_hidden_layers"]
ROOM = {"num_blocks": 192}  # nobody is preempted, so the batches of two engines are the same
stacks = pytest.mark.parametrize(
    "stack",
    ["v2 FA graphs", "v2 FA graphs fp8", "v2 FA one graph", "v2 FA piecewise", "v2 Triton graphs", "v1 FA graphs"],
)


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory):
    return hybrids.hybrid_pair(tmp_path_factory.mktemp("hybrid"), head_dim=64)


@pytest.fixture(scope="module")
def vanilla(engines, hybrid):
    """Vanilla's outcomes by stack; its audit is the negative control."""
    return functools.cache(lambda stack: engines.run(spec_of(hybrid, stack, **ROOM), Settings(audit=True), logprobs=5))


@stacks
def test_vanilla_leaves_rejected_bytes_in_every_group(vanilla, stack):
    audit = vanilla(stack).audit
    assert audit["dirty_layer_steps"] > audit["layer_steps"] // 2
    assert audit["unwritten_rows"] == audit["stray_slots"] == 0
    assert {text[:8] for text in vanilla(stack).ranks[0]["dirty_examples"]} >= {"group 0,", "group 1,"}


@both
@stacks
def test_every_group_is_held_back_and_committed(engines, hybrid, vanilla, stack, mode):
    outcome = treated(engines, hybrid, mode, stack, **ROOM)
    assert_clean_and_counted(outcome, mode, LAYERS)
    assert outcome.audit["stray_slots"] == 0
    assert_parity(vanilla(stack), outcome, stack)


@both
def test_blocks_go_from_one_group_to_another(engines, hybrid, mode):
    """A cache too small for its batch: preempted requests and windows that move on leave blocks that others take."""
    small = {"num_blocks": 72}
    plain = engines.run(spec_of(hybrid, "v2 FA graphs", **small), Settings(), logprobs=5)
    assert plain.metrics["num_preemptions"] > 0
    outcome = treated(engines, hybrid, mode, "v2 FA graphs", faults.held_in_block_0, **small)
    assert_clean_and_counted(outcome, mode, LAYERS)
    assert_parity(plain, outcome)


@pytest.mark.parametrize(
    ("mode", "fault", "seen"),
    [
        ("cow", "groups: slots of the first", "dirty_layer_steps"),
        ("stage", "groups: slots of the first", "unwritten_rows"),
        ("stage", "groups: the first alone is committed", "unwritten_rows"),
    ],
)
def test_a_group_without_its_own_slots_or_verdict_is_seen(engines, hybrid, mode, fault, seen):
    outcome = engines.run(spec_of(hybrid, "v2 FA eager"), Settings(mode=mode, audit=True), FAULTS[fault])
    assert outcome.audit[seen] > 0


@both
@pytest.mark.parametrize(
    ("name", "stack"),
    [
        *itertools.product(["gemma3", "gpt-oss"], ["v2 FA graphs", "v2 Triton graphs"]),
        ("bloom", "v2 Triton graphs"),  # FlashAttention 3 has no ALiBi
    ],
)
def test_architectures(engines, tmp_path, name, stack, mode):
    """Random weights of a real shape, drafts by n-gram; gpt-oss has sinks, Bloom ALiBi."""
    spec = hybrids.shape(name, tmp_path, "bfloat16", kv_cache_memory=256, **STACKS[stack])
    call = {"prompts": hybrids.PROMPTS, "max_tokens": 60, "logprobs": 5}
    plain = engines.run(spec, Settings(), **call)
    outcome = engines.run(spec, Settings(mode=mode, audit=True, debug_sync=True), **call)
    assert outcome.ranks[0]["serving"] == mode, outcome.ranks[0]["reason"]
    assert outcome.audit["dirty_layer_steps"] == outcome.audit["unwritten_rows"] == outcome.audit["stray_slots"] == 0
    assert outcome.ranks[0]["counters"]["committed_tokens"] > 0
    assert_parity(plain, outcome)
