# SPDX-License-Identifier: Apache-2.0
"""What a long run does just now: a line that moves in a terminal and on a notebook's page, plain lines elsewhere."""

from __future__ import annotations

import re
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from tqdm import tqdm

PLAIN = re.compile(r" *\d+\.\d s  ")
"""How a line of `say` begins where none moves."""
_BEGIN = time.monotonic()
_terminal: Terminal | None = None


class Terminal:
    """The last line of a terminal, with seconds that go on counting while nothing new is said."""

    def __init__(self) -> None:
        width, height = shutil.get_terminal_size()  # tqdm would show nothing where a terminal does not know its own
        bar = {"bar_format": "{elapsed}  {desc}", "ncols": width - 1, "nrows": height, "leave": False}
        self._bar = tqdm(file=sys.stdout, **bar)
        self._closed = threading.Event()
        self._clock = threading.Thread(target=self._count, daemon=True)
        self._clock.start()

    def show(self, text: str) -> None:
        self._bar.set_description_str(text)

    def close(self) -> None:
        self._closed.set()
        self._clock.join()
        self._bar.close()

    def _count(self) -> None:
        while not self._closed.wait(1.0):
            self._bar.refresh()


class Page:
    """A line of the page of a notebook's cell."""

    def __init__(self, display: Any) -> None:
        self._display, self._handle = display, None

    def show(self, text: str) -> None:
        shown = {"text/plain": text}
        if self._handle is None:
            self._handle = self._display(shown, raw=True, display_id=True)
        else:
            self._handle.update(shown, raw=True)


def page() -> Page | None:
    """The page of the cell that runs here, if one does."""
    notebook = sys.modules.get("IPython")  # loaded where a page is, which need not be everywhere
    return Page(notebook.display.display) if notebook is not None and notebook.get_ipython() is not None else None


@contextmanager
def moving() -> Iterator[None]:
    """Let what is said meanwhile be one line that moves, where standard output is a terminal; it is gone at the end."""
    global _terminal
    if _terminal is not None or sys.stdout is None or not sys.stdout.isatty():
        yield
        return
    _terminal = Terminal()
    try:
        yield
    finally:
        _terminal.close()
        _terminal = None


def say(doing: str, plain: bool = True) -> None:
    """Say what begins or has ended.

    plain: also where no line moves: there as a line, with the seconds since this process began.
    """
    if _terminal is not None:
        _terminal.show(doing)
    elif plain:
        print(f"{time.monotonic() - _BEGIN:6.1f} s  {doing}", flush=True)


def note(text: str, file: TextIO | None = None) -> None:
    """Print what is to stay, above a line that moves."""
    tqdm.write(text, file=file or sys.stdout)
    (file or sys.stdout).flush()
