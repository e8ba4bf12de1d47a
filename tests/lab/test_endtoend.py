# SPDX-License-Identifier: Apache-2.0
"""What notebook 04 makes of a bench's report, and of steps recorded on GPUs."""

import copy
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from nwor_lab import paths
from nwor_lab.audit.auditor import AuditReport
from nwor_lab.bench import endtoend, gpu_steps
from nwor_lab.bench.parity import Parity
from nwor_lab.run import results

LEFT = "slots that vanilla leaves dirty are its rejected rows"


@pytest.fixture
def report() -> dict:
    """Two ranks, three steps, two layers; vanilla rejects three rows in one step and one in the next."""
    vanilla = AuditReport(3, 6, 4, 8, 20, dirty_by_step=[0, 6, 2])
    clean = AuditReport(3, 6, 0, 0, 20, dirty_by_step=[0, 0, 0])
    counters = {"off": {}, "cow": {"rejected_tokens": 4}, "direct": {}, "stage": {"windows": 5}}
    audits = {"off": vanilla, "cow": clean, "direct": vanilla, "stage": clean}
    ranks = {
        mode: [{"rank": rank, "audit": asdict(audit), "counters": counters[mode]} for rank in (0, 1)]
        for mode, audit in audits.items()
    }
    scheduled = {"draft_tokens": 10.0, "accepted_tokens": 6.0, "drafts": 5.0}
    metrics = {mode: {f"spec_decode_num_{name}": value for name, value in scheduled.items()} for mode in ranks}
    spec = {"model": str(paths.PAIR_TARGET), "dtype": "bfloat16", "kv_cache_dtype": "auto", "tp": 2, "k": 2}
    audited = {mode: {**metrics[mode], **counters[mode]} for mode in ranks}
    return json.loads(json.dumps({"ranks": ranks, "metrics": metrics, "spec": spec, "audited": audited}))


def claims(run: results.Run, report: dict) -> dict[str, bool]:
    endtoend.claim_clean(run, "here", report)
    endtoend.claim_left(run, "here", report)
    return results.claims(run.directory).set_index("claim").holds.to_dict()


def test_a_dirty_slot_more_is_no_rejected_row(report, tmp_path):
    report["ranks"]["off"][1]["audit"]["dirty_slots"] += 1
    found = claims(results.Run(tmp_path, "04"), report)
    assert [claim for claim, holds in found.items() if not holds] == [f"here: {LEFT}"]


def test_vanilla_is_held_to_the_rows_that_its_own_scheduler_counts(report, tmp_path):
    """A near tie can give it one rejected row less than `cow`, and each rank two dirty slots less (two layers)."""
    report["audited"]["off"]["spec_decode_num_accepted_tokens"] += 1
    for rank in report["ranks"]["off"]:
        rank["audit"]["dirty_slots"] -= 2
    assert all(claims(results.Run(tmp_path, "04"), report).values())


@pytest.mark.parametrize(("counted", "holds"), [(4, True), (5, False)])
def test_windows_of_which_no_scheduler_hears_are_counted_on_the_device(report, tmp_path, counted, holds):
    """A GPU runs a step ahead: both schedulers heard of three rejected rows, and four were."""
    for mode in ("off", "cow"):
        report["audited"][mode]["spec_decode_num_accepted_tokens"] = 7.0
    report["audited"]["cow"]["rejected_tokens"] = counted
    found = claims(results.Run(tmp_path, "04"), report)
    assert found[f"here: {LEFT}"] is holds


