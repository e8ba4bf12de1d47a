# SPDX-License-Identifier: Apache-2.0
"""Patch of vLLM's EAGLE head for `VLLM_NWOR_EAGLE_BIAS=1`: a checkpoint's biases are applied, not dropped or invented.

Why: `EagleLlamaForCausalLM` builds `fc` without a bias, and vLLM's loader passes over a bias it has no place for, with
a debug line; dropping one that is not zero costs acceptance. Where a head's `config.json` says ``"bias": true``, as the
original EAGLE recipe writes for `fc`, vLLM instead gives its attention biases that no checkpoint fills.
How: a bias of zeros without a place is skipped with a notice; `fc`'s own, when it is not zero, becomes its parameter;
any other stops the load. A bias that was built but is not in the checkpoint is zero. Unless asked for, vLLM's head
stays as it is, in every mode, so that modes are compared with one drafter; a warning then names the switch.
When it can go: when vLLM gives `fc` a bias where the checkpoint has one.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from nwor.vllm.patch import wrap

_STACKED = {
    "q_proj": "qkv_proj",
    "k_proj": "qkv_proj",
    "v_proj": "qkv_proj",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
}


def install(repair: bool) -> None:
    """repair: apply what vLLM drops; else only warn of it."""
    from vllm.model_executor.models.llama_eagle import EagleLlamaForCausalLM

    wrap(EagleLlamaForCausalLM, "load_weights", _make_load if repair else _make_watch)


def _make_watch(original: Callable) -> Callable:
    from vllm.logger import init_logger

    def load_weights(self: Any, weights: Iterable[tuple[str, Tensor]]) -> Any:
        places, found = dict(self.model.named_parameters()), dict[str, Tensor]()
        loaded = original(self, _noting_biases(weights, found))
        dropped = [name for name, bias in found.items() if name not in places and bool(bias.any())]
        unfilled = [name for name in places if name.endswith(".bias") and name not in found]
        for names, what in ((dropped, "drops, though not zero"), (unfilled, "has and no checkpoint fills")):
            if names:
                init_logger(__name__).warning(
                    "NWOR: %s, which vLLM's EAGLE head %s; VLLM_NWOR_EAGLE_BIAS=1 repairs it, in every mode alike.",
                    ", ".join(names),
                    what,
                )
        return loaded

    return load_weights


def _noting_biases(weights: Iterable[tuple[str, Tensor]], found: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Pass on all weights, and note every bias in `found` by its place's name."""
    for name, tensor in weights:
        if (place := _place_of(name)).endswith(".bias"):
            found[place] = tensor
        yield name, tensor


def _place_of(name: str) -> str:
    """The parameter that a checkpoint's tensor goes to."""
    return ".".join(_STACKED.get(part, part) for part in name.removeprefix("model.").split("."))


def _make_load(original: Callable) -> Callable:
    def load_weights(self: Any, weights: Iterable[tuple[str, Tensor]]) -> Any:
        found: dict[str, Tensor] = {}
        loaded = original(self, _with_a_place(dict(self.model.named_parameters()), weights, found))
        for name, parameter in self.model.named_parameters():
            if name.endswith(".bias") and name not in found:
                parameter.data.zero_()
        bias = found.get("fc.bias")
        if bias is not None and bool(bias.any()):
            fc = self.model.fc
            fc.register_parameter("bias", torch.nn.Parameter(bias.to(fc.weight), requires_grad=False))
        return loaded

    return load_weights


def _with_a_place(
    places: dict[str, Any], weights: Iterable[tuple[str, Tensor]], found: dict[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """Pass on the weights that vLLM has a place for, and note every bias in `found` by its place's name."""
    from vllm.logger import init_logger

    for name, tensor in weights:
        if (place := _place_of(name)).endswith(".bias"):
            found[place] = tensor
            if place not in places:
                zero = not bool(tensor.any())
                if not zero and place != "fc.bias":
                    raise ValueError(f"the EAGLE head's {name} is not zero, and vLLM has no place for it")
                init_logger(__name__).warning(
                    "NWOR: %s, which vLLM's EAGLE head has no place for, is %s.",
                    name,
                    "skipped: zeros" if zero else "applied",
                )
                continue
        yield name, tensor
