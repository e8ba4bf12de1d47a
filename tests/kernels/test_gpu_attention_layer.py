# SPDX-License-Identifier: Apache-2.0
"""`LayerAttention`: a signature is checked once, and every call does what the checked function does.

Runs where `test_gpu_attention.py` does. Triton's interpreter has no compiled kernel, so `Compiling` stands in for one.
"""

import re
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.kernels.operators import changes
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
    for seed, (masks, checked) in enumerate([({}, 1), ({"softcap": 2.0}, 2), ({"with_sinks": True}, 3), ({}, 3)], 1):
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


STEP = [name for name in LayerAttention.__call__.__annotations__ if name != "return"]
TOGETHER = ["query output", "key value", "seq_lens query_start_loc block_table", "page_slots query key value output"]


@pytest.mark.parametrize("names", STEP + TOGETHER)
def test_a_wrong_step_after_a_right_one_is_refused(names, checks, compiling):
    """As a new layer refuses it, whatever changes of these tensors; nothing is touched, and a right one is served."""
    problem = dense(Windows(FEW, config=Config(tile=32), destinations="pn").to_device())
    attend, refused = run(problem, compiling), 0
    away = lambda tensor: tensor.to("meta" if INTERPRETED else "cpu")
    first = names.split()[0]
    for number in range(-1, len([*changes(problem.layer()[1][first])])):
        other = dense(following(problem, attend))
        layer, step = other.layer()
        changed = {name: away(step[name]) if number < 0 else [*changes(step[name])][number] for name in names.split()}
        wrong = step | changed
        try:
            layer._check(tuple(wrong.values()))
        except ValueError as error:
            with pytest.raises(type(error), match=re.escape(str(error))):
                attend(**wrong)
            refused += 1
    assert refused >= 3 and other.output.isnan().all()
    run(dense(following(problem, attend)), compiling, attend)
    assert compiling.bindings == 1
