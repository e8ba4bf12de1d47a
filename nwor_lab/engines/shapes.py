# SPDX-License-Identifier: Apache-2.0
"""Models that are a shape alone: a `config.json` for a target and its EAGLE head, to be run with random weights.

A step's time depends on the shapes and hardly on what the weights say, and acceptance can be synthetic.
"""

from pathlib import Path
from typing import Any

from nwor_lab.results import write_json

_LLAMA_2_7B = {
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": 128,
    "vocab_size": 32000,
}
SHAPES: dict[str, dict[str, int]] = {
    "llama-2-7b": _LLAMA_2_7B,
    "llama-2-7b-8kv": {**_LLAMA_2_7B, "num_key_value_heads": 8},
    "small": {
        **_LLAMA_2_7B,
        "hidden_size": 512,
        "intermediate_size": 1024,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "vocab_size": 2048,
    },
    "tiny": {
        **_LLAMA_2_7B,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "vocab_size": 512,
    },
}


def write_shape(name: str, directory: Path, max_model_len: int) -> tuple[Path, Path]:
    """Write the two configs below `directory` and return the folders of target and head.

    Args:
        name: a key of `SHAPES`; ``llama-2-7b-8kv`` is Llama-2-7B with 8 KV heads, Llama-3-8B's cache.
        max_model_len: positions the rotary embedding is built for.

    Raises:
        ValueError: no such shape.
    """
    if name not in SHAPES:
        raise ValueError(f"shape {name!r} is not one of {', '.join(SHAPES)}")
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "max_position_embeddings": max_model_len,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "bos_token_id": 1,
        "eos_token_id": 2,
        "dtype": "bfloat16",
        **SHAPES[name],
    }
    target, head = directory / name / "target", directory / name / "eagle"
    for path in (target, head):
        path.mkdir(parents=True, exist_ok=True)
    write_json(target / "config.json", config)
    write_json(head / "config.json", config | {"num_hidden_layers": 1})
    return target, head
