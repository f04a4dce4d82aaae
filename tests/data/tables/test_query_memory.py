"""What query chunks cost, measured in processes of their own; and the model beside it."""

import re

import event_tables
import numpy as np
import pyarrow
import pytest
from hypothesis import given
from hypothesis import strategies as st
from properties import crossed
from table_places import Place

from kit.data.tables.cache import QueryCache
from kit.data.tables.chunks import DatabaseMemory, QueryModel, database_memory
from kit.data.tables.measure import QueryCheck, QuerySetting, look_at, measure_queries
from kit.data.tables.source import Query, plan_partitions
from kit.errors import ConfigError, QueryError

MIB = 1 << 20


@pytest.mark.slow
def test_each_number_of_query_chunks_is_read_whole_in_a_process_of_its_own(tmp_path):
    draw = np.random.default_rng(0)
    prices = {"customer": draw.integers(5_000, size=200_000), "price": draw.random(200_000)}
    source = event_tables.shop(tmp_path, "duckdb", pyarrow.table(prices), date_column="")
    check = measure_queries(QueryCache(tmp_path / "cache").over(source), counts=(8, 1))
    one, eight = check.settings
    assert (one.count, eight.count) == (1, 8)
    assert one.largest_rows == 200_000
    assert 200_000 / 8 <= eight.largest_rows < 200_000 / 4
    assert one.measured_client_bytes > eight.measured_client_bytes > 0
    assert one.measured_database_bytes > 0
    assert 0.5 < one.client_ratio < 2  # within a seventh where allocators are as where the model was made
    assert one.predicted_database_bytes == eight.measured_database_bytes
    assert check.model.rows == 200_000
    assert len(check.rows) == 2
    assert "client's process" in repr(check)
    assert "any number" in repr(check)
    assert "<table" in check._repr_html_()
    assert [*(tmp_path / "cache").iterdir()] == []


@pytest.mark.slow
def test_a_number_that_fails_keeps_its_row_and_all_that_fail_are_an_error(tmp_path):
    source = event_tables.shop(tmp_path)
    check = measure_queries(source, counts=(1, 2), where="customer > 0", timeout_seconds=300)
    assert not any(setting.note for setting in check.settings)
    with pytest.raises(QueryError, match=r"shop could not .*not read after"):
        measure_queries(source, counts=(1,), timeout_seconds=0.01)


@pytest.mark.parametrize("counts", [(), (0,), (2, -1), (1.5,), (True,)])
def test_numbers_that_are_none_are_refused(tmp_path, counts):
    with pytest.raises(ConfigError, match="counts"):
        measure_queries(event_tables.shop(tmp_path), counts=counts)


