# SPDX-License-Identifier: Apache-2.0
"""Folders outside the kit that the programs behind it write to, and which of them they cannot."""

import os
import tempfile
from pathlib import Path

NEEDED = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "VLLM_CACHE_ROOT")
"""Variables that name a folder without which an engine stops."""
USED = (
    "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR", "MPLCONFIGDIR",
    "VLLM_CONFIG_ROOT", "HF_HOME",
)  # fmt: skip
"""Variables whose folder a program does without, more slowly or with a warning."""
KEPT = "Jupyter, IPython, Matplotlib, vLLM, torch and Triton keep files"


def missing() -> list[str]:
    """What a run cannot do without, each in words that say what to set."""
    found = []
    try:
        Path.home()
    except RuntimeError:
        found.append(f"HOME is not set: set it to a folder that can be written, in which {KEPT}")
    try:
        tempfile.gettempdir()
    except FileNotFoundError:
        found.append("TMPDIR and /tmp cannot be written: set TMPDIR to a folder that can")
    return found + _unwritable(NEEDED)


def unwritable() -> list[str]:
    """What a run does without, but not well."""
    try:
        home = [] if _can_write(Path.home()) else [f"HOME={Path.home()} cannot be written, where {KEPT}"]
    except RuntimeError:
        home = []
    return home + _unwritable(USED)


def _unwritable(names: tuple[str, ...]) -> list[str]:
    given = {name: os.environ[name] for name in names if os.environ.get(name)}
    return [f"{name}={folder} cannot be written" for name, folder in given.items() if not _can_write(Path(folder))]


def _can_write(folder: Path) -> bool:
    """Whether files can be made in `folder`, which is made itself where it does not exist."""
    there = next(place for place in (folder.absolute(), *folder.absolute().parents) if place.exists())
    return there.is_dir() and os.access(there, os.W_OK | os.X_OK)
