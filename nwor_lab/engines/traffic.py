# SPDX-License-Identifier: Apache-2.0
"""Requests that arrive, join and are aborted between the steps of one engine, in the engine's process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm import LLM


@dataclass(frozen=True)
class Event:
    """A request that arrives, or without a prompt the abort of one, before an engine step.

    step: the step before which it happens, 0 for the script's first.
    name: of the request.
    prompt: token ids.
    sampling: fields of vLLM's `SamplingParams`; `structured_outputs` is a dict.
    follows: a request whose tokens so far come before `prompt`. From `step` on the event waits until these fill their
        last block, or that request has ended: it then asks for a block in the very step that fills it.
    """

    step: int
    name: str
    prompt: list[int] | None = None
    sampling: dict[str, Any] = field(default_factory=dict)
    follows: str = ""


@dataclass
class Answer:
    """One answer: token ids, by place the log-probabilities of the best ones, and why it ended (None: aborted)."""

    tokens: list[int]
    top_logprobs: list[dict[int, float]]
    finish_reason: str | None


@dataclass
class ScriptResult:
    """What a script of events did on one engine.

    answers: by request, in the order of `n`; an aborted one has what it had by then, or nothing.
    prompts: token ids with which each request was added, those of a request that it follows included.
    cached: tokens of prompts that were found in the prefix cache.
    ranks: every rank's `child.status`; the audit is of this script alone, counters are since the engine's start.
    metrics: increments of vLLM's and NWOR's counters.
    """

    answers: dict[str, list[Answer]]
    prompts: dict[str, list[int]]
    cached: int
    ranks: list[dict[str, Any]] = field(default_factory=list)
    metrics: dict[str, int] = field(default_factory=dict)


def drive(llm: LLM, events: Sequence[Event], seed: int) -> ScriptResult:
    """Run the events, to the end of the last request; answers, prompts and hits of the prefix cache.

    It begins with an empty prefix cache and every rank's generator seeded, so a script repeats by itself.
    """
    engine, core = llm.llm_engine, llm.llm_engine.engine_core.engine_core
    config, requests = engine.vllm_config, core.scheduler.requests
    room = config.model_config.max_model_len - config.speculative_config.num_speculative_tokens
    # Else a request waits for its grammar as long as another thread takes, and no two engines run the same batches.
    core.structured_output_manager._use_async_grammar_compilation = False
    engine.reset_prefix_cache()
    llm.collective_rpc(begin, args=(seed,))
    made, cached = ScriptResult({}, {}, 0), dict[str, int]()

    def happens(event: Event, step: int) -> bool:
        if event.step > step:
            return False
        if event.prompt is None:
            engine.abort_request([event.name])
            return True
        if ids := engine.output_processor.external_req_ids.get(event.follows):
            before = list(requests[ids[0]].all_token_ids)
            if len(before) % config.cache_config.block_size:
                return False
        else:
            answers = made.answers.get(event.follows) or [Answer([], [], None)]
            before = made.prompts.get(event.follows, []) + answers[0].tokens
        sampling = sampling_params(event.sampling)
        made.prompts[event.name] = (before + event.prompt)[: room - sampling.max_tokens]
        engine.add_request(event.name, {"prompt_token_ids": made.prompts[event.name]}, sampling)
        return True

    waiting, step = sorted(events, key=lambda event: event.step), 0
    while waiting or engine.has_unfinished_requests():
        if not engine.has_unfinished_requests():
            step = max(step, waiting[0].step)
        waiting = [event for event in waiting if not happens(event, step)]
        for output in engine.step():
            answers = made.answers.setdefault(output.request_id, [])
            for answer in output.outputs:
                answers += [Answer([], [], None) for _ in range(answer.index + 1 - len(answers))]
                answers[answer.index] = Answer(
                    list(answer.token_ids),
                    [{token: entry.logprob for token, entry in place.items()} for place in answer.logprobs or []],
                    answer.finish_reason,
                )
            cached[output.request_id] = output.num_cached_tokens or 0
        step += 1
    if core.scheduler.has_requests():  # a stop string was found by the front end, which ended its request there
        engine.step()
    made.cached = sum(cached.values())
    return made


def sampling_params(fields: dict[str, Any]) -> Any:
    """vLLM's `SamplingParams` with these fields, `structured_outputs` a dict."""
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    if "structured_outputs" in fields:
        fields = fields | {"structured_outputs": StructuredOutputsParams(**fields["structured_outputs"])}
    return SamplingParams(**fields)


def begin(worker: Any, seed: int) -> None:
    """Seed this rank's sampling, and let its audit, if it has one, count from here on."""
    import torch

    torch.manual_seed(seed)
    if (audit := getattr(worker.model_runner, "cache_audit", None)) is not None:
        audit.forget()
