# SPDX-License-Identifier: Apache-2.0
"""Drafters of a user's own, as vLLM's method `custom_class` takes them."""

from dataclasses import replace
from typing import Any

from nwor_lab.engines.spec import EngineSpec
from tests.nwor.specs import With


def custom(spec: EngineSpec, drafter: type) -> With:
    """With this drafter, of the spec's number of drafts at most."""
    name = f"{drafter.__module__}.{drafter.__qualname__}"
    drafts = {"method": "custom_class", "model": name, "num_speculative_tokens": spec.k}
    return With(**vars(replace(spec, method="ngram", draft="")), arguments={"speculative_config": drafts})


class Repeats:
    """Drafts what followed when each token came last: none in one step, one more in the next, k at most."""

    def __init__(self, vllm_config: Any) -> None:
        self.config, self.steps = vllm_config, 0
        self.k = vllm_config.speculative_config.num_speculative_tokens

    def load_model(self, target: Any) -> None:
        """Called for every drafter of vLLM's."""

    def propose(self, sampled: Any, num_tokens: Any, token_ids: Any, slot_mappings: Any = None) -> list[list[int]]:
        self.steps += 1
        return [
            self._drafts(token_ids[place, : num_tokens[place]].tolist()) if taken else []
            for place, taken in enumerate(sampled)
        ]

    def _drafts(self, tokens: list[int]) -> list[int]:
        known = len(tokens)
        for _ in range(self.steps % (self.k + 1)):
            before = [place for place, token in enumerate(tokens[:-1]) if token == tokens[-1]]
            tokens.append(tokens[before[-1] + 1] if before else tokens[-1])
        return tokens[known:]


class HasALayer(Repeats):
    """Has an attention layer too, whose cache it writes when it drafts. vLLM has no list of such layers."""

    def load_model(self, target: Any) -> None:
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.layers.attention import Attention

        shape = self.config.model_config.hf_text_config
        with set_current_vllm_config(self.config):
            self.layer = Attention(
                shape.num_attention_heads, shape.head_dim, 1.0, num_kv_heads=shape.num_key_value_heads,
                cache_config=self.config.cache_config, prefix="drafter.0.attn",
            )  # fmt: skip

    def propose(self, *given: Any, **named: Any) -> list[list[int]]:
        drafts = super().propose(*given, **named)
        self.layer.kv_cache.fill_(self.steps)
        return drafts
