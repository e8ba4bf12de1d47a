# SPDX-License-Identifier: Apache-2.0
"""What the hooks keep on vLLM's objects: one context on each model runner, one on each target layer."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from torch import Size, Tensor

from nwor.counters import Totals
from nwor.manager import DraftCommitManager

_MOST_VIEWS = 256


@dataclass(frozen=True)
class ServedGroup:
    """A cache group of vLLM's, which has slots of its own, with the target layers in it and their manager."""

    index: int
    layers: Sequence[Any]
    manager: DraftCommitManager


@dataclass
class RunnerContext:
    """`runner.nwor`: what the hooks of one model runner know.

    groups: the cache groups that hold target layers; none where vLLM's own write serves. They open and close their
        windows together, and since each holds the same tokens, the first one's manager counts for all.
    reason: why vLLM's own write serves, where a mode was asked for.

    Of the step under way:
    metadata: vLLM's `SpecDecodeMetadata` (V1), None without drafts. requests: the ids of the batch's requests.
    log_holds: its slots hold what the step before left there: no request is new, back or prefilling.
    in_step: it is a real one, no dummy run. windows_alone: as `DraftCommitManager.begin` takes it.
    reads_rows: `batch.reads_rows_of_this_step`.
    counts: of its commit, as `DeviceCounters.published` has them; None before.
    """

    groups: Sequence[ServedGroup] = ()
    reason: str = ""
    metadata: Any = None
    requests: Sequence[str] = ()
    log_holds: bool = False
    in_step: bool = False
    windows_alone: bool = False
    reads_rows: bool = False
    counts: Callable[[], Totals | None] | None = None
    _views: dict[tuple[int, Size], list[Tensor]] = field(default_factory=dict)

    @property
    def manager(self) -> DraftCommitManager | None:
        """The first group's, which counts; None where vLLM's own write serves."""
        return self.groups[0].manager if self.groups else None

    def begin(
        self,
        query_start_loc: Tensor,
        cu_num_logits: Tensor,
        slot_mappings: Mapping[int, Tensor] | Tensor,
        most_drafts: int = 0,
    ) -> None:
        """Open each group's window on its own slots; slot_mappings: by the cache group's index."""
        requests = self.requests if self.log_holds else ()
        for group, slots in zip(self.groups, self._slots_of_groups(slot_mappings), strict=True):
            group.manager.begin(
                query_start_loc, cu_num_logits, slots, requests,
                windows_alone=self.windows_alone, most_drafts=most_drafts,
            )  # fmt: skip

    def _slots_of_groups(self, slot_mappings: Mapping[int, Tensor] | Tensor) -> Sequence[Tensor]:
        """Each group's own. Of the V2 runner's one tensor, which stays where it is, a view is a commit's time."""
        if not isinstance(slot_mappings, Tensor):
            return [slot_mappings[group.index] for group in self.groups]
        place = slot_mappings.data_ptr(), slot_mappings.shape
        if (views := self._views.get(place)) is None:
            if len(self._views) == _MOST_VIEWS:
                self._views.clear()
            views = self._views[place] = [slot_mappings[group.index] for group in self.groups]
        return views

    def write_all(self, slot_mappings: Mapping[int, Tensor] | Tensor, replays: bool = True) -> None:
        """As `DraftCommitManager.write_all`, for each group; slot_mappings: by the cache group's index."""
        for group, slots in zip(self.groups, self._slots_of_groups(slot_mappings), strict=True):
            group.manager.write_all(slots, replays)

    def hold_nothing(self) -> None:
        """As `DraftCommitManager.hold_nothing`, for each group."""
        self.in_step = False
        for group in self.groups:
            group.manager.hold_nothing()

    def commit(self, num_rejected: Tensor) -> None:
        """Close each group's window, if they are open."""
        groups = self.groups
        if not groups or (manager := groups[0].manager).way is None:
            return
        for group in groups:
            group.manager.commit(num_rejected)
        self.counts = manager.counters.published()

    def cancel(self) -> None:
        """Cancel each group's window; that of one group does not depend on another's."""
        self.counts = None
        with ExitStack() as stack:
            for group in self.groups:
                stack.callback(group.manager.cancel)


@dataclass
class LayerContext:
    """`layer.nwor`: what an attention hook needs of the layer it is called for.

    attention: the layer's `LayerAttention` on a GPU, made at its first call.
    """

    manager: DraftCommitManager
    index: int
    attention: Any = None


def context_of(runner: Any) -> RunnerContext:
    """The runner's context, made when it is first asked for."""
    try:
        return runner.nwor
    except AttributeError:
        runner.nwor = RunnerContext()
        return runner.nwor


