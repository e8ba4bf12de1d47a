# SPDX-License-Identifier: Apache-2.0
"""What the engines of these tests have in common on a CPU."""

from pathlib import Path

from nwor_lab.engines.engine import EngineSpec
from nwor_lab.experiments.parity import tolerance

ROUNDING = tolerance("float32")


def spec_of(model: Path, dtype: str = "float32", kv_cache_dtype: str = "auto", **more) -> EngineSpec:
    return EngineSpec(
        model=str(model / "target"),
        draft=str(model / "eagle"),
        dtype=dtype,
        kv_cache_dtype=kv_cache_dtype,
        max_num_batched_tokens=96,
        num_blocks=64,
        **more,
    )
