# SPDX-License-Identifier: Apache-2.0
"""An auditor of vLLM's paged KV cache, for any vLLM 0.32 or 0.33, switched on by ``VLLM_KV_AUDIT``.

It sees whether each slot that a request attends to holds the row of the request's own token, with the bytes that were
written to it; `marks` says how, and ``docs/kv-audit.md`` for whom.
"""

from __future__ import annotations

from typing import Any

from .report import verdict

__all__ = ["register", "reports", "verdict"]


def register() -> None:
    """vLLM's plugin: patch what this process needs; without ``VLLM_KV_AUDIT`` nothing.

    Raises:
        ValueError: a variable has a value that it cannot have.
        RuntimeError: this vLLM is not known.
    """
    from .settings import AUDIT, PERTURB, Settings

    if Settings.from_env() is None:
        return
    from vllm import envs

    from . import hooks, metrics, worker

    hooks.check_version()
    for name in (AUDIT, PERTURB):  # vLLM warns of others; None: they change no compiled graph
        envs.environment_variables.setdefault(name, lambda: None)
    try:
        worker.install()
        metrics.install()
    except BaseException:
        hooks.undo_all()
        raise


def reports(llm: Any) -> list[dict[str, Any]]:
    """What each rank of an engine (``vllm.LLM``) has found up to now, to be given to `verdict`."""
    return llm.collective_rpc("kv_audit_report")
