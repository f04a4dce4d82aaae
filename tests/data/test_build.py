"""Building: whole or not at all, resumable after any kill, refused when anything would be mixed."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import warnings
from contextlib import suppress
from dataclasses import replace
from itertools import product
from math import prod
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import zarr
from hypothesis import given
from hypothesis import strategies as st
from properties import at_night, examples, nightly

import kit.data.build.build as builder
from kit.data.build.build import ProgressLine, build
from kit.data.build.layout import expected_bytes, plan_chunks
from kit.data.build.open_source import load_source
from kit.data.build.shards import ArrayWriter, statistics
from kit.data.build.source import VariableSpec
from kit.data.build.verify import verify
from kit.data.open_dataset import open_dataset
from kit.data.stores.manifest import BUILD_KEY, MANIFEST_KEY
from kit.data.stores.url import list_objects, open_store, read_object, write_object
from kit.errors import (
    BuildError,
    ConfigError,
    CorruptChunkError,
    MissingChunkError,
    PlanError,
    StoreError,
    UnfinishedStoreError,
)

HERE = Path(__file__).parent


def contents(folder):
    """Every published object of a local store."""
    files = [file for file in Path(folder).rglob("*") if file.is_file() and file.suffix != ".partial"]
    return {str(file.relative_to(folder)): file.read_bytes() for file in files}


class Stop(BaseException):
    """What a test stops a build with."""


def stop_after(shards, error=KeyboardInterrupt):
    def progress(done, total, number_of_bytes):
        if done >= shards:
            raise error

    return progress


# -- what is written


def test_a_built_store_reads_back_on_every_kind_of_store(place, tiny_config):
    config = tiny_config(f"{place}/t.zarr")
    dataset, source = build(config, progress=False), load_source(config)
    for name, values in source.values.items():
        np.testing.assert_array_equal(dataset.open_array(name)[...], values)
    assert verify(config, progress=False).faults == ()
    assert len(list_objects(dataset.open_store(), "sst/c", dataset.url)) == 6
    assert not [key for key in list_objects(dataset.open_store(), ".kit", dataset.url) if "journal" in key]


@pytest.mark.parametrize("shard", ["none", {"time": 2, "lat": 8, "lon": 8}])
def test_xarray_opens_it_without_a_warning_and_decodes_the_same_values(tmp_path, tiny_config, shard):
    import xarray

    config = tiny_config(tmp_path / "t.zarr", chunking__shard=shard)
    dataset, source = build(config, progress=False), load_source(config)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for options in ({}, {"consolidated": False}):
            opened = xarray.open_zarr(dataset.url, chunks=None, **options)
            for name in source.values:
                np.testing.assert_allclose(opened[name].values, source.decoded(name), rtol=0, atol=1e-6)
            assert opened.sst.attrs["units"] == "degree_Celsius"
            np.testing.assert_array_equal(opened.time.values, source.coordinates["time"].astype("datetime64[ns]"))
            assert dict(opened.attrs) == source.attributes
        for consolidated, depth in ((None, None), (False, 0)):
            group = zarr.open_group(dataset.url, mode="r", use_consolidated=consolidated)
            assert {"sst", "wind", "time", "lat", "lon"} <= {name for name, _ in group.members(max_depth=depth)}
        xarray.open_datatree(dataset.url, engine="zarr", chunks=None)


def test_missing_chunks_are_written_so_that_an_absent_object_is_always_an_error(tmp_path, tiny_config):
    dataset = build(tiny_config(tmp_path / "t.zarr", chunking__shard="none"), progress=False)
    written = set(list_objects(dataset.open_store(), "sst/c", dataset.url))
    assert written == {f"sst/c/{t}/{y}/{x}" for t, y, x in product(range(5), range(2), range(3))}


def test_every_inner_chunk_of_an_all_missing_shard_is_there(tmp_path, tiny_config):
    dataset = build(tiny_config(tmp_path / "t.zarr"), progress=False)
    shard = (Path(dataset.url) / "sst/c/0/0/0").read_bytes()
    index = np.frombuffer(shard[-(2 * 2 * 2 * 16 + 4) : -4], "<u8").reshape(2, 2, 2, 2)
    assert (index != 2**64 - 1).all()


def test_the_manifest_holds_mean_and_deviation_of_the_decoded_valid_values(tmp_path, tiny_config):
    config = tiny_config(tmp_path / "t.zarr")
    dataset, source = build(config, progress=False), load_source(config)
    for name, info in dataset.arrays.items():
        values = source.decoded(name)
        assert info.mean == pytest.approx(np.nanmean(values), rel=1e-9)
        assert info.deviation == pytest.approx(np.nanstd(values), rel=1e-9)
        assert dataset.manifest.arrays[name].valid == np.isfinite(values).sum()
    assert dataset.manifest.raw_bytes == sum(values.nbytes for values in source.values.values())


def test_the_size_told_before_is_the_size_found_after(tmp_path):
    from kit.config import Config

    config = Config.load(HERE.parents[1] / "datasets/ocean/recipe.yaml").replace({
        "data.url": str(tmp_path / "ocean.zarr"),
        "data.arguments": {"time": 24, "lat": 90, "lon": 180},
        "chunking.chunk": {"time": 4, "lat": 32, "lon": 32},
        "chunking.target_shard_bytes": "256 KiB",
    })  # fmt: skip
    told = expected_bytes(config)
    assert not (tmp_path / "ocean.zarr").exists()
    found = build(config, progress=False).manifest
    assert told.raw_bytes == found.raw_bytes == 24 * 90 * 180 * 2 * 3
    assert told.objects == len(found.objects) + 1
    assert told.compressed_bytes == pytest.approx(found.stored_bytes, rel=0.3)
    assert "objects" in told._repr_html_()


@examples(60)
@given(data=st.data())
def test_tasks_tile_the_array_exactly_once(data):
    shape = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=3))
    chunk = [data.draw(st.integers(1, 5)) for _ in shape]
    factor = data.draw(st.one_of(st.none(), st.lists(st.integers(1, 3), min_size=len(shape), max_size=len(shape))))
    shard = None if factor is None else [c * f for c, f in zip(chunk, factor, strict=True)]
    writer = ArrayWriter(
        "a", VariableSpec(np.dtype("int16")), dims=[f"d{i}" for i in range(len(shape))], shape=shape, chunk=chunk,
        shard=shard, compression_level=1,
    )  # fmt: skip
    count = np.zeros(shape, int)
    tasks = list(writer.tasks())
    for task in tasks:
        count[task.region] += 1
        assert task.shape == count[task.region].shape
    assert (count == 1).all()
    assert len({task.key for task in tasks}) == len(tasks) == writer.task_count
    assert prod(shape) * 2 == writer.nbytes


@examples(60)
@given(
    values=st.lists(st.integers(-32768, 32767), min_size=1, max_size=200),
    missing=st.sampled_from([None, -32768, 0]),
)
def test_statistics_agree_with_numpy(values, missing):
    block = np.array(values, np.int16)
    kept = block[block != missing].astype(np.int64) if missing is not None else block.astype(np.int64)
    valid, total, squares = statistics(block, missing)
    assert (valid, total, squares) == (kept.size, kept.sum(), np.square(kept).sum())


# -- interrupted and resumed


@pytest.mark.fault
@pytest.mark.slow
def test_a_builder_killed_at_every_write_resumes_to_the_same_bytes(tmp_path, tiny_config):
    reference = tmp_path / "reference.zarr"
    config = tiny_config(reference, data__arguments={"time": 3, "lat": 4})
    build(config, progress=False)
    config = config.save(tmp_path / "config.yaml")
    command = [sys.executable, str(HERE / "build_victims.py"), str(config), str(tmp_path), "1" if nightly() else "3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    results = [json.loads(line) for line in done.stdout.splitlines()]
    expected = contents(reference)
    assert not results[-1]["killed"]
    assert len(results) > (2 if nightly() else 2 / 3) * len(expected)
    assert any(0 < result["journalled"] < 8 for result in results)
    for result in results:
        assert contents(tmp_path / f"{result['k']}.zarr") == expected, result
        assert result["rewritten"] == 0, result
        assert (result["opens"] == 0) == result["published"], result
    assert {result["opens"] for result in results} == {0, 1, 2}


def test_an_interrupt_leaves_a_store_that_says_how_far_it_got_and_can_be_finished(place, tiny_config):
    config = tiny_config(f"{place}/t.zarr")
    with pytest.raises(KeyboardInterrupt) as stopped:
        build(config, progress=stop_after(5), threads=1)
    assert "goes on" in " ".join(stopped.value.__notes__)
    with pytest.raises(UnfinishedStoreError, match=r"\d+ of 12 objects .*kit\.build") as caught:
        open_dataset(config)
    before = int(str(caught.value).split(" of 12")[0].split()[-1])
    assert before >= 5
    calls = []
    dataset = build(config, progress=lambda *call: calls.append(call))
    assert calls[0][:2] == (before, 12)
    assert calls[-1][:2] == (12, 12)
    shards = [item for item in dataset.manifest.objects if item.key.startswith(("sst/c", "wind/c"))]
    assert calls[-1][2] == sum(item.bytes for item in shards)
    assert verify(config, progress=False).faults == ()


def test_a_real_interrupt_signal_ends_a_build_and_leaves_no_thread(tmp_path, tiny_config, new_threads):
    config = tiny_config(tmp_path / "t.zarr", data__arguments={"time": 400})
    timer = []

    def progress(done, total, number_of_bytes):
        if done >= 3 and not timer:
            timer.append(done)
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        build(config, progress=progress)
    assert not new_threads("kit-build")
    with pytest.raises(UnfinishedStoreError):
        open_dataset(config)


def test_a_shard_that_vanished_meanwhile_is_written_again(tmp_path, tiny_config):
    config = tiny_config(tmp_path / "t.zarr")
    with pytest.raises(Stop):
        build(config, progress=stop_after(8, Stop), threads=1)
    lost = sorted((tmp_path / "t.zarr/sst/c").glob("0/0/*"))[0]
    lost.unlink()
    build(config, progress=False)
    assert verify(config, progress=False).faults == ()


def test_building_again_does_nothing_and_says_so(tmp_path, tiny_config, capsys, monkeypatch):
    config = tiny_config(tmp_path / "t.zarr")
    build(config, progress=False)
    before = {file: file.stat().st_mtime_ns for file in (tmp_path / "t.zarr").rglob("*")}
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    dataset = build(config)
    assert "already built" in capsys.readouterr().err
    assert {file: file.stat().st_mtime_ns for file in (tmp_path / "t.zarr").rglob("*")} == before
    assert dataset.manifest is not None


def test_a_store_in_other_chunks_is_told_beside_the_best(tmp_path, tiny_config, capsys, monkeypatch):
    config = tiny_config(tmp_path / "t.zarr", data__arguments={"time": 400}).replace(
        {"chunking.chunk": "auto", "chunking.shard": "auto"}
    )
    plan = plan_chunks(config)
    slowest = min(plan.candidates, key=lambda cost: cost.samples_per_second)
    build(config, replace(plan, chunk=slowest.chunk), progress=False)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    build(config)
    told = f"{slowest.samples_per_second / plan.samples_per_second:.2f} × as fast"
    assert told in capsys.readouterr().err
    assert told != "1.00 × as fast"


def test_a_store_in_chunks_chosen_for_another_config_is_opened_unless_they_were_asked_for(tmp_path, tiny_config):
    config = tiny_config(tmp_path / "t.zarr").replace({"chunking.chunk": "auto", "chunking.shard": "auto"})
    plan = plan_chunks(config)
    other = replace(plan, chunk=(1,) * len(plan.chunk))
    first = build(config, other, progress=False)
    for nobody_asked in (None, plan):  # the plan that a notebook has shown is kit's own choice
        assert build(config, nobody_asked, progress=False).manifest == first.manifest
    for asked in (
        {"plan": replace(plan, chunk=(*plan.chunk[:-1], 1))},
        {"config": config.replace({"chunking.chunk": dict(zip(plan.dims, plan.chunk, strict=True))})},
    ):
        with pytest.raises(BuildError, match="overwrite=True"):
            build(**{"config": config, "progress": False, **asked})
    assert build(config, overwrite=True, progress=False).manifest != first.manifest


# -- refused


@pytest.mark.slow
@pytest.mark.parametrize("finished", [True, False])
def test_another_build_in_the_same_place_is_refused_with_the_difference(place, tiny_config, finished):
    config = tiny_config(f"{place}/t.zarr")
    if finished:
        build(config, progress=False)
    else:
        with pytest.raises(Stop):
            build(config, progress=stop_after(3, Stop))
    other = config.replace({"data.arguments": {"seed": 2}, "chunking.compression_level": 5})
    with pytest.raises(BuildError, match="compression_level is 3 there and 5 here") as caught:
        build(other, progress=False)
    assert re.search(r"arguments\.seed .*absent .*2 here", str(caught.value))
    assert "overwrite=True" in str(caught.value)
    dataset = build(other, overwrite=True, progress=False)
    np.testing.assert_array_equal(dataset.open_array("sst")[...], load_source(other).values["sst"])
    assert verify(other, progress=False).faults == ()


def test_a_source_that_gives_other_values_than_before_is_refused(tmp_path, tiny_config):
    copy = tmp_path / "tiny.py"
    copy.write_text((HERE / "tiny_source.py").read_text())
    config = tiny_config(tmp_path / "t.zarr", data__source=f"{copy}:Tiny")
    with pytest.raises(Stop):
        build(config, progress=stop_after(3, Stop))
    copy.write_text(copy.read_text().replace('["sst"][:2] = -32768', '["sst"][:2] = 1'))
    with pytest.raises(BuildError, match="comes out different"):
        build(config, progress=False)


def test_other_peoples_data_is_never_overwritten(tmp_path, tiny_config):
    (tmp_path / "t.zarr").mkdir()
    (tmp_path / "t.zarr" / "thesis.txt").write_text("years of work")
    for overwrite in (False, True):
        with pytest.raises(BuildError, match=r"thesis\.txt .*not built"):
            build(tiny_config(tmp_path / "t.zarr"), overwrite=overwrite, progress=False)
    assert (tmp_path / "t.zarr" / "thesis.txt").read_text() == "years of work"


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("raise", r"wind\[2:4, 0:7, 0:8\]: .*source failed: RuntimeError: .*overboard"),
        ("shape", r"gave float32 of shape \(2, 6, 8\), but promised float32 of shape \(2, 7, 8\)"),
        ("dtype", r"gave float64 of shape \(2, 7, 8\), but promised float32"),
    ],
)
def test_a_source_that_fails_publishes_nothing_and_names_the_region(tmp_path, tiny_config, fault, text):
    config = tiny_config(tmp_path / "t.zarr", data__arguments={"fault": fault})
    with pytest.raises(BuildError, match=text):
        build(config, progress=False, threads=1)
    assert not (tmp_path / "t.zarr" / MANIFEST_KEY).exists()
    with pytest.raises(UnfinishedStoreError, match="8 of 12"):
        open_dataset(config)


def test_a_disk_too_small_is_refused_with_need_and_free_before_anything_is_written(tmp_path, tiny_config, monkeypatch):
    import shutil

    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr("kit.data.build.resume.shutil.disk_usage", lambda path: usage._replace(free=500))
    with pytest.raises(BuildError, match=r"needs about .* and 500 B is free"):
        build(tiny_config(tmp_path / "t.zarr"), progress=False)
    assert not list(tmp_path.rglob("c"))


def test_a_disk_that_fills_up_names_the_store_and_leaves_it_resumable(tmp_path, tiny_config):
    config = tiny_config(tmp_path / "t.zarr").save(tmp_path / "config.yaml")
    code = (
        "import resource, signal, sys\nfrom kit.config import Config\nfrom kit.data.build.build import build\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "config = Config.load(sys.argv[1]).replace({'data.arguments': {'lat': 200, 'lon': 200},\n"
        "    'chunking.chunk': 'auto', 'chunking.shard': 'auto'})\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))\nbuild(config, progress=False)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(config)], capture_output=True, text=True)
    assert "StoreError" in done.stderr
    assert re.search(r"free .*space.*data\.url", done.stderr)
    assert not (tmp_path / "t.zarr" / MANIFEST_KEY).exists()
    assert not list((tmp_path / "t.zarr").rglob("*.partial"))


def test_a_folder_without_write_permission_is_a_store_error(tiny_config):
    with pytest.raises(StoreError, match="/proc.*choose another"):
        build(tiny_config("/proc/t.zarr"), progress=False)


def test_a_plan_for_another_shape_and_a_shard_that_cuts_chunks_are_refused(tmp_path, tiny_config):
    from kit.data.build.layout import plan_chunks

    config = tiny_config(tmp_path / "t.zarr")
    plan = plan_chunks(config.replace({"data.arguments": {"time": 6}}))
    with pytest.raises(PlanError, match=r"the plan .*but the source"):
        build(config, plan, progress=False)
    with pytest.raises(PlanError, match="multiple of chunk"):
        ArrayWriter("a", VariableSpec(np.dtype("i2")), dims=["x"], shape=[9], chunk=[2], shard=[3], compression_level=1)
    assert not (tmp_path / "t.zarr").exists()


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"data.source": None}, "data.source: empty"),
        ({"data.arguments": {"sead": 1}}, "did you mean 'seed'"),
        ({"data.arguments": {"time": "soon"}}, "data.arguments: .* refused them"),
        ({"data.arguments": {"time": -1}}, "refused them"),
        ({"data.source": "pathlib:Path"}, "has no dims"),
        ({"data.variables": ["sst", "salt"]}, "no salt.*sst, wind"),
    ],
)
def test_a_source_that_cannot_be_made_is_a_config_error(tmp_path, tiny_config, changes, text):
    with pytest.raises(ConfigError, match=text):
        build(tiny_config(tmp_path / "t.zarr").replace(changes), progress=False)
    assert not (tmp_path / "t.zarr").exists()


def test_a_shard_larger_than_the_memory_is_refused(tmp_path, tiny_config, monkeypatch):
    import psutil

    memory = psutil.virtual_memory()
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory._replace(available=1000))
    with pytest.raises(BuildError, match=r"smaller chunking\.target_shard_bytes"):
        build(tiny_config(tmp_path / "t.zarr"), progress=False)


# -- verified


@pytest.mark.fault
def test_a_flipped_bit_in_any_object_is_found_and_never_read_as_data(tmp_path, tiny_config):
    config = tiny_config(tmp_path / "t.zarr")
    dataset, source = build(config, progress=False), load_source(config)
    right = {name: dataset.open_array(name)[...] for name in (*source.values, *source.coordinates)}
    draw = random.Random(4)
    for key, data in contents(dataset.url).items():
        file = Path(dataset.url) / key
        for bit in [draw.randrange(8 * len(data)) for _ in range(6)]:
            damaged = bytearray(data)
            damaged[bit // 8] ^= 1 << bit % 8
            file.write_bytes(damaged)
            with pytest.raises(CorruptChunkError):
                verify(config, progress=False)
            if "/c/" in key:
                name = key.partition("/")[0]
                with suppress(RuntimeError, ValueError, IndexError):
                    np.testing.assert_array_equal(dataset.open_array(name)[...], right[name])
            elif key != BUILD_KEY:
                with pytest.raises(CorruptChunkError):
                    open_dataset(config)
        file.write_bytes(data)
    assert verify(config, progress=False).faults == ()


KEYS = ["sst/c/0/0/0", "sst/zarr.json", "lat/c/0", "zarr.json"]


@pytest.mark.parametrize("key", at_night(KEYS, KEYS[2:]))
def test_a_missing_or_short_object_is_named_with_its_array(place, tiny_config, key):
    config = tiny_config(f"{place}/t.zarr")
    dataset = build(config, progress=False)
    store = open_store(config.data.url, read_only=False)
    data = read_object(store, key, dataset.url)
    write_object(store, key, data[: len(data) // 2], dataset.url)
    report = verify(config, strict=False, progress=False)
    assert [type(fault) for fault in report.faults] == [CorruptChunkError]
    assert f"{len(data) // 2} bytes for {len(data)}" in str(report)
    from kit.data.stores.url import delete_object

    delete_object(store, key, dataset.url)
    with pytest.raises(MissingChunkError, match=key) as caught:
        verify(config, progress=False)
    assert dataset.url in str(caught.value)


def test_a_store_without_a_manifest_cannot_be_verified(tmp_path):
    zarr.create_array(str(tmp_path / "x.zarr"), name="a", shape=(3,), dtype="i2")
    with pytest.raises(StoreError, match="no manifest"):
        verify(str(tmp_path / "x.zarr"), progress=False)


# -- progress


def test_the_line_tells_what_is_done_and_how_long_is_left(monkeypatch):
    line = ProgressLine("Building", "objects")
    monkeypatch.setattr("kit.data.build.build.time", SimpleNamespace(monotonic=lambda: 100.0))
    line(2, 64, 0)
    assert line.text(12, 64, 33_000_000, 110.0) == "Building 12 of 64 objects, 31.5 MiB, 52 s left"
    assert line.text(64, 64, 2**20, 170.0) == "Building 64 of 64 objects, 1 MiB, 1 min 10 s"
    assert line.text(2, 64, 0, 100.5) == "Building 2 of 64 objects, 0 B"


def test_a_terminal_sees_one_line_and_a_pipe_sees_nothing(tmp_path, tiny_config, capsys, monkeypatch):
    build(tiny_config(tmp_path / "a.zarr"))
    quiet = capsys.readouterr()
    assert quiet.out + quiet.err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    build(tiny_config(tmp_path / "b.zarr"))
    shown = capsys.readouterr().err
    assert "Building 12 of 12 objects" in shown
    assert shown.count("\n") == 1


def test_a_notebook_shows_one_line_that_updates(tmp_path, tiny_config):
    import nbformat
    from nbclient import NotebookClient

    config = tiny_config(tmp_path / "t.zarr").save(tmp_path / "config.yaml")
    cell = (
        f"from kit.config import Config\nfrom kit.data.build.build import build\nbuild(Config.load({str(config)!r}));"
    )
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell)])
    NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
    (output,) = notebook.cells[0].outputs
    assert output.data["text/plain"].startswith("Building 12 of 12 objects")


def test_long_builds_leave_few_journals(tmp_path, tiny_config, monkeypatch):
    written = []
    monkeypatch.setattr(builder, "JOURNAL_SECONDS", 1e6)
    monkeypatch.setattr(builder, "write_object", lambda store, key, *rest: written.append(key))
    monkeypatch.setattr(builder._Builder, "_publish", lambda self: None)
    monkeypatch.setattr(builder, "open_dataset", lambda *rest: None)
    build(tiny_config(tmp_path / "t.zarr"), progress=False)
    assert sum("journal" in key for key in written) == 1
