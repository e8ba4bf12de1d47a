# SPDX-License-Identifier: Apache-2.0
"""A sweep loses nothing: it resumes, goes on past a failure, and takes no half-written result for a whole one."""

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest

from nwor_lab import grid, paths, reproduce, results

BEGIN = 'from nwor_lab import results\n\nrun = results.start(globals(), "01_book")'
WORK = """
import os, pathlib
place = pathlib.Path({place!r})
(place / f"ran-{{k}}-{{os.getpid()}}").touch()
print("seen in the log", k)
assert k != 2 or (place / "mended").exists(), "not mended"
"""
SLOW = "\nimport time\nwhile k == 3 and not (place / 'go').exists(): time.sleep(0.05)\n"
END = 'run.table("steps", [{"metric": "k", "value": k, "unit": "1"}])\nrun.finish()'


def write_book(folder: Path, name: str = "01_book", more: str = "") -> Path:
    head = (
        'mode: str = "cow"  # a mode\nk: int = 4  # drafts\n'
        'ks: list[int] = [1]  # more drafts\nrun_dir: str = ""  # folder'
    )
    notebook = nbformat.v4.new_notebook()
    cells = (head, BEGIN, WORK.format(place=str(folder)) + more, END)
    notebook.cells = [nbformat.v4.new_code_cell(text) for text in cells]
    notebook.cells[0].metadata["tags"] = ["parameters"]
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(notebook, folder / f"{name}.ipynb")
    return folder / f"{name}.ipynb"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(paths, "NOTEBOOKS", tmp_path)
    monkeypatch.setattr(paths, "RESULTS", tmp_path / "results")
    return tmp_path


def ran(place: Path) -> list[int]:
    """The k of each time the notebook ran, sorted."""
    return sorted(int(path.name.split("-")[1]) for path in place.glob("ran-*"))


def whole(place: Path, run: str = "s") -> list[str]:
    """The points in their place, without the fingerprint."""
    folder = place / "results" / run
    return sorted(path.name[:-9] for path in folder.glob("*-????????") if path.is_dir())


# -- the grid ----------------------------------------------------------------------------------------------------

KINDS = {"mode": "str", "k": "int", "ks": "list[int]", "audit": "bool", "run_dir": "str"}


def test_a_grid_is_read_as_the_notebook_declares(tmp_path: Path) -> None:
    file = tmp_path / "grid.yaml"
    file.write_text('mode: ["off", cow]\nk: 4\nks: [[1, 2], [8]]\n')
    assert grid.read_grid(file, [], KINDS) == {"mode": ["off", "cow"], "k": [4], "ks": [[1, 2], [8]]}
    file.with_suffix(".json").write_text('{"ks": [1, 2], "audit": [true, false]}')
    given = grid.read_grid(file.with_suffix(".json"), ["k=1,3,8", "mode=off"], KINDS)
    assert given == {"ks": [[1, 2]], "audit": [True, False], "k": [1, 3, 8], "mode": ["off"]}
    assert grid.read_grid(None, ["ks=1,2;8"], KINDS) == {"ks": [[1, 2], [8]]}


@pytest.mark.parametrize(
    ("text", "given", "said"),
    [
        ("mode: [off, cow]", [], "mode=False is not of type str; YAML reads a bare on or off so"),
        ("k: [1, two]", [], "parameter k='two' is not of type int"),
        ("- k", [], "a grid maps parameter names to values"),
        ("", ["k=1.5"], "parameter k='1.5' is not of type int"),
        ("", ["kk=1"], "has no parameter kk; it has audit, k, ks, mode"),
        ("", ["run_dir=x"], "has no parameter run_dir"),
        ("", ["k"], "write it as name=value"),
        ("", ["k="], "parameter k has no value"),
    ],
)
def test_a_wrong_grid_is_an_error(tmp_path: Path, text: str, given: list[str], said: str) -> None:
    file = tmp_path / "grid.yaml"
    file.write_text(text)
    with pytest.raises(ValueError, match=said):
        grid.read_grid(file if text else None, given, KINDS)


def test_points_are_named_by_what_varies_and_ask_for_what_they_need(place: Path) -> None:
    book = write_book(place)
    made = grid.points(book, {"mode": ["a/b"], "k": [1, 2]}, cpus="2", gpus="k")
    assert [point.name[:-9] for point in made] == ["k=1", "k=2"]
    assert [(point.cpus, point.gpus) for point in made] == [(2, 1), (2, 2)]
    assert made[0].parameters == {"mode": "a/b", "k": 1}
    other = grid.points(book, {"mode": ["cow"], "k": [1, 2]})
    assert not {point.name for point in made} & {point.name for point in other}, "another mode is another point"
    with pytest.raises(ValueError, match="'mode' is no number"):
        grid.points(book, {"mode": ["a"]}, gpus="mode")
    with pytest.raises(ValueError, match="given twice"):
        grid.points(book, {"k": [1, 1]})


# -- one sweep after another ---------------------------------------------------------------------------------------


