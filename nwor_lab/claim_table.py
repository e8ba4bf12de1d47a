# SPDX-License-Identifier: Apache-2.0
"""The table of claims: its columns, and how it is shown on a terminal and on a notebook's page."""

from __future__ import annotations

import numbers
import shutil
import textwrap
from typing import Any

import pandas as pd

COLUMNS = ("notebook", "claim", "predicted", "measured", "holds", "kind", "origin")
"""`holds` is None where a claim was skipped (`measured` is the reason) or an expectation not at its parameters."""
ORIGINS = {
    "measured": "measured in this run",
    "recorded": "recorded earlier on other hardware, in data/recorded",
    "model": "computed by the model",
}


def show(value: object) -> str:
    """Write a claimed value: whole numbers whole, other floats to four digits, all else as it prints."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return str(value)
    number = float(value)
    return f"{number:.0f}" if number.is_integer() or 1e4 <= abs(number) < 1e15 else f"{number:.4g}"


def verdict(kind: str, holds: bool | None) -> str:
    """Say in a word or two what came of a claim or an expectation."""
    if holds is None:
        return "not at the defaults" if kind == "expectation" else "skipped"
    return "yes" if holds else "NO"


def headline(claims: pd.DataFrame) -> str:
    """Say how many of the claims that were measured in the run hold."""
    measured = claims[(claims["origin"] == "measured") & claims["holds"].notna()]
    return f"{int(measured['holds'].astype(bool).sum())} of {len(measured)} claims measured in this run hold"


def line(claim: Any) -> str:
    """Write a row of the table, as `itertuples` gives it, as one line."""
    skipped = claim.holds is None and claim.kind == "claim"
    found = claim.measured if skipped else f"expected {claim.predicted}, found {claim.measured}"
    return f"{claim.notebook}: {claim.claim}: {found}"


def as_text(claims: pd.DataFrame) -> str:
    """Return the claims for a terminal, no wider than it: those measured in the run first, in full."""
    width = max(60, min(120, shutil.get_terminal_size((120, 24)).columns))
    lines, verdicts = [], [verdict(claim.kind, claim.holds) for claim in claims.itertuples()]
    margin = 4 + max(map(len, verdicts), default=0)
    for origin, said in ORIGINS.items():
        group = claims[claims["origin"] == origin]
        lines += [f"\nclaims {said}: {len(group)}"] if len(group) else []
        for claim in group.itertuples():
            first = f"  {verdict(claim.kind, claim.holds)}".ljust(margin)
            lines += textwrap.wrap(line(claim), width, initial_indent=first, subsequent_indent=" " * (margin + 2))
    return "\n".join([*lines, "", headline(claims)]).lstrip("\n")


def styled(claims: pd.DataFrame) -> Any:
    """Return the claims of a notebook as a table for its page: in full, aligned to the left."""
    verdicts = [verdict(claim.kind, claim.holds) for claim in claims.itertuples()]
    shown = claims.assign(holds=verdicts).drop(columns="notebook")
    left = [{"selector": "th, td", "props": "text-align: left; white-space: normal; vertical-align: top"}]
    return (
        shown.rename(columns={"predicted": "expected", "measured": "found"})
        .style.hide(axis="index")
        .set_table_styles(left)
    )
