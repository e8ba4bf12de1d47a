# SPDX-License-Identifier: Apache-2.0
"""Settings that the tuning was searched on are told from those held out: in grids, tables and figures."""

from dataclasses import replace

import pandas as pd

from nwor.attention import configs
from nwor.attention.configs import H200
from nwor_lab import paths
from nwor_lab.gpu import attention, held_out
from nwor_lab.gpu.attention_case import AttentionShape


def test_the_grid_has_settings_that_were_tuned_on_and_others_that_were_not():
    table = configs.shipped(H200.name)
    tuned = {shape: held_out.is_tuned_on(shape, table) for shape in attention.grid()}
    assert sum(tuned.values()) == 192 and len(tuned) == 288
    assert {(shape.heads, shape.kv_heads) for shape in tuned if shape.k == 8} == set(attention.HEADS)
    for shape, known in tuned.items():
        assert known == (shape.batch in attention.BATCHES) == (shape.context in attention.CONTEXTS)
        entry = configs.nearest(table, shape.batch, shape.kv_heads, shape.group, 128, shape.element, shape.query, True)
        assert known <= (entry["programs"] == shape.batch * shape.kv_heads)
    searched = pd.read_parquet(paths.DATA / "attention" / "h200_sweep.parquet")
    assert set(searched["context"]) == set(held_out.CONTEXTS), "what is called tuned on was timed"
    known = AttentionShape(32, 8, 16, 512)
    for other in ({"batch": 34}, {"context": 1024}, {"k": 5}, {"head_size": 64}, {"context": 0}, {"heads": 64}):
        assert held_out.is_tuned_on(known, table) and not held_out.is_tuned_on(replace(known, **other), table), other
    assert attention.grid([(32, 8)], [5], [], ["fp8"], [2]) == attention.shapes([(32, 8)], [5], ks=[2], caches=["fp8"])
