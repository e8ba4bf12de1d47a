# SPDX-License-Identifier: Apache-2.0
"""A parameter that cannot be is refused in one line before anything starts, and in a notebook's first cell."""

from pathlib import Path

import pytest

pytest.importorskip("papermill", reason="papermill is not installed: no notebook can be run")


from nwor_lab.run import parameters, reproduce

BOOKS = {path.stem: path for path in reproduce.notebooks()}


WRONG = {
    "04_end_to_end": "tp=0 k=0 repeats=-1 dtype=int8 serving_concurrency=0 kv_cache_dtype=fp4",
    "00_idea": "k=5 num_rejected=4",
    "01_reference_model": "num_prompts=1000 prompts=/nowhere",
    "02_kernels": "device=gpu num_rejected=4",
    "03_eagle_acceptance": "k=2,0 k=2,2 k=[] temperatures=nan source=guess",
    "05_kernels_on_a_gpu": "k=17 tp=3",
    "06_where_it_pays": "model=llama-3-8b acceptance=70 copy_tb_s=0",
}
"""By notebook, values that its parameters cannot have."""


@pytest.mark.parametrize("book", WRONG)
def test_a_value_that_cannot_be_is_one_line_before_anything_starts(
    book: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(reproduce, "run_points", lambda *_: 0)
    run = tmp_path / "run"
    for word in WRONG[book].split():
        name, _, value = word.partition("=")
        for given in (["-p", name, value], ["--grid", word]):
            assert reproduce.main(["--only", book, "--run", str(run), *given]) == 2, word
            (line,) = capsys.readouterr().err.splitlines()
            assert name in line or value in line
    assert not run.exists()


def test_every_default_can_be() -> None:
    for name, book in BOOKS.items():
        kinds = {one: kind for one, (kind, _) in parameters.declared(book).items()}
        values = {one: default for one, (_, default) in parameters.declared(book).items()}
        assert parameters.check({"__annotations__": kinds, **values}, name) == (values, True)


def test_what_only_a_node_knows_is_not_asked_here() -> None:
    given = {"prompts": "/on/a/node"}
    parameters.read_points([BOOKS["03_eagle_acceptance"]], given, [], here=False)
    with pytest.raises((ValueError, OSError), match="/on/a/node"):
        parameters.read_points([BOOKS["03_eagle_acceptance"]], given, [])
