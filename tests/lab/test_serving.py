# SPDX-License-Identifier: Apache-2.0
"""Modes under vLLM's own server and client: requests, what is made of a report, and how a run ends that fails.

Real servers are loaded by notebook 04, in `test_exercises`.
"""

import json
import math
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pandas as pd
import pytest

from nwor_lab import pair, paths
from nwor_lab.bench.audit_cost import AuditedSpec
from nwor_lab.engines.engine import EngineSpec
from nwor_lab.run import cli, results
from nwor_lab.serving import command, load, server
from nwor_lab.serving.load import Load, ServingPlan
from nwor_lab.serving.server import EngineError, Server, ended
from nwor_lab.serving.table import open_load, random_weights, setting, summary, verdict

PLAN = ServingPlan(concurrency=(1, 4), rates=(2.0, math.inf), requests=(5, 6, 20))
REPORT = {
    **dict.fromkeys(load.COLUMNS, 2.0),
    "completed": 2, "failed": 0, "errors": ["", ""], "output_lens": [8, 8], "output_throughput": 40.0,
}  # fmt: skip
FAKE = """
import http.server, sys
print("INFO NWOR mode stage serves 5 layers, for 8 requests", flush=True)
class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'vllm:nwor_windows_total{engine="0",model_name="nwor"} 3.0\\n')
port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.HTTPServer(("127.0.0.1", port), Answer).serve_forever()
"""


def fake(tmp_path, mode="stage", code=FAKE) -> Server:
    return Server(mode, [sys.executable, "-c", code], os.environ, tmp_path / "logs" / f"{mode}.log")


# -- requests ----------------------------------------------------------------------------------------------------------


def test_loads_are_loops_first_and_orders_alternate():
    assert PLAN.loads == [Load(1, 0, 5), Load(4, 0, 6), Load(0, 2.0, 20), Load(0, math.inf, 20)]
    assert [one.name for one in PLAN.loads] == ["1 at once", "4 at once", "2 a second", "all at once"]
    assert [ServingPlan().in_order(number)[0] for number in range(3)] == ["off", "direct", "off"]


def test_prompts_are_of_the_lengths_asked_for_and_always_the_same():
    from transformers import AutoTokenizer

    tokenizer, texts = AutoTokenizer.from_pretrained(paths.PAIR_TARGET), pair.load_prompts()
    prompts = load.draw_prompts(texts, tokenizer, ServingPlan(requests=(100,)))
    assert all(one["tokens"] == len(tokenizer.encode(one["prompt"])) for one in prompts)
    lengths = sorted(one["tokens"] for one in prompts)
    assert 60 <= lengths[0] < 80 and 1100 < lengths[-1] <= 1500 and 200 < lengths[50] < 450
    few = load.draw_prompts(texts, tokenizer, ServingPlan(requests=(10,)))
    assert few == prompts[:10], "a larger load begins with the smaller one's requests"


# -- reports -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"completed": 1, "failed": 1, "errors": ["", "Traceback\nClientOSError: reset\n"]}, "1 of 2.*failed: Client"),
        ({"output_lens": [8, 7]}, r"answers of \[7, 8\] tokens, not 8"),
        ({"spec_decode_num_drafts": 0}, "verified no draft"),
    ],
)  # fmt: skip
def test_a_request_that_failed_is_an_error(change, says):
    with pytest.raises(EngineError, match=f"stage, 2 at once: .*{says}"):
        load.read_report(REPORT | change, Load(2, 0, 2), "stage", 8)


def test_equal_texts_are_those_of_the_same_pass_and_offs_are_its_noise():
    texts = {"stage": ["a", "b", "x", "d"], "off": ["a", "b", "c", "d"]}
    share = {row["mode"]: row["value"] for row in load.equal_rows(texts, ["a", "y", "y", "d"])}
    assert share == {"stage": 0.75, "off": 0.5}
    assert [row["mode"] for row in load.equal_rows(texts, None)] == ["stage"]


# -- the table ---------------------------------------------------------------------------------------------------------


