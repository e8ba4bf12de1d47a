# SPDX-License-Identifier: Apache-2.0
"""The README's numbers are those of the recorded run, and what it names exists."""

import itertools
import json
import math
import re

import pandas as pd
import pytest

from nwor.attention import configs
from nwor_lab import paths, results
from nwor_lab.experiments import endtoend
from nwor_lab.experiments.acceptance import survival
from nwor_lab.microbench import attention as attention_bench
from nwor_lab.model import predicted, ratios
from nwor_lab.plots import attention as attention_plots
from nwor_lab.plots import kernels as kernel_plots

README = (paths.ROOT / "README.md").read_text()
TABLE = configs.shipped("NVIDIA H200")
LATEST = "steps-12"  # the run of steps with the attention kernel as it is


@pytest.fixture(scope="module")
def acceptance() -> pd.DataFrame:
    return results.read_table("acceptance", paths.RECORDED)


def line(start: str) -> str:
    return next(text for text in README.splitlines() if text.startswith(f"| {start}"))


def value(table: pd.DataFrame, metric: str, **where: float) -> float:
    rows = table[(table.metric == metric) & table.position.isna()]
    for column, wanted in where.items():
        rows = rows[rows[column] == wanted]
    (found,) = rows.value
    return float(found)


def measured(claim: str) -> str:
    claims = results.read_table("claims", paths.RECORDED)
    (found,) = claims.loc[claims.claim == claim, "measured"]
    return found


def test_minutes() -> None:
    """Of the walk's notebooks, as they took in the recorded run, give or take one."""
    took = {
        name[:2]: entry["seconds"] / 60 for name, entry in results.read_manifest(paths.RECORDED)["notebooks"].items()
    }
    rows = [[cell.strip() for cell in text.split("|")] for text in README.splitlines() if "2 CPU cores" in text]
    said = {row[2].strip("`"): int(row[5]) for row in rows if row[5]}
    assert said.keys() == {"01", "02", "03", "04", "09"}
    assert all(abs(minutes - took[name]) <= 1 for name, minutes in said.items())


def test_every_recorded_claim_holds() -> None:
    assert results.read_table("claims", paths.RECORDED).holds.all()


def test_acceptance(acceptance: pd.DataFrame) -> None:
    length = value(acceptance, "acceptance_length", k=4, temperature=0)
    assert f"| {length:.2f} tokens a window" in line("The shipped pair's acceptance length")
    greedy, hot = (value(acceptance, "rejected_share", k=8, temperature=t) for t in (0, 1))
    assert f"| {greedy:.0%} / {hot:.0%} |" in line("Share of written rows")


def test_reference() -> None:
    table = results.read_table("reference", paths.RECORDED)
    off, blind = (value(table[table["mode"] == mode], "acceptance_length") for mode in ("off", "blind"))
    assert f"acceptance length {blind:.2f} against {off:.2f};" in line("Blind staging")


def test_end_to_end() -> None:
    cow, gaps, shifts, dirty = (
        [measured(f"TP={tp}, bfloat16: {claim}") for tp in (1, 2)]
        for claim in (
            "cow's greedy tokens are vanilla's",
            "a token of stage that differs is a near tie (nats)",
            "stage shifts no log-probability of vanilla's best tokens further (nats)",
            "vanilla leaves dirty layer-steps behind",
        )
    )
    assert f"| {cow[0]}/{cow[0]}, {cow[1]}/{cow[1]} requests |" in line("`cow` gives vanilla's")
    shifted = ", ".join(f"{float(shift):.2f}" for shift in shifts)
    assert f"| {gaps[0]}, {gaps[1]} nats (bound 0.25); log-probabilities shift by up to {shifted} |" in line(
        "`stage` gives them"
    )
    assert f"| {dirty[0]} / 0 / 0, {dirty[1]} / 0 / 0 |" in line("Layer-steps")


