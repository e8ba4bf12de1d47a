# SPDX-License-Identifier: Apache-2.0
"""The README's numbers are those of the recorded run, and what it names exists (#23)."""

import re

import pandas as pd
import pytest

from nwor import attention_figures, endtoend, kernel_figures, paths, predicted, results
from nwor.acceptance import survival

README = (paths.ROOT / "README.md").read_text()


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
    cow, gaps, dirty = (
        [measured(f"TP={tp}, bfloat16: {claim}") for tp in (1, 2)]
        for claim in (
            "cow's greedy tokens are vanilla's",
            "a token of stage that differs is a near tie (nats)",
            "vanilla leaves dirty layer-steps behind",
        )
    )
    assert f"| {cow[0]}/{cow[0]}, {cow[1]}/{cow[1]} requests |" in line("`cow` gives vanilla's")
    assert f"| {gaps[0]}, {gaps[1]} nats" in line("`stage` gives them")
    assert f"| {dirty[0]} / 0 / 0, {dirty[1]} / 0 / 0 |" in line("Layer-steps")


def test_step_time() -> None:
    steps = results.read_table("steps", paths.RECORDED)
    turns = steps[steps.tp == 1].pivot(index="repeat", columns="mode", values="value")
    ratios = turns.div(turns["off"], axis=0).median()
    said = re.search(r"took ([\d.]+) times vanilla's under `cow` and\s+([\d.]+) times under `stage`", README)
    assert said
    assert said.groups() == tuple(f"{ratios[mode]:.2f}" for mode in ("cow", "stage"))


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
    goals = kernel_figures.goals(results.read_table("kernel_times", paths.RECORDED))
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
    audit = results.read_table("gpu_audited_steps", paths.RECORDED)
    of = audit[audit["metric"] != "step_ms"].groupby(["mode", "metric"]).value.sum()
    left = " / ".join(f"{of[mode, 'audit.dirty_layer_steps']:.0f}" for mode in ("off", "cow", "stage"))
    equal = ", ".join(f"{of[mode, 'equal_requests']:.0f}/{of[mode, 'requests']:.0f}" for mode in ("cow", "stage"))
    assert f"| {left} of {of['off', 'audit.layer_steps']:.0f}; {equal} |" in line("That very configuration")
    assert of["cow", "audit.unwritten_rows"] == of["stage", "audit.unwritten_rows"] == 0


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


def test_steps_on_a_gpu() -> None:
    recorded = (results.read_table(name, paths.RECORDED) for name in ("gpu_steps", "gpu_kernels"))
    table = endtoend.gpu_steps(*recorded)
    cells = table.set_index(["tp", "kv_cache_dtype", "mode", "k", "kv_heads", "prompt", "batch"]).sort_index()

    def said(tp: int, dtype: str, modes: tuple[str, ...], batches: tuple[int, ...], column: str = "step") -> str:
        return ", ".join(
            f"`{mode}` " + " / ".join(f"{cells.loc[(tp, dtype, mode, 8, 32, 512, n), column]:.3f}" for n in batches)
            for mode in modes
        )

    both, every = ("stage", "cow"), (1, 4, 16)
    assert f"| {said(1, 'auto', both, every, 'gpu')} |" in line("GPU time of all kernels")
    assert f"| {said(1, 'auto', both, every)} |" in line("A whole engine step")
    assert f"| {said(1, 'fp8', ('stage',), every)} |" in line("The same steps with an fp8 cache")
    assert f"| {said(2, 'auto', both, every)} |" in line("The same over two ranks")
    stage, cow = (table[table.steady & (table["mode"] == mode)].step for mode in ("stage", "cow"))
    flat = README.replace("\n  ", " ")
    assert f"Of {len(stage)} settings measured whole" in flat
    assert f"in {(stage < 1).sum()}, from {stage.min():.3f} to {stage.max():.3f} times vanilla's" in flat
    low, high, median = (100 * (ratio - 1) for ratio in (cow.min(), cow.max(), cow.median()))
    assert f"costs {low:.1f} to {high:.1f} % of a step, at the median {median:.1f} %" in flat
    unsteady = table[~table.steady & (table["mode"] == "stage")]
    assert set(unsteady.batch) == {64}
    assert f"{len(unsteady)} more, all of batch 64, repeated too far apart" in flat
    lost = table.loc[stage.index[stage >= 1]]
    (worst,) = lost[["kv_cache_dtype", "kv_heads", "batch", "prompt"]].itertuples(index=False)
    assert tuple(worst) == ("fp8", 8, 4, 8192)
    few = table[table.kv_heads == 8]
    assert 1 not in set(few.k) and 2 not in set(few.tp), "README says that these were not measured"


