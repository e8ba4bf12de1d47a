# SPDX-License-Identifier: Apache-2.0
"""Command lines made of dataclasses by `tyro`: a field is an option, and the line beneath it is its help.

A dataclass inside one is a group of options of its own. Several values are written `A,B` or `A B`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import Any, Literal, TypeVar, get_args, get_origin

import tyro
from tyro import _errors  # of this very version, which pyproject.toml pins: what was wrong, as one line
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

T = TypeVar("T")
RULES = ConstructorRegistry()
PLAINER = {
    r"invalid literal for int\(\) with base 10: (.*)": r"\1 is not a whole number",
    r"could not convert string to float: (.*)": r"\1 is not a number",
}
"""What Python says of a word that is no number, and what a command says."""


def parse(kind: Callable[..., T], argv: list[str] | None, command: str, description: str) -> T:
    """The dataclass `kind` from the words of a command line, those of this process where `argv` is None.

    Raises:
        ValueError: they do not make one; the message is a line.
        SystemExit: help was asked for, and printed.
    """
    words = sys.argv[1:] if argv is None else argv
    if {"-h", "--help"} & set(words):  # tyro would break its lines elsewhere
        print(description)
    with _errors.on_parse_error(_refuse):
        return tyro.cli(
            kind, args=words, prog=command, description="", registry=RULES, config=(tyro.conf.OmitArgPrefixes,)
        )


def fail(command: str, why: object, status: int = 2) -> int:
    """Print in a line why a command ends, and return its exit status. Who no longer reads what it says is no fault of
    it: that goes on to `nwor`, which ends."""
    if isinstance(why, BrokenPipeError):
        raise why
    print(f"{command}: {' '.join(str(why).split())}", file=sys.stderr)
    return status


def check_names(option: str, chosen: tuple[str, ...], known: Any) -> None:
    """Raise ValueError where one of `chosen` is not among the `known` names."""
    if unknown := [name for name in chosen if name not in known]:
        raise ValueError(f"{option} {', '.join(unknown)}: choose of {', '.join(known)}")


def _refuse(event: _errors.ParseErrorEvent) -> None:
    match event:
        case _errors.UnrecognizedArgs(tokens=unknown) | _errors.MissingArgs(unrecognized_tokens=[_, *_] as unknown):
            said = f"no option {' '.join(unknown)}"
        case _errors.MissingArgs():
            said = f"{', '.join(one.arg.display_name() for one in event.missing_arguments)}: not given"
        case _errors.InstantiationFailure(argument=None):
            said = event.message
        case _errors.InstantiationFailure():
            assert event.argument is not None
            said = f"{event.argument.display_name()}: {event.message}"
            for python, plain in PLAINER.items():
                said = re.sub(python, plain, said)
        case _errors.InvalidChoice():
            said = f"{event.argument.display_name()}: {event.value} is not of {', '.join(event.choices)}"
        case _errors.BadValue():
            said = f"{event.argument.display_name()}: a value is missing"
        case _:
            return  # tyro's own words
    raise ValueError(f"{said} ({event.prog} --help)")


@RULES.primitive_rule
def _several(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec | None:
    """A tuple of any length."""
    kind, *rest = get_args(info.type) or (None,)
    if get_origin(info.type) is not tuple or rest != [...]:
        return None
    choices = get_args(kind) if get_origin(kind) is Literal else ()

    def read(words: list[str]) -> tuple[Any, ...]:
        texts = [text for word in words for text in word.split(",") if text]
        if unknown := set(texts) - set(choices or texts):
            raise ValueError(f"{', '.join(unknown)} is not of {', '.join(choices)}")
        return tuple(texts if choices else map(kind, texts))

    return PrimitiveConstructorSpec(
        nargs="*",
        metavar="A,B,...",
        instance_from_str=read,
        is_instance=lambda value: isinstance(value, tuple),
        str_from_instance=lambda values: [",".join(map(str, values)) or "none"],
    )