def test_the_machine_of_the_recorded_walk() -> None:
    said = (paths.RECORDED / "README.md").read_text()
    for name, entry in results.read_manifest(paths.RECORDED)["notebooks"].items():
        cpu = entry["provenance"]["cpu"]
        maker = cpu["model"].split()[0].removesuffix("(R)")
        assert cpu["cores"] == 2 and re.search(rf"Made on two cores of an {maker} ", said), name


def test_step_time() -> None:
    steps = results.read_table("steps", paths.RECORDED)
    turns = steps[steps.tp == 1].pivot(index="repeat", columns="mode", values="value")
    each = turns.div(turns["off"], axis=0)[["cow", "stage"]]
    found = each.apply(ratios.crossover)
    said = re.search(r"took ([\d.]+) times vanilla's under `cow` and\s+([\d.]+) times under `stage`", README)
    assert said
    assert said.groups() == tuple(f"{found[mode]:.2f}" for mode in ("cow", "stage"))
    assert f"which lie up to {100 * (each.max() / each.min() - 1).max():.0f} % apart" in README


def test_cow_on_a_gpu() -> None:
    table = results.read_table("gpu_cow", paths.RECORDED)
    steps = table[table.metric == "step_ms"].groupby(["graphs", "mode", "repeat"]).value.median()
    eager, graphs = (steps[on, "cow"].median() / steps[on, "off"].median() for on in (False, True))
    assert re.search(rf"a step {eager:.2f}\s+and {graphs:.2f} times vanilla's", README)
    dirty = table[table.metric == "audit.dirty_layer_steps"].groupby("mode").value.apply(list)
    assert (dirty["cow"], dirty["off"]) == ([0, 0], [240, 240])


def test_kernels() -> None:
    nine, peer, share = (
        float(measured(claim))
        for claim in (
            "times faster than 32 launches, a third of 9 rows, worst",
            "times faster than any peer, worst of all shapes",
            "share of copy bandwidth, 2,304 rows that all move, launch taken off, worst",
        )
    )
    assert f"| {nine:.1f} times faster, worst shape |" in line("One launch writes")
    assert f"| {peer:.2f} times faster |" in line("Its least lead")
    assert f"| {share:.2f}, worst shape |" in line("Share of a copy's bandwidth")
    goals = kernel_plots.goals(results.read_table("kernel_times", paths.RECORDED))
    few, many = (goals[goals.goal.str.startswith(goal)] for goal in ("empty kernels", "share of copy"))
    low, high = ([few[by].agg(end) for by in ("reached", "streamed")] for end in ("min", "max"))
    assert f"At 9 rows they take {low[0]:.1f} to {high[0]:.1f} empty kernels" in README
    assert f"takes {low[1]:.1f} to {high[1]:.1f}. At" in README
    worst = many.loc[many.reached.idxmin()]
    said = rf"{many.met.sum()} of {len(many)} shapes reach 0.85\s+of the copy bandwidth, launch included; the worst "
    assert re.search(said + rf"reaches {worst.reached:.2f}, where streaming reaches {worst.streamed:.2f}\.", README)


def test_what_it_names_exists() -> None:
    for name in re.findall(r"`(?:notebooks|nwor|data|tools|kernels)/[\w./-]*`", README):
        assert (paths.ROOT / name.strip("`")).exists(), name
    for link in re.findall(r"\]\(([\w./-]+)\)", README):
        assert (paths.ROOT / link).exists(), link


