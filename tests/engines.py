# SPDX-License-Identifier: Apache-2.0
"""Engines for tests: many small ones after each other in one child process, with faults injected on request."""

import gc
import multiprocessing
import os
import sys
import traceback
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from typing import Any

from nwor.settings import Settings
from nwor_lab.engines.child import Generation, Served, status
from nwor_lab.engines.spec import EngineSpec

ASKED = ("prompts", "max_tokens", "temperature", "seed", "logprobs", "sampling")
NOTES: list[str] = []
PROMPTS = [[(7 * i + 13 * j) % 250 + 3 for j in range(10 + 23 * i % 150)] for i in range(13)]


@dataclass
class Outcome:
    """What an engine did.

    scripts: what each call's `script` returned.
    audits: what the audit found on rank 0 during each call with a `fault` or a `script` of its own.
    notes: what its process added to `NOTES`.
    """

    generations: list[Generation] = field(default_factory=list)
    ranks: list[dict[str, Any]] = field(default_factory=list)
    audits: list[dict[str, Any]] = field(default_factory=list)
    scripts: list[Any] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    counters_after_start: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def generation(self) -> Generation:
        """The only one."""
        [generation] = self.generations
        return generation

    @property
    def tokens(self) -> list[list[int]]:
        return self.generation.tokens

    @property
    def audit(self) -> dict[str, int]:
        return self.ranks[0]["audit"]


class Engines:
    """A child process that builds one engine per call; importing vLLM is paid for once."""

    def __init__(self) -> None:
        self._pool = _new_process()

    def run(
        self,
        spec: EngineSpec,
        settings: Settings,
        fault: Callable[[], None] | None = None,
        calls: Sequence[dict[str, Any]] = ({},),
        **call: Any,
    ) -> Outcome:
        """Build an engine, generate for `PROMPTS` greedily unless `call` says otherwise, and tear it down.

        Raises a RuntimeError with the traceback of what stopped the engine, if something did.

        calls: what differs between several generations by the one engine. Beside the arguments of `Engine.generate`,
            ``abandon`` is how many steps other requests run for before they are aborted and these begin, ``fault`` is
            injected for as long and audited apart, ``script`` is called with the `Served` instead of all else,
            ``asleep`` says that the engine sleeps and is woken first, and ``joined`` lists the tokens by which the
            prompt of a request that joins the first prompt's goes on behind all of that one's tokens (`_join`).
        """
        each = [{"prompts": PROMPTS, "max_tokens": 40, **call, **more} for more in calls]
        try:
            return self._pool.submit(_run, spec, settings, fault, each).result()
        except BrokenProcessPool:  # a device-side assertion, say: the next engine gets a process of its own
            self._pool = _new_process()
            raise

    def close(self) -> None:
        self._pool.shutdown()


def _new_process() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), initializer=_freeze_imports)


def _freeze_imports() -> None:
    """Keep what vLLM imports out of the ten collections of garbage that it makes for each engine: 4 of 5 seconds."""
    import vllm.entrypoints.llm  # noqa: F401

    gc.collect()
    gc.freeze()
    gc.freeze = gc.unfreeze = lambda: None


def _unhook() -> None:
    """Restore vLLM's own methods, whichever plugin's hooks lie outside."""
    from vllm_kv_audit import hooks as sampled

    from nwor.vllm import patch
    from nwor_lab.audit import hooks

    def hooks_inside(method: Any) -> int:
        return 1 + hooks_inside(method.__wrapped__) if hasattr(method, "__wrapped__") else 0

    found: dict[tuple, list[Any]] = {}
    for wrapped in (patch._originals, hooks._wrapped, sampled._originals):
        for (owner, name, *_), original in wrapped.items():
            found.setdefault((owner, name), []).append(original)
        wrapped.clear()
    for (owner, name), originals in found.items():
        setattr(owner, name, min(originals, key=hooks_inside))


