# SPDX-License-Identifier: Apache-2.0
"""Tiny models, scripted drafts and random batches for the tests of the reference model."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from nwor_lab.bench.reference import ChunkedRun, compare, compare_chunks
from nwor_lab.cost.traffic import Shape
from nwor_lab.pair.model import ATTENTION, EagleHead, hidden_states
from nwor_lab.reference.cache import Batch, PagedCache
from nwor_lab.reference.decoder import Drafter, Generation, Request, make_batch

SMALL = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
CONFIG = LlamaConfig(**SMALL, num_hidden_layers=3, tie_word_embeddings=True, attn_implementation=ATTENTION)


def tiny_pair(dtype: torch.dtype = torch.float32, bias: bool = False) -> tuple[LlamaForCausalLM, EagleHead]:
    """Random weights large enough that attention decides the next token."""
    torch.manual_seed(0)
    target = LlamaForCausalLM(CONFIG)
    head = EagleHead(LlamaConfig(**SMALL, num_hidden_layers=1), target, bias)
    for module in (target, head):
        for name, weight in module.named_parameters():
            if "norm" not in name:
                torch.nn.init.normal_(weight, std=0.4)
    return target.to(dtype).eval(), head.to(dtype).eval()


def prompts(lengths: tuple[int, ...]) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(CONFIG.vocab_size, (n,), generator=generator).tolist() for n in lengths]


@torch.inference_mode()
def said_alone(target: LlamaForCausalLM, prompt: list[int], count: int) -> list[int]:
    """The next `count` tokens by plain forwards over the whole sequence."""
    tokens = list(prompt)
    for _ in range(count):
        hidden = hidden_states(target, torch.tensor([tokens]), torch.arange(len(tokens))[None])
        tokens.append(int(target.lm_head(hidden)[0, -1].argmax()))
    return tokens[len(prompt) :]


def compared(k: int) -> dict[str, Generation]:
    """The four policies on three prompts, by a head that repeats what the target's own last layer says: some drafts
    hold."""
    target, head = agreeing_pair()
    return compare(target, head, prompts((3, 17, 9)), k=k, max_tokens=20)


def compared_in_chunks(k: int, chunk: int) -> list[ChunkedRun]:
    """Long windows whole and in chunks, on three prompts: some drafts hold."""
    return compare_chunks(agreeing_pair()[0], prompts((3, 17, 9)), k=k, chunk=chunk, max_tokens=40)


def agreeing_pair() -> tuple[LlamaForCausalLM, EagleHead]:
    """A tiny target that repeats itself, and a head that often says what it says."""
    target, head = tiny_pair()
    with torch.no_grad():
        for layer in (*target.model.layers, *head.layers):
            layer.self_attn.o_proj.weight.mul_(0.3)
            layer.mlp.down_proj.weight.mul_(0.05)
        size = target.config.hidden_size
        head.fc.weight.copy_(torch.cat((torch.eye(size), torch.zeros(size, size)), dim=1))
    return target, head


class ScriptedDrafter(Drafter):
    """Drafts what the target will say, each token spoilt with probability `spoil`."""

    def __init__(self, truth: dict[tuple[int, ...], list[int]], k: int, spoil: float) -> None:
        self.truth, self.k, self.spoil = truth, k, spoil
        self.generator = torch.Generator().manual_seed(0)

    def propose(self, requests, batch, hidden_states, num_rejected) -> None:
        for request in requests:
            said = len(request.output)
            truth = self.truth[tuple(request.tokens[: request.num_prompt_tokens])][said : said + self.k]
            spoilt = torch.rand(self.k, generator=self.generator) < self.spoil
            request.drafts = [
                (token + int(bad)) % CONFIG.vocab_size for token, bad in zip(truth, spoilt, strict=True) if said
            ]


def fresh_rows(cache: PagedCache, rows: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    dtype = cache.dtype
    dtype = torch.bfloat16 if dtype.itemsize == 1 else dtype
    key, value = torch.randn(2, rows, cache.num_heads, cache.head_size, generator=generator).to(dtype)
    return key, value


def make_case(shape: Shape, dtype: torch.dtype, requests: list[tuple[int, int, int]]):
    """A cache with filled prefixes and shuffled blocks of 4, and the batch of `(num_computed, drafts, prefill rows)`;
    a request has either drafts or prefill."""
    generator = torch.Generator().manual_seed(0)
    lens = [1 + drafts if drafts else prefill for _, drafts, prefill in requests]
    computed, num_drafts = [request[0] for request in requests], [request[1] for request in requests]
    needed = [-(-(c + n) // 4) for c, n in zip(computed, lens, strict=True)]
    cache = PagedCache(shape.num_layers, shape.heads, shape.head_size, sum(needed) + 2, 4, dtype)
    tables = torch.randperm(sum(needed) + 2, generator=generator)[: sum(needed)].split(needed)
    running = [Request([], 0, table, drafts=[0] * n) for table, n in zip(tables, num_drafts, strict=True)]
    batch = make_batch(cache, running, computed, [[0] * n for n in lens])
    for slots, c in zip(batch.sequence_slots, computed, strict=True):
        for context in cache.layers.values():
            context.store(context.encode(*fresh_rows(cache, c, generator)), slots[:c])
    return cache, batch


def run_step(policy, batch: Batch, num_rejected: list[int]) -> list[torch.Tensor]:
    """One step with random queries, keys and values, the same for every policy; returns each layer's attention."""
    generator = torch.Generator().manual_seed(1)
    cache, outputs = policy.cache, []
    policy.begin(batch)
    for layer in cache.layers:
        rows = len(batch.slot_mapping)
        query = torch.randn(rows, 2 * cache.num_heads, cache.head_size, generator=generator)
        key, value = fresh_rows(cache, rows, generator)
        policy.stage(layer, key, value)
        outputs.append(policy.attend(layer, query.to(key.dtype)))
    policy.commit(torch.tensor(num_rejected))
    return outputs
