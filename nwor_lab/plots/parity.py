# SPDX-License-Identifier: Apache-2.0
"""How far rounding and injected faults shift log-probabilities, and the tolerance between them."""

from __future__ import annotations

import pandas as pd

from nwor_lab.experiments.parity import tolerance

EDGE = 10.0
"""Nats that stand for what is more, infinite shifts too."""


def margin_points(table: pd.DataFrame) -> pd.DataFrame:
    """Rows `shift` of table `parity_margin`, each with its `panel`, its `tolerance` and whether a `fault` is in it."""
    rows = table[table["metric"] == "shift"].copy()
    cache = rows["kv_cache_dtype"].where(rows["kv_cache_dtype"] == "fp8", rows["dtype"])
    rows["panel"] = rows["device"].str.removeprefix("NVIDIA ") + ", " + rows["weights"] + ", " + cache
    random, on_gpu = rows["weights"] == "random weights", rows["device"] != "CPU"
    how = zip(rows["dtype"], rows["kv_cache_dtype"], random, on_gpu, strict=True)
    rows["tolerance"] = [tolerance(*one) for one in how]
    rows["value"] = rows["value"].clip(upper=EDGE)
    rows["kind"] = (rows["fault"] == "none").map({True: "rounding alone", False: "a fault injected"})
    rows["fault"] = rows["fault"].str.replace("none", "rounding").str.replace("_", " ")
    return rows
