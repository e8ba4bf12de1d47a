# SPDX-License-Identifier: Apache-2.0
"""An operator's arguments by name, and changes that make one of them wrong."""

from collections.abc import Callable
from typing import Any

Arguments = dict[str, Any]
Change = Callable[[Arguments], None]


def put(name: str, change: Callable[[Any], Any]) -> Change:
    return lambda arguments: arguments.__setitem__(name, change(arguments[name]))
