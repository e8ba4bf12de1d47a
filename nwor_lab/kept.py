# SPDX-License-Identifier: Apache-2.0
"""Tables that are committed, in `data/recorded`: the checkout has to stay small."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from nwor_lab import results


def keep_table(path: Path | str, frame: pd.DataFrame) -> Path:
    """Write a table that is to be committed: small, which takes up to twenty times as long.

    Of fractions in the column `value` the 24 bits of a float32 are kept, a nanosecond of 16 ms; whole numbers stay
    what they are. The bytes of numbers are stored apart, by place, so that those which are zero take no room.
    """
    packed: dict[str, Any] = {"compression_level": 19}
    if "value" in frame and frame["value"].dtype.kind == "f":
        value = frame["value"].to_numpy()
        frame = frame.assign(value=np.where(value == np.round(value), value, value.astype(np.float32)))
        packed["use_dictionary"] = [column for column in frame if column != "value"]
        packed["column_encoding"] = {"value": "BYTE_STREAM_SPLIT"}
    return results.write_table(path, frame, **packed)