def rows_of(speed: dict, acceptance: dict, equal: dict, load: str = "4 at once", tpot: dict | None = None):
    metrics = {"median_tpot_ms": tpot or speed, "tokens_per_s": speed, "acceptance_length": acceptance, "equal": equal}
    metrics |= dict.fromkeys(("median_itl_ms", "p99_itl_ms", "median_ttft_ms", "p99_ttft_ms"), speed)
    return pd.DataFrame(
        [
            {"load": load, "mode": mode, "repeat": number, "metric": metric, "value": value}
            for metric, by_mode in metrics.items()
            for mode, values in by_mode.items()
            for number, value in enumerate(values)
        ]
        + [{"mode": "stage", "metric": "nwor.fallbacks_total", "value": 7.0}]
    )


@pytest.mark.parametrize("wrong", [{"rates": (math.nan,)}, {"concurrency": (0,)}, {"rates": (2.0, 2.0)}])
def test_a_load_that_cannot_be_is_refused(wrong):
    with pytest.raises(ValueError, match="different values, above 0"):
        ServingPlan(**wrong)


def test_a_ratio_is_of_the_same_pass():
    """The machine is twice as fast in the last pass: medians over passes would hide that `stage` is ahead in each."""
    speed = {"off": [100.0, 100.0, 200.0], "stage": [110.0, 104.0, 206.0]}
    alike = {"off": [3.0, 3.1, 3.0], "stage": [3.05, 3.0, 3.05]}
    table = summary(rows_of(speed, alike, {"stage": [1.0, 0.9, 0.8], "off": [0.9, 0.9]})).set_index("mode")
    assert table.loc["stage", ["ratio", "lowest", "highest"]].to_list() == pytest.approx([1.04, 1.03, 1.1])
    assert table.loc["off", ["ratio", "tokens_per_s", "passes"]].to_list() == [1, 100, 3]
    assert table.loc["stage", ["itl", "equal", "acceptance"]].to_list() == pytest.approx([1.04, 0.9, 3.05])
    assert table["parity"].all() and table["fallbacks"].to_dict() == {"off": 0, "stage": 7}
    assert "faster under 1 of 1" in verdict(table.reset_index())


def test_where_requests_come_at_a_rate_the_time_a_token_tells():
    """As many tokens come in a second as are asked for, however slow a mode is."""
    same = {"off": [50.0] * 2, "stage": [50.0] * 2}
    frame = rows_of(same, same, {}, "8 a second", tpot={"off": [10.0] * 2, "stage": [12.5] * 2})
    table = summary(frame).set_index("mode")
    assert table.loc["stage", ["tokens_per_s", "ratio", "highest"]].to_list() == [50, 0.8, 0.8]


def test_without_parity_there_is_no_speed():
    """Acceptance differs by more than vanilla's passes do, and fewer texts are equal: something else was served."""
    acceptance = {"off": [3.0, 3.02], "stage": [2.7, 2.71]}
    frame = rows_of({"off": [100.0] * 2, "stage": [150.0] * 2}, acceptance, {"stage": [0.2, 0.3], "off": [0.9]})
    table = summary(frame).set_index("mode")
    assert not table.loc["stage", "parity"] and table.loc["stage", ["tokens_per_s", "ratio", "ttft"]].isna().all()
    assert table.loc["stage", "passes"] == 2
    assert "no parity" in verdict(table.reset_index())


def test_servers_of_other_gpus_and_settings_are_lines_of_their_own():
    """Passes of the same load and number, which a mean would mix."""
    of = {"gpu": "H100", "tp": 1, "k": 4, "kv_cache_dtype": "auto"}
    runs = {1.1: of, 0.9: of | {"k": 8, "kv_cache_dtype": "fp8"}, 1.0: of | {"tp": 2}, 1.2: of | {"gpu": "H200"}}
    runs |= {1.3: of | {"load_format": "nwor_random"}}
    alike = {"off": [3.0] * 2, "stage": [3.0] * 2}
    frames = [rows_of({"off": [100.0] * 2, "stage": [100 * r] * 2}, alike, {}).assign(**run) for r, run in runs.items()]
    table = summary(pd.concat(frames)).query("mode == 'stage'")
    assert table["ratio"].to_list() == pytest.approx([*runs])
    said = ["k=4, bf16", "k=8, fp8", "k=4, bf16, TP=2", "k=4, bf16", "k=4, bf16, random weights"]
    assert setting(table).to_list() == said and table["gpu"].to_list() == ["H100"] * 3 + ["H200", "H100"]


def test_loads_at_a_rate_and_random_weights_are_named_for_the_record():
    lines = pd.DataFrame({"load": ["8 a second", "16 at once"], "load_format": ["nwor_random", "auto"]})
    assert open_load(lines).to_list() == [", 8 a second", ""]
    assert random_weights(lines).to_list() == [", random weights", ""]


