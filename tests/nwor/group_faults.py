# SPDX-License-Identifier: Apache-2.0
"""Faults in how a model's cache groups are served together, injected in a child's process."""

import pytest

from nwor.vllm.context import RunnerContext


def held_in_block_0(patch: pytest.MonkeyPatch) -> None:
    """No fault: an error where a held slot lies in block 0, which vLLM puts in place of what a window has left."""
    begin = RunnerContext.begin

    def checked(self, *arguments):  # type: ignore[no-untyped-def]
        begin(self, *arguments)
        for manager in (group.manager for group in self.groups):
            held = manager.slots[manager.slots >= 0]
            assert bool((held >= manager.layout.block_size).all()), "a held slot lies in block 0"

    patch.setattr(RunnerContext, "begin", checked)


def slots_of_another_group(patch: pytest.MonkeyPatch) -> None:
    """Each cache group's window opens on the first one's slots."""
    begin = RunnerContext.begin

    def of_first(self, starts, logits, slot_mappings, *rest):  # type: ignore[no-untyped-def]
        first = next(iter(slot_mappings.values()))
        begin(self, starts, logits, dict.fromkeys(slot_mappings, first), *rest)

    patch.setattr(RunnerContext, "begin", of_first)


def slots_of_another_group_v2(patch: pytest.MonkeyPatch) -> None:
    """The same under the V2 runner, whose slot mappings are one tensor."""
    begin, given = RunnerContext.begin, []

    def of_first(self, starts, logits, slot_mappings, *rest):  # type: ignore[no-untyped-def]
        given.append(slot_mappings[:1].expand_as(slot_mappings).contiguous())  # the forward reads it
        begin(self, starts, logits, given[-1], *rest)

    patch.setattr(RunnerContext, "begin", of_first)


def verdict_for_one_group(patch: pytest.MonkeyPatch) -> None:
    """The windows of all cache groups but the first are dropped, uncommitted."""

    def commit_first(self, num_rejected):  # type: ignore[no-untyped-def]
        first, *others = self.groups
        if not first.manager.is_open:
            return
        first.manager.commit(num_rejected)
        for group in others:
            group.manager.way = None

    patch.setattr(RunnerContext, "commit", commit_first)


def states_touched(patch: pytest.MonkeyPatch) -> None:
    """After each step one number in every state of every recurrent layer is another."""
    from vllm.model_executor.layers.mamba.abstract import MambaBase
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    update = GPUModelRunner._update_states_after_model_execute

    def touched(self, *arguments):  # type: ignore[no-untyped-def]
        update(self, *arguments)
        for layer in self.compilation_config.static_forward_context.values():
            if isinstance(layer, MambaBase):
                layer.kv_cache[1].flatten(1)[:, 0] += 1

    patch.setattr(GPUModelRunner, "_update_states_after_model_execute", touched)
