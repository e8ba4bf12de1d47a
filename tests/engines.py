# SPDX-License-Identifier: Apache-2.0
"""Engines for tests: many small ones after each other in one child process, with faults planted on request."""

import multiprocessing
import os
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from nwor.engine import EngineSpec, Generation, _Served
from nwor.settings import Settings
from nwor.vllm import pause, worker

PROMPTS = [[(7 * i + 13 * j) % 250 + 3 for j in range(10 + 23 * i % 150)] for i in range(13)]


@dataclass
class Outcome:
    """What an engine did, or the traceback of why it stopped."""

    generations: list[Generation] = field(default_factory=list)
    ranks: list[dict[str, Any]] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    counters_after_start: dict[str, int] = field(default_factory=dict)
    error: str = ""

    @property
    def generation(self) -> Generation:
        """The only one."""
        assert len(self.generations) == 1, self.error
        return self.generations[0]

    @property
    def tokens(self) -> list[list[int]]:
        return self.generation.tokens

    @property
    def audit(self) -> dict[str, int]:
        return self.ranks[0]["audit"]


class Engines:
    """A child process that builds one engine per call; importing vLLM is paid for once."""

    def __init__(self) -> None:
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_loop, args=(theirs,))
        self._process.start()
        theirs.close()

    def run(
        self,
        spec: EngineSpec,
        settings: Settings,
        fault: Callable[[], None] | None = None,
        calls: Sequence[dict[str, Any]] = ({},),
        **call: Any,
    ) -> Outcome:
        """Build an engine, generate for `PROMPTS` greedily unless `call` says otherwise, and tear it down.

        calls: what differs between several generations by the one engine. Beside the arguments of `Engine.generate`,
            ``abandon`` is how many steps other requests run for before they are aborted and these begin, and ``paused``
            says that the mode is for as long.
        """
        each = [{"prompts": PROMPTS, "max_tokens": 40, **call, **more} for more in calls]
        self._pipe.send((spec, settings, fault, each))
        try:
            return self._pipe.recv()
        except EOFError:  # a device-side assertion, say: the next engine gets a process of its own
            self._process.join()
            died = Outcome(error=f"the engine's process died with exit code {self._process.exitcode}")
            self._start()
            return died

    def close(self) -> None:
        self._pipe.send(None)
        self._process.join(timeout=60)


def _loop(pipe: Any) -> None:
    while (job := pipe.recv()) is not None:
        pipe.send(_run(*job))


def _run(
    spec: EngineSpec, settings: Settings, fault: Callable[[], None] | None, calls: list[dict[str, Any]]
) -> Outcome:
    import pytest
    import vllm.plugins
    from vllm.compilation.monitor import set_cudagraph_capturing_enabled
    from vllm.distributed import cleanup_dist_env_and_memory

    import nwor.vllm

    nwor.vllm.unregister()
    vllm.plugins.plugins_loaded = False
    set_cudagraph_capturing_enabled(True)  # an engine of the V1 runner leaves it off, and the V2 runner as it is
    environ = {**spec.environ(), **settings.environ(), "VLLM_CPU_KVCACHE_SPACE": "1"}
    outcome, served = Outcome(), None
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environ.items():
            patch.setenv(name, value)
        try:
            _compile_grammars_at_once(patch)
            if fault is not None:
                fault(patch)
            served = _Served(spec)
            outcome.counters_after_start = dict(served.on_every_rank(worker.status)[0]["counters"])
            for call in calls:
                if "abandon" in call:
                    _abandon(served, call["prompts"], call["abandon"])
                if call.get("paused"):
                    served.on_every_rank(pause.pause)
                outcome.generations.append(
                    served.generate(
                        call["prompts"],
                        call["max_tokens"],
                        call.get("temperature", 0.0),
                        call.get("seed", 0),
                        call.get("logprobs", 0),
                        call.get("sampling", ()),
                    )
                )
                if call.get("paused"):
                    served.on_every_rank(pause.resume)
            outcome.ranks, outcome.metrics = served.on_every_rank(worker.status), served.metrics()
        except BaseException:  # noqa: BLE001  (what tests look at)
            outcome.error = traceback.format_exc()
        finally:
            if served is not None:
                served.engine.engine_core.shutdown()
            cleanup_dist_env_and_memory()
            os.environ.pop("VLLM_CPU_OMP_THREADS_BIND", None)
    return outcome


def _compile_grammars_at_once(patch: Any) -> None:
    """Else a request waits for its grammar as long as another thread takes, and no two engines run the same batches."""
    from vllm.v1.structured_output import StructuredOutputManager

    begin = StructuredOutputManager.grammar_init

    def grammar_init(self: Any, request: Any) -> None:
        self._use_async_grammar_compilation = False
        begin(self, request)

    patch.setattr(StructuredOutputManager, "grammar_init", grammar_init)


def _abandon(served: _Served, prompts: list[list[int]], steps: int) -> None:
    """Run requests for the prompts in reverse, abort every other one mid-run, and all of them some steps later."""
    names = served._add(prompts[::-1], 200)
    for gone in (names[::2], names[1::2]):
        for _ in range(steps):
            served.engine.step()
        served.engine.abort_request(gone)
