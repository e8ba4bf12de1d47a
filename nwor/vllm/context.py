# SPDX-License-Identifier: Apache-2.0
"""What the hooks keep on vLLM's objects: one context on each model runner, one on each target layer."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from nwor.counters import CommitCounts
from nwor.manager import DraftCommitManager


@dataclass
class RunnerContext:
    """`runner.nwor`: what the hooks of one model runner know.

    manager: of the mode that serves; None where vLLM's own write does. reason: why it does, where a mode was asked for.
    group: index of the target layers' cache group.
    copies_counts: whether each commit's counts go to the scheduler.

    Of the step under way:
    metadata: vLLM's `SpecDecodeMetadata`, None without drafts (V1). requests: the ids of the batch's requests.
    drafts_alone: as `batch.has_drafts_alone` (V1). writes_first: as `DraftCommitManager.begin` takes it.
    counts: of its commit, None before.
    """

    manager: DraftCommitManager | None = None
    reason: str = ""
    group: int | None = None
    copies_counts: bool = False
    metadata: Any = None
    requests: Sequence[str] = ()
    drafts_alone: bool = False
    writes_first: bool = False
    counts: CommitCounts | None = None


@dataclass
class LayerContext:
    """`layer.nwor`: what an attention hook needs of the layer it is called for."""

    manager: DraftCommitManager
    index: int


def context_of(runner: Any) -> RunnerContext:
    """The runner's context, made when it is first asked for."""
    if "nwor" not in vars(runner):
        runner.nwor = RunnerContext()
    return runner.nwor


def manager_of(runner: Any) -> DraftCommitManager | None:
    """The manager that serves this runner; None where vLLM's own write does."""
    return context_of(runner).manager


def set_active_manager(runner: Any, manager: DraftCommitManager | None) -> None:
    """Let the hooks of the runner and of its target layers go through `manager` from now on; None is vLLM alone."""
    context_of(runner).manager = manager
    for index, layer in enumerate(target_layers(runner).values()):
        layer.nwor = None if manager is None else LayerContext(manager, index)


def target_layers(runner: Any) -> dict[str, Any]:
    """The target model's attention layers by name, in order; the drafter's own are never part of a window.

    Of these classes, no subclass included: each writes a row to the one slot that its cache group's slot mapping says.
    """
    from vllm.model_executor.layers import attention

    served = (
        attention.Attention,
        attention.ChunkedLocalAttention,
        attention.MLAAttention,
        attention.PrefillPrefixLMAttention,
        attention.RSWAAttention,
    )
    context, drafter = runner.compilation_config.static_forward_context, draft_layers(runner)
    return {name: layer for name, layer in context.items() if type(layer) in served and name not in drafter}


def is_latent(layer: Any) -> bool:
    """Whether it is DeepSeek's attention (MLA), which caches one latent row a token, and no keys and values by head."""
    from vllm.model_executor.layers.attention import MLAAttention

    return isinstance(layer, MLAAttention)


def cache_of(layer: Any) -> Tensor:
    """A target layer's cache as [num_blocks, H, N, C]; MLA's, which vLLM keeps as [num_blocks, N, C], has one head."""
    return layer.kv_cache.unsqueeze(1) if is_latent(layer) else layer.kv_cache


def draft_layers(runner: Any) -> set[str]:
    """Names of the drafter's own layers, under either runner; none where it has none."""
    of_v1: set[str] = getattr(getattr(runner, "drafter", None), "_draft_attn_layer_names", set())
    of_v2: set[str] = getattr(getattr(runner, "speculator", None), "draft_attn_layer_names", set())
    return of_v1 | of_v2


def target_group(runner: Any, layers: dict[str, Any]) -> int | None:
    """The first cache group that holds target layers, None where none does."""
    groups = runner.kv_cache_config.kv_cache_groups
    return next((index for index, spec in enumerate(groups) if layers.keys() & set(spec.layer_names)), None)
