# SPDX-License-Identifier: Apache-2.0
"""`LayerAttention`: a signature is checked once, and every call does what the checked function does.

Runs where `test_gpu_attention.py` does. Triton's interpreter has no compiled kernel, so `Compiling` stands in for one.
"""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.kernels.windows import DEVICE, INTERPRETED, MARKS, SPLIT, Windows

# isort: split
from nwor.attention import verify
from nwor.attention.configs import Config
from nwor.attention.verify import LayerAttention, verify_attention

pytestmark = MARKS
CACHES = pytest.mark.parametrize(("kv_cache_dtype", "query_fp8"), [("auto", False), ("fp8", True)])
FEW = ((5, 3), (0, 2), (0, 0))
RAGGED = ((37, 5), (0, 3), (0, 0), (16, 9), (20, 12))
CHANGED = "output", "kv_cache", "staging"


class Compiling:
    """`verify_windows` as where it is compiled: what it returns is launched with addresses, which must be as aligned.

    alive: the tensors whose addresses it may be given. bindings: how often arguments were bound, on a GPU too.
    """

    def __init__(self) -> None:
        self.interpreted, self.alive, self.bindings = verify.verify_windows, list[Tensor](), 0

    def __getitem__(self, grid):
        return lambda *given, **named: self.bind(grid, given, named)

    def bind(self, grid, given, named):
        self.bindings += 1
        names = self.interpreted.arg_names
        constants = [named[name] for name in names[len(given) :]]
        self.interpreted[grid](*given, **named)
        kinds = [arg.dtype if isinstance(arg, Tensor) else None for arg in given]
        aligned = [arg.data_ptr() % 16 == 0 for arg in given if isinstance(arg, Tensor)]

        def run(*again):
            assert list(again[len(given) :]) == constants
            found = [arg if kind is None else self.at(arg).view(kind) for arg, kind in zip(again, kinds, strict=False)]
            assert [arg.data_ptr() % 16 == 0 for arg in found if isinstance(arg, Tensor)] == aligned
            assert all(type(arg) is type(other) for arg, other in zip(found, given, strict=True))
            self.interpreted[grid](*found, **named)

        return {grid: run}

    def at(self, address: int) -> Tensor:
        return next(tensor for tensor in self.alive if tensor.data_ptr() == address)


@pytest.fixture
def compiling(monkeypatch) -> Compiling:
    found = Compiling()
    if INTERPRETED:
        monkeypatch.setattr(verify, "verify_windows", found)
        return found
    bind = verify.verify_windows.run

    def counted(*given, **named):
        found.bindings += 1
        return bind(*given, **named)

    monkeypatch.setattr(verify.verify_windows, "run", counted)
    return found


@pytest.fixture
def checks(monkeypatch) -> list:
    """Grows by one with each check."""
    found, check = [], LayerAttention._check
    monkeypatch.setattr(LayerAttention, "_check", lambda self, tensors: (found.append(1), check(self, tensors)))
    return found


def bits(tensor: Tensor) -> Tensor:
    return tensor.cpu().contiguous().view(torch.uint8)


def run(problem: Windows, compiling: Compiling, attend: LayerAttention | None = None) -> LayerAttention:
    """One step, and all that it changes as it must be; attend: of a step before, over the same staging."""
    layer, step = problem.layer()
    attend = attend or layer
    compiling.alive = [given for given in (*step.values(), *attend._tensors()) if given is not None]
    expected = problem.expected()
    attend(**step)
    problem.compare(*expected)
    return attend


def following(problem: Windows, attend: LayerAttention, **changed) -> Windows:
    """Another step of the same layer, over other rows."""
    other = replace(problem, seed=problem.seed + 1, **changed).to_device()
    other.workspace, other.staging = attend.workspace, attend.staging
    other.staging.view(torch.uint8 if other.fp8 else torch.int16).fill_(0x7F7F if not other.fp8 else 0x7F)
    other.staging_rows = attend.staging_rows.fill_(-1)
    return other


@CACHES
def test_later_calls_are_those_of_the_function(kv_cache_dtype, query_fp8, checks, compiling):
    """The bits of all that they change; nothing is checked again, and nothing bound."""
    problem = Windows(RAGGED, kv_cache_dtype=kv_cache_dtype, query_fp8=query_fp8, config=SPLIT).to_device()
    before = {name: getattr(problem, name).clone() for name in CHANGED}
    left = []
    layer, step = problem.layer()
    compiling.alive = [given for given in (*step.values(), *layer._tensors()) if given is not None]
    for attend in (layer, layer, layer, None):
        for name, tensor in before.items():
            getattr(problem, name).copy_(tensor)
        if attend:
            attend(**step)
        else:
            assert len(checks) == 1
            problem.workspace = verify.Workspace(len(RAGGED), 9, 4, 64, DEVICE)
            verify_attention(**problem.arguments())
        left.append([bits(getattr(problem, name)) for name in CHANGED])
    assert all(torch.equal(*pair) for found in left[1:] for pair in zip(left[0], found, strict=True))
    assert len(checks) == compiling.bindings == 2


