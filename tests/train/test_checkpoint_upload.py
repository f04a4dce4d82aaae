"""CheckpointUpload: checkpoints copied by rank 0 while training goes on; after any end, whole ones and nothing else."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import warnings
from pathlib import Path

import pytest
import torch
import upload_ranks
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.cli import LightningCLI
from torch.utils.data import DataLoader, TensorDataset
from train_ranks import run_ranks
from waiting import PATIENCE_SECONDS, wait_until

from kit.checkpoints.downloading import fetch_checkpoint
from kit.checkpoints.uploading import BundleStore, latest_checkpoint
from kit.config import Config
from kit.data.stores.url import list_objects, open_store
from kit.errors import KitWarning, StoreError
from kit.machine.endpoints import VARIABLE
from kit.train import CheckpointUpload
from kit.train.choices import upload_entries

QUIET = {
    "accelerator": "cpu", "devices": 1, "logger": False, "enable_progress_bar": False, "enable_model_summary": False,
    "max_epochs": -1,
}  # fmt: skip


class Tiny(LightningModule):
    def __init__(self, width: int = 8):
        super().__init__()
        self.layer = torch.nn.Linear(width, width)

    def training_step(self, batch, batch_idx):
        return self.layer(batch[0]).square().mean()

    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.ones(64, self.layer.in_features)), batch_size=2)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class At(Callback):
    """Does something at the end of a step."""

    def __init__(self, step, do):
        self.step, self.do = step, do

    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == self.step:
            self.do()


@pytest.fixture
def cloud(cloud, new_threads):
    """The simulated cloud; every thread that copies to it has ended with the test."""
    torch.set_num_threads(1)
    yield cloud
    cloud.turn("no limits")
    wait_until(lambda: not new_threads("kit-upload"))


@pytest.fixture
def fit(tmp_path):
    """Trains with a checkpoint every two steps; returns the trainer."""

    def run(*callbacks, steps=8, ckpt_path=None, module=None, **saving):
        options = {"filename": "{step}", "every_n_train_steps": 2, "save_top_k": -1, **saving}
        saver = ModelCheckpoint(tmp_path / "checkpoints", **options)
        trainer = Trainer(callbacks=[*callbacks, saver], max_steps=steps, **QUIET)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Checkpoint directory .* exists and is not empty")
            warnings.filterwarnings("ignore", ".*dataloader is not resumable")
            trainer.fit(module or Tiny(), ckpt_path=ckpt_path, weights_only=False)
        return trainer

    return run


def names(url):
    return [bundle.name for bundle in BundleStore.open(url).all()]


@pytest.mark.parametrize("scheme", ["gs", "s3", "file"])
def test_the_last_checkpoint_is_there_at_the_end_and_training_goes_on_from_it(cloud, fit, tmp_path, scheme):
    url = str(tmp_path / "cloud") if scheme == "file" else cloud.url(f"end/{scheme}", scheme)
    upload = CheckpointUpload(url, during_training=False)
    fit(upload)
    assert names(url) == [sent.bundle.name for sent in upload.uploads] == ["step=8.ckpt"]
    found = fetch_checkpoint(url, tmp_path / "elsewhere")
    assert found.read_bytes() == (tmp_path / "checkpoints" / "step=8.ckpt").read_bytes()
    assert fit(ckpt_path=found, steps=12).global_step == 12
    assert not (tmp_path / "checkpoints" / ".kit-upload").exists()


def test_checkpoints_are_copied_while_training_goes_on_though_they_are_soon_removed(cloud, fit, tmp_path):
    url = cloud.url("during/run")
    seen = []

    def look():
        wait_until(lambda: latest_checkpoint(url))
        seen.extend(names(url))

    fit(CheckpointUpload(url, every_seconds=0), At(6, look), save_top_k=1)
    assert seen[0] in ("step=2.ckpt", "step=4.ckpt")
    assert names(url)[-1] == "step=8.ckpt"
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step=8.ckpt"]


def test_only_so_many_are_kept(cloud, fit):
    url = cloud.url("kept/run")
    fit(CheckpointUpload(url, every_seconds=0, every_steps=2, keep=1))
    assert names(url) == ["step=8.ckpt"]


def test_the_best_is_copied_too(cloud, fit):
    class Falling(Tiny):
        def training_step(self, batch, batch_idx):
            self.log("score", float(abs(self.global_step - 3)))
            return super().training_step(batch, batch_idx)

    fit(CheckpointUpload(url := cloud.url("best/run"), during_training=False), module=Falling(), monitor="score")
    assert names(url) == ["step=4.ckpt", "step=8.ckpt"]


def test_a_newer_checkpoint_takes_the_place_of_one_that_waits(cloud, fit, monkeypatch):
    late, send = threading.Event(), BundleStore.send

    def slowly(*args, **options):
        assert late.wait(PATIENCE_SECONDS)
        return send(*args, **options)

    monkeypatch.setattr(BundleStore, "send", slowly)
    upload = CheckpointUpload(cloud.url("slow/run"), every_seconds=0)
    fit(upload, At(40, late.set), steps=40)
    sent = [one.bundle.name for one in upload.uploads]
    assert len(sent) <= 3  # one of the first, perhaps the one that waited at the end, and the last
    assert sent[-1] == "step=40.ckpt"


# -- what goes wrong


def test_a_bucket_that_takes_nothing_is_refused_before_training(cloud, fit):
    cloud.script("denied/*", [403] * 5)
    steps = []
    with pytest.raises(StoreError, match="cannot be copied.*rights"):
        fit(CheckpointUpload(cloud.url("denied/run")), At(1, lambda: steps.append(1)))
    assert steps == []
    with pytest.raises(StoreError, match="unknown scheme s4://"):
        CheckpointUpload("s4://bucket/run")


@pytest.mark.parametrize("required", [False, True])
def test_what_fails_is_warned_of_or_ends_the_training_when_that_is_asked_for(cloud, fit, required):
    url = cloud.url(f"fails/{required}")
    cloud.script("fails/*/parts/*", [403] * 5, kind="write")
    upload = CheckpointUpload(url, every_seconds=0, required=required)
    if required:
        with pytest.raises(StoreError, match=r"step=\d.ckpt .*not copied: .*rights"):
            fit(upload)
    else:
        with pytest.warns(KitWarning, match="not copied: .*went on"):
            assert fit(upload).global_step == 8
    assert latest_checkpoint(url) is None


def test_what_passes_is_not_noticed(cloud, fit, tmp_path):
    url = cloud.url("passes/run")
    cloud.turn(faults={"503": 0.2, "reset": 0.1, "lost": 0.1}, seed=2)
    fit(CheckpointUpload(url, every_seconds=0, part_bytes=1024))
    cloud.turn("no limits", faults={})
    assert latest_checkpoint(url) == f"{url}/step=8.ckpt"
    there = fetch_checkpoint(url, tmp_path / "there").read_bytes()
    assert there == (tmp_path / "checkpoints" / "step=8.ckpt").read_bytes()


def test_an_end_that_waits_too_long_says_how_to_go_on(cloud, fit):
    url = cloud.url("late/run")
    upload = CheckpointUpload(url, during_training=False, deadline_seconds=0.5)
    with pytest.warns(KitWarning, match=r"500 ms .*kit.checkpoints.upload"):
        fit(upload, At(7, lambda: cloud.turn(latency_seconds=3)))
    cloud.turn("no limits")
    assert latest_checkpoint(url) is None


def test_after_an_error_what_was_saved_is_still_copied(cloud, fit):
    def fail():
        raise ArithmeticError("a bad step")

    url = cloud.url("error/run")
    with pytest.raises(ArithmeticError, match="a bad step"):
        fit(CheckpointUpload(url, every_seconds=1000), At(5, fail))
    assert names(url) == ["step=4.ckpt"]


def test_after_an_interrupt_nothing_half_copied_is_seen(cloud, fit):
    url = cloud.url("interrupt/run")
    upload = CheckpointUpload(url, every_seconds=0, part_bytes=1024)

    def interrupt():
        wait_until(lambda: cloud.counts().in_flight)
        raise KeyboardInterrupt

    handler = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(SystemExit):
            fit(At(2, lambda: cloud.turn(latency_seconds=1)), upload, At(4, interrupt))
    finally:
        signal.signal(signal.SIGINT, handler)  # Lightning leaves it ignored
    cloud.turn("no limits")
    assert latest_checkpoint(url) is None


@pytest.mark.fault
def test_after_a_kill_nothing_half_copied_is_seen_and_the_resumed_run_sends_the_rest(cloud, fit, tmp_path):
    url = cloud.url("killed/run")
    code = f"""
        import sys
        import time
        sys.path[:0] = {[str(folder) for folder in Path(__file__).parents[:2]]!r}
        from test_checkpoint_upload import *
        saver = ModelCheckpoint({str(tmp_path / "checkpoints")!r}, filename="{{step}}", every_n_train_steps=2)
        upload = CheckpointUpload({url!r}, every_seconds=0, part_bytes=16384, parts_in_flight=1)
        step = At(3, lambda: time.sleep(1000))
        Trainer(callbacks=[upload, step, saver], max_steps=8, **QUIET).fit(Tiny(width=512))
    """
    cloud.turn(latency_seconds=0.2)
    victim = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stderr=subprocess.DEVNULL)

    def parts():
        return len([key for key in list_objects(open_store(url), "", url) if "/parts/" in key])

    try:
        wait_until(lambda: parts() > 4)
    finally:
        victim.kill()
        victim.wait()
    assert latest_checkpoint(url) is None
    before = parts()
    (saved,) = (tmp_path / "checkpoints").glob("*.ckpt")
    cloud.turn("no limits")
    upload = CheckpointUpload(url, every_seconds=0, part_bytes=16384)
    fit(upload, At(3, lambda: wait_until(lambda: latest_checkpoint(url))), module=Tiny(512), ckpt_path=saved)
    first = upload.uploads[0]
    assert first.bundle.name == saved.name
    assert first.sent_bytes <= first.bundle.size_bytes - 16384 * (before - 1)
    assert fetch_checkpoint(first.url, tmp_path / "there").read_bytes() == saved.read_bytes()
    assert names(url)[-1] == "step=8.ckpt"


# -- several ranks


@pytest.fixture(scope="module")
def said(running_cloud, tmp_path_factory):
    """What two ranks said, by case, and what the cloud had served at the end."""
    folder = tmp_path_factory.mktemp("ranks")
    (folder / "blocked").write_text("a file")
    (folder / "numbers.txt").write_text("1 2 3")
    os.environ.pop(VARIABLE, None)
    running_cloud.turn("no limits", faults={}).forget_scripts().reset_counts()
    running_cloud.script("ranks/denied/*", [403] * 5)
    numbers = running_cloud.upload(folder / "numbers.txt", "numbers/n.txt")
    sharded = running_cloud.url("ranks/sharded")
    cases = {
        "ddp": {"what": "fit", "strategy": "ddp", "steps": 4, "url": running_cloud.url("ranks/ddp")},
        "sharded": {"what": "fit", "strategy": "fsdp", "steps": 8, "url": sharded},
        "whole": {"what": "fit", "strategy": "fsdp", "steps": 12},
        "resumed": {"what": "fit", "strategy": "fsdp", "steps": 12, "from": sharded},
        "denied": {"what": "fit", "strategy": "ddp", "steps": 4, "url": running_cloud.url("ranks/denied")},
        "shared": {"what": "share", "url": numbers, "paths": [str(folder / "shared")] * 2},
        "blocked": {"what": "share", "url": numbers, "paths": [str(folder / "one"), str(folder / "blocked" / "x")]},
        "prepared": {"what": "prepare", "url": numbers, "path": str(folder / "prepared")},
    }
    for name, case in cases.items():
        case["folder"] = str(folder / name)
    answers = run_ranks(cases, 2, folder, upload_ranks.do)
    yield answers, running_cloud.counts(), folder
    os.environ.pop(VARIABLE, None)


@pytest.mark.slow
def test_only_rank_0_copies(said):
    first, second = said[0]["ddp"]
    assert first["uploads"][-1] == "step=4.ckpt"
    assert first["threads"]
    assert (second["uploads"], second["threads"]) == ([], False)


@pytest.mark.slow
def test_a_sharded_checkpoint_goes_there_and_back_and_training_goes_on_as_if_uninterrupted(said):
    answers, _, folder = said
    assert answers["sharded"][0]["uploads"][-1] == "step=8.ckpt"
    back = Path(answers["resumed"][0]["resumed"])
    files = {path.name: path.read_bytes() for path in (folder / "sharded" / "step=8.ckpt").iterdir()}
    assert {"__0_0.distcp", "__1_0.distcp", ".metadata", "meta.pt"} <= files.keys()
    assert {path.name: path.read_bytes() for path in back.iterdir()} == files
    for whole, first, then in zip(answers["whole"], answers["sharded"], answers["resumed"], strict=True):
        assert then["resumed"] == str(back)
        assert [*first["losses"], *then["losses"]] == pytest.approx(whole["losses"])


@pytest.mark.slow
def test_ranks_fail_together_before_training_when_one_may_not_write(said):
    assert all("cannot be copied" in answer["error"] for answer in said[0]["denied"])


@pytest.mark.slow
def test_ranks_share_a_download_and_fail_together(said):
    answers, _, folder = said
    assert [answer["path"] for answer in answers["shared"]] == [str(folder / "shared")] * 2
    first, second = answers["blocked"]
    assert first["error"].startswith("StoreError: another rank failed: ")
    assert "blocked" in second["error"]


@pytest.mark.slow
def test_a_data_module_brings_its_files_once(said):
    answers, _, folder = said
    assert [answer["text"] for answer in answers["prepared"]] == ["1 2 3"] * 2
    assert (folder / "prepared.download.json").exists()


# -- by a config


def test_an_exported_file_names_it_with_what_is_off_its_default(cloud, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train"])
    assert upload_entries(Config()) == []
    url = cloud.url("exported/run")
    config = Config().replace({"checkpoint.url": url, "checkpoint.every_steps": 50, "checkpoint.keep": 3})
    entries = upload_entries(config)
    assert entries == [
        {"class_path": "kit.train.CheckpointUpload", "init_args": {"url": url, "every_steps": 50, "keep": 3}}
    ]
    trainer = {**QUIET, "callbacks": entries}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning's use of a name that jsonargparse has since changed
        cli = LightningCLI(Tiny, args={"trainer": trainer}, run=False, save_config_callback=None)
    (made,) = (callback for callback in cli.trainer.callbacks if isinstance(callback, CheckpointUpload))
    assert made.settings == config.checkpoint


def test_no_key_is_in_what_it_says_of_itself(monkeypatch):
    monkeypatch.setenv("MY_KEY", "an-open-secret")
    upload = CheckpointUpload("gs://bucket/run", credentials="env:MY_KEY")
    assert "an-open-secret" not in f"{upload!r} {vars(upload)}"
    with pytest.raises(StoreError, match="carries credentials"):
        CheckpointUpload("s3://key:secret@bucket/run")