def test_modes_on_a_gpu() -> None:
    audit = results.read_table("gpu_audit", paths.RECORDED)
    audit = audit[audit.tp == 1]

    def of(mode: str, metric: str) -> float:
        (found,) = audit[(audit["mode"] == mode) & (audit.metric == metric)].value
        return float(found)

    equal = [f"{of(mode, 'equal_requests'):.0f}/{of(mode, 'requests'):.0f}" for mode in ("cow", "stage")]
    assert f"| {equal[0]}, {equal[1]}; the others {of('stage', 'largest_gap')} nats" in line("On a GPU, V2")
    dirty = [of(mode, "audit.dirty_layer_steps") for mode in ("off", "cow", "stage")]
    assert (dirty[1:], of("cow", "audit.unwritten_rows"), of("stage", "audit.unwritten_rows")) == ([0, 0], 0, 0)
    assert f"| {dirty[0]:.0f} / 0 / 0 of {of('off', 'audit.layer_steps'):.0f} |" in line("There: layer-steps")
    layers = of("off", "audit.layer_steps") / of("off", "audit.steps")
    rows, slots = of("cow", "counters.rejected_tokens") * layers, of("off", "audit.dirty_slots")
    assert f"| {slots:,.0f} of {rows:,.0f} slots there |" in line("What vanilla leaves is")


def test_a_timed_configuration_audited() -> None:
    audit = results.read_table("gpu_audited_steps", paths.RECORDED).query("engine == '' or engine == mode")
    assert set(zip(audit.kv_heads, audit.kv_cache_dtype, audit.k, strict=True)) == {(32, "auto", 8), (8, "fp8", 8)}
    of = audit[audit["metric"] != "step_ms"].groupby(["mode", "metric"]).value.sum()
    left = " / ".join(f"{of[mode, 'audit.dirty_layer_steps']:.0f}" for mode in ("off", "cow", "stage"))
    assert f"| {left} of {of['off', 'audit.layer_steps']:.0f} |" in line("Before such loads with k=8")
    assert of["cow", "audit.unwritten_rows"] == of["stage", "audit.unwritten_rows"] == 0


def test_the_tests_on_a_gpu() -> None:
    tests = results.read_table("gpu_tests", paths.RECORDED)
    modes = tests[tests.test.str.contains("test_vllm_gpu")]
    kinds = ("passed", "failed", "skipped")
    said = ", ".join(" / ".join(str((part.outcome == kind).sum()) for kind in kinds) for part in (tests, modes))
    assert f"| {said} |" in line("The tests that need a GPU")
    of_stacks = modes.test[modes.test.str.contains("test_a_mode_is_exact")].str.extract(r"\[(.*)-(?:cow|stage)\]")[0]
    assert f"in {of_stacks.nunique()} combinations" in line("The tests that need a GPU")
    for what in ("FlashInfer graphs", "FlashInfer eager fp8", "v2 FA one graph", "v2 FA piecewise", "v1 Triton eager"):
        assert of_stacks.str.contains(what, regex=False).any(), what
    for what in ("eagle3", "ngram", "draft_model", "batches_of_32_and_64[8]"):
        assert modes.test.str.contains(what, regex=False).any(), what


def test_two_ranks_on_gpus() -> None:
    audit = results.read_table("gpu_audit", paths.RECORDED)
    of = audit[audit.tp == 2].groupby(["metric", "mode"]).value.unique()
    left = [of["audit.dirty_layer_steps", mode] for mode in ("off", "cow", "stage")]
    (steps,), (equal,), (requests,) = (
        of[found] for found in (("audit.layer_steps", "off"), ("equal_requests", "cow"), ("requests", "cow"))
    )
    assert all(len(found) == 1 for found in left), "the ranks' audits differ"
    said = " / ".join(f"{found[0]:.0f}" for found in left)
    assert f"| {said} of {steps:.0f}; {equal:.0f}/{requests:.0f} requests equal under `cow` |" in line("Two ranks on")


def test_the_walk_on_two_gpus() -> None:
    claims = results.read_table("gpu_claims", paths.RECORDED)
    assert claims.holds.all() and {name[:4] for name in claims.claim} == {"TP=1", "TP=2"}
    assert f"| {len(claims)} of {len(claims)} |" in line("This walk's own end-to-end notebook")


@pytest.fixture(scope="module")
def table() -> pd.DataFrame:
    """Whole steps on a GPU, one line a setting and mode."""
    return endtoend.gpu_steps(*(results.read_table(name, paths.RECORDED) for name in ("gpu_steps", "gpu_kernels")))


