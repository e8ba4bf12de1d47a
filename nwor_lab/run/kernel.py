# SPDX-License-Identifier: Apache-2.0
"""Run a notebook by papermill, in a kernel of this interpreter."""

from __future__ import annotations

import logging
import math
import tempfile
from pathlib import Path
from typing import Any, TextIO

import papermill
import zmq
from ipykernel.kernelspec import get_kernel_dict
from jupyter_client.asynchronous.client import AsyncKernelClient
from jupyter_client.channels import AsyncZMQSocketChannel
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import AsyncKernelManager
from nbclient.exceptions import CellTimeoutError
from traitlets import Type
from traitlets.config import Config

from nwor_lab import paths, progress
from nwor_lab.run import results

ARGUMENTS = [
    "--IPKernelApp.log_level=CRITICAL",
    "--IPKernelApp.matplotlib=inline",
    f"--IPKernelApp.exec_lines={results.MUTE}",
]
"""Figures on the page whatever MPLBACKEND says, and no warnings of libraries, from before the first import on."""


class _Shell(AsyncZMQSocketChannel):
    """The channel of replies. A widget that shows output makes nbclient send here while it waits for one.

    A send takes the notice of a reply that has just come, and the wait would never end; pyzmq looks again where it is
    asked for the socket's events.
    """

    def send(self, msg: dict[str, Any]) -> None:
        super().send(msg)
        self.socket.get(zmq.EVENTS)


class _Client(AsyncKernelClient):
    shell_channel_class = Type(_Shell)


class _Manager(AsyncKernelManager):
    """Starts this interpreter, whatever kernel has the name `python3` in the folders of Jupyter."""

    client_factory = Type(_Client)

    @property
    def kernel_spec(self) -> KernelSpec:
        return KernelSpec(**get_kernel_dict())


def execute(notebook: Path, output: Path, given: dict[str, Any], log: TextIO, cell_minutes: float) -> None:
    """Run a notebook into `output`. Kernels talk through files: a port chosen for one may be taken before it starts.

    Args:
        given: its parameters.
        log: takes what its cells print.
        cell_minutes: how long a cell may take; 0: without end.

    Raises:
        TimeoutError: a cell took longer; the message names it.
        PapermillExecutionError: a cell failed.
    """
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)  # an interrupt drops tasks, and it would tell of each
    seconds, cells = math.ceil(60 * cell_minutes), list[str]()

    def begin(cell: Any, cell_index: int) -> None:
        cells.append(cell.source)
        progress.say(f"{notebook.stem}, cell {cell_index + 1}", plain=False)

    with tempfile.TemporaryDirectory() as sockets:
        try:
            papermill.execute_notebook(
                str(notebook),
                str(output),
                parameters=given,
                kernel_name="python3",
                kernel_manager_class=_Manager,
                cwd=str(paths.ROOT),
                stdout_file=log,
                stderr_file=log,
                start_timeout=300,
                execution_timeout=seconds,
                iopub_timeout=seconds or 24 * 3600,
                on_cell_execute=begin,
                progress_bar=False,
                extra_arguments=[*ARGUMENTS],
                config=Config(KernelManager={"transport": "ipc", "ip": f"{sockets}/kernel"}),
            )
        except CellTimeoutError:
            first = next(iter(cells[-1].splitlines()), "")
            raise TimeoutError(
                f"{notebook.stem}: cell [{len(cells)}], `{first}`, took more than {cell_minutes:g} minutes; "
                "a cell may take as long as --cell-minutes says"
            ) from None
