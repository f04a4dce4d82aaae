"""Measuring a loader, setting it, and keeping the answer: in this process."""

import contextlib
import time
from dataclasses import replace

import numpy as np
import psutil
import pytest
import torch
from slow_data import Broken, Endless, Waiting, WaitingData
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler
from waiting import wait_until

from kit.config import Config
from kit.data.patches.module import PatchData
from kit.errors import ConfigError, TrialError
from kit.machine.machine import Share
from kit.studies.calibration.job import Resources, Sweep, identity_of
from kit.studies.calibration.measure import (
    MeasurementLimits,
    Observed,
    StoppedError,
    apply_setting,
    batch_bytes,
    measure,
    set_loader,
    subject_of,
)
from kit.studies.calibration.result import Calibration, changed
from kit.studies.calibration.rules import LEAST_SECONDS, LoaderSetting, Measurement, block_size, standard_error

MIB = 1 << 20
PLAIN = LoaderSetting(num_workers=0, prefetch_factor=2)
TWO = LoaderSetting(num_workers=2, prefetch_factor=3)
LIMITS = MeasurementLimits(timeout_seconds=5.0, most_batches=10)
ROOMY = Resources(cores=2, free_bytes=8 << 30, shared_bytes=8 << 30)


@pytest.fixture
def now(monkeypatch):
    """What a clock says by which nothing takes time but what says so."""
    now = [time.perf_counter()]  # which measurements are begun by
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    return now


class Batches:
    """`count` batches a pass, and how many were asked for."""

    def __init__(self, count, size=4):
        self.count, self.size, self.given, self.passes = count, size, 0, 0

    def __iter__(self):
        self.passes += 1
        for _ in range(self.count):
            self.given += 1
            yield {"values": torch.zeros(self.size), "extra": [np.zeros(2, "float64"), "text"]}


def asked(**changes):
    values = {"timeout_seconds": 5.0, "max_measure_batches": 8, "candidate_prefetch": [2], **changes}
    return Config().replace({f"calibration.{name}": value for name, value in values.items()})


def sweep(data, config, resources=ROOMY, **hooks):
    return Sweep(subject_of(data), config, resources, **hooks).run()


# -- measuring


def test_so_many_batches_are_measured_after_the_warm_up_in_as_many_passes_as_it_takes():
    batches = Batches(5)
    found = measure(batches, PLAIN, replace(LIMITS, step_seconds=LEAST_SECONDS / LIMITS.most_batches), Observed())
    assert batches.given == PLAIN.warmup_batches + LIMITS.most_batches
    assert (found.batches, batches.passes) == (10, 3)
    assert found.batches_per_second == pytest.approx(found.batches / found.seconds)


def test_so_many_batches_as_come_within_a_blink_are_not_enough(now):
    found = measure(Paced(now, 2**-10), PLAIN, replace(LIMITS, to_the_end=True), Observed())
    assert (found.batches, found.seconds) == (256, LEAST_SECONDS)


def test_the_time_ends_a_measurement_and_what_came_until_then_counts(now):
    short = replace(LIMITS, timeout_seconds=8.0, most_batches=10**6, to_the_end=True)
    batches = Paced(now, 0.0625)
    found = measure(batches, PLAIN, short, Observed())
    assert batches.given == 1 + 8 * 16
    assert found.batches == batches.given - PLAIN.warmup_batches
    assert found.batches_per_second == 16
    late = measure(Paced(now, 0.0625), PLAIN, replace(LIMITS, timeout_seconds=1e-9), Observed())
    assert (late.batches, late.error) == (1, 1.0)


def test_a_simulated_step_is_the_least_that_a_batch_takes():
    found = measure(Batches(100), PLAIN, replace(LIMITS, step_seconds=0.02), Observed())
    assert found.batches_per_second <= 50


