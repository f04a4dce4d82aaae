"""Building at scale: any scheduler and any budget write the same bytes, within memory, resumable at any time."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import zarr
from hypothesis import given
from hypothesis import strategies as st
from properties import at_night, examples, nightly

import kit.data.build.build as builder
from kit.config import Config
from kit.data.build import schedulers
from kit.data.build.build import build
from kit.data.build.plan import OVERHEAD_BYTES, plan_build
from kit.data.build.schedulers import RUNTIME_BYTES, open_scheduler, slots_of
from kit.data.build.verify import verify
from kit.data.open_dataset import open_dataset
from kit.errors import BuildError, ConfigError, UnfinishedStoreError

MIB = 1 << 20
BUDGET = OVERHEAD_BYTES + 2 * MIB
TIMES = 10 if nightly() else 3
"""A source is larger than the memory to cut it anew."""
RECHUNKER = Path(__file__).with_name("rechunk_victim.py")


GREEDY = """
import time
import numpy as np
from kit.data.build.source import VariableSpec

class Greedy:
    dims, shape, coordinates, attributes = ("time", "lat", "lon"), (4, 8, 8), {}, {}
    variables = {"t": VariableSpec(np.dtype("float32"), {})}

    def read(self, name, region):
        kept = np.ones(1 << 27)
        time.sleep(1)
        return kept[:256].reshape(4, 8, 8).astype("f4")
"""


LEAVING = """
import numpy as np
from distributed import get_worker
from kit.data.build.source import VariableSpec

class Leaving:
    dims, shape, coordinates, attributes = ("time", "lat", "lon"), (4, 8, 8), {}, {}
    variables = {"t": VariableSpec(np.dtype("float32"), {})}

    def read(self, name, region):
        worker = get_worker()
        worker.loop.add_callback(worker.close, nanny=False)
        return np.ones((4, 8, 8), "f4")
