# SPDX-License-Identifier: Apache-2.0
"""The recipe of the shipped pair: a Llama target and an EAGLE head on the source of Python's standard library.

`python data/pair/train.py --out DIR` leaves `target/`, `eagle/`, `prompts.jsonl`, `training.csv` (every curve) and
`recipe.json` (versions, corpus hash, sizes, last values) in DIR. Seeds are fixed; on a GPU, whose sums have no fixed
order, two runs still differ a little (held-out loss 1.941 and 1.954 in two runs on an H200).
"""

from __future__ import annotations

import argparse
import copy
import csv
import json
import platform
import sys
import sysconfig
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from corpus import END_OF_TEXT, corpus_hash, cut_prompts, encode_stream, read_corpus, train_tokenizer
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from nwor_lab.pair.model import ATTENTION, EagleHead, causal_attention, hidden_states

SHAPE: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 5,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
DRAFTS = 4
"""Steps the head is unrolled over in training, and drafts per window in the acceptance estimate."""
PASS_WEIGHT, FEATURE_WEIGHT = 0.8, 0.1
HELP = {
    "steps": "optimiser steps of the target",
    "head_steps": "optimiser steps of the EAGLE head",
    "batch": "sequences a step",
    "length": "tokens a sequence",
    "weight_decay": "of the target; strong, since it sees the corpus about fifteen times",
    "seed": "of the weights and the order of the corpus",
    "prompts": "held-out prompts to cut",
    "stdlib": "corpus, the running Python's standard library by default",
    "device": "cuda if there is one, else cpu",
}


@dataclass(frozen=True)
class Recipe:
    """What may be changed from the command line.

    steps, head_steps: optimiser steps of the target and of the head. batch: sequences of `length` tokens a step.
    weight_decay: the target's; strong, since it sees the corpus about fifteen times.
    stdlib: folder of the corpus, the running interpreter's standard library unless given.
    """

    steps: int = 3500
    head_steps: int = 3000
    batch: int = 16
    length: int = 2048
    weight_decay: float = 1.0
    seed: int = 0
    prompts: int = 64
    stdlib: Path = field(default_factory=lambda: Path(sysconfig.get_path("stdlib")))
    device: str = field(default_factory=lambda: "cuda" if torch.cuda.is_available() else "cpu")

    def __post_init__(self) -> None:
        if not (self.stdlib / "os.py").is_file():
            raise FileNotFoundError(f"{self.stdlib} is no standard library (it has no os.py); pass --stdlib")
        if self.length > SHAPE["max_position_embeddings"]:
            raise ValueError(
                f"length {self.length} exceeds the {SHAPE['max_position_embeddings']} positions of the model"
            )


