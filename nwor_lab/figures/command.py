# SPDX-License-Identifier: Apache-2.0
"""`nwor figures`: the paper's twelve figures, drawn from the tables of one folder.

    nwor figures                                   all figures, from data/recorded
    nwor figures --source results/<run>            from the tables of a run
    nwor figures --only steps cliff --out paper    two of them, into paper/figures

Each figure is a PDF and a PNG beside a CSV of what is drawn and a text with its caption and the command that made it. A
figure whose tables are not in the folder is not drawn, and a line says which table is missing.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import pandas as pd

from nwor_lab import paths
from nwor_lab.bench import gpu_steps
from nwor_lab.bench.survival import survival
from nwor_lab.cost import predicted
from nwor_lab.figures import breakeven, policies, promises, ratios, style, tour
from nwor_lab.figures import roofline as roofs
from nwor_lab.gpu import kernel_times as kernels
from nwor_lab.gpu import layer_times as attention
from nwor_lab.reference.tour import TinyWindow
from nwor_lab.run import results
from nwor_lab.serving.table import summary

Tables = Callable[[str], pd.DataFrame]
"""Reads a table by its name; raises FileNotFoundError where there is none."""


def pages(out: style.Folder, table: Tables) -> Path:
    window = TinyWindow(k=3)
    return tour.policies(out, window.run_all(2), window.num_blocks)


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
        measured = table("serving")
    except FileNotFoundError:
        measured = table("gpu_serving")
    return ratios.serving(out, summary(measured))


def step_parts(out: style.Folder, table: Tables) -> Path:
    rows = table("gpu_direct")
    return ratios.step_parts(out, rows[rows["kv_heads"] == 32].query(gpu_steps.MAIN))


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
    "break_even": lambda out, table: breakeven.break_even(out),
    "expected": lambda out, table: breakeven.expected(
        out,
        kernels.priced(table("kernel_times")),
        predicted.against_measured(table("gpu_steps"), attention=table("attention")),
    ),
    "promises": lambda out, table: promises.promises(out),
}
"""Each figure by its file's name, and what draws it. `pages` and `break_even` are computed, and take no table."""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="nwor figures", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--source", help="a folder of tables (default: data/recorded)")
    parser.add_argument("--out", default=str(paths.RESULTS), help="folder to write figures/ into (default: results)")
    parser.add_argument("--only", nargs="+", choices=FIGURES, default=list(FIGURES), metavar="FIGURE")
    given = parser.parse_args(argv)
    source = Path(given.source or paths.RECORDED)
    if not source.is_dir():
        print(f"nwor figures: {source} is no folder of tables", file=sys.stderr)
        return 2
    command = "nwor figures" + (f" --source {shlex.quote(given.source)}" if given.source else "")
    for name in given.only:
        out = style.Folder(Path(given.out), f"{command} --only {name}")
        try:
            print(FIGURES[name](out, lambda table: results.read_table(table, source)), flush=True)
        except FileNotFoundError as missing:
            print(f"{name} is not drawn: {missing}")
        style.close()
    return 0
