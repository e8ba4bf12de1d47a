# SPDX-License-Identifier: Apache-2.0
"""Patch of vLLM's V2 model runner, the default on a GPU: open the window before the forward, close it after sampling.

Why: only the runner knows which rows of a batch are drafts and how many of them were rejected, and it knows both on
the device alone: the scheduler is a step ahead, and a step whose forward is one CUDA graph runs no Python.
How: `prepare_attn` (real steps) has every tensor the window needs, `prepare_dummy_attn` (dummy runs) and
`capture_model` hold nothing, `sample` returns `num_rejected`, before vLLM queues the copy of the tokens to the host:
whoever learns that a request has ended finds its pages committed. Everything runs on vLLM's main stream: a commit on
another, beside the drafter, makes every kernel of a step start later, 0.25 ms in all on an H200.
When it can go: when vLLM offers hooks around the forward.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from nwor.settings import ATTENDING, Settings
from nwor.vllm.batch import admits_requests, reads_rows_of_this_step
from nwor.vllm.context import context_of, make_cancelling, make_holding_nothing, make_releasing
from nwor.vllm.initialize import make_initialize, make_load
from nwor.vllm.patch import wrap
from nwor.vllm.stats import make_sample_tokens


def install(settings: Settings) -> None:
    from vllm.v1.worker.gpu import cudagraph_utils
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    if settings.mode in ATTENDING:
        wrap(GPUModelRunner, "load_model", make_load)
    wrap(GPUModelRunner, "initialize_kv_cache", lambda original: make_initialize(original, settings))
    wrap(cudagraph_utils, "_teardown_profiling_state", make_releasing)
    wrap(GPUModelRunner, "shutdown", make_releasing)
    wrap(GPUModelRunner, "gather_batch_req_state", _make_gather)
    wrap(GPUModelRunner, "prepare_attn", _make_prepare)
    wrap(GPUModelRunner, "prepare_dummy_attn", make_holding_nothing)
    wrap(GPUModelRunner, "capture_model", make_holding_nothing)  # vLLM warms up with real steps before
    wrap(GPUModelRunner, "execute_model", make_cancelling)
    wrap(GPUModelRunner, "sample", _make_sample)
    wrap(GPUModelRunner, "sample_tokens", make_sample_tokens)


def _make_gather(original: Callable) -> Callable:
    def gather_batch_req_state(self: Any, scheduler_output: Any, dummy_run: bool) -> Any:
        state, uniform = original(self, scheduler_output, dummy_run)
        context = context_of(self)
        joined = dummy_run or admits_requests(scheduler_output)
        context.log_holds = not joined
        context.reads_rows = joined and not dummy_run and reads_rows_of_this_step(context.manager, scheduler_output)
        if not context.reads_rows:
            return state, uniform
        # A graph of decodes stores rows while it attends, and is replayed where all queries are of one length. The
        # drafter asks for that length again: it must not replay one either, over metadata that nobody padded for it.
        return state._replace(decode_graph_eligible=False), None

    return gather_batch_req_state


def _make_prepare(original: Callable) -> Callable:
    def prepare_attn(self: Any, input_batch: Any) -> Any:
        block_tables, slot_mappings = original(self, input_batch)
        context = context_of(self)
        if context.groups:
            context.requests = input_batch.req_ids
            if num_drafts := input_batch.num_draft_tokens:
                drafts_alone = input_batch.num_tokens == num_drafts + len(context.requests)
                if context.groups[0].manager.attends and not drafts_alone and input_batch.decode_graph_eligible:
                    raise RuntimeError("a graph of decodes may serve this step, whose rows are not drafts alone")
                context.log_holds &= drafts_alone
                context.windows_alone = drafts_alone and not context.reads_rows
                context.begin(input_batch.query_start_loc, input_batch.cu_num_logits, slot_mappings)
            else:
                context.write_all(slot_mappings, replays=input_batch.decode_graph_eligible)
        return block_tables, slot_mappings

    return prepare_attn


def _make_sample(original: Callable) -> Callable:
    def sample(self: Any, *args: Any, **kwargs: Any) -> tuple[Any, Tensor, Tensor]:
        output = original(self, *args, **kwargs)
        context_of(self).commit(output[2])
        return output

    return sample