@pytest.fixture
def whole(report) -> dict:
    """The same report with all that notebook 04 judges; every claim of it holds."""
    for mode, ranks in report["ranks"].items():
        for rank in ranks:
            rank |= {"serving": mode, "target_layers": 5}
            rank["counters"] |= {"bytes_written": (5 + 10 + 6) * 5 * 512 if mode == "stage" else 0}
    for mode in ("cow", "stage"):
        report["metrics"][mode] |= {"nwor_scheduler_checks": 3.0, "nwor_scheduler_mismatches": 0.0}
    report["plan"] = {"tolerance": 0.05, "modes": ["off", "cow", "direct", "stage"]}
    stage = Parity(7, 8, 0.2, 0.1, 100, 100 * 0.04**4)
    report["parity"] = {mode: asdict(Parity(8, 8)) for mode in ("off", "cow")}
    report["parity"] |= {mode: asdict(stage) for mode in ("direct", "stage")}
    return report


def bench_of(accepted: dict[str, int]) -> pd.DataFrame:
    """What each mode accepted of 10,000 drafts."""
    rows = [(mode, 0, "accepted_tokens", count) for mode, count in accepted.items()]
    rows += [(mode, 0, "draft_tokens", 10_000) for mode in accepted]
    return pd.DataFrame(rows, columns=["mode", "repeat", "metric", "value"])


ROUNDING = "{} differs from vanilla as rounding does: mean shift, largest shift and gap (nats)"
EQUAL = {"off": 5000, "cow": 5000, "direct": 5010, "stage": 5010}
NULLS: list[tuple[str, dict[str, object], set[str]]] = [
    ("a rank falls back to vanilla", {"ranks stage 1 serving": "off"}, {"every rank serves the mode asked for"}),
    ("cow loses a row", {"parity cow equal": 7}, {"cow's greedy tokens are vanilla's"}),
    ("nothing is compared", {"parity cow equal": 0, "parity cow requests": 0}, {"cow's greedy tokens are vanilla's"}),
    ("stage hides drafts from attention",
     {"accepted": {**EQUAL, "stage": 2200}, "parity stage largest_gap": 3.0},
     {"stage accepts as many drafts as vanilla (|z|)", ROUNDING.format("stage")}),
    ("direct attends to other rows", {"parity direct largest_shift": 3.0}, {ROUNDING.format("direct")}),
    ("a fault shifts a few tokens", {"parity stage places": 10}, {ROUNDING.format("stage")}),
    ("no token is compared", {"parity stage places": 0, "parity stage sum_p4": 0.0}, {ROUNDING.format("stage")}),
    ("direct cleans up", {"ranks direct 0 audit dirty_layer_steps": 0, "ranks direct 1 audit dirty_layer_steps": 0},
     {"direct, the control, leaves dirty layer-steps behind"}),
    ("no draft is ever right", {"accepted": dict.fromkeys(EQUAL, 0)},
     {"stage accepts as many drafts as vanilla (|z|)"}),
    ("ranks commit other rows", {"ranks cow 1 counters rejected_tokens": 5, "ranks stage 1 counters windows": 6},
     {"cow's counts are the same on every rank", "stage's counts are the same on every rank"}),
    ("other rows are committed than the scheduler accepts",
     {"metrics cow nwor_scheduler_mismatches": 1.0, "metrics stage nwor_scheduler_mismatches": 1.0},
     {"cow's commits are the scheduler's in every step", "stage's commits are the scheduler's in every step"}),
    ("no step is checked", {"metrics cow nwor_scheduler_checks": 0.0},
     {"cow's commits are the scheduler's in every step"}),
    ("cow restores nothing", {"ranks cow 0 audit dirty_layer_steps": 4}, {"cow leaves no layer-step dirty, of 12"}),
    ("stage commits nothing", {"ranks stage 0 audit unwritten_rows": 9}, {"stage leaves no layer-step dirty, of 12"}),
    ("cow keeps other bytes", {"ranks cow 1 audit wrong_rows": 1}, {"cow leaves no layer-step dirty, of 12"}),
    ("stage writes between steps", {"ranks stage 1 audit stray_slots": 1}, {"stage leaves no layer-step dirty, of 12"}),
    ("stage is not audited", {"ranks stage 0 audit layer_steps": 0, "ranks stage 1 audit layer_steps": 0},
     {"stage leaves no layer-step dirty, of 0"}),
    ("vanilla cleans up", {"ranks off 0 audit dirty_layer_steps": 0, "ranks off 1 audit dirty_layer_steps": 0},
     {"vanilla leaves dirty layer-steps behind"}),
]  # fmt: skip
"""A wrong world in words, what it changes in the report, and the claims that it breaks."""


