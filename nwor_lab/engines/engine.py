# SPDX-License-Identifier: Apache-2.0
"""vLLM engines in child processes, one a mode, all up at once, so that baseline and treatment alternate in one run.

A child gets its mode through the environment before vLLM is imported. What vLLM, torch and Triton print goes to the
child's log, not to the terminal or a notebook's page.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from nwor.settings import Settings
from nwor_lab.engines import child
from nwor_lab.engines.child import Generation
from nwor_lab.engines.spec import EngineSpec
from nwor_lab.engines.traffic import Event, Traffic

__all__ = ["Engine", "EngineError", "EngineSpec", "Generation"]


class EngineError(RuntimeError):
    """An engine failed; the message says which, at what and why, and names its log."""


class Engine:
    """A vLLM engine in a child process.

    Args:
        spec: its configuration.
        settings: the mode and what else NWOR is asked for.
        core: on a CPU the first core of its ranks, as in `EngineSpec.environ`. Engines whose steps are compared share
            their cores and alternate; others may run side by side.
        log: file for what the engine prints; None for a temporary one that is kept only if the engine fails.

    Raises:
        EngineError: the engine does not start, or a call fails.
    """

    def __init__(self, spec: EngineSpec, settings: Settings, core: int = 0, log: Path | None = None) -> None:
        self.spec, self.settings = spec, settings
        self._temporary = log is None
        if log is None:
            file, name = tempfile.mkstemp(prefix=f"nwor-{settings.mode}-", suffix=".log")
            os.close(file)
            log = Path(name)
        log.parent.mkdir(parents=True, exist_ok=True)
        self.log = log
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        environ = {**spec.environ(core), **settings.environ()}
        self._process = context.Process(
            target=child.serve, args=(spec, environ, theirs, str(log)), name=f"nwor-{settings.mode}"
        )
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

        sampling: further fields of vLLM's `SamplingParams`; the requests use them in rotation. Its
            `structured_outputs` is a dict here. With `n` the answers of a prompt follow each other.
        """
        return self._call("generate", list(prompts), max_tokens, temperature, seed, logprobs, list(sampling))

    def traffic(self, events: Sequence[Event], seed: int) -> Traffic:
        """Run a script of events to its end, as `nwor_lab.engines.traffic.drive` says."""
        return self._call("traffic", list(events), seed)

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of the texts, by the model's own tokenizer."""
        return self._call("encode", list(texts))

    def capacity(self) -> int:
        """Positions that the cache holds, over all requests."""
        return self._call("capacity")

    def report(self) -> list[dict[str, Any]]:
        """Every rank's `child.status`."""
        return self.on_every_rank(child.status)

    def on_every_rank(self, function: Callable[[Any], Any]) -> list[Any]:
        """What a module's `function` of the worker, or a partial of one, gives on each rank."""
        return self._call("on_every_rank", function)

    def on_scheduler(self, function: Callable[[Any], Any]) -> Any:
        """What a module's `function` of vLLM's scheduler gives."""
        return self._call("on_scheduler", function)

    def kernel_times(self, prompts: Sequence[list[int]], max_tokens: int) -> tuple[list[dict[str, float]], int]:
        """Microseconds by kernel name on each rank over a few decode steps, and how many steps those were.

        From torch's profiler. Greedy; prefill is left out.
        """
        return self._call("kernel_times", list(prompts), max_tokens)

    def stop_audit(self) -> None:
        """End the audit, if there is one; its report stays, and the steps that follow may be timed."""
        from nwor_lab.audit import hooks

        self.on_every_rank(hooks.stop_audit)

    def pause(self) -> None:
        """Let vLLM alone serve, until `resume`; see `nwor_lab.engines.pause`. An audit that is not over counts on."""
        self._pause("pause")

    def resume(self) -> None:
        """Let the mode serve again."""
        self._pause("resume")

    def capture_anew(self) -> None:
        """Capture the graphs that a pause exchanges again; see `nwor_lab.engines.pause`."""
        self._pause("capture_anew")

    def metrics(self) -> dict[str, float]:
        """The values of ``LLM.get_metrics()`` that are NWOR's, speculation's, preemption's and connectors' hits."""
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
        if self._temporary:
            self.log.unlink(missing_ok=True)

    def _pause(self, name: str) -> None:
        from nwor_lab.engines import pause

        self.on_every_rank(getattr(pause, name))

    def _call(self, name: str, *arguments: Any) -> Any:
        self.wait()
        self._pipe.send((name, arguments))
        return self._receive(name)

    def _receive(self, doing: str) -> Any:
        try:
            good, answer = self._pipe.recv()
        except EOFError:
            self._process.join()
            good, answer = False, f"it died with exit code {self._process.exitcode}"
        if not good:
            self._temporary = False
            raise EngineError(f"the {self.settings.mode} engine failed at {doing}: {answer}; its log: {self.log}")
        return answer
