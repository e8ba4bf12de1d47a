# SPDX-License-Identifier: Apache-2.0
"""Which of a model's layers are audited, and where a slot's keys and values lie in their caches."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nwor_lab.audit import AUDIT

TYPES = {"auto", "bfloat16", "float16", "fp8", "fp8_e4m3", "fp8_e5m2"}
TYPES |= {f"{kind}_per_token_head" for kind in ("fp8", "int4", "int8")}
"""Types of cache in which a slot is one row a head."""


def target_groups(runner: Any) -> dict[int, dict[str, Any]]:
    """The attention layers that are modules of the target model and have a cache, by name, of each cache group.

    Raises:
        RuntimeError: a part of the target's cache would not be seen. It is a layer of neither the target's nor the
            drafter's model, or of a class or type of cache that does not write each row to one slot.
    """
    from vllm.model_executor.layers import attention

    known = {
        attention.Attention,
        attention.ChunkedLocalAttention,
        attention.MLAAttention,
        attention.PrefillPrefixLMAttention,
        attention.RSWAAttention,
    }
    target, drafter = runner.get_model(), runner.get_draft_model()
    modules = {id(module) for module in target.modules()}
    drafting = {id(module) for module in drafter.modules()} if drafter is not None else set()
    context = runner.compilation_config.static_forward_context
    groups: dict[int, dict[str, Any]] = {}
    recurrent = recurrent_groups(runner)
    for index, spec in enumerate(runner.kv_cache_config.kv_cache_groups):
        if index in recurrent:
            continue
        own = {name: context.get(name) for name in spec.layer_names if id(context.get(name)) not in drafting}
        for name, layer in own.items():
            if id(layer) not in modules or type(layer) not in known:
                raise incomplete(f"{name} is a {type(layer).__name__}, no attention layer of the target that it knows")
            if layer.kv_cache_dtype not in TYPES:
                raise incomplete(f"{name} has a cache of type {layer.kv_cache_dtype}, whose slots may be no rows")
        # A layer that reads another's cache has the same memory.
        cached = {n: layer for n, layer in own.items() if not getattr(layer, "kv_sharing_target_layer_name", None)}
        if cached:
            groups[index] = cached
    return groups


def recurrent_groups(runner: Any) -> set[int]:
    """The cache groups of vLLM's recurrent layers, by index: their blocks hold states, and no slots.

    Raises:
        RuntimeError: block tables do not tell which group has a block.
    """
    from vllm.model_executor.layers.mamba.abstract import MambaBase

    context, found = runner.compilation_config.static_forward_context, set[int]()
    for index, group in enumerate(runner.kv_cache_config.kv_cache_groups):
        specs = getattr(group.kv_cache_spec, "kv_cache_specs", {"": group.kv_cache_spec}).values()
        holds_states = {type(spec).__name__ for spec in specs} == {"MambaSpec"}
        layers = [context.get(name) for name in group.layer_names]
        if holds_states and layers and all(isinstance(layer, MambaBase) for layer in layers):
            found.add(index)
    if found and (mode := runner.vllm_config.cache_config.mamba_cache_mode) != "none":
        raise incomplete(f"with mamba_cache_mode {mode} block tables go on naming blocks that others have")
    return found


def cache_of(layer: Any) -> Tensor:
    """A layer's cache as [num_blocks, H, N, C]; MLA's is [num_blocks, N, C], one latent row a slot."""
    return layer.kv_cache.unsqueeze(1) if layer.kv_cache.dim() == 3 else layer.kv_cache


def slot_parts(layer: Any) -> Tensor:
    """int64 [N * 2 * head_size], for each element of a (block, head) chunk twice its slot, and 1 more for a value's.

    vLLM's CPU caches transpose or tile keys inside a block, by instruction set, so vLLM's own writer is asked: it
    writes the keys or values of one slot of a scratch block at a time, and what is no longer zero is theirs.

    Raises:
        RuntimeError: an element is written with no slot's keys or values, or with several.
    """
    _, heads, block_size, width = layer.kv_cache.shape
    dtype = layer.kv_cache.dtype if layer.kv_cache.is_floating_point() else torch.bfloat16
    rows = torch.eye(2, dtype=dtype).view(2, 2, 1, 1, 1).expand(2, 2, 1, heads, width // 2).contiguous()
    written = torch.zeros(block_size, 2, block_size * width, dtype=torch.bool)
    for offset in range(block_size):
        for half, (key, value) in enumerate(rows):
            scratch = torch.zeros_like(layer.kv_cache[:1])
            layer.impl.do_kv_cache_update(layer, key, value, scratch, torch.tensor([offset]))
            written[offset, half] = scratch[0, 0].flatten() != 0
    if not (written.flatten(0, 1).sum(0) == 1).all():
        raise incomplete("this CPU cache's layout has elements that belong to no slot or to several")
    return written.flatten(0, 1).int().argmax(0)


def incomplete(why: str) -> RuntimeError:
    return RuntimeError(f"the audit would not see the whole cache: {why}: unset {AUDIT}")
