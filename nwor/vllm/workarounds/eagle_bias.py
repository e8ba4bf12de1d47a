# SPDX-License-Identifier: Apache-2.0
"""Patch of vLLM's EAGLE heads for `VLLM_NWOR_EAGLE_BIAS=1`: a checkpoint's biases are applied, not dropped or invented.

Why: `EagleLlamaForCausalLM`, `Eagle3LlamaForCausalLM` and `EagleLlama4ForCausalLM` build `fc` without a bias, and
vLLM's loader passes over a bias it has no place for, with a debug line; dropping one that is not zero costs acceptance.
Where a head's `config.json` says ``"bias": true``, as the original EAGLE recipe writes for `fc`, vLLM instead gives its
attention biases that no checkpoint fills.
How: a bias of zeros without a place is skipped with a notice; for any other its linear layer gets the place that vLLM
makes where it builds a bias, and vLLM's own loader fills it; what is no linear layer stops the load. A bias that was
built but is not in the checkpoint is zero. A later load may bring the head whole or in pieces down to single tensors,
as vLLM's weight transfer does: a bias that it lacks stays as it is. A place made by such a load is in no graph captured
before. Unless asked for, vLLM's head stays as it is, in every mode, so that modes are compared with one drafter; a
warning then names the switch, once for each bias.
When it can go: when vLLM gives a head the biases that its checkpoint has.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from nwor.vllm.patch import wrap

_PLACES = {
    "midlayer": "layers.0",
    "q_proj": "qkv_proj",
    "k_proj": "qkv_proj",
    "v_proj": "qkv_proj",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
}
Biases = dict[str, dict[str, Tensor]]
"""Of each bias parameter, by its name in the head's model, the checkpoint's tensors that go there, by theirs."""
_SEEN = "nwor_biases_seen"
"""Attribute of a head from its first load on: the places that a load has filled or something was said of."""


def install(repair: bool) -> None:
    """repair: apply what vLLM drops; else only warn of it."""
    from vllm.model_executor.models.llama4_eagle import EagleLlama4ForCausalLM
    from vllm.model_executor.models.llama_eagle import EagleLlamaForCausalLM
    from vllm.model_executor.models.llama_eagle3 import Eagle3LlamaForCausalLM

    for head in (EagleLlamaForCausalLM, Eagle3LlamaForCausalLM, EagleLlama4ForCausalLM):
        wrap(head, "load_weights", _make_load if repair else _make_watch)


def _make_watch(original: Callable) -> Callable:
    from vllm.logger import init_logger

    def load_weights(self: Any, weights: Iterable[tuple[str, Tensor]]) -> Any:
        places, found, layers = dict(self.model.named_parameters()), Biases(), set[str]()
        loaded = original(self, _noting(weights, found, layers))
        seen = vars(self).setdefault(_SEEN, set())
        dropped = [p for p, biases in found.items() if p not in places.keys() | seen and not _all_zero(biases)]
        seen.update(dropped, found.keys() & places.keys())
        whole = layers >= _linear_layers(self)  # else other pieces may bring what this one lacks
        unfilled = [p for p in places if whole and p.endswith(".bias") and p not in seen]
        seen.update(unfilled)
        for names, what in ((dropped, "drops, though not zero"), (unfilled, "has and no checkpoint fills")):
            if names:
                init_logger(__name__).warning(
                    "NWOR: %s, which vLLM's EAGLE head %s; VLLM_NWOR_EAGLE_BIAS=1 repairs it, in every mode alike.",
                    ", ".join(names),
                    what,
                )
        return loaded

    return load_weights


def _linear_layers(head: Any) -> set[str]:
    """Those whose weights every checkpoint of the head has."""
    from vllm.model_executor.layers.linear import LinearBase

    return {name for name, module in head.model.named_modules() if isinstance(module, LinearBase | torch.nn.Linear)}


def _noting(weights: Iterable[tuple[str, Tensor]], found: Biases, layers: set[str]) -> Iterator[tuple[str, Tensor]]:
    """Pass on all weights, and note every bias in `found` and the layers of all others in `layers`."""
    for name, tensor in weights:
        layer, _, kind = (place := _place_of(name)).rpartition(".")
        if kind == "bias":
            found.setdefault(place, {})[name] = tensor
        else:
            layers.add(layer)
        yield name, tensor


def _place_of(name: str) -> str:
    """The parameter that a checkpoint's tensor goes to."""
    return ".".join(_PLACES.get(part, part) for part in name.removeprefix("model.").split("."))


def _all_zero(biases: dict[str, Tensor]) -> bool:
    return not any(bool(bias.any()) for bias in biases.values())


def _make_load(original: Callable) -> Callable:
    from vllm.logger import init_logger

    def load_weights(self: Any, weights: Iterable[tuple[str, Tensor]]) -> Any:
        found, skipped = Biases(), set[str]()
        tensors = list(_noting(weights, found, set()))  # vLLM looks for a module's places at its first tensor
        places = dict(self.model.named_parameters())
        if _SEEN not in vars(self):
            for name, parameter in places.items():
                if name.endswith(".bias"):
                    parameter.data.zero_()
        seen = vars(self).setdefault(_SEEN, set())
        for place, biases in found.items():
            if place in places:
                continue
            names, zeros = list(biases), _all_zero(biases)
            if zeros:
                skipped.update(names)
            else:
                _make_place(self, place)
            if not zeros or place not in seen:
                init_logger(__name__).warning(
                    "NWOR: %s, which vLLM's EAGLE head has no place for, is %s.",
                    ", ".join(names),
                    "skipped: zeros" if zeros else "applied",
                )
            seen.add(place)
        return original(self, ((name, tensor) for name, tensor in tensors if name not in skipped))

    return load_weights


def _make_place(head: Any, place: str) -> None:
    """Let a linear layer of the head have a bias, as vLLM builds one, to be filled by vLLM's loader.

    Raises:
        ValueError: it is another layer; or the head turns the weights of its queries and keys while they are loaded, as
            Llama 4's does, and would not turn their bias; or vLLM holds the layer's weights back until all have come
            (an update, or quantisation on the way), and would lose the place or not fill it.
    """
    from vllm.model_executor.layers.linear import LinearBase

    layer: Any = dict(head.model.named_modules()).get(place.removesuffix(".bias"))
    turned = place.endswith("qkv_proj.bias") and hasattr(head, "permute_qk_weight_for_rotary")
    linear = isinstance(layer, LinearBase | torch.nn.Linear) and hasattr(layer, "weight")
    if turned or not linear or layer.weight.is_meta:
        raise ValueError(f"the EAGLE head's {place} is not zero, and vLLM has no place for it")
    kind = getattr(layer, "params_dtype", layer.weight.dtype)
    bias: Any = torch.nn.Parameter(layer.weight.new_zeros(len(layer.weight), dtype=kind), requires_grad=False)
    if isinstance(layer, LinearBase):
        bias.output_dim, bias.weight_loader, layer.has_bias = 0, layer.weight_loader, True
    layer.register_parameter("bias", bias)
