# SPDX-License-Identifier: Apache-2.0
import hashlib
import json
import re
import sys

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from nwor_lab.pair import load_prompts, load_tokenizer
from nwor_lab.pair.model import (
    causal_attention,
    hidden_states,
    load_head,
    load_pair,
    load_target,
    load_weights,
)
from nwor_lab.paths import DATA, PAIR_EAGLE, PAIR_TARGET, PROMPTS
from tests.checkpoints import random_pair
from tests.lab.reference_models import tiny_pair

sys.path.insert(0, str(DATA / "pair"))
from corpus import BLOCKS
from train import acceptance, generate

# The files of the shipped pair


def test_shipped_files_are_those_listed_and_small_enough():
    listed = dict(reversed(line.split("  ")) for line in (DATA / "pair" / "SHA256SUMS").read_text().splitlines())
    present = {
        p.relative_to(DATA / "pair").as_posix()
        for p in (DATA / "pair").rglob("*")
        if p.is_file() and p.suffix != ".pyc"
    }
    assert present == listed.keys() | {"README.md", "SHA256SUMS", "corpus.py", "train.py"}
    for name, digest in listed.items():
        file = DATA / "pair" / name
        assert file.stat().st_size < 16e6
        assert hashlib.sha256(file.read_bytes()).hexdigest() == digest, name
    for path in (PAIR_TARGET, PAIR_EAGLE):
        assert {t.dtype for t in load_file(path / "model.safetensors").values()} == {torch.bfloat16}


def test_prompts_are_held_out_and_end_where_a_block_begins():
    tokenizer = load_tokenizer()
    rows = [json.loads(line) for line in PROMPTS.read_text(encoding="utf-8").splitlines()]
    assert len(rows) == len({row["id"] for row in rows}) == 64
    for row in rows:
        name = row["id"].rpartition(":")[0]
        assert hashlib.sha256(name.encode()).digest()[0] % 16 == 1, "a file of this name is in the training split"
        assert row["prompt"].endswith(":") and row["prompt"].splitlines()[-1].lstrip().startswith(BLOCKS)
        assert 64 <= len(tokenizer.encode(row["prompt"]).ids) <= 256
    assert load_prompts(count=3) == [row["prompt"] for row in rows[:3]]
    for count in (65, 0, -1):
        with pytest.raises(ValueError, match="prompts"):
            load_prompts(count=count)


@pytest.mark.parametrize("line", ['{"text": "def f"}', "def f", "[1]"])
def test_a_line_that_is_no_prompt_is_named(tmp_path, line):
    (tmp_path / "prompts.jsonl").write_text(f'{{"prompt": "def f"}}\n\n{line}\n')
    with pytest.raises(ValueError, match="line 3"):
        load_prompts(tmp_path / "prompts.jsonl")


def test_shipped_pair_drafts_well_and_indents():
    target, head = load_pair()
    tokenizer = load_tokenizer()
    prompts = sorted((tokenizer.encode(p).ids for p in load_prompts()), key=len)[:3]
    ids = generate(target, prompts, 24, "cpu")
    starts = [len(p) for p in prompts]
    survival = acceptance(head, target, ids, starts, 24)
    assert 1 + sum(survival) > 2.5
    assert survival == sorted(survival, reverse=True)
    for row, start in zip(ids, starts, strict=True):
        assert re.match(r"\n+ +\S", tokenizer.decode(row[start : start + 24].tolist())), "no indented block follows"


# The head


def test_head_is_the_formula_of_the_paper():
    """`fc` of embedding and feature, then a decoder layer without input norm, at layer numbers behind the target's."""
    target, head = tiny_pair()
    ids, positions, hidden = torch.randint(61, (1, 20)), torch.arange(20)[None], torch.randn(1, 20, 32)
    seen = []

    def attend(layer, query, key, value):
        seen.append((layer, tuple(query.shape), tuple(key.shape)))
        return causal_attention(layer, query, key, value)

    hidden_states(target, ids, positions, attend)
    got = head(ids, positions, hidden, attend)
    assert [layer for layer, *_ in seen] == [0, 1, 2, 3]
    assert seen[3][1:] == ((1, 20, 4, 8), (1, 20, 2, 8))
    x = F.linear(torch.cat((target.model.embed_tokens(ids), hidden), -1), head.fc.weight)
    layer, rotation = head.layers[0], head.rotary_emb(hidden, position_ids=positions)
    x = x + layer.self_attn(x, position_embeddings=rotation, attend=causal_attention)[0]
    assert torch.equal(got, x + layer.mlp(layer.post_attention_layernorm(x)))


@pytest.mark.parametrize("bias", [False, True])
def test_head_round_trip_with_and_without_bias(bias, tmp_path):
    target, head = tiny_pair(bias=bias)
    save_file({n: p.detach().clone() for n, p in head.own_parameters().items()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(head.config.to_dict()))
    again = load_head(tmp_path, target)
    assert (again.fc.bias is not None) is bias
    assert again.embed_tokens is target.model.embed_tokens and again.lm_head is target.lm_head
    assert "layers.0.input_layernorm.weight" not in again.own_parameters()
    ids, positions, hidden = torch.randint(61, (2, 9)), torch.arange(9)[None], torch.randn(2, 9, 32)
    with torch.no_grad():
        assert torch.equal(head(ids, positions, hidden), again(ids, positions, hidden))
    save_file({"fc.weight": torch.zeros(32, 64)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="q_proj"):
        load_head(tmp_path, target)


def test_wrong_checkpoints_say_what_to_do(tmp_path):
    with pytest.raises(ValueError, match=r"config\.json"):
        load_target(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json is missing"):
        load_tokenizer(tmp_path)
    path, _ = random_pair(tmp_path)
    weights = load_weights(path)
    del weights["model.norm.weight"]
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="model.norm.weight"):
        load_target(path)
