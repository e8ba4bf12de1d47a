# SPDX-License-Identifier: Apache-2.0
"""`python -m nwor_lab.gpu_tests --out DIR`: run the tests that need a GPU, and keep what came of each.

The table, `gpu_tests.parquet`, appears when all have ended; until then `gpu_tests.part.parquet` has those that did, so
that a machine that goes back too early leaves them, and each failure is printed at once. Options of pytest go into
PYTEST_ADDOPTS: `-n 8`, say, for as many workers, which share the GPUs that CUDA_VISIBLE_DEVICES names. Beside it
`gpu_tests.json` says when, from which commit, with what and on what.
"""

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from nwor_lab import paths, results


def pytest_configure(config: pytest.Config) -> None:
    """Put another GPU first for each worker of pytest-xdist, and give it a compile cache: two must not fill vLLM's."""
    if worker := getattr(config, "workerinput", {}).get("workerid"):
        gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        first = int(worker.removeprefix("gw")) % len(gpus)
        if len(gpus) > 1:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[first:] + gpus[:first])
        cache = Path(os.environ.get("VLLM_CACHE_ROOT") or Path.home() / ".cache" / "vllm")
        os.environ["VLLM_CACHE_ROOT"] = str(cache / worker)


class Outcomes:
    """A pytest plugin that writes a row a test: `test`, its `outcome` (passed, failed, skipped), and its time in s."""

    def __init__(self, path: Path) -> None:
        self.path, self.rows = path, list[dict[str, Any]]()

    def pytest_runtest_logreport(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if report.when == "call" or not report.passed:  # a test is skipped, or its fixtures fail, before it is called
            row = {"test": report.nodeid, "outcome": report.outcome, "value": getattr(report, "duration", 0.0)}
            self.rows.append({**row, "metric": "test_time", "unit": "s"})
            results.write_table(self.path, results.tidy(self.rows, mode="", model=""))
        if report.failed:
            print(f"\n{report.nodeid}\n{report.longreprtext}", flush=True)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:  # a file that cannot be read may hold tests
            self.pytest_runtest_logreport(report)


def run(out: Path, tests: Path = paths.ROOT / "tests") -> pd.DataFrame:
    """Run the tests marked `gpu` below `tests` and return what came of each.

    Raises:
        RuntimeError: there are none.
    """
    outcomes = Outcomes(out / "gpu_tests.part.parquet")
    options = ["-q", "-m", "gpu", "-p", "no:cacheprovider", "-p", "nwor_lab.gpu_tests", str(tests)]
    pytest.main(options, plugins=[outcomes])
    if not outcomes.rows:
        raise RuntimeError(f"no test below {tests} was run; what pytest says is above")
    return pd.read_parquet(outcomes.path.rename(out / "gpu_tests.parquet"))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m nwor_lab.gpu_tests", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for gpu_tests.parquet")
    out = parser.parse_args(argv).out
    results.write_provenance(out / "gpu_tests.parquet")
    counts = run(out)["outcome"].value_counts()
    print(", ".join(f"{number} {outcome}" for outcome, number in counts.items()))
    return int(counts.get("failed", 0) > 0)


if __name__ == "__main__":
    sys.exit(main())
