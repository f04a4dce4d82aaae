"""kit.predict_speed through a dry run, and on this machine through a process that times the calls."""

import functools
import re
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from waiting import wait_until

import kit
from kit import tables
from kit.charts.style import png
from kit.errors import PlanError
from kit.machine.machine import hardware
from kit.machine.processes import MOST_SLOWNESS, slowed
from kit.memory.prediction import predict_memory
from kit.memory.replay.calls import OperatorCall, TensorSpec
from kit.memory.replay.cards import target_of
from kit.records.row import row_of_trial
from kit.speed import measure
from kit.speed.call_timer import ReadyCall, _arguments
from kit.speed.cost_table import CostTable
from kit.speed.links import find_link
from kit.speed.operators import step_of
from kit.speed.prediction import predict_speed, speed_beside, speed_of
from kit.speed.timing_job import _NOTHING, TimedCalls, _parts
from kit.speed.work import work_of
from kit.testing import TinyData, TinyModule
from kit.trial.meters import CpuPace, mean_pace


@pytest.fixture(scope="module")
def memory():
    config = kit.Config.make({"hardware": {"threads_per_rank": 1}, "trial": {"predict_memory": False}})
    return predict_memory(config, TinyModule, TinyData, device="A100-40GB")


def test_a_card_is_priced_without_it_and_more_devices_train_more_samples(config):
    found = {
        devices: predict_speed(config(), TinyModule, TinyData, device="A100-40GB", devices=devices)
        for devices in (1, 2)
    }
    for speed in found.values():
        assert speed.low_seconds <= speed.step_seconds <= speed.high_seconds
        assert sum(speed.time.by_kind.values()) == pytest.approx(speed.time.busy_seconds)
        assert sum(speed.time.by_module.values()) == pytest.approx(speed.time.busy_seconds)
    assert 1 < found[2].samples_per_second / found[1].samples_per_second < 2
    assert any("ddp" in reason for reason in found[2].reasons)
    assert found[1].bound == "host"
    assert "8 × " not in repr(found[2])


def test_a_store_in_a_folder_has_no_network_before_it(config, tmp_path):
    config = config().replace({
        "data.url": str(tmp_path / "one.zarr"), "data.patch": {"dim_0": 2, "dim_1": 16, "dim_2": 16},
        "model.arguments": {"variables": 1, "width": 4, "depth": 1}, "data.samples_per_epoch": 64,
        "chunking.latency_seconds": 10.0,
    })  # fmt: skip
    kit.build(config, source=np.random.default_rng(0).random((64, 32, 32), "f4"), progress=False)
    speed = predict_speed(config, device="A100-40GB")
    assert 0 < speed.time.loader_seconds < 10
    assert "folder" in repr(speed)


def test_another_batch_or_card_costs_no_process(memory):
    both = [speed_of(memory.recording, target_of(card)) for card in ("T4-16GB", "H100-80GB")]
    assert both[0].time.busy_seconds > both[1].time.busy_seconds
    assert speed_beside(memory, kit.Config()).device == "A100-40GB"


def test_a_size_is_no_speed(memory):
    with pytest.raises(PlanError, match="name a card"):
        speed_of(memory.recording, target_of("24 GiB"))


def test_a_trial_of_the_model_corrects_it_and_one_outside_the_range_is_told(memory):
    speed = speed_of(memory.recording, target_of("A100-40GB"))
    measured = speed.low_samples_per_second / 3
    assert not speed.contains(measured)
    again = speed.corrected(measured)
    assert again.samples_per_second == pytest.approx(measured)
    assert again.contains(measured)
    assert "corrects" in again.reasons[0]


def test_what_is_waited_for_the_last_rank_is_said(memory):
    def reasons(lateness):
        link = replace(find_link("loopback"), lateness=lateness)
        two = speed_of(memory.recording, target_of("A100-40GB"), devices=2, link=link, strategy="ddp")
        return " ".join(two.reasons)

    assert "for the last of them" in reasons(0.1)
    assert "for the last of them" not in reasons(0.0)


