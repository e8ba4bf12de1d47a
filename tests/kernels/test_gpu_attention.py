# SPDX-License-Identifier: Apache-2.0
"""The GPU's verify attention against float64 PyTorch, over poisoned pages and staging.

Runs on an NVIDIA GPU, or anywhere with Triton's interpreter (``TRITON_INTERPRET=1``), as `make test` does.
"""

import importlib.util
import inspect
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import Tensor

from nwor.vllm.self_check import attend
from nwor_lab.operators.reference import quantise

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if INTERPRETED:  # numpy warns where infinities meet; that their weights are 0 is what the tests look at
    pytestmark = [pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning:triton")]
    from tests.kernels.triton_interpreter import install

    install()
elif torch.cuda.is_available():
    pytestmark = [pytest.mark.gpu]
    pytest.importorskip("triton", reason="no Triton here")
else:
    pytest.skip("no NVIDIA GPU; `make test` runs these under Triton's interpreter apart", allow_module_level=True)

from nwor.attention import kernel, verify
from nwor.attention.configs import HEAD_SIZES, Config
from nwor.attention.verify import Workspace, verify_attention

DEVICE = "cpu" if INTERPRETED else "cuda"
DTYPE = torch.bfloat16
on_gpu = pytest.mark.skipif(INTERPRETED, reason="needs an NVIDIA GPU")
FP8 = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
# Relative error over all outputs: half a unit in the last place of the weights and of the output.
TOLERANCE = {torch.bfloat16: 4e-3, torch.float16: 6e-4}
# (prefix, query rows): a padded request has 0 rows, and one with more than `max_query_len` is not a window.
RAGGED = ((37, 5), (0, 3), (0, 0), (16, 9), (1, 1), (64, 9), (50, 12), (130, 2))


@dataclass
class Windows:
    """A batch of `requests`, (prefix, query rows) each, of one layer.

    fates: of each row in turn, cyclically: `h`eld in staging, written to its `p`age, or `n`either.
    """

    requests: Sequence[tuple[int, int]] = RAGGED
    dtype: torch.dtype = DTYPE
    kv_cache_dtype: str = "auto"
    query_fp8: bool = False
    num_heads: int = 4
    num_kv_heads: int = 2
    head_size: int = 64
    block_size: int = 16
    layout: str = "NHD"
    max_query_len: int = 9
    fates: str = "hpn"
    softcap: float = 0.0
    sliding_window: int = 0
    alibi: bool = False
    sinks: bool = False
    config: Config | None = None
    seed: int = 0
    scales: dict[str, float] = field(default_factory=lambda: {"q_scale": 0.5, "k_scale": 0.75, "v_scale": 1.5})

    def __post_init__(self) -> None:
        self.generator = torch.Generator().manual_seed(self.seed)
        n, d, h, hq = self.block_size, self.head_size, self.num_kv_heads, self.num_heads
        self.prefixes, self.tails = (list(numbers) for numbers in zip(*self.requests, strict=True))
        self.fp8 = self.kv_cache_dtype != "auto"
        tokens = sum(self.tails)
        pages = [-(-(prefix + tail) // n) for prefix, tail in self.requests]
        num_blocks = sum(pages) + 3
        blocks = torch.randperm(num_blocks, generator=self.generator)
        # The table's unused ends would lead far out of the cache.
        self.block_table = torch.full((len(pages), max(pages) + 2), 2**30, dtype=torch.int32)
        self.kv_cache, self.staging = self.poisoned(num_blocks), self.poisoned(-(-max(tokens, 1) // n) + 1)
        self.qkv = torch.randn(tokens, hq + 2 * h, d, generator=self.generator).to(self.dtype)
        self.query, self.key, self.value = self.qkv.split([hq, h, h], dim=1)
        self.q_read = self.query
        if self.query_fp8:
            self.q_read = (self.query.float() / self.scales["q_scale"]).to(torch.float8_e4m3fn)
        self.prefix_rows, slots, first_block = [], [], 0
        for request, (prefix, tail) in enumerate(self.requests):
            table = blocks[first_block : first_block + pages[request]]
            first_block += pages[request]
            self.block_table[request, : pages[request]] = table.int()
            positions = torch.arange(prefix + tail)
            slots.append(table[positions // n] * n + positions % n)
            rows = torch.randn(prefix, h, 2 * d, generator=self.generator)
            rows = rows.to(FP8[self.kv_cache_dtype]) if self.fp8 else rows.to(self.dtype)
            self.write(self.kv_cache, slots[-1][:prefix], rows.view(self.kv_cache.dtype))
            self.prefix_rows.append(rows)
        tail_slots = torch.cat([slot[prefix:] for slot, prefix in zip(slots, self.prefixes, strict=True)])
        fate = (self.fates * (tokens + 1))[:tokens]
        self.page_slots = torch.full((tokens + 4,), -1)
        self.staging_rows = torch.full((tokens + 4,), -1)
        # A held row has a page slot too, which must stay as it was.
        for token in range(tokens):
            self.page_slots[token] = tail_slots[token] if fate[token] in "hp" else -1
        held = [token for token in range(tokens) if fate[token] == "h"]
        places = torch.randperm(self.staging.shape[0] * n, generator=self.generator)[: len(held)]
        self.staging_rows[held] = places
        self.query_start_loc = torch.tensor([0, *self.tails]).cumsum(0).int()
        self.seq_lens = torch.tensor([prefix + tail if tail else 0 for prefix, tail in self.requests]).int()
        self.output = torch.full((tokens, hq, d), float("nan"), dtype=self.dtype)
        self.scale = d**-0.5
        self.slopes = -torch.rand(hq, generator=self.generator) if self.alibi else None
        self.sink = torch.randn(hq, generator=self.generator).to(self.dtype) if self.sinks else None
        self.workspace = Workspace(len(pages), self.max_query_len, hq, d, DEVICE)

    def poisoned(self, blocks: int) -> Tensor:
        """A cache [blocks, H, N, 2 * D] of NaN."""
        sizes = {"B": blocks, "H": self.num_kv_heads, "N": self.block_size}
        order = {"NHD": "BNH", "HND": "BHN"}[self.layout]
        dtype, nan = (torch.uint8, 0x7F) if self.fp8 else (self.dtype, float("nan"))
        memory = torch.full([*(sizes[dim] for dim in order), 2 * self.head_size], nan, dtype=dtype)
        return memory.permute(*(order.index(dim) for dim in "BHN"), 3)

    def write(self, cache: Tensor, slots: Tensor, rows: Tensor) -> None:
        cache[slots // self.block_size, :, slots % self.block_size] = rows.to(cache.device)

    def to_device(self) -> "Windows":
        for name, held in vars(self).items():
            if isinstance(held, Tensor):
                setattr(self, name, held.to(DEVICE))
        self.query, self.key, self.value = self.qkv.split([self.num_heads, self.num_kv_heads, self.num_kv_heads], dim=1)
        return self

    def arguments(self) -> dict:
        scales = {name: torch.full((1,), scale, device=DEVICE) for name, scale in self.scales.items()}
        return {
            "query": self.q_read if self.query_fp8 else self.query,
            "key": self.key,
            "value": self.value,
            "kv_cache": self.kv_cache,
            "output": self.output,
            "query_start_loc": self.query_start_loc,
            "seq_lens": self.seq_lens,
            "block_table": self.block_table,
            "page_slots": self.page_slots,
            "staging": self.staging,
            "staging_rows": self.staging_rows,
            "max_query_len": self.max_query_len,
            "scale": self.scale,
            "softcap": self.softcap,
            "sliding_window": self.sliding_window,
            "alibi_slopes": self.slopes,
            "sinks": self.sink,
            "kv_cache_dtype": self.kv_cache_dtype,
            **(scales if self.fp8 else {}),
            "workspace": self.workspace,
            "config": self.config,
        }

    def windows(self) -> list[int]:
        return [request for request, tail in enumerate(self.tails) if 0 < tail <= self.max_query_len]

    def stored(self, token: int) -> Tensor:
        """[H, 2 * D]: what a cache holds of a row, in the cache's dtype."""
        pair = torch.cat([self.key[token], self.value[token]], dim=-1).cpu()
        if not self.fp8:
            return pair
        fmt = "e5m2" if self.kv_cache_dtype == "fp8_e5m2" else "e4m3"
        halves = [
            quantise(half.flatten(), self.scales[name], fmt, "cuda").view(half.shape)
            for half, name in zip(pair.chunk(2, dim=-1), ("k_scale", "v_scale"), strict=True)
        ]
        return torch.cat(halves, dim=-1)

    def expected(self) -> tuple[Tensor, Tensor, Tensor]:
        """(output in float64, kv_cache, staging) as they have to be."""
        output = torch.full(self.output.shape, float("nan"), dtype=torch.float64)
        kv_cache, staging = self.kv_cache.cpu().clone(), self.staging.cpu().clone()
        k_scale, v_scale = (self.scales[name] if self.fp8 else 1.0 for name in ("k_scale", "v_scale"))
        start = self.query_start_loc.tolist()
        for request in self.windows():
            tokens = range(start[request], start[request + 1])
            tail = torch.stack([self.stored(token) for token in tokens])
            for token, row in zip(tokens, tail, strict=True):
                to_staging, to_page = int(self.staging_rows[token]), int(self.page_slots[token])
                if to_staging >= 0:
                    self.write(staging, torch.tensor([to_staging]), row[None])
                elif to_page >= 0:
                    self.write(kv_cache, torch.tensor([to_page]), row[None])
            prefix = self.prefix_rows[request].cpu()
            rows = torch.cat([prefix.double(), tail.view(prefix.dtype).double()])
            query = self.q_read[tokens.start : tokens.stop].cpu().double()
            query = query * (self.scales["q_scale"] if self.query_fp8 else 1.0)
            output[tokens.start : tokens.stop] = self.attend(query, rows, self.prefixes[request], k_scale, v_scale)
        return output, kv_cache, staging

    def attend(self, query: Tensor, rows: Tensor, prefix: int, k_scale: float, v_scale: float) -> Tensor:
        if not (self.alibi or self.sinks):
            arguments = (self.scale, self.softcap, self.sliding_window, k_scale, v_scale)
            return attend(query, rows, prefix, *arguments)
        keys, values = rows.repeat_interleave(self.num_heads // self.num_kv_heads, dim=1).chunk(2, dim=-1)
        scores = torch.einsum("thd,phd->htp", query, keys * k_scale) * self.scale
        last, position = prefix + torch.arange(len(query))[:, None], torch.arange(len(rows))[None]
        if self.slopes is not None:
            scores += self.slopes.cpu().double()[:, None, None] * (position - prefix)
        scores = scores.masked_fill(position > last, float("-inf"))
        if self.sink is not None:
            sink = self.sink.cpu().double()[:, None, None].expand(-1, len(query), 1)
            scores = torch.cat([scores, sink], dim=-1)
        weights = scores.softmax(dim=-1)[..., : len(rows)]
        return torch.einsum("htp,phd->thd", weights, values * v_scale)

    def check(self) -> float:
        self.to_device()
        output, kv_cache, staging = self.expected()
        verify_attention(**self.arguments())
        return self.compare(output, kv_cache, staging)

    def compare(self, output: Tensor, kv_cache: Tensor, staging: Tensor) -> float:
        found = self.output.cpu()
        assert torch.equal(found.isnan(), output.isnan()), "other rows than those of windows were written, or NaN was"
        error = relative(found, output)
        assert error < TOLERANCE[self.dtype]
        for wanted, tensor in ((kv_cache, self.kv_cache), (staging, self.staging)):
            bits = torch.uint8 if self.fp8 else torch.int16
            assert torch.equal(wanted.contiguous().view(bits), tensor.cpu().contiguous().view(bits))
        last, meet = self.workspace.arrivals.unbind(1)
        assert not (last | meet & 0x7FFFFFFF).any(), "the next launch would find arrivals of this one"
        return error


def relative(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted).nan_to_num().norm() / wanted.nan_to_num().norm().clamp(min=1e-9))


SPLIT = Config(tile=32, splits=3, least=1)
APART = Config(tile=64, splits=3, least=1, apart=True)
CONFIGS = pytest.mark.parametrize("config", [Config(tile=32), SPLIT, APART], ids=["whole", "split", "apart"])


@CONFIGS
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8", "fp8_e5m2"])
def test_against_float64(kv_cache_dtype, layout, config):
    """Ragged, padded and prefill requests; held, written and dropped rows; every cache and layout."""
    Windows(kv_cache_dtype=kv_cache_dtype, layout=layout, config=config).check()


@pytest.mark.parametrize("head_size", HEAD_SIZES)
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (4, 1), (8, 1), (7, 1)])
def test_head_sizes_and_groups(heads, kv_heads, head_size):
    requests = ((40, 9), (0, 1), (33, 4))
    Windows(requests, num_heads=heads, num_kv_heads=kv_heads, head_size=head_size, config=SPLIT).check()


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("block_size", [16, 32, 64])
def test_block_sizes_and_dtypes(block_size, dtype, kv_cache_dtype):
    """A block size equal to the number of heads, too."""
    Windows(dtype=dtype, kv_cache_dtype=kv_cache_dtype, block_size=block_size, config=SPLIT).check()
    if block_size == 16:
        requests = ((20, 2), (0, 9))
        Windows(requests, dtype, kv_cache_dtype, num_heads=16, num_kv_heads=16, config=SPLIT).check()


@CONFIGS
@pytest.mark.parametrize(("heads", "kv_cache_dtype"), [(4, "fp8"), (16, "fp8"), (16, "fp8_e5m2")])
def test_query_in_fp8(heads, kv_cache_dtype, config):
    """With 8 query heads a KV head the tensor cores multiply e4m3 as it is."""
    Windows(kv_cache_dtype=kv_cache_dtype, query_fp8=True, num_heads=heads, config=config).check()


@pytest.mark.parametrize("sliding_window", [-1, 1, 2, 7, 40, 1000])
@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_softcap_and_sliding_window(softcap, sliding_window):
    Windows(softcap=softcap, sliding_window=sliding_window, config=SPLIT).check()


@CONFIGS
@pytest.mark.parametrize(("alibi", "sinks"), [(True, False), (False, True), (True, True)])
def test_alibi_and_sinks(alibi, sinks, config):
    Windows(alibi=alibi, sinks=sinks, config=config).check()


def test_windows_larger_than_a_tile_of_rows():
    """20 rows of 8 query heads make two tiles of rows; the tail is stored once all the same."""
    requests = ((70, 20), (0, 20), (5, 3))
    problem = Windows(requests, num_heads=8, num_kv_heads=1, max_query_len=20, config=SPLIT)
    problem.check()


@pytest.mark.parametrize("head_size", [64, 256])
@pytest.mark.parametrize("splits", [2, 5, 8, 16, 33, 64])
def test_numbers_of_splits(splits, head_size):
    """Each power of 2 above them is a kernel of its own; fewer than all have keys, and one window has no prefix."""
    requests = ((64 * 20, 9), (0, 2), (40, 1))
    config = Config(tile=32, splits=splits, least=1)
    Windows(requests, num_heads=4, num_kv_heads=1, head_size=head_size, config=config).check()


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
@pytest.mark.parametrize("max_query_len", range(2, 10))
def test_rows_of_windows(max_query_len, kv_cache_dtype):
    """Windows of every width up to the bound, and a request one row longer, which is nobody's."""
    requests = [(31 * (rows % 3), rows) for rows in {1, max_query_len - 1, max_query_len, max_query_len + 1}]
    Windows(requests, kv_cache_dtype=kv_cache_dtype, max_query_len=max_query_len, config=SPLIT).check()


@pytest.mark.parametrize("fates", ["h", "p", "n"])
def test_fate_of_rows(fates):
    Windows(fates=fates, config=SPLIT).check()


def test_padded_batch():
    """A batch of nothing but padding changes nothing."""
    Windows(((0, 0), (0, 0)), config=SPLIT).check()


def test_values_that_saturate_and_nan():
    """The tail's bytes are vLLM's for every value there is, NaN and infinity included."""
    for kv_cache_dtype in ("fp8", "fp8_e5m2"):
        problem = Windows(((20, 9), (3, 4)), kv_cache_dtype=kv_cache_dtype, scales={"k_scale": 0.3, "v_scale": 7.0})
        values = torch.randint(-(2**15), 2**15, problem.qkv.shape, generator=problem.generator).to(torch.int16)
        problem.qkv[:, problem.num_heads :] = values.view(DTYPE)[:, problem.num_heads :]
        problem.to_device()
        _, kv_cache, staging = problem.expected()
        verify_attention(**problem.arguments())
        assert torch.equal(problem.kv_cache.cpu().contiguous(), kv_cache.contiguous())
        assert torch.equal(problem.staging.cpu().contiguous(), staging.contiguous())


@pytest.mark.parametrize(("prefix", "shares"), [(128, 1), (160, 1), (224, 1), (256, 2), (300, 2), (384, 3), (1000, 3)])
def test_a_prefix_is_cut_only_where_each_share_is_worth_it(prefix, shares):
    """A prefix a tile longer than one share takes is no reason for a second: its sums would cost more than it saves."""
    config = Config(tile=32, splits=3, least=4)
    problem = Windows(((prefix, 9),), num_heads=1, num_kv_heads=1, config=config).to_device()
    problem.workspace.softmax.fill_(float("nan"))
    problem.check()
    left = problem.workspace.softmax[: 3 * 9, 1].view(3, 9).isfinite().all(dim=1)
    assert left.sum() == (shares if shares > 1 else 0)


def test_tuned_configuration():
    """Without a configuration of its own a call takes a tuned one, and fewer splits where the workspace is small."""
    problem = Windows(((300, 9), (280, 3)))
    problem.check()
    problem = Windows(((300, 9), (280, 3)), config=Config(tile=32, splits=40))
    whole, room = problem.workspace.partials.fill_(float("nan")), 5 * 2 * problem.num_heads * problem.max_query_len
    problem.workspace.partials = whole[:room]
    problem.check()
    assert whole[room:].isnan().all()
    assert not whole[room // 2 :].isnan().all()


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"head_size": 80}, "head size 80"),
        ({"kv_cache_dtype": "int8"}, "kv_cache_dtype 'int8'"),
        ({"max_query_len": 10}, "the workspace is for"),
        ({"k_scale": torch.ones(2)}, "k_scale must be one fp32"),
        ({"v_scale": None}, "v_scale is needed"),
        ({"seq_lens": torch.zeros(8, dtype=torch.int64)}, "seq_lens must be contiguous torch.int32"),
        ({"page_slots": torch.zeros(3, dtype=torch.int64)}, "page_slots has 3 elements"),
        ({"alibi_slopes": torch.zeros(3)}, "alibi_slopes must be"),
    ],
)
def test_wrong_input_is_refused(change, complaint):
    """The tensor is named, and nothing is touched."""
    change = dict(change)
    problem = Windows(kv_cache_dtype="fp8", head_size=change.pop("head_size", 64)).to_device()
    before = [tensor.cpu().clone() for tensor in (problem.kv_cache, problem.staging)]
    change = {name: new.to(DEVICE) if isinstance(new, Tensor) else new for name, new in change.items()}
    with pytest.raises(ValueError, match=complaint):
        verify_attention(**problem.arguments() | change)
    assert problem.output.isnan().all()
    assert torch.equal(problem.kv_cache.cpu(), before[0])
    assert torch.equal(problem.staging.cpu(), before[1])


# -- a wrong kernel is seen ------------------------------------------------------------------------------------------

SOME = ((70, 9), (0, 3), (37, 12), (40, 2))
MASKS = {"sliding_window": 20, "softcap": 2.0}
WRONG_ARGUMENTS = {
    "staging_rows": lambda rows: rows.roll(1),
    "page_slots": lambda slots: slots.roll(1),
    "seq_lens": lambda lengths: (lengths - 1).clamp(min=0),
    "k_scale": lambda scale: scale * 1.25,
    "v_scale": lambda scale: scale * 1.25,
    "sliding_window": lambda positions: positions + 1,
    "softcap": lambda bound: 0.0,
    "sinks": lambda sinks: None,
}


@pytest.mark.parametrize("masks", [{}, MASKS, {"sinks": True}], ids=["plain", "masks", "sinks"])
def test_without_a_fault_nothing_is_seen(masks):
    Windows(SOME, kv_cache_dtype="fp8", config=SPLIT, **masks).check()


@pytest.mark.parametrize("name", WRONG_ARGUMENTS)
def test_a_wrong_argument_is_seen(name):
    masks = {"sinks": True} if name == "sinks" else MASKS
    problem = Windows(SOME, kv_cache_dtype="fp8", config=SPLIT, **masks)
    expected = problem.to_device().expected()
    arguments = problem.arguments()
    verify_attention(**arguments | {name: WRONG_ARGUMENTS[name](arguments[name])})
    with pytest.raises(AssertionError):
        problem.compare(*expected)


WRONG_LINES = {
    "held rows go to their pages": ("to_staging = staged >= 0", "to_staging = staged < -1"),
    "rows that are not held go nowhere": ("keep = (at >= 0)", "keep = to_staging"),
    "a row does not attend to itself": ("place[None, :] <= row[:, None]", "place[None, :] < row[:, None]"),
    "a row attends to the next": ("place[None, :] <= row[:, None]", "place[None, :] <= row[:, None] + 1"),
    "the position behind the prefix is read": ("seen = position < prefix", "seen = position <= prefix"),
    "the last tile of a split is left out": ("tl.range(begin, end,", "tl.range(begin, end - 1,"),
    "requests longer than a window are attended to": ("| (query_len > MAX_QUERY)", ""),
    "the last split but one to arrive combines": ("!= active - 1:", "!= active - 2:"),
    "splits are added without their share": ("tl.sum(found * fade[:, :, None], 1)", "tl.sum(found, 1)"),
    "arrivals are left behind": ("tl.store(arrival, 0)", "pass"),
    "values take the keys' scale": ("_quantize(tail_values, v_scale, FP8)", "_quantize(tail_values, k_scale, FP8)"),
    "stored rows are too large": ("tl.minimum(tl.maximum(scaled, -largest), largest)", "scaled * 1.5"),
    "query heads read the next KV head": ("kv_head * page_head.to(tl.int64)", "(1 - kv_head) * page_head.to(tl.int64)"),
}


@pytest.mark.parametrize("fault", WRONG_LINES)
def test_a_wrong_line_of_the_kernel_is_seen(fault, tmp_path, monkeypatch):
    right, wrong = WRONG_LINES[fault]
    source = inspect.getsource(kernel)
    assert right in source
    (tmp_path / "wrong_kernel.py").write_text(source.replace(right, wrong))
    spec = importlib.util.spec_from_file_location("wrong_kernel", tmp_path / "wrong_kernel.py")
    assert spec and spec.loader
    wrong_kernel = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(wrong_kernel)
    problem = Windows(SOME, kv_cache_dtype="fp8", config=SPLIT)
    problem.workspace.partials.fill_(float("nan"))
    # The last split to arrive combines, on a GPU too.
    problem.workspace.device = replace(problem.workspace.device, multiprocessors=0)
    monkeypatch.setattr(verify, "verify_windows", wrong_kernel.verify_windows)
    with pytest.raises(AssertionError):
        problem.check()


# -- what only a GPU shows -------------------------------------------------------------------------------------------

LONG = ((0, 9), (1, 1), (511, 9), (2048, 5), (8192, 9), (32768, 9), (700, 0), (4097, 2))


@on_gpu
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
@pytest.mark.parametrize(("heads", "kv_heads"), [(32, 32), (32, 8), (32, 4)])
def test_long_contexts_no_worse_than_flash_attention(heads, kv_heads, kv_cache_dtype):
    """Contexts to 32k with the tuned configuration; the error is no larger than FlashAttention 3's, nor are bytes
    other than vLLM's own writer's."""
    flash = pytest.importorskip("vllm.vllm_flash_attn.flash_attn_interface")
    custom_ops = pytest.importorskip("vllm._custom_ops")
    problem = Windows(
        LONG, num_heads=heads, num_kv_heads=kv_heads, head_size=128, kv_cache_dtype=kv_cache_dtype, fates="h",
        scales={"q_scale": 1.0, "k_scale": 1.0, "v_scale": 1.0}, query_fp8=kv_cache_dtype == "fp8",
    )  # fmt: skip
    ours = problem.check()
    written = problem.kv_cache.clone()
    ones = torch.ones(1, device=DEVICE)
    keys, values = written.transpose(1, 2).split(128, -1)
    slots = problem.page_slots[: len(problem.query)]
    custom_ops.reshape_and_cache_flash(problem.key, problem.value, keys, values, slots, kv_cache_dtype, ones, ones)
    if problem.fp8:
        keys, values = keys.view(torch.float8_e4m3fn), values.view(torch.float8_e4m3fn)
    rows = problem.staging_rows[: len(problem.query)]
    flat = written.transpose(1, 2).flatten(0, 1), problem.staging.transpose(1, 2).flatten(0, 1)
    bits = torch.uint8 if problem.fp8 else torch.int16
    assert torch.equal(flat[0].view(bits)[slots], flat[1].view(bits)[rows])
    theirs = flash.flash_attn_varlen_func(
        q=problem.q_read.to(DEVICE) if problem.query_fp8 else problem.query.contiguous(), k=keys, v=values,
        cu_seqlens_q=problem.query_start_loc, max_seqlen_q=9, seqused_k=problem.seq_lens,
        max_seqlen_k=int(problem.seq_lens.max()), softmax_scale=problem.scale, causal=True,
        block_table=problem.block_table.clamp(max=len(written) - 1), fa_version=3,
    )  # fmt: skip
    wanted = problem.expected()[0]
    assert ours <= 1.02 * relative(theirs.cpu().to(problem.dtype), wanted)


@on_gpu
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
def test_one_graph_replayed_on_other_lengths(kv_cache_dtype):
    """A captured launch follows lengths, table, slots and rows as they are at replay."""
    problem = Windows(((0, 9),) * 8, head_size=128, kv_cache_dtype=kv_cache_dtype, config=Config(splits=4)).to_device()
    problem.kv_cache = problem.poisoned(400).to(DEVICE)
    problem.block_table = torch.zeros(8, 64, dtype=torch.int32, device=DEVICE)
    arguments = problem.arguments()
    verify_attention(**arguments)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        verify_attention(**arguments)
    live = ("qkv", "kv_cache", "output", "query_start_loc", "seq_lens", "page_slots", "staging", "staging_rows")
    lengths = torch.Generator().manual_seed(3)
    for seed in range(1, 9):
        requests = [
            (int(torch.randint(0, 700, (), generator=lengths)), int(torch.randint(0, 10, (), generator=lengths)))
            for _ in range(8)
        ]
        other = replace(problem, requests=requests, seed=seed)
        for name in live:
            source, target = getattr(other, name), getattr(problem, name)
            target[: len(source)].copy_(source)
        problem.block_table[:, : other.block_table.shape[1]].copy_(other.block_table)
        output, kv_cache, staging = other.expected()
        problem.output.fill_(float("nan"))
        graph.replay()
        for name in live:
            setattr(other, name, getattr(problem, name)[: len(getattr(other, name))])
        other.workspace = problem.workspace
        other.compare(output, kv_cache, staging)


@on_gpu
def test_splits_that_meet_and_that_do_not_in_one_workspace():
    """Whatever a launch leaves of its arrivals, the next one's splits wait for each other, however many there are:
    the sign of a window's word turns when they met, and only then."""
    prefixes, kv_heads = (900, 31, 0, 300, 64, 700), 2
    problem = Windows(tuple((prefix, 9) for prefix in prefixes), head_size=128, num_kv_heads=kv_heads).to_device()
    workspace = problem.workspace
    most = workspace.device.multiprocessors // (len(prefixes) * kv_heads)
    words = workspace.arrivals[: len(prefixes) * kv_heads, 1]
    words[::3] = -(2**31)
    for splits in (2, 5, most, 4 * most, 3, most + 1, most):
        problem = replace(problem, config=Config(tile=32, splits=splits))
        problem.workspace, before = workspace, words.clone()
        problem.check()
        turned = (words ^ before < 0).view(-1, kv_heads).tolist()
        assert turned == [[splits <= most and prefix > 32] * kv_heads for prefix in prefixes]


@on_gpu
def test_tiles_without_rows_have_nothing_to_do():
    """The tile that a short window does not reach ends at once: its splits do not even meet."""
    requests, config = ((300, 2), (300, 20)), Config(tile=32, splits=4)
    problem = Windows(requests, num_heads=16, max_query_len=20, config=config).to_device()
    problem.check()
    met = (problem.workspace.arrivals[: 2 * 2 * 2, 1] < 0).view(2, 2, 2).tolist()
    assert met == [[[True, False]] * 2, [[True] * 2] * 2]


@on_gpu
def test_nothing_is_allocated_and_nobody_waits():
    problem = Windows(head_size=128).to_device()
    arguments = problem.arguments()
    verify_attention(**arguments)
    torch.cuda.synchronize()
    allocations = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        verify_attention(**arguments)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == allocations
