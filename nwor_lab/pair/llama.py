# SPDX-License-Identifier: Apache-2.0
"""A Llama target and an EAGLE-1 head in plain PyTorch.

Both take an `attend` callable, which owns the KV cache and the causal mask, so that one forward serves
training (`causal_attention`) and every paged write policy of the reference model.
Weights are named as Hugging Face's `LlamaForCausalLM` and vLLM's `EagleLlamaForCausalLM` name them.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn


class Attend(Protocol):
    """Attention over whatever cache the caller keeps."""

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attend from `query [..., T, Hq, D]` with `key, value [..., T, Hkv, D]`, all after RoPE.

        `layer` counts from 0; an EAGLE head's layers follow the target's, as in vLLM. Returns `[..., T, Hq, D]`.
        """
        ...


def causal_attention(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Causal softmax attention without a cache; `query [..., T, Hq, D]`, `key, value [..., T, Hkv, D]`."""
    groups = query.shape[-2] // key.shape[-2]
    key, value = (x.repeat_interleave(groups, dim=-2).transpose(-3, -2) for x in (key, value))
    return F.scaled_dot_product_attention(query.transpose(-3, -2), key, value, is_causal=True).transpose(-3, -2)


@dataclass(frozen=True)
class LlamaConfig:
    """The part of a Hugging Face Llama `config.json` that decides the arithmetic."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    tie_word_embeddings: bool = True

    def __post_init__(self) -> None:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(f"{self.num_attention_heads} heads do not divide into {self.num_key_value_heads} KV heads")
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even for RoPE, got {self.head_dim}")

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> "LlamaConfig":
        """Read a `config.json` mapping; raises ValueError for a Llama variant this file does not compute."""
        if config.get("attention_bias") or config.get("mlp_bias"):
            raise ValueError("projections with bias are not supported here; use a Llama checkpoint without them")
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        rope_type = rope.get("rope_type", rope.get("type", "default"))
        if rope_type != "default":
            raise ValueError(f"RoPE of type {rope_type!r} is not supported here; use a checkpoint with plain RoPE")
        heads = config["num_attention_heads"]
        derived = {
            "head_dim": config.get("head_dim") or config["hidden_size"] // heads,
            "num_key_value_heads": config.get("num_key_value_heads") or heads,
            "rope_theta": rope.get("rope_theta", config.get("rope_theta", 10000.0)),
            "tie_word_embeddings": config.get("tie_word_embeddings", False),
        }
        given = {f.name: config[f.name] for f in fields(cls) if f.name in config}
        return cls(**{**given, **derived})

    @classmethod
    def from_pretrained(cls, path: str | Path) -> "LlamaConfig":
        """Read `config.json` in the checkpoint folder `path`."""
        file = Path(path) / "config.json"
        if not file.is_file():
            raise FileNotFoundError(f"{file} is missing: give the folder of a Hugging Face checkpoint")
        return cls.from_dict(json.loads(file.read_text()))

    def to_dict(self) -> dict[str, Any]:
        """The same as a `config.json` mapping of a `LlamaForCausalLM`."""
        config = asdict(self)
        rope = {"rope_type": "default", "rope_theta": config.pop("rope_theta")}
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            **config,
            "rope_parameters": rope,
        }


def load_weights(path: str | Path) -> dict[str, Tensor]:
    """All tensors of the `*.safetensors` files in `path`."""
    files = sorted(Path(path).glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"no *.safetensors in {path}: save the checkpoint with safetensors first")
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


