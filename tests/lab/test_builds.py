# SPDX-License-Identifier: Apache-2.0
"""A recorded row says with which build it was measured; in a setting rows of one kind of GPU are of one build."""

import hashlib
import subprocess
from pathlib import Path

import pytest

from nwor_lab import paths
from nwor_lab.run import measure, results


def test_a_build_follows_the_kernels_and_the_attention_and_nothing_else(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(paths, "ROOT", tmp_path)

    def commit(name: str) -> str:
        results.write_text(tmp_path / name, name)
        identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
        for words in (["init", "-q"], ["add", "."], [*identity, "commit", "-qm", name]):
            subprocess.run(["git", *words], cwd=tmp_path, check=True)
        return measure.build_of("HEAD")

    results.write_text(tmp_path / "kernels" / "commit.cu", "a")
    first = commit("nwor/attention/kernel.py")
    assert commit("README.md") == first and len(first.split()) == 2
    second = commit("kernels/log.cu")
    third = commit("nwor/attention/configs/one.json")
    assert second.split()[0] != first.split()[0] and second.split()[1] == first.split()[1]
    assert third.split()[0] == second.split()[0] and third.split()[1] != second.split()[1]
    with pytest.raises(ValueError, match="does not know"):
        measure.build_of("f" * 40)


def test_the_extension_is_of_these_kernels() -> None:
    files = [path for path in (paths.ROOT / "kernels").rglob("*") if path.suffix in (".h", ".cpp", ".cu")]
    found = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(files))).hexdigest()[:8]
    (library,) = (paths.ROOT / "nwor").glob("_C*.so")
    assert f"nwor sources {found}".encode() in library.read_bytes(), "older than the kernels: run `make kernels`"


SETTING = ("gpu", "tp", "k", "heads", "kv_heads", "cache", "kv_cache_dtype", "attention")


def test_what_one_kind_of_gpu_gave_in_a_setting_is_of_one_build_and_the_page_says_which() -> None:
    tables = {path.stem: results.read_table(path.stem, paths.RECORDED) for path in paths.RECORDED.glob("*.parquet")}
    assert {name for name, table in tables.items() if "build" not in table} == {*measure.REPRODUCED, "claims", "soak"}
    page = " ".join((paths.RECORDED / "README.md").read_text().split())
    for name, table in tables.items():
        if "build" in table:
            for _, rows in table.groupby([name for name in SETTING if name in table], dropna=False):
                (build,) = set(rows["build"]) - {""} or {""}
                assert build in page, name
