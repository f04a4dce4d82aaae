"""The read cache: right bytes or a miss, never more than its size, whoever writes and whoever is killed."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from cache_filler import body, name
from hypothesis import given
from hypothesis import strategies as st
from properties import examples

from kit.config import Config
from kit.data.build.build import build
from kit.data.build.open_source import load_source
from kit.data.stores.disk_cache import WHOLE, MemoryCache, ReadCache, SharedFolder
from kit.data.stream.engine import Engine
from kit.errors import ConfigError, KitWarning
from kit.sections import Cache

FILLER = Path(__file__).with_name("cache_filler.py")


def entries(folder):
    return [*Path(folder).rglob("*.parts")]


def put(cache, name, data):
    cache.put(name, [(WHOLE, data)])


def held(folder):
    return sum(path.stat().st_size for path in entries(folder))


@pytest.fixture(params=["memory", "folder"])
def make_cache(request, tmp_path):
    def make(size_bytes, eviction="lru"):
        return (
            MemoryCache(size_bytes, eviction)
            if request.param == "memory"
            else SharedFolder(tmp_path / "cache", size_bytes, eviction)
        )

    return make


# -- entries


def test_what_was_put_is_got_and_nothing_else(make_cache):
    cache = make_cache(100_000)
    put(cache, name(1), body(1))
    np.testing.assert_array_equal(cache.get(name(1)), body(1))
    assert cache.get(name(2)) is None
    put(cache, name(3), np.empty(0, np.uint8))
    assert len(cache.get(name(3))) == 0


def test_the_least_recently_used_goes_first(make_cache, tmp_path, monkeypatch):
    monkeypatch.setattr("kit.data.stores.disk_cache._TOUCH_SECONDS", 0.0)
    cache = make_cache(4_000)
    for number, letter in enumerate("abc"):
        put(cache, letter * 4, np.full(1000, number, np.uint8))
        time.sleep(0.02)
    assert cache.get("aaaa") is not None
    put(cache, "dddd", np.zeros(1500, np.uint8))
    assert cache.get("aaaa") is not None
    assert cache.get("bbbb") is None
    assert cache.get("dddd") is not None


def test_without_eviction_a_full_cache_keeps_what_it_has(make_cache):
    cache = make_cache(2_100, "none")
    put(cache, "aaaa", np.zeros(1000, np.uint8))
    put(cache, "bbbb", np.zeros(1000, np.uint8))
    put(cache, "cccc", np.zeros(1000, np.uint8))
    assert cache.get("aaaa") is not None
    assert cache.get("bbbb") is not None
    assert cache.get("cccc") is None


def test_what_is_larger_than_the_cache_is_not_kept(make_cache):
    cache = make_cache(500)
    put(cache, "aaaa", np.zeros(1000, np.uint8))
    assert cache.get("aaaa") is None


def test_a_piece_of_a_long_answer_does_not_keep_all_of_it_in_memory():
    cache = MemoryCache(10_000, "lru")
    put(cache, "aaaa", np.zeros(10_000_000, np.uint8)[:100])
    assert cache.get("aaaa").base is None


@examples(40)
@given(steps=st.lists(st.tuples(st.integers(0, 30), st.booleans()), max_size=60), size=st.integers(600, 30_000))
def test_any_history_gives_right_bytes_within_the_size(tmp_path_factory, steps, size):
    folder = tmp_path_factory.mktemp("cache")
    caches = [SharedFolder(folder, size, "lru"), SharedFolder(folder, size, "lru"), MemoryCache(size, "lru")]
    for number, second in steps:
        for cache in (caches[second], caches[2]):
            found = cache.get(name(number))
            assert found is None or np.array_equal(found, body(number))
            put(cache, name(number), body(number))
        assert held(folder) <= size
        assert caches[2].held_bytes <= size


# -- damage


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "foreign", "longer"])
def test_a_damaged_entry_is_a_miss_and_is_filled_again(tmp_path, damage):
    cache, draw = SharedFolder(tmp_path, 100_000, "lru"), random.Random(3)
    for number in range(20):
        put(cache, name(number), body(number))
        (path,) = [path for path in entries(tmp_path) if path.name.startswith(name(number))]
        data = bytearray(path.read_bytes())
        if damage == "flip":
            data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        spoilt = {"cut": data[: draw.randrange(len(data))], "empty": b"", "foreign": b"x" * 999, "longer": data + b"x"}
        path.write_bytes(spoilt.get(damage, data))
        for reader in (SharedFolder(tmp_path, 100_000, "lru"), cache):  # what a reader knows already may still be right
            found = reader.get(name(number))
            assert found is None or np.array_equal(found, body(number))
            put(reader, name(number), body(number))
            np.testing.assert_array_equal(reader.get(name(number)), body(number))
        np.testing.assert_array_equal(SharedFolder(tmp_path, 100_000, "lru").get(name(number)), body(number))


@pytest.mark.fault
def test_processes_that_share_a_folder_and_are_killed_never_spoil_it(tmp_path):
    size = 20_000
    command = [sys.executable, str(FILLER), str(tmp_path), str(size)]
    fillers = [subprocess.Popen([*command, str(seed)], stdout=subprocess.PIPE, text=True) for seed in range(4)]
    try:
        for filler in fillers:
            assert filler.stdout.readline() == "ready\n"
        for _ in range(200):
            assert held_at_once(tmp_path) <= size
            assert [filler.poll() for filler in fillers] == [None] * 4
        for filler in fillers:
            os.kill(filler.pid, signal.SIGKILL)
    finally:
        for filler in fillers:
            filler.kill()
            filler.wait()
            filler.stdout.close()
    after = subprocess.run([*command, "9", "400"], capture_output=True, timeout=300)
    assert after.returncode == 0
    assert held(tmp_path) <= size


def held_at_once(folder):
    """Bytes of entries, counted while nobody can add one."""
    import fcntl

    with (folder / "total_bytes").open("rb+") as file:
        fcntl.flock(file.fileno(), fcntl.LOCK_EX)
        total = 0
        for path in entries(folder):
            try:
                total += path.stat().st_size
            except FileNotFoundError:
                continue
        return total


def test_what_a_killed_writer_left_half_written_is_cut_off_by_the_next(tmp_path):
    cache = SharedFolder(tmp_path, 30_000, "lru")
    parts = [((place, place + 100), body(1)[:100]) for place in range(0, 400, 100)]
    cache.put(name(1), parts[:2])
    (path,) = entries(tmp_path)
    whole = path.read_bytes()
    for torn in (1, 11, 40, 150, len(whole) - 1):
        path.write_bytes(whole + whole[:torn])
        other = SharedFolder(tmp_path, 30_000, "lru")
        assert other.get(name(1), 200, 300) is None
        other.put(name(1), parts)
        for number, cache_ in enumerate((other, cache, SharedFolder(tmp_path, 30_000, "lru"))):
            for (first, last), data in parts:
                np.testing.assert_array_equal(cache_.get(name(1), first, last), data, err_msg=f"{torn} {number}")


def test_the_parts_of_an_object_are_found_one_by_one_and_kept_once(make_cache, tmp_path):
    cache = make_cache(10_000_000)
    whole = np.random.default_rng(0).integers(0, 256, 1_000_000, dtype=np.uint8)
    spans = [(first, first + 10_000) for first in range(0, len(whole), 10_000)]
    draw = random.Random(1)
    for _ in range(100):
        some = sorted(draw.sample(spans, draw.randint(1, 8)))
        cache.put("object", [(span, whole[slice(*span)]) for span in some])
    cache.put("object", [((-16, None), whole[-16:])])
    missing = [span for span in spans if not cache.holds("object", span)]
    assert len(missing) < 10
    for span in spans:
        data = cache.get("object", *span)
        assert (data is None) == (span in missing)
        assert data is None or np.array_equal(data, whole[slice(*span)])
    np.testing.assert_array_equal(cache.get("object", -16), whole[-16:])
    assert cache.get("object", 0, 20_000) is None
    assert held(tmp_path) <= 1.01 * len(whole)


def test_a_file_that_another_process_has_replaced_meanwhile_is_read_anew(tmp_path):
    stale = SharedFolder(tmp_path / "a", 100_000, "lru")
    other = SharedFolder(tmp_path / "b", 100_000, "lru")
    bodies = {(place, place + 100): np.full(100, place // 100, np.uint8) for place in range(0, 2000, 100)}
    spans = [*bodies]
    stale.put("object", [(span, bodies[span]) for span in spans[:3]])
    for span in reversed(spans):
        other.put("object", [(span, bodies[span])])
    (here,), (there,) = entries(tmp_path / "a"), entries(tmp_path / "b")
    here.write_bytes(there.read_bytes())  # under the same inode, and longer
    stale.put("object", [(spans[0], bodies[spans[0]]), ((5000, 5010), np.ones(10, np.uint8))])
    fresh = SharedFolder(tmp_path / "a", 100_000, "lru")
    for span in spans:
        np.testing.assert_array_equal(fresh.get("object", *span), bodies[span])
        np.testing.assert_array_equal(stale.get("object", *span), bodies[span])
    assert len(fresh.get("object", 5000, 5010)) == 10


def test_what_an_earlier_version_kept_is_removed(tmp_path):
    (tmp_path / "ab").mkdir()
    (tmp_path / "total").write_bytes(bytes(8))
    left = [tmp_path / "ab" / "abcd.entry", tmp_path / "ab" / "abcd.entry.1.2.partial"]
    for path in left:
        path.write_bytes(b"kit1 and more")
    (tmp_path / "ab" / "mine.txt").write_text("not the cache's")
    cache = SharedFolder(tmp_path, 100_000, "lru")
    put(cache, name(1), body(1))
    assert cache.get(name(1)) is not None
    assert [path.name for path in (tmp_path / "ab").iterdir()] == ["mine.txt"]


def test_a_disk_that_is_full_keeps_nothing_more_with_one_word(tmp_path, monkeypatch):
    cache = SharedFolder(tmp_path, 100_000, "lru")
    put(cache, name(1), body(1))
    real = os.pwritev

    def full(descriptor, parts, position):
        real(descriptor, parts[:1], position)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwritev", full)
    before = held(tmp_path)
    with pytest.warns(KitWarning, match=r"cache\.folder: .*not kept.*full: make room"):
        put(cache, name(2), body(2))
    put(cache, name(3), body(3))  # in silence
    assert held(tmp_path) == before
    np.testing.assert_array_equal(cache.get(name(1)), body(1))
    assert cache.get(name(2)) is None


def test_a_folder_that_cannot_be_made_is_not_needed(cloud, tiny_config):
    dataset = build(tiny_config(cloud.url("uncached/t.zarr")), progress=False)
    cache = ReadCache.of(Cache(size_bytes=100_000, folder="/proc/cache"))
    expected, uncached = read_all(dataset, None)
    with pytest.warns(KitWarning, match=r"cache\.folder: .*/proc/cache .*cannot be written .*choose another") as said:
        values, counts = read_all(dataset, cache)
    assert len(said) == 1
    np.testing.assert_array_equal(values, expected)
    assert counts["requests"] == uncached["requests"]
    assert ReadCache.of(Cache()) is None


def test_a_folder_that_is_only_read_gives_what_is_in_it(cloud, tmp_path, tiny_config, monkeypatch):
    dataset = build(tiny_config(cloud.url("read-only/t.zarr")), progress=False)
    cache = ReadCache.of(Cache(size_bytes=100_000, folder=str(tmp_path / "c")))
    expected, _ = read_all(dataset, cache)
    real = os.open

    def read_only(path, flags, *more):
        if flags & os.O_RDWR and str(path).startswith(str(tmp_path)):
            raise OSError(30, "Read-only file system")
        return real(path, flags, *more)

    monkeypatch.setattr(os, "open", read_only)
    with pytest.warns(KitWarning, match="Read-only"):
        values, counts = read_all(dataset, cache)
    np.testing.assert_array_equal(values, expected)
    assert counts["requests"] == 0


# -- beneath a reader


def read_all(dataset, cache):
    offsets = np.array([[time, 0, 0] for time in range(5)])
    with Engine(dataset, ("sst",), read_cache=cache) as engine:
        (batch,) = engine.stream([offsets], (1, 7, 9))
        return batch[0][:, 0, 0], engine.counters


@pytest.mark.parametrize("folder", [False, True])
@pytest.mark.parametrize("shard", ["none", {"time": 2, "lat": 8, "lon": 8}])
def test_a_second_reader_takes_everything_from_the_cache(cloud, tmp_path, tiny_config, folder, shard):
    url = cloud.url(f"cache-{folder}-{shard != 'none'}/t.zarr")
    dataset = build(tiny_config(url, chunking__shard=shard), progress=False)
    cache = ReadCache(size_bytes=1_000_000 + folder, folder=str(tmp_path / "c") if folder else "", eviction="lru")
    first, counts = read_all(dataset, cache)
    assert counts["read_cache_hits"] == 0
    assert counts["requests"] == counts["read_cache_misses"] - counts["requests_saved"] > 0
    second, again = read_all(dataset, cache)
    assert again["requests"] == 0
    assert again["read_cache_hits"] == counts["read_cache_misses"]
    np.testing.assert_array_equal(first, second)
    expected = load_source(tiny_config(url)).decoded("sst")
    np.testing.assert_allclose(first, np.nan_to_num(expected, nan=0.0), atol=1e-4)


@pytest.mark.parametrize("kit_built", [True, False])
def test_a_rebuilt_store_is_never_served_from_the_old_one(cloud, tmp_path, tiny_config, kit_built):
    url = cloud.url(f"rebuilt-{kit_built}/t.zarr")
    cache = ReadCache(size_bytes=1_000_000, folder=str(tmp_path / "cache"), eviction="lru")
    config = tiny_config(url)
    for seed in (1, 2, 1):
        changed = config.replace({"data.arguments": {"seed": seed}})
        dataset = build(changed, overwrite=True, progress=False)
        if not kit_built:
            dataset = without_manifest(dataset)
        values, _ = read_all(dataset, cache)
        expected = load_source(changed).decoded("sst")
        np.testing.assert_allclose(values, np.nan_to_num(expected, nan=0.0), atol=1e-4)


def without_manifest(dataset):
    from dataclasses import replace

    return replace(dataset, manifest=None)


def test_a_config_turns_the_cache_on_and_local_stores_never_use_it(cloud, tmp_path, tiny_config):
    from kit.data.patches.module import PatchData

    for place, hits in ((cloud.url("config/t.zarr"), True), (str(tmp_path / "t.zarr"), False)):
        config = tiny_config(place, data__variables=["sst"], data__samples_per_epoch=64, data__standardize=False)
        config = config.replace({"cache.size_bytes": "1 MiB", "cache.folder": str(tmp_path / "cache")})
        build(config, progress=False)
        data = PatchData(config)
        data.setup("fit")
        loader = data.train_dataloader()
        for _ in range(2):
            for _ in loader:
                pass
        counts = loader.counters()
        data.teardown()
        assert (counts["read_cache_hits"] > 0) is hits
        assert (counts["read_cache_misses"] > 0) is hits


def test_the_section_says_what_it_takes():
    assert Config.make({"cache": {"size_bytes": "2 GiB"}}).cache.size_bytes == 2 << 30
    with pytest.raises(ConfigError, match=r"cache\.eviction: 'mru' .*accepted"):
        Config.make({"cache": {"eviction": "mru"}})
