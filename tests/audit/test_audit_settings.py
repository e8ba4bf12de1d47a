# SPDX-License-Identifier: Apache-2.0
"""What may be asked of the sampled auditor, and how it is installed."""

import subprocess
import sys
import zipfile
from types import SimpleNamespace

import pytest
import torch
from vllm_kv_audit import hooks, marks, register, verdict, worker
from vllm_kv_audit.report import Reporter
from vllm_kv_audit.settings import Settings

from nwor_lab import paths


def test_what_can_be_asked_for():
    assert Settings.from_env({}) is None and Settings.from_env({"VLLM_KV_AUDIT": ""}) is None
    assert Settings.from_env({"VLLM_KV_AUDIT": "sample=16"}) == Settings(16, {})
    planted = {"VLLM_KV_AUDIT": "full", "VLLM_KV_AUDIT_PERTURB": "bytes=0.5,token=1"}
    assert Settings.from_env(planted) == Settings(0, {"bytes": 0.5, "token": 1.0})


@pytest.mark.parametrize("value", ["1", "sample", "sample=", "sample=0", "sample=1.5", "Full", "sample=9999"])
def test_a_value_that_cannot_be_is_named(value):
    with pytest.raises(ValueError, match="VLLM_KV_AUDIT="):
        Settings.from_env({"VLLM_KV_AUDIT": value})


@pytest.mark.parametrize("value", ["bytes", "bytes=2", "bytes=-1", "byte=0.5", "bytes=nan", "bytes=a"])
def test_a_fault_that_cannot_be_is_named(value):
    with pytest.raises(ValueError, match="PERTURB"):
        Settings.from_env({"VLLM_KV_AUDIT": "full", "VLLM_KV_AUDIT_PERTURB": value})


def test_faults_without_an_audit_are_an_error():
    with pytest.raises(ValueError, match="nobody looks"):
        Settings.from_env({"VLLM_KV_AUDIT_PERTURB": "bytes=0.5"})


def test_an_audit_may_be_asked_for_behind_an_engine_without(monkeypatch):
    """vLLM calls a plugin once a process; with NWOR's beside it neither is put around the other again and again."""
    plugins = pytest.importorskip("vllm.plugins", reason="vLLM is not installed: there is nothing to patch")
    import nwor

    to_call = [register, nwor.register]
    monkeypatch.setattr(plugins, "load_general_plugins", lambda: [to_call.pop()() for _ in to_call[:]])
    monkeypatch.delenv("VLLM_KV_AUDIT", raising=False)
    plugins.load_general_plugins()
    around = plugins.load_general_plugins
    assert hooks.wrapped() == []
    monkeypatch.setenv("VLLM_KV_AUDIT", "full")
    try:
        for _ in range(2):
            plugins.load_general_plugins()
            assert "EngineCore._initialize_kv_caches" in hooks.wrapped() and plugins.load_general_plugins is around
    finally:
        hooks.undo_all()


def test_a_last_look_that_fails_keeps_no_worker_from_its_end():
    """A GPU that has failed fails again at every call."""

    def look() -> None:
        raise RuntimeError("an illegal memory access was encountered")

    runner, closed = SimpleNamespace(kv_auditor=SimpleNamespace(look=look)), []
    wrapper = SimpleNamespace(worker=SimpleNamespace(model_runner=runner))
    worker._shutdown(closed.append, wrapper)
    assert closed == [wrapper] and runner.kv_auditor is None


def test_nothing_audited_is_no_verdict():
    with pytest.raises(RuntimeError, match="nothing was audited"):
        verdict([{}, {}])


def test_more_findings_than_there_is_room_for_are_counted():
    reporter, ring = Reporter(0, [["layer 0"]]), marks.new_ring(torch.device("cpu"))
    reporter.name(1, "first", 0), reporter.name(1, "second", 5)
    for total in (3, 200):
        ring[marks.FINDINGS_AT] = ring[marks.KINDS_AT] = total
        entries = ring[marks.COUNTERS :].view(marks.RING, marks.FIELDS)
        entries[:, 0], entries[:, 1] = (4 if total == 3 else 6), 1
        with reporter.quiet():
            reporter.read(ring, total)
    assert reporter.counts["bytes"] == 200 and len(reporter.found) == marks.RING
    assert reporter.counts["not_shown"] == 200 - 3 - marks.RING
    assert {finding.request for finding in reporter.found} == {"second"}


def test_a_copy_that_is_older_than_what_was_read_takes_nothing_back():
    reporter = Reporter(0, [["layer 0"]])
    older, newer = (marks.new_ring(torch.device("cpu")) for _ in range(2))
    older[marks.CHECKED_AT], newer[marks.CHECKED_AT] = 8, 20
    for ring, risen in ((newer, {"checked": 20}), (older, {}), (newer, {})):
        reporter.read(ring, 1)
        assert reporter.take() == risen
    assert reporter.counts["checked"] == 20


def test_a_wheel_has_the_plugin_and_needs_nothing(tmp_path):
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "--no-index"]
    copied = tmp_path / "kv_audit"
    subprocess.run(["cp", "-r", paths.ROOT / "kv_audit", copied], check=True)
    subprocess.run([*command, "-w", tmp_path, copied], check=True)
    [wheel] = tmp_path.glob("vllm_kv_audit-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        read = {name.rpartition("/")[2]: archive.read(name).decode() for name in names if "dist-info" in name}
    assert "vllm_kv_audit/kernels.py" in names and not any(name.startswith("nwor") for name in names)
    assert "[vllm.general_plugins]\nkv_audit = vllm_kv_audit:register" in read["entry_points.txt"]
    assert "Requires-Dist" not in read["METADATA"]
