# SPDX-License-Identifier: Apache-2.0
"""Which of vLLM's KV connectors a mode serves beside: those that read pages only when the step's verdict is in them.

vLLM lets a connector save after the drafter (`wait_for_save`), and by then every mode has committed or restored. What a
connector copies later, or lets another machine read, is ordered behind that too: the tokens that end a request are
copied to the host after the commit. A connector that reads within the forward pass would ship pages in which accepted
rows are still missing (`stage`) or rejected ones still lie (`cow`).
"""

from typing import Any

AFTER_THE_VERDICT = {
    "DecodeBenchConnector",  # reads nothing
    "ExampleConnector",  # reads within the forward pass, rows of prompts alone
    "FlexKVConnectorV1",
    "HF3FSKVConnector",
    "LMCacheConnectorV1",
    "LMCacheMPConnector",
    "MooncakeConnector",
    "MooncakeStoreConnector",
    "NixlConnector",
    "NixlPullConnector",
    "NixlPushConnector",
    "OffloadingConnector",
    "SimpleCPUOffloadConnector",
}


def why_not_beside(config: Any) -> str:
    """Why no mode serves beside the connector of this `KVTransferConfig`, or an empty string."""
    from vllm.distributed import kv_transfer

    children = config.kv_connector_extra_config.get("connectors", [])
    beside = config.kv_connector == "MultiConnector" and not config.kv_connector_module_path
    for given in children if beside else [vars(config)]:
        name = given.get("kv_connector")
        if given.get("kv_connector_module_path") or name not in AFTER_THE_VERDICT:
            return f"the KV connector {name}: it is not known to read pages only when rejected drafts are out of them"
    if kv_transfer.has_kv_transfer_group():  # not before vLLM has made it, as when it measures what graphs cost
        connector = kv_transfer.get_kv_transfer_group()
        for one in getattr(connector, "_connectors", [connector]):
            # LMCache's own files and variables decide, not vLLM's: one that does not say may be layerwise.
            layerwise = getattr(getattr(one, "_lmcache_engine", None), "use_layerwise", True)
            if type(one).__name__ == "LMCacheConnectorV1" and layerwise:
                return "the KV connector LMCacheConnectorV1 with use_layerwise: it reads pages within the forward pass"
    return ""
