# SPDX-License-Identifier: Apache-2.0
"""Engines under the sampled auditor, many after each other in one child process."""

import os
import sys
import tempfile
import tomllib
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from nwor_lab import paths

PROMPTS = [[(7 * i + 13 * j) % 250 + 3 for j in range(10 + 23 * i % 150)] for i in range(13)]
KINDS = ("bytes", "token", "rejected", "unwritten")


class Engines:
    """A child process that makes an engine a call; importing vLLM is paid for once."""

    def __init__(self) -> None:
        self._metadata = tempfile.TemporaryDirectory()
        write_metadata(Path(self._metadata.name))
        self._pool = ProcessPoolExecutor(1, get_context("spawn"), _find_plugins_in, (self._metadata.name,))

    def run(
        self,
        arguments: Mapping[str, Any],
        environ: Mapping[str, str],
        script: Callable[[Any], Any],
        fault: Callable[[Any], None] | None = None,
    ) -> Any:
        """What `script` makes of a ``vllm.LLM`` with these arguments; a RuntimeError with what stopped it, if any.

        fault: given pytest's `MonkeyPatch`, which is undone with the engine.
        """
        return self._pool.submit(_run, dict(arguments), dict(environ), script, fault).result()

    def close(self) -> None:
        self._pool.shutdown()
        self._metadata.cleanup()


def _find_plugins_in(folder: str) -> None:
    sys.path.append(folder)


def write_metadata(folder: Path) -> None:
    """What an installed distribution leaves there, by which vLLM finds the plugin in each process it starts."""
    project = tomllib.loads((paths.ROOT / "kv_audit" / "pyproject.toml").read_text())["project"]
    entry = folder / f"vllm_kv_audit-{project['version']}.dist-info"
    entry.mkdir()
    (entry / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    lines = [f"[{group}]\n{name} = {to}\n" for group, at in project["entry-points"].items() for name, to in at.items()]
    (entry / "entry_points.txt").write_text("".join(lines))


def _run(
    arguments: dict[str, Any],
    environ: dict[str, str],
    script: Callable[[Any], Any],
    fault: Callable[[Any], None] | None,
) -> Any:
    import pytest
    from vllm.distributed import cleanup_dist_env_and_memory

    llm, error, made = None, "", None
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environ.items():
            patch.setenv(name, value)
        try:
            import vllm.plugins

            _unhook()
            vllm.plugins.plugins_loaded = False
            _register_kernels_once(patch)
            import vllm_kv_audit

            vllm_kv_audit.register()
            from vllm import LLM

            if fault is not None:
                fault(patch)
            llm = LLM(**arguments)
            made = script(llm)
        except BaseException:  # noqa: BLE001  (a test may look for it)
            error = traceback.format_exc()
        finally:
            if llm is not None:
                llm.llm_engine.engine_core.shutdown()
            cleanup_dist_env_and_memory()
            os.environ.pop("VLLM_CPU_OMP_THREADS_BIND", None)
    if error:
        raise RuntimeError(error)
    return made


def _unhook() -> None:
    """Restore vLLM's own methods, whichever plugin's hooks lie outside."""
    from vllm_kv_audit import hooks

    from nwor.vllm import patch

    def inside(method: Any) -> int:
        return 1 + inside(method.__wrapped__) if hasattr(method, "__wrapped__") else 0

    found: dict[tuple, list[Any]] = {}
    for (owner, name, *_), original in [*patch._originals.items(), *hooks._originals.items()]:
        found.setdefault((owner, name), []).append(original)
    patch._originals.clear(), hooks._originals.clear()
    for (owner, name), originals in found.items():
        setattr(owner, name, min(originals, key=inside))


def _register_kernels_once(patch: Any) -> None:
    from vllm.platforms import current_platform

    if "numba" in sys.modules and current_platform.is_cpu():  # vLLM breaks over its modules
        patch.setattr(type(current_platform), "register_triton_kernel_overrides", classmethod(lambda cls: None))


def generate(llm: Any, prompts: Any = PROMPTS, max_tokens: int = 40, **sampling: Any) -> list[dict[str, Any]]:
    """Greedy answers for the prompts; what each rank's auditor has found by then."""
    import vllm_kv_audit
    from vllm import SamplingParams

    params = SamplingParams(**{"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True, **sampling})
    llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    return vllm_kv_audit.reports(llm)


def clean_then_planted(llm: Any, run: Callable[[Any], Any] = generate) -> tuple[list[dict], list[dict]]:
    """Every rank's report of a run, and then of the same with faults of each kind planted."""
    run(llm)
    clean = llm.collective_rpc("kv_audit_report")
    llm.collective_rpc(plant, args=(dict.fromkeys(KINDS, 0.2),))
    run(llm)
    return clean, llm.collective_rpc("kv_audit_report")


def plant(worker: Any, probabilities: dict[str, float]) -> None:
    """Let this rank's auditor plant faults from here on."""
    from vllm_kv_audit.perturb import Perturb

    worker.model_runner.kv_auditor.perturb = Perturb(worker.model_runner.kv_auditor, probabilities)


def environment(audit: str = "sample=16", perturb: str = "", mode: str = "off") -> dict[str, str]:
    """Variables of an audited engine in one process."""
    return {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "CRITICAL",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NWOR_MODE": mode,
        "VLLM_KV_AUDIT": audit,
        "VLLM_KV_AUDIT_PERTURB": perturb,
    }
