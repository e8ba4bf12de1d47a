# SPDX-License-Identifier: Apache-2.0
"""`nwor tune`: what it tries, what of that it keeps, and what it says of wrong words."""

import itertools
import json
from dataclasses import asdict, replace
from types import SimpleNamespace

import pandas as pd
import pytest
import torch

from nwor.attention import configs
from nwor.attention.configs import H200, HEAD_SIZES, Config, Device, tuned
from nwor_lab import paths
from nwor_lab.gpu import tune
from nwor_lab.gpu.attention_case import AttentionShape
from tests.devices import A100, H100, L40S, SMALLER, limit

LAYER = AttentionShape(32, 8, 16, 512)


@pytest.mark.parametrize("device", SMALLER)
def test_a_sweep_tries_what_fits_the_device(device):
    for heads, cache, head_size in itertools.product((8, 32), ("bf16", "fp8"), HEAD_SIZES):
        shape = AttentionShape(32, heads, 4, 512, cache, head_size=head_size)
        rows, _ = tune.rows_of(shape, device)
        width = configs.next_power_of_2(head_size)
        tried = tune.kernels(shape, device)
        assert {kernel.splits for kernel in tried} == {1, 2} and len(tried) == len(set(tried))
        for kernel in tried:
            pages = kernel.stages * kernel.tile * 2 * width * shape.element
            assert pages + rows * width * 2 <= device.usable
    assert tune.filled(device) <= device.multiprocessors < 2 * tune.filled(device)


def test_splits_that_fill_the_device_are_tried():
    """24 programs on 132 multiprocessors, of which each has room for two: 11 splits of each fill all."""
    tried = tune.divisions(replace(LAYER, batch=3), Config(tile=64, warps=4, stages=3, splits=2), H200)
    assert {config.splits for config in tried if config.side_by_side == 1} == {2, 5, 10, 11}
    assert {config.splits for config in tried if config.side_by_side == 2} == {10, 11}


@pytest.mark.parametrize(("batch", "splits"), [(3, set()), (9, {3, 5, 7}), (17, {2, 3, 4, 5}), (44, {3})])
def test_splits_that_leave_less_idle_are_tried(batch, splits):
    """9 requests of 8 KV heads are one round of 132 multiprocessors, in 3 splits 2 / 3, in 5 splits 3 / 5."""
    assert tune.rounded(8 * batch, H200) == splits
    tried = tune.divisions(replace(LAYER, batch=batch), Config(tile=64, warps=4, stages=3, splits=2), H200)
    assert splits <= {config.splits for config in tried}


