import dataclasses
import functools

import pytest

import kit
from kit.speed import measure, peaks
from kit.testing import TinyModule


@pytest.fixture
def busy_machine_counts(monkeypatch):
    monkeypatch.setattr(measure, "BUSY_CORES", float("inf"))


def test_peaks_are_calls_of_the_table_of_costs_timed_once_and_remembered(config, monkeypatch, busy_machine_counts):
    found = kit.studies.device_peaks(config())
    assert found.device == "this CPU with 1 thread"
    assert min(found.flops_per_second.values()) > 1e7
    assert found.bytes_per_second > 1e7
    assert found.peak("float32") == found.flops_per_second["float32"]
    assert found.peak("float64") == found.peak("float32"), "what was not measured is taken for float32"
    assert measure.table_known(config()) is None, "what a call costs the host is not known yet"
    monkeypatch.setattr(measure, "_measured", functools.partial(pytest.fail, "measured again"))
    assert kit.studies.device_peaks(config()) == found


@pytest.mark.parametrize(("half", "peak"), [(4e11, 4e11), (7e8, 1e11)])
def test_a_number_format_without_instructions_has_the_peak_of_float32(half, peak):
    found = peaks.Peaks(
        device="a device", flops_per_second={"float32": 1e11, "bfloat16": half},
        nominal_flops_per_second={"float32": None, "bfloat16": None}, bytes_per_second=1e10,
    )  # fmt: skip
    assert found.peak("bfloat16") == peak
    assert dataclasses.replace(found, nominal_flops_per_second={"bfloat16": 3e12}).peak("bfloat16") == 3e12


@pytest.mark.slow
def test_what_was_measured_before_peaks_stays_in_the_table(config, busy_machine_counts):
    path = measure._path(config(), measure.take_devices(config()).resolved)
    one = peaks._product("float32", 8)
    measure._keep(path, measure.CostTable("this CPU", {one: 1e-15}, 1e-5, 0.0, 1e-3))
    found = kit.studies.device_peaks(config())
    assert found.peak("float32") == pytest.approx(2 * 8**3 / 1e-15), "the best product that is known"
    table = measure.table_known(config())
    assert table.measured[one] == 1e-15
    assert table.backward_call_seconds == 1e-5


@pytest.mark.slow
def test_ranks_that_share_a_cpu_are_asked_about_as_one_with_all_their_threads(config, busy_machine_counts):
    found = kit.studies.device_peaks(config(ranks=2))
    threads = min(2, kit.hardware().cores)
    assert found.device == f"this CPU with {threads} thread{'s' * (threads > 1)}"


@pytest.mark.slow
def test_peaks_of_a_busy_machine_are_given_and_not_kept(config, monkeypatch):
    monkeypatch.setattr(measure, "BUSY_CORES", -1.0)
    assert kit.studies.device_peaks(config()).bytes_per_second > 0
    assert not [*measure.runs_folder(config().trial.folder).glob(".calls/*")]


@pytest.mark.slow
def test_peaks_are_no_run_among_the_results(config, busy_machine_counts):
    kit.studies.device_peaks(config())
    kit.fit(config(max_steps=3), TinyModule, "kit.testing:TinyData").wait()
    assert len(kit.results(config().trial.folder)) == 1


@pytest.mark.parametrize("free_gib", [80, 40, 8, 6, 3, 1.5, 0.5, 0.02])
def test_what_is_multiplied_and_copied_takes_an_eighth_of_what_is_free_at_most(free_gib):
    side, elements = peaks._sizes("gpu", int(free_gib * 2**30))
    largest = max(3 * side**2, 2 * elements) * 4
    assert largest <= max(free_gib * 2**30 / 8, 2 * peaks._LEAST_ELEMENTS * 4)
    if free_gib >= 8:
        assert (side, elements) == (8192, 1 << 27), "as much as out of a card's caches; more would tell no more"
    elif free_gib >= 0.5:
        assert largest > free_gib * 2**30 / 64


def test_a_nearly_full_machine_copies_less(config, monkeypatch, busy_machine_counts):
    asked = []
    monkeypatch.setattr(peaks, "calls_here", lambda _, calls, **more: asked.extend(calls))
    free = kit.hardware()
    for available in (1 << 40, 64 << 20):
        here = dataclasses.replace(free, memory_available_bytes=available, gpus=())
        monkeypatch.setattr(peaks, "hardware", lambda here=here: here)
        with pytest.raises(AttributeError):
            kit.studies.device_peaks(config())
    copies = [call.outputs[0].elements for call in asked if call.operator == "aten::copy_"]
    assert copies[0] == 1 << 25
    assert copies[1] <= 1 << 20
