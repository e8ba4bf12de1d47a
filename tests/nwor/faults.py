# SPDX-License-Identifier: Apache-2.0
"""Faults injected in a child's process, each one a way this has failed before; a test that stays green is no test."""

import pytest

from nwor import ops
from nwor.manager import DraftCommitManager
from nwor.vllm import self_check
from nwor_lab.engines.engine import EngineSpec


def _behind_the_check(patch: pytest.MonkeyPatch) -> None:
    """A fault that the check at start-up would see, and fall back for, as if it came later."""
    patch.setattr(self_check, "failure", lambda *arguments: "")


def no_commit(patch: pytest.MonkeyPatch) -> None:
    _behind_the_check(patch)

    def close_without_commit(self: DraftCommitManager, num_rejected: object) -> None:
        self.num_requests = None

    patch.setattr(DraftCommitManager, "commit", close_without_commit)


def no_restore(patch: pytest.MonkeyPatch) -> None:
    _behind_the_check(patch)
    patch.setattr(ops, "restore_all_layers", lambda *args: None)


def masked_for_the_drafter(patch: pytest.MonkeyPatch) -> None:
    """Held rows masked in vLLM's own slots, and not unmasked: what a window in place would be without its end."""
    _behind_the_check(patch)
    begin = DraftCommitManager.begin

    def mask(self, query_start_loc, cu_num_logits, slot_mapping, *rest, **named):  # type: ignore[no-untyped-def]
        opened = begin(self, query_start_loc, cu_num_logits, slot_mapping, *rest, **named)
        slot_mapping.copy_(self.page_slots[: slot_mapping.numel()])
        return opened

    patch.setattr(DraftCommitManager, "begin", mask)


def commit_one_layer(patch: pytest.MonkeyPatch) -> None:
    _behind_the_check(patch)
    commit = ops.commit_all_layers

    def first_only(pool, offsets, strides, slots, packing, rows, *rest):  # type: ignore[no-untyped-def]
        commit(pool, offsets[:1], strides, slots, packing, rows[:1], *rest)

    patch.setattr(ops, "commit_all_layers", first_only)


def blind_attention(patch: pytest.MonkeyPatch) -> None:
    """The second generation's flaw: the staged tail is not seen."""
    _behind_the_check(patch)
    blind_from_the_start(patch)


def blind_from_the_start(patch: pytest.MonkeyPatch) -> None:
    """The same, so that the check at start-up sees it."""
    attend = ops.verify_attention

    def blind(query, kv_cache, staging, *rest, **named):  # type: ignore[no-untyped-def]
        attend(query, kv_cache, staging.new_zeros(staging.shape), *rest, **named)

    patch.setattr(ops, "verify_attention", blind)


def attention_fails(patch: pytest.MonkeyPatch) -> None:
    def out_of_resources(*arguments, **named):  # type: ignore[no-untyped-def]
        raise ValueError("out of resource: shared memory")

    patch.setattr(ops, "verify_attention", out_of_resources)


def one_byte_too_many(operator: str, patch: pytest.MonkeyPatch) -> None:
    """The operator does its work, and flips a byte of a slot that is nobody's."""
    move = getattr(ops, operator)

    def moved(pool, *rest):  # type: ignore[no-untyped-def]
        move(pool, *rest)
        pool[-1] ^= 1

    patch.setattr(ops, operator, moved)


def sleep_mode(patch: pytest.MonkeyPatch) -> None:
    """No fault: an engine that can be sent to sleep."""
    arguments = EngineSpec.llm_arguments
    patch.setattr(EngineSpec, "llm_arguments", lambda spec: {**arguments(spec), "enable_sleep_mode": True})


def small_capacity(patch: pytest.MonkeyPatch) -> None:
    init = DraftCommitManager.__init__

    def small(self, layout, mode, max_requests, *rest, **named):  # type: ignore[no-untyped-def]
        init(self, layout, mode, 3, *rest, **named)

    patch.setattr(DraftCommitManager, "__init__", small)


def unattended(patch: pytest.MonkeyPatch) -> None:
    from nwor.vllm import attention_cpu

    patch.setattr(attention_cpu, "cannot_attend", lambda layer: "a feature our attention lacks")


def unreadable_packing(patch: pytest.MonkeyPatch) -> None:
    from nwor.vllm import attention_cpu

    patch.setattr(attention_cpu, "find_packing", lambda layer: None)


def broken_extension(patch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise OSError("the operators do not load")

    patch.setattr(ops, "load", fail)


def plugin_missing_in_worker(patch: pytest.MonkeyPatch) -> None:
    from nwor.vllm import worker

    patch.setattr(worker, "install", lambda settings: None)


def unknown_vllm(patch: pytest.MonkeyPatch) -> None:
    import vllm

    patch.setattr(vllm, "__version__", "0.33.0")


def changed_signature(patch: pytest.MonkeyPatch) -> None:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    patch.setattr(GPUModelRunner, "_sample", lambda self, logits, metadata, extra: None)


def layer_without_hook(patch: pytest.MonkeyPatch) -> None:
    _behind_the_check(patch)
    from nwor.vllm import attention_cpu

    patch.setattr(attention_cpu, "install", lambda: None)


def scheduler_disagrees(patch: pytest.MonkeyPatch) -> None:
    from nwor.vllm import runner_v1

    count = runner_v1.count_rejected
    patch.setattr(runner_v1, "count_rejected", lambda sampled, drafts: count(sampled, drafts) + 1)


def changed_v2_signature(patch: pytest.MonkeyPatch) -> None:
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    patch.setattr(GPUModelRunner, "postprocess_sampled", lambda self, idx_mapping: None)


def gpu_layer_without_hook(patch: pytest.MonkeyPatch) -> None:
    _behind_the_check(patch)
    from nwor.vllm import attention_gpu

    patch.setattr(attention_gpu, "install", lambda layers: None)


def v2_scheduler_disagrees(patch: pytest.MonkeyPatch) -> None:
    _behind_the_check(patch)
    commit = DraftCommitManager.commit
    patch.setattr(DraftCommitManager, "commit", lambda self, num_rejected: commit(self, num_rejected + 1))


def one_layer_of_another_class(patch: pytest.MonkeyPatch) -> None:
    """No fault: a model one of whose layers has an attention of its own, in the same cache group."""
    from vllm.model_executor.layers.attention import Attention
    from vllm.model_executor.models import llama

    class OfThisModel(Attention):
        pass

    def make(*args, prefix, **named):  # type: ignore[no-untyped-def]
        return (OfThisModel if prefix == "model.layers.1.self_attn.attn" else Attention)(*args, prefix=prefix, **named)

    patch.setattr(llama, "Attention", make)


def unknown_mask(patch: pytest.MonkeyPatch) -> None:
    """No fault: an attention that looks back by chunks, as far as its attributes say."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

    init = CPUAttentionBackendImpl.__init__

    def with_lookback(self, *args, **named):  # type: ignore[no-untyped-def]
        init(self, *args, **named)
        self.chunk_lookback = 1

    patch.setattr(CPUAttentionBackendImpl, "__init__", with_lookback)


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
