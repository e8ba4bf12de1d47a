# SPDX-License-Identifier: Apache-2.0
"""Models that are a shape alone: a `config.json` for a target and its EAGLE head, to be run with random weights.

A step's time depends on the shapes and hardly on what the weights say, and acceptance can be synthetic.
"""

from pathlib import Path

from nwor_lab.command_line import check_names
from nwor_lab.run.results import write_json

SIZES = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "vocab_size",
)  # fmt: skip
SHAPES: dict[str, dict[str, int]] = {
    "llama-2-7b": dict(zip(SIZES, (4096, 11008, 32, 32, 32, 128, 32000), strict=True)),
    "llama-2-7b-8kv": dict(zip(SIZES, (4096, 11008, 32, 32, 8, 128, 32000), strict=True)),
    "small": dict(zip(SIZES, (512, 1024, 8, 8, 8, 64, 2048), strict=True)),
    "tiny": dict(zip(SIZES, (256, 512, 2, 4, 2, 64, 512), strict=True)),
}


def write_shape(name: str, directory: Path, max_model_len: int) -> tuple[Path, Path]:
    """Write the two configs below `directory` and return the folders of target and head.

    Args:
        name: a key of `SHAPES`; ``llama-2-7b-8kv`` is Llama-2-7B with 8 KV heads, Llama-3-8B's cache.
        max_model_len: positions the rotary embedding is built for.

    Raises:
        ValueError: no such shape.
    """
    from transformers import LlamaConfig

    check_names("shape", (name,), SHAPES)
    target, head = directory / name / "target", directory / name / "eagle"
    for folder, sizes in ((target, SHAPES[name]), (head, SHAPES[name] | {"num_hidden_layers": 1})):
        more = {"max_position_embeddings": max_model_len, "rms_norm_eps": 1e-5, "dtype": "bfloat16"}
        config = LlamaConfig(architectures=["LlamaForCausalLM"], **sizes, **more)
        write_json(folder / "config.json", config.to_dict())
    return target, head