def claims_in(world: dict[str, object], report: dict, folder: Path) -> pd.DataFrame:
    """The claims of notebook 04 in a world; of each, what follows the words that say where."""
    accepted: Any = world.get("accepted", EQUAL)
    for path, value in world.items():
        *owners, name = path.split()
        owner = report
        for key in owners:
            owner = owner[int(key) if key.isdigit() else key]
        owner[name] = value
    run = results.Run(folder, "04")
    endtoend.claim(run, bench_of(accepted), report)
    return results.claims(folder).assign(claim=lambda found: found["claim"].str.partition(": ")[2])


@pytest.mark.parametrize(("world", "broken"), [null[1:] for null in NULLS], ids=[null[0] for null in NULLS])
def test_a_null_model_breaks_its_claims(whole, tmp_path, world, broken):
    found = claims_in(world, whole, tmp_path)
    assert set(found.claim[~found.holds]) == broken


def test_every_claim_has_a_null_model(whole, tmp_path):
    found = claims_in({}, whole, tmp_path)
    assert found.holds.all()
    broken = set().union(*(broken for _, _, broken in NULLS)) - {"stage leaves no layer-step dirty, of 0"}
    assert set(found.claim) == broken


def test_vllm_never_patched_is_the_baseline_where_it_is_there(whole, tmp_path):
    for section in ("ranks", "metrics", "parity", "audited"):
        whole[section] = {"vllm": copy.deepcopy(whole[section]["off"]), **whole[section]}
    for rank in whole["ranks"]["vllm"]:
        rank["serving"] = "off"
    found = claims_in({"accepted": {"vllm": EQUAL["off"], **EQUAL}}, whole, tmp_path)
    assert found.holds.all() and found.claim.str.contains("vLLM never patched leaves").any()
    whole["ranks"]["vllm"][0]["audit"]["dirty_slots"] += 1
    assert claims(results.Run(tmp_path, "04"), whole)[f"here: {LEFT}"] is False


def test_one_rank_is_not_compared_with_itself(whole, tmp_path):
    whole["ranks"] = {mode: ranks[:1] for mode, ranks in whole["ranks"].items()}
    found = claims_in({"spec tp": 1}, whole, tmp_path)
    assert found.holds.all() and not found.claim.str.contains("every rank$").any()


def test_dirt_by_step(report):
    dirty = results.tidy(endtoend.dirty_rows(report), run_id="x")
    drawn = dirty.pivot_table(index="step", columns="mode", values="value", aggfunc="sum")
    assert drawn.to_dict("list") == {"cow": [0, 0, 0], "direct": [0, 12, 4], "off": [0, 12, 4], "stage": [0, 0, 0]}


# -- whole steps on a GPU ----------------------------------------------------------------------------------------------


def steps_of(ms: dict[str, tuple[float, float]], **where: object) -> pd.DataFrame:
    """One setting and a repeat for each time of each mode."""
    common = {"tp": 1, "kv_heads": 8, "kv_cache_dtype": "auto", "k": 8, "prompt": 512, "batch": 4} | where
    counts = {"tokens": 30.0, "windows": 10.0, "accepted_tokens": 20.0}
    rows = [
        common | {"mode": mode, "repeat": repeat, "metric": metric, "value": value}
        for mode, times in ms.items()
        for repeat, step in enumerate(times)
        for metric, value in {"step_ms": step, "wall": step / 1e3, **counts}.items()
    ]
    return pd.DataFrame(rows)


RATIO = {"vllm": (10.0, 10.0), "stage": (9.4, 9.6)}


