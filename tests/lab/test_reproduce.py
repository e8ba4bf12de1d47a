# SPDX-License-Identifier: Apache-2.0
"""A reproduction run goes on past a failure, resumes, and takes no half-written result for a whole one."""

import importlib.util
import os
import re
import shutil
import socket
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("papermill", reason="papermill is not installed: no notebook can be run")

import pandas as pd
from books import ran, write_notebook
from jupyter_client.provisioning.local_provisioner import LocalPortCache

from nwor_lab import paths
from nwor_lab.run import parameters, report, reproduce, results

# -- parameters --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [["--gpus", "-1"], ["--cell-minutes", "-1"], ["--cell-minutes", "nan"]])
def test_a_number_that_cannot_be_leaves_no_folder(words, place, capsys):
    assert reproduce.main(["--run", "one", *words]) == 2
    assert "at least 0" in capsys.readouterr().err and not (place / "results").exists()


def test_a_grid_is_the_product_of_its_values(place: Path) -> None:
    book = [place / "01_book.ipynb"]
    points = parameters.read_points(book, {"mode": "off"}, ["k=1,3", "ks=1,2;8"])
    assert list(points) == ["k=1,ks=1,2", "k=1,ks=8", "k=3,ks=1,2", "k=3,ks=8"]
    assert points["k=3,ks=1,2"] == {"01_book": {"mode": "off", "k": 3, "ks": [1, 2]}}
    assert parameters.read_points(book, {}, []) == {"": {"01_book": {}}}
    assert list(parameters.read_points(book, {}, ["mode=a/b"])) == ["mode=a-b"], "a folder's name"
    for name, text, value in (("k", "2", 2), ("ks", "[1, 2]", [1, 2]), ("mode", "1", "1")):
        assert parameters.read_points(book, {name: text}, [])[""]["01_book"] == {name: value}


