"""predict_run from real trials: what stands in a row, what is measured beside it, and what is refused."""

import csv
import dataclasses
import io
import math
import pickle
import re

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from kit.charts.rows import scaling_figure
from kit.config import Config
from kit.errors import ConfigError, PlanError, TrialError
from kit.memory.alongside import fit
from kit.records.results import results
from kit.records.timing import timing
from kit.speed.prediction import predict_speed
from kit.studies.scaling.predict import predict_run, strategy_for
from kit.testing import TinyData, TinyModule


class Slow(TinyModule):
    def __init__(self):
        super().__init__(seconds=0.004)


def tried(config, ranks=1, **trial):
    settings = {"max_steps": 14, "warmup_steps": 3, "count_work": False, "measure_memory": False, **trial}
    return fit(config(ranks, **settings), Slow, TinyData).wait()


@pytest.fixture
def one(config):
    return tried(config)


@pytest.mark.slow
def test_a_run_is_foretold_with_time_money_energy_and_what_holds_it_up(one):
    run = predict_run(
        one, devices=[4, 1, 2], epochs=3, prices={"per_device_hour": 2, "currency": "EUR"}, memory=False,
        cores_per_node=64, power={"grid": "France"},
    )  # fmt: skip
    assert [row.devices for row in run.rows] == [1, 2, 4]
    assert [row.strategy for row in run.rows] == ["none", "ddp", "ddp"]
    assert run.samples_per_epoch == 4096
    first, last = run.rows[0], run.row(4)
    assert last.total_seconds == pytest.approx(3 * last.seconds_per_epoch)
    assert last.money == pytest.approx(2 * last.device_hours)
    assert last.device_hours == pytest.approx(4 * last.total_seconds / 3600)
    assert 0 < last.watt_hours[1] <= last.watt_hours[0] <= last.watt_hours[2]
    assert last.grams == pytest.approx(last.watt_hours[0] / 1000 * 56)
    assert first.efficiency == pytest.approx(1)
    assert all(row.low_seconds <= row.total_seconds <= row.high_seconds for row in run.rows)
    assert run.caps[0].devices == 1
    assert "France" in str(run)
    assert "EUR" in str(run)
    assert "no step waited" not in str(run)
    assert not run.checks


@pytest.mark.slow
def test_what_was_measured_on_more_devices_stands_beside_what_fewer_foretold(config, one):
    two = tried(config, 2)
    run = predict_run([two, one], devices=[1, 2, 8], memory=False)
    (check,) = run.checks
    assert check.point.devices == 2
    assert check.ratio == pytest.approx(check.measured_seconds / check.point.seconds_per_batch)
    assert run.scaling.fitted
    assert "fitted to 1, 2 devices" in str(run)
    assert "ratio" in str(run)
    assert "ratio" in run._repr_html_()
    one.config = one.config.replace({"hardware.accelerator": "auto"})  # which came to the same device
    assert predict_run([two, one], devices=[1], memory=False).checks


def test_trials_repeated_on_one_count_are_averaged_and_rows_and_folders_are_taken(config, one):
    again = tried(config)
    both = predict_run([one, again], devices=[1], memory=False)
    alone = [predict_run(run, devices=[1], memory=False) for run in (one, str(again.run_directory))]
    seconds = [run.scaling.base.train_seconds for run in (*alone, both)]
    assert seconds[2] == pytest.approx((seconds[0] + seconds[1]) / 2)
    rows = results(one.config.trial.folder)
    assert predict_run(rows[0], devices=[1], memory=False).rows
    assert len(predict_run(rows, devices=[1], memory=False).scaling.steps) == 1


def test_a_machine_that_others_used_is_told(one):
    [used] = (event for event in one.events if event["kind"] == "cpu_used")
    used["machine_seconds"] = used["family_seconds"]
    assert "other programs" not in str(predict_run(one, devices=[1], memory=False))
    used["machine_seconds"] += 1.4 * used["wall_seconds"]
    assert f"used 1.4 cores while {one.name}" in str(predict_run(one, devices=[1], memory=False))


def test_validation_and_checkpoints_count_as_the_trial_measured_them(one):
    """A batch of the epoch takes what it takes in the trial, with its share of both."""
    for event in one.steps:  # as on a machine of which nobody else takes anything
        alike = {name: 0.0 for name in event if name.endswith("_seconds")}
        event.update(alike | {"forward_seconds": 0.02, "step_seconds": 0.02})
    bare = predict_run(one, devices=[1], memory=False)
    assert "validation" not in str(bare)
    for event in one.steps:
        event["validation_seconds"] += 0.5 * (event["step"] > one.config.trial.warmup_steps + 1)
    one.event("fit_ended")["validation_seconds"] += 0.5
    run = predict_run(one, devices=[1], memory=False)
    batches = bare.rows[0].seconds_per_epoch / bare.scaling.base.seconds
    more = run.rows[0].seconds_per_epoch - bare.rows[0].seconds_per_epoch
    assert more / batches == pytest.approx(0.5, rel=0.01), "of so many steps as many, the last after them"
    assert run.rows[0].low_seconds > bare.rows[0].high_seconds
    assert re.search("of validation, .* in the trial", str(run))
    whole = timing(one).whole_step_seconds
    assert run.rows[0].seconds_per_epoch == pytest.approx(batches * whole, rel=0.05)


