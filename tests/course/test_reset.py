"""A fresh start: what goes is named, moved and can be taken back; stores stay."""

import pytest

from kit.course.reset import as_it_came, begin_anew, main, to_move
from kit.registry import REPOSITORY


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A project in which somebody worked."""
    (tmp_path / "pyproject.toml").touch()
    for name, text in {
        "data/ocean.zarr/zarr.json": "store", "runs/ocean-1/config.yaml": "trial", "guesses.json": "{}",
        "notebooks/00_start.ipynb": "edited", "notebooks/mine.ipynb": "mine",
    }.items():  # fmt: skip
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "notebooks/01_chunks.ipynb").write_bytes((REPOSITORY / "notebooks/01_chunks.ipynb").read_bytes())
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_what_was_made_and_changed_goes_and_nothing_else(project):
    names = [str(path.relative_to(project)) for path in to_move(project)]
    assert names == ["runs", "guesses.json", "notebooks/00_start.ipynb"]


def test_it_is_named_moved_and_fresh_notebooks_come(project, capsys):
    assert main(["--yes"]) == 0
    said = capsys.readouterr().out
    assert all(name in said for name in ("runs  5 B", "guesses.json  2 B", "notebooks/00_start.ipynb  6 B"))
    (kept,) = (project / "earlier").iterdir()
    assert (kept / "runs/ocean-1/config.yaml").read_text() == "trial"
    assert (kept / "notebooks/00_start.ipynb").read_text() == "edited"
    assert (project / "notebooks/00_start.ipynb").read_bytes() == as_it_came("00_start.ipynb", project)
    assert (project / "notebooks/mine.ipynb").read_text() == "mine"
    assert (project / "data/ocean.zarr/zarr.json").read_text() == "store"
    assert main(["--yes"]) == 0
    assert "as it came" in capsys.readouterr().out


def test_nothing_is_moved_before_somebody_says_yes(project, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda words: "")
    assert main([]) == 0
    assert not (project / "earlier").exists()
    assert (project / "guesses.json").exists()


def test_what_cannot_be_moved_leaves_what_was_there(project):
    with pytest.raises(OSError, match="missing"):
        begin_anew(project, [project / "missing"])
    assert (project / "guesses.json").exists()


def test_in_the_checkout_notebooks_are_those_that_git_keeps():
    assert as_it_came("no.ipynb", REPOSITORY) is None