def _run(
    spec: EngineSpec, settings: Settings, fault: Callable[[], None] | None, calls: list[dict[str, Any]]
) -> Outcome:
    import pytest
    import vllm.plugins
    import vllm_kv_audit
    from vllm.compilation.monitor import set_cudagraph_capturing_enabled
    from vllm.distributed import cleanup_dist_env_and_memory

    _unhook()
    vllm.plugins.plugins_loaded = False
    set_cudagraph_capturing_enabled(True)  # an engine of the V1 runner leaves it off, and the V2 runner as it is
    environ = {**spec.environ(), **settings.environ(), "VLLM_CPU_KVCACHE_SPACE": "1"}
    outcome, served, error = Outcome(), None, ""
    NOTES.clear()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environ.items():
            patch.setenv(name, value)
        try:
            _compile_grammars_at_once(patch)
            _register_kernels_once(patch)
            vllm_kv_audit.register()  # as vLLM does where it is installed
            if fault is not None:
                fault(patch)
            served = Served(spec)
            outcome.counters_after_start = dict(served.on_every_rank(status)[0]["counters"])
            for call in calls:
                if "script" in call:
                    outcome.scripts.append(call["script"](served))
                    outcome.audits.append(served.on_every_rank(_end_audit)[0])
                    continue
                if "abandon" in call:
                    _abandon(served, call["prompts"], call["abandon"])
                if call.get("asleep"):
                    served.engine.sleep(level=1)
                    served.engine.wake_up()
                if "joined" in call:
                    outcome.generations.append(_join(served, call["prompts"][0], call["max_tokens"], call["joined"]))
                    continue
                with pytest.MonkeyPatch.context() as for_this_call:
                    if "fault" in call:
                        call["fault"](for_this_call)
                    asked = {name: call[name] for name in ASKED if name in call}
                    outcome.generations.append(served.generate(**asked))
                if "fault" in call:
                    outcome.audits.append(served.on_every_rank(_end_audit)[0])
            outcome.notes = [*NOTES]
            outcome.ranks, outcome.metrics = served.on_every_rank(status), served.metrics()
        except BaseException:  # noqa: BLE001  (a test may look for it)
            error = traceback.format_exc()
        finally:
            try:
                if served is not None:
                    served.engine.engine_core.shutdown()
            except BaseException:  # noqa: BLE001
                error = error or traceback.format_exc()
            cleanup_dist_env_and_memory()
            os.environ.pop("VLLM_CPU_OMP_THREADS_BIND", None)
    if error:
        raise RuntimeError(error)
    return outcome


def _end_audit(worker: Any) -> dict[str, Any]:
    """What the audit found, which begins anew."""
    from nwor_lab.audit import hooks

    found = hooks.report(worker)
    if (audit := getattr(worker.model_runner, "cache_audit", None)) is not None:
        audit.reset()
    return found


def _compile_grammars_at_once(patch: Any) -> None:
    """Else a request waits for its grammar as long as another thread takes, and no two engines run the same batches."""
    from vllm.v1.structured_output import StructuredOutputManager

    begin = StructuredOutputManager.grammar_init

    def grammar_init(self: Any, request: Any) -> None:
        self._use_async_grammar_compilation = False
        begin(self, request)

    patch.setattr(StructuredOutputManager, "grammar_init", grammar_init)


def _register_kernels_once(patch: Any) -> None:
    """vLLM looks for them in all modules, and breaks over numba's, which an engine with ngram drafts leaves behind."""
    from vllm.platforms.cpu import CpuPlatform

    if "numba" in sys.modules:
        patch.setattr(CpuPlatform, "register_triton_kernel_overrides", classmethod(lambda cls: None))


def _abandon(served: Served, prompts: list[list[int]], steps: int) -> None:
    """Run requests for the prompts in reverse, abort every other one mid-run, and all of them some steps later."""
    names = served.add_requests(prompts[::-1], 200)
    for gone in (names[::2], names[1::2]):
        for _ in range(steps):
            served.engine.step()
        served.engine.abort_request(gone)


