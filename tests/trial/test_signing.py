"""Running again what lies in a run directory: what this user wrote here, and nothing else without being asked."""

import hashlib
import json
import os
import pickle
import shlex
import shutil
import stat
import subprocess
import sys

import pytest

import kit
from kit.errors import ConfigError, ForeignRunError, KitWarning
from kit.testing import TinyData, TinyModule
from kit.trial import directory
from kit.trial.directory import contents_to_run, key_path, replace_config
from kit.trial.submit import prepare


@pytest.fixture(autouse=True)
def installation(tmp_path, monkeypatch):
    """Become the installation of that name: its key is its own."""

    def become(name):
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / name))

    become("mine")
    return become


@pytest.fixture
def run(config):
    """The directory of a run that was written here, and not started."""
    return prepare(TinyModule, TinyData, config(max_steps=2, warmup_steps=0))


class Evil:
    """Runs a command when it is unpickled."""

    def __init__(self, canary):
        self.canary = canary

    def __reduce__(self):
        return os.system, (f"touch {shlex.quote(str(self.canary))}",)


def refused(paths, words="trust=True"):
    """Whether everything that would run it refuses to, by one name, and starts nothing."""
    before = sorted(paths.directory.parent.iterdir())
    trial = kit.Trial.open(paths.directory)
    for attempt in (
        lambda: kit.studies.try_change(trial, change={"trial.max_steps": 3}, repeats=2),
        lambda: kit.studies.try_change(kit.Trial(paths), change={"data.url": "elsewhere"}, repeats=2),
        trial.submit,
        kit.Trial(paths).submit,
    ):
        with pytest.raises(PermissionError, match=words) as caught:
            attempt()
        assert isinstance(caught.value, ForeignRunError)
    return sorted(paths.directory.parent.iterdir()) == before


def test_what_was_written_here_may_be_run_again_also_after_it_was_moved_or_started(run, tmp_path):
    contents_to_run(run)
    environment = json.loads(run.environment.read_text())
    run.environment.write_text(json.dumps({**environment, "supervisor": {"pid": 1, "started": 2}}))
    moved = shutil.copytree(run.directory, tmp_path / "moved")
    assert contents_to_run(kit.Trial.open(moved).paths).payload == run.payload.read_bytes()


def test_a_malicious_payload_is_not_unpickled(run, tmp_path):
    canary = tmp_path / "canary"
    run.payload.write_bytes(pickle.dumps(Evil(canary)))
    assert refused(run, "changed since")
    assert not canary.exists()
    pickle.loads(run.payload.read_bytes())
    assert canary.exists()  # it would have


def test_a_module_that_the_config_names_is_not_imported(run, tmp_path):
    canary = tmp_path / "canary"
    (tmp_path / "evil.py").write_text(f"open({str(canary)!r}, 'w')\nclass Evil: pass\n")
    evil = f"{tmp_path / 'evil.py'}:Evil"
    config = kit.Config.load(run.config).replace({"model.target": evil, "data.source": evil, "data.url": "store.zarr"})
    run.config.write_text(config.to_yaml())
    run.signature.unlink()
    assert refused(run, "no signature")
    assert not canary.exists()


@pytest.mark.parametrize("name", ["config", "payload", "environment"])
def test_one_changed_byte_is_seen(run, name):
    file = getattr(run, name)
    changes = {"config": (b"max_steps: 2", b"max_steps: 3"), "environment": (b'"folder": "', b'"folder": "/evil')}
    before, after = changes.get(name, (b"Tiny", b"tiny"))
    assert before in file.read_bytes()
    file.write_bytes(file.read_bytes().replace(before, after))
    assert refused(run, "changed since")


def test_the_run_of_another_installation_is_refused_and_that_one_still_runs_it(run, installation, tmp_path):
    installation("theirs")
    copied = shutil.copytree(run.directory, tmp_path / "copies" / "copied")
    assert refused(kit.Trial.open(copied).paths, "another installation")
    installation("mine")
    contents_to_run(kit.Trial.open(copied).paths)


def test_a_run_from_before_there_were_signatures_opens_and_is_refused(run):
    run.signature.unlink()
    assert kit.Trial.open(run.directory).config.trial.max_steps == 2
    assert refused(run, "no signature")
    contents_to_run(run, trust=True)