def test_counts_that_nobody_kept_are_not_taken_for_none():
    alike = {"off": [3.0], "stage": [3.0], "cow": [3.0]}
    table = summary(rows_of({mode: [100.0] for mode in alike}, alike, {})).set_index("mode")
    assert table["fallbacks"].isna().to_dict() == {"off": False, "stage": False, "cow": True}


SERVES = ["NWOR mode cow serves 5 layers"]

# -- servers -----------------------------------------------------------------------------------------------------------


def test_a_server_is_proven_by_its_log_and_its_counters(tmp_path):
    with ended({}) as servers:
        servers["stage"] = fake(tmp_path)
        servers["stage"].wait(20)
        assert servers["stage"].proof(loaded=True) == {"layers": 5, "ranks": 1, "windows_total": 3.0}
        servers["stage"].mode = "cow"
        with pytest.raises(EngineError, match="nothing may be measured as cow: .*NWOR mode stage serves 5"):
            servers["stage"].proof(loaded=False)


@pytest.mark.parametrize(
    ("mode", "said", "counters", "loaded", "says"),
    [
        ("stage", ["NWOR mode stage: MLA; vLLM's own cache write serves this model"], {}, False, "MLA"),
        ("stage", [], {}, False, "no word of it"),
        ("cow", SERVES, {"windows_total": 0.0}, True, "no window"),
        ("cow", SERVES, {"windows_total": 1.0, "scheduler_mismatches_total": 1.0}, True, "differ"),
        ("cow", SERVES, {"windows_total": 0.0}, False, ""),
        ("direct", ["NWOR mode direct serves 5 layers"], {"windows_total": 0.0}, True, ""),
        ("off", [], {}, True, ""),
        ("off", SERVES, {}, True, "patched"),
        ("off", [], {"windows_total": 1.0}, True, "patched"),
        (server.AUDITED, [], {"slots_checked_total": 0.0}, True, "no slot"),
        (server.AUDITED, [], {"slots_checked_total": 9.0, "findings_total": 1.0}, True, "1 finding"),
        (server.AUDITED, SERVES, {"slots_checked_total": 9.0}, True, "patched"),
        (server.AUDITED, [], {"slots_checked_total": 9.0}, True, ""),
    ],
)
def test_a_mode_is_proven_or_it_is_said_what_is_missing(mode, said, counters, loaded, says):
    found = server.missing_proof(mode, said, counters, loaded)
    assert says in found and bool(says) == bool(found)


def test_a_dead_server_is_one_message_with_the_end_of_its_log(tmp_path):
    code = "import sys\nfor i in range(40): print('line', i)\nsys.exit('no such model')"
    with ended({}) as servers, pytest.raises(EngineError) as died:
        servers["cow"] = fake(tmp_path, "cow", code)
        servers["cow"].wait(20)
    said = str(died.value).splitlines()
    assert said[0].startswith("the server of cow died with exit code 1 while it started") and "cow.log" in said[0]
    assert said[-1] == "no such model" and "line 39" in said and "line 20" not in said


def test_a_server_that_does_not_come_up_is_not_waited_for_without_end(tmp_path):
    with ended({}) as servers, pytest.raises(EngineError, match="in time"):
        servers["stage"] = fake(tmp_path, code="import time; time.sleep(60)")
        servers["stage"].wait(1)


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_servers_end_with_the_run_and_all_that_they_started(how, tmp_path):
    child = f"import subprocess; subprocess.Popen(['sleep', '300'])\n{FAKE}"
    run = (
        "import signal, sys, time; sys.path[:0] = [sys.argv[1]]\n"
        "from nwor_lab.run import cli; signal.signal(signal.SIGTERM, cli._terminate)\n"
        "from pathlib import Path; from test_serving import fake, ended\n"
        "with ended({}) as servers:\n"
        "    servers['stage'] = fake(Path(sys.argv[2]), code=sys.argv[3]); servers['stage'].wait(20)\n"
        "    print(servers['stage']._process.pid, flush=True); time.sleep(60)\n"
    )
    words = [sys.executable, "-c", run, str(paths.ROOT / "tests" / "lab"), str(tmp_path), child]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, stderr=subprocess.DEVNULL, cwd=paths.ROOT) as one:
        group = int(one.stdout.readline())
        assert len(members(group)) == 2
        one.send_signal(how)
        one.wait(30)
    until = time.monotonic() + 10
    while (left := members(group)) and time.monotonic() < until:
        time.sleep(0.2)
    # One that is killed has no word with its server, which Linux tells; what that has started is its own affair.
    assert len(left) == (1 if how == signal.SIGKILL else 0)
    for _ in left:
        os.killpg(group, signal.SIGKILL)


