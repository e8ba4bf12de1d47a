# SPDX-License-Identifier: Apache-2.0
"""Claims: a sentence, what was expected, what was found, and whether it holds; how they are shown."""

from __future__ import annotations

import numbers
import shutil
import textwrap
from typing import Any

import pandas as pd

COLUMNS = ("notebook", "claim", "expected", "found", "holds")
"""`holds` is None where a claim was not judged; then `found` ends in the reason."""


def show(value: object) -> str:
    """Write a claimed value: whole numbers whole, other floats to four digits, all else as it prints."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return str(value)
    number = float(value)
    return f"{number:.0f}" if number.is_integer() or 1e4 <= abs(number) < 1e15 else f"{number:.4g}"


def verdict(holds: bool | None) -> str:
    """Say in a word or two what came of a claim."""
    return "not judged" if holds is None else "yes" if holds else "NO"


def verdict_line(claims: pd.DataFrame) -> str:
    """Say how many claims hold, of those that were judged."""
    judged = claims["holds"].dropna().astype(bool)
    rest = f"; {len(claims) - len(judged)} not judged" if len(claims) > len(judged) else ""
    return f"{judged.sum()} of {len(judged)} claims hold{rest}"


def sentence(claim: Any) -> str:
    """Write a row of the table, as `itertuples` gives it, as one line."""
    return f"{claim.claim}: found {claim.found}, expected {claim.expected}"


def as_text(claims: pd.DataFrame) -> str:
    """Return the claims for a terminal, no wider than it, with the count last."""
    width = max(60, min(120, shutil.get_terminal_size((120, 24)).columns))
    lines = []
    for notebook, rows in claims.groupby("notebook"):
        lines.append(f"{notebook}")
        for claim in rows.itertuples():
            first = f"  {verdict(claim.holds):12}"
            lines += textwrap.wrap(sentence(claim), width, initial_indent=first, subsequent_indent=" " * 16)
    return "\n".join([*lines, "", verdict_line(claims)]).lstrip("\n")


def styled(claims: pd.DataFrame) -> Any:
    """Return the claims of a notebook as a table for its page: in full, aligned to the left."""
    shown = claims.assign(holds=list(map(verdict, claims["holds"]))).drop(columns="notebook")
    left = [{"selector": "th, td", "props": "text-align: left; white-space: normal; vertical-align: top"}]
    return shown.style.hide(axis="index").set_table_styles(left)
