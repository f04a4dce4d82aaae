"""Where a run goes on: the last checkpoint here, or the copy of it, and alike on every machine."""

import os

import pytest

from kit.checkpoints.uploading import upload_checkpoint
from kit.errors import StoreError
from kit.train.cli import newest_checkpoint

THEN, NOW = 1_700_000_000, 1_700_000_100


@pytest.fixture
def settings(tmp_path):
    """What a committed file comes to, with its checkpoints and their copies below a folder."""
    saves = {
        "class_path": "lightning.pytorch.callbacks.ModelCheckpoint",
        "init_args": {"dirpath": str(tmp_path / "output" / "checkpoints"), "save_last": True},
    }
    upload = {"class_path": "kit.train.CheckpointUpload", "init_args": {"url": str(tmp_path / "cloud")}}
    trainer = {"default_root_dir": str(tmp_path / "output"), "num_nodes": 1, "callbacks": [saves, upload]}
    return {"ckpt_path": "last", "trainer": trainer}


def save(folder, text, seconds):
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "last.ckpt"
    file.write_text(text)
    os.utime(file, (seconds, seconds))
    return file


@pytest.fixture
def copied(tmp_path):
    def copy(text="copied", seconds=NOW):
        upload_checkpoint(save(tmp_path / "elsewhere", text, seconds), str(tmp_path / "cloud"))

    return copy


@pytest.fixture
def saved(tmp_path):
    return lambda seconds: save(tmp_path / "output" / "checkpoints", "saved", seconds)


def text_of(path):
    with open(path) as file:
        return file.read()


def test_what_begins_finds_nothing(settings):
    assert newest_checkpoint(settings) is None


def test_on_an_empty_disk_the_copy_is_fetched_once(settings, copied):
    copied()
    found = newest_checkpoint(settings)
    assert text_of(found) == "copied"
    assert newest_checkpoint(settings) == found


@pytest.mark.parametrize(("seconds", "stays"), [(NOW, True), (NOW + 1, True), (THEN, False)])
def test_on_one_machine_the_newer_one_counts(settings, copied, saved, seconds, stays):
    copied()
    saved(seconds)
    assert (newest_checkpoint(settings) is None) is stays


def test_several_machines_go_on_from_the_copy_that_all_of_them_see(settings, copied, saved):
    copied()
    saved(NOW + 60)
    settings["trainer"]["num_nodes"] = 2
    assert text_of(newest_checkpoint(settings)) == "copied"


def test_a_file_without_uploads_is_as_lightning_reads_it(settings, copied):
    copied()
    settings["trainer"]["callbacks"].pop()
    assert newest_checkpoint(settings) is None


def test_a_checkpoint_that_was_asked_for_is_not_exchanged(settings, copied):
    copied()
    assert newest_checkpoint({**settings, "ckpt_path": "output/step-4.ckpt"}) is None
    assert newest_checkpoint({**settings, "ckpt_path": None}) is None


def test_copies_can_be_named_outright(settings, copied, tmp_path):
    copied()
    settings["trainer"]["callbacks"].pop()
    found = newest_checkpoint({**settings, "ckpt_path": f"file://{tmp_path}/cloud"})
    assert text_of(found) == "copied"


def test_copies_that_cannot_be_read_are_an_error_before_training(settings, copied, tmp_path):
    copied()
    (tmp_path / "cloud" / "last.ckpt" / "kit-parcel.json").write_text("edited")
    with pytest.raises(StoreError, match="list of parts"):
        newest_checkpoint(settings)