@pytest.fixture(scope="module")
def cells(table) -> pd.DataFrame:
    return table.set_index(["tp", "kv_cache_dtype", "mode", "k", "kv_heads", "prompt", "batch"]).sort_index()


def test_steps_on_a_gpu(cells) -> None:
    def said(tp: int, dtype: str, modes: tuple[str, ...], batches: tuple[int, ...], column: str = "step") -> str:
        return ", ".join(
            f"`{mode}` " + " / ".join(f"{cells.loc[(tp, dtype, mode, 8, 32, 512, n), column]:.3f}" for n in batches)
            for mode in modes
        )

    both, few, every = ("stage", "cow"), (1, 4, 16), (1, 4, 16, 64)
    assert f"| {said(1, 'auto', both, few, 'gpu')} |" in line("GPU time of all kernels")
    assert f"| {said(1, 'auto', both, every)} |" in line("A whole engine step")
    assert f"| {said(1, 'fp8', ('stage',), every)} |" in line("The same with an fp8 cache")
    quantised = f"with an fp8 cache {said(2, 'fp8', ('stage',), every)}"
    assert f"| {said(2, 'auto', both, every)}; {quantised} |" in line("The same over two ranks")
    apart = 100 * cells[["low", "high"]].sub(cells.step, axis=0).abs().max(axis=1)
    shown = apart.loc[(1, "auto", "stage", 8, 32, 512)]
    within = f"`stage`'s repeats within {shown[[1, 4, 16]].max():.1f} % of it, at batch 64 {shown[64]:.1f} %"
    assert within in line("A whole engine step")


def test_where_stage_wins_and_does_not(table) -> None:
    every = table[table["mode"] == "stage"]
    told = every[every.stable & every.step.notna()]
    keys = [*attention_bench.KEYS, "ratio"]
    served_then = pd.read_csv(paths.DATA / "attention" / "h200_steps.csv")[keys]
    by_shape = attention_bench.by_shape(told)[keys].round({"ratio": 4})
    in_it = (by_shape.merge(served_then, how="left", indicator=True)._merge == "both").to_numpy()
    gone = served_then[(served_then.merge(by_shape, how="left", indicator=True)._merge == "left_only").to_numpy()]
    served, left = told[in_it], told[~in_it]
    flat = README.replace("\n  ", " ")
    won, lost = served[served.step < 1], served[served.step >= 1]
    assert f"Of {len(served)} settings measured whole in which it served" in flat
    assert f"in {len(won)}, {won.step.min():.3f} to {won.step.max():.4f} times vanilla's" in flat
    assert f"in {(won.high > 1).sum()} of them some repeat says otherwise" in flat
    assert lost[endtoend.SETTING].to_numpy().tolist() == [[2, 32, "auto", 8, 8192, 16]]
    (lost,) = lost.itertuples()
    assert f"at batch 16 took {lost.step:.3f} (repeats {lost.low:.3f} to {lost.high:.3f})" in flat
    (earlier,) = gone.itertuples()
    assert (earlier.kv_heads, earlier.cache, earlier.context, earlier.batch, earlier.k) == (8, "fp8", 8240, 64, 8)
    assert f"in an earlier bench 8 with an fp8 cache at batch 64 took {earlier.ratio:.3f}." in flat
    assert f"In {len(left)} settings, the latter among them, `stage` fell back" in flat
    assert [1, 8, "fp8", 8, 8192, 64] in left[endtoend.SETTING].to_numpy().tolist()
    assert f"as these were recorded ({left.step.min():.3f} to {left.step.max():.3f})" in flat
    assert len(told) == len(every)


