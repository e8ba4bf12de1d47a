# SPDX-License-Identifier: Apache-2.0
"""Patches of both model runners' loading: watch the target's layers; make the manager once their caches are there."""

from collections.abc import Callable
from typing import Any

import torch

from nwor.layout import CacheLayout, rows_per_request
from nwor.manager import DraftCommitManager
from nwor.settings import ATTENDING, Settings
from nwor.vllm import own_write, self_check
from nwor.vllm.context import context_of, set_active_manager, target_group, target_layers
from nwor.vllm.support import why_unsupported


def make_load(original: Callable) -> Callable:
    """A wrapper of a GPU runner's `load_model`, for modes that attend: it watches their layers' first run."""

    def load_model(self: Any, *args: Any, **kwargs: Any) -> None:
        from nwor.vllm import attention_gpu

        original(self, *args, **kwargs)
        for implementation in {type(layer.impl) for layer in target_layers(self).values()}:
            if implementation.__name__ in attention_gpu.SERVED:
                own_write.watch(implementation)

    return load_model


def make_initialize(settings: Settings) -> Callable[[Callable], Callable]:
    """A wrapper of `initialize_kv_cache`, which vLLM calls twice on a GPU: once to learn what graphs cost."""

    def make(original: Callable) -> Callable:
        def initialize_kv_cache(self: Any, *args: Any, **kwargs: Any) -> None:
            set_active_manager(self, None)
            original(self, *args, **kwargs)
            if settings.mode == "off":
                return
            context, layers = context_of(self), target_layers(self)
            context.group, context.counts = target_group(self, layers), None
            context.copies_counts = settings.mode != "direct" and (settings.emit_metrics or settings.debug_sync)
            context.reason = why_unsupported(self, layers, settings.mode)
            manager = None
            if not context.reason:
                if settings.mode in ATTENDING and self.device.type == "cuda":
                    from nwor.vllm import attention_gpu

                    attention_gpu.install(layers.values())
                with torch.inference_mode(False):
                    manager, context.reason = build_manager(self, settings.mode, list(layers.values()))
            _log(settings.mode, manager, context.reason)
            set_active_manager(self, manager)

        return initialize_kv_cache

    return make


def _log(mode: str, manager: DraftCommitManager | None, reason: str) -> None:
    """One line of what serves and what it holds, by a logger of vLLM's: others' lines it shows from warnings on."""
    from vllm.logger import init_logger

    logger = init_logger("vllm.nwor")
    if manager is None:
        logger.warning("NWOR mode %s: %s; vLLM's own cache write serves this model", mode, reason)
        return
    logger.info_once(
        "NWOR mode %s serves %d layers, for %d requests of %d drafts, and holds %.1f MiB beside the cache",
        mode, manager.layout.num_layers, len(manager.slots), manager.max_drafts, manager.rows.numel() / 2**20,
    )  # fmt: skip


def build_manager(runner: Any, mode: str, layers: list[Any]) -> tuple[DraftCommitManager | None, str]:
    """The manager of this rank, or None and why these layers cannot be served."""
    on_gpu, packing, attention = runner.device.type == "cuda", None, None
    if not on_gpu:
        from nwor.vllm import attention_cpu

        packing = attention_cpu.find_packing(layers[0])
        if packing is None:
            return None, f"a CPU cache packing ({layers[0].isa}) that is no permutation of a slot's elements"
    try:
        layout = CacheLayout.from_kv_caches([layer.kv_cache for layer in layers], packing)
    except ValueError as error:
        return None, str(error)
    config = runner.vllm_config
    graphs = config.compilation_config.cudagraph_mode
    full_graphs = graphs is not None and graphs.has_full_cudagraphs()
    max_requests, max_drafts = config.scheduler_config.max_num_seqs, config.speculative_config.num_speculative_tokens
    try:
        if mode in ATTENDING and on_gpu:
            from nwor.attention.verify import Workspace

            impl = layers[0].impl
            attention = Workspace(max_requests, max_drafts + 1, impl.num_heads, impl.head_size, runner.device)
        manager = DraftCommitManager(
            layout,
            mode,
            max_requests=max_requests,
            max_drafts=max_drafts,
            max_tokens=max(config.scheduler_config.max_num_batched_tokens, max_requests),
            uses_full_cudagraphs=full_graphs,
            graphs_of_prefills=full_graphs and graphs.mixed_mode().has_full_cudagraphs(),
            attention=attention,
        )
        if failure := self_check.failure(manager, layers):
            return None, failure
    except torch.cuda.OutOfMemoryError as error:
        rows = max_requests * rows_per_request(mode, max_drafts, layout.block_size)
        needed = layout.num_layers * layout.slot_bytes * rows
        raise RuntimeError(
            f"NWOR holds {needed / 2**30:.1f} GiB beside vLLM's share of the GPU, for {max_requests} requests of "
            f"{max_drafts} drafts, and the GPU has no such room: lower max_num_seqs or gpu_memory_utilization"
        ) from error
    return manager, ""