def test_it_is_drawn_by_part_and_by_line(memory):
    speed = speed_of(memory.recording, target_of("A100-40GB"))
    for kind in ("", "lines"):
        chart = speed.figure(kind)
        assert len(png(chart)) > 5000
        assert speed.sentence[:20] in " ".join(text.get_text().replace("\n", " ") for text in chart.texts)


def test_a_part_opens_to_its_lines_whose_seconds_add_up_to_it_forward_and_backward(memory):
    speed = speed_of(memory.recording, target_of("A100-40GB"))
    page = speed._repr_html_()
    assert page.count("<details>") >= 2, "the layer and the optimizer"
    assert "testing.py, line " in page
    assert "<code>" in page
    step = speed.time.step
    layer = [name == "layer" for name in (step.names[number] for number in step.module.tolist())]
    lines = {step.names[number] for number in step.line[layer].tolist()}
    assert len(lines) == 1, "its backward pass has the line that called it"
    assert ", line " in lines.pop()


def test_calls_are_timed_in_a_process_once_and_remembered(config, monkeypatch, capsys):
    monkeypatch.setattr(measure, "BUSY_CORES", float("inf"))
    monkeypatch.setattr(tables, "_SILENT_SECONDS", 0.0)
    settings = config().replace({"hardware.threads_per_rank": 1})
    step = step_of(predict_memory(settings, TinyModule, TinyData).recording)
    path = measure._path(settings, measure.take_devices(settings).resolved)
    measure._keep(path, CostTable("this CPU", {}, 1e-5, 0.0, 1e-3))  # the host's costs take a minute
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    taken = measure.table_here(settings, step, seconds=2.0)
    assert re.search("operators: .* so far, it may take", capsys.readouterr().err), "nobody waits in the dark"
    timed = [call for call in step.calls if call in taken.table.measured]
    assert timed
    assert all(seconds > 0 for seconds in taken.table.measured.values())
    assert measure.table_known(settings) == taken.table
    monkeypatch.setattr(measure, "_measured", functools.partial(pytest.fail, "measured again"))
    assert measure._missing(step, taken.table) == []
    speed = predict_speed(settings, TinyModule, TinyData, measure_seconds=0.0)
    assert speed.time.sources["measured"] > 0
    assert "this CPU" in speed.costs


def test_two_ranks_time_calls_beside_each_other_and_what_joins_them(config, monkeypatch):
    monkeypatch.setattr(measure, "BUSY_CORES", float("inf"))
    alone, two = config(), config(ranks=2)
    step = step_of(predict_memory(alone, TinyModule, TinyData).recording)
    path = measure._path(alone, measure.take_devices(alone).resolved)
    first = dict.fromkeys(step.calls[:3], 1e-6)
    measure._keep(path, CostTable("this CPU", first, 1e-5, 0.0, 1e-3))  # the host's costs take a minute
    speed = predict_speed(two, TinyModule, TinyData, measure_seconds=1.0)
    assert "measured" in " ".join(speed.reasons)
    assert speed.time.exchange_seconds > 0
    together = measure.table_known(two, 2)
    assert together.link.measured
    assert together.link.bytes_per_second > 0
    assert CostTable.of(together.to_json()) == together
    assert together.backward_call_seconds >= 1e-5
    assert measure.table_known(alone).link is None
    monkeypatch.setattr(measure, "_measured", functools.partial(pytest.fail, "measured again"))
    assert predict_speed(two, TinyModule, TinyData, measure_seconds=0.0).step_seconds > 0


def test_what_one_rank_took_is_measured_again_among_several(memory):
    step = step_of(memory.recording)
    among = CostTable("2 ranks", dict.fromkeys(step.calls, 1e-3), of_one_rank=frozenset(step.calls))
    missing = measure._missing(step, among)
    assert missing
    first, *others = missing
    known = among.with_calls({first: 2e-3})
    assert [among.knows(first), known.knows(first)] == [False, True]
    assert set(measure._missing(step, known)) == set(others)
    assert CostTable.of(known.to_json()) == known
    costs = [table.cost(first, work_of(first)) for table in (among, known)]
    assert [cost.source for cost in costs] == ["near", "measured"]
    assert costs[0].doubt > costs[1].doubt
    assert among.slowed(2.0).of_one_rank == among.of_one_rank


