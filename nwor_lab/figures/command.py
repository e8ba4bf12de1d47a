# SPDX-License-Identifier: Apache-2.0
"""The paper's eleven figures, drawn from the tables of one folder.

    nwor figures                                   all figures, from data/recorded
    nwor figures --source results/<run>            from the tables of a run
    nwor figures --only steps cliff --out paper    two of them, into paper/figures

Each figure is a PDF and a PNG beside a CSV of what is drawn and a text with its caption and the command that made it. A
figure whose tables are not in the folder is not drawn, and a line says which table is missing.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import pandas as pd
from tyro.conf import arg

from nwor_lab import command_line, paths
from nwor_lab.bench import gpu_steps
from nwor_lab.bench.survival import survival
from nwor_lab.cost import predicted
from nwor_lab.cost.ratios import audited_servers, audited_steps
from nwor_lab.figures import breakeven, policies, promises, ratios, style, tour
from nwor_lab.figures import roofline as roofs
from nwor_lab.gpu import kernel_times as kernels
from nwor_lab.gpu import layer_times as attention
from nwor_lab.reference.tour import TinyWindow
from nwor_lab.run import results
from nwor_lab.serving.table import SETTING, at_once, open_load, setting, summary, told_apart

Tables = Callable[[str], pd.DataFrame]
"""Reads a table by its name; raises FileNotFoundError where there is none."""


def pages(out: style.Folder, table: Tables) -> Path:
    window = TinyWindow(k=3)
    return tour.policies(out, pd.DataFrame(window.run_all(2)), window.num_blocks)


def acceptance(out: style.Folder, table: Tables) -> Path:
    """Of the counts at scale where there are such, else of the fewer of a run on a CPU."""
    try:
        counted = survival(table("gpu_acceptance"))
    except FileNotFoundError:
        counted = table("acceptance")
    return policies.acceptance(out, counted)


def roofline(out: style.Folder, table: Tables) -> Path:
    times = table("kernel_times")
    bandwidth, empty = kernels.ceilings(times)
    layers = attention.roof_points(attention.frame(table("attention"), bandwidth), empty)
    return roofs.roofline(out, pd.concat([kernels.roof_points(times), layers]), bandwidth, empty)


def serving(out: style.Folder, table: Tables) -> Path:
    """Of the servers of a run, or of the recorded ones."""
    try:
        lines = summary(table("serving"))
    except FileNotFoundError:
        lines = served(table)
    return ratios.serving(out, lines)


def served(table: Tables) -> pd.DataFrame:
    """The lines of all servers that are recorded, over vLLM never patched, by setting and requests at once."""
    lines = summary(pd.concat([table("gpu_serving"), table("gpu_serving_more")], ignore_index=True))
    order = lines[SETTING].assign(requests=at_once(lines)).sort_values([*SETTING, "requests"], kind="stable")
    return lines.loc[order.index].reset_index(drop=True)


def step_parts(out: style.Folder, table: Tables) -> Path:
    rows = table("gpu_direct")
    return ratios.step_parts(out, rows[rows["kv_heads"] == 32].query(gpu_steps.MAIN))


def expected(out: style.Folder, table: Tables) -> Path:
    steps = pd.concat([table("gpu_direct"), table("gpu_decode").query("gpu == 'H200'")])
    points = predicted.against_measured(steps, attention=table("attention"))
    return breakeven.expected(out, kernels.priced(table("kernel_times")), points, guessed(table))


BESIDE = {
    "": "",
    "flash2": ", FlashAttention 2",
    "flashinfer": ", FlashInfer",
    "triton_attn": ", Triton of vLLM 0.33",
}
"""In the words of `data/expected.csv`, the attention that vLLM was made to run."""


def guessed(table: Tables) -> pd.DataFrame:
    """What was written down of a run before it, `data/expected.csv`, beside what it gave, where it has run since.

    `panel` says whether it is of layers, engines or servers, and `series` of what.
    """
    every = pd.concat([table(name) for name in ("gpu_decode", "gpu_decode_more", "gpu_next_steps")], ignore_index=True)
    steps = gpu_steps.step_ratios(every.fillna({"attention": ""}))
    what = [
        f"step, {row.kv_heads} KV heads, k={row.k}, prompts of {row.prompt}, "
        + row.kv_cache_dtype.replace("auto", "bf16")
        + BESIDE[row.attention]
        + (", two ranks" if row.tp == 2 else "")
        for row in steps.itertuples()
    ]
    steps = steps.assign(what=what, ratio=steps["step"])
    servers = served(table)
    audited = audited_servers(table("gpu_audit_serving")).assign(mode="kv audit", k=4, kv_cache_dtype="auto")
    servers = told_apart(pd.concat([servers, audited], ignore_index=True))
    what = "tokens a second, " + setting(servers) + open_load(servers)
    servers = servers.assign(what=what, batch=at_once(servers), series=servers["mode"])
    steps = pd.concat([steps, audited_steps(table("gpu_audit_cost")).assign(what="step, k=4")])
    steps["series"] = steps["mode"]
    of_layers = ("gpu_between", "gpu_cliff", "gpu_long", "gpu_xqa", "gpu_next_layers")  # some shapes are in two of them
    layers = pd.concat([layer_ratios(table(name), name) for name in of_layers])
    written, same = pd.read_csv(paths.DATA / "expected.csv"), ["what", "gpu", "mode", "batch"]
    of_engines = [written.merge(steps, on=same).assign(panel="engines")]
    of_engines += [written.merge(servers, on=same).assign(panel="servers")]
    layers = written.merge(layers, on=["table", *same]).assign(panel="layers")
    return pd.concat([layers, *of_engines], ignore_index=True).rename(columns={"ratio": "measured"})


def layer_ratios(times: pd.DataFrame, name: str) -> pd.DataFrame:
    """A layer's time over that of each attention alone, `ratio`, by the words of `data/expected.csv`, `what`."""
    lines = attention.beside_each(times).rename(columns={"over": "series"})
    lines["series"] += " of vLLM 0.33" if name == "gpu_next_layers" else ""
    what = [
        f"layer, {row.kv_heads} KV heads, k={row.k}, context of {row.context}, {row.cache}, {row.series}"
        for row in lines.itertuples()
    ]
    return lines.assign(table=name, what=what, mode="stage", gpu=times["gpu"].iloc[0])


