# SPDX-License-Identifier: Apache-2.0
import csv
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from nwor_lab.pair import ARCHITECTURES, load_pair, load_prompts, main, random_pair
from nwor_lab.pair.llama import EagleHead, LlamaConfig, LlamaTarget, load_weights
from nwor_lab.pair.train import (
    BLOCKS,
    DRAFTS,
    Recipe,
    acceptance,
    corpus_hash,
    cut_prompts,
    generate,
    head_loss,
    read_corpus,
    train_tokenizer,
    unroll,
)
from nwor_lab.paths import DATA, PAIR_EAGLE, PAIR_TARGET, PROMPTS, ROOT
from tests.checkpoints import random_eagle3, write_biased_copy

STDLIB = Path(sysconfig.get_path("stdlib"))
SMALL = LlamaConfig(
    vocab_size=61,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
)


def small_pair(seed: int = 0) -> tuple[LlamaTarget, EagleHead]:
    torch.manual_seed(seed)
    target = LlamaTarget(SMALL).requires_grad_(False)
    return target, EagleHead(LlamaConfig(**{**vars(SMALL), "num_hidden_layers": 1}), target)


def read_csv(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(path.read_text().splitlines()))


# The files of the shipped pair


def test_shipped_files_are_those_listed_and_small_enough():
    listed = dict(reversed(line.split("  ")) for line in (DATA / "pair" / "SHA256SUMS").read_text().splitlines())
    present = {p.relative_to(DATA / "pair").as_posix() for p in (DATA / "pair").rglob("*") if p.is_file()}
    assert present == listed.keys() | {"README.md", "SHA256SUMS"}
    for name, digest in listed.items():
        file = DATA / "pair" / name
        assert file.stat().st_size < 16e6
        assert hashlib.sha256(file.read_bytes()).hexdigest() == digest, name
    for path in (PAIR_TARGET, PAIR_EAGLE):
        assert {t.dtype for t in load_file(path / "model.safetensors").values()} == {torch.bfloat16}


def test_shipped_target_is_what_transformers_computes():
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(PAIR_TARGET)
    theirs = AutoModelForCausalLM.from_pretrained(PAIR_TARGET, dtype=torch.float32)
    target, _ = load_pair()
    text = load_prompts(count=1)[0]
    ids = torch.tensor(tokenizer(text).input_ids)
    assert tokenizer.decode(ids) == text and tokenizer.eos_token_id == theirs.config.eos_token_id == 0
    with torch.no_grad():
        ours = target.logits(target(ids, torch.arange(len(ids))))
        torch.testing.assert_close(ours, theirs(ids[None]).logits[0], rtol=1e-4, atol=1e-4)


def test_prompts_are_held_out_and_end_where_a_block_begins():
    tokenizer = Tokenizer.from_file(str(PAIR_TARGET / "tokenizer.json"))
    rows = [json.loads(line) for line in PROMPTS.read_text(encoding="utf-8").splitlines()]
    assert len(rows) == len({row["id"] for row in rows}) == 64
    for row in rows:
        name = row["id"].rpartition(":")[0]
        assert hashlib.sha256(name.encode()).digest()[0] % 16 == 1, "a file of this name is in the training split"
        assert row["prompt"].endswith(":") and row["prompt"].splitlines()[-1].lstrip().startswith(BLOCKS)
        assert 64 <= len(tokenizer.encode(row["prompt"]).ids) <= 256
    assert load_prompts(count=3) == [row["prompt"] for row in rows[:3]]
    with pytest.raises(ValueError, match="65 prompts asked for"):
        load_prompts(count=65)


def test_shipped_pair_drafts_well_and_indents():
    target, head = load_pair()
    tokenizer = Tokenizer.from_file(str(PAIR_TARGET / "tokenizer.json"))
    prompts = sorted((tokenizer.encode(p).ids for p in load_prompts()), key=len)[:4]
    ids = generate(target, prompts, 32, "cpu")
    starts = [len(p) for p in prompts]
    survival = acceptance(head, target, ids, starts, 32)
    assert 1 + sum(survival) > 2.5
    assert survival == sorted(survival, reverse=True)
    for row, start in zip(ids, starts, strict=True):
        assert re.match(r"\n+ +\S", tokenizer.decode(row[start : start + 32].tolist())), "no indented block follows"


