import shutil

import pytest
import readme

from kit.trial.client import close_supervisors


@pytest.fixture(scope="module", autouse=True)
def no_supervisor_left():
    yield
    close_supervisors()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A project folder with the datasets, where the reader is."""
    (tmp_path / "pyproject.toml").touch()
    shutil.copytree(readme.ROOT / "datasets", tmp_path / "datasets")
    monkeypatch.chdir(tmp_path)
    return tmp_path