def test_notebooks_are_named_by_their_beginning(place: Path) -> None:
    for name in ("02_other", "03_more"):
        write_notebook(place, name)
    assert [path.stem for path in reproduce.notebooks(["03", "01_book.ipynb"])] == ["01_book", "03_more"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["-p", "mdoe", "off"], "no notebook here has a parameter mdoe; they have k, ks, mode"),
        (["-p", "run_dir", "x"], "run_dir"),
        (["-p", "ks", "1,x"], "01_book: ks"),
        (["--grid", "kk=1"], "kk"),
        (["--grid", "k="], "--grid k=:"),
        (["--grid", "k=1,1"], "k=1 twice"),
        (["--only", "09_none"], "no notebook 09_none; there are 01_book"),
        (["--resume", "--run", "never"], "no run to resume"),
    ],
)
def test_a_wrong_word_is_one_line_before_anything_starts(
    place: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    assert reproduce.main(words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("nwor reproduce: ") and said in line
    assert not (place / "results").exists()


def test_a_folder_that_cannot_be_written_is_found_before_anything_starts(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (place / "file").touch()
    assert reproduce.main(["--run", str(place / "file" / "run")]) == 2
    monkeypatch.setattr(results.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**9, 10**9, 10**6))
    assert reproduce.main(["--run", "full"]) == 2
    unwritable, full = capsys.readouterr().err.splitlines()
    assert "file/run: Not a directory; name another folder" in unwritable
    assert "1 MB are free where 200 are needed; name another folder" in full
    assert ran(place) == []


# -- one run -----------------------------------------------------------------------------------------------------------


def test_a_run_goes_on_past_a_failure_and_is_resumed(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_notebook(place, "02_book")
    assert reproduce.main(["--run", "first", "-p", "k", "2"]) == 1
    said = capsys.readouterr()
    assert "notebook 2 of 2: 02_book" in said.out
    assert said.err.count("FAILED: AssertionError: not mended") == 2 and "2 of 2 notebooks failed" in said.err
    run = place / "results" / "first"
    assert results.read_manifest(run)["notebooks"]["01_book"]["state"] == "failed"
    log = (run / "logs" / "01_book.log").read_text()
    assert "seen in the log 2" in log and "not mended" in log
    assert "failed: AssertionError: not mended" in (run / "index.html").read_text()

    (place / "mended").touch()
    assert reproduce.main(["--resume", "--only", "01_book"]) == 0, "with the parameters of the first time"
    entries = results.read_manifest(run)["notebooks"]
    assert entries["01_book"]["passed"] == {"k": 2} and entries["02_book"]["state"] == "failed"
    said = capsys.readouterr().out
    assert "not judged drafts: found 2 (parameters were given" in re.sub(r"\s+", " ", said)
    assert reproduce.main(["--resume"]) == 0
    assert "done before" in capsys.readouterr().out
    assert ran(place) == [2, 2], "what is whole is not run again"
    assert reproduce.main(["--resume", "--run", "first", "-p", "k", "4"]) == 0
    assert ran(place) == [2, 2, 4], "another parameter"
    assert reproduce.main(["--resume", "--run", "first", "--only", "01_book"]) == 0
    assert set(pd.read_parquet(run / "claims.parquet")["notebook"]) == {"01_book", "02_book"}, "of the whole run"


def test_claims_decide(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert reproduce.main(["--run", "whole"]) == 0
    said = capsys.readouterr()
    assert "2 of 2 claims hold; 1 not judged" in said.out and "fp8 caches: found no AVX-512 here" in said.out
    assert reproduce.main(["--run", "bad", "-p", "mode", "off"]) == 1
    said = capsys.readouterr()
    assert any(line.startswith("does not hold: 01_book: mode:") for line in said.err.splitlines())
    assert reproduce.main(["--run", "whole"]) == 2
    assert "holds a run: add --resume, or name another --run" in capsys.readouterr().err


FAULTS = {
    "no notebook": lambda run: (run / "01_book.ipynb").unlink(),
    "another notebook": lambda run: write_notebook(paths.NOTEBOOKS, "01_book", "\n# changed"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_result_that_is_not_whole_is_made_again(place: Path, fault) -> None:
    assert reproduce.main(["--run", "s"]) == 0
    run = place / "results" / "s"
    FAULTS[fault](run)
    (run / "steps.parquet").write_bytes(b"half")
    assert reproduce.main(["--run", "s", "--resume"]) == 0
    assert ran(place) == [4, 4] and results.read_table("steps", run)["value"].tolist() == [4]


def test_a_kernel_takes_no_port_that_another_program_could_take_first(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        monkeypatch.setattr(LocalPortCache, "find_available_port", lambda cache, ip: other.getsockname()[1])
        assert reproduce.main(["--run", "s"]) == 0
    assert ran(place) == [4]


# -- a grid ------------------------------------------------------------------------------------------------------------


def test_a_grid_goes_on_past_a_failed_point_and_is_resumed(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--only", "01_book", "--grid", "k=1,2,3", "--run", "s"]
    assert reproduce.main(words) == 1
    assert "1 of 3 notebooks failed" in capsys.readouterr().err
    run = place / "results" / "s"
    assert [results.read_table("steps", run / f"k={k}")["value"].item() for k in (1, 3)] == [1, 3]
    assert "not mended" in (run / "k=2" / "logs" / "01_book.log").read_text()
    (place / "mended").touch()
    assert reproduce.main(["--run", "s", "--resume"]) == 0
    *_, table, said = [block for block in capsys.readouterr().out.split("\n\n") if "results: " not in block]
    assert re.search(r"^steps .* 1 +2 +3$", table, re.MULTILINE) and "1 of 1 measured values differ" in said
    assert ran(place) == [1, 2, 2, 3]
    grid = pd.read_csv(run / "grid.csv")
    assert dict(zip(grid["k"], grid["value"], strict=True)) == {1: 1, 2: 2, 3: 3}, "what was measured at each point"
    page = (run / "index.html").read_text()
    assert "<th>steps</th>" in page and 'href="k%3D2/index.html"' in page and (run / "k=2" / "index.html").exists()


# -- on a Ray cluster --------------------------------------------------------------------------------------------------


def test_without_ray_it_says_how_to_get_it(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    run, request = place / "results" / "s", {"only": None, "given": {}, "grid": ["k=1"]}
    results.update_manifest(run, request=request)
    assert reproduce.main(["--resume", "--run", "s", "-p", "mode", "off", "--ray", "auto"]) == 2
    assert results.read_manifest(run)["request"] == request, "a refused run changes nothing"
    assert "pip install --no-deps -r requirements/ray.lock" in capsys.readouterr().err
    (pin,) = tomllib.loads((paths.ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["ray"]
    assert pin in (paths.ROOT / "requirements" / "ray.lock").read_text().splitlines()


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """A Ray cluster of two nodes on this machine, one CPU and one (pretended) GPU each; its address."""
    if importlib.util.find_spec("ray") is None:
        pytest.skip("no Ray here: pip install --no-deps -r requirements/ray.lock")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    from ray.cluster_utils import Cluster

    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "num_gpus": 1})
    nodes.add_node(num_cpus=1, num_gpus=1)
    yield nodes.address
    nodes.shutdown()


def test_a_cluster_runs_the_points_each_with_its_gpu(
    cluster: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    meet = (
        "\nimport time\n(place / f'node-{os.environ[\"RAY_RAYLET_PID\"]}').touch()\n"
        "while k > 2 and len(list(place.glob('node-*'))) < 2: time.sleep(0.05)\n"
        "if k == 1: os.kill(os.getppid(), 9); time.sleep(60)\n"
    )
    write_notebook(place, "01_book", meet)
    words = ["--run", "s", "--ray", cluster, "--gpus", "1"]
    assert reproduce.main([*words, "--grid", "k=3,4,2,1"]) == 1
    said = capsys.readouterr().err
    assert "2 of 4 notebooks failed" in said and "k=1: " in said, "a point whose worker died"
    run = place / "results" / "s"
    assert len(list(place.glob("node-*"))) == 2, "both nodes had a point at the same time"
    assert "not mended" in (run / "k=2" / "logs" / "01_book.log").read_text()
    assert [results.read_table("steps", run / f"k={k}")["value"].item() for k in (3, 4)] == [3, 4]
    (place / "mended").touch()
    assert reproduce.main([*words, "--resume", "--grid", "k=3,4,2"]) == 0
    assert ran(place) == [1, 2, 2, 3, 4]
    before = (run / "manifest.json").read_bytes()
    refused = ["--run", "s", "--resume", "-p", "mode", "off", "--ray", cluster, "--gpus", "2"]
    assert reproduce.main(refused) == 2
    assert "the largest node has 1" in capsys.readouterr().err
    assert (run / "manifest.json").read_bytes() == before, "a refused run changes nothing"


# -- the report --------------------------------------------------------------------------------------------------------


def test_the_report_is_complete_and_loads_nothing_from_outside(tmp_path: Path) -> None:
    run = results.Run(tmp_path / "run", "01_book")
    run.claim("a < b & c", 10_000, 123_456.0, True)
    run.claim("as hoped", 1, 2, False)
    run.table("steps", pd.DataFrame([{"metric": "k", "value": 1, "unit": "1"}]))
    text = report.write(run.directory).read_text()
    assert "a &lt; b &amp; c" in text and "123456" in text and "nan" not in text.lower()
    assert text.index("1 of 2 claims hold") < text.index("Does not hold: as hoped: found 2") < text.index("<h2>Lessons")
