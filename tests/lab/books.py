# SPDX-License-Identifier: Apache-2.0
"""Small notebooks, and runs of them, for the tests of `nwor reproduce`."""

import subprocess
import sys
import time
from pathlib import Path

import nbformat

from nwor_lab import paths

DECLARE = 'mode: str = "cow"  # a mode\nk: int = 4  # drafts\nks: list[int] = [1]  # more\nrun_dir: str = ""  # folder'
BEGIN = 'from nwor_lab.run import results\n\nrun = results.start(globals(), "{name}")'
WORK = """
import os, pathlib
place = pathlib.Path({place!r})
(place / f"{name}-{{k}}-{{os.getpid()}}").touch()
print("seen in the log", k)
assert k != 2 or (place / "mended").exists(), "not mended"
"""
END = """
run.claim("mode", "cow", mode, mode == "cow")
run.expect("drafts", 4.0, k, k == 4)
run.skip("fp8 caches", 0, "no AVX-512 here")
run.table("steps", [{"metric": "k", "value": k, "unit": "1"}])
run.finish()"""


def write_notebook(place: Path, name: str, more: str = "", *cells: str) -> Path:
    notebook = nbformat.v4.new_notebook()
    every = (DECLARE, BEGIN.format(name=name), WORK.format(place=str(place), name=name) + more, *cells, END)
    notebook.cells = [nbformat.v4.new_code_cell(text) for text in every]
    notebook.cells[0].metadata["tags"] = ["parameters"]
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(notebook, place / f"{name}.ipynb")
    return place / f"{name}.ipynb"


def ran(place: Path) -> list[int]:
    """The k of each time `01_book` was executed, sorted."""
    return sorted(int(path.name.split("-")[1]) for path in place.glob("01_book-*"))


WAIT = """
import time
while k == 3 and not (place / "go").exists():
    print("." * 2000, flush=True)
    time.sleep(0.01)
"""
"""Until there is a file `go`; what it prints keeps the reproduction run at work, too."""


def launch(place: Path, *words: str, first: str = "") -> subprocess.Popen:
    """A reproduction run of the notebooks in `place` in another process, which executes `first` before."""
    code = "import sys; from pathlib import Path; from nwor_lab import paths; from nwor_lab.run import reproduce"
    code += f"; place = Path({str(place)!r})"
    # What a shell starts in the background ignores interrupts, and so do its children.
    code += "; import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    code += "; paths.NOTEBOOKS, paths.RESULTS = place, place / 'results'; sys.exit(reproduce.main(sys.argv[1:]))"
    command = [sys.executable, "-c", f"{first}\n{code}", *words]
    return subprocess.Popen(command, cwd=paths.ROOT, stderr=subprocess.PIPE, text=True)


def start(place: Path, *words: str, first: str = "") -> subprocess.Popen:
    """A reproduction run in another process, in the midst of k=3."""
    write_notebook(place, "01_book", WAIT)
    child = launch(place, *words, first=first)
    deadline = time.monotonic() + 120
    while 3 not in ran(place):
        assert child.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    return child
