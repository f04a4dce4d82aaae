import json

import pytest

from kit.config import Config
from kit.events import EventWriter
from kit.machine.processes import machine
from kit.memory.replay.estimate import Residuals
from kit.memory.residual_table import compared, residuals, residuals_here
from kit.trial.directory import RunPaths

GIB = 1 << 30


def make_run(folder, predicted=2 * GIB, measured=(2 * GIB,), host=None, device="CPU", complete=True, outside=None):
    paths = RunPaths.create(Config().replace({"trial.folder": str(folder)}))
    here = machine() if host is None else {"host": host, "boot": ""}
    paths.environment.write_text(json.dumps({"machine": here}))
    if predicted is not None:
        paths.write_prediction(
            {"device_allocated_bytes": predicted, "device_reserved_bytes": predicted, "complete": complete}
        )
    for rank, allocated in enumerate(measured):
        writer = EventWriter(paths.events(rank), rank)
        writer.write("fit_started", device=device)
        writer.write("step", step=1)
        writer.write(
            "memory_measured", device_allocated_bytes=allocated, device_reserved_bytes=None, outside_bytes=outside
        )
        writer.close()
    return paths


def test_ratios_are_kept_by_machine_and_device(tmp_path):
    make_run(tmp_path, measured=(2 * GIB,))
    make_run(tmp_path, measured=(int(2.2 * GIB),))
    make_run(tmp_path, measured=(int(1.6 * GIB),))
    make_run(tmp_path, host="elsewhere", device="NVIDIA A100-SXM4-80GB", outside=GIB)
    make_run(tmp_path, host="elsewhere", device="NVIDIA A100-SXM4-80GB", outside=2 * GIB)
    rows = {row.device: row for row in residuals(tmp_path)}
    cpu, gpu = rows["CPU"], rows["NVIDIA A100-SXM4-80GB"]
    assert (cpu.count, cpu.median_ratio, cpu.outside_bytes) == (3, 1, None)
    assert (cpu.worst_ratio, cpu.highest_ratio) == (pytest.approx(0.8), pytest.approx(1.1))
    assert (gpu.machine, gpu.count, gpu.outside_bytes) == ("elsewhere", 2, (GIB, 2 * GIB))
    assert "1 GiB to 2 GiB" in repr(residuals(tmp_path))
    assert "elsewhere" in residuals(tmp_path)._repr_html_()


def test_only_this_machine_and_this_device_count_for_its_predictions(tmp_path):
    assert residuals_here(tmp_path, "CPU") is None
    make_run(tmp_path, host="elsewhere", measured=(4 * GIB,))
    make_run(tmp_path, measured=(int(2.5 * GIB),))
    learned = residuals_here(tmp_path, "CPU")
    assert learned.count == 1
    ((_, strategy, ratio, run),) = learned.highest
    assert (strategy, ratio) == ("none", 1.25)
    assert (tmp_path / run).is_dir()
    assert residuals_here(tmp_path, "NVIDIA L4") is None


def test_what_one_module_was_off_by_is_its_own():
    """Of others that are shared out alike, the median counts."""
    found = Residuals(count=4, highest=[("T5", "ddp", 1.14, "a"), ("GPT", "ddp", 1.0, "b"), ("GPT", "none", 1.02, "c")])
    assert found.highest_for("T5", "ddp")[0] == 1.14
    assert "a" in found.highest_for("T5", "ddp")[1].split()
    assert found.highest_for("Other", "ddp")[0] == 1.0
    assert found.highest_for("T5", "none")[0] == 1.02
    assert found.highest_for("T5", "fsdp")[0] == 1.0


def test_the_rank_that_needed_most_is_compared(tmp_path):
    assert compared(make_run(tmp_path, measured=(GIB, 3 * GIB, 2 * GIB))).ratio == 1.5


@pytest.mark.parametrize("run", [{"predicted": None}, {"measured": ()}, {"complete": False}])
def test_a_run_without_both_counts_for_nothing(tmp_path, run):
    make_run(tmp_path, **run)
    assert len(residuals(tmp_path)) == 0
    assert repr(residuals(tmp_path)).startswith("No run")


def test_a_damaged_run_is_passed_over(tmp_path):
    make_run(tmp_path).prediction.write_text("{")
    make_run(tmp_path)
    assert residuals(tmp_path)[0].count == 1


def test_a_measurement_that_comes_later_is_seen(tmp_path):
    paths = make_run(tmp_path, measured=())
    assert compared(paths).measured_allocated_bytes is None
    writer = EventWriter(paths.events(0), 0)
    writer.write("memory_measured", device_allocated_bytes=GIB, device_reserved_bytes=None, outside_bytes=None)
    writer.close()
    assert compared(paths).ratio == 0.5