def test_a_rival_that_is_plainly_slower_ends_it_early_unless_everything_is_asked_for(now):
    long = replace(LIMITS, timeout_seconds=60.0, most_batches=10**6)
    found = measure(Paced(now, 0.01), PLAIN, replace(long, rival=1000.0), Observed())
    assert found.batches < 1000
    assert len(found.paces) == found.batches // block_size(PLAIN)
    assert found.error == standard_error(found.paces)
    whole = measure(Paced(now, 0.001), PLAIN, replace(long, most_batches=400, rival=1e6, to_the_end=True), Observed())
    assert whole.batches == 400


class Paced:
    """Batches that take `seconds` each by the clock `now`, the first `start` more; and how many were asked for."""

    def __init__(self, now, seconds, start=0.0):
        self.now, self.seconds, self.start, self.given = now, seconds, start, 0

    def __iter__(self):
        self.now[0] += self.start
        for _ in range(10**6):
            self.now[0] += self.seconds
            self.given += 1
            yield torch.zeros(1)


def test_what_starts_slowly_is_measured_longer_at_once(now):
    limits = replace(LIMITS, slow_start_seconds=100.0, growth=2.0)
    assert measure(Paced(now, 2**-5), PLAIN, limits, Observed()).batches == 10
    assert measure(Paced(now, 2**-5, start=1000.0), PLAIN, limits, Observed()).batches == 20


def test_a_cache_is_given_batches_to_fill_with_before_anything_counts(now):
    batches = Paced(now, 2**-5)
    found = measure(batches, PLAIN, LIMITS, Observed(), filling=40)
    assert batches.given == 40 + LIMITS.most_batches
    assert found.warmup_seconds == 39 * 2**-5


def test_the_bytes_of_a_batch_are_those_of_all_arrays_in_it():
    observed = Observed()
    measure(Batches(3), PLAIN, LIMITS, observed)
    assert observed.batch_bytes == 4 * 4 + 2 * 8
    assert batch_bytes((torch.zeros(3), {"a": torch.zeros(2, dtype=torch.float64)}, None)) == 12 + 16


def test_a_loader_without_batches_is_refused_and_a_stop_is_heard():
    with pytest.raises(ConfigError, match="no batch"):
        measure([], PLAIN, LIMITS, Observed())
    with pytest.raises(StoppedError):
        measure(Batches(9), PLAIN, replace(LIMITS, stopping=lambda: True), Observed())


# -- setting


def test_a_loader_is_set_and_keeps_everything_else():
    loader = DataLoader(Waiting(0), batch_size=3, shuffle=True, drop_last=True, generator=torch.Generator())
    changed = set_loader(loader, TWO)
    assert (changed.num_workers, changed.prefetch_factor) == (2, 3)
    assert changed.sampler is loader.sampler
    assert (changed.batch_size, changed.drop_last, changed.generator) == (3, True, loader.generator)
    back = set_loader(changed, PLAIN)
    assert (back.num_workers, back.prefetch_factor) == (0, None)


class Own(DataLoader):
    def __init__(self):
        super().__init__(Waiting(0), batch_size=2)


@pytest.mark.slow
@pytest.mark.parametrize(
    "loader", [Own(), DataLoader(Waiting(0), batch_sampler=BatchSampler(SequentialSampler(range(9)), 3, False))]
)
def test_a_loader_of_another_class_or_sampler_is_set_too_and_gives_the_same_batches(loader):
    changed = set_loader(loader, TWO)
    assert type(changed) is type(loader)
    assert (changed.num_workers, loader.num_workers) == (2, 0)
    for one, other in zip(changed, loader, strict=True):
        assert torch.equal(one[0], other[0])
        if float(one[0].sum()) > 100:
            break


def test_a_data_module_keeps_its_class_and_gives_loaders_that_are_set():
    data = apply_setting({"datamodule": WaitingData(0)}, TWO)["datamodule"]
    assert type(data) is WaitingData
    assert data.train_dataloader().num_workers == 2


