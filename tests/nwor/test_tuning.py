# SPDX-License-Identifier: Apache-2.0
"""Tuning belongs to a device: its table serves it alone, and a device without one gets what fits it."""

import itertools
import logging
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest
import torch

from nwor.attention import configs
from nwor.attention.configs import H200, HEAD_SIZES, Config, Device, choose, tuned
from nwor.settings import Settings
from nwor_lab import paths
from nwor_lab.gpu import tune
from tests.devices import A10, A100, H100, L40S, RTX_5090, SMALLER

B200 = replace(H200, name="NVIDIA B200", multiprocessors=148)
SHAPE = {"kv_heads": 8, "group": 4, "head_size": 128, "cache_bytes": 2, "max_query_len": 9}
HERE = Path(__file__).parent


@pytest.fixture(autouse=True)
def read_anew(monkeypatch):
    """Tables are read once a process."""
    monkeypatch.delenv("VLLM_NWOR_TUNING", raising=False)
    for cached in (tuned, choose):
        cached.cache_clear()
    yield
    for cached in (tuned, choose):
        cached.cache_clear()


def test_no_choice_for_an_h200_moves_unnoticed():
    """Recorded: who changes how a shape is chosen for sees which shapes are run otherwise."""
    before = pd.read_parquet(HERE / "h200_choices.parquet")
    knobs = [*Config.__dataclass_fields__]
    shapes = before.drop(columns=knobs)
    found = [asdict(choose(H200, **row)) for row in shapes.astype(int).to_dict("records")]
    pd.testing.assert_frame_equal(pd.DataFrame(found)[knobs], before[knobs], check_dtype=False)
    assert len(before) >= 2000 and len(before[knobs].drop_duplicates()) > 60


@pytest.mark.parametrize(("major", "together"), [(8, False), (9, True), (10, True), (12, False)])
def test_warps_multiply_together_on_a_hopper_and_a_b200(major, together, monkeypatch):
    """There 20 rows fill a tile of 64; elsewhere it would be twice the work of one of 32."""
    found = SimpleNamespace(name="a", multi_processor_count=132, shared_memory_per_block_optin=99 << 10, major=major)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: found)
    device = Device.of("cuda")
    assert device.warpgroups == together
    assert device.row_tiles(5, 4, 128, query_fp8=False) == ((64, 1) if together else (32, 1))


def test_another_device_has_its_own_limits_and_one_warning(caplog, monkeypatch):
    """The H200's table lies there, and its configurations are not taken."""
    assert tuned(A100) == []
    found = [choose(A100, requests, **SHAPE) for requests in (1, 4, 16, 64)]
    assert [config.splits for config in found] == [27, 6, 1, 1] and {
        config.min_tiles_per_split for config in found
    } == {2}
    (said,) = caplog.records
    assert said.levelno == logging.WARNING and "nwor tune" in said.message and A100.name in said.message


def test_a_device_with_the_same_limits_has_what_its_own_table_lacks(tmp_path, monkeypatch, caplog):
    """Where both were searched, they differ little: see `test_tables_of_devices_with_the_same_limits_are_alike`."""
    alike = replace(H200, name="NVIDIA H200 NVL")
    assert len(tuned(alike)) == len(tuned(H200)) and not caplog.records
    assert tuned(replace(alike, multiprocessors=16)) == [] and len(caplog.records) == 1  # a slice of it
    assert len(tuned(H100)) == len(tuned(H200)) > len(configs.shipped(H100.name)) > 0
    assert choose(H100, 1, **SHAPE) == configs.of_entry(configs.shipped(H100.name)[0]) != choose(H200, 1, **SHAPE)
    assert choose(H100, 1, **SHAPE | {"cache_bytes": 1}) == choose(H200, 1, **SHAPE | {"cache_bytes": 1})
    entry = dict(tuned(H200)[0])
    tune.write(tmp_path, alike, [entry | {"tile": 32}])
    monkeypatch.setenv("VLLM_NWOR_TUNING", str(tmp_path))
    tuned.cache_clear()
    assert [one["tile"] for one in tuned(alike) if entry.items() - one.items() == {("tile", entry["tile"])}] == [32]


@pytest.mark.parametrize(
    ("query", "group", "nearest"), [(8, 4, 9), (5, 4, 9), (3, 8, 9), (3, 4, 4), (5, 8, 9), (9, 4, 9)]
)
def test_the_nearest_shape_fills_as_large_a_tile(query, group, nearest):
    """12 rows fill a tile of 16, as those of k=3 do; 20 to 40 rows one of 64, as those of k=8 do."""
    assert configs.nearest(tuned(H200), 16, 8, group, 128, 2, query, True)["query"] == nearest


