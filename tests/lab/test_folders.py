# SPDX-License-Identifier: Apache-2.0
"""A home or a cache that cannot be written is named by `nwor reproduce` and `nwor doctor`, before anything runs."""

import pwd
from pathlib import Path

import pytest

pytest.importorskip("papermill", reason="papermill is not installed: no notebook can be run")

from nwor_lab import machine
from nwor_lab.run import doctor, reproduce


def homeless(patch: pytest.MonkeyPatch) -> None:
    """A user whom the machine does not know, as in a container, without HOME."""

    def unknown(uid: int) -> None:
        raise KeyError(uid)

    patch.delenv("HOME")
    patch.setattr(pwd, "getpwuid", unknown)


def without_cache(patch: pytest.MonkeyPatch) -> None:
    patch.setenv("TORCHINDUCTOR_CACHE_DIR", "/dev/null/cache")


@pytest.mark.parametrize(("lose", "named"), [(homeless, "HOME"), (without_cache, "TORCHINDUCTOR_CACHE_DIR")])
def test_what_is_missing_is_named_by_both(
    lose, named: str, place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert machine.missing_folders() == []
    lose(monkeypatch)
    assert reproduce.main(["--run", "s"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert named in line and not (place / "results").exists()
    assert doctor.main([]) == 1
    assert named in capsys.readouterr().out