def test_a_sweep_goes_on_past_a_failed_point_and_is_resumed(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_book(place)
    assert grid.main(["01_book", "-p", "k=1,2,3", "--run", "s"]) == 1
    said = capsys.readouterr()
    assert "1 of 3 points failed" in said.err
    assert "AssertionError: not mended" in said.err
    assert (whole(place), ran(place)) == (["k=1", "k=3"], [1, 2, 3])
    (failed,) = (place / "results" / "s" / "unfinished").iterdir()
    assert "not mended" in (failed / "logs" / "01_book.log").read_text()
    (good,) = (place / "results" / "s").glob("k=1-*")
    assert "seen in the log 1" in (good / "logs" / "01_book.log").read_text()
    assert grid.read_table("steps", place / "results" / "s")["value"].tolist() == [1, 3]

    (place / "mended").touch()
    assert grid.main(["--run", "s", "--resume"]) == 0
    assert "3 points, 2 of them whole already" in capsys.readouterr().out
    assert (whole(place), ran(place)) == (["k=1", "k=2", "k=3"], [1, 2, 2, 3])
    (mended,) = (place / "results" / "s").glob("k=2-*")
    assert "not mended" in (mended / "logs" / "attempt-0" / "01_book.log").read_text(), "earlier logs are kept"
    assert not list((place / "results" / "s" / "unfinished").iterdir())
    assert set(grid.read_table("steps", place / "results" / "s")["run_id"]) == {
        path.name for path in (place / "results" / "s").glob("k=*")
    }
    assert grid.main(["--run", "s", "--resume"]) == 0
    assert ran(place) == [1, 2, 2, 3], "what is whole is not run again"


def test_a_sweep_is_never_mixed_with_another(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_book(place)
    words = ["01_book", "-p", "k=1", "--run", "s"]
    assert grid.main(words) == 0
    for wrong, said in ((words, "holds a sweep: add --resume"), (["--run", "t", "--resume"], "no sweep to resume")):
        with pytest.raises(SystemExit):
            grid.main(wrong)
        assert said in capsys.readouterr().err
    assert grid.main([*words, "--resume", "-p", "mode=off"]) == 0
    assert ran(place) == [1, 1], "another parameter is another point, though it is not in the name"
    write_book(place, more="\n# changed")
    assert grid.main(["--run", "s", "--resume"]) == 0
    assert ran(place) == [1, 1, 1], "another notebook is another point"


def lose_the_notebook(point: Path) -> None:
    (point / "01_book.ipynb").unlink()


def lose_the_mark(point: Path) -> None:
    results.update_manifest(point, "01_book", whole=None)


def cut_the_manifest(point: Path) -> None:
    text = (point / "manifest.json").read_text()
    (point / "manifest.json").write_text(text[: len(text) // 2])


def lose_the_manifest(point: Path) -> None:
    (point / "manifest.json").unlink()


@pytest.mark.parametrize("fault", [lose_the_notebook, lose_the_mark, cut_the_manifest, lose_the_manifest])
def test_a_half_written_result_is_not_taken_for_a_whole_one(place: Path, fault) -> None:
    write_book(place)
    assert grid.main(["01_book", "-p", "k=1", "--run", "s"]) == 0
    (point,) = (place / "results" / "s").glob("01_book-*")
    fault(point)
    (point / "steps.parquet").write_bytes(b"half")
    assert grid.main(["--run", "s", "--resume"]) == 0
    assert ran(place) == [1, 1]
    assert grid.read_table("steps", place / "results" / "s")["value"].tolist() == [1]


def test_a_notebook_that_changes_while_it_runs_is_no_result(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_book(place, more="\n(place / '01_book.ipynb').open('a').write(' ')")
    assert grid.main(["01_book", "-p", "k=1", "--run", "s"]) == 1
    assert "the notebook changed while it ran" in capsys.readouterr().err
    assert whole(place) == []


def test_a_killed_sweep_is_resumed_where_it_was(place: Path) -> None:
    book = write_book(place, more=SLOW)
    run = place / "results" / "s"
    words = [sys.executable, "-m", "nwor_lab.cli", "sweep", str(book), "-p", "k=1,3,4", "--run", str(run)]
    child = subprocess.Popen(words, cwd=paths.ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while 3 not in ran(place):
        assert child.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    with pytest.raises(SystemExit, match="2"):
        grid.main(["--run", str(run), "--resume"])  # refused: it is still at work there
    child.send_signal(signal.SIGKILL)
    child.wait()
    assert whole(place) == ["k=1"]
    assert [path.name[:-9] for path in (run / "unfinished").iterdir()] == ["k=3"]
    (place / "go").touch()
    assert grid.main(["--run", str(run), "--resume"]) == 0
    assert (whole(place), ran(place)) == (["k=1", "k=3", "k=4"], [1, 3, 3, 4])


def test_a_walk_is_resumed_by_the_same_rule(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_book(place)
    assert reproduce.main(["--run", "w", "-p", "k", "1"]) == 0
    assert reproduce.main(["--resume", "--run", "w"]) == 0
    assert ran(place) == [1], "whole, and what it was given holds on"
    assert reproduce.main(["--resume", "--run", "w", "-p", "k", "3"]) == 0
    assert ran(place) == [1, 3], "another parameter"
    lose_the_mark(place / "results" / "w")
    assert reproduce.main(["--resume", "--run", "w"]) == 0
    assert ran(place) == [1, 3, 3], "a manifest that does not call it whole"


def test_what_draws_the_others_runs_again_after_them(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_book(place)
    shutil.copy(place / "01_book.ipynb", place / "02_book.ipynb")
    text = (place / "02_book.ipynb").read_text().replace("01_book", "02_book")
    (place / "02_book.ipynb").write_text(text)
    monkeypatch.setattr(reproduce, "DRAWS", ("02_book",))
    assert reproduce.main(["--run", "w", "-p", "k", "1"]) == 0
    lose_the_mark(place / "results" / "w")
    assert reproduce.main(["--resume", "--run", "w"]) == 0
    assert ran(place) == [1] * 4


# -- on a Ray cluster ------------------------------------------------------------------------------------------------


def test_without_ray_it_says_how_to_get_it(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_book(place)
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(SystemExit):
        grid.main(["01_book", "-p", "k=1", "--ray", "auto"])
    assert "pip install --no-deps -r requirements/ray.lock" in capsys.readouterr().err
    assert (paths.ROOT / "requirements" / "ray.lock").exists()
    assert not (place / "results").exists(), "refused before anything is written"


def test_the_pin_of_ray_is_one() -> None:
    project = tomllib.loads((paths.ROOT / "pyproject.toml").read_text())["project"]
    (pin,) = project["optional-dependencies"]["ray"]
    assert pin in (paths.ROOT / "requirements" / "ray.lock").read_text().splitlines()


def test_a_node_with_other_code_refuses() -> None:
    with pytest.raises(RuntimeError, match="install the same commit"):
        grid._run_and_pack(b"", "01_book.ipynb", "k=1", {}, "another")


def test_one_machine_needs_no_ray(place: Path) -> None:
    write_book(place)
    words = ["sweep", str(place / "01_book.ipynb"), "-p", "k=1", "--run", str(place / "s" / "t")]
    code = f"import sys\nfrom nwor_lab.cli import main\nassert main({words}) == 0\nassert 'ray' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=paths.ROOT, check=True, timeout=120)


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


def test_a_cluster_runs_the_points_at_once_each_with_its_gpu(
    cluster: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    meet = (
        "\nimport time\n"
        "(place / f'node-{os.environ[\"RAY_RAYLET_PID\"]}').touch()\n"
        "while k > 2 and len(list(place.glob('node-*'))) < 2: time.sleep(0.05)\n"
        "print('gpu', os.environ.get('CUDA_VISIBLE_DEVICES'))\n"
    )
    book = write_book(place, more=meet)
    words = [str(book), "-p", "k=3,4,2", "--run", "s", "--ray", cluster, "--gpus", "1"]
    assert grid.main(words) == 1
    assert "AssertionError: not mended" in capsys.readouterr().err
    assert whole(place) == ["k=3", "k=4"]
    assert len(list(place.glob("node-*"))) == 2, "both nodes had a point at the same time"
    logs = [path.read_text() for path in (place / "results" / "s").glob("k=*/logs/01_book.log")]
    assert all("gpu 0" in log for log in logs)
    (failed,) = (place / "results" / "s" / "unfinished").iterdir()
    assert "not mended" in (failed / "logs" / "01_book.log").read_text()
    (place / "mended").touch()
    assert grid.main(["--run", "s", "--resume", "--ray", cluster]) == 0
    assert (whole(place), ran(place)) == (["k=2", "k=3", "k=4"], [2, 2, 3, 4])
    entry = json.loads((place / "results" / "s" / "sweep.json").read_text())["points"]
    assert {one["state"] for one in entry.values()} == {"whole"}


def test_a_point_no_node_can_hold_is_an_error_at_once(
    cluster: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_book(place)
    with pytest.raises(SystemExit):
        grid.main(["01_book", "-p", "k=1", "--ray", cluster, "--gpus", "2"])
    assert "no node has the 1 CPUs and 2 GPUs" in capsys.readouterr().err
    assert not (place / "results").exists(), "refused before anything is written"


def test_a_point_that_dies_with_its_worker_is_a_failed_point(
    cluster: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    book = write_book(
        place, more="\nimport signal\nif k == 1: os.kill(os.getppid(), signal.SIGKILL); __import__('time').sleep(60)"
    )
    assert grid.main([str(book), "-p", "k=1,4", "--run", "s", "--ray", cluster]) == 1
    assert whole(place) == ["k=4"]
    assert "1 of 2 points failed" in capsys.readouterr().err
    (failed,) = (place / "results" / "s" / "unfinished").iterdir()
    assert (failed / "logs" / "ray.log").read_text()