def _join(served: Served, prompt: list[int], max_tokens: int, endings: list[list[int]]) -> Generation:
    """Let requests join one that decodes, each in a step in which that one's row 0 fills a block, and ask once more.

    Such a step's scheduling publishes the block: the request that joins finds it in the prefix cache before it is
    written. Asked again when all have ended, each finds what was left there; asked anew, with nothing cached.

    Returns:
        Of the first request, of those that joined it, and of the same asked again and anew; `text` names them.
    """
    from vllm import SamplingParams

    scheduler = served.engine.engine_core.engine_core.scheduler
    block_size = served.engine.vllm_config.cache_config.block_size
    finished: dict[str, Any] = {}
    joined: list[list[int]] = []

    def add(name: str, tokens: list[int], length: int) -> None:
        sampling = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True, logprobs=5)
        served.engine.add_request(name, {"prompt_token_ids": tokens}, sampling)

    def step() -> None:
        for output in served.engine.step():
            if output.finished:
                finished[output.request_id] = output.outputs[0]

    add("0", prompt, max_tokens)
    while served.engine.has_unfinished_requests():
        first = next((request for name, request in scheduler.requests.items() if name.startswith("0")), None)
        if first is not None and first.spec_token_ids and len(first.all_token_ids) % block_size == 0 and endings:
            ending, *endings = endings
            joined.append([*first.all_token_ids, *ending])
            add(f"joined {len(joined)}", joined[-1], 12)
        step()
    assert not endings, f"only {len(joined)} requests joined: let the first run for longer"
    for when in ("again", "anew"):
        if when == "anew":
            assert served.engine.reset_prefix_cache()
        for index, tokens in enumerate(joined, start=1):
            add(f"{when} {index}", tokens, 12)
        while served.engine.has_unfinished_requests():
            step()
    names = sorted(finished)
    return Generation(
        tokens=[list(finished[name].token_ids) for name in names],
        text=names,
        step_seconds=[],
        counters={},
        accepted_at=[],
        top_logprobs=[
            [{token: entry.logprob for token, entry in place.items()} for place in finished[name].logprobs]
            for name in names
        ],
    )


def in_child(function: Callable[..., Any], *arguments: Any) -> Any:
    """What `function` gives in a process of its own, with whatever that one starts."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def started(spec: EngineSpec, settings: Settings) -> tuple[Served, Any]:
    """An engine in this very process, which has had none (`in_child`), and its worker."""
    os.environ.update({**spec.environ(), **settings.environ(), "VLLM_CPU_OMP_THREADS_BIND": "nobind"})
    served = Served(spec)
    return served, served.engine.engine_core.engine_core.model_executor.driver_worker.worker


def serve_and_end(spec: EngineSpec, settings: Settings) -> tuple[bool, bool]:
    """Whether our view of the caches lives while the engine does, and after it, the target's layers still in hand."""
    served, worker = started(spec, settings)
    from nwor.vllm.context import target_layers

    served.generate(PROMPTS[:2], 8)
    layers, manager = target_layers(worker.model_runner), weakref.ref(worker.model_runner.nwor.manager)
    lived = manager() is not None and all(layer.nwor.manager is manager() for layer in layers.values())
    served.engine.engine_core.shutdown()
    gc.collect()
    return lived, manager() is not None


def serve_in_turn(spec: EngineSpec, modes: Sequence[str]) -> list[tuple[str, bool]]:
    """Of engines that one script makes, each in processes that vLLM starts: what serves, and whether it is counted."""
    os.environ.update({**spec.environ(), "VLLM_CPU_OMP_THREADS_BIND": "nobind"})
    os.environ.update({"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"})
    found = []
    for mode in modes:
        os.environ.update(Settings(mode=mode).environ())
        served = Served(spec)
        served.generate(PROMPTS[:2], 8)
        found.append((served.on_every_rank(status)[0]["serving"], served.metrics().get("nwor_windows", 0) > 0))
        served.engine.engine_core.shutdown()
    return found
