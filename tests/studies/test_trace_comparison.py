"""Ranks beside each other, and a training before and after a change: made traces whose answer is known."""

import json
import re

import pytest
from test_trace_viewer import whole

from kit.errors import TrialError
from kit.studies.profiling.trace import read_trace
from kit.studies.profiling.viewer import compare_kernels, compare_operations, open_trace, rank_finding, rank_times

REDUCE = "ncclDevKernel_AllReduce_Sum_f32_RING_LL"


def bar(name, begin, length, kind="kernel", thread="stream 7", **args):
    return {"ph": "X", "name": name, "cat": kind, "ts": begin, "dur": length, "pid": 0, "tid": thread, "args": args}


@pytest.fixture
def write(tmp_path):
    def make(*events, rank=0, world=2, folder="."):
        path = tmp_path / folder / f"rank{rank}.pt.trace.json"
        path.parent.mkdir(exist_ok=True)
        facts = {"distributedInfo": {"rank": rank, "world_size": world}, "deviceProperties": [{"name": "H100"}]}
        path.write_text(json.dumps({**facts, "traceEvents": list(events)}))
        return path

    return make


def step(computing, comes, ends):
    """One step of 10 ms: kernels, then a collective on a stream of its own, of which 1 ms is beside a kernel."""
    yield bar("ProfilerStep#0", 0, 10_000, "user_annotation", "main")
    yield bar("gemm", 0, computing)
    sizes = {"stream": 20, "In msg nelems": 1 << 20, "dtype": "Float"}
    yield bar(REDUCE, comes, ends - comes, thread="stream 20", **sizes)
    yield bar("Memcpy HtoD", 9_500, 500, "gpu_memcpy", "stream 3", bytes=4096)


@pytest.fixture
def ranks(write):
    """Rank 1 computes for 7 ms and comes last; rank 0 waits for it from 4 ms on."""
    return [write(*step(5_000, 4_000, 9_000), rank=0), write(*step(8_000, 7_000, 9_000), rank=1)]


def test_a_step_of_each_rank_adds_up_and_says_who_waits(ranks):
    times = rank_times([read_trace(path) for path in reversed(ranks)])
    assert [time.rank for time in times] == [0, 1]
    assert [time.step for time in times] == pytest.approx([10e-3, 10e-3])
    assert [time.computing for time in times] == pytest.approx([5e-3, 8e-3])
    assert [time.hidden for time in times] == pytest.approx([1e-3, 1e-3])
    assert times[0].waiting == pytest.approx(4e-3 * 3 / 5)  # of 5 ms in the collective, 2 were the exchange
    assert times[1].waiting == 0
    assert "Rank 1 makes the others wait" in rank_finding(times)
    assert "1.60 ×" in rank_finding(times)


def test_ranks_with_other_collectives_do_not_say_who_waits(write, ranks):
    other = write(*step(5_000, 4_000, 9_000), bar(REDUCE, 9_100, 200), rank=1, folder="other")
    times = rank_times([read_trace(ranks[0]), read_trace(other)])
    assert "not known" in rank_finding(times)


def test_ranks_that_come_together_wait_for_none(write):
    same = [read_trace(write(*step(5_000, 4_000, 9_000), rank=rank)) for rank in range(2)]
    assert "No rank" in rank_finding(rank_times(same))


def test_what_a_collective_takes_in_is_known_in_bytes(ranks):
    (call,) = read_trace(ranks[0]).collectives
    assert (call.bytes, call.seconds) == (4 << 20, pytest.approx(5e-3))


