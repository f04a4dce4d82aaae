"""Numbers of torch's traces: of made ones whose answer is known, and of one that torch has made."""

import gzip
import json
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kit.errors import TrialError
from kit.studies.profiling.trace import read_trace
from kit.studies.profiling.trace_events import merge


def bar(name, begin, length, kind="cpu_op", thread=1, **args):
    return {"ph": "X", "name": name, "cat": kind, "ts": begin, "dur": length, "pid": 1, "tid": thread, "args": args}


def note(name, begin, length):
    return bar(name, begin, length, "user_annotation")


FETCH, EPOCH = "[pl][profile][_TrainingEpochLoop].train_dataloader_next", "[pl][profile]run_training_epoch"


@pytest.fixture
def write(tmp_path):
    def make(*events, name="made.pt.trace.json"):
        path = tmp_path / name
        path.write_text(json.dumps({"traceEvents": list(events)}))
        return path

    return make


def on_gpu():
    """Two steps of 10 ms: 4 ms of loading with an idle GPU, 5 ms of kernels, 1 ms in which the host waits for them."""
    for number in range(2):
        start = 10_000 * number
        yield note(f"ProfilerStep#{number}", start, 10_000)
        yield note(EPOCH, start, 10_000)
        yield note(FETCH, start, 4_000)
        yield bar("aten::mm", start + 3_900, 1_000, **{"External id": number})
        yield bar("gemm", start + 4_000, 5_000, "kernel", thread=7, **{"External id": number})
        yield bar("cudaStreamSynchronize", start + 4_100, 5_900, "cuda_runtime")


def test_a_gpu_that_waits_for_data_and_for_the_host_says_so(write):
    trace = read_trace(write(*on_gpu()))
    assert trace.device == "gpu"
    assert trace.steps == 2
    assert trace.busy_fraction == pytest.approx(0.5)
    assert trace.gap_fraction("data loading") == pytest.approx(0.4)
    assert trace.gap_fraction("host sync") == pytest.approx(0.1)
    assert trace.syncs_per_step == 1
    assert re.search(r"GPU works 50% .*\(40%\) .*data loading", trace.finding)


def test_copies_from_the_host_are_told_apart_by_memory_and_by_what_is_computed_meanwhile(write):
    def copy(name, begin, length):
        return bar(f"Memcpy {name}", begin, length, "gpu_memcpy", thread=8)

    trace = read_trace(
        write(
            note("ProfilerStep#0", 0, 1000), bar("gemm", 300, 400, "kernel", thread=7),
            copy("HtoD (Pageable -> Device)", 0, 100), copy("HtoD (Pinned -> Device)", 200, 200),
            copy("DtoH (Device -> Pageable)", 800, 100),
        )
    )  # fmt: skip
    assert trace.unpinned_copy_seconds == pytest.approx(100e-6)
    assert trace.bare_copy_seconds == pytest.approx(200e-6), "of the second copy half is hidden by the kernel"


def test_a_trace_of_torch_1_8_says_the_same_in_its_own_words(write):
    now = {"cpu_op": "Operator", "kernel": "Kernel", "cuda_runtime": "Runtime", "user_annotation": "Operator"}
    earlier = [{**event, "cat": now[event["cat"]]} for event in on_gpu() if event["name"] != EPOCH]
    for event in earlier:
        event["name"] = event["name"].replace(FETCH, "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__")
    found, same = read_trace(write(*earlier)), read_trace(write(*on_gpu(), name="now.json"))
    assert found.device == "gpu"
    assert (found.steps, found.busy_seconds, found.gap_seconds) == (2, same.busy_seconds, same.gap_seconds)
    assert [one.name for one in found.operations] == ["aten::mm"]


def test_an_operation_has_the_time_of_the_kernels_it_launched(write):
    (operation,) = read_trace(write(*on_gpu())).operations
    assert (operation.name, operation.calls) == ("aten::mm", 2)
    assert operation.device_seconds == pytest.approx(10e-3)


def test_busy_and_gaps_add_to_the_window(write):
    trace = read_trace(write(*on_gpu()))
    assert trace.busy_seconds + sum(trace.gap_seconds.values()) == pytest.approx(trace.window_seconds)


def test_on_a_cpu_the_work_of_loading_is_no_work_of_the_device(write):
    trace = read_trace(
        write(
            note("ProfilerStep#0", 0, 1000), note(FETCH, 0, 400), bar("aten::stack", 0, 400), bar("aten::mm", 400, 600)
        )
    )
    assert trace.device == "cpu"
    assert trace.busy_fraction == pytest.approx(0.6)
    assert trace.gap_fraction("data loading") == pytest.approx(0.4)


def test_a_gap_in_which_nothing_has_a_name_is_pythons(write):
    trace = read_trace(write(note("ProfilerStep#0", 0, 1000), bar("aten::mm", 0, 300), bar("aten::mm", 310, 90)))
    assert trace.gap_seconds["python"] == pytest.approx(600e-6)
    assert trace.gap_seconds["launching"] == pytest.approx(10e-6)


