import json
from dataclasses import replace

import kit
from kit.studies.diagnosis import peaks as room
from kit.testing import TinyModule

SOME = room.Peaks(
    device="x", flops_per_second={"float32": 1.0}, nominal_flops_per_second={"float32": None}, bytes_per_second=1.0,
)  # fmt: skip


def test_the_peaks_of_the_cpu_are_measured_once_and_remembered(config, monkeypatch):
    monkeypatch.setattr(room, "MOST_QUEUED", 1.0)  # whatever else this machine does
    found = kit.studies.device_peaks(config())
    assert found.device == "this CPU with 1 thread"
    assert min(found.flops_per_second.values()) > 1e7
    assert found.bytes_per_second > 1e7
    assert found.peak("float32") == found.flops_per_second["float32"]
    assert found.peak("float64") == found.peak("float32"), "what was not measured is taken for float32"
    monkeypatch.setattr(room, "_measure", None)
    assert kit.studies.device_peaks(config()) == found


def test_ranks_that_share_a_cpu_are_measured_as_one_with_all_their_threads(config, monkeypatch):
    asked = []

    def measure(_, resolved, __):
        asked.append((resolved.world_size, resolved.threads_per_rank))
        return SOME, 0.0

    monkeypatch.setattr(room, "_measure", measure)
    kit.studies.device_peaks(config(ranks=2))
    assert asked == [(1, min(2, kit.hardware().cores))]


def test_peaks_of_a_busy_machine_are_given_and_not_kept(config, monkeypatch):
    monkeypatch.setattr(room, "_measure", lambda *_: (SOME, 0.4))
    assert kit.studies.device_peaks(config()) == SOME
    quiet = replace(SOME, bytes_per_second=2.0)
    monkeypatch.setattr(room, "_measure", lambda *_: (quiet, 0.01))
    assert kit.studies.device_peaks(config()) == quiet
    monkeypatch.setattr(room, "_measure", None)
    assert kit.studies.device_peaks(config()) == quiet


def test_a_damaged_memory_of_peaks_is_measured_anew(config, monkeypatch):
    monkeypatch.setattr(room, "MOST_QUEUED", 1.0)
    kit.studies.device_peaks(config())
    (file,) = (file for file in room.runs_folder(config().trial.folder).glob(".peaks/*.json"))
    file.write_text('{"device": 1')
    assert kit.studies.device_peaks(config()).bytes_per_second > 0
    assert json.loads(file.read_text())["device"].startswith("this CPU")


def test_peaks_are_no_run_among_the_results(config):
    kit.studies.device_peaks(config())
    kit.fit(config(max_steps=3), TinyModule, "kit.testing:TinyData").wait()
    assert len(kit.results(config().trial.folder)) == 1