"""


def data_of(folder):
    """Every object of data and metadata of a store, without what names the build and its settings."""
    files = (file for file in Path(folder).rglob("*") if file.is_file() and ".kit" not in file.parts)
    return {str(file.relative_to(folder)): file.read_bytes() for file in files}


def write_slices(path, shape=(40, 64, 64), chunk=(1, 64, 64), dtype="f4"):
    """A store cut the wrong way for reading a point through time."""
    group = zarr.create_group(str(path), attributes={"title": "slices"})
    array = group.create_array(
        "t", shape=shape, chunks=chunk, dtype=dtype, dimension_names=("time", "lat", "lon"), attributes={"units": "K"}
    )
    values = np.random.default_rng(1).normal(size=shape).astype(dtype)
    array[...] = values
    return values


def recut(source, target, chunk, **changes):
    return Config.make({
        "data": {"source": str(source), "url": str(target), "patch": {"time": 1}},
        "chunking": {"chunk": chunk, "shard": "none"},
        "build": {"scheduler": "single-threaded", "memory_bytes": BUDGET},
    }).replace({path.replace("__", "."): value for path, value in changes.items()})  # fmt: skip


# -- the same bytes


@pytest.mark.slow
def test_all_schedulers_write_the_same_bytes(tmp_path, new_threads):
    values = write_slices(tmp_path / "source.zarr")
    chunk = {"time": 40, "lat": 16, "lon": 16}
    kinds = {"single-threaded": {}, "threads": {"build__threads": 2}, "distributed": {"build__workers": 1}}
    found = {}
    for kind, more in kinds.items():
        config = recut(tmp_path / "source.zarr", tmp_path / f"{kind}.zarr", chunk, build__scheduler=kind, **more)
        dataset = build(config, progress=False)
        np.testing.assert_array_equal(dataset.open_array("t")[...], values)
        assert dataset.arrays["t"].units == "K"
        assert verify(config, progress=False).faults == ()
        found[kind] = data_of(tmp_path / f"{kind}.zarr")
    assert found["threads"] == found["single-threaded"] == found["distributed"]
    assert not new_threads("kit-build")


@examples(15)
@given(data=st.data())
def test_any_source_layout_any_target_and_any_budget_give_the_same_bytes(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("recut")
    shape = tuple(data.draw(st.integers(1, 20)) for _ in range(3))
    cuts = [tuple(data.draw(st.integers(1, size)) for size in shape) for _ in range(2)]
    values = write_slices(folder / "a.zarr", shape, cuts[0], data.draw(st.sampled_from(["f4", "i2"])))
    chunk = dict(zip(("time", "lat", "lon"), cuts[1], strict=True))
    scratch = data.draw(st.sampled_from(["", str(folder / "scratch")]))
    kind = data.draw(st.sampled_from(["single-threaded", "threads"]))
    config = recut(folder / "a.zarr", folder / "b.zarr", chunk, build__scratch=scratch, build__scheduler=kind)
    dataset = build(config, progress=False)
    np.testing.assert_array_equal(dataset.open_array("t")[...], values)
    again = recut(folder / "b.zarr", folder / "c.zarr", chunk)
    build(again, progress=False)
    assert data_of(folder / "b.zarr") == data_of(folder / "c.zarr")


# -- memory


def measure(folder, *arguments):
    done = subprocess.run(
        [sys.executable, str(RECHUNKER), str(folder), str(TIMES), *arguments],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("scratch", at_night(["", "scratch"], ["scratch"]))
def test_memory_stays_within_the_budget_for_a_source_many_times_larger(tmp_path, scratch):
    result = measure(tmp_path, "threads", scratch)
    (budget,), (added,) = result["budget_bytes"], result["added_bytes"]
    assert result["source_bytes"] >= TIMES * budget > 0
    assert added <= budget
    assert result["right"]
    assert not (tmp_path / "scratch").exists() or not [*(tmp_path / "scratch").iterdir()]


@pytest.mark.slow
def test_workers_stay_within_their_own_and_the_total_budget_for_a_source_many_times_larger(tmp_path):
    result = measure(tmp_path, "distributed")
    budgets = result["budget_bytes"]
    assert len(budgets) == len(result["added_bytes"]) == 2
    assert result["source_bytes"] >= TIMES * sum(budgets)
    assert all(0 < added <= budget for added, budget in zip(result["added_bytes"], budgets, strict=True))
    assert all(peak <= budget + RUNTIME_BYTES for peak, budget in zip(result["peak_bytes"], budgets, strict=True))
    assert sum(result["peak_bytes"]) <= result["total_bytes"]
    assert result["right"]


@pytest.mark.slow
def test_a_worker_that_takes_more_than_its_limit_is_ended_and_the_build_says_so(tmp_path):
    source = tmp_path / "greedy.py"
    source.write_text(GREEDY)
    config = recut(f"{source}:Greedy", tmp_path / "t.zarr", {"time": 4}, build__scheduler="distributed")
    # On a busy machine Dask now and then starts no worker in place of a lost one.
    with pytest.raises(BuildError, match=r"(lost three times|no Dask worker).*build\.memory_bytes.*build\.workers"):
        build(config.replace({"build.workers": 1}), progress=False)


def test_what_all_processes_may_take_is_divided_among_them_or_fewer_run(tmp_path):
    write_slices(tmp_path / "source.zarr", shape=(40, 128, 128), chunk=(1, 128, 128))
    chunk = {"time": 4, "lat": 16, "lon": 16}
    config = recut(tmp_path / "source.zarr", tmp_path / "t.zarr", chunk, build__scheduler="distributed")
    config = config.replace({"build.memory_bytes": "1 GiB", "build.workers": 8})
    rich = plan_build(config.replace({"build.total_memory_bytes": 8 * (RUNTIME_BYTES + BUDGET + 30 * MIB)}))
    assert (rich.slots.processes, rich.memory_bytes) == (8, BUDGET + 30 * MIB)
    poor = plan_build(config.replace({"build.total_memory_bytes": 2 * (RUNTIME_BYTES + BUDGET)}))
    assert poor.slots.processes == 2
    assert "8 workers" in str(poor)
    assert poor.total_bytes <= 2 * (RUNTIME_BYTES + BUDGET)
    threads = config.replace({"build.scheduler": "threads", "build.total_memory_bytes": BUDGET})
    assert plan_build(threads).memory_bytes == BUDGET
    with pytest.raises(BuildError, match=r"0 B is allowed.* a larger build\.total_memory_bytes"):
        plan_build(config.replace({"build.total_memory_bytes": RUNTIME_BYTES}))


@examples(60)
@given(workers=st.integers(1, 64), threads=st.integers(1, 8), mib=st.integers(1, 20_000), total=st.integers(0, 60_000))
def test_no_plan_exceeds_what_each_or_all_may_take(workers, threads, mib, total):
    values = np.broadcast_to(np.float32(1), (40, 256, 256))
    config = Config.make({
        "data": {"url": "unused.zarr", "patch": {"dim_0": 1}},
        "chunking": {"chunk": {"dim_0": 40, "dim_1": 16, "dim_2": 16}, "shard": "none"},
        "build": {
            "scheduler": "distributed", "workers": workers, "threads": threads, "memory_bytes": mib * MIB,
            "total_memory_bytes": total * MIB,
        },
    })  # fmt: skip
    try:
        plan = plan_build(config, source=values)
    except BuildError as error:
        assert "allowed" in str(error)  # noqa: PT017 - refused for want of memory, or planned within it
        return
    assert plan.peak_bytes <= plan.memory_bytes <= mib * MIB
    assert not total or plan.total_bytes <= total * MIB
    assert plan.slots.processes <= workers


def test_a_budget_too_small_for_one_shard_is_refused_with_arithmetic_before_any_byte(tmp_path):
    write_slices(tmp_path / "source.zarr")
    chunk = {"time": 40, "lat": 64, "lon": 64}
    config = recut(tmp_path / "source.zarr", tmp_path / "t.zarr", chunk, build__memory_bytes=OVERHEAD_BYTES + MIB)
    with pytest.raises(
        BuildError, match=r"640 KiB of values \+ .* to read them \+ 3 × 640 KiB to encode .* = .* allowed"
    ):
        build(config, progress=False)
    assert not (tmp_path / "t.zarr").exists()


def test_the_price_of_reading_is_known_before_it_is_paid_and_said(tmp_path, capsys, monkeypatch):
    write_slices(tmp_path / "source.zarr", shape=(40, 128, 128), chunk=(1, 128, 128))
    chunk = {"time": 40, "lat": 16, "lon": 16}
    config = recut(tmp_path / "source.zarr", tmp_path / "t.zarr", chunk)
    plan = plan_build(config)
    assert plan.read_ratio > 1.1
    assert plan.peak_bytes <= BUDGET
    assert not (tmp_path / "t.zarr").exists()
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    build(config)
    assert f"({plan.read_ratio:.2f} ×)" in capsys.readouterr().err
    richer = plan_build(config.replace({"build.memory_bytes": "512 MiB"}))
    assert richer.read_ratio == 1


# -- interrupted


def killed_when(command, folder, shards):
    """Run a builder and kill it, with its whole group, when so many shards of the target are there."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    deadline = time.monotonic() + 120
    while process.poll() is None and time.monotonic() < deadline:
        if len([*folder.glob("t/c/**/*")]) >= shards:
            os.killpg(process.pid, signal.SIGKILL)
            break
        time.sleep(0.002)
    process.wait()
    return process.returncode


