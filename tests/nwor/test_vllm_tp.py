# SPDX-License-Identifier: Apache-2.0
"""Tensor parallelism and serving in real vLLM on the CPU; the bench command."""

import json
import os
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

from nwor.settings import Settings
from nwor_lab import paths
from nwor_lab.audit.auditor import AuditReport
from nwor_lab.engines.engine import Engine, EngineSpec
from nwor_lab.experiments import audit, bench
from tests.engines import PROMPTS

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def small(model) -> list[str]:
    words = ["--model", model / "target", "--draft", model / "eagle", "--dtype", "float32", "--num-blocks", 64]
    return list(map(str, [*words, "--random-prompts", 24, "--num-prompts", 6, "--max-tokens", 24]))


def test_bench_over_two_ranks(small, tmp_path):
    """Every rank holds all target layers and a share of their heads; counts agree;
    the EAGLE layer is left alone."""
    more = ["--mode", "off,cow,stage", "--tp", "2", "--run-dir", str(tmp_path), "--name", "tp2"]
    assert bench.main([*small, "--repeats", "1", *more]) == 0
    report = json.loads((tmp_path / "tp2.json").read_text())
    for mode in ("cow", "stage"):
        ranks = report["ranks"][mode]
        assert [rank["rank"] for rank in ranks] == [0, 1]
        assert all(rank["serving"] == mode and rank["target_layers"] == 3 for rank in ranks)
        assert ranks[0]["counters"] == ranks[1]["counters"]
        assert ranks[0]["counters"]["committed_tokens"] > 0
        assert report["parity"][mode]["equal"] == report["parity"][mode]["requests"]
        assert report["metrics"][mode]["nwor_scheduler_mismatches"] == 0
        for rank in ranks:
            assert AuditReport(**rank["audit"]).clean
    assert all(rank["audit"]["dirty_layer_steps"] for rank in report["ranks"]["off"])
    table = pd.read_parquet(tmp_path / "tp2.parquet")
    assert {"step_ms", "accepted_at", "equal_requests", "counters.staged_tokens"} <= set(table.metric)
    assert set(table["tp"]) == {2}


def publishes(worker: Any) -> bool:
    """Commits whose counts this rank has copied to the host."""
    return worker.model_runner.nwor.manager.counters.published() is not None


def test_each_rank_has_its_kernel_times_and_one_alone_moves_counts(model):
    """On a CPU torch's operators are what is seen, of each rank its own. The engine reads the first rank's counts."""
    spec = EngineSpec(str(model / "target"), str(model / "eagle"), tp=2, dtype="float32", num_blocks=64)
    with Engine(spec, Settings(mode="cow")) as engine:
        ranks, steps = engine.kernel_times(PROMPTS[:2], 60)
        first, second = engine.on_every_rank(publishes)
    assert (len(ranks), steps) == (2, 8)
    assert first and not second
    for times in ranks:
        assert all(time >= 0 for time in times.values())
        assert any("reshape_and_cache" in name for name in times), sorted(times)


def test_an_engine_that_dies_leaves_no_result(small, tmp_path, capsys):
    words = ["--mode", "cow", "--kv-cache-dtype", "nonsense", "--run-dir", str(tmp_path)]
    assert bench.main([*small, *words]) == 1
    said = capsys.readouterr().err
    assert said.startswith("nwor bench: the cow engine failed at start") and said.count("\n") == 1
    assert "nonsense" in (tmp_path / "logs" / "bench-cow.log").read_text()
    assert not list(tmp_path.glob("bench.*"))


def test_a_mode_that_is_not_served_is_not_measured():
    """Proof of treatment from every rank."""
    served = {"rank": 0, "mode": "stage", "serving": "stage"}
    bench.require_served("stage", [served, {**served, "rank": 1}])
    for wrong in ({"serving": "off"}, {"serving": "cow"}, {"mode": "off"}):
        with pytest.raises(RuntimeError, match="not active on every rank"):
            bench.require_served("stage", [served, {**served, "rank": 1, **wrong}])
    with pytest.raises(RuntimeError, match="not active on every rank"):
        bench.require_served("stage", [])


