"""What query chunks cost, measured in processes of their own; and the model beside it."""

import event_tables
import numpy as np
import pyarrow
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kit.data.tables.query_cache import QueryCache
from kit.data.tables.query_memory import QueryCheck, QuerySetting, measure_queries
from kit.errors import ConfigError, QueryError
from kit.plan.query_chunks import QueryModel, line_through

MIB = 1 << 20


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
    assert 0.4 < one.client_ratio < 2.5  # of a model whose error is a tenth, on machines of every kind
    assert check.model.rows == 200_000
    assert len(check.rows) == 2
    assert "inside the client's process" in repr(check)
    assert "<table" in check._repr_html_()
    assert [*(tmp_path / "cache").iterdir()] == []


def test_a_number_that_fails_keeps_its_row_and_all_that_fail_are_an_error(tmp_path):
    source = event_tables.shop(tmp_path)
    check = measure_queries(source, counts=(1, 2), where="customer > 0", timeout_seconds=60)
    assert not any(setting.note for setting in check.settings)
    with pytest.raises(QueryError, match=r"shop could not be read: not read after"):
        measure_queries(source, counts=(1,), timeout_seconds=0.01)


@pytest.mark.parametrize("counts", [(), (0,), (2, -1), (1.5,), (True,)])
def test_numbers_that_are_none_are_refused(tmp_path, counts):
    with pytest.raises(ConfigError, match="counts"):
        measure_queries(event_tables.shop(tmp_path), counts=counts)


def model(**changes):
    return QueryModel(**{"rows": 1_000_000, "row_bytes": 50.0, "batch_rows": 1000} | changes)


@given(rows=st.integers(0, 10**9), row_bytes=st.floats(0, 1000), allowed=st.integers(0, 1 << 36))
def test_the_fewest_query_chunks_that_fit_are_found(rows, row_bytes, allowed):
    table = model(rows=rows, row_bytes=row_bytes)
    found = table.smallest(allowed, None)
    if found is None:
        assert table.client_bytes(min(max(rows, 1), 65_536)) > allowed
    else:
        assert table.client_bytes(found) <= allowed
        assert found == 1 or table.client_bytes(found - 1) > allowed


def test_more_query_chunks_never_need_more_memory_and_an_embedded_database_is_counted():
    table = model(database_fixed_bytes=5.0 * MIB, database_rows_bytes=40.0 * MIB)
    needed = [table.client_bytes(count) for count in range(1, 50)]
    assert needed == sorted(needed, reverse=True)
    shared = model(database_fixed_bytes=5.0 * MIB, database_rows_bytes=40.0 * MIB, shares_process=True)
    assert shared.client_bytes(4) == table.client_bytes(4) + 15 * MIB


def test_a_database_that_streams_keeps_its_memory_and_one_that_gathers_does_not():
    assert line_through([(1, 9 * MIB), (8, 9 * MIB)]) == (9 * MIB, 0.0)
    fixed, of_rows = line_through([(1, 90 * MIB), (8, 20 * MIB)])
    assert fixed + of_rows == pytest.approx(90 * MIB)
    assert fixed + of_rows / 8 == pytest.approx(20 * MIB)
    assert line_through([(1, 5), (4, 9)]) == (5.0, 0.0)  # noise, not memory that grows with the number


def check(*measured):
    table = model(rows=4_000_000)
    settings = tuple(
        QuerySetting(
            count=count, predicted_client_bytes=table.client_bytes(count), measured_client_bytes=client * MIB,
            measured_database_bytes=database * MIB, seconds=1.0,
        )
        for count, client, database in measured
    )  # fmt: skip
    return QueryCheck(name="shop", phase="load", settings=settings, model=table)


def test_advice_takes_what_was_measured_before_what_is_predicted():
    found = check((1, 480, 40), (4, 130, 20))
    assert "hardly depends" not in repr(found)
    assert "hardly depends on the number of query chunks" in repr(check((1, 480, 20), (4, 130, 22)))
    assert found.advise().count == 1
    assert found.advise("200 MiB").count == 4
    assert "measured 130 MiB here and 20 MiB in the database, within 200 MiB here" in found.advise("200 MiB").reason
    assert found.advise(database_bytes="30 MiB").count == 4
    beyond = found.advise("60 MiB")
    assert beyond.count > 4
    assert "predicted and not measured" in str(beyond)
    assert found.advise("1 MiB").count is None