UNHURRIED = """
import sys, time
import kit.data.build.shards
from kit.config import Config
from kit.data.build import schedulers
from kit.data.build.build import build

write = kit.data.build.shards.write_object

def write_after_a_while(*arguments):
    time.sleep(0.02)  # so that the kill comes before the end
    return write(*arguments)

kit.data.build.shards.write_object = write_after_a_while
if __name__ == "__main__":
    build(Config.load(sys.argv[1]), progress=False)
"""
"""Workers import it as well."""


@pytest.mark.fault
@pytest.mark.slow
@pytest.mark.parametrize(("kind", "scratch"), [("distributed", ""), ("threads", "scratch")])
def test_a_builder_killed_with_its_workers_is_finished_to_the_same_bytes(tmp_path, kind, scratch):
    values = write_slices(tmp_path / "source.zarr", shape=(40, 128, 128), chunk=(1, 128, 128))
    chunk = {"time": 40, "lat": 16, "lon": 16}
    more = {"build__scheduler": kind, "build__workers": 1} if kind == "distributed" else {"build__scheduler": kind}
    more |= {"build__scratch": str(tmp_path / scratch)} if scratch else {}
    config = recut(tmp_path / "source.zarr", tmp_path / "killed.zarr", chunk, **more)
    saved = config.save(tmp_path / "config.yaml")
    script = tmp_path / "script.py"
    script.write_text(UNHURRIED)
    assert killed_when([sys.executable, str(script), str(saved)], tmp_path / "killed.zarr", 20) == -signal.SIGKILL
    with pytest.raises(UnfinishedStoreError):
        open_dataset(config)
    dataset = build(config, progress=False)
    np.testing.assert_array_equal(dataset.open_array("t")[...], values)
    whole = config.replace({"data.url": str(tmp_path / "whole.zarr")})
    build(whole, progress=False)
    resumed = data_of(tmp_path / "killed.zarr")
    drafts = {key for key in resumed if key.endswith(".partial")}  # a later build removes them, when they are old
    assert {key: data for key, data in resumed.items() if key not in drafts} == data_of(tmp_path / "whole.zarr")
    assert len(drafts) <= 8  # no more than were being written