def test_layers_alike_share_their_launches(checks, compiling):
    """Another layer's cache, staging and scales lie elsewhere; one of another mask is planned anew."""
    problem = Windows(RAGGED, kv_cache_dtype="fp8", config=SPLIT).to_device()
    run(problem, compiling)
    for seed, (masks, checked) in enumerate([({}, 1), ({"softcap": 2.0}, 2), ({"sinks": True}, 3), ({}, 3)], 1):
        other = replace(
            problem, seed=seed, scales={"q_scale": 0.5, "k_scale": 0.5, "v_scale": 2.0}, **masks
        ).to_device()
        other.workspace = problem.workspace
        run(other, compiling)
        assert len(checks) == compiling.bindings == checked


def test_batches_grow_and_come_back(checks, compiling):
    """Each number of requests is checked once, whatever its rows are; a cache may lie elsewhere each time."""
    problem = Windows(RAGGED, config=SPLIT, destinations="pn").to_device()
    attend, checked = run(problem, compiling), {len(RAGGED)}
    kept = []
    for requests in (1, 3, 2, 1, len(RAGGED)):
        for rows in (9, 3):
            batch = tuple((prefix, min(tail, rows)) for prefix, tail in RAGGED[:requests])
            other = following(problem, attend, requests=batch)
            other.page_slots = torch.cat([other.page_slots, problem.page_slots.new_full((50,), -1)])
            kept.append(other.kv_cache)
            run(other, compiling, attend)
            checked.add(requests)
            assert len(checks) == compiling.bindings == len(checked)


def moved(tensor: Tensor) -> Tensor:
    """The same rows as far apart, an element further in memory than a multiple of 16 bytes."""
    memory = torch.empty(tensor.untyped_storage().nbytes() // tensor.element_size() + 1, dtype=tensor.dtype)
    return memory.to(tensor.device).as_strided(tensor.shape, tensor.stride(), 1).copy_(tensor)


def spread(tensor: Tensor) -> Tensor:
    """The same rows, three times as far apart."""
    return torch.stack(3 * [tensor], 1)[:, 0]


@pytest.mark.parametrize("change", [moved, spread])
@pytest.mark.parametrize("name", ["query", "key", "value", "output", "kv_cache", "block_table"])
def test_what_lies_otherwise_is_checked_and_bound_anew(name, change, checks, compiling):
    problem = Windows(FEW, config=Config(tile=32), destinations="pn").to_device()
    attend = run(problem, compiling)
    for checked in (2, 2):
        other = following(problem, attend)
        setattr(other, name, change(getattr(other, name)))
        run(other, compiling, attend)
        assert len(checks) == compiling.bindings == checked
    run(following(problem, attend), compiling, attend)
    assert len(checks) == compiling.bindings == 2


def dense(problem: Windows) -> Windows:
    """Rows that keep their strides where some are added or left out, or where their dtype or device is another."""
    problem.query, problem.key, problem.value = (t.contiguous() for t in (problem.query, problem.key, problem.value))
    return problem


def gaps(tensor: Tensor) -> Tensor:
    """Its numbers, an element apart in the last dimension."""
    return tensor.repeat_interleave(2, -1)[..., ::2]


def twice(tensor: Tensor) -> Tensor:
    return torch.cat([tensor, tensor])


def less(tensor: Tensor) -> Tensor:
    return tensor[:-1]


def elsewhere(tensor: Tensor) -> Tensor:
    return tensor.to("meta" if INTERPRETED else "cpu")


# Tensors of a step after a right one, the changes that make it wrong, and a word of the error; "" for the first name.
WRONG: list[tuple[str, list, str]] = [
    ("query", [Tensor.half, gaps, lambda t: t.flatten(1)], ""),
    ("query", [twice], "key"),
    ("query output", [lambda t: t[:, :3]], "divide"),
    ("key value", [less, Tensor.float, lambda t: t[:, :1]], ""),
    ("value", [less, Tensor.half], ""),
    ("output", [less, Tensor.half], ""),
    ("kv_cache", [Tensor.half, gaps], ""),
    ("kv_cache", [lambda t: t[:, :1]], "key"),
    ("kv_cache", [lambda t: t[:, :, :8]], "staging"),
    ("seq_lens query_start_loc block_table", [twice], "workspace"),
    ("query_start_loc", [less, gaps], ""),
    ("seq_lens", [Tensor.long], ""),
    ("block_table", [less, lambda t: t.T.contiguous().T], ""),
    ("page_slots", [lambda t: t[:4], gaps, Tensor.int], ""),
    ("query key value output page_slots", [twice], "staging_rows"),
]
EACH = [(names, change, word or names.split()[0]) for names, changes, word in WRONG for change in changes]
EACH += [(name, elsewhere, "must be on") for name in LayerAttention.__call__.__annotations__ if name != "return"]


@pytest.mark.parametrize("wrong", EACH, ids=[f"{number}-{one[0]}" for number, one in enumerate(EACH)])
def test_a_wrong_step_after_a_right_one_is_refused(wrong, checks, compiling):
    """As the first one would be; nothing is touched, and the next right one is served."""
    names, change, word = wrong
    problem = dense(Windows(FEW, config=Config(tile=32), destinations="pn").to_device())
    attend = run(problem, compiling)
    other = dense(following(problem, attend))
    step = other.layer()[1]
    with pytest.raises(ValueError, match=word):
        attend(**step | {name: change(step[name]) for name in names.split()})
    assert len(checks) == 2
    run(other, compiling, attend)
    assert (len(checks), compiling.bindings) == (2, 1)
