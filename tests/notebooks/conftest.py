import shutil

import pytest
import readme


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A project folder with the datasets, where the reader is."""
    (tmp_path / "pyproject.toml").touch()
    shutil.copytree(readme.ROOT / "datasets", tmp_path / "datasets")
    monkeypatch.chdir(tmp_path)
    return tmp_path
