# SPDX-License-Identifier: Apache-2.0
"""Wrap methods of vLLM: once, only such as take the parameters that are known, and undone by one call."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

SERIES = ("0.32.", "0.33.")
_originals: dict[tuple[type, str], Callable] = {}


def check_version() -> None:
    """Raise a RuntimeError unless this vLLM is of a known series."""
    import vllm

    if not vllm.__version__.startswith(SERIES):
        raise RuntimeError(f"kv audit: vLLM {vllm.__version__} is not one of {SERIES}x; unset VLLM_KV_AUDIT")


def wrap(owner: type, name: str, parameters: str, around: Callable[..., Any], optional: str = "") -> None:
    """Let ``around(original, self, ...)`` run in place of ``owner.name``.

    Args:
        parameters: those that it takes, with a space between. optional: one more that some releases have, the last.

    Raises:
        RuntimeError: the method is missing, or takes others.
    """
    if (owner, name) in _originals:
        return
    original = vars(owner).get(name)
    found = " ".join(inspect.signature(original).parameters) if original else "nothing: it is missing"
    if original is None or found not in (parameters, f"{parameters} {optional}"):
        raise RuntimeError(
            f"kv audit: {owner.__name__}.{name} takes {found}, where {parameters} is known; install another vLLM, or "
            "unset VLLM_KV_AUDIT"
        )

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return around(original, self, *args, **kwargs)

    _originals[owner, name] = original
    setattr(owner, name, method)


def undo_all() -> None:
    """Restore every method that was wrapped in this process."""
    while _originals:
        (owner, name), original = _originals.popitem()
        setattr(owner, name, original)


def wrapped() -> list[str]:
    """Names of the wrapped methods."""
    return sorted(f"{owner.__name__}.{name}" for owner, name in _originals)
