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
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Self

from nwor.settings import Settings
from nwor_lab.engines import child
from nwor_lab.engines.child import Generation
from nwor_lab.engines.spec import EngineSpec

__all__ = ["Engine", "EngineError", "EngineSpec", "Generation"]


class EngineError(RuntimeError):
    """An engine failed; the message says which, at what and why, and names its log."""


class Engine:
    """A vLLM engine in a child process, with the methods of `child.Served`.

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

    def __exit__(self, *error: object) -> None:
        self.close()

    def wait(self) -> None:
        """Return once the engine is up. Engines start side by side, and each is waited for before its first call."""
        if not self._ready:
            self._receive("start")
            self._ready = True

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """A method of `child.Served`, which is called in the child; what it is given and returns is pickled."""
        if not hasattr(child.Served, name):
            raise AttributeError(f"an engine has no {name}")
        return partial(self._call, name)

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

    def _call(self, name: str, *arguments: Any, **named: Any) -> Any:
        self.wait()
        with contextlib.suppress(BrokenPipeError):  # it has died, as what follows finds
            self._pipe.send((name, arguments, named))
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
