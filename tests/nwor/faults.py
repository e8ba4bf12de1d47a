# SPDX-License-Identifier: Apache-2.0
"""What an engine of a test meets, injected in a child's process: an environment that a mode has to refuse or to serve,
and by short names some faults of the catalogue, `nwor_lab.faults`."""

from collections.abc import Callable
from typing import Any

import pytest

from nwor.manager import DraftCommitManager
from nwor.settings import Settings
from nwor.vllm import self_check
from nwor.vllm.context import RunnerContext
from nwor_lab import faults
from nwor_lab.audit.auditor import AuditReport
from nwor_lab.engines.child import Served
from nwor_lab.engines.engine import EngineSpec
from nwor_lab.faults import wrong
from tests.engines import PROMPTS, Engines
from tests.nwor.offloading import ship_last_slots

no_commit, no_restore = faults.FAULTS["commit: nothing"], faults.FAULTS["restore: nothing"]
blind_attention = faults.FAULTS["attention: drafts hidden"]


def _behind_the_check(patch: pytest.MonkeyPatch) -> None:
    """A fault that the check at start-up would see, and fall back for, as if it came later."""
    patch.setattr(self_check, "failure", lambda *arguments: "")


def none(patch: pytest.MonkeyPatch) -> None:
    """No fault."""


def instead_of(operator: str, do: Callable[[Callable, dict[str, Any]], None], patch: pytest.MonkeyPatch) -> None:
    """`nwor_lab.faults.wrong.instead_of`."""
    wrong.instead_of(operator, do, patch.setattr)


def blind_from_the_start(patch: pytest.MonkeyPatch) -> None:
    """Attention that does not see the staged drafts, so that the check at start-up sees it."""
    blind_attention.apply(patch.setattr)


def held_in_block_0(patch: pytest.MonkeyPatch) -> None:
    """No fault: an error where a held slot lies in block 0, which vLLM puts in place of what a window has left."""
    begin = RunnerContext.begin

    def checked(self, *arguments):  # type: ignore[no-untyped-def]
        begin(self, *arguments)
        for manager in (group.manager for group in self.groups):
            held = manager.slots[manager.slots >= 0]
            assert bool((held >= manager.layout.block_size).all()), "a held slot lies in block 0"

    patch.setattr(RunnerContext, "begin", checked)


def small_capacity(patch: pytest.MonkeyPatch) -> None:
    """Rows for half the drafts that a request may have."""
    _behind_the_check(patch)
    init = DraftCommitManager.__init__

    def small(self, *arguments, max_drafts, **named):  # type: ignore[no-untyped-def]
        init(self, *arguments, max_drafts=max_drafts // 2, **named)

    patch.setattr(DraftCommitManager, "__init__", small)


def unreadable_packing(patch: pytest.MonkeyPatch) -> None:
    from nwor.vllm import attention_cpu

    patch.setattr(attention_cpu, "find_packing", lambda layer: None)


def plugin_missing_in_worker(patch: pytest.MonkeyPatch) -> None:
    from nwor.vllm import worker

    wrap = worker.wrap
    patch.setattr(worker, "wrap", lambda owner, name, make: name == "init_device" or wrap(owner, name, make))


def layer_without_hook(patch: pytest.MonkeyPatch) -> None:
    _behind_the_check(patch)
    from nwor.vllm import attention_cpu

    patch.setattr(attention_cpu, "install", lambda: None)


def scheduler_disagrees(patch: pytest.MonkeyPatch) -> None:
    from nwor.vllm import runner_v1

    count = runner_v1.count_rejected
    patch.setattr(runner_v1, "count_rejected", lambda sampled, drafts: count(sampled, drafts) + 1)


def gpu_layer_without_hook(patch: pytest.MonkeyPatch) -> None:
    _behind_the_check(patch)
    from nwor.vllm import attention_gpu

    patch.setattr(attention_gpu, "install", lambda layers: None)


def v2_scheduler_disagrees(patch: pytest.MonkeyPatch) -> None:
    _behind_the_check(patch)
    commit = DraftCommitManager.commit
    patch.setattr(DraftCommitManager, "commit", lambda self, num_rejected: commit(self, num_rejected + 1))


def ships_last_slots(patch: pytest.MonkeyPatch) -> None:
    """A fault of vLLM's own: blocks are offloaded with a slot that no step has kept."""
    init = Served.__init__

    def start(self, spec):  # type: ignore[no-untyped-def]
        init(self, spec)
        ship_last_slots(self.engine.engine_core.engine_core.scheduler)

    patch.setattr(Served, "__init__", start)


def one_layer_of_another_class(patch: pytest.MonkeyPatch) -> None:
    """No fault: a model one of whose layers has an attention of its own, in the same cache group."""
    from vllm.model_executor.layers.attention import Attention
    from vllm.model_executor.models import llama

    class OfThisModel(Attention):
        pass

    def make(*args, prefix, **named):  # type: ignore[no-untyped-def]
        return (OfThisModel if prefix == "model.layers.1.self_attn.attn" else Attention)(*args, prefix=prefix, **named)

    patch.setattr(llama, "Attention", make)


def writes_its_own(patch: pytest.MonkeyPatch) -> None:
    """No fault: a model that ropes and writes in one kernel, and calls its attention with queries alone."""
    from vllm.model_executor.layers.attention import Attention
    from vllm.model_executor.layers.attention.attention import get_attention_context
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

    write, attend = CPUAttentionBackendImpl.do_kv_cache_update, Attention.forward

    def forward(self, query, key, value):  # type: ignore[no-untyped-def]
        _, _, cache, slots = get_attention_context(self.layer_name)
        if slots is not None:
            shape = -1, self.num_kv_heads, self.head_size
            write(self.impl, self, key.view(shape), value.view(shape), cache, slots)
        return attend(self, query, None, None)

    patch.setattr(Attention, "forward", forward)


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


def commits_behind_the_save(ships: Callable[[pytest.MonkeyPatch], None], patch: pytest.MonkeyPatch) -> None:
    """Every commit comes in the next step, when a connector has shipped what this one completed."""
    faults.FAULTS["commit: in the next step"](patch)
    ships(patch)


def check_each_is_seen(engines: Engines, spec: EngineSpec, mode: str, needs: str = "") -> None:
    """One engine, a call for each fault between two without: those are clean."""
    injected = {fault.name: fault for fault in faults.injectable(mode, needs)}
    calls = [{"fault": fault} for fault in (none, *injected.values(), none)]
    outcome = engines.run(spec, Settings(mode=mode, audit=True), calls=calls, prompts=PROMPTS[:6], max_tokens=24)
    names = ["none", *injected, "none any more"]
    found = {name: AuditReport(**audited["audit"]).red for name, audited in zip(names, outcome.audits, strict=True)}
    wanted = {"none": set(), **{name: set(fault.red) for name, fault in injected.items()}, "none any more": set()}
    assert found == wanted and len(injected) > 0
    for audited in outcome.audits:
        assert audited["audit"]["steps"] > 5
        assert audited["audit"]["content_checked"] == audited["audit"]["kept_rows"] > 0