class Record:
    """Curves as tidy rows: model, step, split, metric, value."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, int, str, str, float]] = []

    def add(self, model: str, step: int, split: str, **values: float) -> None:
        self.rows += [(model, step, split, metric, round(float(value), 5)) for metric, value in values.items()]

    def save(self, path: Path) -> None:
        with path.open("w", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows([("model", "step", "split", "metric", "value"), *self.rows])


class UnrolledAttention:
    """Attention of one `EagleHead` layer over its own earlier passes, as chain drafting sees them.

    Call it once a pass on `[B, S, H, D]`. Row i of pass j is draft step j of a window whose last verified feature is
    that of row i - j: it sees rows up to i - j of pass 0 and, of each later pass m, row i - (j - m) alone.
    """

    def __init__(self) -> None:
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        self.keys.append(key)
        self.values.append(value)
        last = len(self.keys) - 1
        if last == 0:
            return causal_attention(layer, query, key, value)
        row = torch.arange(query.shape[1], device=query.device)
        behind = row[:, None] - row
        mask = torch.cat([behind >= last] + [behind == last - m for m in range(1, last + 1)], dim=1)
        groups = query.shape[-2] // key.shape[-2]
        keys, values = (torch.cat(x, 1).repeat_interleave(groups, -2).transpose(1, 2) for x in (self.keys, self.values))
        return F.scaled_dot_product_attention(query.transpose(1, 2), keys, values, attn_mask=mask).transpose(1, 2)


def unroll(head: EagleHead, input_ids: Tensor, hidden_states: Tensor, passes: int) -> list[Tensor]:
    """Predicted features `[B, S - 1, hidden]` of `passes` draft steps from every position at once.

    `input_ids [B, S]` and the target's `hidden_states [B, S, hidden]` of them. Row i of each result predicts the
    feature of position i + 1; in pass j rows below j mean nothing.
    """
    attend, positions = UnrolledAttention(), torch.arange(input_ids.shape[1] - 1, device=input_ids.device)
    features, predicted = hidden_states[:, :-1], []
    for _ in range(passes):
        predicted.append(head(input_ids[:, 1:], positions[None], features, attend))
        features = predicted[-1].roll(1, dims=1)
    return predicted


def head_loss(head: EagleHead, input_ids: Tensor, hidden_states: Tensor, target_logits: Tensor) -> Tensor:
    """EAGLE-1's loss, smooth-L1 on features plus cross-entropy against the target's distribution, over each pass."""
    wanted = target_logits[:, 1:].float().softmax(-1)
    loss = hidden_states.new_zeros(())
    for j, predicted in enumerate(unroll(head, input_ids, hidden_states, DRAFTS)):
        cross = -(wanted[:, j:] * head.lm_head(predicted[:, j:]).float().log_softmax(-1)).sum(-1).mean()
        feature = F.smooth_l1_loss(predicted[:, j:].float(), hidden_states[:, j + 1 :].float())
        loss = loss + PASS_WEIGHT**j * (cross + FEATURE_WEIGHT * feature)
    return loss / sum(PASS_WEIGHT**j for j in range(DRAFTS))


@torch.no_grad()
def generate(target: PreTrainedModel, prompts: Sequence[Sequence[int]], new_tokens: int, device: str) -> Tensor:
    """Greedy continuations without a cache: `[len(prompts), longest + new_tokens]`, each row padded at its end."""
    lengths = torch.tensor([len(p) for p in prompts], device=device)
    ids = torch.zeros(len(prompts), int(lengths.max()) + new_tokens, dtype=torch.long, device=device)
    for row, prompt in zip(ids, prompts, strict=True):
        row[: len(prompt)] = torch.tensor(prompt)
    rows = torch.arange(len(prompts), device=device)
    for step in range(new_tokens):
        end = int(lengths.max()) + step
        hidden = hidden_states(target, ids[:, :end], torch.arange(end, device=device)[None])[rows, lengths + step - 1]
        ids[rows, lengths + step] = target.lm_head(hidden).argmax(-1)
    return ids


@torch.no_grad()
def acceptance(
    head: EagleHead, target: PreTrainedModel, ids: Tensor, starts: Sequence[int], new_tokens: int
) -> list[float]:
    """Share of windows in which draft 1, 2, .. `DRAFTS` survives, over all windows within greedy text `ids [B, S]`.

    Row b of `ids` was generated from column `starts[b]` on. 1 + sum of the result is the mean acceptance length.
    """
    positions = torch.arange(ids.shape[1], device=ids.device)
    predicted = unroll(head, ids, hidden_states(target, ids, positions[None]), DRAFTS)
    survived, counts = torch.zeros(DRAFTS, dtype=torch.float64), 0
    hits = [head.lm_head(p)[:, :-1].argmax(-1) == ids[:, 2:] for p in predicted]
    for b, start in enumerate(starts):
        windows = torch.arange(start - 1, start + new_tokens - 1 - DRAFTS, device=ids.device)
        alive = torch.ones_like(windows, dtype=torch.bool)
        for j, hit in enumerate(hits):
            alive &= hit[b, windows + j]
            survived[j] += alive.sum().item()
        counts += len(windows)
    return (survived / counts).tolist()


def optimise(
    name: str,
    module: torch.nn.Module,
    parameters: list[torch.nn.Parameter],
    steps: int,
    rate: float,
    weight_decay: float,
    loss_of_batch: Callable[[], Tensor],
    evaluate: Callable[[int], float],
    record: Record,
) -> None:
    """AdamW with warm-up and cosine decay; leaves `module` with the weights of the lowest `evaluate`."""
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in parameters if p.ndim > 1], "weight_decay": weight_decay},
            {"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0},
        ],
        lr=rate,
        betas=(0.9, 0.95),
    )
    warmup = max(1, min(200, steps // 10))
    schedule = torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [
            torch.optim.lr_scheduler.LinearLR(optimizer, 0.01, total_iters=warmup),
            torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(1, steps - warmup), eta_min=0.02 * rate),
        ],
        [warmup],
    )
    best, best_weights = float("inf"), copy.deepcopy(module.state_dict())
    every = max(1, steps // 20)
    progress = tqdm(range(1, steps + 1), desc=name, mininterval=5)
    for step in progress:
        module.train()
        loss = loss_of_batch()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
        if step % every == 0 or step == steps:
            module.eval()
            record.add(name, step, "train", loss=loss.item(), learning_rate=schedule.get_last_lr()[0])
            score = evaluate(step)
            progress.write(f"{name} step {step}: train loss {loss.item():.4f}, held-out score {score:.4f}")
            if score < best:
                best, best_weights = score, copy.deepcopy(module.state_dict())
    module.load_state_dict(best_weights)
    module.eval()


def train(out: Path, recipe: Recipe) -> dict[str, object]:
    """Train the pair into `out`; returns what `recipe.json` holds."""
    torch.manual_seed(recipe.seed)
    device = recipe.device
    autocast = torch.autocast(device, torch.bfloat16, enabled=device == "cuda")
    corpus = read_corpus(recipe.stdlib)
    tokenizer = train_tokenizer(corpus["train"].values(), SHAPE["vocab_size"])
    streams = {split: encode_stream(tokenizer, list(corpus[split].values())) for split in ("train", "validation")}
    sizes = ", ".join(f"{len(stream):,} {split}" for split, stream in streams.items())
    print(f"corpus {sum(map(len, corpus['train'].values())):,} characters for training; tokens: {sizes}", flush=True)

    offsets = torch.Generator().manual_seed(recipe.seed)
    window = torch.arange(recipe.length + 1, device=device)
    tokens = streams["train"].to(device)

    def batch() -> Tensor:
        start = torch.randint(len(tokens) - recipe.length - 1, (recipe.batch, 1), generator=offsets)
        return tokens[start.to(device) + window]

    held_out = streams["validation"].to(device)
    held_out = held_out[: len(held_out) // (recipe.length + 1) * (recipe.length + 1)].view(-1, recipe.length + 1)
    held_out = held_out[: 8 * recipe.batch]
    positions, record = torch.arange(recipe.length, device=device)[None], Record()

    target = LlamaForCausalLM(LlamaConfig(**SHAPE, attn_implementation=ATTENTION))
    initialise(target.parameters())
    target.to(device)

    def next_token_loss(ids: Tensor) -> Tensor:
        with autocast:
            logits = target.lm_head(hidden_states(target, ids[:, :-1], positions))
        return F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())

    @torch.no_grad()
    def held_out_loss(step: int) -> float:
        loss = torch.stack([next_token_loss(ids) for ids in held_out.split(recipe.batch)]).mean().item()
        record.add("target", step, "validation", loss=loss)
        return loss

    weights = list(target.parameters())

    def batch_loss() -> Tensor:
        return next_token_loss(batch())

    optimise("target", target, weights, recipe.steps, 3e-3, recipe.weight_decay, batch_loss, held_out_loss, record)
    round_to_bf16(target.requires_grad_(False))  # the head learns on what is shipped

    new_tokens = min(128, recipe.length // 2)
    greedy: dict[str, tuple[Tensor, list[int]]] = {}
    prompts = {
        split: cut_prompts(corpus[split], tokenizer, recipe.prompts, recipe.seed) for split in ("validation", "prompts")
    }
    for split, cut in prompts.items():
        ids = [tokenizer.encode(p["prompt"]).ids for p in cut]
        with autocast:
            greedy[split] = generate(target, ids, new_tokens, device), [len(i) for i in ids]

    head = EagleHead(LlamaConfig(**{**SHAPE, "num_hidden_layers": 1}), target)
    own = list(head.own_parameters().values())
    initialise(own)
    head.to(device)

    def batch_head_loss() -> Tensor:
        ids = batch()[:, :-1]
        with autocast:
            with torch.no_grad():
                hidden = hidden_states(target, ids, positions)
                logits = target.lm_head(hidden)
            return head_loss(head, ids, hidden, logits)

    def acceptance_length(step: int, split: str = "validation") -> float:
        ids, starts = greedy[split]
        with autocast:
            survival = acceptance(head, target, ids, starts, new_tokens)
        named = {f"survival_{j}": share for j, share in enumerate(survival, 1)}
        record.add("eagle", step, split, acceptance_length=1 + sum(survival), **named)
        return 1 + sum(survival)

    optimise("eagle", head, own, recipe.head_steps, 2e-3, 0.1, batch_head_loss, lambda s: -acceptance_length(s), record)
    round_to_bf16(head)
    final = {
        "held_out_loss": held_out_loss(recipe.steps),
        "acceptance_length_validation": acceptance_length(recipe.head_steps),
        "acceptance_length_prompts": acceptance_length(recipe.head_steps, "prompts"),
    }
    print(", ".join(f"{name} {value:.4f}" for name, value in final.items()))

    target.to(torch.bfloat16).save_pretrained(out / "target")
    special = {"bos_token": END_OF_TEXT, "eos_token": END_OF_TEXT, "pad_token": END_OF_TEXT}
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, model_max_length=SHAPE["max_position_embeddings"], **special
    ).save_pretrained(out / "target")
    (out / "eagle").mkdir(parents=True, exist_ok=True)
    tensors = {name: p.detach().cpu().bfloat16() for name, p in head.own_parameters().items()}
    save_file(tensors, out / "eagle" / "model.safetensors", metadata={"format": "pt"})
    named = {"architectures": ["LlamaForCausalLM"], "dtype": "bfloat16"}
    write_json(out / "eagle" / "config.json", {**head.config.to_dict(), **named})
    (out / "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts["prompts"]))
    record.save(out / "training.csv")
    summary: dict[str, object] = {
        "stdlib": recipe.stdlib.name,
        "corpus_sha256": corpus_hash(corpus),
        "files": {split: len(files) for split, files in corpus.items()},
        "tokens": {split: len(stream) for split, stream in streams.items()},
        "parameters": {"target": sum(p.numel() for p in weights), "eagle": sum(p.numel() for p in own)},
        "steps": recipe.steps,
        "head_steps": recipe.head_steps,
        "batch": recipe.batch,
        "length": recipe.length,
        "weight_decay": recipe.weight_decay,
        "seed": recipe.seed,
        "device": torch.cuda.get_device_name() if device == "cuda" else platform.machine(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        **final,
    }
    write_json(out / "recipe.json", summary)
    return summary


def initialise(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Normal(0, 0.02) for matrices, ones for norms."""
    for p in parameters:
        if p.ndim > 1:
            torch.nn.init.normal_(p, std=0.02)
        else:
            torch.nn.init.ones_(p)


def round_to_bf16(module: torch.nn.Module) -> None:
    """Round the parameters to bfloat16 and keep them float32; buffers, such as RoPE's frequencies, stay."""
    for parameter in module.parameters():
        parameter.data = parameter.data.bfloat16().float()


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, default=str) + "\n")


def main(argv: list[str] | None = None) -> int:
    """`--out DIR` and a flag for each field of `Recipe`."""
    parser = argparse.ArgumentParser(description="train the pair on the source of Python's standard library")
    parser.add_argument("--out", type=Path, required=True, help="folder to write the pair and its record into")
    kinds = {"stdlib": Path, "device": str, "weight_decay": float}
    for one in fields(Recipe):
        parser.add_argument("--" + one.name.replace("_", "-"), type=kinds.get(one.name, int), help=HELP[one.name])
    given = {name: value for name, value in vars(parser.parse_args(argv)).items() if value is not None}
    out = given.pop("out")
    print(json.dumps(train(out, Recipe(**given)), indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
