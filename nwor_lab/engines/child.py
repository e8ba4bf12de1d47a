# SPDX-License-Identifier: Apache-2.0
"""The child process of an `Engine`: it holds one vLLM engine and answers its parent's calls.

Only the standard library is imported before the child's output goes to its log: what torch and vLLM say while they
are imported belongs there too.
"""

from __future__ import annotations

import gc
import os
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from nwor_lab.engines.spec import EngineSpec
from nwor_lab.engines.traffic import Event, ScriptResult, drive, sampling_params
from nwor_lab.machine import on_cpu


@dataclass
class Generation:
    """What one call of `Served.generate` gave.

    tokens: generated token ids by request; step_seconds: duration of every engine step, in order.
    counters: increments of vLLM's speculative counters: drafts (windows), draft_tokens, accepted_tokens.
    accepted_at: windows whose draft at each position was accepted.
    top_logprobs: where asked for, by request and position, the log-probabilities of the best tokens by id.
    """

    tokens: list[list[int]]
    text: list[str]
    step_seconds: list[float]
    counters: dict[str, int]
    accepted_at: list[int]
    top_logprobs: list[list[dict[int, float]]] = field(default_factory=list)


def serve(spec: EngineSpec, environ: dict[str, str], pipe: Connection, log: str) -> None:
    """Answer calls of the parent until it sends None or is gone; all output goes to the file `log`.

    An answer is (True, result), or (False, the error in words); its traceback is in the log.
    """
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.environ.update(environ)
    warnings.simplefilter("ignore", FutureWarning)  # as PYTHONWARNINGS does in processes that start from here
    served = None
    try:
        served = Served(spec)
        pipe.send((True, None))
        while (call := pipe.recv()) is not None:
            name, arguments, named = call
            pipe.send((True, getattr(served, name)(*arguments, **named)))
    except EOFError:  # the parent is gone
        return
    except BaseException as error:  # noqa: BLE001  (the parent raises it)
        traceback.print_exc()
        pipe.send((False, " ".join("".join(traceback.format_exception_only(error)).split())))
    finally:
        if served is not None:
            served.engine.engine_core.shutdown()


def status(worker: Any) -> dict[str, Any]:
    """A rank's `nwor.vllm.worker.status`, with what its audit found (`nwor_lab.audit.hooks.report`).

    And, as ``sampled``, with what the sampled auditor (`kv_audit/`) reports where ``VLLM_KV_AUDIT`` is set.
    """
    from nwor.vllm.worker import status as mode_status
    from nwor_lab.audit import hooks

    sampled: dict[str, Any] = getattr(worker, "kv_audit_report", dict)()
    return {**mode_status(worker), **hooks.report(worker), "sampled": sampled}


