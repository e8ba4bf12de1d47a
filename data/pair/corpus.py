# SPDX-License-Identifier: Apache-2.0
"""What the pair is trained on: the source of Python's standard library, its tokenizer and the held-out prompts."""

from __future__ import annotations

import hashlib
import random
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

END_OF_TEXT = "<|endoftext|>"
SKIPPED = ("site-packages", "dist-packages", "__pycache__", "encodings", "pydoc_data", "data", "lib-dynload")
BLOCKS = ("def ", "async ", "class ", "if ", "elif ", "else:", "for ", "while ", "with ", "try:", "except ", "finally:")


def read_corpus(stdlib: Path) -> dict[str, dict[str, str]]:
    """Split -> relative path -> text. A file's split hangs on the hash of its path alone: 1/16 each is held out."""
    corpus: dict[str, dict[str, str]] = {"train": {}, "validation": {}, "prompts": {}}
    for path in sorted(stdlib.rglob("*.py")):
        name = path.relative_to(stdlib).as_posix()
        if name.startswith(("_sysconfigdata", "config-")) or set(path.relative_to(stdlib).parts) & set(SKIPPED):
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:  # deliberately broken sources of the test suite
            continue
        byte = hashlib.sha256(name.encode()).digest()[0] % 16
        corpus[{0: "validation", 1: "prompts"}.get(byte, "train")][name] = text
    return corpus


def corpus_hash(corpus: dict[str, dict[str, str]]) -> str:
    """SHA-256 over split, path and text of every file."""
    digest = hashlib.sha256()
    for split, files in corpus.items():
        for name, text in files.items():
            digest.update(f"{split}\0{name}\0{text}\0".encode())
    return digest.hexdigest()


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Byte-level BPE; id 0 is `<|endoftext|>`, which ends each file."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def encode_stream(tokenizer: Tokenizer, texts: Sequence[str]) -> Tensor:
    """One int64 stream of all files, each closed by `<|endoftext|>`."""
    end = tokenizer.token_to_id(END_OF_TEXT)
    return torch.tensor([i for encoding in tokenizer.encode_batch(texts) for i in (*encoding.ids, end)])


def cut_prompts(files: dict[str, str], tokenizer: Tokenizer, count: int, seed: int) -> list[dict[str, str]]:
    """`count` prompts of 64 to 256 tokens, each from a top-level definition or a file's start to a block's colon.

    The line break after the colon is left out: the tokenizer joins it with the indentation that follows.
    """
    rng = random.Random(seed)
    starts = [
        (name, number)
        for name, text in files.items()
        for number, line in enumerate(text.splitlines())
        if number == 0 or line.startswith(("def ", "class ", "async def ", "@"))
    ]
    rng.shuffle(starts)
    prompts: list[dict[str, str]] = []
    for name, number in starts:
        lines, limit = files[name].splitlines()[number:], rng.randint(96, 256)
        counts = [len(encoding.ids) for encoding in tokenizer.encode_batch([line + "\n" for line in lines[:limit]])]
        kept = bisect_right(list(accumulate(counts)), limit)
        while kept and not (lines[kept - 1].endswith(":") and lines[kept - 1].lstrip().startswith(BLOCKS)):
            kept -= 1
        if sum(counts[:kept]) >= 64:
            prompts.append({"id": f"{name}:{number + 1}", "prompt": "\n".join(lines[:kept])})
        if len(prompts) == count:
            return prompts
    raise ValueError(f"the held-out files yield {len(prompts)} prompts of the {count} asked for; ask for fewer")