def test_training_record_shows_learning_and_matches_the_recipe():
    rows = read_csv(DATA / "pair" / "training.csv")
    assert list(rows[0]) == ["model", "step", "split", "metric", "value"]

    def curve(model, split, metric):
        return [float(r["value"]) for r in rows if (r["model"], r["split"], r["metric"]) == (model, split, metric)]

    recipe = json.loads((DATA / "pair" / "recipe.json").read_text())
    loss, length = curve("target", "validation", "loss"), curve("eagle", "validation", "acceptance_length")
    assert loss[0] > 2 * min(loss) and recipe["held_out_loss"] == pytest.approx(min(loss), abs=0.01)
    assert length[-1] > 2 * length[0] and recipe["acceptance_length_validation"] == pytest.approx(length[-1], abs=1e-4)
    weights = load_file(PAIR_TARGET / "model.safetensors"), load_file(PAIR_EAGLE / "model.safetensors")
    assert [sum(t.numel() for t in w.values()) for w in weights] == list(recipe["parameters"].values())


@pytest.mark.engine
def test_shipped_pair_in_vllm_accepts_two_and_a_half_tokens_a_window():
    script = """
import json, sys
from vllm import LLM, SamplingParams

target, eagle, prompts = json.load(sys.stdin)
speculative = {"method": "eagle", "model": eagle, "num_speculative_tokens": 4}
llm = LLM(target, speculative_config=speculative, max_model_len=512, enforce_eager=True, disable_log_stats=False)
llm.generate(prompts, SamplingParams(temperature=0, max_tokens=64, ignore_eos=True), use_tqdm=False)
value = {m.name: m.value for m in llm.get_metrics() if hasattr(m, "value")}
accepted, drafts = (value["vllm:spec_decode_num_" + name] for name in ("accepted_tokens", "drafts"))
print("acceptance length", 1 + accepted / drafts)
"""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")}
    environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", script],
        input=json.dumps([str(PAIR_TARGET), str(PAIR_EAGLE), load_prompts(count=16)]),
        env=environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert float(done.stdout.rpartition("acceptance length")[2]) > 2.5