def test_whole_steps_gain_less_than_their_layers_say() -> None:
    names = ("gpu_steps", "attention")
    steps, attention = (results.read_table(name, paths.RECORDED) for name in names)
    points = predicted.against_measured(steps, attention=attention)
    less = (points["measured"] - points["with_attention"])[predicted.steady(points)].mean()
    assert f"at the mean {100 * less:.1f} % of a step. Why is not known" in README


def test_a_second_vanilla_engine() -> None:
    control = results.read_table("gpu_control", paths.RECORDED)
    table = endtoend.gpu_steps(control, control[control.metric == "kernel_us"]).set_index(["mode", "batch"])
    assert table.steady.all()
    apart = 100 * (table.loc["again"].step - 1).abs().max()
    assert f"the medians of two vanilla engines are {apart:.1f} % apart at most" in line("A whole engine step")
    own = table.loc["cow"].nwor_us / table.loc["off"].gpu_ms / 10
    more = [" / ".join(f"{100 * (ratio - 1):.1f}" for ratio in table.loc[mode].step) for mode in ("again", "cow")]
    flat = README.replace("\n  ", " ")
    assert f"takes {more[0]} % more than the first at batch 1 / 4 / 16, it takes {more[1]} % more" in flat
    assert f"its own kernels take {' / '.join(f'{share:.1f}' for share in own)} %" in flat


def test_acceptance_at_scale() -> None:
    counts = results.read_table("gpu_acceptance", paths.RECORDED)
    windows = counts[counts.metric == "windows"].value.sum()
    table = survival(counts)
    shares = table[(table.metric == "rejected_share") & (table.k == 8)].set_index("temperature").value
    assert f"| {100 * shares[0]:.0f}% / {100 * shares[1]:.0f}% |" in line(f"The same at scale: {windows:,.0f} windows")


def test_write_share() -> None:
    share = results.read_table("kv_write_share", paths.RECORDED)
    share = share[share.kv_heads == 32].set_index(["tp", "kv_cache_dtype", "batch"]).value

    def said(tp: int, dtype: str, batches: tuple[int, ...] = (1, 4, 16)) -> str:
        return " / ".join(f"{100 * share[tp, dtype, n]:.1f}%" for n in batches)

    others = f"batch 1 / 4 / 16 with fp8 {said(1, 'fp8')}, with TP=2 {said(2, 'auto')}"
    assert f"| {said(1, 'auto', (1, 4, 16, 64))}; {others} |" in line("Share of the paged KV write")


def test_verify_attention() -> None:
    times = results.read_table("attention", paths.RECORDED)
    table = attention_figures.frame(times, 4.29)
    short = table[(table.context == 512) & (table.cache == "bf16")].ratio.max()
    assert f"| {short:.2f} |" in line("Attention and write of one layer")
    grouped = table[(table.kv_heads <= 8) & (table.batch == 16)]
    worst = [grouped[grouped.cache == cache].ratio.max() for cache in ("bf16", "fp8")]
    assert worst == [table[table.cache == cache].ratio.max() for cache in ("bf16", "fp8")]
    flat = README.replace("\n  ", " ")
    assert f"up to {worst[0]:.2f} times in bf16, up to {worst[1]:.2f} with an fp8 cache" in flat
    others = table.drop(grouped.index).ratio.max()
    assert f"elsewhere it takes {others:.2f} times as long at most" in flat


def test_where_modes_pay() -> None:
    stage, cow = (measured(f"H200, published models: points where {mode} pays") for mode in ("stage", "cow"))
    assert f"| {stage} of {stage} / {cow} of {stage} |" in line("Published models")
    assert measured("H200, published models: points where stage pays, rope and write fused") == "0"
