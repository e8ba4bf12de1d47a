# SPDX-License-Identifier: Apache-2.0
"""A run ends, says why, and is alone in its folder, whatever hangs, fails or interrupts it."""

import json
import re
import signal
from pathlib import Path

import pytest

pytest.importorskip("papermill", reason="papermill is not installed: no notebook can be run")

from books import ran, start, write_notebook

from nwor_lab.run import reproduce, results

# -- the kernel --------------------------------------------------------------------------------------------------------

WIDGET = """
import ipywidgets
from IPython.display import display
shown = ipywidgets.Output()
display(shown)
"""
DRAW = """
with shown:
    for _ in range(5): display("as sliders do")
"""


@pytest.mark.timeout(240)
def test_a_widget_that_shows_output_while_a_reply_comes_does_not_hang_the_run(place: Path) -> None:
    write_notebook(place, "01_book", WIDGET, *[DRAW] * 20)
    assert reproduce.main(["--run", "s"]) == 0


def test_another_kernel_of_the_same_name_is_not_ours(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = place / "jupyter" / "kernels" / "python3" / "kernel.json"
    spec.parent.mkdir(parents=True)
    spec.write_text(json.dumps({"argv": ["false"], "display_name": "Another", "language": "python"}))
    monkeypatch.setenv("JUPYTER_PATH", str(place / "jupyter"))
    assert reproduce.main(["--run", "s"]) == 0
    assert ran(place) == [4]


# -- a cell that does not end ------------------------------------------------------------------------------------------

STUCK = """
import subprocess, time
if not (place / "go").exists():
    child = subprocess.Popen(["sleep", "600"])
    (place / "child").write_text(str(child.pid))
    time.sleep(600)
"""


def test_a_cell_that_takes_too_long_fails_and_what_to_do_is_said(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_notebook(place, "01_book", STUCK)
    write_notebook(place, "02_book")
    assert reproduce.main(["--run", "s", "--cell-minutes", "0.5"]) == 1
    said = capsys.readouterr().err
    assert re.search(r"01_book: cell \[\d\].*--cell-minutes", said) and "--resume --run s" in said
    entries = results.read_manifest(place / "results" / "s")["notebooks"]
    assert (entries["01_book"]["state"], entries["02_book"]["state"]) == ("failed", "done")
    child = Path("/proc", (place / "child").read_text(), "stat")
    assert not child.exists() or child.read_text().split()[2] == "Z", "what the cell had started is gone"
    (place / "go").touch()
    assert reproduce.main(["--run", "s", "--resume", "--cell-minutes", "0.5"]) == 0


# -- one run in a folder -----------------------------------------------------------------------------------------------


def test_a_refused_run_changes_nothing(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    child = start(place, "--run", "s", "-p", "k", "3")
    manifest = place / "results" / "s" / "manifest.json"
    before = manifest.read_bytes()
    assert reproduce.main(["--run", "s", "--resume", "-p", "k", "2"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "another run is at work" in line and manifest.read_bytes() == before
    (place / "go").touch()
    child.communicate(timeout=120)
    assert child.returncode == 0 and results.read_manifest(place / "results" / "s")["request"]["given"] == {"k": "3"}
    assert not (manifest.parent / ".lock").exists()


def test_a_run_that_another_began_meanwhile_is_left_alone(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    check, theirs = results.check_folder, {"only": None, "given": {"k": "1"}, "grid": []}

    def late(directory: Path) -> Path:
        results.update_manifest(directory, request=theirs)
        return check(directory)

    monkeypatch.setattr(results, "check_folder", late)
    assert reproduce.main(["--run", "s", "-p", "k", "2"]) == 2
    assert "holds a run" in capsys.readouterr().err
    assert results.read_manifest(place / "results" / "s")["request"] == theirs and ran(place) == []


# -- how it fails, and how it is interrupted ---------------------------------------------------------------------------


def test_a_reason_of_several_lines_is_told_to_its_end(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_notebook(place, "01_book", "raise RuntimeError('its end:\\nmade ready\\nthe reason')")
    assert reproduce.main(["--run", "s"]) == 1
    assert "the reason" in capsys.readouterr().err
    assert "the reason" in (place / "results" / "s" / "index.html").read_text()


LOST = """
import asyncio
from nbclient import NotebookClient
async def fail():
    raise ValueError("no kernel any more")
async def lost(client):
    asyncio.ensure_future(fail())
NotebookClient._async_poll_kernel_alive = lost
"""


def test_an_interrupt_says_how_to_go_on(place: Path) -> None:
    """And what a dropped task has to say does not bury the line."""
    child = start(place, "--run", "s", "-p", "k", "3", first=LOST)
    child.send_signal(signal.SIGINT)
    said = child.communicate(timeout=60)[1]
    assert child.returncode == 130 and said.splitlines()[-1].endswith("reproduce --resume --run s")
    assert "Traceback" not in said and "never retrieved" not in said
    assert results.read_manifest(place / "results" / "s")["notebooks"]["01_book"]["state"] == "interrupted"