# Random pairs and biased copies


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_random_pair_loads_in_transformers(architecture, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    target, eagle = random_pair(tmp_path, architecture=architecture)
    model, info = AutoModelForCausalLM.from_pretrained(target, output_loading_info=True)
    assert type(model).__name__ == ARCHITECTURES[architecture]
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    tokenizer = AutoTokenizer.from_pretrained(target)
    assert tokenizer.decode(tokenizer("naïve\n\tx").input_ids) == "naïve\n\tx"
    assert model(torch.tensor([[1, 2, 3]])).logits.shape == (1, 3, 320)
    if architecture == "llama":
        load_pair(target, eagle)


def test_random_pair_is_its_seed_and_obeys_noise(tmp_path):
    files = [random_pair(tmp_path / str(i), seed=s)[0] / "model.safetensors" for i, s in enumerate((5, 5, 6))]
    first, again, other = (f.read_bytes() for f in files)
    assert first == again != other

    lengths = []
    for noise in (0.0, 0.5, 4.0):
        target, head = load_pair(*random_pair(tmp_path / f"noise{noise}", noise=noise, dtype=torch.float32))
        prompts = [[7 * i + 3, 11 * i + 50] for i in range(12)]
        survival = acceptance(head, target, generate(target, prompts, 24, "cpu"), [2] * 12, 24)
        lengths.append(1 + sum(survival))
    assert 1 + DRAFTS > lengths[0] > lengths[1] > lengths[2] and lengths[1] > 1.2


def test_random_eagle3_drafts_by_its_targets_lm_head(tmp_path):
    target, _ = random_pair(tmp_path, head_dim=64)
    whole = load_weights(random_eagle3(tmp_path / "whole", target))
    assert "d2t" not in whole
    assert torch.equal(whole["lm_head.weight"], load_weights(target)["lm_head.weight"])
    some = load_weights(random_eagle3(tmp_path / "some", target, draft_vocab_size=288))
    drafted = torch.arange(288) + some["d2t"]
    assert some["d2t"].dtype == torch.int64
    assert (drafted[0], drafted[-1], len(drafted.unique())) == (0, 319, 288)
    assert torch.equal(some["lm_head.weight"], whole["lm_head.weight"][drafted])
    assert json.loads((tmp_path / "some" / "config.json").read_text())["draft_vocab_size"] == 288


def test_random_pair_refuses_what_it_cannot_make(tmp_path):
    with pytest.raises(ValueError, match="gpt2"):
        random_pair(tmp_path / "a", architecture="gpt2")
    with pytest.raises(ValueError, match="257"):
        random_pair(tmp_path / "b", vocab_size=256)
    with pytest.raises(ValueError, match="KV heads"):
        random_pair(tmp_path / "c", num_key_value_heads=3)
    assert not list(tmp_path.iterdir())


def test_biased_copy_changes_fc_by_the_bias_alone(tmp_path):
    target_path, eagle = random_pair(tmp_path / "pair", dtype=torch.float32)
    _, head = load_pair(target_path, eagle)
    bias = torch.linspace(-1, 1, 128)
    _, zero = load_pair(target_path, write_biased_copy(eagle, tmp_path / "zero"))
    _, biased = load_pair(target_path, write_biased_copy(eagle, tmp_path / "biased", bias))
    x = torch.randn(5, 256)
    with torch.no_grad():
        assert torch.equal(zero.fc(x), head.fc(x))
        torch.testing.assert_close(biased.fc(x), head.fc(x) + bias)
    assert (tmp_path / "biased" / "config.json").read_text() == (eagle / "config.json").read_text()
    with pytest.raises(ValueError, match=r"shape \(128,\)"):
        write_biased_copy(eagle, tmp_path / "wrong", torch.zeros(7))
    assert not (tmp_path / "wrong").exists()


# The recipe


class ChainCache:
    """Attention of one head layer over rows kept one by one: what a drafter's own KV cache does."""

    def __init__(self, keys=(), values=()):
        self.keys, self.values = list(keys), list(values)

    def __call__(self, layer, query, key, value):
        self.keys.append(key)
        self.values.append(value)
        keys, values = torch.cat(self.keys), torch.cat(self.values)
        groups = query.shape[1] // key.shape[1]
        keys, values = (x.repeat_interleave(groups, 1) for x in (keys, values))
        visible = len(keys) - len(query) + torch.arange(1, len(query) + 1)
        out = []
        for q, n in zip(query, visible.tolist(), strict=True):
            scores = torch.einsum("hd,thd->ht", q, keys[:n]) / q.shape[-1] ** 0.5
            out.append(torch.einsum("ht,thd->hd", scores.softmax(-1), values[:n]))
        return torch.stack(out)


def draft_chain(head, ids, hidden, position, drafts):
    """Features of a real chain: verified rows up to `position` first, then the head on its own features."""
    cache, features = ChainCache(), []
    rows = torch.arange(position + 1)
    feature = head(ids[1 : position + 2], rows, hidden[: position + 1], cache)[-1:]
    features.append(feature)
    for j in range(1, drafts):
        row = torch.tensor([position + j])
        feature = head(ids[position + j + 1][None], row, feature, cache)
        features.append(feature)
    return torch.cat(features)


def test_unrolled_passes_are_a_real_draft_chain():
    target, head = small_pair()
    ids = torch.randint(61, (1, 14))
    with torch.no_grad():
        hidden = target(ids, torch.arange(14))
        passes = torch.stack(unroll(head, ids, hidden, DRAFTS))[:, 0]
        for position in range(14 - 1 - DRAFTS):
            chain = draft_chain(head, ids[0], hidden[0], position, DRAFTS)
            diagonal = torch.stack([passes[j, position + j] for j in range(DRAFTS)])
            torch.testing.assert_close(diagonal, chain, rtol=1e-4, atol=1e-5)


def test_acceptance_counts_what_drafting_token_by_token_accepts():
    target, head = small_pair(4)
    head.fc.weight.data = torch.cat((0.5 * torch.randn(32, 32), torch.eye(32)), 1)
    prompts, new = [[5, 9, 33], [17], [2, 60, 8, 1, 44]], 16
    ids = generate(target, prompts, new, "cpu")
    survived, windows = [0] * DRAFTS, 0
    for row, prompt in zip(ids, prompts, strict=True):
        hidden = target(row, torch.arange(len(row)))
        for last in range(len(prompt) - 1, len(prompt) + new - 1 - DRAFTS):
            windows += 1
            for j, feature in enumerate(draft_chain(head, row, hidden, last, DRAFTS)):
                if head.logits(feature).argmax() != row[last + 2 + j]:
                    break
                survived[j] += 1
    with torch.no_grad():
        measured = acceptance(head, target, ids, [len(p) for p in prompts], new)
    assert measured == pytest.approx([s / windows for s in survived])
    assert 0 < measured[0] < 1


def test_generate_is_greedy_decoding_of_each_row_alone():
    target, _ = small_pair(1)
    prompts = [[3, 1, 4], [1, 5, 9, 2, 6], [5]]
    ids = generate(target, prompts, 6, "cpu")
    for row, prompt in zip(ids, prompts, strict=True):
        text = list(prompt)
        for _ in range(6):
            hidden = target(torch.tensor(text), torch.arange(len(text)))
            text.append(int(target.logits(hidden)[-1].argmax()))
        assert row[: len(text)].tolist() == text


def test_head_loss_falls_and_rewards_the_right_feature():
    target, head = small_pair(2)
    ids = torch.randint(61, (4, 24))
    with torch.no_grad():
        hidden = target(ids, torch.arange(24))
        logits = target.logits(hidden)
    optimizer = torch.optim.AdamW(head.own_parameters().values(), lr=1e-2)
    losses = []
    for _ in range(60):
        loss = head_loss(head, ids, hidden, logits)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    entropy = torch.distributions.Categorical(logits=logits[:, 1:]).entropy().mean().item()
    assert entropy < losses[-1] < losses[0] - 0.3 * (losses[0] - entropy)


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


def test_corpus_splits_by_path_alone_and_skips_what_is_not_source(library, tmp_path):
    corpus = read_corpus(library)
    names = [set(files) for files in corpus.values()]
    assert all(names) and not (names[0] & names[1] | names[0] & names[2] | names[1] & names[2])

    shutil.copytree(library, tmp_path / "lib")
    (tmp_path / "lib" / "site-packages").mkdir()
    for name in ("site-packages/other.py", "_sysconfigdata__linux.py"):
        (tmp_path / "lib" / name).write_text("x = 1\n")
    (tmp_path / "lib" / "broken.py").write_bytes(b"# \xff\xfe\n")
    assert corpus_hash(read_corpus(tmp_path / "lib")) == corpus_hash(corpus)
    (tmp_path / "lib" / "os.py").write_text("pass\n")
    changed = read_corpus(tmp_path / "lib")
    assert [set(files) for files in changed.values()] == names and corpus_hash(changed) != corpus_hash(corpus)


def test_prompts_are_a_function_of_files_and_seed(library):
    corpus = read_corpus(library)
    tokenizer = train_tokenizer(corpus["train"].values(), 600)
    files = corpus["train"]
    one, same, other = (cut_prompts(files, tokenizer, 8, seed) for seed in (0, 0, 1))
    assert one == same != other
    for row in one:
        name, _, line = row["id"].rpartition(":")
        rest = "\n".join(files[name].splitlines()[int(line) - 1 :])
        assert rest.startswith(row["prompt"] + "\n")
    with pytest.raises(ValueError, match="ask for fewer"):
        cut_prompts({"a.py": "x = 1\n"}, tokenizer, 1, 0)


def test_recipe_trains_saves_and_loads(library, tmp_path, capsys):
    options = {"steps": 3, "head-steps": 2, "batch": 2, "length": 48, "prompts": 2, "device": "cpu", "stdlib": library}
    arguments = [str(part) for name, value in options.items() for part in (f"--{name}", value)]
    assert main(["train", "--out", str(tmp_path), *arguments]) == 0
    target, head = load_pair(tmp_path / "target", tmp_path / "eagle")
    assert target.config == LlamaConfig.from_pretrained(PAIR_TARGET)
    assert {n: p.shape for n, p in head.own_parameters().items()} == {
        n: t.shape for n, t in load_file(PAIR_EAGLE / "model.safetensors").items()
    }
    recipe = json.loads((tmp_path / "recipe.json").read_text())
    assert recipe["steps"] == 3 and recipe["corpus_sha256"] == corpus_hash(read_corpus(library))
    rows = read_csv(tmp_path / "training.csv")
    loss = [
        float(r["value"]) for r in rows if (r["model"], r["split"], r["metric"]) == ("target", "validation", "loss")
    ]
    assert len(loss) == 4 and loss[2] < loss[0]
    assert len(load_prompts(tmp_path / "prompts.jsonl")) == 2
    assert "held_out_loss" in capsys.readouterr().out


def test_wrong_arguments_say_what_to_do(tmp_path, capsys):
    with pytest.raises(FileNotFoundError, match="--stdlib"):
        Recipe(stdlib=tmp_path)
    with pytest.raises(ValueError, match="2048 positions"):
        Recipe(length=4096)
    with pytest.raises(SystemExit):
        main(["random", "--out", str(tmp_path), "--architecture", "gpt2"])
    assert "llama" in capsys.readouterr().err


def test_module_runs_as_a_command(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "nwor_lab.cli", "pair", "random", "--out", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == [str(tmp_path / "target"), str(tmp_path / "eagle")]
