# SPDX-License-Identifier: Apache-2.0
"""vLLM engines in child processes, one a mode, all up at once, so that baseline and treatment take turns in one run.

A child gets its mode through the environment before vLLM is imported, holds one engine, and answers two calls:
`Engine.generate` and `Engine.report`.
"""

import contextlib
import multiprocessing
import os
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from nwor.settings import Settings
from nwor.vllm.worker import status as mode_status
from nwor_lab.audit import hooks
from nwor_lab.engines import pause, profiler
from nwor_lab.engines.random_weights import ASKED, FORMAT
from nwor_lab.machine import on_cpu


@dataclass(frozen=True)
class EngineSpec:
    """One engine's configuration but for its mode; field names are vLLM's own where it has them.

    model, draft: folders or hub names; draft is empty for methods without a model (``ngram``).
    method: vLLM's speculative method; k is its ``num_speculative_tokens``.
    num_blocks: cache blocks, or 0 for as many as vLLM finds room for.
    kv_cache_memory: MiB of cache on each GPU, or 0 for what `gpu_memory_utilization` leaves. Given, vLLM measures
        nothing at start-up, so engines may start side by side.
    load_format: ``auto``, or ``nwor_random`` for random weights of the model's shape (`engines.random_weights`).
    gpu_memory_utilization: share of a GPU for each engine; the modes' engines are up at once.
    cpu_threads: cores of each rank on a CPU, 0 for an equal share of all; small models run best on one.
    acceptance_length: synthetic mean acceptance length, bonus token included; 0 for the real rejection sampler.
    async_scheduling: whether the scheduler runs a step ahead, or None for vLLM's own choice.
    runner: vLLM's model runner, ``v1`` or ``v2``, or empty for its own choice: V2 on a GPU, V1 on a CPU.
    attention_backend: ``FLASH_ATTN``, ``TRITON_ATTN`` or another of vLLM's, or empty for its own choice.
    cudagraph_mode: ``FULL``, ``PIECEWISE`` or another of vLLM's, or empty for its own choice, FULL_AND_PIECEWISE.
    cudagraph_capture_sizes: tokens of a batch for which graphs are captured, or empty for vLLM's own choice, which on
        an H200 ends at 512: larger batches run without one.
    """

    model: str
    draft: str = ""
    method: str = "eagle"
    k: int = 4
    tp: int = 1
    dtype: str = "bfloat16"
    kv_cache_dtype: str = "auto"
    batch: int = 8
    max_num_batched_tokens: int = 256
    max_model_len: int = 512
    num_blocks: int = 0
    block_size: int = 0
    enforce_eager: bool = True
    prefix_caching: bool = False
    async_scheduling: bool | None = None
    kv_cache_memory: int = 0
    load_format: str = "auto"
    gpu_memory_utilization: float = 0.3
    cpu_threads: int = 1
    acceptance_length: float = 0.0
    runner: str = ""
    attention_backend: str = ""
    cudagraph_mode: str = ""
    cudagraph_capture_sizes: tuple[int, ...] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("k", "tp", "batch", "max_num_batched_tokens", "max_model_len"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.runner not in ("", "v1", "v2"):
            raise ValueError(f"runner must be v1, v2 or empty for vLLM's own choice, got {self.runner!r}")
        if self.enforce_eager and (self.cudagraph_mode or self.cudagraph_capture_sizes):
            raise ValueError("graphs are asked for and ruled out: leave out enforce_eager (--no-enforce-eager)")
        for path in filter(None, (self.model, self.draft)):
            if path.startswith((".", "/")) and not (Path(path) / "config.json").is_file():
                raise FileNotFoundError(f"{path} holds no config.json; give a model's folder or its name on the hub")

    def llm_arguments(self) -> dict[str, Any]:
        """Arguments of ``vllm.LLM``."""
        speculative: dict[str, Any] = {"method": self.method, "num_speculative_tokens": self.k}
        if self.draft:
            speculative["model"] = self.draft
        if self.method == "ngram":
            speculative["prompt_lookup_max"] = 3
        if self.acceptance_length:
            speculative["rejection_sample_method"] = "synthetic"
            speculative["synthetic_acceptance_length"] = self.acceptance_length
        arguments: dict[str, Any] = {
            "model": self.model,
            "speculative_config": speculative,
            "tensor_parallel_size": self.tp,
            "dtype": self.dtype,
            "kv_cache_dtype": self.kv_cache_dtype,
            "max_num_seqs": self.batch,
            "max_num_batched_tokens": self.max_num_batched_tokens,
            "max_model_len": self.max_model_len,
            "enforce_eager": self.enforce_eager,
            "enable_prefix_caching": self.prefix_caching,
            "load_format": self.load_format,
            "skip_tokenizer_init": self.load_format == FORMAT,
            "gpu_memory_utilization": self.gpu_memory_utilization,
            "seed": self.seed,
            "disable_log_stats": False,
            "use_tqdm_on_load": False,
        }
        if self.async_scheduling is not None:
            arguments["async_scheduling"] = self.async_scheduling
        if self.num_blocks:
            arguments["num_gpu_blocks_override"] = self.num_blocks
        if self.block_size:
            arguments["block_size"] = self.block_size
        if self.kv_cache_memory:
            arguments["kv_cache_memory_bytes"] = self.kv_cache_memory << 20
        if self.attention_backend:
            arguments["attention_backend"] = self.attention_backend
        graphs = {"cudagraph_mode": self.cudagraph_mode, "cudagraph_capture_sizes": list(self.cudagraph_capture_sizes)}
        if given := {name: value for name, value in graphs.items() if value}:
            arguments["compilation_config"] = given
        return arguments

    def environ(self, core: int = 0) -> dict[str, str]:
        """Environment of a child.

        Repeatable batches, and on a CPU a small cache and cores of its own for each rank, the first of them `core`
        counted on from the first that this process may use.
        """
        env = {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_LOGGING_LEVEL": "ERROR",
            "PYTHONWARNINGS": "ignore::FutureWarning",  # vLLM's own, of torch's names, from every process
        }
        if self.load_format == FORMAT:
            env[ASKED] = "1"
        if self.runner:
            env["VLLM_USE_V2_MODEL_RUNNER"] = str(int(self.runner == "v2"))
        if Path(self.model).is_dir():
            env["HF_HUB_OFFLINE"] = "1"
        if on_cpu():
            env["VLLM_CPU_KVCACHE_SPACE"] = "1"
            cores = sorted(os.sched_getaffinity(0))
            cores = cores[core % len(cores) :] + cores[: core % len(cores)]
            share = self.cpu_threads or max(1, len(cores) // self.tp)
            parts = [cores[rank * share : (rank + 1) * share] for rank in range(self.tp)]
            if all(len(part) == share for part in parts):
                env["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(",".join(map(str, part)) for part in parts)
        return env


@dataclass
class Generation:
    """What one call of `Engine.generate` gave.

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


class Engine:
    """A vLLM engine in a child process.

    Args:
        spec: its configuration.
        settings: the mode and what else NWOR is asked for.
        core: on a CPU the first core of its ranks, as in `EngineSpec.environ`. Engines whose steps are compared share
            their cores and take turns; others may run side by side.

    Raises:
        RuntimeError: the engine does not start, or a call fails; the child's traceback is in the message.
    """

    def __init__(self, spec: EngineSpec, settings: Settings, core: int = 0) -> None:
        self.spec, self.settings = spec, settings
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        environ = {**spec.environ(core), **settings.environ()}
        self._process = context.Process(target=_serve, args=(spec, environ, theirs), name=f"nwor-{settings.mode}")
        self._process.start()
        theirs.close()
        self._ready = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def wait(self) -> None:
        """Return once the engine is up. Engines start side by side, and each is waited for before its first call."""
        if not self._ready:
            self._receive("start")
            self._ready = True

    def generate(
        self,
        prompts: Sequence[list[int]],
        max_tokens: int,
        temperature: float = 0.0,
        seed: int = 0,
        logprobs: int = 0,
        sampling: Sequence[dict[str, Any]] = (),
    ) -> Generation:
        """Generate for all prompts (token ids) at once.

        Request i draws with seed `seed + i` on a GPU, synthetic acceptance too. On a CPU the engine's own seed has to
        do: a request's own generator fails there beside a chunked prefill ("CPU Generator does not use offset").

        sampling: further fields of vLLM's `SamplingParams`; requests take them in turn. Its `structured_outputs` is a
            dict here. With `n` the answers of a prompt follow each other.
        """
        return self._call("generate", list(prompts), max_tokens, temperature, seed, logprobs, list(sampling))

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of the texts, by the model's own tokenizer."""
        return self._call("encode", list(texts))

    def capacity(self) -> int:
        """Positions that the cache holds, over all requests."""
        return self._call("capacity")

    def report(self) -> list[dict[str, Any]]:
        """Every rank's `status`."""
        return self._call("on_every_rank", status)

    def kernel_times(self, prompts: Sequence[list[int]], max_tokens: int) -> tuple[list[dict[str, float]], int]:
        """Microseconds by kernel name on each rank over a few decode steps, and how many steps those were.

        From torch's profiler. Greedy; prefill is left out.
        """
        return self._call("kernel_times", list(prompts), max_tokens)

    def stop_audit(self) -> None:
        """End the audit, if there is one; its report stays, and the steps that follow may be timed."""
        self._call("on_every_rank", hooks.stop_audit)

    def pause(self) -> None:
        """Let vLLM alone serve, until `resume`; see `nwor_lab.engines.pause`. An audit that is not over counts on."""
        self._call("on_every_rank", pause.pause)

    def resume(self) -> None:
        """Let the mode serve again."""
        self._call("on_every_rank", pause.resume)

    def capture_anew(self) -> None:
        """Capture the graphs that a pause exchanges again; see `nwor_lab.engines.pause`."""
        self._call("on_every_rank", pause.capture_anew)

    def metrics(self) -> dict[str, float]:
        """The ``vllm:nwor_*``, ``vllm:spec_decode_*`` and ``vllm:num_preemptions`` values of ``LLM.get_metrics()``."""
        return self._call("metrics")

    def close(self) -> None:
        if self._process.is_alive():
            with contextlib.suppress(OSError):
                self._pipe.send(None)
            self._process.join(timeout=30)
            if self._process.is_alive():
                self._process.terminate()
        self._process.join()
        self._pipe.close()

    def _call(self, name: str, *arguments: Any) -> Any:
        self.wait()
        self._pipe.send((name, arguments))
        return self._receive(name)

    def _receive(self, doing: str) -> Any:
        try:
            good, answer = self._pipe.recv()
        except EOFError:
            self._process.join()
            raise RuntimeError(
                f"the {self.settings.mode} engine died at {doing} with exit code {self._process.exitcode}"
            ) from None
        if not good:
            raise RuntimeError(f"the {self.settings.mode} engine failed at {doing}:\n{answer}")
        return answer


def status(worker: Any) -> dict[str, Any]:
    """A rank's `nwor.vllm.worker.Status` as a dict, with what its audit found (`nwor_lab.audit.hooks.report`)."""
    return {**mode_status(worker), **hooks.report(worker)}


def _serve(spec: EngineSpec, environ: dict[str, str], pipe: Connection) -> None:
    os.environ.update(environ)
    warnings.simplefilter("ignore", FutureWarning)  # as PYTHONWARNINGS does in processes that start from here
    served = None
    try:
        served = _Served(spec)
        pipe.send((True, None))
        while (call := pipe.recv()) is not None:
            name, arguments = call
            pipe.send((True, getattr(served, name)(*arguments)))
    except EOFError:  # the parent is gone
        return
    except BaseException:  # noqa: BLE001  (the parent raises it)
        pipe.send((False, traceback.format_exc()))
    finally:
        if served is not None:
            served.engine.engine_core.shutdown()


class _Served:
    """The child's side."""

    def __init__(self, spec: EngineSpec) -> None:
        from vllm import LLM

        self.spec, self.llm = spec, LLM(**spec.llm_arguments())
        self.engine = self.llm.llm_engine
        self.calls = 0

    def encode(self, texts: list[str]) -> list[list[int]]:
        tokenizer = self.llm.get_tokenizer()
        return [list(tokenizer.encode(text)) for text in texts]

    def generate(self, prompts: list[list[int]], max_tokens: int, *how: Any) -> Generation:
        before, before_at = self._spec_counters()
        self._add(prompts, max_tokens, *how)
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

    def _add(
        self,
        prompts: list[list[int]],
        max_tokens: int,
        temperature: float = 0.0,
        seed: int = 0,
        logprobs: int = 0,
        sampling: Sequence[dict[str, Any]] = (),
    ) -> list[str]:
        """Queue the requests and return their names."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

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
            if "structured_outputs" in fields:
                fields["structured_outputs"] = StructuredOutputsParams(**fields["structured_outputs"])
            self.engine.add_request(name, {"prompt_token_ids": prompt}, SamplingParams(**fields))
        return names

    def kernel_times(self, prompts: list[list[int]], max_tokens: int) -> tuple[list[dict[str, float]], int]:
        self._add(prompts, max_tokens)
        chunks = sum(map(len, prompts)) // self.spec.max_num_batched_tokens
        for _ in range(chunks + 4):  # every request is decoding from then on
            self.engine.step()
        steps = 8
        self.on_every_rank(profiler.start_profiler)
        for _ in range(steps):
            self.engine.step()
        times = self.on_every_rank(profiler.stop_profiler)
        while self.engine.has_unfinished_requests():
            self.engine.step()
        return times, steps

    def capacity(self) -> int:
        cache = self.engine.vllm_config.cache_config
        return cache.num_gpu_blocks * cache.block_size

    def on_every_rank(self, function: Callable[[Any], Any]) -> list[Any]:
        """What `function` of the worker gives on each rank."""
        return self.llm.collective_rpc(function)

    def metrics(self) -> dict[str, float]:
        wanted = ("vllm:nwor_", "vllm:spec_decode_", "vllm:num_preemptions")
        return {
            metric.name.removeprefix("vllm:"): metric.value
            for metric in self.llm.get_metrics()
            if metric.name.startswith(wanted) and hasattr(metric, "value")
        }

    def _spec_counters(self) -> tuple[dict[str, int], list[int]]:
        counters = {"drafts": 0, "draft_tokens": 0, "accepted_tokens": 0}
        accepted_at: list[int] = []
        for metric in self.llm.get_metrics():
            if metric.name == "vllm:spec_decode_num_accepted_tokens_per_pos":
                accepted_at = list(metric.values)
            elif metric.name.startswith("vllm:spec_decode_num_"):
                counters[metric.name.removeprefix("vllm:spec_decode_num_")] = int(metric.value)
        return counters, accepted_at
