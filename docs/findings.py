# SPDX-License-Identifier: Apache-2.0
"""The rows of `docs/results.csv`: each finding of the tables of `data/recorded`, and each setting it was found in."""

from __future__ import annotations

import functools

import pandas as pd

from nwor_lab import paths
from nwor_lab.bench import survival
from nwor_lab.bench.gpu_steps import VANILLA, step_ratios
from nwor_lab.cost.ratios import audited_servers
from nwor_lab.gpu import kernel_times as kernels
from nwor_lab.gpu import layer_times as layers
from nwor_lab.run import results
from nwor_lab.serving.table import at_once, open_load, random_weights, summary

NEVER_PATCHED = "vLLM never patched"


@functools.cache
def table(name: str) -> pd.DataFrame:
    """The recorded table of that name."""
    return results.read_table(name, paths.RECORDED)


def whole_steps() -> pd.DataFrame:
    """Steps over those of vLLM never patched, and `stage` over its control: a line a table, setting and mode.

    `gpu_decode` is the latest run, of 8 KV heads, `gpu_decode_more` other settings of it, `gpu_next_steps` vLLM 0.33's
    Triton, and `gpu_direct` an earlier and wider run.
    """
    lines = []
    for name in ("gpu_direct", "gpu_decode", "gpu_decode_more", "gpu_next_steps"):
        rows = table(name)
        over_control = step_ratios(rows, "direct").query("mode == 'stage'")
        lines.append(step_ratios(rows).assign(over=NEVER_PATCHED, table=name))
        lines.append(over_control.assign(over="direct", table=name))
    found = pd.concat(lines, ignore_index=True)
    found = found[~found["mode"].isin(VANILLA)].assign(what="whole step", unit="of vanilla's time")
    return found.rename(columns={"step": "value", "prompt": "context", "kv_cache_dtype": "cache"}).replace(
        {"cache": {"auto": "bf16"}}
    )


def one_layer() -> pd.DataFrame:
    """A layer's attention and write, in one launch, over each attention of vLLM's: a line a table and shape."""
    lines = [layers.net(table("attention")).reset_index().rename(columns={"ratio": "value"})]
    lines[0] = lines[0].assign(table="attention", over="the faster of vLLM's backends")
    for name in ("gpu_between", "gpu_cliff", "gpu_long", "gpu_long_drafts", "gpu_xqa", "gpu_next_layers"):
        lines.append(layers.beside_each(table(name)).rename(columns={"ratio": "value"}).assign(table=name))
    found = pd.concat(lines, ignore_index=True).assign(what="one layer", mode="stage", unit="of vanilla's time")
    return found.assign(tp=32 // found["heads"])


def servers() -> pd.DataFrame:
    """Tokens a second of servers over those of vLLM never patched: a line a setting and mode."""
    audited = audited_servers(table("gpu_audit_serving")).assign(table="gpu_audit_serving", mode="sampled auditor")
    modes = [summary(table(name)).assign(table=name) for name in ("gpu_serving", "gpu_serving_more")]
    lines = pd.concat([*modes, audited]).query("mode != 'off'")
    lines = lines.rename(columns={"ratio": "value", "kv_cache_dtype": "cache", "parity": "at_parity"})
    lines = lines.assign(over=NEVER_PATCHED, unit="of vanilla's", kv_heads=8, batch=at_once(lines))
    what = lines["batch"].isna().map({True: "pace of an answer, server", False: "tokens a second, server"})
    lines = lines.assign(what=what + random_weights(lines) + open_load(lines))
    return lines.replace({"cache": {"auto": "bf16"}})


COLUMNS = (
    "what", "table", "gpu", "attention", "mode", "over", "tp", "kv_heads", "cache", "k", "temperature", "context",
    "batch", "value", "low", "high", "unit", "at_parity", "stable",
)  # fmt: skip


@functools.cache
def findings() -> pd.DataFrame:
    """What `docs/results.csv` holds: a row a finding and setting; `value` is missing where a mode was not at parity."""
    counted = [
        survival.survival(table("gpu_acceptance")).assign(table="gpu_acceptance"),
        table("acceptance").assign(table="acceptance"),
    ]
    accepted = pd.concat(counted).query("metric in ('acceptance_length', 'rejected_share')")
    accepted = accepted.assign(what=accepted["metric"].str.replace("_", " "), mode="off")
    audits = [table(name).assign(table=name) for name in ("gpu_audit", "gpu_next_audit")]
    audits = [rows[rows["metric"].isin(["audit.dirty_layer_steps", "audit.layer_steps"])] for rows in audits]
    audited = pd.concat(audits).groupby(["table", "mode", "tp", "metric", "unit"], as_index=False)["value"].max()
    audited["what"] = audited["metric"].str.removeprefix("audit.").str.replace("_", " ")
    share = table("kv_write_share").assign(what="share of the paged write", table="kv_write_share", mode="off")
    share = share.rename(columns={"kv_cache_dtype": "cache", "prompt": "context"}).replace({"cache": {"auto": "bf16"}})
    pair = step_ratios(table("gpu_pair")).query("mode != 'off'").rename(columns={"tokens": "value"})
    pair = pair.assign(what="tokens a second, shipped pair", table="gpu_pair", over="off")
    faster = kernels.speedups(table("kernel_times")).reset_index().melt(kernels.KEYS, var_name="over")
    faster = faster.assign(table="kernel_times", batch=faster["rows"] // 9, k=8, unit="times faster")
    faster["what"] = "commit of all layers, " + faster["kept"].astype(str) + " of 9 rows kept"
    parts = [whole_steps(), one_layer(), servers(), pair, audited, accepted, share, faster]
    whole = pd.concat([part.astype({"value": float}) for part in parts], ignore_index=True).reindex(
        columns=list(COLUMNS)
    )
    by = list(COLUMNS[: COLUMNS.index("value")])
    return whole.sort_values(by, ignore_index=True)
