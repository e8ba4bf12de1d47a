# SPDX-License-Identifier: Apache-2.0
"""Modes beside the other KV connectors of vLLM that run on a CPU: prompts leave the cache and come back."""

from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest

from nwor.settings import Settings
from nwor_lab.audit.auditor import FAULTS
from tests.engines import Outcome
from tests.nwor import faults
from tests.nwor.offloading import BLOCK, FIRST, OTHERS, offloading
from tests.nwor.on_cpu import spec_of

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]
MODES = ("off", "cow", "stage")

PROMPTS, EVICTING = ([left + right + [9, 8, 7] for left, right in pairwise([*some, some[0]])] for some in (FIRST, OTHERS))
CALLS = [{"prompts": prompts} for prompts in (PROMPTS, EVICTING, PROMPTS)]
SHIPPED = 2 * len(PROMPTS) * 2 * BLOCK
"""Slots of whole blocks of the prompts that are asked first and then, in a layer."""
ON_HOST = {"cpu_bytes_to_use": 64 << 20, "spec_name": "HostOffloadingSpec", "spec_module_path": "nwor_lab.engines.offload"}


def serve(engines, model, mode: str, *connector, audit: bool = True) -> Outcome:
    """Prompts, others for which these are evicted, and the first again, in one engine.

    Every prompt is one chunk: of a longer one `ExampleConnector` saves blocks that it does not have yet.
    """
    spec = replace(offloading(spec_of(model), offload=0), max_num_batched_tokens=512)
    fault = partial(faults.with_connector, *connector) if connector else None
    settings = Settings(mode=mode, audit=audit, debug_sync=mode != "off")
    outcome = engines.run(spec, settings, fault, CALLS, max_tokens=BLOCK)
    assert not outcome.error, outcome.error
    return outcome


def tokens(outcome: Outcome) -> list[list[list[int]]]:
    return [generation.tokens for generation in outcome.generations]


def assert_served(outcome: Outcome, mode: str) -> None:
    [rank] = outcome.ranks
    assert mode == "off" or rank["serving"] == mode, rank["reason"]
    assert mode == "off" or rank["counters"]["windows"] > 0 == rank["counters"]["fallbacks"]


@pytest.fixture(scope="module")
def computed(engines, model) -> list[list[list[int]]]:
    """What vLLM says without a connector."""
    return tokens(serve(engines, model, "off", audit=False))


def on_disk(folder) -> dict:
    return {"shared_storage_path": str(folder)}


def on_host_and_disk(folder) -> dict:
    options = {"OffloadingConnector": ON_HOST, "ExampleConnector": on_disk(folder)}
    return {
        "connectors": [
            {"kv_connector": name, "kv_role": "kv_both", "kv_connector_extra_config": given}
            for name, given in options.items()
        ]
    }


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("name", "options", "stores"), [("ExampleConnector", on_disk, 1), ("MultiConnector", on_host_and_disk, 2)]
)
def test_prompts_that_leave_and_come_back(engines, model, computed, tmp_path, mode, name, options, stores):
    """Asked again, a prompt's blocks are brought back; tokens are those of an engine without connector."""
    outcome = serve(engines, model, mode, name, None, options(tmp_path))
    assert tokens(outcome) == computed
    audit, [rank] = outcome.audit, outcome.ranks
    layers = audit["layer_steps"] // audit["steps"]
    files = list(tmp_path.glob("*/*.safetensors"))
    assert len(files) == len(PROMPTS + EVICTING) * (layers + 1), "of the drafter's layer too"
    assert audit["shipped_slots"] >= stores * SHIPPED * layers
    assert outcome.metrics["external_prefix_cache_hits"] >= len(PROMPTS) * BLOCK
    red = {fault for fault in FAULTS if audit[fault]}
    assert red == ({"dirty_layer_steps"} if mode == "off" else set()), rank["dirty_examples"]
    assert_served(outcome, mode)


def test_prompts_that_a_benchmark_makes_up(engines, model, computed):
    """`DecodeBenchConnector` fills a prompt's blocks with one number and ships nothing; the audit does not follow it."""
    filled = {mode: serve(engines, model, mode, "DecodeBenchConnector", None, {}, audit=False) for mode in MODES}
    assert tokens(filled["off"]) != computed
    for mode, outcome in filled.items():
        assert tokens(outcome) == tokens(filled["off"])
        assert_served(outcome, mode)


@pytest.mark.parametrize("mode", ["cow", "stage"])
def test_a_connector_from_elsewhere_is_served_by_vllms_own_write(engines, model, computed, tmp_path, mode):
    """Even by a name that is known: which pages another module's class reads, and when, nobody has looked up."""
    module = "vllm.distributed.kv_transfer.kv_connector.v1.example_connector"
    outcome = serve(engines, model, mode, "ExampleConnector", module, on_disk(tmp_path))
    [rank] = outcome.ranks
    assert rank["serving"] == "off" and not rank["counters"].get("windows")
    assert rank["reason"].startswith("the KV connector ExampleConnector: it is not known to read pages only when")
    assert tokens(outcome) == computed and outcome.audit["dirty_layer_steps"] > 0
