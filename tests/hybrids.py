# SPDX-License-Identifier: Apache-2.0
"""Small models whose layers lie in several cache groups: a pair with random weights, and real architectures' shapes.

Bloom's has one group; it is here for its attention, which has ALiBi as gpt-oss' has sinks.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from nwor_lab.engines.engine import EngineSpec
from nwor_lab.engines.random_weights import FORMAT
from nwor_lab.pair.model import load_weights
from tests.checkpoints import CONFIG, layer_shapes, random_pair, random_weights, save_checkpoint

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
}
# Qwen3-Next's: three layers with a gated delta net and one with attention. vLLM takes neither the model nor its MTP
# without a mixture of experts, which the first layer says of both, and its CPU kernels know heads of 64 and more.
RECURRENT: dict[str, Any] = {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "num_hidden_layers": 4,
    "layer_types": [*3 * ["linear_attention"], FULL],
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


def recurrent_pair(path: Path) -> Path:
    """A pair as `random_pair` writes it, of which the target has the shape of `RECURRENT`, and one layer for MTP.

    That one drafts as the pair's EAGLE head does: what it computes is mostly the last token's embedding.
    """
    target, _ = random_pair(path, noise=0.3, head_dim=64)
    config, weights = {**CONFIG, "head_dim": 64, **RECURRENT}, load_weights(target)
    hidden = config["hidden_size"]
    shapes: dict[str, Sequence[int]] = {}
    for n, kind in enumerate(config["layer_types"]):
        experts = n not in config["mlp_only_layers"]
        shapes |= {f"model.layers.{n}.{name}": x for name, x in _layer_shapes(config, kind, experts).items()}
    shapes |= {f"mtp.layers.0.{name}": x for name, x in _layer_shapes(config, FULL, experts=True).items()}
    shapes |= {f"mtp.{name}": (hidden,) for name in ("norm.weight", "pre_fc_norm_hidden.weight")}
    shapes |= {"mtp.pre_fc_norm_embedding.weight": (hidden,), "mtp.fc.weight": (hidden, 2 * hidden)}
    drawn = random_weights(shapes, 0.3, torch.Generator().manual_seed(0))
    drawn["mtp.fc.weight"] = torch.cat((torch.eye(hidden), 0.3 * drawn["mtp.fc.weight"][:, hidden:]), 1)
    own = {name: tensor for name, tensor in weights.items() if ".layers." not in name}
    save_checkpoint(target, config, own | drawn)
    return path


def _layer_shapes(config: dict[str, Any], kind: str, experts: bool) -> dict[str, Sequence[int]]:
    """The weights of one of Qwen3-Next's layers; experts: it has a mixture of experts."""
    hidden, width = config["hidden_size"], config["linear_key_head_dim"]
    layer = {"input_layernorm.weight": (hidden,), **layer_shapes(config)}
    if kind == FULL:
        layer |= {f"self_attn.{x}_norm.weight": (config["head_dim"],) for x in "qk"}
        layer["self_attn.q_proj.weight"] = (2 * layer["self_attn.q_proj.weight"][0], hidden)  # and its gate
    else:
        keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
        layer = {name: shape for name, shape in layer.items() if "self_attn" not in name}
        layer |= {
            "linear_attn.in_proj_qkvz.weight": (2 * (keys + values) * width, hidden),
            "linear_attn.in_proj_ba.weight": (2 * values, hidden),
            "linear_attn.conv1d.weight": ((2 * keys + values) * width, 1, config["linear_conv_kernel_dim"]),
            "linear_attn.A_log": (values,),
            "linear_attn.dt_bias": (values,),
            "linear_attn.norm.weight": (width,),
            "linear_attn.out_proj.weight": (hidden, values * width),
        }
    if experts:
        layer = {name: shape for name, shape in layer.items() if "mlp" not in name}
        layer |= {"mlp.gate.weight": (config["num_experts"], hidden), "mlp.shared_expert_gate.weight": (1, hidden)}
        for expert in ("shared_expert", *(f"experts.{i}" for i in range(config["num_experts"]))):
            inner = config["moe_intermediate_size"]
            layer |= {f"mlp.{expert}.{name}_proj.weight": (inner, hidden) for name in ("gate", "up")}
            layer[f"mlp.{expert}.down_proj.weight"] = (hidden, inner)
    return layer
