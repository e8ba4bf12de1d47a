# SPDX-License-Identifier: Apache-2.0
"""vLLM's own server, one a mode, in a process group of its own that ends with the run.

All servers of a run are up at once and one of them is loaded: an idle one waits without a busy loop (measured on a
CPU: no second of processor time in 15).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from nwor.settings import CLEAN, Settings
from nwor_lab import machine
from nwor_lab.engines.engine import EngineError
from nwor_lab.engines.spec import EngineSpec

SERVED = "nwor"
"""Name by which every server serves its model."""
AUDITED = "kv audit"
"""Name of the server in which nothing but the sampled auditor is."""
PLUGINS = {"off": "nwor_lab", AUDITED: "nwor_lab,kv_audit"}
"""What vLLM loads where it never loads NWOR's plugin, so that nothing of NWOR's is in it."""
GRACE = 15.0
"""Seconds that a server has to end by itself."""


def words(spec: EngineSpec) -> list[str]:
    """The options of vLLM's command line that `EngineSpec.llm_arguments` stand for."""
    arguments = spec.llm_arguments()
    del arguments["skip_tokenizer_init"], arguments["disable_log_stats"]  # a server needs the one and keeps the others
    made: list[str] = []
    for name, value in arguments.items():
        option = name.replace("_", "-")
        if isinstance(value, bool):
            made.append(f"--{option}" if value else f"--no-{option}")
        else:
            made += [f"--{option}", json.dumps(value) if isinstance(value, dict) else str(value)]
    return made


def environment(spec: EngineSpec, mode: str) -> dict[str, str]:
    """Environment of a server."""
    if mode in PLUGINS:
        spec = replace(spec, plugins=PLUGINS[mode])
    settings = Settings(mode="off" if mode == AUDITED else mode)
    made = {**os.environ, **spec.environ(), **settings.environ()}
    del made["VLLM_ENABLE_V1_MULTIPROCESSING"]  # a server's engine is a process of its own
    return made | {"VLLM_LOGGING_LEVEL": "INFO", "VLLM_LOGGING_STREAM": "ext://sys.stdout"}


class Server:
    """vLLM's server of one mode, started at once.

    Attributes:
        mode: of ``off``, ``cow``, ``direct`` and ``stage``, or `AUDITED`.
        url: where it answers, on this machine alone.
        log: file of what it prints.
    """

    def __init__(self, mode: str, command: Sequence[str], environ: Mapping[str, str], log: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.mode, self.log, self.url = mode, log, f"http://127.0.0.1:{port}"
        log.parent.mkdir(parents=True, exist_ok=True)
        with open(log, "w") as out:
            self._process = subprocess.Popen(
                [*machine.ENDING_WITH_PARENT, *command, "--host", "127.0.0.1", "--port", str(port)],
                env=dict(environ), stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip

    @classmethod
    def of(cls, spec: EngineSpec, mode: str, log: Path) -> Server:
        """The server of a mode, by the entry point that every build has: `vllm serve` asks for vLLM's own name."""
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *words(spec)]
        command += ["--served-model-name", SERVED, "--disable-uvicorn-access-log"]
        return cls(mode, command, environment(spec, mode), log)

    def check(self, doing: str, failed: bool = False) -> None:
        """Raise `EngineError`, with the end of the log, if the server died, or if `failed` is true all the same."""
        code = self._process.poll()
        if failed or code is not None:
            what = "failed" if code is None else f"died with exit code {code}"
            end = "\n".join(self.log.read_text(errors="replace").splitlines()[-12:])
            raise EngineError(f"the server of {self.mode} {what} {doing}; the end of its log {self.log}:\n{end}")

    def wait(self, seconds: float) -> None:
        """Return once it answers `/health`; raise `EngineError` if it dies, or does not within `seconds`."""
        until = time.monotonic() + seconds
        while True:
            late = time.monotonic() > until
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.url}/health", timeout=5) as answer:
                if answer.status == 200:
                    return
            self.check("to start in time" if late else "while it started", failed=late)
            time.sleep(0.5)

    def proof(self, loaded: bool) -> dict[str, float]:
        """Proof of treatment: the layers served by the mode's line in the log, and what `/metrics` counts of it.

        Args:
            loaded: it has had requests, so that a mode that holds drafts must have counted windows.

        Raises:
            EngineError: the mode is not active, or counts differ from vLLM's; for `off`, NWOR is there.
        """
        self.check("before its counters were read")
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=30) as answer:
            counters = read_counters(answer.read().decode())
        said = re.findall(r"NWOR mode .*", self.log.read_text(errors="replace"))
        if wrong := missing_proof(self.mode, said, counters, loaded):
            raise EngineError(f"nothing may be measured as {self.mode}: {wrong}; its server's log: {self.log}")
        served = layers_served(self.mode, said)
        return {"layers": min(served, default=0), "ranks": len(served), **counters}

    def ask_to_end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGTERM)

    def close(self) -> None:
        """End it, with all processes that it started."""
        self.ask_to_end()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(GRACE)
        with contextlib.suppress(ProcessLookupError):  # an engine that outlives its server
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def layers_served(mode: str, said: Sequence[str]) -> list[int]:
    """By rank the layers that a mode serves, by the lines that it has said of itself."""
    return [int(n) for line in said for n in re.findall(rf"mode {mode} serves (\d+) layers", line)]


def missing_proof(mode: str, said: Sequence[str], counters: Mapping[str, float], loaded: bool) -> str:
    """Why a server does not prove that it serves its mode, and that alone; empty where it does."""
    if mode == AUDITED and loaded and not counters.get("slots_checked_total"):
        return "no slot was checked"
    if mode == AUDITED and counters.get("findings_total"):
        return f"{counters['findings_total']:.0f} findings, of faults that nobody planted"
    if mode in PLUGINS:
        return "vLLM is patched" if said or (counters and mode == "off") else ""
    if not layers_served(mode, said):
        return f"the mode is not active: {'; '.join(said) or 'no word of it in the log'}"
    if loaded and mode in CLEAN and not counters.get("windows_total"):
        return "no window was opened"
    return "commits differ from what the scheduler accepted" * bool(counters.get("scheduler_mismatches_total"))


def read_counters(text: str) -> dict[str, float]:
    """Values of ``vllm:nwor_*`` and ``vllm:kv_audit_*`` in the text of `/metrics`, whichever there are, without the
    prefix.
    """
    found: dict[str, float] = {}
    for name, value in re.findall(r"^vllm:(?:nwor|kv_audit)_(\w+)(?:{.*})? (\S+)$", text, re.MULTILINE):
        if not name.endswith("_created"):
            found[name] = found.get(name, 0.0) + float(value)
    return found


@contextlib.contextmanager
def ended(servers: dict[str, Server]) -> Iterator[dict[str, Server]]:
    """End all servers that are there by then, whatever happens in the block; another Ctrl-C leaves none behind."""
    try:
        yield servers
    finally:
        before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGTERM, signal.SIGINT)}
        for server in servers.values():
            server.ask_to_end()
        for server in servers.values():
            server.close()
        for number, handler in before.items():
            signal.signal(number, handler)
