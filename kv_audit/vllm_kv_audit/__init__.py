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
    """vLLM's plugin: patch what this process needs; without ``VLLM_KV_AUDIT`` nothing but vLLM's loader of plugins.

    Raises:
        ValueError: a variable has a value that it cannot have.
        RuntimeError: this vLLM is not known.
    """
    from .settings import AUDIT, PERTURB, Settings

    _be_asked_for_each_engine()
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


def _be_asked_for_each_engine() -> None:
    """Let vLLM, which calls a plugin once a process, call `register` for each engine that it makes there.

    One for which an audit is asked after another without would have no auditor otherwise, and nothing would say so.
    """
    from vllm import plugins

    original = around = plugins.load_general_plugins
    while around is not None:  # another plugin's may be around ours
        if around.__module__ == __name__:
            return
        around = getattr(around, "__wrapped__", None)

    def load_general_plugins() -> None:
        original()
        register()

    load_general_plugins.__wrapped__ = original  # type: ignore[attr-defined]
    plugins.load_general_plugins = load_general_plugins


def reports(llm: Any) -> list[dict[str, Any]]:
    """What each rank of an engine (``vllm.LLM``) has found up to now, to be given to `verdict`."""
    return llm.collective_rpc("kv_audit_report")
