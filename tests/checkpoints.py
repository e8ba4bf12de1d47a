# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that vLLM must load: random-weight pairs, DeepSeek's shape, heads of other kinds and with biases."""

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from nwor_lab import paths
from nwor_lab.bench.parity import tolerance
from nwor_lab.pair.model import load_weights

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "vocab_size": 320,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": None,
}


# Of a random pair, in nats: its logits reach 16, where bfloat16 steps by 0.125. Rounding alone shifts by 0.041 on an
# H200, by 0.036 on a CPU without bfloat16. With an fp8 cache FlashAttention rounds attention weights to fp8 as well.
GAPS = {"auto": 0.07, "fp8": tolerance("bfloat16", "fp8")}


def random_pair(out: Path, architecture: str = "llama", noise: float = 0.5, **shape: Any) -> tuple[Path, Path]:
    """Write a small random-weight pair to `out/target` and `out/eagle`, and return the two paths.

    The target's `lm_head` is random and its layers only perturb the embedding, so the next token is mostly a fixed
    function of the last one, which the head computes too: some drafts are accepted, some not, more with less `noise`.

    architecture: one of `ARCHITECTURES`, of the target; the head is always Llama-shaped.
    noise: scale of the layers' weights; at 0 only the norms' random weights make drafts differ.
    shape: entries of `CONFIG` to replace, `num_hidden_layers` the target's.
    """
    config = {**CONFIG, **shape}
    hidden, vocabulary = config["hidden_size"], config["vocab_size"]
    layers = range(config["num_hidden_layers"])
    shapes: dict[str, Sequence[int]] = {"model.embed_tokens.weight": (vocabulary, hidden)}
    for n in layers:
        norm = {f"model.layers.{n}.input_layernorm.weight": (hidden,)}
        shapes |= norm | {f"model.layers.{n}.{name}": size for name, size in layer_shapes(config).items()}
    shapes |= {"model.norm.weight": (hidden,), "lm_head.weight": (vocabulary, hidden)}
    if architecture == "qwen3":
        for n in layers:
            shapes |= {f"model.layers.{n}.self_attn.{x}_norm.weight": (config["head_dim"],) for x in "qk"}
    generator = torch.Generator().manual_seed(0)
    target = random_weights(shapes, noise, generator)
    own = {f"layers.0.{name}": size for name, size in layer_shapes(config).items()}
    head = random_weights({"fc.weight": (hidden, 2 * hidden), **own}, noise, generator)
    head["fc.weight"] = torch.cat((torch.eye(hidden), 0.1 * head["fc.weight"][:, hidden:]), 1)

    folders = out / "target", out / "eagle"
    named = {"architectures": [ARCHITECTURES[architecture]], "model_type": architecture}
    save_checkpoint(folders[0], {**config, **named}, target)
    save_checkpoint(folders[1], {**_of_head(config), "num_hidden_layers": 1}, head)
    copy_tokenizer(folders[0])
    return folders


def _of_head(config: Mapping[str, Any]) -> dict[str, Any]:
    """A target's config without what says which of its layers have a sliding window: a head's one layer has none."""
    return {name: value for name, value in config.items() if name not in ("layer_types", "sliding_window")}


def layer_shapes(config: Mapping[str, Any]) -> dict[str, Sequence[int]]:
    """The weights of a decoder layer but for its input norm, which an EAGLE head's first layer lacks."""
    hidden, inner, width = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"] * width, config["num_key_value_heads"] * width
    return {
        "self_attn.q_proj.weight": (heads, hidden),
        "self_attn.k_proj.weight": (kv_heads, hidden),
        "self_attn.v_proj.weight": (kv_heads, hidden),
        "self_attn.o_proj.weight": (hidden, heads),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }


def random_weights(shapes: Mapping[str, Sequence[int]], noise: float, generator: torch.Generator) -> dict[str, Tensor]:
    """Norms near 1, embeddings and `lm_head` of unit variance, and all else small:
    outputs of variance `noise` squared."""
    weights = {}
    for name, shape in shapes.items():
        unit = torch.randn(tuple(shape), generator=generator)
        if name.endswith("norm.weight"):
            weights[name] = 1 + 0.1 * unit
        elif name.startswith(("model.embed_tokens", "lm_head")):
            weights[name] = unit
        else:
            weights[name] = noise * unit / shape[-1] ** 0.5
    return weights


