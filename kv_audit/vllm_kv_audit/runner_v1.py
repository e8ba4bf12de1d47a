# SPDX-License-Identifier: Apache-2.0
"""Hooks in vLLM's V1 model runner, that of CPUs.

`_update_states` tells which requests joined and left, `_model_forward` (real steps alone) is where inputs are ready,
and `_update_states_after_model_execute` comes right after sampling, outside whatever wraps `_sample`, and before the
drafter. This runner's batch rows move, so requests have rows of their own in the auditor's table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from .auditor import Auditor, auditor_of
from .hooks import wrap
from .marks import Batch, Outcome
from .metrics import around_sample_tokens

FORWARD = "self input_ids positions intermediate_tensors inputs_embeds model_kwargs"


def install() -> None:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    wrap(GPUModelRunner, "sample_tokens", "self grammar_output", around_sample_tokens)
    wrap(GPUModelRunner, "_update_states", "self scheduler_output", _update_states)
    wrap(GPUModelRunner, "_model_forward", FORWARD, _model_forward)
    wrap(GPUModelRunner, "_sample", "self logits spec_decode_metadata", _sample)
    after = "_update_states_after_model_execute"
    wrap(GPUModelRunner, after, "self output_token_ids scheduler_output", _after_sampling)


class Rows:
    """The rows of the auditor's table that requests have while they run. on_device: int64, by place in the batch."""

    def __init__(self, auditor: Auditor) -> None:
        count = len(auditor.expected)
        self.of: dict[str, int] = {}
        self.free = list(range(count))
        self.batch: list[str] = []
        self.joiners: list[int] = []
        self.on_device = torch.zeros(count, dtype=torch.int64, device=auditor.device)
        self.no_rejected = torch.zeros(count, dtype=torch.int32, device=auditor.device)
        self.metadata: Any = None

    def release(self, requests: Iterable[str]) -> None:
        self.free += [self.of.pop(request) for request in requests if request in self.of]

    def follow(self, auditor: Auditor, batch: Any, joined: set[str]) -> None:
        """Take up a step's batch, of which `joined` are new, or back; so is one whose row was given away meanwhile."""
        self.joiners = []
        if not joined and batch.req_ids == self.batch:
            return
        self.batch = list(batch.req_ids)
        for place, request in enumerate(self.batch):
            if request in joined or request not in self.of:
                if request not in self.of:
                    if not self.free:
                        self.release(self.of.keys() - set(self.batch))
                    self.of[request] = self.free.pop()
                self.joiners.append(place)
                count = batch.num_tokens_no_spec[place]
                # Where vLLM has an embedding and no token, another request's may be left: 0, as in `_fed`.
                tokens = batch.token_ids_cpu[place, :count] * batch.is_token_ids[place, :count]
                auditor.begin_request(self.of[request], request, tokens)
        rows = torch.tensor([self.of[request] for request in self.batch], dtype=torch.int64)
        if self.on_device.is_cuda:
            rows = rows.pin_memory()
        self.on_device[: len(rows)].copy_(rows, non_blocking=True)


def _rows_of(runner: Any, auditor: Auditor) -> Rows:
    found = vars(runner).get("kv_audit_rows")
    if found is None or found.on_device.device != auditor.device:
        found = runner.kv_audit_rows = Rows(auditor)
    return found


def _update_states(original: Callable, self: Any, scheduler_output: Any) -> Any:
    result = original(self, scheduler_output)
    if (auditor := auditor_of(self)) is not None:
        auditor.follow_blocks(scheduler_output)
        rows, cached = _rows_of(self, auditor), scheduler_output.scheduled_cached_reqs
        rows.release(scheduler_output.finished_req_ids | (scheduler_output.preempted_req_ids or set()))
        joined = {request.req_id for request in scheduler_output.scheduled_new_reqs} | set(cached.resumed_req_ids)
        rows.follow(auditor, self.input_batch, joined)
    return result


def _model_forward(original: Callable, self: Any, *args: Any, **kwargs: Any) -> Any:
    if (auditor := auditor_of(self)) is not None:
        rows, count, tables = _rows_of(self, auditor), self.input_batch.num_reqs, self.input_batch.block_table
        auditor.check_before(
            Batch(
                rows.on_device,
                self.query_start_loc.gpu,
                self.seq_lens,
                _fed(self),
                num_requests=count,
                num_tokens=int(self.query_start_loc.np[count]),
            ),
            [table.block_table.gpu for table in tables.block_tables],
            rows.joiners,
            self.input_batch.num_computed_tokens_cpu[:count],
        )
    return original(self, *args, **kwargs)


def _fed(runner: Any) -> Tensor:
    """int32 [T] or longer, the step's tokens, 0 where an embedding is fed."""
    ids = runner.input_ids.gpu
    return ids * runner.is_token_ids.gpu if runner.model_config.enable_prompt_embeds else ids


def _sample(original: Callable, self: Any, logits: Tensor | None, spec_decode_metadata: Any) -> Any:
    if (auditor := auditor_of(self)) is not None:
        _rows_of(self, auditor).metadata = spec_decode_metadata
    return original(self, logits, spec_decode_metadata)


def _after_sampling(original: Callable, self: Any, output_token_ids: Tensor, scheduler_output: Any) -> None:
    original(self, output_token_ids, scheduler_output)
    if (auditor := auditor_of(self)) is not None:
        rows, count = _rows_of(self, auditor), self.input_batch.num_reqs
        outcome = _outcome(output_token_ids, rows, self.discard_request_mask.gpu[:count])
        auditor.mark_after([table.slot_mapping.gpu for table in self.input_batch.block_table.block_tables], outcome)


def _outcome(sampled: Tensor, rows: Rows, discarded: Tensor) -> Outcome:
    """What the sampler's tokens say, int [R, k + 1] with -1 for rejected ones.

    discarded: bool [R], requests of which a chunk of the prompt was computed, and whose sampled token nobody takes.
    """
    metadata, rows.metadata = rows.metadata, None
    if metadata is None or not sum(metadata.num_draft_tokens):
        return Outcome(rows.no_rejected, (~discarded).int(), sampled)
    drafts = metadata.cu_num_draft_tokens.diff(prepend=rows.no_rejected[:1].to(metadata.cu_num_draft_tokens.dtype))
    counts = (sampled != -1).sum(1, dtype=torch.int32)
    rejected = torch.minimum((drafts - counts + 1).clamp(min=0), drafts).int()
    return Outcome(rejected, torch.where(discarded, 0, counts).int(), sampled)
