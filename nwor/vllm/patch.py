# SPDX-License-Identifier: Apache-2.0
"""Wrap methods and functions of vLLM: only those whose signature is the one this kit was written for, once,
and undone by one call."""

import functools
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

VLLM_VERSION = "0.32"

_originals: dict[tuple[type | ModuleType, str, str], Any] = {}


class IncompatibleVLLM(RuntimeError):
    """This vLLM is not the one whose step the hooks were written for."""


def check_version() -> None:
    """Raise `IncompatibleVLLM` unless the installed vLLM is of the known release."""
    import vllm

    if not vllm.__version__.startswith(VLLM_VERSION + "."):
        raise IncompatibleVLLM(
            f"vLLM {vllm.__version__} is not {VLLM_VERSION}.x, for which NWOR's hooks were written and tested; "
            f"install vllm=={VLLM_VERSION}.0, or run with VLLM_NWOR_MODE=off"
        )


def wrap(
    owner: type | ModuleType, name: str, parameters: tuple[str, ...], make: Callable[[Callable], Callable]
) -> None:
    """Replace ``owner.name`` by ``make(original)``; a second call from the same module does nothing.

    Args:
        owner: the class that defines the method itself (an inherited one would be patched on the wrong class), or the
            module of a function.
        name: the method's name.
        parameters: the parameter names it is known to take, ``self`` included.
        make: given the original function, returns its replacement.

    Raises:
        IncompatibleVLLM: the method is missing or takes other parameters.
    """
    key = (owner, name, make.__module__)
    if key in _originals:
        return
    if name not in vars(owner):
        raise IncompatibleVLLM(f"{_name(owner)} defines no {name}; use vllm=={VLLM_VERSION}.0")
    original = vars(owner)[name]
    found = tuple(inspect.signature(original).parameters)
    if found != parameters:
        raise IncompatibleVLLM(
            f"{_name(owner)}.{name} takes {found}, NWOR knows {parameters}; "
            f"use vllm=={VLLM_VERSION}.0, or run with VLLM_NWOR_MODE=off"
        )
    replacement = functools.wraps(original)(make(original))
    setattr(owner, name, replacement)
    _originals[key] = original


def wrap_attention(
    implementation: type, make_update: Callable[[Callable], Callable], make_forward: Callable[[Callable], Callable]
) -> None:
    """Wrap an attention backend's cache write and its attention, which have one signature in all of vLLM's backends."""
    write = ("self", "layer", "key", "value", "kv_cache", "slot_mapping")
    attend = ("self", "layer", "query", "key", "value", "kv_cache", "attn_metadata", "output")
    wrap(implementation, "do_kv_cache_update", write, make_update)
    wrap(implementation, "forward", (*attend, "output_scale", "output_block_scale"), make_forward)


def undo_all() -> None:
    """Put every wrapped method back."""
    while _originals:  # last applied first: methods may be wrapped by two modules
        (owner, name, _), original = _originals.popitem()
        setattr(owner, name, original)


def wrapped() -> list[str]:
    """Names of the methods wrapped in this process."""
    return sorted({f"{_name(owner)}.{name}" for owner, name, _ in _originals})


def _name(owner: type | ModuleType) -> str:
    return owner.__name__.rpartition(".")[2]