def make_cancelling(original: Callable) -> Callable:
    """A wrapper of a runner's function: where it fails, no window stays open, and its slots are as before."""

    def cancelling(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return original(self, *args, **kwargs)
        except BaseException as error:
            try:
                context_of(self).cancel()
            except (RuntimeError, ValueError) as another:  # the GPU is gone, say: vLLM has to learn why
                error.add_note(f"NWOR could not cancel the step's window: {another}")
            raise

    return cancelling


def make_holding_nothing(original: Callable) -> Callable:
    """A wrapper of a runner's dummy runs and captures: a replayed graph must not write where the last real step did."""

    def holding_nothing(self: Any, *args: Any, **kwargs: Any) -> Any:
        context_of(self).hold_nothing()
        return original(self, *args, **kwargs)

    return holding_nothing


def make_releasing(original: Callable) -> Callable:
    """A wrapper of what gives a runner's caches back: nothing of ours keeps their memory, or what is held beside it."""

    def releasing(*args: Any) -> Any:
        (runner,) = args  # by either of vLLM's names for it
        release(runner)
        return original(runner)

    return releasing


def release(runner: Any) -> None:
    """Serve no group, and let go of what goes by a step: vLLM alone, until groups are set."""
    set_served_groups(runner, ())
    context = context_of(runner)
    context.counts = context.metadata = None


def manager_of(runner: Any) -> DraftCommitManager | None:
    """The manager that counts for this runner; None where vLLM's own write serves."""
    return context_of(runner).manager


def set_served_groups(runner: Any, groups: Sequence[ServedGroup]) -> None:
    """Let the hooks of the runner and of its target layers go through these groups from now on; none is vLLM alone."""
    context = context_of(runner)
    for group in context.groups:
        for layer in group.layers:
            layer.nwor = None
    context.groups = groups
    context._views.clear()
    for group in groups:
        for index, layer in enumerate(group.layers):
            layer.nwor = LayerContext(group.manager, index)


def target_layers(runner: Any) -> dict[str, Any]:
    """The target model's attention layers with a cache of their own, by name, in order; never the drafter's.

    They are modules of its model, since vLLM does not know all drafters' layers: those of a `custom_class` it does not.
    Of these classes, no subclass included: each writes a row to the one slot that its cache group's slot mapping says.
    """
    known = _known_layers(runner).items()
    return {name: layer for name, layer in known if not getattr(layer, "kv_sharing_target_layer_name", None)}


def sharing_layers(runner: Any) -> set[str]:
    """Names of the target's layers of the same classes that read another one's cache, and write none."""
    return _known_layers(runner).keys() - target_layers(runner).keys()


def _known_layers(runner: Any) -> dict[str, Any]:
    from vllm.model_executor.layers import attention

    served = (
        attention.Attention,
        attention.ChunkedLocalAttention,
        attention.MLAAttention,
        attention.PrefillPrefixLMAttention,
        attention.RSWAAttention,
    )
    context, drafter = runner.compilation_config.static_forward_context, draft_layers(runner)
    modules = {id(module) for module in runner.get_model().modules()}
    own = {name: layer for name, layer in context.items() if id(layer) in modules and name not in drafter}
    return {name: layer for name, layer in own.items() if type(layer) in served}


def recurrent_layers(runner: Any) -> set[str]:
    """Names of the layers that keep a state and write no rows, in cache groups of their own: vLLM's recurrent ones.

    vLLM itself keeps a state for each draft there, and goes on from that of the last one that was accepted.
    """
    from vllm.model_executor.layers.mamba.abstract import MambaBase

    context = runner.compilation_config.static_forward_context
    groups = [
        group for group in runner.kv_cache_config.kv_cache_groups if kinds_of(group.kv_cache_spec) == {"MambaSpec"}
    ]
    return {name for group in groups for name in group.layer_names if isinstance(context.get(name), MambaBase)}


def kinds_of(spec: Any) -> set[str]:
    """The classes of a cache group's spec, by name: one, or those of its layers where vLLM keeps one for each."""
    return {type(each).__name__ for each in getattr(spec, "kv_cache_specs", {"": spec}).values()}


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


def target_groups(runner: Any, layers: dict[str, Any]) -> dict[int, list[Any]]:
    """The target layers of each cache group that has any, by its index."""
    specs = enumerate(runner.kv_cache_config.kv_cache_groups)
    groups = {index: [layers[name] for name in layers if name in spec.layer_names] for index, spec in specs}
    return {index: found for index, found in groups.items() if found}
