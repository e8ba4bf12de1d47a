# SPDX-License-Identifier: Apache-2.0
"""The shipped pair at larger shapes is the same function, and a shape that it does not fit into is refused by name."""

from pathlib import Path

import pytest
import torch

from nwor_lab import pair, paths
from nwor_lab.bench import bench, options
from nwor_lab.command_line import parse
from nwor_lab.engines import shapes
from nwor_lab.engines.widened_pair import write_widened
from nwor_lab.pair.model import EagleHead, hidden_states, load_pair

WIDE = {
    "grouped": (512, 1024, 7, 16, 8, 128, 4096),  # as many query heads to a KV head as the pair has
    "more to a group": (768, 704, 5, 16, 4, 64, 4096),
    "multi-head": (512, 800, 6, 8, 8, 128, 4096),  # the pair's KV heads twice
}


@pytest.fixture(autouse=True)
def _shapes(monkeypatch):
    for name, sizes in WIDE.items():
        monkeypatch.setitem(shapes.SHAPES, name, dict(zip(shapes.SIZES, sizes, strict=True)))


def logits(target, head: EagleHead, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the target, and of the head from the target's features."""
    positions = torch.arange(tokens.shape[1])[None]
    with torch.no_grad():
        features = hidden_states(target, tokens, positions)
        drafted = head(tokens[:, 1:], positions[:, :-1], features[:, :-1])
        return target.lm_head(features), target.lm_head(drafted)


@pytest.mark.parametrize("shape", WIDE)
def test_logits_are_the_pairs(shape, tmp_path):
    tokens = torch.tensor([pair.load_tokenizer().encode(pair.load_prompts()[0]).ids[:96]])
    expected = logits(*load_pair(), tokens)
    target, head = load_pair(*write_widened(f"pair@{shape}", tmp_path, "float32"))
    assert target.config.hidden_size == WIDE[shape][0] and target.config.num_hidden_layers == WIDE[shape][2]
    assert all(abs(weight).max() > 0 for name, weight in target.named_parameters() if "q_proj" in name)
    for found, wanted in zip(logits(target, head, tokens), expected, strict=True):
        assert (found - wanted).abs().max() < 2e-5, f"of {float(wanted.abs().max()):.1f}"


def test_what_is_whole_is_not_written_again(tmp_path):
    folders = write_widened("multi-head", tmp_path)
    before = {file: file.stat().st_mtime_ns for folder in folders for file in folder.iterdir()}
    assert write_widened("multi-head", tmp_path) == folders
    assert {file: file.stat().st_mtime_ns for folder in folders for file in folder.iterdir()} == before
    (folders[0] / "config.json").unlink()  # as if it had been stopped half-way
    write_widened("multi-head", tmp_path)
    assert (folders[0] / "config.json").is_file()


@pytest.mark.parametrize(("shape", "named"), [("llama-9b", "llama-2-7b"), ("tiny", "intermediate")])
def test_a_shape_that_does_not_do_is_named(shape, named, tmp_path):
    with pytest.raises(ValueError, match=named):
        write_widened(f"pair@{shape}", tmp_path)
    with pytest.raises(ValueError, match="nonsense"):
        write_widened("multi-head", tmp_path, "nonsense")
    assert not list(tmp_path.iterdir())


def test_a_bench_takes_it_by_name(tmp_path, monkeypatch):
    """With the pair's own tokenizer, since the text is the pair's."""
    monkeypatch.setattr(paths, "RESULTS", tmp_path)
    words = ["--model", "pair@multi-head", "--dtype", "float32", "--num-prompts", "2"]
    spec, _, prompts = options.parse_config(parse(bench.Bench, words, "bench", ""))
    assert (Path(spec.model) / "config.json").is_file() and (Path(spec.draft) / "config.json").is_file()
    assert prompts[0] == pair.load_tokenizer().encode(pair.load_prompts()[0]).ids
