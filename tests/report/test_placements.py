"""Placements: predicted beside measured for memory, a file and a page cache too small for it; only batches move."""

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule

import kit
from kit.errors import ConfigError
from kit.report.placements import Placement, Placements


class Weigh(LightningModule):
    """The least that trains on rows."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(512, 4)

    def training_step(self, batch, _):
        values, rows = batch
        return self.layer(values).square().mean() + 0 * rows.sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-6)


@pytest.fixture
def config(tmp_path):
    return kit.Config().replace({
        "hardware.accelerator": "cpu", "hardware.threads_per_rank": 1, "loader.batch_size": 32,
        "trial.folder": str(tmp_path / "runs"),
    })  # fmt: skip


def test_each_place_is_measured_beside_what_was_foreseen(tmp_path, config):
    values = np.random.default_rng(0).random((512, 512), "float32")
    file = tmp_path / "x.npy"
    np.save(file, values)
    found = kit.placements(Weigh, file, config, page_cache_bytes=256 << 10)
    names = [row.name for row in found.rows]
    assert names == ["on the device", "in memory", "x.npy", "x.npy, cache 256 KiB"]
    device, memory, disk, limited = found.rows
    assert device.predicted_device_bytes == memory.predicted_device_bytes + values.nbytes
    for row in (memory, disk, limited):
        assert row.seconds_ratio > 0
        # The array is a hundred times what a batch and the model take: none of it is ever moved.
        assert row.measured_device_bytes < values.nbytes
        assert row.device_ratio == pytest.approx(1, abs=0.1)
    assert (disk.case, limited.case) == ("fits memory", "fits neither")
    assert disk.predicted_cache_bytes == values.nbytes
    assert limited.predicted_cache_bytes == 256 << 10
    if disk.measured_cache_bytes and disk.measured_cache_bytes >= values.nbytes:  # not in a file system in memory
        assert limited.measured_cache_bytes < values.nbytes
    assert kit.placements_figure(found).axes
    assert "fits neither" in str(found)
    assert "fits neither" in found._repr_html_()


def test_ten_times_the_rows_are_foreseen_to_take_no_more_of_the_device(tmp_path, config):
    peaks = [
        kit.predict_memory(Weigh, kit.RowData(torch.zeros(rows, 512)), config).device_allocated_bytes
        for rows in (64, 640)
    ]
    assert peaks[0] == peaks[1] > 0


def test_what_was_not_measured_has_no_ratio():
    row = Placement(
        name="a", case="fits neither", predicted_seconds=2.0, measured_seconds=None, predicted_device_bytes=None,
        measured_device_bytes=None,
    )  # fmt: skip
    found = Placements(rows=(row,), data_bytes=1 << 20, step_seconds=0.01, sentences=())
    assert row.seconds_ratio is None
    assert found.row("a") is row
    with pytest.raises(ConfigError, match="none of a"):
        found.row("b")
    assert kit.placements_figure(found).axes


def test_arrays_of_other_shapes_are_refused_before_anything_runs(tmp_path, config):
    for name, rows in (("a", 8), ("b", 9)):
        np.save(tmp_path / f"{name}.npy", np.zeros((rows, 2), "float32"))
    with pytest.raises(ConfigError, match="give the same rows"):
        kit.placements(Weigh, [tmp_path / "a.npy", tmp_path / "b.npy"], config)
    with pytest.raises(ConfigError, match="at least one"):
        kit.placements(Weigh, [], config)