def test_goals_of_stage(cells) -> None:
    flat = README.replace("\n  ", " ")
    assert "Its goals for whole steps at k=8 and prompts of 512 are all met, in bf16 and with an fp8 cache" in flat
    goals = {(1, 32): {1: 0.97, 16: 0.96, 64: 0.96}, (1, 8): dict.fromkeys((1, 4, 16, 64), 0.98)}
    goals |= {(2, kv_heads): dict.fromkeys((1, 4, 16, 64), 0.97) for kv_heads in (8, 32)}
    missed = [
        (tp, cache, kv_heads, batch)
        for cache, ((tp, kv_heads), wanted) in itertools.product(("auto", "fp8"), goals.items())
        for batch, ratio in wanted.items()
        if cells.loc[(tp, cache, "stage", 8, kv_heads, 512, batch)].step > ratio
    ]
    assert missed == []
    combined = pd.read_csv(paths.DATA / "attention" / "h200_combined.csv")
    saved = (combined.before - combined.rows_8).max()
    assert f"more slowly (up to {saved:.1f} us of a layer between its neighbours," in flat
    counters = results.read_table("attention_counters", paths.RECORDED)
    short = counters.query("unit == '%' and context == 512 and batch == 1 and op in ('nwor', 'flash')")
    assert f"are each busy by {math.ceil(short.value.max())} % of their peak at most" in flat


def test_registers_bound_for_three_programs() -> None:
    folder = paths.DATA / "attention"
    times = pd.read_csv(folder / "h200_registers.csv").set_index(["kv_heads", "batch", "context"])
    ratio = times.bound / times.free
    flat = (folder / "README.md").read_text().replace("\n", " ")
    assert (
        f"take {ratio.min():.2f} to {ratio.max():.2f} times as long as the others, {ratio.median():.2f} at the" in flat
    )
    assert ratio.idxmin() == (8, 64, 8240)
    least, most = sorted(ratio.loc[8, 64][[560, 2096]])
    assert f"at 560 and 2,096 positions the same takes {least:.2f} to {most:.2f}" in flat


def test_what_is_of_the_kernel_as_it_is() -> None:
    steps, kernels, audited, attention, tests = (
        results.read_table(name, paths.RECORDED)
        for name in ("gpu_steps", "gpu_kernels", "gpu_audited_steps", "attention", "gpu_tests")
    )
    of_stage = steps[steps.engine == "stage"]
    assert set(of_stage.k) == {1, 3, 8}
    for table in (of_stage, audited, attention, tests[tests.test.str.contains("test_gpu_attention")]):
        assert set(table.run_id) == {LATEST}
    keys = ["run_id", "tp", "kv_heads", "kv_cache_dtype"]
    profiles = kernels[kernels.engine == "stage"][keys].drop_duplicates()
    assert ((profiles.run_id != LATEST).sum(), len(profiles)) == (1, 8)
    assert "one of eight profiles of `stage`" in README.replace("\n  ", " ")
    runs = {run["run_id"] for run in json.loads((paths.RECORDED / "gpu_runs.json").read_text())}
    assert runs == {*steps.run_id, *kernels.run_id, *tests.run_id}


def test_what_cow_costs(table, cells) -> None:
    cow = table[table.stable & (table["mode"] == "cow")]
    flat = README.replace("\n  ", " ")
    low, high, median = (100 * (ratio - 1) for ratio in (cow.step.min(), cow.step.max(), cow.step.median()))
    assert f"costs {low:.1f} to {high:.1f} % of a step (k=8 in bf16; over one rank with prompts of 512 alone)" in flat
    assert f", at the median {median:.1f} %, and" in flat
    assert f"in {(cow.step <= 1.005).sum()} of {len(cow)} settings at most the 0.5 %" in flat
    assert set(cow.k) == {8} and set(cow.kv_cache_dtype) == {"auto"} and set(cow[cow.tp == 1].prompt) == {512}
    ranks = cow[cow.tp == 2].step
    assert f"Over two ranks {(ranks > 1).sum()} of {len(ranks)} settings are above 1" in flat
    own = cells.loc[(1, "auto", "cow", 8, 32, 512)]
    parts = own.nwor_us / own.gpu_ms / 10
    assert f"its own kernels take {parts[16]:.2f} % and {parts[64]:.2f} % of a step" in flat


