"""Placements: predicted beside measured for memory, a file and a page cache too small for it; only batches move."""

import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule

import kit
from kit.errors import ConfigError
from kit.studies import placement
from kit.studies.placement import Placement, Placements


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


@pytest.mark.slow
def test_each_place_is_measured_beside_what_was_foreseen(tmp_path, config):
    values = np.random.default_rng(0).random((512, 512), "float32")
    file = tmp_path / "x.npy"
    np.save(file, values)
    found = kit.studies.placements(config, Weigh, file, device_bytes="16 MiB", page_cache_bytes="256 KiB")
    names = [row.name for row in found.rows]
    assert names == [
        "x.npy on the device", "x.npy in memory", "x.npy on disk", "x.npy on disk, page cache 256 KiB",
    ]  # fmt: skip
    device, memory, disk, limited = found.rows
    assert device.predicted_device_bytes == memory.predicted_device_bytes + values.nbytes
    for row in (memory, disk, limited):
        assert row.seconds_ratio > 0
        # The array is a hundred times what a batch and the model take: none of it is ever moved.
        assert row.measured_device_bytes < values.nbytes
        assert row.device_ratio == pytest.approx(1, abs=0.1)
    assert [row.case for row in found.rows] == [
        "would fit", "fits the device", "fits the device", "fits neither",
    ]  # fmt: skip
    # Held in memory the array adds itself; a file adds nothing.
    assert memory.predicted_host_bytes == disk.predicted_host_bytes + values.nbytes
    for row in (memory, disk, limited):
        assert row.host_ratio == pytest.approx(1, abs=0.1)
    assert disk.predicted_cache_bytes == values.nbytes
    assert limited.predicted_cache_bytes == 256 << 10
    if disk.measured_cache_bytes and disk.measured_cache_bytes >= values.nbytes:  # not in a file system in memory
        assert limited.measured_cache_bytes < values.nbytes
    # What tells the places apart is counted: nothing, the file once, and its pages again and again.
    assert memory.predicted_disk_bytes == 0
    assert disk.predicted_disk_bytes in (0, file.stat().st_size), "0 in a file system in memory"
    assert limited.measured_disk_bytes > 2 * values.nbytes
    assert limited.disk_ratio == pytest.approx(1, abs=0.15)
    assert memory.held_bytes == pytest.approx(values.nbytes, abs=4 << 20)
    assert max(disk.held_bytes, limited.held_bytes) < 4 << 20
    assert [row.moved_bytes for row in (memory, disk, limited)] == [2 * values.nbytes] * 3
    assert sum("moved to the device" in text for text in found.sentences) == 1, "the same everywhere"
    ran = kit.results(tmp_path / "runs", kind="repeat")
    places = [row.name for row in found.rows[1:]]
    assert [row["data"].partition(", ")[2] for row in reversed(ran)][1:] == places
    assert all(f"data {place}" in str(ran) for place in places)
    assert len(found.figure().axes) == 2
    assert "fits neither" in str(found)
    assert "fits neither" in found._repr_html_()


def test_ten_times_the_rows_are_foreseen_to_take_no_more_of_the_device(tmp_path, config):
    peaks = [
        kit.predict_memory(config, Weigh, kit.data.RowData(torch.zeros(rows, 512))).device_allocated_bytes
        for rows in (64, 640)
    ]
    assert peaks[0] == peaks[1] > 0


def test_what_was_not_measured_has_no_ratio():
    row = Placement(
        name="a", case="fits neither", data_bytes=1 << 20, step_seconds=0.01, predicted_seconds=2.0,
    )  # fmt: skip
    found = Placements(rows=(row,))
    assert row.seconds_ratio is None
    assert found.row("a") is row
    with pytest.raises(ConfigError, match="none of a"):
        found.row("b")
    assert re.fullmatch("1 MiB .*, 10 ms .*step", found.headline)
    assert found.figure().axes


def test_arrays_of_other_shapes_are_refused_before_anything_runs(tmp_path, config):
    for name, rows in (("a", 8), ("b", 9)):
        np.save(tmp_path / f"{name}.npy", np.zeros((rows, 2), "float32"))
    with pytest.raises(ConfigError, match="same rows"):
        kit.studies.placements(config, Weigh, [tmp_path / "a.npy", tmp_path / "b.npy"])
    with pytest.raises(ConfigError, match="at least one"):
        kit.studies.placements(config, Weigh, [])


def test_two_arrays_stand_in_one_table_with_what_is_said_of_each():
    few, many = (
        Placements(
            rows=(Placement(
                name=f"{size} on disk", case=case, data_bytes=size << 20, step_seconds=0.01, predicted_seconds=2.0,
                measured_seconds=1.0, predicted_host_bytes=4 << 20, measured_host_bytes=5 << 20,
                predicted_cache_bytes=cached, measured_disk_bytes=cached,
            ),),
            sentences=("said of both", f"{size}: {case}"),
        )
        for size, case, cached in ((1, "fits the device", None), (8, "fits neither", 4 << 20))
    )  # fmt: skip
    both = few + many
    assert re.fullmatch("1 MiB .*, 10 ms .*; 8 MiB .*, 10 ms .*", both.headline)
    assert both.sentences == ("said of both", "1: fits the device", "8: fits neither")
    assert [row.host_ratio for row in both.rows] == [1.25, 1.25]
    page = both._repr_html_()
    assert page.count("<table") == 2, "what was counted has its own"
    assert page.count('<th scope="row"') == 3
    for text in (page, str(both)):
        assert "read from the disk" in text
        assert "an epoch" in text
        assert "fits the device" in text
        assert "fits neither" in text
    labels = [label.get_text() for label in both.figure().axes[0].get_yticklabels()]
    assert labels == ["1 on disk\nfits the device", "8 on disk\nfits neither"]


def test_seconds_beside_other_programs_are_told_once():
    assert placement._disturbed({}) == []
    (one,) = placement._disturbed({"x.npy on disk": 1.42})
    assert "1.4 cores" in one
    (all_of_them,) = placement._disturbed({"x.npy in memory": 1.42, "x.npy on disk": 1.93})
    assert "1.4 to 1.9 cores" in all_of_them
    assert all_of_them.count("x.npy") == 2


@pytest.mark.parametrize(("cores", "told"), [(None, 0), (0.2, 0), (1.4, 1)])
def test_other_programs_are_told_from_where_they_slow_something(monkeypatch, cores, told):
    monkeypatch.setattr(placement, "row_of", lambda _: {"other_cores": cores})
    study = object.__new__(placement._Study)
    study.other_cores = {}
    study._look_at_others("x.npy on disk", SimpleNamespace(paths=None))
    assert len(study.other_cores) == told