def test_kits_own_data_takes_every_dial(own):
    setting = LoaderSetting(num_workers=0, prefetch_factor=2, requests_in_flight=5, batches_ahead=3, cache_bytes=MIB)
    data = apply_setting({"datamodule": PatchData(own())}, setting)["datamodule"]
    assert data.config.loader.requests_in_flight == 5
    assert data.config.loader.cache_bytes == MIB


def test_what_is_no_loader_of_torch_is_refused_with_the_way_out():
    with pytest.raises(ConfigError, match="give a DataLoader"):
        subject_of({"train_dataloaders": [1, 2, 3]})


# -- sweeping


def test_more_processes_are_chosen_where_samples_wait_and_the_evidence_is_whole():
    heard = []
    data = {"train_dataloaders": DataLoader(Waiting(0.05, 400), batch_size=2)}
    found = sweep(data, asked(candidate_workers=[0, 4]), report=heard.append)
    assert found.chosen.num_workers == 4
    assert list(found.measured) == heard
    assert [item.setting.num_workers for item in heard] == [0, 4]
    assert found.limits["worker_bytes"] > 0
    assert found.limits["batch_bytes"] == 2 * (8 + 1) * 4
    assert data["train_dataloaders"].num_workers == 0


def test_what_decides_is_measured_again_in_turn_and_said(now, monkeypatch):
    monkeypatch.setattr(time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    heard = []
    data = {"train_dataloaders": DataLoader(Waiting(0.001), batch_size=2)}
    few = asked(candidate_workers=[0, 4], max_measure_batches=80, timeout_seconds=60.0)
    found = sweep(data, few, report=heard.append, step=0.015)  # 15 of 17 ms: just below what is enough
    again = [item for item in found.measured if item.turns]
    assert [item.setting.num_workers for item in again] == [0, 4]
    assert sum(item.turns for item in again) == sum(item.turns for item in heard)
    assert any("in turn" in reason for reason in found.reasons)
    assert "turns" in repr(found).splitlines()[1]


def test_no_process_is_chosen_where_a_step_takes_longer_than_loading(now, monkeypatch):
    monkeypatch.setattr(time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    data = {"train_dataloaders": DataLoader(Waiting(0, 400), batch_size=2)}
    found = sweep(data, asked(candidate_workers=[0, 2]), step=0.03)
    assert found.chosen.num_workers == 0


def test_processes_that_do_not_fit_the_memory_are_left_out_with_the_reason():
    data = {"train_dataloaders": DataLoader(Waiting(0), batch_size=2)}
    short = replace_resources(free_bytes=MIB)
    found = sweep(data, asked(candidate_workers=[0, 1, 3]), short)
    assert [item.setting.num_workers for item in found.measured] == [0, 1]
    ((text, reason),) = found.dropped
    assert text == "3 processes × 2"
    assert "allowed" in reason
    free = sweep(data, asked(candidate_workers=[0, 1, 3], cap_workers_by_ram=False), short)
    assert [item.setting.num_workers for item in free.measured] == [0, 1, 3]


def replace_resources(**changes):
    return Resources(**{"cores": 2, "free_bytes": 8 << 30, "shared_bytes": 8 << 30, **changes})


def test_an_iterable_data_set_keeps_its_number_of_processes_unless_candidates_are_named():
    data = {"train_dataloaders": DataLoader(Endless(), batch_size=2)}
    found = sweep(data, asked())
    assert [item.setting.num_workers for item in found.measured] == [0]
    assert any("repeat its samples" in reason for reason in found.reasons)
    named = sweep(data, asked(candidate_workers=[0, 2]))
    assert [item.setting.num_workers for item in named.measured] == [0, 2]


def test_the_engines_own_dials_are_swept_before_processes(own):
    config = own(**{"calibration.candidate_workers": [0], "calibration.max_measure_batches": 4})
    found = sweep({"datamodule": PatchData(config)}, config)
    dials = {name for item in found.measured for name in item.setting.changes}
    assert "loader.requests_in_flight" in dials
    assert len({item.setting.batches_ahead for item in found.measured}) > 1
    assert any(item.setting.cache_bytes for item in found.measured)
    assert found.apply(config).loader.requests_in_flight == found.chosen.requests_in_flight


def test_an_error_in_the_data_is_raised_as_it_is():
    with pytest.raises(KeyError, match="no such sample"):
        sweep({"train_dataloaders": DataLoader(Broken(), batch_size=2)}, asked())


# -- keeping


def found_before():
    item = Measurement(
        setting=TWO, batches_per_second=12.5, batches=10, seconds=0.8, error=0.02, first_batch_seconds=0.1,
        whole_seconds=1.0,
    )  # fmt: skip
    slow = replace(item, setting=PLAIN, batches_per_second=2.0)
    return Calibration(
        chosen=TWO, measured=(slow, item), dropped=(("9 × 2", "too large"),), reasons=("fast",), limits={"cores": 2},
        identity={"machine": {"cores": 2}, "config": {"loader": {"batch_size": 4}}}, seconds=2.0,
    )  # fmt: skip


def test_a_result_reads_back_as_it_was_written(tmp_path):
    found = found_before()
    assert Calibration.load(found.save(tmp_path / "sub" / "result.json")) == found
    (tmp_path / "torn.json").write_text('{"chosen": ')
    with pytest.raises(TrialError, match="calibrate again"):
        Calibration.load(tmp_path / "torn.json")


def test_a_result_says_what_was_chosen_why_and_what_was_left_out():
    text = repr(found_before())
    assert "2 processes × 3, 12.5 batches/s" in text
    assert "→ 2 processes × 3" in text
    assert "left out 9 × 2: too large" in text
    assert "16%" in text
    assert "from an earlier run" in repr(replace(found_before(), reloaded=True))
    assert "<table" in found_before()._repr_html_()


def test_a_result_without_a_choice_changes_nothing():
    with pytest.raises(ConfigError, match="broken"):
        Calibration(chosen=None, error="broken").apply(Config())


def test_what_has_changed_since_is_named_with_both_values():
    before = found_before().identity
    assert changed(before, before) == []
    now = {"machine": {"cores": 8}, "config": {"loader": {"batch_size": 4}}, "data": {"samples": 3}}
    cores, samples = changed(before, now)
    assert cores == "machine.cores was 2, now 8"
    assert samples.startswith("data.samples ")
    assert "not there" in samples
    assert samples.endswith("now 3")


def test_the_dials_themselves_are_no_part_of_what_a_result_holds_for(own):
    config = own()
    mine = Share(2, 2, 4 << 30, 3 << 30, 4 << 30)
    subject = subject_of({"datamodule": PatchData(config)})

    def identity(**changes):
        return identity_of(subject, config.replace(changes), 1, mine)

    same = {"loader.num_workers": 3, "loader.requests_in_flight": 9, "calibration.enabled": True, "trial.max_steps": 7}
    assert changed(identity(), identity(**same)) == []
    assert changed(identity(), identity(**{"loader.batch_size": 3})) == ["config.loader.batch_size was 2, now 3"]
    other = identity_of(subject, config, 2, mine)
    assert changed(identity(), other) == ["config.ranks was 1, now 2"]


def test_an_edited_data_set_is_other_data():
    one = subject_of({"train_dataloaders": DataLoader(Waiting(0), batch_size=2)}).identity()
    other = subject_of({"train_dataloaders": DataLoader(Waiting(0, 7), batch_size=2)}).identity()
    assert changed(one, other) == ["samples was 4096, now 7"]
    assert one["source"]


def test_measuring_leaves_no_process_behind():
    before = set(psutil.Process().children())
    data = {"train_dataloaders": DataLoader(Waiting(0), batch_size=2, num_workers=2, persistent_workers=True)}
    sweep(data, asked(candidate_workers=[2]))

    def left():
        with contextlib.suppress(psutil.NoSuchProcess):
            new = set(psutil.Process().children()) - before
            return [child for child in new if "resource_tracker" not in " ".join(child.cmdline())]
        return ["one that has just ended"]

    wait_until(lambda: not left())
