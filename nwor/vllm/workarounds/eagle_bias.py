# SPDX-License-Identifier: Apache-2.0
"""Patch of vLLM's EAGLE heads for `VLLM_NWOR_EAGLE_BIAS=1`: a checkpoint's biases are applied, not dropped or invented.

Why: `EagleLlamaForCausalLM`, `Eagle3LlamaForCausalLM` and `EagleLlama4ForCausalLM` build `fc` without a bias, and
vLLM's loader passes over a bias it has no place for, with a debug line; dropping one that is not zero costs acceptance.
Where a head's `config.json` says ``"bias": true``, as the original EAGLE recipe writes for `fc`, vLLM instead gives its
attention biases that no checkpoint fills.
How: a bias of zeros without a place is skipped with a notice; for any other its linear layer gets the place that vLLM
makes where it builds a bias, and vLLM's own loader fills it; what is no linear layer stops the load. A bias that was
built but is not in the first load is zero; a later load, whole or in pieces, leaves one that it lacks as it is. A place
made by such a load is in no graph captured before. Unless asked for, vLLM's head stays as it is, in every mode, so that
modes are compared with one drafter; a warning then names the switch.
When it can go: when vLLM gives a head the biases that its checkpoint has.
"""

from collections.abc import Callable, Iterable
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


def install(repair: bool) -> None:
    """repair: apply what vLLM drops; else only warn of it."""
    from vllm.model_executor.models.llama4_eagle import EagleLlama4ForCausalLM
    from vllm.model_executor.models.llama_eagle import EagleLlamaForCausalLM
    from vllm.model_executor.models.llama_eagle3 import Eagle3LlamaForCausalLM

    for head in (EagleLlamaForCausalLM, Eagle3LlamaForCausalLM, EagleLlama4ForCausalLM):
        wrap(head, "load_weights", lambda original: _make_load(original, repair))


def _make_load(original: Callable, repair: bool) -> Callable:
    from vllm.logger import init_logger

    logger = init_logger(__name__)

    def load_weights(self: Any, weights: Iterable[tuple[str, Tensor]]) -> Any:
        tensors = list(weights)  # vLLM looks for a module's places at its first tensor
        places = dict(self.model.named_parameters())
        if repair and "nwor_zeroed" not in vars(self):
            self.nwor_zeroed = True
            for name, parameter in places.items():
                if name.endswith(".bias"):
                    parameter.data.zero_()
        skipped = set[str]()
        for place, biases in _without_a_place(tensors, places).items():
            zeros = not any(bool(bias.any()) for bias in biases.values())
            if repair and zeros:
                skipped.update(biases)
                what = "skipped: zeros"
            elif repair:
                _make_place(self, place)
                what = "applied"
            elif not zeros:
                what = "dropped, though not zero: VLLM_NWOR_EAGLE_BIAS=1 applies it"
            else:
                continue
            logger.warning_once("NWOR: %s, which vLLM's EAGLE head has no place for, is %s", ", ".join(biases), what)
        return original(self, ((name, tensor) for name, tensor in tensors if name not in skipped))

    return load_weights


def _without_a_place(tensors: list[tuple[str, Tensor]], places: dict[str, Any]) -> dict[str, dict[str, Tensor]]:
    """Of each bias that the head lacks, by its name there, the checkpoint's tensors that go there, by theirs."""
    found: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors:
        place = ".".join(_PLACES.get(part, part) for part in name.removeprefix("model.").split("."))
        if place.endswith(".bias") and place not in places:
            found.setdefault(place, {})[name] = tensor
    return found


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