@pytest.mark.parametrize("baseline", ["vllm", "off"])
def test_a_step_is_over_that_of_vllm_never_patched(baseline):
    """Where there is none, over `off`; or over another mode that is named."""
    table = steps_of({"off": (20.0, 20.0), baseline: (10.0, 10.0), "stage": (9.4, 9.6), "direct": (4.7, 4.8)})
    line = gpu_steps.step_ratios(table).set_index("mode").loc["stage"]
    assert (line["step"], line["low"], line["high"]) == pytest.approx(((0.94 * 0.96) ** 0.5, 0.94, 0.96))
    assert (line["tokens_per_s"], line["tokens"]) == pytest.approx((60 / 0.019, 20 / 19))
    assert line["acceptance_length"] == 3 and line["stable"] and line["at_parity"] and line["step_ms"] == 9.5
    assert gpu_steps.step_ratios(table, "direct").set_index("mode")["step"]["stage"] == pytest.approx(2.0)


def test_parity_stands_beside_the_time_of_its_load():
    """Of this setting's passes alone; NaN where it was not compared."""
    steps = steps_of(RATIO)
    compared = {
        "equal_requests": (3.0, 2.0), "requests": (4.0, 4.0), "largest_gap": (0.0, 0.1), "largest_shift": (0.3, 0.0),
        "places": (60.0, 40.0), "fourth_powers": (1e-5, 0.0),
    }  # fmt: skip
    common = steps[steps["mode"] == "stage"].head(1).drop(columns="repeat")
    more = [common.assign(metric=name, value=value) for name, values in compared.items() for value in values]
    elsewhere = common.assign(metric="largest_gap", value=9.0, batch=64)
    table = gpu_steps.step_ratios(pd.concat([steps, *more, elsewhere])).set_index("mode")
    columns = [*list(compared)[:4], "shift"]
    assert table.loc["stage", columns].tolist() == pytest.approx([5, 8, 0.1, 0.3, 1e-7**0.25])
    assert table.loc["vllm", columns].isna().all() and table["step"].isna().to_dict() == {"stage": True, "vllm": False}
    near = [rows.replace({"value": {0.3: 0.15}}) for rows in more]
    assert gpu_steps.step_ratios(pd.concat([steps, *near]))["step"].notna().all(), "0.15 nats are a near tie"
    many = [rows.replace({"value": {1e-5: 1e-3}}) for rows in near]
    assert gpu_steps.step_ratios(pd.concat([steps, *many]))["step"].isna().any(), "0.06 nats everywhere are none"


def test_settings_are_apart_and_one_that_did_not_run_steadily_has_no_ratio():
    other = steps_of({"vllm": (10.0, 10.0), "stage": (9.0, 10.2)}, batch=16)
    table = gpu_steps.step_ratios(pd.concat([steps_of(RATIO), other])).query("mode == 'stage'").set_index("batch")
    assert table["stable"].to_dict() == {4: True, 16: False} and table["step"].isna().to_dict() == {4: False, 16: True}


def test_the_overview_has_parity_and_steps_of_each_mode(whole):
    steps = steps_of({"off": (10.0, 10.0), "cow": (10.2, 10.2), "direct": (9.0, 9.0), "stage": (9.4, 9.6)})
    one = steps.groupby("mode").head(1).drop(columns=["metric", "value", "repeat"]).to_dict("records")
    rows = [{**line, **row} for line in one for row in Parity(**whole["parity"][line["mode"]]).rows()]
    found = endtoend.overview(pd.concat([steps, pd.DataFrame(rows)]), whole).set_index("mode")
    assert found["equal"].to_dict() == {"off": "8/8", "cow": "8/8", "direct": "7/8", "stage": "7/8"}
    assert found["step"].to_dict() == {"off": "1.000", "cow": "1.020", "direct": "0.900", "stage": "0.950"}
    assert found.loc["stage", "low to high"] == "0.940 to 0.960" and found.loc["off", "dirty"] == "4 of 6"
