# SPDX-License-Identifier: Apache-2.0
"""The reference decoder against vLLM itself: same pair, same prompts, fp32, greedy."""

import pytest

from nwor import pair, paths
from nwor.engine import Engine, EngineSpec
from nwor.reference import compare
from nwor.settings import Settings

K, PROMPTS, MAX_TOKENS = 4, 6, 40


@pytest.mark.engine
def test_the_decoder_says_drafts_and_accepts_what_vllm_does():
    """Tokens equal, and at every draft position the same number of drafts accepted: the chain is vLLM's chain."""
    texts = pair.load_prompts(paths.PROMPTS, PROMPTS)
    ids = [compare.load_tokenizer(paths.PAIR_TARGET).encode(text).ids for text in texts]
    ours = compare.compare(*pair.load_pair(), ids, k=K, max_tokens=MAX_TOKENS, modes=["off", "stage"])
    spec = EngineSpec(str(paths.PAIR_TARGET), str(paths.PAIR_EAGLE), k=K, dtype="float32", max_model_len=1024)
    with Engine(spec, Settings()) as engine:
        assert engine.encode(texts) == ids
        theirs = engine.generate(ids, MAX_TOKENS)
    for mode, run in ours.items():
        assert run.tokens == theirs.tokens, mode
        assert len(run.accepted) == theirs.counters["drafts"], mode
        assert [round(share * len(run.accepted)) for share in run.survival] == theirs.accepted_at, mode
