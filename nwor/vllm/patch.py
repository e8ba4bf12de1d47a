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
    _check(owner, name, original)
    replacement = functools.wraps(original)(make(original))
    setattr(owner, name, replacement)
    _originals[key] = original


def _check(owner: type | ModuleType, name: str, original: Callable) -> None:
    """Raise `IncompatibleVLLM` unless this function is one of a known release."""
    known, found = releases.KNOWN.get(full_name(owner, name), {}), releases.of_object(original)
    if not any(found.parameters == function.parameters for function in known.values()):
        differences = [
            f"vLLM {release}'s {function.parameters} ({releases.difference(found.parameters, function.parameters)})"
            for release, function in known.items()
        ]
        raise IncompatibleVLLM(
            f"{_name(owner)}.{name} takes {found.parameters}; NWOR knows {', '.join(differences) or 'none'}; {_WAY_OUT}"
        )
    if found not in known.values():
        import vllm

        state = "has a body that is none of" if found.body else "has no source to compare with"
        raise IncompatibleVLLM(
            f"{_name(owner)}.{name} of vLLM {vllm.__version__} {state} {', '.join(known)}'s; {_WAY_OUT}"
            ", or have this vLLM's functions taken as known, once you have read them: nwor doctor --vllm --record"
        )


def wrap_attention(
    implementation: type, make_update: Callable[[Callable], Callable], make_forward: Callable[[Callable], Callable]
) -> None:
    """Wrap an attention backend's cache write and its attention, the same in all of vLLM's backends."""
    wrap(implementation, "do_kv_cache_update", make_update)
    wrap(implementation, "forward", make_forward)


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
