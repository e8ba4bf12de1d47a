# SPDX-License-Identifier: Apache-2.0
"""Rows say with which build they were measured, and those of different builds are never put together."""

import hashlib
from pathlib import Path

import pytest
import torch

from nwor_lab import builds, measure, paths, results

ROW = {"metric": "step_ms", "value": 1.5, "unit": "ms", "mode": "off"}


def test_rows_made_on_a_gpu_say_with_which_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each hash follows its files, and nothing else."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(paths, "ROOT", tmp_path)
    monkeypatch.setattr(builds.configs.Device, "of", lambda _: builds.configs.H200)
    tables = [[{"tile": 32}], [{"tile": 64}]]
    monkeypatch.setattr(builds.configs, "tuned", lambda _: tables[0])

    def now(name: str = "") -> list[str]:
        if name:
            results.write_text(tmp_path / name, name * (1 + (tmp_path / name).exists()))
        builds.tuning.cache_clear(), builds.build.cache_clear()
        (build,) = results.tidy([ROW])["build"]
        return build.split(" ")

    library = tmp_path / "nwor" / "_C.so"
    try:
        assert now("kernels/cuda/commit.cu")[0] == "unavailable:", "no extension"
        results.write_text(library, "\0nwor sources 01234567\0")
        before = now()
        assert [part[:2] for part in before] == ["k:", "t:", "x:"] and {len(part) for part in before} == {10}
        assert now("kernels/check.sh") == now("nwor/manager.py") == before
        for name, changed in {"kernels/cuda/commit.cu": 0, "nwor/attention/kernel.py": 0}.items():
            after = now(name)
            assert [n for n in range(3) if after[n] != before[n]] == [changed]
            before = after
        results.write_text(library, "\1nwor sources 01234567\1")
        assert now() == before, "another build of the same sources"
        results.write_text(library, "\0nwor sources 89abcdef\0")
        assert [n for n in range(3) if now()[n] != before[n]] == [2]
        before = now()
        tables.pop(0)
        assert [n for n in range(3) if now()[n] != before[n]] == [1]
        assert results.tidy([ROW], build="another")["build"].tolist() == ["another"]
    finally:
        builds.tuning.cache_clear(), builds.build.cache_clear()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert "build" not in results.tidy([ROW])


def test_the_extension_says_what_it_was_built_from() -> None:
    files = [path for path in (paths.ROOT / "kernels").rglob("*") if path.suffix in (".h", ".cpp", ".cu")]
    found = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(files))).hexdigest()
    assert builds.built_from() == found[:8], "older than the kernels: run `make kernels`"


def test_rows_of_different_builds_do_not_go_together(tmp_path: Path) -> None:
    old, one, other = results.tidy([ROW]), results.tidy([ROW], build="k:1"), results.tidy([ROW], build="k:2")
    assert builds.join([one, one])["build"].tolist() == ["k:1", "k:1"] and len(builds.join([old, old])) == 2
    for pair, said in (((one, other), "k:1, k:2"), ((old, one), "k:1, unknown")):
        with pytest.raises(ValueError, match=f"rows of different builds do not go together: {said}; measure"):
            builds.join(pair)
    results.update_manifest(tmp_path, points=["a", "b"])
    for point, frame in (("a", one), ("b", other)):
        results.write_table(tmp_path / point / "steps.parquet", frame)
    with pytest.raises(ValueError, match="different builds"):
        results.read_table("steps", tmp_path)


def test_all_that_was_recorded_on_gpus_is_of_one_build_and_its_page_says_which() -> None:
    tables = {path.stem: results.read_table(path.stem, paths.RECORDED) for path in paths.RECORDED.glob("*.parquet")}
    unnamed = {name for name, table in tables.items() if "build" not in table}
    assert unnamed == {*measure.TABLES, "claims", "soak", "gpu_claims"}, (
        "of a CPU, but the last: gpu_claims.json has its commit"
    )
    (build,) = {build for table in tables.values() if "build" in table for build in table["build"]} - {""}
    assert f"build `{build}`" in " ".join((paths.RECORDED / "README.md").read_text().split())
