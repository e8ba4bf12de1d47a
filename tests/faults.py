# SPDX-License-Identifier: Apache-2.0
"""Faults planted in a child's process, each one a way this has failed before; a test that stays green is no test."""

import pytest

from nwor import ops
from nwor.manager import DraftCommitManager


def no_commit(patch: pytest.MonkeyPatch) -> None:
    def close_without_commit(self: DraftCommitManager, num_rejected: object) -> None:
        self.num_requests = None

    patch.setattr(DraftCommitManager, "commit", close_without_commit)


def no_restore(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ops, "restore_all_layers", lambda *args: None)


def masked_for_the_drafter(patch: pytest.MonkeyPatch) -> None:
    """Held rows masked in vLLM's own slots, and not unmasked: what a window in place would be without its end."""
    begin = DraftCommitManager.begin

    def mask(self, query_start_loc, cu_num_logits, slot_mapping, *rest):  # type: ignore[no-untyped-def]
        opened = begin(self, query_start_loc, cu_num_logits, slot_mapping, *rest)
        slot_mapping.copy_(self.page_slots[: slot_mapping.numel()])
        return opened

    patch.setattr(DraftCommitManager, "begin", mask)


def commit_one_layer(patch: pytest.MonkeyPatch) -> None:
    commit = ops.commit_all_layers

    def first_only(pool, offsets, strides, slots, packing, rows, *rest):  # type: ignore[no-untyped-def]
        commit(pool, offsets[:1], strides, slots, packing, rows[:1], *rest)

    patch.setattr(ops, "commit_all_layers", first_only)


def blind_attention(patch: pytest.MonkeyPatch) -> None:
    """The second generation's flaw: the staged tail is not seen."""
    attend = ops.verify_attention

    def blind(query, kv_cache, staging, *rest, **named):  # type: ignore[no-untyped-def]
        attend(query, kv_cache, staging.new_zeros(staging.shape), *rest, **named)

    patch.setattr(ops, "verify_attention", blind)


def small_batches_aside(patch: pytest.MonkeyPatch) -> None:
    """No fault: as if the tuning said that vLLM serves the smaller half of all batches faster, at every context."""
    from nwor.vllm import gpu

    patch.setattr(gpu, "slower_batches", lambda most, *rest: dict.fromkeys(range(1, most // 2 + 1), 1))


def long_contexts_aside(patch: pytest.MonkeyPatch) -> None:
    """No fault: as if the tuning said that vLLM serves every batch faster from a context of 150 on."""
    from nwor.vllm import gpu

    patch.setattr(gpu, "slower_batches", lambda most, *rest: dict.fromkeys(range(1, most + 1), 150))


def small_capacity(patch: pytest.MonkeyPatch) -> None:
    init = DraftCommitManager.__init__

    def small(self, layout, mode, max_requests, *rest, **named):  # type: ignore[no-untyped-def]
        init(self, layout, mode, 3, *rest, **named)

    patch.setattr(DraftCommitManager, "__init__", small)


def unattended(patch: pytest.MonkeyPatch) -> None:
    from nwor.vllm import cpu

    patch.setattr(cpu, "cannot_attend", lambda layer: "a feature our attention lacks")


def unreadable_packing(patch: pytest.MonkeyPatch) -> None:
    from nwor.vllm import cpu

    patch.setattr(cpu, "find_packing", lambda layer: None)


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
    from nwor.vllm import cpu

    patch.setattr(cpu, "install", lambda: None)


def scheduler_disagrees(patch: pytest.MonkeyPatch) -> None:
    from nwor.vllm import runner_v1

    rejected = runner_v1.rejected
    patch.setattr(runner_v1, "rejected", lambda sampled, drafts: rejected(sampled, drafts) + 1)


def changed_v2_signature(patch: pytest.MonkeyPatch) -> None:
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    patch.setattr(GPUModelRunner, "postprocess_sampled", lambda self, idx_mapping: None)


def gpu_layer_without_hook(patch: pytest.MonkeyPatch) -> None:
    from nwor.vllm import gpu

    patch.setattr(gpu, "install", lambda layers: None)


def v2_scheduler_disagrees(patch: pytest.MonkeyPatch) -> None:
    commit = DraftCommitManager.commit
    patch.setattr(DraftCommitManager, "commit", lambda self, num_rejected: commit(self, num_rejected + 1))
