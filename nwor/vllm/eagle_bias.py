# SPDX-License-Identifier: Apache-2.0
"""Patch of vLLM's EAGLE head: load checkpoints that carry biases it has no place for.

Why: `EagleLlamaForCausalLM` builds `fc` without a bias and fails on a checkpoint that has one, as the original EAGLE
recipe's have. Dropping a bias that is not zero costs acceptance.
How: a bias of zeros is skipped with a notice; `fc`'s own, when it is not zero, becomes its parameter. Any other bias
without a place goes on to vLLM, which refuses it.
When it can go: when vLLM gives `fc` a bias where the checkpoint has one.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from nwor.vllm.patch import wrap

_STACKED = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj", "gate_proj": "gate_up_proj"}
_STACKED["up_proj"] = "gate_up_proj"


def install() -> None:
    from vllm.model_executor.models.llama_eagle import EagleLlamaForCausalLM

    wrap(EagleLlamaForCausalLM, "load_weights", ("self", "weights"), _make_load)


def _make_load(original: Callable) -> Callable:
    def load_weights(self: Any, weights: Iterable[tuple[str, Tensor]]) -> Any:
        from vllm.logger import init_logger

        logger = init_logger(__name__)
        loaded = original(self, _without_placeless(self, weights, logger))
        fc = self.model.fc
        if (bias := self.__dict__.pop("nwor_fc_bias", None)) is not None:
            fc.register_parameter("bias", torch.nn.Parameter(bias.to(fc.weight), requires_grad=False))
            logger.info("NWOR: applied the checkpoint's fc.bias, which vLLM's EAGLE head lacks.")
        return loaded

    return load_weights


def _without_placeless(head: Any, weights: Iterable[tuple[str, Tensor]], logger: Any) -> Iterator[tuple[str, Tensor]]:
    places = dict(head.model.named_parameters())
    for name, tensor in weights:
        own = name.removeprefix("model.")
        if own.endswith(".bias") and _place(own) not in places:
            if not bool(tensor.any()):
                logger.warning("NWOR: skipped %s: it is all zeros and vLLM's EAGLE head has no place for it.", name)
                continue
            if own == "fc.bias":
                head.nwor_fc_bias = tensor
                continue
        yield name, tensor


def _place(name: str) -> str:
    return ".".join(_STACKED.get(part, part) for part in name.split("."))