def test_tables_of_devices_with_the_same_limits_are_alike(monkeypatch):
    """In the H100's own search the H200's configurations lose less to its own than what is derived from limits."""
    searched = pd.read_parquet(paths.DATA / "attention" / "h100_sweep.parquet")
    knobs = [*Config.__dataclass_fields__]
    lost: dict[str, list[float]] = {"the H200's": [], "derived": []}
    for (batch, k), group in searched.groupby(["batch", "k"]):
        times = group.pivot_table("value", knobs, "context", "min") / group.groupby("context")["vanilla"].min()
        shape = {**SHAPE, "max_query_len": k + 1}
        own = times.loc[tuple(asdict(choose(H100, batch, **shape)).values())]
        other = choose(H200, batch, **shape)
        with monkeypatch.context() as without:
            without.setattr(configs, "tuned", lambda _: [])
            choose.cache_clear()
            derived = choose(H100, batch, **shape)
        choose.cache_clear()
        for name, config in (("the H200's", other), ("derived", derived)):
            if (row := tuple(asdict(config).values())) in times.index:
                lost[name].append((times.loc[row] - own).max())
    assert len(lost["the H200's"]) == 4 and len(lost["derived"]) >= 2
    assert max(lost["the H200's"]) < 0.05 < max(lost["derived"])


def test_the_users_folder_comes_first(tmp_path, monkeypatch, caplog):
    entry = dict(tuned(H200)[0])
    tune.write(tmp_path, A100, [entry | {"tile": 32}])
    monkeypatch.setenv("VLLM_NWOR_TUNING", str(tmp_path))
    tuned.cache_clear()
    assert [one["tile"] for one in tuned(A100)] == [32] and (tmp_path / "NVIDIA_A100_SXM4_80GB.json").exists()
    assert tuned(H200) == configs.shipped(H200.name) and not caplog.records
    assert tuned(A10) == [] and str(tmp_path) in caplog.text
    tune.write(tmp_path, H200, [entry | {"tile": 128}])
    tuned.cache_clear()
    assert [one["tile"] for one in configs.own_table(H200)] == [128] and len(tuned(H200)) == len(
        configs.shipped(H200.name)
    )
    assert configs.shipped(H200.name)[0] == entry


BROKEN = {
    "another device's": (configs.SHIPPED / "NVIDIA_H200.json").read_text(),
    "empty": "",
    "no table": '{"gpu": "NVIDIA A100-SXM4-80GB"}',
    "no words": '{"gpu": "NVIDIA A100-SXM4-80GB", "configurations": [{"tile": 64}]}',
}


@pytest.mark.parametrize("broken", BROKEN)
def test_a_table_that_is_broken_or_another_devices_is_an_error(broken, tmp_path, monkeypatch):
    """Named with its path, where the device's table is asked for."""
    path = tmp_path / configs.file_name(A100.name)
    path.write_text(BROKEN[broken])
    monkeypatch.setenv("VLLM_NWOR_TUNING", str(tmp_path))
    with pytest.raises(ValueError, match=rf"^{path}.*(belongs into NVIDIA_H200.json|no table)"):
        tuned(A100)


def test_every_shipped_table_is_named_after_its_device():
    tables = sorted(configs.SHIPPED.iterdir())
    assert tables and all(configs.read(path) for path in tables)


def test_a_folder_that_is_not_there_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="VLLM_NWOR_TUNING='.*nowhere' is not a folder"):
        Settings.from_env({"VLLM_NWOR_TUNING": str(tmp_path / "nowhere")})
    asked = Settings.from_env({"VLLM_NWOR_TUNING": str(tmp_path)})
    assert asked == Settings(tuning=str(tmp_path)) == Settings.from_env(asked.environ())
    assert "VLLM_NWOR_TUNING" not in Settings().environ(), "a child would lose what its parent was given"


def test_programs_share_a_multiprocessor_where_they_fit():
    """As compiled for an H200: 112 KiB of 228 do, and what a shape does not fit goes on with one."""
    config = Config(tile=64, warps=4, stages=3, splits=32, side_by_side=2)
    assert configs.fit_side_by_side(config, 64, 128, 2, H200) == 2
    assert configs.fit_side_by_side(replace(config, stages=4), 64, 128, 2, H200) == 1, "144 KiB"
    assert configs.fit_side_by_side(replace(config, warps=8), 64, 128, 1, H200) == 1, "255 registers of 512 threads"
    assert configs.fit_side_by_side(replace(config, registers=168, stages=2), 64, 128, 1, H200) == 3
    assert configs.fit_side_by_side(config, 64, 128, 2, A100) == 1
    assert configs._fitting(config, 64, 128, 2, H200) == config
    assert configs._fitting(replace(config, side_by_side=3), 64, 128, 2, H200) == config
    assert configs._fitting(config, 128, 128, 2, H200).side_by_side == 1


