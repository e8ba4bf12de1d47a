# SPDX-License-Identifier: Apache-2.0
"""Patches of both model runners' loading: watch the target's layers; make the manager once their caches are there.

What managers hold beside the cache is known before vLLM sizes it: the same managers are made on no device at all, and
vLLM plans with what they would take.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from nwor.layout import CacheLayout
from nwor.manager import DraftCommitManager
from nwor.settings import ATTENDING, CLEAN, Settings
from nwor.vllm import self_check, write_bypass
from nwor.vllm.context import (
    RunnerContext,
    ServedGroup,
    cache_of,
    context_of,
    is_latent,
    kinds_of,
    release,
    set_served_groups,
    target_groups,
    target_layers,
)
from nwor.vllm.support import BACKENDS, why_not_attending, why_unsupported


def make_load(original: Callable) -> Callable:
    """A wrapper of a GPU runner's `load_model`, for modes that attend: it watches their layers' first run."""

    def load_model(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        for layer in target_layers(self).values():
            if layer.attn_backend.__name__ in BACKENDS:
                write_bypass.watch(type(layer.impl))

    return load_model


def make_initialize(original: Callable, settings: Settings) -> Callable:
    """A wrapper of `initialize_kv_cache`, which vLLM calls twice on a GPU: once to learn what graphs cost."""

    def initialize_kv_cache(self: Any, *args: Any, **kwargs: Any) -> None:
        release(self)
        original(self, *args, **kwargs)
        context, layers = context_of(self), target_layers(self)
        attends, context.reason = what_serves(self, layers, settings.mode)
        served: Sequence[ServedGroup] = ()
        if attends and self.device.type == "cuda":
            from nwor.vllm import attention_gpu

            attention_gpu.install(layers.values())
        if attends is not None:
            groups = target_groups(self, layers)
            with torch.inference_mode(False):
                served, failure = build_managers(self, settings.mode, groups, attends)
                if failure and attends and settings.mode in CLEAN:
                    served, also = build_managers(self, settings.mode, groups, False)
                    failure = also or failure
            context.reason = failure or context.reason
        set_served_groups(self, served)
        if not kwargs.get("is_profiling"):
            _log(settings.mode, context)

    return initialize_kv_cache


def what_serves(runner: Any, layers: dict[str, Any], mode: str) -> tuple[bool | None, str]:
    """Whether NWOR's attention can serve, None where `mode` cannot serve at all; and why not, where it would else."""
    if reason := why_unsupported(runner, layers):
        return None, reason
    if mode not in ATTENDING:
        return False, ""
    if reason := why_not_attending(runner, layers):
        return (False if mode in CLEAN else None), reason
    return True, ""


def _log(mode: str, context: RunnerContext) -> None:
    """One line of what serves and what it holds, by a logger of vLLM's: others' lines it shows from warnings on.

    One rank of a machine says what serves, and each says why a mode cannot.
    """
    from vllm.distributed.parallel_state import is_local_first_rank
    from vllm.logger import init_logger

    logger, manager = init_logger("vllm.nwor"), context.manager
    if manager is None:
        logger.warning("NWOR mode %s: %s; vLLM's own cache write serves this model", mode, context.reason)
        return
    if is_local_first_rank():
        every = f"; every step is logged, for {context.reason}" if context.reason else ""
        logger.info(
            "NWOR mode %s serves %d layers, for %d requests of %d drafts, and holds %.1f MiB beside the cache%s",
            mode, manager.counters.num_layers, len(manager.slots), manager.max_drafts,
            held_bytes(context.groups) / 2**20, every,
        )  # fmt: skip


def held_bytes(groups: Sequence[ServedGroup]) -> int:
    """Bytes of all tensors that the groups' managers keep beside the cache, counts too; the workspace once."""
    managers = [group.manager for group in groups]
    owners = [*managers, *(manager.counters for manager in managers), managers[0].attention]
    tensors = [x for owner in owners if owner is not None for x in vars(owner).values() if isinstance(x, torch.Tensor)]
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({one._cdata: one.nbytes() for one in storages}.values())  # planned ones have no address of their own


def planned_bytes(runner: Any, mode: str) -> int:
    """`held_bytes` of what will serve, on this rank, before there are caches; 0 where vLLM's own write will."""
    layers, groups = target_layers(runner), _planned_groups(runner)
    before = vars(runner).get("kv_cache_config")
    runner.kv_cache_config = SimpleNamespace(kv_cache_groups=groups)
    try:
        attends, _ = what_serves(runner, layers, mode)
        if attends is None:
            return 0
        layouts = {
            index: _planned_layout(groups[index], served) for index, served in target_groups(runner, layers).items()
        }
        attention = _workspace(runner, layers.values(), "meta") if attends and runner.device.type == "cuda" else None
        managers = _managers(runner, mode, layouts, attends, attention)
    finally:
        if before is None:
            del runner.kv_cache_config
        else:
            runner.kv_cache_config = before
    return held_bytes([ServedGroup(index, (), manager) for index, manager in managers.items()])


