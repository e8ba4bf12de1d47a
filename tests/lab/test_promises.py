# SPDX-License-Identifier: Apache-2.0
"""What was promised beside what was measured: every promise has both, and the measured values are the record's."""

import pandas as pd
import pytest

from docs import values
from nwor_lab import paths
from nwor_lab.cost.breakeven import MODELS
from nwor_lab.cost.traffic import Traffic, Window, step_traffic

TABLE = pd.read_csv(paths.PROMISES)


def ends(case: str) -> list[float]:
    (row,) = TABLE[TABLE["case"] == case].to_dict("records")
    return [row["low"], row["high"]]


def test_measured_values_are_those_of_the_record():
    rejected = sorted(values.rejected_at_scale(8, temperature) for temperature in (0, 1))
    assert ends("here: page writes alone") == pytest.approx([100 * share for share in rejected], rel=1e-4)
    window = Window(1, 8, 9 * rejected[1], 9)
    traffic = (step_traffic(mode, MODELS["llama-2-7b"], window) for mode in ("off", "stage"))
    off, stage = (Traffic({kind: each[kind] for kind in each if kind != "attention"}).total() for each in traffic)
    saved = 1 - (stage.read + stage.written) / (off.read + off.written)
    assert ends("here: all bytes, reads too")[1] == pytest.approx(100 * saved, rel=1e-4)
    faster = values.steps()
    longer = values.findings().query("table == 'gpu_decode' and mode == 'cow'")["value"]
    throughput = TABLE.query("promise == 'throughput' and case == 'here: stage'").iloc[0]
    assert [throughput["low"], throughput["high"]] == pytest.approx([1 / faster.max(), 1 / faster.min()], rel=1e-4)
    assert ends("here: cow") == pytest.approx([100 * (longer.min() - 1), 100 * (longer.max() - 1)], rel=1e-4)
    assert ends("here: blind staging")[0] == pytest.approx(100 * (values.reference("blind") - 1) / 4, rel=1e-4)