@pytest.mark.slow
def test_the_memory_of_a_server_falls_where_it_sorts_within_its_limit_and_not_beyond(postgres, tmp_path):
    place = Place("postgresql", tmp_path, postgres).write(event_tables.events(2000, 120_000), "shop")
    query = {"query": "SELECT * FROM shop ORDER BY what, time", "type": "event", "main_entity_column": "customer"}
    wide = place.open("shop", connection=postgres.connection(memory_bytes="64 MiB"), **query)
    check = measure_queries(wide, counts=(1, 8))
    one, eight = (setting.measured_database_bytes for setting in check.settings)
    assert one > 1.5 * eight
    assert "database's memory falls" in repr(check)
    assert check.advise(database_bytes=(one + eight) // 2).count == 8
    bound = place.open("shop", connection=postgres.connection(memory_bytes="1 MiB"), **query)
    assert sum(batch.num_rows for batch in bound.read()) == 120_000
    assert bound.memory_bytes() < one / 1.5


# -- the model


def model(**changes):
    return QueryModel(**{"rows": 1_000_000, "row_bytes": 50.0, "widest_bytes": 20.0, "reading_bytes": 8e6} | changes)


SIZES = st.lists(st.integers(1, 400), min_size=1, max_size=60)


@given(sizes=SIZES, row_bytes=st.floats(0, 1000), objects=st.floats(0, 2000), allowed=st.integers(0, 1 << 25))
def test_the_fewest_query_chunks_that_fit_are_found(sizes, row_bytes, objects, allowed):
    squares = sum(size**2 for size in sizes)
    table = model(
        rows=sum(sizes), row_bytes=row_bytes, squares=squares, largest_entity_rows=max(sizes), object_bytes=objects
    )
    found = table.smallest(allowed, None)
    if found is None:
        assert table.client_bytes(sum(sizes)) > allowed
    else:
        assert table.client_bytes(found) <= allowed
        assert found == 1 or table.client_bytes(found - 1) > allowed


@given(sizes=SIZES, way=st.sampled_from(["hash_mod", "exact_group"]))
def test_more_query_chunks_never_need_more_memory(sizes, way):
    table = model(
        rows=sum(sizes), squares=sum(size**2 for size in sizes), largest_entity_rows=max(sizes),
        listed_entities=len(sizes) if way == "exact_group" else 0,
    )  # fmt: skip
    needed = [table.client_bytes(count) for count in range(1, 70)]
    assert needed == sorted(needed, reverse=True)
    assert table.rows_at_once(1) == sum(sizes)
    assert max(sizes) <= table.rows_at_once(64) <= sum(sizes)


def test_an_embedded_database_is_counted_and_what_each_thread_unpacks_beside_it():
    memory = DatabaseMemory(fixed_bytes=5 * MIB, rows_bytes=40 * MIB)
    shared = model(database=memory, shares_process=True)
    assert shared.client_bytes(4) == model().client_bytes(4) + 15 * MIB
    assert model(database=memory, shares_process=True, unpacking_threads=2).client_bytes(4) > shared.client_bytes(4)
    assert model(database=memory).client_bytes(4) == model().client_bytes(4)


@pytest.mark.slow
@pytest.mark.parametrize(("way", "exponent"), crossed(["hash_mod", "exact_group"], [1, 3]))
def test_the_rows_of_the_largest_query_chunk_are_foretold(tmp_path, way, exponent):
    owners = (2000 * np.random.default_rng(4).random(60_000) ** exponent).astype(np.int64)
    table = pyarrow.table({"customer": owners})
    source = event_tables.shop(tmp_path, table=table, date_column="", partition_values_transformation=way)
    foretold = look_at(source, Query())
    for count in (1, 4, 32):
        parts = plan_partitions(source, count)
        largest = max(sum(batch.num_rows for batch in source.read(Query(partition=part))) for part in parts)
        assert foretold.rows_at_once(count) == pytest.approx(largest, rel=0.25)


def test_a_database_that_streams_needs_the_same_for_any_number():
    assert database_memory({}) is None
    assert database_memory({1: 9 * MIB}) == DatabaseMemory(fixed_bytes=9 * MIB)
    assert database_memory({1: 9 * MIB, 8: 9 * MIB}) == DatabaseMemory(fixed_bytes=9 * MIB)
    assert database_memory({1: 5, 4: 9}) == DatabaseMemory(fixed_bytes=7)  # noise: memory grows with no number


def test_a_database_that_gathers_needs_less_with_more_query_chunks_and_no_more_than_its_limit():
    line = DatabaseMemory(fixed_bytes=10 * MIB, rows_bytes=80 * MIB)
    found = database_memory({count: line.needed_bytes(count) for count in (1, 2, 8)})
    assert found.needed_bytes(4) == pytest.approx(30 * MIB, rel=1e-6)
    bound = DatabaseMemory(fixed_bytes=10 * MIB, rows_bytes=80 * MIB, most_bytes=50 * MIB)
    found = database_memory({count: bound.needed_bytes(count) for count in (1, 2, 4, 8)})
    assert [found.needed_bytes(count) for count in (1, 2)] == [50 * MIB] * 2
    assert found.needed_bytes(16) == pytest.approx(15 * MIB, rel=1e-6)


# -- advice


def check(*measured):
    databases = {count: database * MIB for count, _, database in measured}
    table = model(rows=4_000_000, database=database_memory(databases))
    settings = tuple(
        QuerySetting(
            count=count, predicted_client_bytes=table.client_bytes(count), measured_client_bytes=client * MIB,
            measured_database_bytes=database * MIB, seconds=1.0,
        )
        for count, client, database in measured
    )  # fmt: skip
    return QueryCheck(name="shop", phase="load", settings=settings, model=table)


def test_advice_takes_what_was_measured_before_what_is_predicted():
    found = check((1, 700, 40), (4, 190, 20))
    assert found.advise().count == 1
    assert found.advise("200 MiB").count == 4
    assert re.search("measured 190 MiB .*20 MiB .*database, within 200 MiB", found.advise("200 MiB").reason)
    assert found.advise(database_bytes="30 MiB").count == 4
    beyond = found.advise("60 MiB")
    assert beyond.count > 4
    assert "not measured" in str(beyond)
    assert found.advise("1 MiB").count is None
    below_the_model = check((1, 700, 40), (4, 2, 20)).advise("1 MiB")
    assert below_the_model.count is None
    assert re.search("need 2 MiB here", below_the_model.reason)


def test_what_more_query_chunks_do_to_the_database_is_said():
    assert re.search("memory falls .*40 MiB at 1 .*20 MiB at 4", repr(check((1, 700, 40), (4, 190, 20))))
    assert re.search("about 21 MiB .*any number", repr(check((1, 700, 20), (4, 190, 22))))
    assert check((1, 700, 20)).about_database == ""
