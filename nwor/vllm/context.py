# SPDX-License-Identifier: Apache-2.0
"""What a forward of vLLM knows of itself."""

from typing import Any


def attention_metadata(layer_name: str) -> Any:
    """What vLLM's attention of a layer is given in this forward; None in a dummy run without attention."""
    from vllm.forward_context import get_forward_context

    metadata = get_forward_context().attn_metadata
    return metadata.get(layer_name) if isinstance(metadata, dict) else None
