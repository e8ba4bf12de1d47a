# SPDX-License-Identifier: Apache-2.0
"""The repairs of vLLM that a user may ask for, in real vLLM on the CPU."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from nwor.settings import Settings
from nwor_lab.engines.engine import EngineSpec
from tests import checkpoints
from tests.nwor.on_cpu import spec_of

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]


BIAS = 3.0 * torch.randn(128, generator=torch.Generator().manual_seed(1))


def biased(model: Path, folder: Path, bias: torch.Tensor) -> EngineSpec:
    """An EAGLE head with a bias of `fc` that vLLM's has no place for."""
    return replace(spec_of(model), draft=str(checkpoints.write_biased_copy(model / "eagle", folder / "eagle", bias)))


def test_a_bias_is_applied_when_asked_for(engines, model, vanilla, tmp_path):
    """One this large spoils the drafts; dropped, acceptance would be what it is without one."""
    outcome = engines.run(biased(model, tmp_path, BIAS), Settings(eagle_bias=True))
    assert outcome.tokens == vanilla().tokens
    with_bias, without = outcome.generation.counters, vanilla().generation.counters
    assert with_bias["accepted_tokens"] / with_bias["drafts"] < 0.8 * without["accepted_tokens"] / without["drafts"]


def test_zeros_are_skipped_and_a_bias_that_only_the_config_promises_is_zero(engines, model, vanilla, tmp_path):
    """`"bias": true` means `fc`'s to EAGLE and the attention's to vLLM, whose memory nothing then fills."""
    spec = biased(model, tmp_path, torch.zeros(128))
    config = tmp_path / "eagle" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "bias": True}))
    outcome = engines.run(spec, Settings(eagle_bias=True))
    assert outcome.generation.counters == vanilla().generation.counters


@pytest.mark.parametrize("method", ["eagle3", "eagle"])
def test_biases_of_other_heads(engines, tmp_path, method):
    """EAGLE-3's and Llama 4's, applied when asked for, which changes what is drafted."""
    checkpoints.random_pair(tmp_path, noise=0.3, head_dim=64)
    if method == "eagle3":
        head = checkpoints.random_eagle3(tmp_path / "plain", tmp_path / "target")
    else:
        head = checkpoints.llama4_head(tmp_path / "plain", tmp_path / "eagle")

    def drafted(folder: Path) -> dict[str, float]:
        spec = replace(spec_of(tmp_path), draft=str(folder), method=method)
        return engines.run(spec, Settings(eagle_bias=True)).generation.counters

    loud = 10.0 * torch.randn(128, generator=torch.Generator().manual_seed(1))
    plain = drafted(head)
    assert plain["accepted_tokens"] > plain["drafts"] / 4
    assert drafted(checkpoints.write_biased_copy(head, tmp_path / "biased", loud, "fc.bias")) != plain


def test_cpu_sampling_takes_the_temperature_it_was_given(engines, model, vanilla):
    """vLLM 0.32 divides by uninitialised memory; a temperature near 0 must be all but greedy."""
    greedy = vanilla()
    cool = engines.run(spec_of(model), Settings(fix_cpu_sampling=True), temperature=0.01)
    same = sum(a == b for a, b in zip(greedy.tokens, cool.tokens, strict=True))
    assert same >= len(greedy.tokens) - 2