@pytest.mark.skipif(not hasattr(os, "getuid") or os.getuid() != 0, reason="only root gives files away")
@pytest.mark.parametrize("name", ["directory", "payload", "config"])
def test_a_run_that_belongs_to_another_user_is_refused_and_names_him(run, name):
    os.chown(getattr(run, name), 65534, -1)
    assert refused(run, "belongs to")
    for file in (run.directory, run.payload, run.config, run.environment):
        os.chown(file, 65534, -1)
    assert refused(run, "nobody|65534")


def test_who_trusts_it_runs_it_again_and_what_comes_of_it_is_his_own(run, installation):
    installation("theirs")
    trial = kit.Trial.open(run.directory)
    found = kit.studies.try_change(trial, change={"trial.max_steps": 3}, repeats=2, trust=True)
    assert len(found.after.run_directories) == 2
    for folder in found.before.run_directories:
        contents_to_run(kit.Trial.open(folder).paths)


def test_a_damaged_signature_is_refused(run):
    for text in (b"", b"\xff\xfe", b"0" * 64, run.signature.read_bytes() + b"\n", b"x" * 1_000_000):
        run.signature.write_bytes(text)
        assert refused(run, "changed since")
    run.signature.unlink()
    run.signature.mkdir()
    assert refused(run, "cannot be read")


# -- the key


def test_the_key_is_made_once_and_only_its_user_reads_it(run):
    path = key_path()
    assert path.is_file()
    assert (stat.S_IMODE(path.stat().st_mode), path.stat().st_size) == (0o600, 32)
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    assert path.read_bytes() not in run.signature.read_bytes()


def test_processes_that_make_it_at_the_same_time_agree(installation):
    installation("raced")
    code = """
import hashlib
from kit.trial.directory import _key, key_path
print(hashlib.sha256(_key(key_path())).hexdigest())
"""
    started = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(4)]
    told = {process.communicate()[0].strip() for process in started}
    assert told == {hashlib.sha256(key_path().read_bytes()).hexdigest()}


def write_only_here(path):
    path.parent.parent.mkdir(parents=True, exist_ok=True)
    path.parent.write_text("a file, so no folder can be made")


def readable_by_all(path):
    path.parent.mkdir(parents=True)
    path.write_bytes(b"k" * 32)
    path.chmod(0o644)


def cut_short(path):
    path.parent.mkdir(parents=True)
    path.touch(0o600)


def a_link(path):
    readable_by_all(path.with_name("elsewhere") / "key")
    path.symlink_to(path.with_name("elsewhere") / "key")


@pytest.mark.parametrize("spoil", [write_only_here, readable_by_all, cut_short, a_link])
def test_where_no_key_can_be_kept_this_session_has_one_and_says_so(config, installation, spoil):
    installation("spoilt")
    spoil(key_path())
    with pytest.warns(KitWarning, match="this session"):
        paths = prepare(TinyModule, TinyData, config())
    contents_to_run(paths)
    directory._key.cache_clear()  # the next session
    with pytest.warns(KitWarning), pytest.raises(ForeignRunError):
        contents_to_run(paths)


@pytest.mark.parametrize("given", ["", "relative/folder"])
def test_a_state_folder_that_is_no_absolute_path_is_not_used(monkeypatch, given, tmp_path):
    monkeypatch.setenv("XDG_STATE_HOME", given)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert key_path() == tmp_path / ".local" / "state" / "kit" / "run-key"


def test_a_user_without_a_home_can_still_run_trials(config, monkeypatch):
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)  # a number without a name, as containers have
    directory._key.cache_clear()
    with pytest.warns(KitWarning, match="no home"):
        paths = prepare(TinyModule, TinyData, config())
    contents_to_run(paths)
    assert not key_path().exists()


def test_a_change_of_nothing_is_still_a_config_error(run):
    with pytest.raises(ConfigError):
        kit.studies.try_change(kit.Trial.open(run.directory), repeats=2)


def test_a_run_whose_loader_had_another_batch_size_stays_signed_unless_it_was_tampered_with(config):
    trial = kit.fit(config(max_steps=2, warmup_steps=0), TinyModule, TinyData).wait()
    assert kit.Config.load(trial.paths.config) != trial.asked
    assert contents_to_run(trial.paths).config == trial.paths.config.read_bytes()
    trial.paths.payload.write_bytes(b"another")
    replace_config(trial.paths, trial.asked)
    with pytest.raises(ForeignRunError):
        contents_to_run(trial.paths)
