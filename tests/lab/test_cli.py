# SPDX-License-Identifier: Apache-2.0
"""How a command ends where its output cannot be written, and where it is told to end."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nwor_lab import paths

COMMAND = """
import multiprocessing, pathlib, time

def wait(place):
    pathlib.Path(place, "up").touch()
    time.sleep(600)

def main(argv):
    child = multiprocessing.get_context("spawn").Process(target=wait, args=argv)
    child.start()
    pathlib.Path(argv[0], "pid").write_text(str(child.pid))
    try:
        child.join()
    finally:
        pathlib.Path(argv[0], "closed").touch()
"""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_output_that_cannot_be_written_is_said_in_words() -> None:
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "nwor_lab.run.cli", "measure", "--list"]
        done = subprocess.run(command, cwd=paths.ROOT, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode and "No space" in done.stderr and "Traceback" not in done.stderr


def test_sigterm_ends_a_command_and_the_engines_that_it_started(tmp_path: Path) -> None:
    """Its own way, as Ctrl-C does: what it has to close is closed."""
    (tmp_path / "slow_command.py").write_text(COMMAND)
    code = "from nwor_lab.run import cli; cli.COMMANDS['slow'] = ('slow_command', ''); raise SystemExit(cli.main())"
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(paths.ROOT)])}
    child = subprocess.Popen([sys.executable, "-c", code, "slow", str(tmp_path)], env=environ, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 60
    while not (tmp_path / "up").exists():
        assert child.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    child.send_signal(signal.SIGTERM)
    said = child.communicate(timeout=60)[1].decode()
    assert child.returncode == 130 and "interrupted" in said and (tmp_path / "closed").exists()
    engine = Path("/proc", (tmp_path / "pid").read_text())
    assert not engine.exists() or (engine / "stat").read_text().split()[2] == "Z"
