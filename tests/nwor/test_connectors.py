# SPDX-License-Identifier: Apache-2.0
"""Beside which KV connectors a mode serves: those that read pages when rejected drafts are out of them."""

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: there is nothing to hook into")

from vllm.distributed import kv_transfer
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

from nwor.vllm import connectors
from tests.nwor.runners import connector

UNKNOWN = "it is not known to read pages only when rejected drafts are out of them"
BY_LAYERS = "the KV connector LMCacheConnectorV1 with use_layerwise"


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (connector("NixlConnector"), ""),
        (connector("MoRIIOConnector"), f"the KV connector MoRIIOConnector: {UNKNOWN}"),
        (connector("OffloadingConnector", path="a.module"), f"the KV connector OffloadingConnector: {UNKNOWN}"),
        (connector("MultiConnector", {"kv_connector": "NixlConnector"}, {"kv_connector": "OffloadingConnector"}), ""),
        (
            connector("MultiConnector", {"kv_connector": "NixlConnector"}, {"kv_connector": "MoRIIOConnector"}),
            f"the KV connector MoRIIOConnector: {UNKNOWN}",
        ),
    ],
)
def test_connectors_that_read_pages_before_the_verdict_are_named(config, why):
    assert connectors.why_not_beside(config) == why


@pytest.mark.parametrize(
    ("engine", "why"),
    [
        (SimpleNamespace(use_layerwise=False), ""),
        (SimpleNamespace(use_layerwise=True), BY_LAYERS),
        (SimpleNamespace(), BY_LAYERS),
    ],
)
@pytest.mark.parametrize("among_others", [False, True])
def test_a_layerwise_lmcache_is_known_by_what_was_loaded(engine, why, among_others, monkeypatch):
    """LMCache reads that from its own file or variables: vLLM's configuration does not tell."""
    config = connector("LMCacheConnectorV1")
    assert connectors.why_not_beside(config) == "", "not loaded yet"
    loaded = type("LMCacheConnectorV1", (), {"_lmcache_engine": engine})()
    if among_others:
        config = connector(
            "MultiConnector", {"kv_connector": "ExampleConnector"}, {"kv_connector": config.kv_connector}
        )
        loaded = SimpleNamespace(_connectors=[SimpleNamespace(), loaded])
    monkeypatch.setattr(kv_transfer, "has_kv_transfer_group", lambda: True)
    monkeypatch.setattr(kv_transfer, "get_kv_transfer_group", lambda: loaded)
    assert connectors.why_not_beside(config).startswith(why)
    assert bool(connectors.why_not_beside(config)) == bool(why)


def test_the_connectors_that_serve_are_vllms():
    """A name that vLLM has given up, or never had, would be a promise that nobody can check."""
    assert {*KVConnectorFactory._registry} >= connectors.AFTER_THE_VERDICT
    not_served = {"MultiConnector", "ExampleHiddenStatesConnector", "HiSparseConnector", "MoRIIOConnector"}
    assert {*KVConnectorFactory._registry} - connectors.AFTER_THE_VERDICT == not_served
