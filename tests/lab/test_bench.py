# SPDX-License-Identifier: Apache-2.0
"""What a bench runs, in which order, what it makes of it, and how it ends when something is wrong."""

import itertools
import json

import pandas as pd
import pytest
from fake_engine import FakeEngine

from nwor.settings import Settings
from nwor_lab.bench import bench, bench_table, options
from nwor_lab.bench.parity import tolerance
from nwor_lab.bench.plan import Plan
from nwor_lab.command_line import parse
from nwor_lab.engines.engine import EngineError, EngineSpec
from nwor_lab.run import results
from tests.devices import needs_fp8_cache

SPEC = EngineSpec("shape")


def test_kernels_of_a_step_are_the_mean_of_the_ranks():
    """A kind is known by the kernel's name, and a rank that waits for another does so in communication."""
    ranks = [
        {"reshape_and_cache_flash_kernel": 80.0, "ncclDevKernel_AllReduce": 8.0, "nvjet_tst_64x8": 160.0, "rms": 16.0},
        {
            "reshape_and_cache_flash_kernel": 88.0,
            "void vllm::cross_device_reduce_1stage": 40.0,
            "nvjet_tst_64x8": 176.0,
        },
    ]
    found = {row["kind"]: row["value"] for row in bench_table.kernel_rows(ranks, steps=8)}
    expected = {"KV write": 10.5, "communication": 3.0, "matmul": 21.0, "other": 1.0, "attention": 0.0, "NWOR": 0.0}
    assert found == pytest.approx(expected)


def test_loads_are_those_that_the_caches_hold(capsys):
    """Every length with every batch, but for 8 prompts of 100 tokens and 28 more: 1,024 slots are needed."""
    plan = Plan(batches=(1, 8), random_prompts=(32, 100), max_tokens=28)
    assert plan.loads(longest=200, capacity=1024) == [(32, 1), (32, 8), (100, 1), (100, 8)]
    assert plan.loads(longest=200, capacity=1023) == [(32, 1), (32, 8), (100, 1)]
    assert "left out: 8 prompts of 100 tokens, the cache has 1023 slots" in capsys.readouterr().err
    assert Plan(batches=(1, 8)).loads(longest=200, capacity=1) == [(200, 1), (200, 8)]


