"""A module that brings its own callbacks copies checkpoints from a trial, and the trial says what went wrong."""

import pytest
from waiting import PATIENCE_SECONDS

import kit
from kit.checkpoints.uploading import latest_checkpoint
from kit.cloud.simulated import simulated_cloud
from kit.models import GPT, Tokens


class Saving(GPT):
    """Saves every four steps and copies to a URL."""

    def __init__(self, url, folder):
        super().__init__(vocabulary=32, width=16, heads=2, layers=2, context=16)
        self.url, self.folder = url, folder

    def configure_callbacks(self):
        from lightning.pytorch.callbacks import ModelCheckpoint

        from kit.train import CheckpointUpload

        saver = ModelCheckpoint(self.folder, filename="{step}", every_n_train_steps=4, save_top_k=-1)
        return [CheckpointUpload(self.url, every_seconds=0), saver]


@pytest.mark.slow
def test_checkpoints_are_copied_from_a_trial_and_failures_are_in_its_notes(config, tmp_path):
    with simulated_cloud("no limits") as cloud:
        url = cloud.url("trials/run")
        cloud.script("trials/run/step=4.ckpt/parts/*", [403] * 5, kind="write")

        def module():
            return Saving(url, str(tmp_path / "checkpoints"))

        data = Tokens(vocabulary=32, context=16, batch_size=2, sequences=32)
        trial = kit.fit(config(start="cold"), module, data).wait(PATIENCE_SECONDS)
        assert trial.state == "COMPLETE"
        assert latest_checkpoint(url) == f"{url}/step=8.ckpt"
    (text,) = trial.warnings
    assert text.startswith("step=4.ckpt ")
    assert "not copied" in text.partition(":")[0]
