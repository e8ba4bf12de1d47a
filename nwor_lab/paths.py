# SPDX-License-Identifier: Apache-2.0
"""The one place that knows where things are.

papermill runs a notebook where you stand and JupyterLab where the notebook lies, so every path here is absolute. An
installed package has none of them but `RESULTS`, below the folder where you stand: pair, prompts, notebooks and
recorded results are in the checkout alone.
"""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "data"
NOTEBOOKS = ROOT / "notebooks"
CHECKOUT = (ROOT / "pyproject.toml").is_file()
RESULTS = (ROOT if CHECKOUT else Path.cwd()) / "results"
LOCK = ROOT / "requirements" / "cpu.lock"

PAIR_TARGET = DATA / "pair" / "target"
PAIR_EAGLE = DATA / "pair" / "eagle"
PROMPTS = DATA / "prompts" / "stdlib_heldout.jsonl"
PUBLISHED_ACCEPTANCE = DATA / "published-acceptance.csv"
PROMISES = DATA / "promises.csv"
RECORDED = DATA / "recorded"