def test_more_ranks_than_cores_measure_among_all_of_them_what_joins_them(config, monkeypatch):
    monkeypatch.setattr(measure, "BUSY_CORES", float("inf"))
    alone, three = (config(ranks=ranks).replace({"hardware.threads_per_rank": hardware().cores}) for ranks in (1, 3))
    for ranks in (1, 2):
        one = measure._of(alone, ranks, 3)
        path = measure._path(one, measure.take_devices(one).resolved)
        measure._keep(path, CostTable("this CPU", {}, 1e-5, 0.0, 1e-3))  # the host's costs take a minute
    assert measure.table_known(three, 3).link is None
    found = measure.table_here(three, ranks=3, seconds=0.0).table
    assert "3 ranks" in found.link.name
    assert found.link.latency_seconds >= 0
    assert found.link.lateness >= 0
    assert measure.table_known(three, 3) == found
    monkeypatch.setattr(measure, "_measured", functools.partial(pytest.fail, "measured again"))
    assert measure.table_here(three, ranks=3, seconds=0.0).table == found


def test_what_was_measured_beside_other_programs_serves_this_kernel_alone(config):
    path = measure._path(config(), measure.take_devices(config()).resolved)
    table = CostTable("this CPU", {}, 1e-5, 0.0, 1e-3, busy_cores=1.5)
    measure._keep(path, table)
    assert not path.exists()
    assert measure.table_known(config()) == table
    measure._keep(path, slower := replace(table, busy_cores=0.0).slowed(2.0))
    assert measure.table_known(config()) == slower == measure._read(path)


def measured_again(*_, **__):
    raise AssertionError("measured again")


def test_what_was_measured_beside_other_programs_answers_again_and_is_said(config, monkeypatch):
    monkeypatch.setattr(measure, "BUSY_CORES", -1.0)
    step = step_of(predict_memory(config(), TinyModule, TinyData).recording)
    path = measure._path(config(), measure.take_devices(config()).resolved)
    measure._keep(path, CostTable("this CPU", {}, 1e-5, 0.0, 1e-3, busy_cores=1.5))  # the host's take a minute
    first = measure.table_here(config(), step, seconds=2.0)
    assert first.table.backward_call_seconds == 1e-5
    assert first.table.measured.keys() & set(step.calls)
    assert first.table.busy_cores >= 1.5
    with monkeypatch.context() as patched:
        patched.setattr(measure, "_measured", measured_again)
        second = measure.table_here(config(), step, seconds=2.0)
        said = predict_speed(config(), TinyModule, TinyData)
        assert "other programs" in " ".join(said.reasons)
        trial = kit.fit(config(predict_memory=True), TinyModule, TinyData).wait()
        wait_until(trial.paths.prediction.is_file)
        assert row_of_trial(trial)["other_cores_when_predicted"] == said.busy_cores == first.table.busy_cores
    assert (second.table, second.quiet) == (first.table, False)
    assert not path.exists()


def test_what_joins_ranks_is_measured_once_beside_other_programs(config, monkeypatch):
    monkeypatch.setattr(measure, "BUSY_CORES", -1.0)
    three = config(ranks=3).replace({"hardware.threads_per_rank": hardware().cores})
    for ranks in (1, 2):
        one = measure._of(three, ranks, 3)
        path = measure._path(one, measure.take_devices(one).resolved)
        measure._keep(
            path, CostTable("this CPU", {}, 1e-5, 0.0, 1e-3, busy_cores=1.5)
        )  # the host's costs take a minute
    first = measure.table_here(three, ranks=3, seconds=0.0)
    monkeypatch.setattr(measure, "_measured", measured_again)
    second = measure.table_here(three, ranks=3, seconds=0.0)
    assert second.table == first.table
    assert not second.quiet
    with pytest.raises(AssertionError, match="measured again"):
        measure.table_here(three, ranks=3, seconds=0.0, again=True)