def test_parity_of_all_that_is_timed(table) -> None:
    assert table.requests.notna().all(), "each timed setting was judged"
    audited = results.read_table("gpu_audited_steps", paths.RECORDED).query("engine == mode and metric != 'step_ms'")
    more = audited.groupby(["mode", "metric"]).value.sum()["cow"]
    cow, stage = (table[table["mode"] == mode] for mode in ("cow", "stage"))
    shift = stage.groupby("kv_cache_dtype").largest_shift.max()
    beside = audited.query("mode == 'stage' and metric == 'largest_shift'").groupby("kv_cache_dtype").value.max()
    shift = shift.clip(lower=beside)
    equal = f"{cow.equal_requests.sum() + more.equal_requests:.0f}/{cow.requests.sum() + more.requests:.0f}"
    assert f"| {equal}; at most {shift['auto']:.2f} / {shift['fp8']:.2f} nats" in line("In every load so timed")
    assert table.step.notna().all(), "and is at parity"


def test_how_exact_the_steps_are(table) -> None:
    """Between engines, between repeats of one, and between orders of turns."""
    steps = results.read_table("gpu_steps", paths.RECORDED)
    audited = results.read_table("gpu_audited_steps", paths.RECORDED)
    inside = endtoend.between_engine_spread(audited).max().max()
    apart = endtoend.between_engine_spread(steps).max().max()
    flat = README.replace("\n  ", " ")
    assert f"of one setting lie up to {100 * inside:.1f} % apart in one run and {100 * apart:.1f} % in two" in flat
    few = table.query("mode == 'stage' and batch <= 16 and stable")
    far = 100 * (pd.concat([few.high / few.step, few.step / few.low], axis=1).max(axis=1) - 1)
    most, nine = far.max(), far.quantile(0.9)
    assert f"repeats of what is told lie within {most:.1f} % of their ratio, nine of ten within {nine:.1f} %" in flat
    medians = steps[steps.metric == "step_ms"].groupby([*endtoend.BESIDE, "repeat", "mode"]).value.median().unstack()
    ratio = (medians["stage"] / medians["off"]).dropna().rename("ratio").reset_index()
    orders = ratio.groupby([*endtoend.BESIDE, ratio.repeat % 2])["ratio"].median().unstack()
    more = (orders[0] / orders[1] - 1).xs((512, 64), level=("prompt", "batch")).median()
    assert f"the one order says {100 * more:.1f} % more than the other at the median" in flat
    alone = steps[(steps.tp == 1) & (steps.batch == 64)]
    power, clock = (alone[alone.metric == name].value.mean() for name in ("power", "sm_clock"))
    assert f"({power:.0f} W and {round(clock, -1):,.0f} of 1,980 MHz on average at batch 64 over one rank)" in flat
    clocks = steps[steps.metric == "sm_clock"].groupby([*endtoend.BESIDE, "mode"]).value.median().unstack()
    moved = 100 * (clocks["stage"] / clocks["off"] - 1)
    moved = moved.xs((8192, 32, 16, 1), level=("prompt", "kv_heads", "batch", "tp"))
    assert f"by {moved.min():.0f} to {moved.max():.0f} % under `stage`" in flat


