# SPDX-License-Identifier: Apache-2.0
"""What no row of a window may see reaches no output of the GPU's verify attention, whatever it holds.

Runs where `test_gpu_attention.py` does. The pages of `Windows` are NaN wherever no request's prefix is, staging too.
"""

import pytest
import torch
from torch import Tensor

from tests.kernels.windows import DEVICE, DTYPE, MARKS, Windows, relative

# isort: split
from nwor.attention.configs import Config
from nwor.attention.verify import verify_attention

pytestmark = MARKS

# Of one request the sliding window begins inside a block, of one at a block's first slot, of one nothing is below it.
REQUESTS, SLIDING_WINDOW = ((130, 3), (113, 2), (20, 1)), 50
FILLERS = {
    "auto": (float("nan"), float("inf"), 7.0),
    "fp8": (0x7F, 0x38),
    "fp8_e5m2": (0x7F, 0x7C, 0x46),
}
CONFIGS = [
    Config(tile=32),
    Config(tile=64, splits=3),
    Config(tile=64, splits=2, keys_per_warp=True),
]


def fill_below_windows(problem: Windows, filler: float, null_block: bool) -> None:
    """`filler` in every slot below the first row's window; null_block: blocks wholly below are one block of it."""
    n = problem.block_size
    used = {int(block) for block in problem.block_table.flatten() if block < 2**30}
    spare = next(block for block in range(problem.kv_cache.shape[0]) if block not in used)
    problem.kv_cache[spare] = filler
    for request, (prefix, _) in enumerate(problem.requests):
        for position in range(max(prefix - problem.sliding_window + 1, 0)):
            first = position // n * n
            if null_block and first + n <= prefix - problem.sliding_window + 1:
                problem.block_table[request, position // n] = spare
            else:
                problem.kv_cache[problem.block_table[request, position // n], :, position % n] = filler


@pytest.mark.parametrize(
    ("config", "kv_cache_dtype"),
    [*((config, "auto") for config in CONFIGS), (CONFIGS[1], "fp8"), (CONFIGS[2], "fp8_e5m2")],
    ids=lambda value: f"{value.tile}x{value.splits}" if isinstance(value, Config) else value,
)
def test_below_a_sliding_window(config, kv_cache_dtype):
    """vLLM frees those blocks, and hands them out again or names block 0 for them."""
    outputs = []
    for null_block, filler in enumerate((None, *FILLERS[kv_cache_dtype])):
        problem = Windows(REQUESTS, kv_cache_dtype=kv_cache_dtype, sliding_window=SLIDING_WINDOW, config=config)
        if filler is not None:
            fill_below_windows(problem, filler, null_block % 2 == 1)
        problem.check()
        outputs.append(problem.output.cpu())
    assert all(torch.equal(output.view(torch.int16), outputs[0].view(torch.int16)) for output in outputs)


@pytest.mark.parametrize("poison", ["nan", "inf"])
def test_beyond_sequences_and_in_staging(poison):
    """Tails in pages and staging hold what somebody left there, until this launch writes them."""
    problem = Windows(config=Config(tile=128))
    unused = problem.kv_cache.isnan()
    problem.kv_cache[unused] = float(poison)
    problem.staging.fill_(float(poison))
    problem.check()


def test_heads_further_apart_than_an_int32_counts():
    """Two heads of a page lie 2^31 elements apart: read and stored in the right place, not around the corner."""
    heads, head_size, n, apart = 3, 64, 16, 2**30 + 2**10
    memory = torch.empty(heads * apart, dtype=DTYPE, device=DEVICE)  # untouched pages of memory cost nothing on a CPU

    def spread(cache: Tensor) -> Tensor:
        strides = n * 2 * head_size, apart, 2 * head_size, 1
        return torch.as_strided(memory, cache.shape, strides).copy_(cache)

    problem = Windows(
        ((20, 3), (5, 9)), num_heads=3, num_kv_heads=heads, head_size=head_size, destinations="p", config=Config()
    )
    output, kv_cache, _ = problem.to_device().expected()
    problem.kv_cache = spread(problem.kv_cache)
    verify_attention(**problem.arguments())
    assert relative(problem.output.cpu(), output) < 4e-3
    assert torch.equal(problem.kv_cache.cpu().contiguous().view(torch.int16), kv_cache.contiguous().view(torch.int16))