def save_checkpoint(path: Path, config: Mapping[str, Any], weights: dict[str, Tensor]) -> None:
    """Write `model.safetensors` and `config.json` into `path`, weights but whole numbers in bf16."""
    path.mkdir(parents=True, exist_ok=True)
    tensors = {name: x.bfloat16() if x.is_floating_point() else x for name, x in weights.items()}
    save_file(
        {name: x.contiguous() for name, x in tensors.items()}, path / "model.safetensors", metadata={"format": "pt"}
    )
    (path / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}, indent=2))


def copy_tokenizer(path: Path) -> None:
    """The shipped pair's, of more tokens than these models have: vLLM wants one."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(paths.PAIR_TARGET / name, path)


def write_biased_copy(src: Path, dst: Path, bias: Tensor, name: str = "fc.bias") -> Path:
    """Copy the EAGLE checkpoint `src` to `dst` with a bias added; `config.json` stays as it is."""
    shutil.copytree(src, dst)
    weights = load_weights(src) | {name: bias.bfloat16()}
    save_file(weights, dst / "model.safetensors", metadata={"format": "pt"})
    return dst


def random_eagle3(out: Path, target: Path, draft_vocab_size: int = 0) -> Path:
    """Write a random-weight EAGLE-3 head for a target of `random_pair` to `out`, and return that path.

    The head computes what `random_pair`'s head does, a fixed function of the last token. Its token's embedding comes in
    by the attention alone, so queries equal keys (each row attends to itself), values are the embedding and
    `hidden_norm` keeps the residual small. Where the KV heads are narrower than the embedding, fewer drafts are right.

    target: its checkpoint folder. draft_vocab_size: how many of its tokens the head can draft, all of them if 0.
    """
    config, lm_head = json.loads((target / "config.json").read_text()), load_weights(target)["lm_head.weight"]
    hidden, inner, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    heads, kv_heads, vocabulary = config["num_attention_heads"], config["num_key_value_heads"], config["vocab_size"]
    shapes = {
        "fc.weight": (hidden, 3 * hidden),
        "norm.weight": (hidden,),
        "midlayer.input_layernorm.weight": (hidden,),
        "midlayer.hidden_norm.weight": (hidden,),
        "midlayer.post_attention_layernorm.weight": (hidden,),
        "midlayer.self_attn.q_proj.weight": (heads * head_dim, 2 * hidden),
        "midlayer.self_attn.k_proj.weight": (kv_heads * head_dim, 2 * hidden),
        "midlayer.self_attn.v_proj.weight": (kv_heads * head_dim, 2 * hidden),
        "midlayer.self_attn.o_proj.weight": (hidden, heads * head_dim),
        "midlayer.mlp.gate_proj.weight": (inner, hidden),
        "midlayer.mlp.up_proj.weight": (inner, hidden),
        "midlayer.mlp.down_proj.weight": (hidden, inner),
    }
    head = random_weights(shapes, 0.3, torch.Generator().manual_seed(0))
    head["midlayer.hidden_norm.weight"] *= 0.1
    query, key, value, output = (head[f"midlayer.self_attn.{name}_proj.weight"] for name in "qkvo")
    key *= 2 / 0.3
    query.view(kv_heads, -1, head_dim, 2 * hidden)[:] = key.view(kv_heads, 1, head_dim, 2 * hidden)
    width = min(hidden, kv_heads * head_dim)
    value *= 0.1
    value[:width, :hidden] += torch.eye(width, hidden)
    output *= 0.1
    first = output.view(hidden, kv_heads, -1, head_dim)[:, :, 0]  # a KV head's first query head carries its value
    first += torch.eye(hidden, kv_heads * head_dim).view(hidden, kv_heads, head_dim)
    drafted = torch.linspace(0, vocabulary - 1, draft_vocab_size or vocabulary).round().long()
    head["lm_head.weight"] = lm_head[drafted]
    if len(drafted) < vocabulary:
        head["d2t"] = drafted - torch.arange(len(drafted))
    own = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "draft_vocab_size": len(drafted),
        "norm_before_residual": True,
    }
    save_checkpoint(out, {**_of_head(config), **own}, head)
    return out


def llama4_head(out: Path, eagle: Path) -> Path:
    """Write the EAGLE head `eagle` of `random_pair` to `out` as a Llama-4 EAGLE head that drafts alike, but for rope.

    Llama 4's own layers bring norms at both ends, an `lm_head` of their own and other names.
    """
    config, weights = json.loads((eagle / "config.json").read_text()), load_weights(eagle)
    target = load_weights(eagle.parent / "target")
    head = {name.replace(".mlp.", ".feed_forward."): tensor for name, tensor in weights.items()}
    head["layers.0.input_layernorm.weight"] = torch.ones(config["hidden_size"])
    head["norm.weight"], head["lm_head.weight"] = target["model.norm.weight"], target["lm_head.weight"]
    own = {
        "architectures": ["Llama4ForCausalLM"],
        "model_type": "llama4_text",
        "draft_vocab_size": config["vocab_size"],
        "intermediate_size_mlp": config["intermediate_size"],
        "interleave_moe_layer_step": 0,
        "moe_layers": [],
        "no_rope_layers": [0],
        "yoco_global_kv_layer": None,
        "yoco_local_kv_layer": None,
    }
    save_checkpoint(out, {**config, **own}, head)
    return out


def random_deepseek(out: Path) -> Path:
    """Write a random-weight model of DeepSeek-V3's shape to `out`, three dense layers and one MTP layer; return `out`.

    Its attention is latent (MLA), of DeepSeek's own sizes, the only ones that vLLM's kernels know. Like
    `random_pair`'s, the next token is mostly a fixed function of the last one, which the MTP layer computes too.
    """
    own = {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "num_key_value_heads": 4,
        "first_k_dense_replace": 4,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": 64,
        "kv_lora_rank": 512,
        "q_lora_rank": None,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "num_nextn_predict_layers": 1,
    }
    config = {name: value for name, value in {**CONFIG, **own}.items() if name != "head_dim"}
    hidden, inner, vocabulary = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    heads, latent, nope, rope, value = (
        config[name]
        for name in ("num_attention_heads", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    )
    layers = config["num_hidden_layers"]
    shapes: dict[str, Sequence[int]] = {"model.embed_tokens.weight": (vocabulary, hidden)}
    for layer in range(layers + 1):  # the MTP layer comes last
        of_layer = {
            "input_layernorm.weight": (hidden,),
            "self_attn.q_proj.weight": (heads * (nope + rope), hidden),
            "self_attn.kv_a_proj_with_mqa.weight": (latent + rope, hidden),
            "self_attn.kv_a_layernorm.weight": (latent,),
            "self_attn.kv_b_proj.weight": (heads * (nope + value), latent),
            "self_attn.o_proj.weight": (hidden, heads * value),
            "post_attention_layernorm.weight": (hidden,),
            "mlp.gate_proj.weight": (inner, hidden),
            "mlp.up_proj.weight": (inner, hidden),
            "mlp.down_proj.weight": (hidden, inner),
        }
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in of_layer.items()}
    mtp = f"model.layers.{layers}."
    shapes |= {mtp + name: (hidden,) for name in ("enorm.weight", "hnorm.weight", "shared_head.norm.weight")}
    shapes |= {mtp + "eh_proj.weight": (hidden, 2 * hidden), "model.norm.weight": (hidden,)}
    shapes["lm_head.weight"] = vocabulary, hidden
    weights = random_weights(shapes, 0.3, torch.Generator().manual_seed(0))
    weights[mtp + "eh_proj.weight"][:, :hidden] = torch.eye(hidden)
    weights[mtp + "eh_proj.weight"][:, hidden:] *= 0.1
    weights[mtp + "embed_tokens.weight"] = weights["model.embed_tokens.weight"].clone()
    weights[mtp + "shared_head.head.weight"] = weights["lm_head.weight"].clone()
    save_checkpoint(out, config, weights)
    copy_tokenizer(out)
    return out