def test_steps_are_predicted_from_layers_between_their_neighbours(monkeypatch) -> None:
    """By the tuning of then, which the steps that lost over two ranks had no part in."""
    folder = paths.DATA / "attention"
    swept, whole = pd.read_parquet(folder / "h200_sweep.parquet"), pd.read_csv(folder / "h200_steps.csv")
    then = attention_bench.best(swept.astype({"cache": str}), whole[whole.heads == 32])
    monkeypatch.setattr(configs, "shipped", lambda device_name: then)
    steps, times = (results.read_table(name, paths.RECORDED) for name in ("gpu_steps", "attention"))
    saved = attention_plots.saved(times)
    less = (saved.alone - saved.between).median()
    points = predicted.against_measured(steps, attention=times)
    points["off"] = (points["measured"] - points["with_attention"])[ratios.is_stable(points)]
    off = points["off"].dropna()
    flat = README.replace("\n  ", " ")
    assert f"a layer saves {less:.1f} us less at the median" in flat
    mean, root = abs(100 * off.mean()), 100 * (off**2).mean() ** 0.5
    assert f"the prediction of the {len(off)} steps that are told is off by {mean:.1f} % at the mean" in flat
    assert f"and {root:.1f} % at the root" in flat
    longer = 100 * points[points.batch == 64].off.median()
    assert f"those of batch 64 take {longer:.1f} % longer than predicted" in flat
    (lost,) = points[(points["mode"] == "stage") & (points["with_attention"] < 1)].nlargest(1, "measured").itertuples()
    assert lost.tp == 2 and lost.measured > 1
    assert f"It did not see the loss over two ranks coming: it says {lost.with_attention:.3f}." in flat


def test_acceptance_at_scale() -> None:
    counts = results.read_table("gpu_acceptance", paths.RECORDED)
    windows = counts[counts.metric == "windows"].value.sum()
    table = survival(counts)
    shares = table[(table.metric == "rejected_share") & (table.k == 8)].set_index("temperature").value
    assert f"| {100 * shares[0]:.0f}% / {100 * shares[1]:.0f}% |" in line(f"The same at scale: {windows:,.0f} windows")


def test_write_share() -> None:
    share = results.read_table("kv_write_share", paths.RECORDED)
    share = share[share.kv_heads == 32].groupby(["tp", "kv_cache_dtype", "batch"]).value.mean()  # of both engines

    def said(tp: int, dtype: str) -> str:
        return " / ".join(f"{100 * share[tp, dtype, n]:.1f}%" for n in (1, 4, 16, 64))

    others = f"with fp8 {said(1, 'fp8')}, with TP=2 {said(2, 'auto')}"
    assert f"| {said(1, 'auto')}; {others} |" in line("Share of the paged KV write")


def test_verify_attention() -> None:
    times = results.read_table("attention", paths.RECORDED)
    table = attention_plots.frame(times, 4.29)
    short = table[(table.context == 512) & (table.cache == "bf16")].ratio.max()
    assert f"| {short:.2f} |" in line("Attention and write of one layer")
    flat = README.replace("\n  ", " ")
    missed = table[~table.met].set_index(["context", "tp", "batch"]).sort_index()
    assert f"Of the {len(table)} shapes of a layer alone {len(missed)} miss their goal" in flat
    assert set(missed.cache) == {"bf16"} and set(missed.kv_heads * missed.index.get_level_values("tp")) == {32}
    one, two = missed.loc[(512, 1, 16)].squeeze(), missed.loc[(512, 2, 64)].squeeze()
    assert f"{one.ratio:.2f} of the faster backend where {one.wanted} was aimed at" in flat
    assert f"over two ranks at batch 64 {two.ratio:.2f} where it was {two.wanted};" in flat
    longest = missed.loc[(8192, 1, 64)]
    assert len(longest) == len(missed) - 2 and set(longest.wanted) == {1}
    assert f"take {longest.ratio.min():.3f} to {longest.ratio.max():.3f} where it was 1." in flat
    assert longest.ratio.max() == table.ratio.max() and (table.ratio > 1).sum() == len(longest)


def test_where_modes_pay() -> None:
    stage, cow = (measured(f"H200, published models: points where {mode} pays") for mode in ("stage", "cow"))
    assert f"| {stage} of {stage} / {cow} of {stage} |" in line("Published models")
    assert measured("H200, published models: points where stage pays, rope and write fused") == "0"
