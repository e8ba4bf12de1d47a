# SPDX-License-Identifier: Apache-2.0
"""Hooks in vLLM's V2 model runner, the default on a GPU.

`add_requests` has the requests that join (new, back from preemption, or a session's next turn) under rows that stay
theirs, `prepare_attn` (real steps alone) every tensor of the step, and `postprocess_sampled` what was rejected, after
whatever wraps `sample` and before a drafter overwrites the slots.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from torch import Tensor

from .auditor import auditor_of
from .hooks import wrap
from .marks import Batch, Outcome
from .metrics import around_sample_tokens

SAMPLED = "self idx_mapping sampled_tokens num_sampled num_rejected query_start_loc"


def install() -> None:
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    wrap(GPUModelRunner, "sample_tokens", "self grammar_output", around_sample_tokens)
    wrap(GPUModelRunner, "add_requests", "self scheduler_output", _add_requests)
    wrap(GPUModelRunner, "update_requests", "self scheduler_output", _update_requests)
    wrap(GPUModelRunner, "prepare_attn", "self input_batch", _prepare_attn)
    wrap(GPUModelRunner, "postprocess_sampled", SAMPLED, _postprocess_sampled, optional="draft_tokens")


def _add_requests(original: Callable, self: Any, scheduler_output: Any) -> None:
    original(self, scheduler_output)
    if (auditor := auditor_of(self)) is not None:
        new = scheduler_output.scheduled_new_reqs
        self.kv_audit_joined = [self.req_states.req_id_to_index[request.req_id] for request in new]
        for row, request in zip(self.kv_audit_joined, new, strict=True):
            auditor.begin_request(row, request.req_id, request.prefill_token_ids)


def _update_requests(original: Callable, self: Any, scheduler_output: Any) -> None:
    original(self, scheduler_output)
    if (auditor := auditor_of(self)) is not None:
        auditor.follow_blocks(scheduler_output)


def _prepare_attn(original: Callable, self: Any, input_batch: Any) -> Any:
    tables, slot_mappings = original(self, input_batch)
    if (auditor := auditor_of(self)) is not None:
        joined = self.kv_audit_joined
        joiners = np.flatnonzero(np.isin(input_batch.idx_mapping_np, joined)).tolist() if joined else ()
        self.kv_audit_slots = slot_mappings
        auditor.check_before(
            Batch(
                input_batch.idx_mapping,
                input_batch.query_start_loc,
                input_batch.seq_lens,
                input_batch.input_ids,
                input_batch.num_reqs,
                input_batch.num_tokens,
            ),
            tables,
            joiners,
            input_batch.num_computed_tokens_np,
        )
    return tables, slot_mappings


def _postprocess_sampled(
    original: Callable,
    self: Any,
    idx_mapping: Tensor,
    sampled_tokens: Tensor,
    num_sampled: Tensor,
    num_rejected: Tensor,
    *args: Any,
    **kwargs: Any,
) -> None:
    original(self, idx_mapping, sampled_tokens, num_sampled, num_rejected, *args, **kwargs)
    if (auditor := auditor_of(self)) is not None:
        auditor.mark_after(self.kv_audit_slots, Outcome(num_rejected, num_sampled, sampled_tokens))