def test_the_time_of_an_operation_is_its_own(write):
    step = note("ProfilerStep#0", 0, 1000)
    nested = [bar("aten::linear", 0, 500), bar("aten::mm", 100, 300), bar("aten::mm", 0, 100, thread=2)]
    found = {operation.name: operation for operation in read_trace(write(step, *nested)).operations}
    assert found["aten::linear"].own_seconds == pytest.approx(200e-6)
    assert found["aten::mm"].own_seconds == pytest.approx(400e-6)
    assert found["aten::mm"].calls == 2


def test_memory_is_a_series_for_each_device(write):
    def held(moment, value, device):
        args = {"Total Allocated": value, "Device Type": device, "Device Id": 0}
        return {"ph": "i", "name": "[memory]", "cat": "cpu_instant_event", "ts": moment, "args": args}

    step = note("ProfilerStep#0", 100, 1000)
    trace = read_trace(write(step, held(200, 30, 1), held(100, 10, 1), held(150, 7, 0)))
    assert trace.memory["GPU 0"] == ((0.0, pytest.approx(1e-4)), (10.0, 30.0))
    assert trace.memory["CPU"][1] == (7.0,)


def test_a_trace_may_be_gzipped(write):
    path = write(*on_gpu())
    packed = path.with_name(path.name + ".gz")
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert read_trace(packed).busy_fraction == read_trace(path).busy_fraction


@pytest.mark.parametrize("text", ["", '{"traceEvents": 3}', "not JSON"])
def test_what_is_no_trace_is_refused(tmp_path, text):
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(TrialError, match="no trace"):
        read_trace(path)


def test_a_trace_without_marked_steps_is_taken_whole(write):
    trace = read_trace(write(bar("aten::mm", 0, 10), bar("aten::mm", 90, 10)))
    assert (trace.steps, trace.busy_fraction) == (1, pytest.approx(0.2))


def test_where_no_steps_are_marked_those_of_an_optimizer_are_counted_and_it_is_said(write):
    """As of `p.step()` without a schedule; two optimizers that step once each are one step of the training."""
    steps = [note(f"Optimizer.step#{name}.step", at, 50) for at in (200, 700) for name in ("Adam", "SGD")]
    work = [bar("aten::mm", at, 100) for at in (0, 500, 1000)]
    trace = read_trace(write(*work, *steps))
    assert (trace.steps, trace.counted_by) == (2, "optimizer")
    assert "no steps are marked, 2 steps" in trace.sentence
    bare = read_trace(write(*work))
    assert (bare.steps, bare.counted_by) == (1, "nothing")
    assert "1 step" not in bare.sentence
    assert "no steps are marked" in bare.sentence
    assert not read_trace(write(*on_gpu())).counted_by


def test_names_of_the_programs_own_are_told(write):
    trace = read_trace(
        write(*on_gpu(), note("metrics", 0, 2_000), note("metrics", 10_000, 2_000), note("load", 0, 500))
    )
    assert [(one.name, one.calls) for one in trace.named] == [("metrics", 2), ("load", 1)]
    assert "metrics 20%, load 2%" in trace.sentence
    assert not read_trace(write(*on_gpu())).named


def test_an_empty_trace_says_what_to_do(write):
    with pytest.raises(TrialError, match="more steps .*warm-up"):
        read_trace(write())


@pytest.mark.filterwarnings("ignore:.*Profiler clears events:UserWarning")
def test_a_file_that_torch_wrote_after_its_schedule_had_begun_anew_says_so(tmp_path):
    path, cycle = tmp_path / "late.pt.trace.json", torch.profiler.schedule(wait=1, warmup=1, active=1)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], schedule=cycle) as profiler:
        for _ in range(5):
            torch.ones(64, 64).matmul(torch.ones(64, 64))
            profiler.step()
    profiler.export_chrome_trace(str(path))
    trace = read_trace(path)
    assert trace.operations == ()
    assert re.search("No operator .*on_trace_ready", trace.sentence)


def test_what_torch_itself_has_written_is_read(tmp_path):
    path = tmp_path / "real.pt.trace.json"
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profiler:
        for _ in range(2):
            torch.randn(64, 64) @ torch.randn(64, 64)
            torch.ones(3).sum().item()
            profiler.step()
    profiler.export_chrome_trace(str(path))
    trace = read_trace(path)
    assert "aten::mm" in {operation.name for operation in trace.operations}
    assert trace.syncs_per_step >= 1
    assert 0 < trace.busy_fraction < 1


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 20)), max_size=12))
def test_a_union_holds_every_moment_once(spans):
    moments = {moment for begin, length in spans for moment in range(begin, begin + length)}
    merged = merge([(begin, begin + length) for begin, length in spans]).tolist()
    assert sum(end - begin for begin, end in merged) == len(moments)
    assert merged == sorted(merged)