def test_calls_timed_when_others_are_quiet_are_written_and_serve_all(config, monkeypatch):
    monkeypatch.setattr(measure, "BUSY_CORES", 1e9)
    step = step_of(predict_memory(config(), TinyModule, TinyData).recording)
    path = measure._path(config(), measure.take_devices(config()).resolved)
    table = CostTable("this CPU", {}, 1e-5, 0.0, 1e-3)
    measure._keep(path, table)
    other = OperatorCall("other::call", (), (), ())
    monkeypatch.setitem(measure._busy_tables, path, replace(table.with_calls({other: 1.0}), busy_cores=1e12))
    measure.table_here(config(), step, seconds=2.0)
    assert measure._read(path).measured.keys() & set(step.calls)
    assert other not in measure._read(path).measured, "that was measured beside others"
    assert measure.table_here(config(), step, seconds=2.0).quiet


def test_ranks_beyond_the_cores_take_turns(config, monkeypatch):
    monkeypatch.setattr(measure, "hardware", lambda: replace(hardware(), cores=2))
    assert measure._at_once(config(ranks=4), 4) == (2, 2)
    assert measure._at_once(config(ranks=2), 2)[1] == 1
    assert measure._at_once(config(), 1)[1] == 1


class Planted(CpuPace):
    """A CPU whose product takes the seconds that a test gives, one after the other, and then at its fastest."""

    def __init__(self, *seconds):
        super().__init__(torch.device("cpu"), fastest_seconds=1.0)
        self.left = list(seconds)

    def seconds(self, repeats=4):
        return self.left.pop(0) if self.left else 1.0


def calls_of(config):
    step = step_of(predict_memory(config(), TinyModule, TinyData).recording)
    return [call for call, work in zip(step.calls, step.call_work, strict=True) if work.kind != "view"]


def test_each_time_that_a_call_was_made_has_the_pace_of_its_moment(config):
    calls = calls_of(config)[:2]
    timed = TimedCalls(Planted(2.0, 2.0, 2.0))
    timed.time(calls, torch.device("cpu"), 60.0)
    assert timed.each_pace_seconds[:2] == [1.5, 1.0], "before and after; the first round does not count"
    for call in calls:
        assert [pace for _, pace in timed.samples[call]] == timed.each_pace_seconds
    assert TimedCalls(Planted(), each_pace_seconds=[2.0, 1.0, 1.0]).slowness == 2.0


def test_a_moment_in_which_the_machine_stood_still_is_no_pace(config):
    calls = calls_of(config)[:2]
    timed = TimedCalls(Planted(1.0, 1.0, 300.0, 2.0, 300.0, 300.0))
    timed.time(calls, torch.device("cpu"), 60.0)
    assert timed.each_pace_seconds[:3] == [2.0, MOST_SLOWNESS, 1.0], "without that moment, or no longer than slow ones"
    assert timed.slowness <= MOST_SLOWNESS
    kept = CostTable("this CPU", {}, pace_seconds=1e-4, slowness=300.0).to_json()
    assert CostTable.of(kept).slowness == MOST_SLOWNESS
    assert mean_pace([1.0, 2.0, 300.0]) == pytest.approx((1 + 2 + MOST_SLOWNESS) / 3)
    assert mean_pace([]) is None


def test_calls_cost_what_they_do_at_the_fastest_but_memory_is_as_fast_as_it_was():
    large = TensorSpec((1 << 22,), "float32")
    copy = OperatorCall("aten::clone", (large,), (), (large,))
    square = TensorSpec((64, 64), "float32")
    product = OperatorCall("aten::mm", (square, square), (), (square,))
    timed = TimedCalls(Planted(), samples={copy: [(0.01, 2.0)], product: [(1.0, 2.0)]})
    found = timed.at_fastest()
    assert found[copy] == pytest.approx(0.01 / slowed(2.0, 0.0))
    assert found[product] == pytest.approx(1.0 / slowed(2.0), rel=1e-3)
    assert found[product] < 0.6


def test_a_call_takes_its_median_without_what_it_takes_to_make_one_that_does_nothing():
    spec = TensorSpec((64, 64), "float32")
    call = OperatorCall("aten::tanh", (spec,), (), (spec,))
    took = [(2.0, 1.0), (40.0, 1.0), (3.0, 1.0), (3.0, 1.0), (4.0, 1.0)]  # once the machine stood still
    timed = TimedCalls(Planted(), samples={call: took, _NOTHING: [(1.0, 1.0)]})
    assert timed.at_fastest() == {call: pytest.approx(2.0)}