def test_a_validation_that_the_trial_left_out_is_said_not_to_count(one):
    one.event("fit_started")["left_out_validation"] = True
    assert "validation is not counted" in str(predict_run(one, devices=[1], memory=False))


def test_watts_that_the_trial_measured_are_billed_in_place_of_rated_ones(one):
    started = one.event("fit_started")
    started.update(accelerator="gpu", device="NVIDIA H100 80GB HBM3")
    rated = predict_run(one, devices=[2], memory=False)
    assert "700 W rated" in str(rated)
    for rank, joules in enumerate((600.0, 660.0)):
        one.events.append({"kind": "energy_measured", "time": 0.0, "rank": rank, "joules": joules, "seconds": 2.0})
    run = predict_run(one, devices=[2], memory=False, power={"server_watts": 0, "pue": 1})
    assert run.power.device_watts == pytest.approx(315)
    assert run.rows[0].watt_hours == pytest.approx([315 * run.rows[0].device_hours] * 3)
    assert "measured by NVML" in str(run)


def test_memory_says_whether_each_count_fits(one):
    said = predict_run(one, devices=[1, 2])
    assert said.rows[0].fits is None
    assert "pass module= and data=" in str(said)
    run = predict_run(one, devices=[1, 2], module=Slow, data=TinyData)
    assert [row.memory.world_size for row in run.rows] == [1, 2]
    assert all(row.fits for row in run.rows)


def test_what_kits_own_loader_asks_of_the_store_is_a_limit(own):
    trial = fit(own().replace({"trial.max_steps": 12, "trial.warmup_steps": 3})).wait()
    run = predict_run(trial, devices=[1, 64], memory=False, cores_per_node=10_000)
    (row,) = results(trial.config.trial.folder)
    assert run.scaling.loading.requests == pytest.approx(row["requests_per_sample_measured"] * run.batch_size)
    assert run.scaling.loading.requests_per_second == 5000
    assert run.samples_per_epoch == 64
    assert "store requests/s" in dict(run.rows[0].seconds_by_limit)


def test_a_table_goes_to_csv_and_a_chart(one, tmp_path):
    run = predict_run(one, devices=[1, 2, 4], memory=False, prices=1.0)
    text = run.to_csv(tmp_path / "new" / "run.csv")
    lines = list(csv.DictReader(io.StringIO(text)))
    assert (tmp_path / "new" / "run.csv").read_text() == text
    assert [line["devices"] for line in lines] == ["1", "2", "4"]
    assert float(lines[0]["total_seconds"]) == run.rows[0].total_seconds
    time, cost = scaling_figure(run).axes
    assert time.get_xscale() == "log"
    assert cost.get_title(loc="left") == "money"
    assert len(cost.patches) == 3
    assert "perfect scaling" in {label.get_text() for label in time.get_legend().get_texts()}


def test_a_range_that_begins_at_nothing_is_drawn(one):
    run = predict_run(one, devices=[1, 2], memory=False)
    vague = dataclasses.replace(run, rows=[dataclasses.replace(row, low_seconds=0.0) for row in run.rows])
    time = scaling_figure(vague).axes[0]
    assert 0 < time.get_ylim()[0] <= min(row.total_seconds for row in run.rows)


def test_a_range_between_two_round_times_has_others_between_them(one):
    run = predict_run(one, devices=[1, 2], memory=False)
    day = 86_400.0
    days = {"low_seconds": 1.3 * day, "total_seconds": 2.0 * day, "high_seconds": 3.6 * day}
    time = scaling_figure(dataclasses.replace(run, rows=[dataclasses.replace(row, **days) for row in run.rows])).axes[0]
    assert [label.get_text() for label in time.get_yticklabels()] == ["1 day", "2 days", "3 days", "4 days"]


@pytest.mark.parametrize(
    ("given", "devices", "strategy"),
    [("ddp", 1, "none"), ("none", 4, "ddp"), ("fsdp", 4, "fsdp"), ("fsdp:2:2", 8, "fsdp:4:2"), ("fsdp:2:4", 6, "fsdp")],
)  # fmt: skip
def test_a_strategy_stays_the_same_idea_on_other_counts(given, devices, strategy):
    assert strategy_for(given, devices) == strategy


@pytest.mark.parametrize("runs", [None, 3, Config(), [None], [Config()], {"state": "COMPLETE"}, [{}]])
def test_what_is_no_run_is_refused_with_what_is(runs):
    with pytest.raises(ConfigError, match=r"runs: .*kit\.fit.*kit\.results"):
        predict_run(runs, devices=[1])


