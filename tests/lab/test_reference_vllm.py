# SPDX-License-Identifier: Apache-2.0
"""The reference decoder against vLLM itself: same pair, same prompts, fp32, greedy."""

import pytest
import torch

from nwor.settings import Settings
from nwor_lab import pair, paths
from nwor_lab.bench.reference import compare
from nwor_lab.engines.engine import Engine, EngineSpec
from nwor_lab.pair.model import hidden_states, load_pair

K, PROMPTS, MAX_TOKENS = 4, 6, 40
TIE = 1e-3
"""Logits closer than this may come in either order, since vLLM sums in another order than the reference."""


@pytest.mark.engine
def test_the_decoder_says_and_accepts_what_vllm_does():
    """Tokens are equal, and at every draft position as many drafts hold, but for ties: the chain is vLLM's chain.

    A shift of one position or token in the drafter costs a third of the acceptance and more; a tie costs a window.
    """
    texts = pair.load_prompts(paths.PROMPTS, PROMPTS)
    ids = [pair.load_tokenizer().encode(text).ids for text in texts]
    target, head = load_pair()
    ours = compare(target, head, ids, k=K, max_tokens=MAX_TOKENS, modes=["stage"])["stage"]
    spec = EngineSpec(str(paths.PAIR_TARGET), str(paths.PAIR_EAGLE), k=K, dtype="float32", max_model_len=1024)
    with Engine(spec, Settings()) as engine:
        assert engine.encode(texts) == ids
        theirs = engine.generate(ids, MAX_TOKENS)

    differ = [n for n in range(PROMPTS) if ours.tokens[n] != theirs.tokens[n]]
    for n in differ:
        assert gap_where_they_part(target, ids[n], ours.tokens[n], theirs.tokens[n]) < TIE
    assert len(differ) <= 1
    if not differ:
        assert abs(len(ours.accepted) - theirs.counters["drafts"]) <= 2
        accepted_at = [round(share * len(ours.accepted)) for share in ours.survival]
        assert all(abs(a - b) <= 2 for a, b in zip(accepted_at, theirs.accepted_at, strict=True))


@torch.inference_mode()
def gap_where_they_part(target, prompt, ours, theirs) -> float:
    """Difference of the logits of the first tokens that differ."""
    at = next(n for n, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b)
    tokens = torch.tensor([prompt + ours[:at]])
    logits = target.lm_head(hidden_states(target, tokens, torch.arange(tokens.shape[1])[None])[0, -1])
    return float((logits[ours[at]] - logits[theirs[at]]).abs())