def test_without_a_gpu_it_says_so_in_a_line(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert tune.main(["--shape", "llama-2-7b"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("nwor tune: no NVIDIA GPU")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--heads", "7x2"], "divide"),
        (["--heads", "7"], "32x8,16x4"),
        (["--heads", "8x8", "--head-size", "80"], "size"),
        ([], "--heads or --shape"),
        (["--shape", "llama-2-7b", "--heads", "32x8"], "--heads or --shape"),
        (["--shape", "llama-2-7b", "--caches", "bf16,fp16"], "--caches: fp16 is not of bf16, fp8"),
    ],
)
def test_wrong_words_are_one_line(words, said, capsys):
    assert tune.main(words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("nwor tune: ") and said in line


@pytest.mark.gpu
@pytest.mark.parametrize("device", [A100, L40S], ids=lambda device: device.name)
def test_it_finds_what_fits_a_smaller_device(device, tmp_path, monkeypatch):
    """On whatever GPU is there, within that device's limits; compiled here, where they are known."""
    pytest.importorskip("vllm", reason="vLLM is not installed: nothing to compare with")
    limit(device, monkeypatch)
    monkeypatch.setattr(tune, "compile_all", lambda *_: None)
    asked = ["--heads", "32x8", "--caches", "bf16", "--batches", "4", "--repeats", "2", "--out", str(tmp_path)]
    assert tune.main(asked) == 0
    [entry] = configs.read(tmp_path / configs.file_name(device.name))
    config = configs.of_entry(entry)
    rows, _ = tune.rows_of(AttentionShape(32, 8, 4, 512), device)
    assert configs.shrunk(config, rows, 128, 2, device) == config
    searched = pd.read_parquet(next(tmp_path.glob("*_search.parquet")))
    assert len(searched) > 20 and (searched["value"] > 0).all()


def test_a_table_is_added_to(tmp_path):
    """What was known of other shapes stays; a shape that was swept again has what was found last."""
    entry = dict(tuned(H200)[0])
    other = entry | {"programs": 12345}
    del other["side_by_side"]  # written by another version, which knew other words
    tune.write(tmp_path, H200, tuned(H200))
    path = tune.write(tmp_path, H200, [other | {"twice_from": 64}])
    assert configs.read(path) == [*tuned(H200), other | {"twice_from": 64}]
    assert configs.of_entry(configs.read(path)[-1]).side_by_side == 1
    tune.write(tmp_path, H200, [entry | {"tile": 32}])
    found = configs.read(path)
    assert len(found) == len(tuned(H200)) + 1 and found[0] == entry | {"tile": 32}
    assert json.loads(path.read_text())["gpu"] == H200.name and [*tmp_path.iterdir()] == [path]


def sweep(name: str) -> pd.DataFrame:
    return pd.read_parquet(paths.DATA / "attention" / f"{name}_sweep.parquet").astype({"cache": str})


@pytest.mark.parametrize(("name", "device"), [("h200", H200), ("h100", H100)])
def test_tuned_configurations_are_what_the_recorded_search_found(name, device):
    """The shipped file follows from the recorded search by the rule of `best`."""
    assert tune.best(sweep(name)) == configs.shipped(device.name)


def searched(times: dict[int, float], vanilla: float = 100.0, **config) -> pd.DataFrame:
    """One configuration's times by context, beside vLLM's."""
    rows = [
        asdict(LAYER) | asdict(Config(**config)) | {"context": context, "value": us} for context, us in times.items()
    ]
    return pd.DataFrame(rows).assign(vanilla=vanilla)


@pytest.fixture
def a100_here(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=80 << 30))
    monkeypatch.setattr(Device, "of", lambda _: A100)


@pytest.mark.parametrize("caches", ["fp8", "bf16,fp8"])
def test_a_gpu_without_fp8_is_tuned_for_bf16_alone(a100_here, caches, tmp_path, monkeypatch, capsys):
    asked: list[AttentionShape] = []
    monkeypatch.setattr(tune, "search", lambda chosen, *_, **__: asked.extend(chosen) or searched({560: 60}))
    assert tune.main(["--shape", "llama-2-7b", "--caches", caches, "--out", str(tmp_path)]) == 0
    assert {shape.cache for shape in asked} == {"bf16"} and "no fp8: bf16 alone" in capsys.readouterr().out
    assert {shape.batch for shape in asked} > {1, 2, 3, 4, 12, 16, 40, 56, 64}


def test_where_no_table_can_be_written_nothing_is_searched(a100_here, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tune, "search", lambda *_, **__: pytest.fail("a search takes minutes"))
    (tmp_path / configs.file_name(A100.name)).write_text("{}")
    for folder, says in (("/proc/tuning", "cannot write"), (str(tmp_path), "no table of configurations")):
        assert tune.main(["--shape", "llama-2-7b", "--caches", "bf16", "--out", folder]) == 2
        assert says in capsys.readouterr().err


@pytest.mark.parametrize("disturbed", [1, 5])
def test_a_disturbed_timing_is_taken_again(disturbed, a100_here, tmp_path, monkeypatch, capsys):
    """An empty kernel that waited for another program made every time negative, and its context was left out; where it
    goes on so that is one line, and no table."""
    timings = iter(disturbed * [1600] + [5])
    us = lambda *_, **__: [("empty", 0, next(timings)), ("FLASH_ATTN", 0, 35), ("0", 0, 30)]
    monkeypatch.setattr(tune, "interleaved", us)
    if disturbed == 1:
        assert dict(tune.above_empty({}, 2)) == {"FLASH_ATTN": 30, "0": 25}
        return
    monkeypatch.setattr(tune, "search", lambda *_, **__: tune.above_empty({}, 2))
    assert tune.main(["--shape", "llama-2-7b", "--caches", "bf16", "--out", str(tmp_path)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("nwor tune: ") and "5 times: stop" in line and not [*tmp_path.iterdir()]
