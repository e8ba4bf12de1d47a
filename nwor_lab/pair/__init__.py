# SPDX-License-Identifier: Apache-2.0
"""Target and EAGLE head as checkpoint folders: the shipped pair, and random-weight pairs.

`nwor pair train --out DIR` trains the shipped pair anew, `nwor pair random --out DIR` writes a small random one.
Both leave `DIR/target` and `DIR/eagle`, which vLLM loads as model and speculative model.
"""

import argparse
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from nwor_lab.pair.llama import EagleHead, LlamaConfig, LlamaTarget
from nwor_lab.paths import PAIR_EAGLE, PAIR_TARGET, PROMPTS
from nwor_lab.results import write_json

END_OF_TEXT = "<|endoftext|>"
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


def load_pair(
    target: str | Path = PAIR_TARGET, eagle: str | Path = PAIR_EAGLE, dtype: torch.dtype = torch.float32
) -> tuple[LlamaTarget, EagleHead]:
    """The pair as plain PyTorch modules on the CPU."""
    model = LlamaTarget.from_pretrained(target, dtype)
    return model, EagleHead.from_pretrained(eagle, model, dtype)


def load_prompts(path: str | Path = PROMPTS, count: int | None = None) -> list[str]:
    """The first `count` prompts of a `{"id": ..., "prompt": ...}` JSON-lines file."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no prompts at {path}; give a JSON-lines file with a `prompt` in each line")
    lines = path.read_text(encoding="utf-8").splitlines()
    prompts = [json.loads(line)["prompt"] for line in lines if line.strip()]
    if count is not None and count > len(prompts):
        raise ValueError(f"{count} prompts asked for, {path} holds {len(prompts)}; ask for fewer or pass another file")
    return prompts[:count]


def write_prompts(path: str | Path, prompts: Iterable[dict[str, str]]) -> None:
    """Write prompts as `load_prompts` reads them."""
    Path(path).write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))


def save_checkpoint(path: str | Path, config: dict[str, Any], weights: dict[str, Tensor], dtype: torch.dtype) -> None:
    """Write `model.safetensors` and `config.json` into `path`, weights but whole numbers cast to `dtype`."""
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: tensor.detach().to("cpu", dtype if tensor.is_floating_point() else tensor.dtype).contiguous()
        for name, tensor in weights.items()
    }
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    write_json(path / "config.json", {**config, "dtype": str(dtype).removeprefix("torch.")})


def save_tokenizer(path: str | Path, tokenizer: Tokenizer, max_length: int) -> None:
    """Write `tokenizer` so that transformers' `AutoTokenizer` loads it; nothing is added to a prompt."""
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "pad_token": END_OF_TEXT,
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
    }
    write_json(path / "tokenizer_config.json", config)


def target_weights(target: LlamaTarget) -> dict[str, Tensor]:
    """The target's tensors as a checkpoint holds them: a tied `lm_head` is left out."""
    weights = dict(target.state_dict())
    if target.config.tie_word_embeddings:
        del weights["lm_head.weight"]
    return weights


def random_pair(
    out: str | Path,
    seed: int = 0,
    architecture: str = "llama",
    noise: float = 0.5,
    dtype: torch.dtype = torch.bfloat16,
    **shape: Any,
) -> tuple[Path, Path]:
    """Write a small random-weight pair to `out/target` and `out/eagle`, and return the two paths.

    The target's `lm_head` is random and its layers only perturb the embedding, so the next token is mostly a fixed
    function of the last one, which the head computes too: some drafts are accepted, some not, more with less `noise`.

    architecture: one of `ARCHITECTURES`, of the target; the head is always Llama-shaped.
    noise: scale of the layers' weights; at 0 only the norms' random weights make drafts differ.
    shape: fields of `LlamaConfig` to replace, `num_hidden_layers` the target's.
    """
    if architecture not in ARCHITECTURES:
        raise ValueError(f"architecture {architecture!r} is not one of {', '.join(ARCHITECTURES)}")
    default = {
        "vocab_size": 320,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "tie_word_embeddings": False,
    }
    config = LlamaConfig(**{**default, **shape})
    if config.vocab_size < 257:
        raise ValueError(f"vocab_size must be at least 257 (256 bytes and {END_OF_TEXT}), got {config.vocab_size}")
    generator = torch.Generator().manual_seed(seed)
    target = LlamaTarget(config)
    weights = target_weights(target)
    for index, layer in enumerate(target.model.layers):
        prefix = f"model.layers.{index}.self_attn."
        if architecture == "qwen2":
            for name in ("q_proj", "k_proj", "v_proj"):
                weights[f"{prefix}{name}.bias"] = getattr(layer.self_attn, name).weight[:, 0]
        if architecture == "qwen3":
            for name in ("q_norm", "k_norm"):
                weights[f"{prefix}{name}.weight"] = torch.ones(config.head_dim)
    weights = random_weights({name: weight.shape for name, weight in weights.items()}, noise, generator)
    head_config = LlamaConfig(**{**vars(config), "num_hidden_layers": 1})
    own = EagleHead(head_config, target).own_parameters()
    head = random_weights({name: weight.shape for name, weight in own.items()}, noise, generator)
    head["fc.weight"] = torch.cat((torch.eye(config.hidden_size), 0.1 * head["fc.weight"][:, config.hidden_size :]), 1)

    paths = Path(out) / "target", Path(out) / "eagle"
    named = {"architectures": [ARCHITECTURES[architecture]], "model_type": architecture}
    save_checkpoint(paths[0], {**hf_config(config), **named}, weights, dtype)
    save_checkpoint(paths[1], hf_config(head_config), head, dtype)
    save_tokenizer(paths[0], byte_tokenizer(config.vocab_size), config.max_position_embeddings)
    return paths