def test_a_kernel_of_tensor_cores_is_told_by_its_name(write):
    names = [
        "ampere_bf16_s16816gemm_bf16_128x64_ldg8_f2f_nn", "void cutlass::Kernel<cutlass_80_tensorop_s1688gemm>",
        "sm90_xmma_gemm_bf16bf16_bf16f32", "pytorch_flash::flash_fwd_kernel<...>", "volta_sgemm_128x64_nn",
        "void at::native::vectorized_elementwise_kernel<4, CUDAFunctor_add<float>>", "ampere_sgemm_32x32_sliced1x4",
    ]  # fmt: skip
    trace = read_trace(write(*(bar(name, 10 * at, 10) for at, name in enumerate(names))))
    assert [kernel.name in names[:4] for kernel in trace.kernels] == [kernel.tensor_cores for kernel in trace.kernels]
    assert trace.tensor_core_fraction == pytest.approx(4 / 7)


def test_a_kernel_belongs_to_the_operator_within_which_it_was_launched(write):
    trace = read_trace(
        write(
            bar("aten::linear", 0, 100, "cpu_op", "main", **{"External id": 1}),
            bar("aten::addmm", 10, 80, "cpu_op", "main", **{"External id": 2}),
            bar("cudaLaunchKernel", 20, 5, "cuda_runtime", "main", correlation=77),
            bar("gemm", 200, 40, correlation=77, **{"External id": 77}),
        )
    )
    found = {operation.name: operation for operation in trace.operations}
    assert found["aten::addmm"].device_seconds == pytest.approx(40e-6)
    assert found["aten::linear"].device_seconds == 0
    assert found["aten::linear"].total_seconds == pytest.approx(100e-6)


def test_memory_is_put_down_to_the_operator_that_asked(write):
    def asked(moment, size, total):
        args = {"Total Allocated": total, "Bytes": size, "Device Type": 1, "Device Id": 0}
        return {"ph": "i", "name": "[memory]", "ts": moment, "args": args}

    trace = read_trace(
        write(bar("aten::mul", 0, 50, "cpu_op", "main"), bar("aten::empty", 10, 20, "cpu_op", "main"),
              asked(15, 512, 512), asked(40, 256, 768), asked(45, -512, 256), asked(60, 1024, 1280))
    )  # fmt: skip
    assert {one.name: one.allocated_bytes for one in trace.operations} == {"aten::mul": 256, "aten::empty": 512}


def test_what_changed_most_comes_first_and_is_by_step(write):
    before = read_trace(write(*step(5_000, 4_000, 9_000)))
    first_step, second_step = [*step(2_000, 4_000, 9_000)], [*step(2_000, 4_000, 9_000)]
    later = [{**event, "ts": event["ts"] + 10_000} for event in second_step]
    after = read_trace(write(*first_step, *later, folder="after"))
    first, *_ = compare_kernels(before, after)
    assert (first.name, first.seconds) == ("gemm", pytest.approx(-3e-3))
    assert first.calls_before == first.calls_after == 1
    assert compare_operations(before, after) == []


def test_a_folder_of_ranks_is_one_page(ranks, write):
    before = write(*step(9_500, 8_000, 9_000), folder="before")
    viewer = open_trace(ranks[0].parent, against=before)
    assert sorted(viewer.traces) == [0, 1]
    found = whole(viewer)
    assert [rank["rank"] for rank in found["ranks"]] == [0, 1]
    assert [sum(row[1:6]) for row in found["together"]["rows"]] == pytest.approx([10e-3, 10e-3])
    assert "as" in found["compared"]["sentence"]
    assert found["compared"]["kernels"][0][0] == "gemm"
    assert ["device", "H100"] in [tile[:2] for tile in found["ranks"][0]["tiles"]]


def test_two_files_of_one_rank_are_refused_with_the_way(write):
    one, other = write(*step(1, 2, 3)), write(*step(1, 2, 3), folder="other")
    with pytest.raises(TrialError, match="against="):
        open_trace(one, other)


def test_a_folder_without_traces_is_refused(tmp_path):
    with pytest.raises(TrialError, match="no trace"):
        open_trace(tmp_path)
    with pytest.raises(TrialError, match=re.escape("pt.trace.json")):
        open_trace(tmp_path)
