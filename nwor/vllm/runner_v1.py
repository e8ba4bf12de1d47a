# SPDX-License-Identifier: Apache-2.0
"""Patch of vLLM's V1 model runner: open the window before the forward, close it between sampling and drafting.

Why: only the runner knows which rows of a batch are drafts and how many of them were rejected.
How: `_prepare_inputs` yields the drafts per request, `_model_forward` (real steps only: dummy runs call the model
itself) is where the window opens, `_sample` returns the accepted tokens before the drafter proposes. `_dummy_run` may
replay a captured graph, and holds nothing.
When it can go: with the V1 runner.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from nwor.settings import ATTENDING, Settings
from nwor.vllm.batch import admits_requests, reads_rows_of_this_step
from nwor.vllm.context import context_of, make_cancelling, make_holding_nothing, make_releasing
from nwor.vllm.initialize import make_initialize, make_load
from nwor.vllm.patch import wrap
from nwor.vllm.stats import make_sample_tokens


def install(settings: Settings) -> None:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    if settings.mode in ATTENDING:
        wrap(GPUModelRunner, "load_model", make_load)
    wrap(GPUModelRunner, "initialize_kv_cache", lambda original: make_initialize(original, settings))
    wrap(GPUModelRunner, "_cleanup_profiling_kv_cache", make_releasing)  # `shutdown` calls it too
    wrap(GPUModelRunner, "execute_model", make_cancelling)
    wrap(GPUModelRunner, "_prepare_inputs", _make_prepare)
    wrap(GPUModelRunner, "_determine_batch_execution_and_padding", _make_batch)
    wrap(GPUModelRunner, "_model_forward", _make_forward)
    wrap(GPUModelRunner, "_dummy_run", make_holding_nothing)
    wrap(GPUModelRunner, "_sample", _make_sample)
    wrap(GPUModelRunner, "sample_tokens", make_sample_tokens)


def _make_prepare(original: Callable) -> Callable:
    def _prepare_inputs(self: Any, scheduler_output: Any, num_scheduled_tokens: Any) -> Any:
        result = original(self, scheduler_output, num_scheduled_tokens)
        context = context_of(self)
        metadata = result[1]
        num_drafts = 0 if metadata is None else sum(metadata.num_draft_tokens)
        context.metadata = metadata if num_drafts else None  # vLLM makes it for steps without drafts too
        context.requests = self.input_batch.req_ids
        drafts_alone = scheduler_output.total_num_scheduled_tokens == num_drafts + len(num_scheduled_tokens)
        context.log_holds = drafts_alone and not admits_requests(scheduler_output)
        context.windows_alone = drafts_alone and not reads_rows_of_this_step(context.manager, scheduler_output)
        context.in_step = True
        return result

    return _prepare_inputs


def _make_batch(original: Callable) -> Callable:
    def _determine_batch_execution_and_padding(self: Any, *args: Any, **kwargs: Any) -> Any:
        context = context_of(self)
        if context.in_step and context.manager is not None and context.manager.attends and not context.windows_alone:
            kwargs["force_uniform_decode"] = False  # a graph of decodes stores rows while it attends
        return original(self, *args, **kwargs)

    return _determine_batch_execution_and_padding


def _make_forward(original: Callable) -> Callable:
    def _model_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        context = context_of(self)
        metadata = context.metadata
        if not context.groups:
            return original(self, *args, **kwargs)
        tables = self.input_batch.block_table
        slot_mappings = {group.index: tables[group.index].slot_mapping.gpu for group in context.groups}
        if metadata is None:
            context.write_all(slot_mappings)
            return original(self, *args, **kwargs)
        query_start_loc = self.query_start_loc.gpu[: self.input_batch.num_reqs + 1]
        cu_num_logits = torch.nn.functional.pad(metadata.cu_num_sampled_tokens, (1, 0))
        most_drafts = max(metadata.num_draft_tokens)  # this runner's drafters may bring more than they were asked for
        context.begin(query_start_loc, cu_num_logits, slot_mappings, most_drafts)
        return original(self, *args, **kwargs)

    return _model_forward


def _make_sample(original: Callable) -> Callable:
    def _sample(self: Any, logits: Tensor | None, spec_decode_metadata: Any) -> Any:
        context = context_of(self)
        output = original(self, logits, spec_decode_metadata)
        if (manager := context.manager) is not None and manager.is_open:
            context.commit(count_rejected(output.sampled_token_ids, spec_decode_metadata.cu_num_draft_tokens))
        return output

    return _sample


def count_rejected(sampled_token_ids: Tensor, cu_num_draft_tokens: Tensor) -> Tensor:
    """int32 [num_reqs]: of [num_reqs, k + 1], accepted drafts and one more token, then -1, and of drafts up to each."""
    drafts = cu_num_draft_tokens.diff(prepend=cu_num_draft_tokens.new_zeros(1))
    accepted = (sampled_token_ids != -1).sum(dim=1, dtype=torch.int32) - 1
    return torch.minimum((drafts - accepted).clamp_(min=0), drafts)
