# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that vLLM must load, made from those of `nwor_lab.pair`: heads with a bias, EAGLE-3 heads."""

import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from nwor_lab.pair import hf_config, random_weights, save_checkpoint
from nwor_lab.pair.llama import LlamaConfig, load_weights


def write_biased_copy(src: str | Path, dst: str | Path, bias: Tensor | None = None) -> Path:
    """Copy the EAGLE checkpoint `src` to `dst` with a `fc.bias` added; `config.json` stays as it is.

    bias: `[hidden]`, zeros if None. Raises ValueError for another shape, before `dst` is touched.
    """
    src, dst = Path(src), Path(dst)
    weights = load_weights(src)
    hidden = weights["fc.weight"].shape[0]
    bias = torch.zeros(hidden) if bias is None else bias
    if bias.shape != (hidden,):
        raise ValueError(f"fc.bias must have shape ({hidden},), got {tuple(bias.shape)}")
    shutil.copytree(src, dst, dirs_exist_ok=True)
    for file in dst.glob("*.safetensors"):
        file.unlink()
    weights["fc.bias"] = bias.to(weights["fc.weight"].dtype)
    save_file(weights, dst / "model.safetensors", metadata={"format": "pt"})
    return dst


def random_eagle3(
    out: str | Path,
    target: str | Path,
    seed: int = 0,
    noise: float = 0.3,
    draft_vocab_size: int = 0,
    dtype: torch.dtype = torch.bfloat16,
) -> Path:
    """Write a random-weight EAGLE-3 head for a target of `random_pair` to `out`, and return that path.

    The head computes what `random_pair`'s head does, a fixed function of the last token. Its token's embedding comes in
    by the attention alone, so queries equal keys (each row attends to itself), values are the embedding and
    `hidden_norm` keeps the residual small. Where the KV heads are narrower than the embedding, fewer drafts are right.

    target: its checkpoint folder. draft_vocab_size: how many of its tokens the head can draft, all of them if 0.
    """
    config, weights = LlamaConfig.from_pretrained(target), load_weights(target)
    hidden, inner, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
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
    head = random_weights(shapes, noise, torch.Generator().manual_seed(seed))
    head["midlayer.hidden_norm.weight"] *= 0.1
    query, key, value, output = (head[f"midlayer.self_attn.{name}_proj.weight"] for name in "qkvo")
    key *= 2 / noise
    query.view(kv_heads, -1, head_dim, 2 * hidden)[:] = key.view(kv_heads, 1, head_dim, 2 * hidden)
    width = min(hidden, kv_heads * head_dim)
    value *= 0.1
    value[:width, :hidden] += torch.eye(width, hidden)
    output *= 0.1
    first = output.view(hidden, kv_heads, -1, head_dim)[:, :, 0]  # a KV head's first query head carries its value
    first += torch.eye(hidden, kv_heads * head_dim).view(hidden, kv_heads, head_dim)
    lm_head = weights["model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"]
    drafted = torch.linspace(0, config.vocab_size - 1, draft_vocab_size or config.vocab_size).round().long()
    head["lm_head.weight"] = lm_head[drafted]
    if len(drafted) < config.vocab_size:
        head["d2t"] = drafted - torch.arange(len(drafted))
    own = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 1,
        "draft_vocab_size": len(drafted),
        "norm_before_residual": True,
    }
    save_checkpoint(out, {**hf_config(config), **own}, head, dtype)
    return Path(out)