def _planned_groups(runner: Any) -> Any:
    """The cache groups that vLLM will make of this rank's layers, planned as its runners do to measure graphs."""
    config, specs = runner.vllm_config, runner.get_kv_cache_spec()
    try:
        from vllm.v1.core.kv_cache_utils import get_kv_cache_groups
    except ImportError:  # vLLM 0.33
        from vllm.v1.core.kv_cache_config_builder import get_kv_cache_config_builder
        from vllm.v1.core.kv_cache_planning import get_kv_cache_groups_from_builder

        return get_kv_cache_groups_from_builder(get_kv_cache_config_builder(config), config, specs)
    return get_kv_cache_groups(config, specs)


def _planned_layout(group: Any, layers: Sequence[Any]) -> CacheLayout:
    """The layout that a cache group's layers will have, as far as memory beside it goes, on no device."""
    specs = getattr(group.kv_cache_spec, "kv_cache_specs", None)
    spec = specs[layers[0].layer_name] if specs else group.kv_cache_spec
    return CacheLayout(
        pool=torch.empty(0, dtype=torch.uint8, device="meta"),
        layer_offsets=torch.empty(len(layers), dtype=torch.int64, device="meta"),
        strides=(0, 0, 0),
        num_heads=spec.num_kv_heads,
        block_size=spec.block_size,
        row_bytes=spec.real_page_size_bytes // spec.block_size // spec.num_kv_heads,
        dtype=spec.dtype,
    )


def build_managers(
    runner: Any, mode: str, groups: dict[int, list[Any]], attends: bool
) -> tuple[Sequence[ServedGroup], str]:
    """This rank's cache groups with a manager each, or none and why their layers cannot be served.

    groups: the target layers of each cache group that has any, by its index. attends: `DraftCommitManager`.

    Raises:
        RuntimeError: the GPU has no room for what the managers hold.
    """
    layouts = {}
    for index, layers in groups.items():
        layouts[index], reason = _layout_of(layers, runner.device.type == "cuda")
        if reason:
            return (), reason
    try:
        attention = None
        if attends and runner.device.type == "cuda":
            from nwor.attention.configs import tuned

            attention = _workspace(runner, [layer for layers in groups.values() for layer in layers], runner.device)
            tuned(attention.device)  # a broken table stops here; in the self-check it would be a fallback
        served: list[ServedGroup] = []
        for index, manager in _managers(runner, mode, layouts, attends, attention).items():
            if failure := self_check.failure(manager, groups[index]):
                return (), failure
            if served:
                served[0].manager.counters.add_layers(layouts[index])
            served.append(ServedGroup(index, groups[index], manager))
    except torch.cuda.OutOfMemoryError as error:
        raise RuntimeError(
            f"NWOR mode {mode} finds no room on the GPU for what it holds beside the cache: lower max_num_seqs, "
            "kv_cache_memory_bytes or gpu_memory_utilization"
        ) from error
    return served, ""


def _workspace(runner: Any, layers: Collection[Any], device: Any) -> Any:
    from nwor.attention.verify import Workspace

    config = runner.vllm_config
    heads = max(layer.impl.num_heads for layer in layers)
    head_size = max(layer.impl.head_size for layer in layers)
    max_query_len = config.speculative_config.num_speculative_tokens + 1
    return Workspace(config.scheduler_config.max_num_seqs, max_query_len, heads, head_size, device)


def _managers(
    runner: Any, mode: str, layouts: Mapping[int, CacheLayout], attends: bool, attention: Any
) -> dict[int, DraftCommitManager]:
    """A manager for each cache group, by its index."""
    config, specs = runner.vllm_config, runner.kv_cache_config.kv_cache_groups
    graphs = config.compilation_config.cudagraph_mode
    full_graphs = graphs is not None and graphs.has_full_cudagraphs()
    max_requests = config.scheduler_config.max_num_seqs
    return {
        index: DraftCommitManager(
            layout,
            mode,
            max_requests=max_requests,
            max_drafts=config.speculative_config.num_speculative_tokens,
            max_tokens=max(config.scheduler_config.max_num_batched_tokens, max_requests),
            attends=attends,
            uses_full_cudagraphs=full_graphs,
            keeps_blocks=keeps_blocks(specs[index].kv_cache_spec),
            attention=attention,
        )
        for index, layout in layouts.items()
    }


def _layout_of(layers: list[Any], on_gpu: bool) -> tuple[Any, str]:
    """The layout of one group's layers, or None and why they have none that a mode can serve."""
    packing = None
    if not on_gpu and not is_latent(layers[0]):  # whose rows are plain on a CPU too
        from nwor.vllm import attention_cpu

        packing = attention_cpu.find_packing(layers[0])
        if packing is None:
            return None, f"a CPU cache packing ({layers[0].isa}) that is no permutation of a slot's elements"
    try:
        return CacheLayout.from_kv_caches([cache_of(layer) for layer in layers], packing), ""
    except ValueError as error:
        return None, str(error)


def keeps_blocks(spec: Any) -> bool:
    """Whether vLLM leaves a running request its blocks in a cache group of this spec; windows and chunks free them."""
    return kinds_of(spec) <= {"FullAttentionSpec", "MLAAttentionSpec"}