def test_a_repeat_runs_every_mode_and_the_next_reverses_their_order(engines):
    """A prefill or a cool chip in the first mode would be taken for the mode's doing: cached prompts are run before."""
    plan = Plan(modes=("cow", "stage"), batches=(1, 2), repeats=2, max_tokens=5, audit=False)
    rows, _ = bench.run(EngineSpec("shape", prefix_caching=True), plan, [[1, 2, 3]])
    asked = [(call[0], *call[2:]) for call in engines.calls if call[1] == "generate"]
    expected = []
    for size in plan.sizes:  # 8 requests are compared, however many at once
        expected += (8 // size) * [(mode, size, 1, 0.0, 0, 0) for mode in plan.modes]
        expected += [(mode, size, 5, 0.0, 0, 20) for mode in plan.modes for _ in range(8 // size)]
    for repeat, size in itertools.product(range(2), plan.sizes):
        expected += [(mode, size, 1, 0.0, 0, 0) for mode in plan.modes]
        expected += [(mode, size, 5, 0.0, 1000 * repeat, 0) for mode in plan.modes[:: -1 if repeat else 1]]
    assert asked == expected
    steps = pd.DataFrame(rows).query("metric == 'step_ms'").groupby("mode").value.agg(["count", "max"])
    assert steps.to_dict("index") == {mode: {"count": 12, "max": 1.0} for mode in plan.modes}


@pytest.mark.parametrize(("bad_batch", "without"), [(0, []), (2, [2])])
def test_all_that_is_timed_is_held_to_parity(bad_batch, without, engines, monkeypatch):
    """One load that goes wrong costs the mode its times of that load."""
    monkeypatch.setattr(FakeEngine, "bad_batch", bad_batch)
    plan = Plan(modes=("off", "stage"), batches=(1, 2, 4), repeats=2, max_tokens=5, audit=False)
    rows, report = bench.run(SPEC, plan, [[1, 2, 3]])
    assert [found["equal"] for found in report["parity"].values()] == [3 * 8, 3 * 8 - 8 * bool(bad_batch)]
    summary = bench_table.summary(pd.DataFrame(rows), plan)
    table = summary.set_index(["mode", "batch"])
    assert (table.step_ms["off"] == 1).all() and table.step_ms["stage"].dropna().eq(1).all()
    assert table.step_ms["stage"].isna().pipe(lambda bad: bad.index[bad].tolist()) == without
    (said,) = bench_table.verdicts(summary, plan)
    assert ("not at parity" in said) == bool(without)


def test_vllm_without_the_plugin_runs_beside_the_modes(engines, monkeypatch):
    """It is the baseline, and an engine that is patched all the same does not pass for it."""
    plan = Plan(modes=("vllm", "stage"), repeats=1, audit=False)
    rows, _ = bench.run(SPEC, plan, [[1, 2, 3]])
    plain, treated = engines.every[-2:]
    assert (plain.spec.plugins, plain.settings) == ("nwor_lab", Settings()) and treated.spec.plugins == ""
    assert set(pd.DataFrame(rows).query("metric == 'step_ms'")["mode"]) == {"vllm", "stage"}
    monkeypatch.setattr(FakeEngine, "hooks", ["GPUModelRunner._sample"])
    with pytest.raises(EngineError, match="patched"):
        bench.run(SPEC, plan, [[1, 2, 3]])


def test_a_mode_that_does_not_serve_stops_the_run_before_anything_is_measured(engines, monkeypatch):
    rank = {"rank": 0, "mode": "stage", "serving": "off", "reason": "MLA"}
    monkeypatch.setattr(FakeEngine, "report", lambda self: [rank])
    with pytest.raises(EngineError, match="mode stage is not active on every rank.*MLA"):
        bench.run(SPEC, Plan(modes=("stage",)), [[1, 2, 3]])
    assert not any("generate" in call for call in engines.calls) and (engines.calls[-1] == ("stage", "close"))


def timed(modes: dict[str, float], late: float = 1.1, repeats: int = 3) -> tuple[pd.DataFrame, Plan]:
    """Rows of modes whose steps take so many ms, and `late` times that in the mode that comes second."""
    plan = Plan(modes=tuple(modes), repeats=repeats)
    counts = {"tokens": 30.0, "windows": 10.0, "accepted_tokens": 25.0}
    counts |= {"equal_requests": 4, "requests": 4}
    rows = [
        {"mode": mode, "batch": 8, "repeat": repeat, "metric": metric, "unit": "", "value": number}
        for repeat in range(repeats)
        for place, (mode, value) in enumerate(modes.items())
        for step in [value * (late if (place + repeat) % 2 else 1)]
        for metric, number in {"step_ms": step, "wall": step / 1e3, **counts}.items()
    ]
    return pd.DataFrame(rows), plan


def test_a_ratio_is_of_both_orders():
    """The mode that comes second takes a tenth longer, whichever it is; `stage` takes 0.9 times vanilla's."""
    table = bench_table.summary(*timed({"off": 10.0, "stage": 9.0})).set_index("mode")
    assert table.ratio.to_dict() == pytest.approx({"off": 1.0, "stage": 0.9})
    assert table.tokens_per_s.to_dict() == pytest.approx({"off": 90 / 0.031, "stage": 90 / 0.0288})
    assert (table.acceptance_length == 3.5).all()


@pytest.mark.parametrize(
    ("stage", "late", "repeats", "word"),
    [(9.0, 1.02, 4, "in 0 of 1"), (9.9, 1.1, 4, "in 1 of 1"), (11.0, 1.02, 1, "one repeat")],
)
def test_a_verdict_says_what_is_noise(stage, late, repeats, word):
    rows, plan = timed({"off": 10.0, "stage": stage}, late, repeats)
    rows.loc[(rows["metric"] == "equal_requests") & (rows["mode"] == "stage"), "value"] = 3
    (said,) = bench_table.verdicts(bench_table.summary(rows, plan), plan)
    assert f"{3 * repeats} of {4 * repeats} texts" in said and word in said


def test_kernels_are_profiled_in_both_orders(engines):
    """A mode that comes first finds a cooler chip, and its kernels are the faster: the table has the mean."""
    plan = Plan(modes=("off", "stage"), repeats=0, profile=True, audit=False)
    rows, _ = bench.run(SPEC, plan, [[1, 2, 3]])
    assert [call[0] for call in engines.calls if call[1] == "kernel_times"] == ["off", "stage", "stage", "off"]
    found = pd.DataFrame(rows).query("metric == 'kernel_us' and kind == 'KV write'")
    assert found.groupby("mode").size().to_dict() == {"off": 2, "stage": 2} and (found.value == 1).all()
    assert sorted(found.repeat) == [0, 0, 1, 1]


def test_draft_lengths_are_an_axis_of_the_grid(engines, tmp_path):
    """Engines of one length are up at once, and those of the next after them; rows and reports name theirs."""
    words = ["--mode", "off,stage", "--k", "2,4", "--batches", "1,8", "--repeats", "2", "--no-audit"]
    assert bench.main([*words, "--random-prompts", "16", "--run-dir", str(tmp_path)]) == 0
    begins = [call[1] for call in engines.calls if call[1] in ("start", "wait", "close")]
    assert begins == 2 * (2 * ["start"] + 2 * ["wait"] + 2 * ["close"])
    table, report = pd.read_parquet(tmp_path / "bench.parquet"), json.loads((tmp_path / "bench.json").read_text())
    steps = table[table.metric == "step_ms"]
    assert steps.groupby(["k", "mode", "batch"]).size().eq(6).all() and len(steps) == 8 * 6
    assert list(report["ranks"]) == ["off, k=2", "stage, k=2", "off, k=4", "stage, k=4"]


@pytest.mark.parametrize(
    ("words", "attention"),
    [
        ([], None),
        (["--attention-backend", "FLASHINFER"], "flashinfer"),
        (["--attention-backend", "FLASH_ATTN", "--flash-attn-version", "2"], "flash2"),
    ],
)
def test_an_attention_that_is_forced_is_a_setting_of_the_table(words, attention, engines, tmp_path):
    words = [*words, "--mode", "off", "--random-prompts", "16", "--repeats", "1", "--no-audit"]
    assert bench.main([*words, "--run-dir", str(tmp_path)]) == 0
    table = pd.read_parquet(tmp_path / "bench.parquet")
    assert (table["attention"].unique().tolist() == [attention]) if attention else ("attention" not in table)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--mode", "stag"], "--modes stag: choose of off, cow, direct, stage, vllm"),
        (["--mode", "cow,cow"], "modes must be different values"),
        (["--k", "0"], "k must be at least 1, got 0"),
        (["--k", "129"], "at most 128"),
        (["--name", "a/../../b"], "--name"),
        (["--model", "/proc"], "config.json"),
        (["--model", "/nowhere"], "no such folder"),
        (["--model", "no/such/model"], "--shape of llama-2-7b"),
        (["--prompts", "./nothing.jsonl"], "no prompts at nothing.jsonl"),
        (["--batch", "0"], "batch must be at least 1, got 0"),
        (["--batches", "8,16"], "--batches 16: engines run 8 requests at once: raise --batch"),
        (["--batches", "4,4"], "batches must be different values"),
        (["--dtype", "float33"], "float33"),
        (["--method", "eagel"], "eagel"),
        (["--kv-cache-dtype", "fp9"], "fp9"),
        (["--profile"], "--profile sees the kernels of a GPU"),
        (["--shape", "tiny"], "--shape has no tokenizer"),
        (["--shape", "huge", "--random-prompts", "16"], "shape huge: choose of llama-2-7b"),
        (["--random-prompts", "16,449"], "max_model_len 512 leaves room for 448: raise it"),
        (["--random-prompts", "16", "--num-prompts", "0"], "there are no prompts: give --num-prompts"),
        (["--run-dir", "/proc/nwor"], "cannot write results to /proc/nwor"),
    ],
)
def test_wrong_input_is_one_line_before_an_engine_starts(words, says, engines, tmp_path, capsys):
    assert bench.main(["--run-dir", str(tmp_path / "run"), *words]) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("nwor bench: ") and says in printed and printed.count("\n") == 1
    assert not engines.every and not (tmp_path / "run").exists()


def test_two_runs_of_one_name_do_not_write_over_each_other(engines, tmp_path, capsys):
    with results.alone(tmp_path, "--name", "bench."):
        assert bench.main(["--run-dir", str(tmp_path)]) == 2
        assert "another run is at work" in capsys.readouterr().err and not engines.every
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("repeats", "audited"), [(0, 2), (1, 1)])
def test_an_audit_sees_all_loads_where_none_is_timed(repeats, audited, engines, monkeypatch):
    """It ends behind as many loads; each is one generation of the mode."""
    stop = lambda engine, _: engine.calls.append((engine.mode, "stop"))
    monkeypatch.setattr(FakeEngine, "on_every_rank", stop)
    plan = Plan(modes=("off", "stage"), random_prompts=(8, 16), repeats=repeats, max_tokens=5)
    bench.run(SPEC, plan, [[1] * 16])
    of_stage = [call[1] for call in engines.calls if call[0] == "stage" and call[1] in ("generate", "stop")]
    assert of_stage.index("stop") == audited and of_stage.count("stop") == 1