def apply_rope(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Rotate `x [..., T, H, D]` to `positions [..., T]`: half-rotation (NeoX) pairs, as Hugging Face's Llama."""
    half = x.shape[-1] // 2
    frequency = 1.0 / theta ** (torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angle = positions[..., None, None].float() * frequency
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class Attention(nn.Module):
    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.head_dim, self.rope_theta = config.head_dim, config.rope_theta
        query_size = config.num_attention_heads * config.head_dim
        kv_size = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, query_size, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, kv_size, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, kv_size, bias=False)
        self.o_proj = nn.Linear(query_size, config.hidden_size, bias=False)

    def forward(self, layer: int, x: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        query, key, value = (p(x).unflatten(-1, (-1, self.head_dim)) for p in (self.q_proj, self.k_proj, self.v_proj))
        query, key = (apply_rope(x, positions, self.rope_theta) for x in (query, key))
        return self.o_proj(attend(layer, query, key, value).flatten(-2))


class MLP(nn.Module):
    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    def __init__(self, config: LlamaConfig, input_layernorm: bool = True):
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps) if input_layernorm else nn.Identity()
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, layer: int, x: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        x = x + self.self_attn(layer, self.input_layernorm(x), positions, attend)
        return x + self.mlp(self.post_attention_layernorm(x))


class LlamaModel(nn.Module):
    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class LlamaTarget(nn.Module):
    """A Llama decoder; `state_dict()` has the names of Hugging Face's `LlamaForCausalLM`."""

    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.config = config
        self.model = LlamaModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, input_ids: Tensor, positions: Tensor, attend: Attend = causal_attention) -> Tensor:
        """Hidden states after the final norm, `[..., T, hidden]`: what vLLM hands to an EAGLE head.

        `input_ids, positions`: integers `[..., T]`.
        """
        x = self.model.embed_tokens(input_ids)
        for index, layer in enumerate(self.model.layers):
            x = layer(index, x, positions, attend)
        return self.model.norm(x)

    def logits(self, hidden_states: Tensor) -> Tensor:
        """`[..., hidden] -> [..., vocab]`."""
        return self.lm_head(hidden_states)

    @classmethod
    def from_pretrained(cls, path: str | Path, dtype: torch.dtype = torch.float32) -> "LlamaTarget":
        """Load `config.json` and `*.safetensors` from the folder `path`; missing or extra tensors raise."""
        target = cls(LlamaConfig.from_pretrained(path))
        weights = load_weights(path)
        if target.config.tie_word_embeddings:
            weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
        target.load_state_dict(weights)
        return target.to(dtype).eval()


class EagleHead(nn.Module):
    """An EAGLE-1 head (arXiv 2401.15077): `fc` mixes the next token's embedding with the target's feature.

    The first layer has no input norm and there is no final norm, as in vLLM's `EagleLlamaForCausalLM`.
    Embedding and `lm_head` are the target's own modules. `bias` gives `fc` the bias that some checkpoints carry.
    """

    def __init__(self, config: LlamaConfig, target: LlamaTarget, bias: bool = False):
        super().__init__()
        if config.hidden_size != target.config.hidden_size:
            raise ValueError(f"head of hidden size {config.hidden_size} on a target of {target.config.hidden_size}")
        self.config = config
        self.first_layer = target.config.num_hidden_layers
        self.embed_tokens, self.lm_head = target.model.embed_tokens, target.lm_head
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=bias)
        self.layers = nn.ModuleList(DecoderLayer(config, index > 0) for index in range(config.num_hidden_layers))

    def forward(
        self, input_ids: Tensor, positions: Tensor, hidden_states: Tensor, attend: Attend = causal_attention
    ) -> Tensor:
        """Predicted features `[..., T, hidden]`.

        Row i takes the target's (or the head's own) feature of position i and the token of position i + 1, and
        predicts the feature of position i + 1; `positions` is i, as in vLLM. `input_ids, positions`: `[..., T]`.
        """
        x = self.fc(torch.cat((self.embed_tokens(input_ids), hidden_states), dim=-1))
        for index, layer in enumerate(self.layers):
            x = layer(self.first_layer + index, x, positions, attend)
        return x

    def logits(self, hidden_states: Tensor) -> Tensor:
        """`[..., hidden] -> [..., vocab]`, by the target's `lm_head`."""
        return self.lm_head(hidden_states)

    def own_parameters(self) -> dict[str, nn.Parameter]:
        """The head's parameters without the modules it shares with the target, by checkpoint name."""
        shared = ("embed_tokens.", "lm_head.")
        return {name: p for name, p in self.named_parameters() if not name.startswith(shared)}

    @classmethod
    def from_pretrained(cls, path: str | Path, target: LlamaTarget, dtype: torch.dtype = torch.float32) -> "EagleHead":
        """Load a head for `target` from the folder `path`; a checkpoint's own embedding must equal the target's."""
        weights = load_weights(path)
        head = cls(LlamaConfig.from_pretrained(path), target, bias="fc.bias" in weights)
        for name, own in (("embed_tokens.weight", head.embed_tokens), ("lm_head.weight", head.lm_head)):
            if name in weights and not torch.equal(weights.pop(name).to(own.weight), own.weight):
                raise ValueError(f"{path} has its own {name}, unlike the target's; only shared ones are supported")
        missing = head.own_parameters().keys() ^ weights.keys()
        if missing:
            raise ValueError(f"{path} does not fit an EAGLE-1 head; missing or unexpected: {sorted(missing)}")
        head.load_state_dict(weights, strict=False)
        return head.to(dtype).eval()
