# SPDX-License-Identifier: Apache-2.0
"""Small models whose layers lie in several cache groups: a pair with random weights, and real architectures' shapes.

Bloom's has one group; it is here for its attention, which has ALiBi as gpt-oss' has sinks.
"""

import json
from pathlib import Path
from typing import Any

from nwor_lab.engines.engine import EngineSpec
from nwor_lab.engines.random_weights import FORMAT
from tests.checkpoints import random_pair

SLIDING, FULL = "sliding_attention", "full_attention"
# One full layer and three with windows: three groups on a CPU, and the drafter's layer lies over a target's.
PAIR: dict[str, Any] = {"num_hidden_layers": 4, "layer_types": [FULL, SLIDING, SLIDING, SLIDING], "sliding_window": 48}
_SHAPE: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "sliding_window": 48,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "attention_bias": False,
    "tie_word_embeddings": True,
}
_GEMMA = {"hidden_activation": "gelu_pytorch_tanh", "rope_theta": 10000.0, "rope_local_base_freq": 10000.0}
SHAPES: dict[str, dict[str, Any]] = {
    "gemma3": {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "num_hidden_layers": 6,
        "layer_types": [*5 * [SLIDING], FULL],
        "query_pre_attn_scalar": 64,
        **_GEMMA,
    },
    "gemma3n": {
        "architectures": ["Gemma3nForCausalLM"],
        "model_type": "gemma3n_text",
        "num_hidden_layers": 6,
        "layer_types": 3 * [SLIDING, FULL],
        "num_kv_shared_layers": 2,
        "intermediate_size": 6 * [256],
        "activation_sparsity_pattern": 6 * [0.0],
        "altup_num_inputs": 2,
        "laurel_rank": 16,
        "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": 32,
        "final_logit_softcapping": 30.0,
        **_GEMMA,
    },
    "gpt-oss": {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "num_hidden_layers": 4,
        "layer_types": 2 * [SLIDING, FULL],
        "intermediate_size": 128,
        # Each token goes to all experts: else rounding chooses another one here and there, and texts part.
        "num_local_experts": 2,
        "num_experts_per_tok": 2,
        "swiglu_limit": 7.0,
        "attention_bias": True,
        "tie_word_embeddings": False,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 2.0,
            "original_max_position_embeddings": 1024,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
        },
    },
    "bloom": {
        "architectures": ["BloomForCausalLM"],
        "model_type": "bloom",
        "num_hidden_layers": 4,
        "n_layer": 4,
        "num_attention_heads": 2,  # heads of 64; `n_head` is its other name, and gives way to this one
    },
    # Three layers with a gated delta net and one with attention. vLLM takes neither the model nor its MTP without a
    # mixture of experts, which the first layer says of both, and its CPU kernels know heads of 64 and more.
    "qwen3-next": {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "num_hidden_layers": 4,
        "layer_types": [*3 * ["linear_attention"], FULL],
        "tie_word_embeddings": False,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 2,
        "mlp_only_layers": [1, 2, 3],
        "decoder_sparse_step": 1,
        "num_experts": 2,  # all of them for each token: see gpt-oss
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
    },
}
# A drafter that looks for what was said before finds much of it among so few tokens.
PROMPTS = [[(j * j * (i + 3) + 5 * i) % 29 + 2 for j in range(12 + 17 * i)] for i in range(8)]


def hybrid_pair(path: Path, **more: Any) -> Path:
    """A pair as `random_pair` writes it, of which the target is hybrid."""
    random_pair(path, noise=0.3, **{**PAIR, **more})
    return path


def shape(name: str, path: Path, dtype: str = "float32", **more: Any) -> EngineSpec:
    """An engine's configuration for one of `SHAPES`, random weights, drafts by n-gram; more: fields of the engine's."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps({**_SHAPE, **SHAPES[name], "dtype": dtype}))
    fields = {"num_blocks": 96, "max_num_batched_tokens": 96, "method": "ngram", **more}
    return EngineSpec(str(path), load_format=FORMAT, dtype=dtype, **fields)