FIGURES: dict[str, Callable[[style.Folder, Tables], Path]] = {
    "pages": pages,
    "policies": lambda out, table: policies.policies(out, table("reference")),
    "acceptance": acceptance,
    "bytes": lambda out, table: policies.bytes_moved(out, table("traffic")),
    "roofline": roofline,
    "steps": lambda out, table: ratios.steps(out, gpu_steps.step_ratios(table("gpu_direct"))),
    "step_parts": step_parts,
    "serving": serving,
    "cliff": lambda out, table: ratios.cliff(out, attention.over_each(table("gpu_cliff"))),
    "expected": expected,
    "promises": lambda out, table: promises.promises(out),
}
"""Each figure by its file's name, and what draws it. `pages` is computed, and takes no table."""


@dataclass(frozen=True)
class Figures:
    source: str = ""
    """a folder of tables; none: data/recorded"""
    out: Path = paths.RESULTS
    """folder to write figures/ into"""
    only: Annotated[tuple[str, ...], arg(help=f"of {', '.join(FIGURES)}; none: all")] = ()

    def __post_init__(self) -> None:
        command_line.check_names("--only", self.only, FIGURES)
        if not self.folder.is_dir():
            raise ValueError(f"{self.source} is no folder of tables")

    @property
    def folder(self) -> Path:
        return Path(self.source or paths.RECORDED)


def main(argv: list[str] | None = None) -> int:
    """The command; a figure whose tables are missing is none of its failures, one that cannot be read is."""
    try:
        asked = command_line.parse(Figures, argv, "nwor figures", __doc__ or "")
        results.check_folder(asked.out)
    except (ValueError, OSError) as error:
        return command_line.fail("nwor figures", error)
    command = "nwor figures" + (f" --source {shlex.quote(asked.source)}" if asked.source else "")
    status = 0
    for name in asked.only or FIGURES:
        out = style.Folder(asked.out, f"{command} --only {name}")
        try:
            print(FIGURES[name](out, lambda table: results.read_table(table, asked.folder)), flush=True)
        except FileNotFoundError as missing:
            print(f"{name} is not drawn: {missing}")
        except (ValueError, LookupError) as other:  # pyarrow's error of a broken file is a ValueError
            status = command_line.fail("nwor figures", f"{name}: a table in {asked.folder} is none of it: {other!r}", 1)
        style.close()
    return status
