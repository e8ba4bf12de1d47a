# SPDX-License-Identifier: Apache-2.0
"""The predicted bytes of notebook 04 come from the model's own config, not from the counters they are held against."""

import pytest

from nwor import endtoend, paths


@pytest.mark.parametrize(
    ("dtype", "kv_cache_dtype", "tp", "row"),
    [
        ("bfloat16", "auto", 1, 1024),
        ("bfloat16", "auto", 2, 512),
        ("float32", "auto", 1, 2048),
        ("bfloat16", "fp8", 1, 512),
    ],
)
def test_shape_of_the_shipped_pair(dtype, kv_cache_dtype, tp, row):
    spec = {"model": str(paths.PAIR_TARGET), "dtype": dtype, "kv_cache_dtype": kv_cache_dtype, "tp": tp}
    shape = endtoend.cache_shape(spec)
    assert (shape.num_layers, shape.row) == (5, row)
