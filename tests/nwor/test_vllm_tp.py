# SPDX-License-Identifier: Apache-2.0
"""Tensor and data parallelism and serving in real vLLM on the CPU; the bench command."""

import json
import re
import time
import urllib.request

import pandas as pd
import pytest
import torch

from nwor.settings import Settings
from nwor_lab import paths
from nwor_lab.audit.auditor import AuditReport
from nwor_lab.bench import audit, bench
from nwor_lab.engines.child import Served
from nwor_lab.engines.engine import EngineSpec
from nwor_lab.serving.server import SERVED, Server, ended
from tests.engines import PROMPTS
from tests.nwor.on_cpu import spec_of
from tests.nwor.specs import With

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def small(model) -> list[str]:
    words = ["--model", model / "target", "--draft", model / "eagle", "--dtype", "float32", "--num-blocks", 64]
    return list(map(str, [*words, "--random-prompts", 24, "--num-prompts", 6, "--max-tokens", 24]))


def test_bench_over_two_ranks(small, tmp_path):
    """Every rank holds all target layers and a share of their heads; counts agree;
    the EAGLE layer is left alone."""
    more = ["--mode", "off,stage", "--tp", "2", "--run-dir", str(tmp_path), "--name", "tp2"]
    assert bench.main([*small, "--repeats", "1", *more]) == 0
    report = json.loads((tmp_path / "tp2.json").read_text())
    ranks = report["ranks"]["stage"]
    assert [rank["rank"] for rank in ranks] == [0, 1]
    assert all(rank["serving"] == "stage" and rank["target_layers"] == 3 for rank in ranks)
    assert ranks[0]["counters"] == ranks[1]["counters"]
    assert ranks[0]["counters"]["committed_tokens"] > 0
    assert report["parity"]["stage"]["equal"] == report["parity"]["stage"]["requests"]
    assert report["metrics"]["stage"]["nwor_scheduler_mismatches"] == 0
    assert all(AuditReport(**rank["audit"]).clean for rank in ranks)
    assert all(rank["audit"]["dirty_layer_steps"] for rank in report["ranks"]["off"])
    table = pd.read_parquet(tmp_path / "tp2.parquet")
    assert {"step_ms", "accepted_at", "equal_requests", "audit.layer_steps"} <= set(table.metric)
    assert set(table["tp"]) == {2}


def kernel_times(served: Served) -> tuple[list[dict[str, float]], int]:
    return served.kernel_times(PROMPTS[:2], 60)


def test_kernels_of_a_step_are_timed(engines, model):
    """On a CPU torch's operators are what is seen."""
    outcome = engines.run(spec_of(model), Settings(mode="cow"), calls=[{"script": kernel_times}])
    [([times], steps)] = outcome.scripts
    assert steps == 8 and all(time >= 0 for time in times.values())
    assert any("reshape_and_cache" in name for name in times), sorted(times)


def test_an_engine_that_dies_leaves_no_result(small, tmp_path, capfd):
    """What vLLM prints is in the log, and not in the terminal."""
    words = ["--mode", "cow", "--attention-backend", "nonsense", "--run-dir", str(tmp_path)]
    assert bench.main([*small, *words]) == 1
    said = capfd.readouterr().err
    assert said.startswith("nwor bench: the cow engine failed at start") and said.count("\n") == 1
    assert "nonsense" in said.lower() and f"its log: {tmp_path / 'logs' / 'bench-cow.log'}" in said
    assert "Traceback" in (tmp_path / "logs" / "bench-cow.log").read_text()
    assert not list(tmp_path.glob("bench.*"))


def test_audit_command_tells_clean_from_dirty(small, tmp_path, capsys):
    assert audit.main([*small, "--mode", "off,stage", "--run-dir", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "as expected" in next(line for line in said.splitlines() if line.startswith("off: "))
    assert "stage: clean" in said and "DIRTY" not in said


@pytest.mark.parametrize("tp", [1, 2])
def test_serve_exports_the_counters(tp, tmp_path, monkeypatch):
    """vLLM's server on loopback, its `/metrics` and its log: on a CPU over two data-parallel engines, whose counters
    its front end keeps apart; and over two ranks where there are two GPUs."""
    on_gpu = torch.cuda.is_available()
    if torch.cuda.device_count() < tp > 1:
        pytest.skip("no two NVIDIA GPUs here")
    monkeypatch.setenv("VLLM_LOG_STATS_INTERVAL", "1")
    memory, engines = ({"kv_cache_memory": 256}, 1) if on_gpu else ({}, 2)
    spec = EngineSpec(str(paths.PAIR_TARGET), str(paths.PAIR_EAGLE), num_blocks=64, tp=tp, max_model_len=256, **memory)
    if not on_gpu:
        unbound = {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        spec = With(**vars(spec), arguments={"data_parallel_size": engines}, variables=unbound)
    body = {"model": SERVED, "prompt": PROMPTS[3], "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    with ended({"stage": (server := Server.of(spec, "stage", tmp_path / "serve.log"))}):
        server.wait(240)
        for engine in range(engines):
            headers = {"Content-Type": "application/json"} | (
                {"X-data-parallel-rank": str(engine)} if not on_gpu else {}
            )
            request = urllib.request.Request(f"{server.url}/v1/completions", json.dumps(body).encode(), headers)
            with urllib.request.urlopen(request, timeout=120) as answer:
                assert json.load(answer)["usage"]["completion_tokens"] == 24
        found = server.proof(loaded=True)
        with urllib.request.urlopen(f"{server.url}/metrics", timeout=30) as answer:
            text = answer.read().decode()
        time.sleep(3)  # the server logs its statistics within one

    def of_engines(name: str) -> list[float]:
        return [float(value) for value in re.findall(rf"^vllm:{name}_total{{.*}} (\S+)$", text, re.MULTILINE)]

    drafts, accepted = (of_engines(f"spec_decode_num_{kind}_tokens") for kind in ("draft", "accepted"))
    staged, committed = (of_engines(f"nwor_{kind}_tokens") for kind in ("staged", "committed"))
    assert len(staged) == engines and len({*staged}) == len({*committed}) == 1, "each has served the same request"
    assert min(staged) >= min(drafts) > 0 and min(committed) >= min(accepted) > 0
    logged = re.findall(r"NWOR: committed (\d+) of (\d+) drafts", server.log.read_text())
    lines_say = tuple(sum(map(int, numbers)) for numbers in zip(*logged, strict=True))
    assert lines_say >= (sum(committed), sum(staged))
    if not on_gpu:  # a GPU's step runs ahead of the scheduler, and counts a finished request's too
        assert lines_say == (sum(committed), sum(staged)) and (committed, staged) == (accepted, drafts)
    assert found["acceptance_rate"] == engines * committed[0] / staged[0] and 0 < found["unique_tokens"] <= 4 * engines
    assert found["layers"] == 5 and found["scheduler_checks_total"] > 0