@pytest.mark.parametrize(("error", "status"), [(EngineError("the cow engine failed"), 1), (KeyboardInterrupt(), 130)])
def test_an_engine_that_fails_and_an_interrupt_leave_one_line_and_no_result(
    error, status, monkeypatch, tmp_path, capsys
):
    def fail(*given: object) -> None:
        raise error

    monkeypatch.setattr(bench, "started", fail)
    assert bench.main(["--run-dir", str(tmp_path)]) == status
    assert capsys.readouterr().err.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("ends", "status"), [(KeyboardInterrupt(), 130), (EngineError("the stage engine ended\nat once"), 1)]
)
@pytest.mark.parametrize(
    ("ks", "stop_at", "kept"),
    [
        ("4", 6, {}),  # while texts are compared
        ("4", 6 + 2, {}),
        ("4", 6 + 4 + 2, {4: 1}),
        ("2,4", 14 + 6, {2: 2}),
        ("2,4", 14 + 6 + 4 + 1, {2: 2, 4: 1}),
    ],
)
def test_repeats_before_the_end_are_kept(ks, stop_at, kept, ends, status, engines, monkeypatch, tmp_path, capsys):
    """A repeat is 4 calls, two loads of two modes, and they are compared in 6: what is not whole is not there."""
    generate, asked = FakeEngine.generate, itertools.count(1)

    def interrupted(self, *how, **named):
        if next(asked) == stop_at:
            monkeypatch.setattr(FakeEngine, "report", None)  # the engines have ended too
            raise ends
        return generate(self, *how, **named)

    monkeypatch.setattr(FakeEngine, "generate", interrupted)
    words = ["--mode", "off,stage", "--k", ks, "--batches", "4,8", "--random-prompts", "16", "--repeats", "2"]
    assert bench.main([*words, "--run-dir", str(tmp_path)]) == status
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and ("interrupted" if status == 130 else "stage engine") in said
    assert {file.name for file in tmp_path.iterdir()} == ({"bench.parquet", "bench.json"} if kept else set())
    if kept:
        table, report = pd.read_parquet(tmp_path / "bench.parquet"), json.loads((tmp_path / "bench.json").read_text())
        steps = table[table.metric == "step_ms"]
        assert steps.groupby("k")["repeat"].nunique().to_dict() == kept
        assert steps.groupby(["k", "repeat", "mode", "batch"]).ngroups == 4 * sum(kept.values())
        assert report["interrupted"] and len(report["ranks"]) == 2 * len(kept)


@pytest.mark.parametrize(
    ("words", "bound"),
    [
        (["--dtype", "float32"], tolerance("float32")),
        (["--dtype", "bfloat16"], tolerance("bfloat16")),
        pytest.param(["--kv-cache-dtype", "fp8"], tolerance("bfloat16", "fp8"), marks=needs_fp8_cache),
    ],
)
def test_a_tolerance_is_one_of_what_rounds(words, bound):
    """What bfloat16 excuses would hide a fault in float32."""
    asked = parse(bench.Bench, [*words, "--random-prompts", "8"], "bench", "")
    assert options.parse_config(asked)[1].tolerance == bound


def test_a_mode_that_one_rank_does_not_serve_is_not_measured():
    served = {"rank": 0, "mode": "stage", "serving": "stage"}
    bench.require_served("stage", [served, {**served, "rank": 1}])
    for wrong in ({"serving": "off"}, {"serving": "cow"}, {"mode": "off"}):
        with pytest.raises(EngineError, match="rank"):
            bench.require_served("stage", [served, {**served, "rank": 1, **wrong}])
    with pytest.raises(EngineError, match="rank"):
        bench.require_served("stage", [])