def calls_with(*sizes):
    specs = [TensorSpec((size,), "uint8") for size in sizes]
    return [OperatorCall("aten::clone", (spec,), (), (spec,)) for spec in specs]


def test_a_step_is_played_in_its_order_at_some_places_and_in_parts_that_fit_the_memory():
    often, once, large = calls_with(64, 8, (1 << 29) - 32)
    (part,) = _parts([once, *[often] * 100, once], torch.device("cpu"))
    assert (part[0], part[-1], part.count(once), part.count(often)) == (once, once, 2, 8)
    assert _parts([often, large, often, once], torch.device("cpu")) == [[often, often], [large, once]]
    assert _parts([often, once, often], torch.device("cuda")) == [[often], [once]]
    assert _parts([], torch.device("cpu")) == []


@pytest.mark.parametrize(("paces", "lost"), [((2.0, 2.0), 0.0), ((3.0, 1.5), 0.0), ((3.0, 3.0), 1 - 1 / 2.6)])
def test_what_is_timed_on_cores_that_a_neighbour_took_most_of_counts_as_busy(paces, lost):
    spec = TensorSpec((64, 64), "float32")
    calls = [OperatorCall(f"aten::{name}", (spec,), (), (spec,)) for name in ("tanh", "exp")]
    timed = TimedCalls(Planted(), samples={call: [(1.0, pace)] for call, pace in zip(calls, paces, strict=True)})
    assert timed.lost_cores() == pytest.approx(lost * torch.get_num_threads())
    assert TimedCalls(Planted()).lost_cores() == 0


def test_a_gpu_and_several_ranks_have_no_pace():
    for pace in (CpuPace(torch.device("cuda")), CpuPace(torch.device("cpu"), ranks=2, fastest_seconds=1e-9)):
        assert (pace.seconds(), pace.slowness(1.0)) == (0.0, 1.0)
    here = CpuPace(torch.device("cpu"))
    assert here.slowness(here.seconds()) >= 1
    assert CpuPace(torch.device("cpu"), fastest_seconds=1e-9).slowness(here.seconds()) > 1


def test_the_range_reaches_to_the_slow_moments_of_a_machine(memory):
    table = CostTable("this CPU", {}, 1e-5, 1e-5, 1e-3, pace_seconds=1e-4, slowness=2.0)
    target = replace(target_of("T4-16GB"), device_kind="cpu")
    found = {
        slowness: speed_of(memory.recording, target, costs=replace(table, slowness=slowness)) for slowness in (1.0, 2.0)
    }
    assert found[1.0].step_seconds == found[2.0].step_seconds
    assert found[1.0].low_seconds == found[2.0].low_seconds
    assert 0 < found[2.0].computing_fraction <= 1
    widened = slowed(2.0, found[2.0].computing_fraction)
    assert found[2.0].high_seconds == pytest.approx(widened * found[1.0].high_seconds)
    assert any("neighbours" in reason for reason in found[2.0].reasons)
    assert not any("neighbours" in reason for reason in found[1.0].reasons)


def test_every_call_of_a_step_but_views_can_be_made_again(config):
    step = step_of(predict_memory(config(), TinyModule, TinyData).recording)
    failed = [
        call.operator for call, work in zip(step.calls, step.call_work, strict=True)
        if work.kind != "view" and ReadyCall.of(call, torch.device("cpu")) is None
    ]  # fmt: skip
    assert failed == []


def test_what_a_recurrent_kernel_keeps_for_its_backward_pass_holds_ordinary_numbers():
    values, kept = TensorSpec((4, 2, 8), "float32"), TensorSpec((1024,), "uint8")
    call = OperatorCall("aten::mkldnn_rnn_layer_backward", (values, kept), (), ())
    (_, reserve), _ = _arguments(call, torch.device("cpu"))
    numbers = reserve.view(torch.float32).abs()
    assert bool(((numbers > 0.1) & (numbers < 10)).all()), "what is nearly zero takes a processor twice as long"
