"""A cache of query results: never half a result, never rows of another state, whoever writes, fails or is killed."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import event_tables
import pyarrow
import pytest
from hypothesis import given
from hypothesis import strategies as st
from properties import at_night, examples

from kit.data.tables.cache import QueryCache
from kit.data.tables.source import Query, plan_partitions
from kit.errors import ConfigError, QueryError, SchemaChangedError

FILLER = Path(__file__).with_name("result_filler.py")


def rows(source, query=Query()):  # noqa: B008
    return pyarrow.Table.from_batches([*source.read(query)], source.schema()).to_pylist()


class Failing:
    """A source that gives up after one batch."""

    def __init__(self, source, error):
        self.source, self.error, self.reads = source, error, 0

    def __getattr__(self, name):
        return getattr(self.source, name)

    def read(self, query):
        self.reads += 1
        yield next(iter(self.source.read(query)))
        if self.error is not None:
            raise self.error


@pytest.mark.parametrize("kind", ["parquet", "duckdb"])
def test_a_result_is_asked_for_once_and_then_read_from_its_file(tmp_path, kind):
    source = event_tables.shop(tmp_path, kind)
    cached = QueryCache(tmp_path / "cache").over(source)
    first = rows(cached)
    assert first == rows(source)
    assert rows(cached) == first
    assert rows(QueryCache(tmp_path / "cache").over(event_tables.opened(tmp_path / f"shop.{kind}"))) == first
    assert [use.how for use in cached.uses] == ["filled", "hit"]
    assert cached.counts == {"hit": 1, "filled": 1, "refilled": 0, "not kept": 0}
    assert cached.uses[-1].rows == 400


def test_what_is_asked_decides_the_result_and_the_size_of_batches_does_not(tmp_path):
    source = event_tables.shop(tmp_path)
    cached = QueryCache(tmp_path / "cache").over(source)
    queries = [
        Query(), Query(columns=("customer", "price")), Query(columns=("price", "customer")), Query(where="price > 1"),
        *(Query(partition=part) for part in plan_partitions(source, 2)),
        *(Query(partition=part) for part in plan_partitions(source, 3)),
    ]  # fmt: skip
    for query in queries:
        assert sum(batch.num_rows for batch in cached.read(query)) > 0
    assert [use.how for use in cached.uses] == ["filled"] * len(queries)
    batches = [*cached.read(Query(batch_rows=7))]
    assert cached.uses[-1].how == "hit"
    assert max(batch.num_rows for batch in batches) <= 7
    assert sum(batch.num_rows for batch in batches) == 400


def test_groups_of_exact_entities_are_told_apart(tmp_path):
    source = event_tables.shop(tmp_path, partition_values_transformation="exact_group")
    cached = QueryCache(tmp_path / "cache").over(source)
    found = [row["customer"] for part in plan_partitions(source, 3) for row in rows(cached, Query(partition=part))]
    assert sorted(found) == sorted(row["customer"] for row in rows(source))
    assert cached.counts["filled"] == 4 - 1


@pytest.mark.parametrize("kind", ["parquet", "duckdb"])
def test_a_table_that_changed_finds_no_old_result(tmp_path, kind):
    path = tmp_path / f"shop.{kind}"
    cache = QueryCache(tmp_path / "cache")
    cached = cache.over(event_tables.shop(tmp_path, kind))
    before = rows(cached)
    event_tables.write(path, event_tables.events(seed=1))
    again = rows(cached)
    assert again == rows(event_tables.opened(path)) != before
    assert cached.uses[-1].how == "filled"
    assert len(cache.entries()) == 2
    assert cache.drop(cached.source, stale=True) > 0
    (kept,) = cache.entries()
    assert kept.state == cached.state()
    assert rows(cached) == again
    assert cached.uses[-1].how == "hit"


def test_a_query_that_fails_mid_way_yields_no_row_and_keeps_nothing(tmp_path):
    source = event_tables.shop(tmp_path)
    cache = QueryCache(tmp_path / "cache")
    cached = cache.over(Failing(source, QueryError("the connection was lost")))
    with pytest.raises(QueryError, match="the connection was lost"):
        next(iter(cached.read(Query(batch_rows=10))))
    assert [*cache.folder.iterdir()] == []
    assert rows(cache.over(source)) == rows(source)


def test_a_result_with_other_columns_than_the_table_had_is_refused(tmp_path):
    source = event_tables.shop(tmp_path)
    cached = QueryCache(tmp_path / "cache").over(source)
    changed = event_tables.events()
    changed = changed.set_column(3, "price", changed.column("price").cast("string"))
    event_tables.write(tmp_path / "shop.parquet", changed)
    with pytest.raises(SchemaChangedError, match="price"):
        rows(cached)
    assert cached.cache.entries() == ()


@pytest.mark.parametrize("harm", ["cut off", "flipped", "empty", "gone", "marker cut off", "marker of another kit"])
def test_a_damaged_result_is_discarded_and_asked_for_anew_with_the_reason(tmp_path, harm):
    source = event_tables.shop(tmp_path)
    cache = QueryCache(tmp_path / "cache")
    cached = cache.over(source)
    first = rows(cached)
    (file,), (marker,) = cache.folder.glob("*.parquet"), cache.folder.glob("*.json")
    data = file.read_bytes()
    if harm == "cut off":
        file.write_bytes(data[: len(data) // 2])
    elif harm == "flipped":
        file.write_bytes(data[:100] + bytes([data[100] ^ 4]) + data[101:])
    elif harm == "empty":
        file.write_bytes(b"")
    elif harm == "gone":
        file.unlink()
    elif harm == "marker cut off":
        marker.write_text(marker.read_text()[:30])
    else:
        marker.write_text(json.dumps({**json.loads(marker.read_text()), "format": 99}))
    assert rows(cached) == first
    assert cached.uses[-1].how == "refilled"
    assert "discarded" in cached.uses[-1].reason
    assert rows(cached) == first
    assert cached.uses[-1].how == "hit"


@given(place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7), shorter=st.integers(0, 40))
@examples(15)
def test_no_damage_to_the_file_is_ever_read_as_rows(tmp_path_factory, place, bit, shorter):
    folder = tmp_path_factory.mktemp("damaged")
    source = event_tables.shop(folder, table=event_tables.events(5, 20))
    cached = QueryCache(folder / "cache").over(source)
    first = rows(cached)
    (file,) = cached.cache.folder.glob("*.parquet")
    data = bytearray(file.read_bytes())
    data[int(place * len(data))] ^= 1 << bit
    file.write_bytes(data[: len(data) - shorter])
    assert rows(cached) == first


def test_two_threads_that_want_the_same_result_ask_once(tmp_path):
    slow = Failing(event_tables.shop(tmp_path), None)
    slow.read = lambda query: (time.sleep(0.2), setattr(slow, "reads", slow.reads + 1), slow.source.read(query))[-1]
    cached = QueryCache(tmp_path / "cache").over(slow)
    found = []
    threads = [threading.Thread(target=lambda: found.append(rows(cached))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert slow.reads == 1
    assert len(found) == 4
    assert all(one == found[0] for one in found)


def test_a_table_that_changes_while_it_is_read_is_served_and_not_kept(tmp_path):
    source = event_tables.shop(tmp_path)
    states = iter("ab")
    changing = Failing(source, None)
    changing.state = lambda: next(states)
    changing.read = source.read
    cached = QueryCache(tmp_path / "cache").over(changing)
    assert rows(cached) == rows(source)
    assert cached.uses[-1].how == "not kept"
    assert "changed while" in cached.uses[-1].reason
    assert [*cached.cache.folder.iterdir()] == []


def test_a_disk_that_refuses_is_no_error_of_the_reader(tmp_path, monkeypatch):
    source = event_tables.shop(tmp_path)
    cached = QueryCache(tmp_path / "cache").over(source)

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pyarrow.parquet.ParquetWriter, "write_table", full)
    assert rows(cached) == rows(source)
    assert cached.uses[-1].how == "not kept"
    assert "No space left" in cached.uses[-1].reason
    assert [*cached.cache.folder.iterdir()] == []


def test_a_reader_is_not_disturbed_by_who_drops_the_result(tmp_path):
    source = event_tables.shop(tmp_path)
    cached = QueryCache(tmp_path / "cache").over(source)
    first = rows(cached)
    batches = cached.read(Query(batch_rows=30))
    begun = next(batches)
    assert cached.cache.drop() > 0
    assert cached.cache.size_bytes == 0
    assert pyarrow.Table.from_batches([begun, *batches]).to_pylist() == first


def test_the_cache_tells_what_it_holds_and_drops_what_is_asked(tmp_path, monkeypatch):
    cache = QueryCache(tmp_path / "cache")
    one, other = tmp_path / "one", tmp_path / "other"
    sources = []
    for folder in (one, other):
        folder.mkdir()
        sources.append(event_tables.shop(folder))
        rows(cache.over(sources[-1]))
    assert cache.size_bytes == sum(path.stat().st_size for path in cache.folder.glob("*.parquet"))
    assert "2 results" in repr(cache)
    table = cache._repr_html_()
    assert table.count("<tr") == 1 + len(cache.entries()) == 3
    assert "2 results" in table
    (entry,) = cache.entries(sources[0])
    assert (entry.rows, entry.source, entry.query) == (400, "shop", "all columns")
    assert cache.drop(sources[0]) == entry.file_bytes
    assert len(cache.entries()) == 1
    assert repr(cache).startswith("1 result, ")
    monkeypatch.chdir(tmp_path)
    assert str(tmp_path) not in repr(cache)
    with pytest.raises(ConfigError, match="say which"):
        cache.drop(stale=True)


def test_a_folder_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"queries\.cache_path"):
        QueryCache(tmp_path / "file" / "cache")


def test_a_file_that_is_cut_off_while_it_is_read_is_an_error_and_then_asked_for_anew(tmp_path):
    source = event_tables.shop(tmp_path, table=event_tables.events(50, 20_000))
    cached = QueryCache(tmp_path / "cache").over(source)
    small = Query(batch_rows=1000)
    first = rows(cached, small)
    (file,) = cached.cache.folder.glob("*.parquet")
    batches = cached.read(small)
    next(batches)
    os.truncate(file, 5000)
    with pytest.raises(QueryError, match=r"shop: .*kept result .*changed while.*again"):
        list(batches)
    assert rows(cached, small) == first
    assert [use.how for use in cached.uses] == ["filled", "hit", "refilled"]


def filler(tmp_path, *arguments):
    """A process that reads through the cache, once it has begun."""
    command = [sys.executable, str(FILLER), str(tmp_path), *map(str, arguments)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "begun\n"
    return process


def is_right(process):
    output, _ = process.communicate(timeout=300)
    return process.returncode == 0 and output == "right\n"


@pytest.mark.slow
def test_processes_that_fill_the_same_results_all_get_them_right(tmp_path):
    event_tables.shop(tmp_path)
    processes = [filler(tmp_path, 1), filler(tmp_path, 2)]
    assert all(map(is_right, processes))
    cache = QueryCache(tmp_path / "cache")
    assert {path.suffix for path in cache.folder.iterdir()} == {".parquet", ".json"}
    assert len(cache.entries()) == 4


@pytest.mark.fault
@pytest.mark.parametrize("step", at_night(["draft", "file", "marker", "whole"], ["file", "whole"]))
def test_readers_get_every_row_when_the_process_that_writes_for_them_is_killed(tmp_path, step):
    source = event_tables.shop(tmp_path)
    writer = filler(tmp_path, 1, step)
    assert writer.stdout.readline() == "there\n"
    cache = QueryCache(tmp_path / "cache")
    assert len(cache.entries()) == (step == "whole")
    reader = filler(tmp_path, 2)  # comes to the same result and waits for its turn
    os.kill(writer.pid, signal.SIGKILL)
    writer.communicate(timeout=300)
    assert is_right(reader)
    assert {path.suffix for path in QueryCache(tmp_path / "cache").folder.iterdir()} == {".parquet", ".json"}
    assert len(cache.entries()) == 4
    assert rows(cache.over(source)) == rows(source)
