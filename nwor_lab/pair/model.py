# SPDX-License-Identifier: Apache-2.0
"""A target of transformers and an EAGLE-1 head, with attention of the caller's own.

transformers passes the keyword `attend` on to the attention function that is registered here, so one forward serves
training (`causal_attention`) and every write policy of the reference model, which owns a paged cache.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding
from transformers.utils import logging

from nwor_lab.paths import PAIR_EAGLE, PAIR_TARGET
from nwor_lab.reference.decoder import Attend

ATTENTION = "nwor_attend"
"""The name under which transformers finds the attention function: `attn_implementation=ATTENTION`."""


def causal_attention(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Causal softmax attention without a cache, `Attend` for training and for whole sequences."""
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True).transpose(1, 2)


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, attend: Attend, **_: Any
) -> tuple[Tensor, None]:
    return attend(module.layer_idx, *(x.transpose(1, 2) for x in (query, key, value))), None


ALL_ATTENTION_FUNCTIONS.register(ATTENTION, _attention)


def hidden_states(
    target: PreTrainedModel, input_ids: Tensor, positions: Tensor, attend: Attend = causal_attention
) -> Tensor:
    """The target's hidden states after its final norm, `[B, T, hidden]`: what vLLM hands to an EAGLE head.

    `input_ids` and `positions` are integers `[B, T]`; `target.lm_head` makes logits of the result.
    """
    return target.model(input_ids, position_ids=positions, attend=attend, use_cache=False).last_hidden_state


class EagleHead(nn.Module):
    """An EAGLE-1 head (arXiv 2401.15077): `fc` mixes the next token's embedding with the target's feature.

    The first layer has no input norm and there is no final norm, as in vLLM's `EagleLlamaForCausalLM`.
    Embedding and `lm_head` are the target's own modules. `bias` gives `fc` the bias that some checkpoints carry.
    """

    def __init__(self, config: LlamaConfig, target: PreTrainedModel, bias: bool = False) -> None:
        super().__init__()
        config._attn_implementation = ATTENTION
        self.config, first = config, target.config.num_hidden_layers
        self.embed_tokens, self.lm_head = target.model.embed_tokens, target.lm_head
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=bias)
        self.layers = nn.ModuleList(LlamaDecoderLayer(config, first + n) for n in range(config.num_hidden_layers))
        self.layers[0].input_layernorm = nn.Identity()
        self.rotary_emb = LlamaRotaryEmbedding(config)

    def forward(
        self, input_ids: Tensor, positions: Tensor, hidden_states: Tensor, attend: Attend = causal_attention
    ) -> Tensor:
        """Predicted features `[B, T, hidden]` from `input_ids, positions [B, T]` and `hidden_states [B, T, hidden]`.

        Row i takes the target's (or the head's own) feature of position i and the token of position i + 1, and
        predicts the feature of position i + 1; `positions` is i, as in vLLM. `lm_head` makes logits of the result.
        """
        x = self.fc(torch.cat((self.embed_tokens(input_ids), hidden_states), dim=-1))
        rotation = self.rotary_emb(x, position_ids=positions)
        for layer in self.layers:
            x = layer(x, position_embeddings=rotation, attend=attend)
        return x

    def own_parameters(self) -> dict[str, nn.Parameter]:
        """The head's parameters without the modules it shares with the target, by checkpoint name."""
        shared = ("embed_tokens.", "lm_head.")
        return {name: p for name, p in self.named_parameters() if not name.startswith(shared)}


def load_weights(path: str | Path) -> dict[str, Tensor]:
    """All tensors of the `*.safetensors` files in `path`."""
    return {name: tensor for file in Path(path).glob("*.safetensors") for name, tensor in load_file(file).items()}


def load_target(path: str | Path = PAIR_TARGET) -> PreTrainedModel:
    """The causal language model in the folder `path`, in float32 on the CPU.

    Raises:
        OSError, ValueError: no checkpoint there, missing or unexpected tensors.
    """
    logging.disable_progress_bar()
    options = {"dtype": torch.float32, "attn_implementation": ATTENTION, "output_loading_info": True}
    target, info = AutoModelForCausalLM.from_pretrained(path, **options)
    if wrong := sorted({*info["missing_keys"], *info["unexpected_keys"]}):
        raise ValueError(f"{path} does not fit its config.json; missing or unexpected: {wrong}")
    return target.eval()


def load_head(path: str | Path, target: PreTrainedModel) -> EagleHead:
    """The EAGLE head in the folder `path` for `target`, in float32.

    Raises:
        ValueError: missing or unexpected tensors, or an embedding or `lm_head` that is not the target's.
    """
    weights = load_weights(path)
    head = EagleHead(LlamaConfig.from_pretrained(path), target, bias="fc.bias" in weights)
    for name, own in (("embed_tokens.weight", head.embed_tokens), ("lm_head.weight", head.lm_head)):
        if name in weights and not torch.equal(weights.pop(name).to(own.weight), own.weight):
            raise ValueError(f"{path} has its own {name}, unlike the target's; only shared ones are supported")
    if wrong := head.own_parameters().keys() ^ weights.keys():
        raise ValueError(f"{path} does not fit an EAGLE-1 head; missing or unexpected: {sorted(wrong)}")
    head.load_state_dict(weights, strict=False)
    return head.eval()


def load_pair(target: str | Path = PAIR_TARGET, eagle: str | Path = PAIR_EAGLE) -> tuple[PreTrainedModel, EagleHead]:
    """`load_target` and `load_head`."""
    model = load_target(target)
    return model, load_head(eagle, model)
