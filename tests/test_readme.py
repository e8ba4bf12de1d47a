# SPDX-License-Identifier: Apache-2.0
"""The README's numbers are those of the recorded run, and what it names exists (#23)."""

import re

import pandas as pd
import pytest

from nwor import attention_figures, endtoend, kernel_figures, paths, results

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
    medians = steps[steps.tp == 1].groupby("mode").value.median()
    said = re.search(r"took ([\d.]+) times vanilla's under `cow` and\s+([\d.]+) times under `stage`", README)
    assert said
    assert said.groups() == tuple(f"{medians[mode] / medians['off']:.2f}" for mode in ("cow", "stage"))


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


def test_steps_on_a_gpu() -> None:
    recorded = (results.read_table(name, paths.RECORDED) for name in ("gpu_steps", "gpu_kernels"))
    table = endtoend.gpu_steps(*recorded).set_index(["kv_heads", "mode", "batch"])
    for column, digits, start in (("gpu", 3, "GPU time of all kernels"), ("step", 2, "A whole engine step")):
        said = ", ".join(
            f"`{mode}` " + " / ".join(f"{table.loc[(32, mode, batch), column]:.{digits}f}" for batch in (1, 4, 16))
            for mode in ("stage", "cow")
        )
        assert f"| {said} |" in line(start)
    share = results.read_table("kv_write_share", paths.RECORDED).set_index("batch").value
    said = " / ".join(f"{100 * share[batch]:.1f}%" for batch in (1, 4, 16, 64))
    assert f"| {said} |" in line("Share of the paged KV write")
    steady = table.loc[[(heads, "stage", batch) for heads in (8, 32) for batch in (1, 4, 16)], "step"]
    assert f"from {100 * (1 - steady.min()):.0f} % faster to {100 * (steady.max() - 1):.0f} % slower" in README.replace(
        "\n  ", " "
    )


def test_verify_attention() -> None:
    times = results.read_table("attention", paths.RECORDED)
    table = attention_figures.frame(times, 4.29)
    short = table[(table.context == 512) & (table.cache == "bf16")].ratio.max()
    assert f"| {short:.2f} |" in line("Attention and write of one layer")
    grouped = table[table.kv_heads == 8]
    worst = grouped[(grouped.cache == "bf16")].ratio.max(), grouped[grouped.cache == "fp8"].ratio.max()
    assert f"({worst[0]:.2f} times)" in README and f"(up to {worst[1]:.2f})" in README


def test_where_modes_pay() -> None:
    stage, cow = (measured(f"H200, published models: points where {mode} pays") for mode in ("stage", "cow"))
    assert f"| {stage} of {stage} / {cow} of {stage} |" in line("Published models")
    assert measured("H200, published models: points where stage pays, rope and write fused") == "0"