def test_a_long_group_records_its_shards_while_it_runs(tmp_path, monkeypatch):
    write_slices(tmp_path / "source.zarr")
    config = recut(tmp_path / "source.zarr", tmp_path / "t.zarr", {"time": 40, "lat": 16, "lon": 16})
    monkeypatch.setattr("kit.data.build.shards.JOURNAL_SECONDS", 0.0)
    monkeypatch.setattr("kit.data.build.shards.ArrayWriter.record", _fail_at(9, builder_error := KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt) as caught:
        build(config, progress=False)
    assert caught.value is builder_error
    with pytest.raises(UnfinishedStoreError, match="8 of 16 objects are written"):
        open_dataset(config)
    monkeypatch.undo()
    written = []
    monkeypatch.setattr("kit.data.build.shards.write_object", _noting(written))
    build(config, progress=False)
    assert len(written) == 8
    assert verify(config, progress=False).faults == ()


def _fail_at(number, error):
    from kit.data.build.shards import ArrayWriter

    original, calls = ArrayWriter.record, []

    def record(self, task, block, data):
        calls.append(task)
        if len(calls) == number:
            raise error
        return original(self, task, block, data)

    return record


def _noting(written):
    from kit.data.stores.url import write_object

    def note(store, key, data, url):
        written.append(key)
        write_object(store, key, data, url)

    return note


# -- schedulers


def test_dask_is_not_imported_unless_it_is_chosen(tmp_path):
    config = recut(tmp_path / "source.zarr", tmp_path / "t.zarr", {"time": 4}, build__scheduler="threads")
    write_slices(tmp_path / "source.zarr", shape=(4, 4, 4), chunk=(1, 4, 4))
    saved = config.save(tmp_path / "config.yaml")
    code = "import sys; from kit.config import Config; from kit.data.build.build import build\n"
    code += "build(Config.load(sys.argv[1]), progress=False)\n"
    code += "assert not {'dask', 'distributed', 'xarray', 'torch'} & set(sys.modules), sorted(sys.modules)"
    done = subprocess.run([sys.executable, "-c", code, str(saved)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def one_worker(threads):
    """A cluster of somebody else's, in this process and on free ports of loopback."""
    from distributed import LocalCluster

    return LocalCluster(
        n_workers=1, threads_per_worker=threads, processes=False, dashboard_address="127.0.0.1:0", protocol="tcp",
        host="127.0.0.1",
    )  # fmt: skip


@pytest.mark.parametrize("total", [0, 400 * MIB], ids=["all workers", "as many as the total holds"])
def test_a_running_cluster_is_used_and_left_running(tmp_path, total):
    from distributed import Client

    values = write_slices(tmp_path / "source.zarr")
    with one_worker(threads=1) as cluster:
        config = recut(
            tmp_path / "source.zarr", tmp_path / "t.zarr", {"time": 40, "lat": 16, "lon": 16},
            build__scheduler="distributed", build__address=cluster.scheduler_address, build__total_memory_bytes=total,
        )  # fmt: skip
        assert plan_build(config).slots.processes == (1 if total else 0)
        dataset = build(config, progress=False)
        np.testing.assert_array_equal(dataset.open_array("t")[...], values)
        with Client(cluster) as client:
            assert client.submit(sum, [1, 2]).result() == 3


def test_a_scheduler_that_does_not_answer_is_a_build_error(tmp_path, monkeypatch):
    monkeypatch.setattr("kit.data.build.schedulers._CLUSTER_SECONDS", 4)
    write_slices(tmp_path / "source.zarr", shape=(4, 4, 4), chunk=(1, 4, 4))
    config = recut(
        tmp_path / "source.zarr", tmp_path / "t.zarr", {"time": 4}, build__scheduler="distributed",
        build__address="tcp://127.0.0.1:9",
    )  # fmt: skip
    with pytest.raises(BuildError, match=r"Dask scheduler.*tcp://127\.0\.0\.1:9.*build\.address"):
        build(config, progress=False)


def test_dask_that_is_not_installed_is_a_config_error_with_the_way_out(monkeypatch):
    monkeypatch.setitem(sys.modules, "dask", None)
    chosen = Config.make({"build": {"scheduler": "distributed", "workers": 1}}).build
    with (
        pytest.raises(ConfigError, match=r"build\.scheduler: distributed needs Dask.*kit\[build\]"),
        open_scheduler(chosen, slots_of(chosen), 1, 1 << 30),
    ):
        pass


def test_a_store_in_memory_is_refused_for_workers(tmp_path):
    write_slices(tmp_path / "source.zarr", shape=(4, 4, 4), chunk=(1, 4, 4))
    config = recut(tmp_path / "source.zarr", "memory://x/t.zarr", {"time": 4}, build__scheduler="distributed")
    with pytest.raises(BuildError, match="memory://.*Dask.*threads"):
        build(config, progress=False)


def test_a_source_that_fails_on_a_worker_is_named_as_in_this_process(tmp_path, tiny_config):
    config = tiny_config(tmp_path / "t.zarr", data__arguments={"fault": "raise"}, build__scheduler="distributed")
    with pytest.raises(BuildError, match="the source failed: RuntimeError: the instrument fell overboard"):
        build(config.replace({"build.workers": 1}), progress=False)


@pytest.mark.slow
def test_a_failure_ends_a_build_whatever_else_ends_at_that_moment(tmp_path, tiny_config):
    with one_worker(threads=2) as cluster:
        for attempt in range(40 if nightly() else 12):
            config = tiny_config(
                tmp_path / f"{attempt}.zarr", data__arguments={"fault": "raise"}, build__scheduler="distributed",
                build__address=cluster.scheduler_address, build__threads=2,
            )  # fmt: skip
            with pytest.raises(BuildError, match="the instrument fell overboard"):
                build(config, progress=False)


def test_a_cluster_whose_last_worker_left_ends_a_build(tmp_path, monkeypatch):
    monkeypatch.setattr(schedulers, "NO_WORKER_SECONDS", 1)
    (tmp_path / "leaving.py").write_text(LEAVING)
    with one_worker(threads=1) as cluster:
        config = recut(
            f"{tmp_path}/leaving.py:Leaving", tmp_path / "t.zarr", {"time": 4},
            build__scheduler="distributed", build__address=cluster.scheduler_address,
        )  # fmt: skip
        with pytest.raises(BuildError, match="no Dask worker.*build again"):
            build(config, progress=False)


def test_every_builder_journals_every_two_seconds():
    assert builder.JOURNAL_SECONDS == 2.0