def random_weights(shapes: Mapping[str, Sequence[int]], noise: float, generator: torch.Generator) -> dict[str, Tensor]:
    """Norms near 1, embeddings and `lm_head` of unit variance, and all else small:
    outputs of variance `noise` squared."""
    weights = {}
    for name, shape in shapes.items():
        unit = torch.randn(tuple(shape), generator=generator)
        if name.endswith("norm.weight"):
            weights[name] = 1 + 0.1 * unit
        elif name.startswith(("model.embed_tokens", "lm_head")):
            weights[name] = unit
        else:
            weights[name] = noise * unit / shape[-1] ** 0.5
    return weights


def hf_config(config: LlamaConfig) -> dict[str, Any]:
    """`config.json` of a pair: one special token, `<|endoftext|>`, is id 0."""
    return {**config.to_dict(), "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None}


def byte_tokenizer(vocab_size: int) -> Tokenizer:
    """A tokenizer of single bytes; ids above 256 are reserved names."""
    names = [END_OF_TEXT, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    names += [f"<|reserved_{i}|>" for i in range(vocab_size - len(names))]
    tokenizer = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END_OF_TEXT])
    return tokenizer


def main(argv: list[str] | None = None) -> int:
    """`train --out DIR [--steps N ...]` or `random --out DIR [--seed N] [--architecture NAME]`."""
    parser = argparse.ArgumentParser(prog="nwor pair", description="make a target and an EAGLE head")
    commands = parser.add_subparsers(dest="command", required=True)
    random = commands.add_parser("random", help="write a small random-weight pair")
    random.add_argument("--out", type=Path, required=True, help="folder to write target/ and eagle/ into")
    random.add_argument("--seed", type=int, default=0)
    random.add_argument("--architecture", choices=ARCHITECTURES, default="llama")
    random.add_argument("--noise", type=float, default=0.5, help="more noise, fewer accepted drafts")
    train = commands.add_parser("train", help="train a pair on the source of Python's standard library")
    train.add_argument("--out", type=Path, required=True, help="folder to write the pair and its record into")
    train.add_argument("--steps", type=int, help="optimiser steps of the target")
    train.add_argument("--head-steps", type=int, help="optimiser steps of the EAGLE head")
    train.add_argument("--batch", type=int, help="sequences a step")
    train.add_argument("--length", type=int, help="tokens a sequence")
    train.add_argument("--weight-decay", type=float, help="of the target")
    train.add_argument("--prompts", type=int, help="held-out prompts to cut")
    train.add_argument("--seed", type=int)
    train.add_argument("--stdlib", type=Path, help="corpus, the running Python's standard library by default")
    train.add_argument("--device", help="cuda if there is one, else cpu")
    args = vars(parser.parse_args(argv))
    command, out = args.pop("command"), args.pop("out")
    if command == "random":
        for path in random_pair(out, **args):
            print(path)
        return 0
    from nwor_lab.pair.train import Recipe
    from nwor_lab.pair.train import train as train_pair

    summary = train_pair(out, Recipe(**{name: value for name, value in args.items() if value is not None}))
    print(json.dumps(summary, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