def test_audit_command_tells_clean_from_dirty(small, tmp_path, capsys):
    assert audit.main([*small, "--mode", "off,stage", "--run-dir", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "as expected" in next(line for line in said.splitlines() if line.startswith("off: "))
    assert "stage: clean" in said and "DIRTY" not in said


@pytest.mark.parametrize("tp", [1, 2])
def test_serve_exports_the_counters(tp, tmp_path):
    """vLLM's server on loopback, and its `/metrics`; over two ranks where there are two GPUs.

    Started by its module: the `vllm` command asks for a distribution named vllm, which the CPU build is not.
    """
    if torch.cuda.device_count() < tp > 1:
        pytest.skip("no two NVIDIA GPUs here")
    port = 18000 + os.getpid() % 2000
    spec = EngineSpec(str(paths.PAIR_TARGET), str(paths.PAIR_EAGLE), num_blocks=64, tp=tp)
    speculative = {"method": "eagle", "model": spec.draft, "num_speculative_tokens": 4}
    words = ["--model", spec.model, "--host", "127.0.0.1", "--port", port, "--max-model-len", 256, "--max-num-seqs", 8]
    words += ["--num-gpu-blocks-override", 64, "--enforce-eager", "--tensor-parallel-size", tp]
    words += ["--gpu-memory-utilization", 0.3]
    words += ["--speculative-config", json.dumps(speculative)]
    environ = {
        **os.environ,
        **spec.environ(),
        **Settings(mode="stage").environ(),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "VLLM_LOGGING_LEVEL": "INFO",
        "VLLM_LOG_STATS_INTERVAL": "1",
    }
    with open(tmp_path / "serve.log", "w") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *map(str, words)],
            env=environ,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    try:
        body = {"model": spec.model, "prompt": PROMPTS[3], "max_tokens": 24, "temperature": 0, "ignore_eos": True}
        url = f"http://127.0.0.1:{port}"
        wait_for(f"{url}/health", server, tmp_path / "serve.log")
        request = urllib.request.Request(
            f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            assert json.load(answer)["usage"]["completion_tokens"] == 24
        with urllib.request.urlopen(f"{url}/metrics", timeout=30) as answer:
            lines = answer.read().decode().splitlines()
        time.sleep(3)  # the server logs its statistics within one
    finally:
        server.terminate()
        server.wait(timeout=60)
    values = {line.split("{")[0]: float(line.split()[-1]) for line in lines if line.startswith("vllm:")}
    drafts, accepted = (values[f"vllm:spec_decode_num_{kind}_tokens_total"] for kind in ("draft", "accepted"))
    staged, committed = (values[f"vllm:nwor_{kind}_tokens_total"] for kind in ("staged", "committed"))
    assert staged >= drafts > 0 and committed >= accepted > 0
    said = (tmp_path / "serve.log").read_text()
    assert re.search(r"NWOR mode stage serves 5 layers, for 8 requests of 4 drafts, and holds \d+\.\d MiB", said)
    logged = re.findall(r"NWOR: committed (\d+) of (\d+) drafts \(acceptance \d+\.\d %\)", said)
    lines_say = tuple(sum(map(int, numbers)) for numbers in zip(*logged, strict=True))
    assert lines_say >= (committed, staged)
    if not torch.cuda.is_available():  # a GPU's step runs ahead of the scheduler, and counts a finished request's too
        assert lines_say == (committed, staged) == (accepted, drafts)
    assert values["vllm:nwor_acceptance_rate"] == committed / staged and 0 < values["vllm:nwor_unique_tokens"] <= 4
    assert values["vllm:nwor_scheduler_checks_total"] > 0 and values["vllm:nwor_scheduler_mismatches_total"] == 0


def wait_for(url: str, server: subprocess.Popen, log: Path) -> None:
    for _ in range(240):
        assert server.poll() is None, log.read_text()[-3000:]
        try:
            with urllib.request.urlopen(url, timeout=2):
                return
        except (urllib.error.URLError, TimeoutError, ConnectionError):
            time.sleep(1)
    raise TimeoutError(log.read_text()[-3000:])
