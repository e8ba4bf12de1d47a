# SPDX-License-Identifier: Apache-2.0
"""Wrap methods and functions of vLLM: only those that a known release has so (`releases`), once, undone by one call."""

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

from nwor.vllm import releases

_originals: dict[tuple[type | ModuleType, str, str], Any] = {}
_WAY_OUT = f"install vllm=={releases.TESTED}, or run with VLLM_NWOR_MODE=off"


class IncompatibleVLLM(RuntimeError):
    """This vLLM is not one whose step the hooks were written for."""


def check_version() -> None:
    """Raise `IncompatibleVLLM` unless the installed vLLM is of a known series."""
    import vllm

    if not releases.in_known_series(vllm.__version__):
        series = ", ".join(f"{series}.x" for series in releases.SERIES)
        raise IncompatibleVLLM(
            f"vLLM {vllm.__version__} is none of {series}, for which NWOR's hooks were written; {_WAY_OUT}"
        )


def wrap(owner: type | ModuleType, name: str, make: Callable[[Callable], Callable]) -> None:
    """Replace ``owner.name`` by ``make(original)``; a second call from the same module does nothing.

    Args:
        owner: the class that defines the method itself (an inherited one would be patched on the wrong class), or the
            module of a function.
        name: the method's name.
        make: given the original function, returns its replacement.

    Raises:
        IncompatibleVLLM: the function is missing, or its parameters or its body are those of no known release.
    """
    key = (owner, name, make.__module__)
    if key in _originals:
        return
    if name not in vars(owner):
        raise IncompatibleVLLM(f"{_name(owner)} defines no {name}; {_WAY_OUT}")
    original = vars(owner)[name]
    known, found = releases.KNOWN.get(full_name(owner, name), {}), releases.of_object(original)
    if found not in known.values():
        import vllm

        changes = [f"{releases.compare(found, function)} beside {release}" for release, function in known.items()]
        reason = ", ".join(changes) or "it is not among the known functions"
        raise IncompatibleVLLM(
            f"{_name(owner)}.{name} of vLLM {vllm.__version__} is of no known release: {reason}; {_WAY_OUT}, or have "
            "this vLLM's functions taken as known, once you have read them: nwor doctor --vllm --record"
        )
    setattr(owner, name, functools.wraps(original)(make(original)))
    _originals[key] = original


def undo_all() -> None:
    """Put every wrapped method back."""
    while _originals:  # last applied first: methods may be wrapped by two modules
        (owner, name, _), original = _originals.popitem()
        setattr(owner, name, original)


def wrapped() -> list[str]:
    """Names of the methods wrapped in this process."""
    return sorted({f"{_name(owner)}.{name}" for owner, name, _ in _originals})


def modules() -> set[str]:
    """Names of the modules that have wrapped something in this process."""
    return {module for _, _, module in _originals}


def full_name(owner: type | ModuleType, name: str) -> str:
    """Where a function of vLLM is defined, as `releases.KNOWN` names it."""
    return f"{owner.__name__ if isinstance(owner, ModuleType) else f'{owner.__module__}.{owner.__qualname__}'}.{name}"


def _name(owner: type | ModuleType) -> str:
    return owner.__name__.rpartition(".")[2]