class Served:
    """The vLLM engine of a spec, and what the parent may call through its `Engine`."""

    def __init__(self, spec: EngineSpec) -> None:
        from vllm import LLM

        gc.freeze()  # vLLM collects garbage ten times as it starts and ends; what it imported takes most of that
        self.spec, self.llm = spec, LLM(**spec.llm_arguments())
        self.engine = self.llm.llm_engine
        self.calls = 0

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of the texts, by the model's own tokenizer."""
        tokenizer = self.llm.get_tokenizer()
        return [list(tokenizer.encode(text)) for text in texts]

    def generate(self, prompts: Sequence[list[int]], *how: Any, **named: Any) -> Generation:
        """Generate for all prompts (token ids) at once; arguments are those of `add_requests`."""
        before, before_at = self._spec_counters()
        self.add_requests(prompts, *how, **named)
        finished: dict[int, Any] = {}
        step_seconds: list[float] = []
        while self.engine.has_unfinished_requests():
            start = time.perf_counter()
            outputs = self.engine.step()
            step_seconds.append(time.perf_counter() - start)
            for output in outputs:
                if output.finished:
                    finished[int(output.request_id.split("-")[1])] = output.outputs
        answers = [answer for index in range(len(prompts)) for answer in finished[index]]
        after, after_at = self._spec_counters()
        return Generation(
            tokens=[list(answer.token_ids) for answer in answers],
            text=[answer.text for answer in answers],
            step_seconds=step_seconds,
            counters={name: after[name] - before[name] for name in after},
            accepted_at=[now - then for now, then in zip(after_at, before_at, strict=True)],
            top_logprobs=[
                [{token: entry.logprob for token, entry in place.items()} for place in answer.logprobs or []]
                for answer in answers
            ],
        )

    def add_requests(
        self,
        prompts: Sequence[list[int]],
        max_tokens: int,
        temperature: float = 0.0,
        seed: int = 0,
        logprobs: int = 0,
        sampling: Sequence[dict[str, Any]] = (),
    ) -> list[str]:
        """Queue the requests and return their names.

        Request i draws with seed `seed + i` on a GPU, synthetic acceptance too. On a CPU the engine's own seed has to
        do: a request's own generator fails there beside a chunked prefill ("CPU Generator does not use offset").

        sampling: further fields of vLLM's `SamplingParams`; the requests use them in rotation. Its
            `structured_outputs` is a dict here. With `n` the answers of a prompt follow each other.
        """
        from vllm.sampling_params import RequestOutputKind

        self.calls += 1
        names = [f"{self.calls}-{index}" for index in range(len(prompts))]
        for index, (name, prompt) in enumerate(zip(names, prompts, strict=True)):
            fields = {
                "temperature": temperature,
                "max_tokens": max_tokens,
                "ignore_eos": True,
                "seed": None if on_cpu() else seed + index,
                "logprobs": logprobs or None,
                "output_kind": RequestOutputKind.FINAL_ONLY,
                **(sampling[index % len(sampling)] if sampling else {}),
            }
            self.engine.add_request(name, {"prompt_token_ids": prompt}, sampling_params(fields))
        return names

    def traffic(self, events: Sequence[Event], seed: int) -> ScriptResult:
        """Run a script of events to its end, as `nwor_lab.engines.traffic.drive` says."""
        before, made = self.metrics(), drive(self.llm, events, seed)
        made.ranks = self.report()
        made.metrics = {name: int(value - before.get(name, 0)) for name, value in self.metrics().items()}
        return made

    def kernel_times(self, prompts: Sequence[list[int]], max_tokens: int) -> tuple[list[dict[str, float]], int]:
        """Microseconds by kernel name on each rank over a few greedy decode steps, and how many steps those were."""
        self.add_requests(prompts, max_tokens)
        chunks = sum(map(len, prompts)) // self.spec.max_num_batched_tokens
        for _ in range(chunks + 4):  # every request is decoding from then on
            self.engine.step()
        steps = 8
        self.on_every_rank(start_profiler)
        for _ in range(steps):
            self.engine.step()
        times = self.on_every_rank(stop_profiler)
        while self.engine.has_unfinished_requests():
            self.engine.step()
        return times, steps

    def capacity(self) -> int:
        """Positions that the cache holds, over all requests."""
        cache = self.engine.vllm_config.cache_config
        return cache.num_gpu_blocks * cache.block_size

    def on_every_rank(self, function: Callable[[Any], Any]) -> list[Any]:
        """What a module's `function` of the worker, or a partial of one, gives on each rank."""
        return self.llm.collective_rpc(function)

    def report(self) -> list[dict[str, Any]]:
        """Every rank's `status`."""
        return self.on_every_rank(status)

    def metrics(self) -> dict[str, float]:
        """The values of ``LLM.get_metrics()`` that are NWOR's, speculation's, preemption's and connectors' hits."""
        wanted = ("vllm:nwor_", "vllm:spec_decode_", "vllm:num_preemptions", "vllm:external_prefix_cache_")
        return {
            metric.name.removeprefix("vllm:"): metric.value
            for metric in self.llm.get_metrics()
            if metric.name.startswith(wanted) and hasattr(metric, "value")
        }

    def _spec_counters(self) -> tuple[dict[str, int], list[int]]:
        """`Generation.counters` and `accepted_at`, since the engine's start."""
        metrics = {metric.name.removeprefix("vllm:spec_decode_num_"): metric for metric in self.llm.get_metrics()}
        at = metrics.get("accepted_tokens_per_pos")
        names = ("drafts", "draft_tokens", "accepted_tokens")
        counters = {name: int(metrics[name].value) if at else 0 for name in names}
        return counters, list(at.values) if at else []


def start_profiler(worker: Any) -> None:
    """Record this worker's kernels from here on: those of its GPU, or on a CPU torch's operators."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    kind = ProfilerActivity.CUDA if torch.cuda.is_available() else ProfilerActivity.CPU
    worker.nwor_profiler = profile(activities=[kind])
    worker.nwor_profiler.start()


def stop_profiler(worker: Any) -> dict[str, float]:
    """Microseconds by kernel name since `start_profiler`, all that was launched by then included."""
    import torch
    from torch.autograd import DeviceType

    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.synchronize()
    worker.nwor_profiler.stop()
    events = worker.nwor_profiler.key_averages()
    del worker.nwor_profiler
    if on_gpu:
        events = [event for event in events if event.device_type == DeviceType.CUDA]
        return {event.key: float(event.self_device_time_total) for event in events}
    return {event.key: float(event.self_cpu_time_total) for event in events}
