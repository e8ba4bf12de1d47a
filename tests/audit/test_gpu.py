# SPDX-License-Identifier: Apache-2.0
"""The sampled auditor in real vLLM on a GPU: both runners, eager and in CUDA graphs, synchronous and a step ahead."""

from dataclasses import replace

import pytest

from tests.audit.matrix import MATRIX, problems

pytestmark = [pytest.mark.gpu, pytest.mark.engine, pytest.mark.timeout(1800)]

WAYS = {
    "v2, graphs": {"runner": "v2", "enforce_eager": False},
    "v2, eager": {"runner": "v2"},
    "v2, synchronous": {"runner": "v2", "async_scheduling": False},
    "v1, graphs": {"runner": "v1", "enforce_eager": False},
    "v1, ahead": {"runner": "v1", "async_scheduling": True},
    "v2, triton": {"runner": "v2", "attention_backend": "TRITON_ATTN"},
}
CASES = [("v2, graphs", name) for name in MATRIX if name != "two ranks"] + [
    (way, name)
    for way in WAYS
    for name in ("eagle", "prefix hits")
    if way != "v2, graphs" and (way, name) != ("v1, ahead", "prefix hits")  # whose n-grams V1 looks up on the host
]


@pytest.mark.parametrize(("way", "name"), CASES)
def test_clean_runs_are_clean_and_planted_faults_are_found(engines, way, name, tmp_path):
    combination = MATRIX[name]
    assert problems(engines, combination, replace(combination.spec(tmp_path), **WAYS[way])) == []