@pytest.mark.parametrize(
    ("splits", "room", "windows", "planned"),
    [
        (32, 227, 8, (32, True)),
        (32, 31, 8, (31, True)),  # no room for the sums of so many
        (99, 227, 2, (64, True)),
        (8, 227, 33, (8, True)),
        (8, 227, 34, (8, False)),  # more than fit at once: the last to arrive combines
    ],
)
def test_splits_wait_for_each_other_where_all_run_at_once(splits, room, windows, planned):
    config = Config(tile=64, splits=splits, side_by_side=2)
    assert configs.split_combine(config, room, windows, 36, 128, 132)[:2] == planned


@pytest.mark.parametrize(
    ("device", "rows", "query_fp8", "tile"),
    [(H200, 16, True, 16), (H200, 17, False, 64), (H200, 65, True, 128), (A100, 17, False, 32), (L40S, 17, True, 64)],
)
def test_rows_fill_a_tile_that_warps_multiply_together_where_they_can(device, rows, query_fp8, tile):
    plan = configs.plan(device, 1000, 1, 1, 1, 128, 1 if query_fp8 else 2, rows, query_fp8)
    assert (plan.compiled.rows, plan.compiled.row_tiles) == (tile, 1)


@pytest.mark.parametrize("device", SMALLER)
def test_tiles_fit_into_a_smaller_devices_shared_memory(device):
    for head_size, group, cache_bytes, query in itertools.product(HEAD_SIZES, (1, 2, 4, 8, 16), (1, 2), (2, 4, 9, 17)):
        rows, tiles = device.row_tiles(query, group, head_size, query_fp8=False)
        config = choose(device, 4, 2, group, head_size, cache_bytes, query)
        width = configs.next_power_of_2(head_size)
        assert config.stages * config.tile * 2 * width * cache_bytes + rows * width * 2 <= device.usable
        assert rows * (width + 16) * 4 <= device.usable and rows * tiles >= query * group
        assert config.tile >= 32 and config.stages >= 1 and config.splits <= 2 * device.multiprocessors // 8


@pytest.mark.parametrize(
    ("capability", "device", "kv_cache_dtype", "head_sizes"),
    [
        pytest.param(80, A100, "auto", [256], id="sm_80"),
        pytest.param(86, A10, "auto", [128, 256], id="sm_86"),
        pytest.param(89, L40S, "fp8", [128, 256], id="sm_89"),
        pytest.param(100, B200, "fp8", [128, 256], id="sm_100"),
        pytest.param(120, RTX_5090, "auto", [128, 256], id="sm_120"),
        pytest.param(120, RTX_5090, "fp8", [128, 256], id="sm_120-fp8"),
    ],
)
def test_what_is_compiled_fits_the_device(capability, device, kv_cache_dtype, head_sizes, monkeypatch):
    """Shared memory that the kernel takes, compiled for a chip that is not here, on shapes that take most."""
    triton = pytest.importorskip("triton", reason="no Triton here")
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    from nwor.attention import kernel as verify_kernel
    from nwor.attention import verify

    if not isinstance(verify_kernel.verify_windows, triton.JITFunction):
        pytest.skip("Triton interprets here, and compiles nothing")
    target = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", capability, 32),
        get_current_device=lambda: capability,  # compiled kernels are kept by it
        get_current_stream=lambda device: 0,
    )
    taken, run = [], verify_kernel.verify_windows.run
    monkeypatch.setattr(driver, "_active", target)
    monkeypatch.setattr(Device, "of", lambda where: device)
    monkeypatch.setattr(
        verify_kernel.verify_windows, "run",
        lambda *args, **more: taken.append(run(*args, **more | {"warmup": True}).metadata.shared),
    )  # fmt: skip
    fp8, kv_heads, tokens = kv_cache_dtype == "fp8", 2, 4 * 9
    for head_size in head_sizes:
        query, output = (torch.empty(tokens, 32, head_size, dtype=torch.bfloat16) for _ in range(2))
        key, value = (torch.empty(tokens, kv_heads, head_size, dtype=torch.bfloat16) for _ in range(2))
        cache = torch.empty(8, 16, kv_heads, 2 * head_size, dtype=torch.uint8 if fp8 else torch.bfloat16)
        verify.verify_attention(
            query,
            key, value, cache.transpose(1, 2), output,
            query_start_loc=torch.arange(0, tokens + 1, 9, dtype=torch.int32),
            seq_lens=torch.full((4,), 100, dtype=torch.int32),
            block_table=torch.zeros(4, 1024, dtype=torch.int32),
            page_slots=torch.zeros(tokens, dtype=torch.int64), staging_rows=torch.zeros(tokens, dtype=torch.int64),
            staging=cache.transpose(1, 2), max_query_len=9, scale=1.0, kv_cache_dtype=kv_cache_dtype,
            **dict.fromkeys(("q_scale", "k_scale", "v_scale"), torch.ones(1) if fp8 else None),
            workspace=verify.Workspace(4, 9, 32, head_size, "cpu"),
        )  # fmt: skip
        assert 0 < taken[-1] <= device.shared_memory, head_size
    assert len(taken) == len(head_sizes)
