# SPDX-License-Identifier: Apache-2.0
"""What a long run does just now: a line that moves in a terminal, plain lines elsewhere."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress

PLAIN = re.compile(r" *\d+\.\d s  ")
"""How a line of `say` begins where none moves."""
_BEGIN = time.monotonic()
_line: Progress | None = None


@contextmanager
def moving() -> Iterator[None]:
    """Let what is said meanwhile be one line that moves, where standard output is a terminal; it is gone at the end.

    What is printed meanwhile stays, above it.
    """
    global _line
    if _line is not None or sys.stdout is None or not sys.stdout.isatty():
        yield
        return
    from rich.progress import Progress, TextColumn

    column = TextColumn("{task.elapsed:6.1f} s  {task.description}", markup=False)
    try:
        with Progress(column, transient=True) as _line:
            _line.add_task("")
            yield
    finally:
        _line = None


def say(doing: str, plain: bool = True) -> None:
    """Say what begins or has ended.

    plain: also where no line moves: there as a line, with the seconds since this process began.
    """
    if _line is not None:
        _line.update(_line.task_ids[0], description=doing)
    elif plain:
        print(f"{time.monotonic() - _BEGIN:6.1f} s  {doing}", flush=True)
