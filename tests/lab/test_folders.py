# SPDX-License-Identifier: Apache-2.0
"""A home or a cache that cannot be written is named by `nwor reproduce` and `nwor doctor`, before anything runs."""

import pwd
from pathlib import Path

import pytest

pytest.importorskip("papermill", reason="papermill is not installed: no notebook can be run")

from nwor_lab.run import doctor, folders, reproduce


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
    assert folders.missing() == []
    lose(monkeypatch)
    assert reproduce.main(["--run", "s"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert named in line and not (place / "results").exists()
    monkeypatch.setattr(doctor, "SECTIONS", {"folders": doctor.kept})
    monkeypatch.setattr(doctor, "modes", lambda found: [])
    assert doctor.main([]) == 1
    assert named in capsys.readouterr().out


def test_what_a_run_does_without_is_only_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPLCONFIGDIR", "/dev/null/matplotlib")
    assert folders.missing() == [] and any("MPLCONFIGDIR" in said for said in folders.unwritable())
    assert {finding.missing for finding in doctor.kept()} == {False}
