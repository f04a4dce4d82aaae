import pytest

from kit.config import Config
from kit.errors import ConfigError, TrialError
from kit.trial.directory import RunPaths, find_runs


def make(folder, **values):
    return Config.make({"trial": {"folder": str(folder)}, **values})


def test_a_run_directory_is_named_after_experiment_time_and_fingerprint(tmp_path):
    config = make(tmp_path, name="ocean")
    run = RunPaths.create(config)
    assert run.directory.parent == tmp_path
    assert run.directory.name.startswith("ocean-20")
    assert run.directory.name.endswith(config.fingerprint[:6])


def test_runs_made_in_the_same_second_get_different_directories(tmp_path):
    made = {RunPaths.create(make(tmp_path)).directory for _ in range(5)}
    assert len(made) == 5


def test_a_relative_folder_is_below_the_project_folder(tmp_path, monkeypatch):
    (tmp_path / ".git").mkdir()
    (tmp_path / "notebooks").mkdir()
    monkeypatch.chdir(tmp_path / "notebooks")
    assert RunPaths.create(make("runs")).directory.parent == tmp_path / "runs"


def test_a_folder_that_cannot_be_made_is_a_config_error_naming_the_field(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"trial\.folder: .*run directory"):
        RunPaths.create(make(tmp_path / "file"))


def test_only_marked_directories_are_runs(tmp_path):
    runs = [RunPaths.create(make(tmp_path)) for _ in range(3)]
    (tmp_path / "notes").mkdir()
    (tmp_path / "file").write_text("")
    assert list(find_runs(tmp_path)) == runs
    assert list(find_runs(tmp_path / "nowhere")) == []


def test_opening_something_that_is_no_run_says_so(tmp_path):
    with pytest.raises(TrialError, match=r"not a run: .*\.kit-run"):
        RunPaths.open(tmp_path)
    with pytest.raises(TrialError, match="does not exist"):
        RunPaths.open(tmp_path / "nowhere")
    with pytest.raises(TrialError, match="no path"):
        RunPaths.open("x" * 5000)
