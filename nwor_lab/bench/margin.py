# SPDX-License-Identifier: Apache-2.0
"""How far rounding and injected faults shift log-probabilities, and the tolerance between them."""

from __future__ import annotations

import pandas as pd

from nwor_lab.bench.parity import tolerance
from nwor_lab.faults import MARGIN

EDGE = 10.0
"""Nats that stand for what is more, infinite shifts too."""


BEFORE = {
    "tail_unseen": "attention: drafts hidden",
    "one_head_unseen": "attention: drafts hidden from one head",
    "last_page_missed": "attention: a page missed",
}
"""Names of the catalogue's faults in a table recorded before there was one."""


def renamed(table: pd.DataFrame) -> pd.DataFrame:
    """The rows of rounding and of the catalogue's faults."""
    table = table.assign(fault=table["fault"].replace(BEFORE))
    return table[table["fault"].isin(["none", *MARGIN])]


def margin_points(table: pd.DataFrame) -> pd.DataFrame:
    """Rows `shift` of table `parity_margin`, each with its `panel`, its `tolerance` and whether a `fault` is in it."""
    rows = renamed(table[table["metric"] == "shift"])
    cache = rows["kv_cache_dtype"].where(rows["kv_cache_dtype"] == "fp8", rows["dtype"])
    rows["panel"] = rows["device"].str.removeprefix("NVIDIA ") + ", " + rows["weights"] + ", " + cache
    random, on_gpu = rows["weights"] == "random weights", rows["device"] != "CPU"
    how = zip(rows["dtype"], rows["kv_cache_dtype"], random, on_gpu, strict=True)
    rows["tolerance"] = [tolerance(*one) for one in how]
    rows["value"] = rows["value"].clip(upper=EDGE)
    rows["kind"] = (rows["fault"] == "none").map({True: "rounding alone", False: "a fault injected"})
    rows["fault"] = rows["fault"].replace("none", "rounding").str.removeprefix("attention: ")
    return rows