def test_what_cannot_be_foretold_is_refused(config, one):
    for devices in ([], [0], [5000]):
        with pytest.raises(ConfigError, match="devices"):
            predict_run(one, devices=devices)
    assert [row.devices for row in predict_run(one, devices=2, memory=False).rows] == [2]
    for epochs in (0, "20", 2.5):
        with pytest.raises(ConfigError, match="epochs"):
            predict_run(one, epochs=epochs)
    with pytest.raises(ConfigError, match="devices_per_node: '8'"):
        predict_run(one, devices=[1], devices_per_node="8")
    with pytest.raises(ConfigError, match="none to predict"):
        predict_run([])
    with pytest.raises(ConfigError, match="no example"):
        predict_run(one, devices=[1], prices="nobody", memory=False)
    with pytest.raises(PlanError, match="no link"):
        predict_run(one, devices=[1], within="string", memory=False)
    with pytest.raises(PlanError, match="not predicted"):
        predict_run(one, devices=[1], memory=False).row(2)
    other = fit(one.config.replace({"training.seed": 99}), Slow, TinyData).wait()
    with pytest.raises(ConfigError, match=r"differ in training\.seed"):
        predict_run([one, other])


def test_a_trial_that_was_all_warm_up_tells_nothing(config):
    trial = tried(config, max_steps=4, warmup_steps=3)
    trial.steps[:] = [event for event in trial.steps if event["step"] <= 3]
    with pytest.raises(TrialError, match="warm-up"):
        predict_run(trial)


def test_a_run_of_steps_takes_as_many_on_any_number_of_devices(config):
    asked = config(max_steps=14, warmup_steps=3, count_work=False, measure_memory=False)
    trial = fit(asked.replace({"training.max_steps": 500}), Slow, TinyData).wait()
    run = predict_run(trial, devices=[1, 4], memory=False)
    for row in run.rows:
        batches = math.ceil(4096 / 4 / row.devices)
        assert row.total_seconds == pytest.approx(500 / batches * row.seconds_per_epoch)
    assert ": 500 steps, 4 a batch" in repr(run)
    assert predict_run(trial, devices=[1], epochs=2, memory=False).steps == 0


class Endless(IterableDataset):
    def __iter__(self):
        while True:
            yield torch.zeros(8), torch.zeros(1)


def test_an_epoch_before_any_trial_is_as_long_as_the_loader_says(config):
    def run_on(data):
        speed = predict_speed(config(), TinyModule, data, device="A100-40GB")
        return predict_run(speed, devices=[1, 2], epochs=3, memory=False)

    assert run_on(TinyData).samples_per_epoch == 4096
    assert "checkpoints are not counted" in str(run_on(TinyData))
    samples = TensorDataset(torch.zeros(60, 8), torch.zeros(60, 1))
    short = run_on(DataLoader(samples, batch_size=20))
    assert short.samples_per_epoch == 60
    assert short.row(1).total_seconds == pytest.approx(3 * 3 * 20 / short.row(1).samples_per_second)
    with pytest.raises(ConfigError, match="samples_per_epoch"):
        run_on(DataLoader(Endless(), batch_size=4))


def test_before_any_trial_predicted_speeds_give_the_run(config):
    settings = config().replace({"training.max_steps": 1000})

    def speed(count, **changes):
        asked = settings.replace({path.replace("__", "."): value for path, value in changes.items()})
        return predict_speed(asked, TinyModule, TinyData, device="A100-40GB", devices=count)

    speeds = [speed(1), speed(2)]
    run = predict_run(speeds[0], devices=[1, 2], prices=2.0)
    one, two = run.rows
    assert one.total_seconds == pytest.approx(1000 * speeds[0].step_seconds)
    assert one.low_seconds < one.total_seconds < one.high_seconds
    assert one.money == pytest.approx(2.0 * one.total_seconds / 3600)
    assert one.watt_hours[0] > 0
    assert one.memory is None
    assert f"bound by {speeds[0].bound}" in str(run), "a module so small waits for the host"
    assert two.total_seconds == pytest.approx(1000 * speeds[1].step_seconds)
    across = 1000 * speed(16).step_seconds
    for one in speeds:  # whatever number it is asked from
        row = predict_run(one, devices=[1, 16], memory=False).row(16)
        assert row.total_seconds == pytest.approx(across)
        assert row.low_seconds < across < row.high_seconds
    kept = pickle.loads(pickle.dumps(speeds[0]))
    assert predict_run(kept, devices=[1, 16], memory=False).row(1).total_seconds == run.row(1).total_seconds
    both = predict_run(speeds, devices=[1, 2, 4], memory=False)
    assert not both.checks, "nothing was measured"
    assert both.row(2).total_seconds == pytest.approx(1000 * speeds[1].step_seconds, rel=0.05)
    assert both.row(4).samples_per_second > both.row(2).samples_per_second
    with pytest.raises(ConfigError, match="differ"):
        predict_run([speeds[0], speed(2, levers__accumulate_grad_batches=2)])
