# SPDX-License-Identifier: Apache-2.0
"""The recipe of the shipped pair (`data/pair/train.py`), on a small corpus."""

import json
import shutil
import sys
import sysconfig
from pathlib import Path

import pandas as pd
import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig

from nwor_lab.pair import load_prompts, load_tokenizer
from nwor_lab.pair.model import hidden_states, load_pair
from nwor_lab.paths import DATA, PAIR_EAGLE, PAIR_TARGET
from tests.lab.reference_models import SMALL, tiny_pair

sys.path.insert(0, str(DATA / "pair"))
from corpus import corpus_hash, read_corpus
from train import DRAFTS, main, unroll

STDLIB = Path(sysconfig.get_path("stdlib"))


def draft_chain(head, ids, hidden, position, drafts):
    """Features `[drafts, hidden]` of a real chain: verified rows up to `position`, then the head on its own."""
    features = hidden[:, : position + 1]
    for rows in range(position + 1, position + 1 + drafts):
        own = head(ids[:, 1 : rows + 1], torch.arange(rows)[None], features)
        features = torch.cat((features, own[:, -1:]), 1)
    return features[0, position + 1 :]


def test_unrolled_passes_are_a_real_draft_chain():
    target, head = tiny_pair(torch.float64)
    ids = torch.randint(61, (1, 14))
    with torch.no_grad():
        hidden = hidden_states(target, ids, torch.arange(14)[None])
        passes = torch.stack(unroll(head, ids, hidden, DRAFTS))[:, 0]
        for position in range(14 - 1 - DRAFTS):
            chain = draft_chain(head, ids, hidden, position, DRAFTS)
            diagonal = torch.stack([passes[j, position + j] for j in range(DRAFTS)])
            torch.testing.assert_close(diagonal, chain)


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """A few real packages in a folder of their own, so that the recipe runs in seconds."""
    root = tmp_path_factory.mktemp("python3")
    for name in ("os.py", "argparse.py", "asyncio", "email", "json", "logging", "unittest", "urllib", "importlib"):
        source = STDLIB / name
        if source.is_dir():
            shutil.copytree(source, root / name, ignore=shutil.ignore_patterns("__pycache__", "test*"))
        else:
            shutil.copy(source, root)
    return root


def test_recipe_trains_saves_and_loads(library, tmp_path, capsys):
    options = {"steps": 3, "head-steps": 2, "batch": 2, "length": 48, "prompts": 2, "device": "cpu", "stdlib": library}
    arguments = [str(part) for name, value in options.items() for part in (f"--{name}", value)]
    assert main(["--out", str(tmp_path), *arguments]) == 0
    target, head = load_pair(tmp_path / "target", tmp_path / "eagle")
    shipped = LlamaConfig.from_pretrained(PAIR_TARGET)
    assert all(getattr(target.config, name) == getattr(shipped, name) for name in (*SMALL, "rope_parameters"))
    assert load_tokenizer(tmp_path / "target").get_vocab_size() == 4096
    assert {n: p.shape for n, p in head.own_parameters().items()} == {
        n: t.shape for n, t in load_file(PAIR_EAGLE / "model.safetensors").items()
    }
    recipe = json.loads((tmp_path / "recipe.json").read_text())
    assert recipe["steps"] == 3 and recipe["corpus_sha256"] == corpus_hash(read_corpus(library))
    rows = pd.read_csv(tmp_path / "training.csv")
    loss = rows.query("model == 'target' and split == 'validation' and metric == 'loss'")["value"].tolist()
    assert len(loss) == 4 and loss[2] < loss[0]
    assert len(load_prompts(tmp_path / "prompts.jsonl")) == 2
    assert "held_out_loss" in capsys.readouterr().out