@pytest.mark.parametrize(("ends", "status"), [(KeyboardInterrupt(), 130), (EngineError("off: 1 of 2 failed"), 1)])
def test_passes_before_the_end_are_kept(ends, status, monkeypatch, tmp_path, capsys):
    """The second pass is stopped, or a request of it fails: what is written is of the first alone."""
    asked = []

    def ask(self, server, load, warm=2):
        asked.append(load)
        if len(asked) == stop_at:
            raise ends
        return REPORT | {"generated_texts": ["a", "b"]}

    quiet = SimpleNamespace(wait=lambda _: None, proof=lambda loaded: {"layers": 5}, ask_to_end=int, close=int)
    monkeypatch.setattr(command.Server, "of", lambda *_: quiet)
    monkeypatch.setattr(command.Client, "__init__", lambda *_: None)
    monkeypatch.setattr(command.Client, "ask", ask)
    words = ["serving", "--modes=off,stage", "--concurrency=2", "--requests=2", "--answer=8", "--orders=3"]
    words += ["--load-format", "nwor_random"]
    stop_at = 2 + 2 + 2  # of warming both, a pass, and within the next
    assert cli.main([*words, "--run-dir", str(tmp_path / "kept")]) == status
    assert ("interrupted" if status == 130 else "1 of 2 failed") in capsys.readouterr().err
    rows = results.read_table("serving", tmp_path / "kept")
    assert set(rows["repeat"]) == {0} and set(rows.query("metric == 'tokens_per_s'")["mode"]) == {"off", "stage"}
    assert set(rows["load_format"]) == {"nwor_random"}
    report = json.loads((tmp_path / "kept" / "serving.json").read_text())
    assert report["interrupted"] and set(report["served"]) == {"off", "stage"}
    assert (tmp_path / "kept" / "serving-summary.csv").exists()
    asked.clear()
    stop_at = 3
    assert cli.main([*words, "--run-dir", str(tmp_path / "none")]) == status
    assert not (tmp_path / "none" / "serving.parquet").exists()


def members(group: int) -> list[str]:
    listed = subprocess.run(
        ["ps", "-eo", "pgid=,stat="], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    return [line for line in listed if line.split()[0] == str(group) and not line.split()[1].startswith("Z")]


def test_off_never_loads_the_plugin_and_modes_do(monkeypatch):
    monkeypatch.setenv("VLLM_NWOR_MODE", "stage")
    spec = EngineSpec("target", "head", k=3)
    off, stage = (server.environment(spec, mode) for mode in ("off", "stage"))
    assert (off["VLLM_PLUGINS"], off["VLLM_NWOR_MODE"]) == ("nwor_lab", "off")
    assert "VLLM_PLUGINS" not in stage and stage["VLLM_NWOR_MODE"] == "stage"
    audited = server.environment(AuditedSpec("target", "head", audit="sample=4"), server.AUDITED)
    assert (audited["VLLM_NWOR_MODE"], audited["VLLM_KV_AUDIT"]) == ("off", "sample=4")
    assert audited["VLLM_PLUGINS"].split(",") == ["nwor_lab", "kv_audit"]
    assert ServingPlan(modes=("off",), audit="full").in_order(1) == (server.AUDITED, "off")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--modes", "stage,off"], "off first"),
        (["--modes", "off,stag"], "--modes stag"),
        (["--audit", "sample=1"], "VLLM_KV_AUDIT='sample=1' must be full, or sample=N"),
        (["--concurrency", ""], "there is no load"),
        (["--concurrency", "4,4"], "got 4,4"),
        (["--longest", "2000"], "1920 tokens of a prompt"),
        (["--concurrency", "65"], "raise --batch"),
        (["--method", "eagel"], "eagel"),
    ],
)
def test_wrong_input_is_one_line_before_a_server_starts(words, says, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(command, "run", None)
    assert cli.main(["serving", "--run-dir", str(tmp_path / "run"), *words]) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("nwor serving: ") and says in printed and printed.count("\n") == 1
