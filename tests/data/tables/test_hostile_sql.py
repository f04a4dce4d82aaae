"""Hostile SQL in a declaration runs no second statement, reaches no file and no other database; fair SQL works."""

import os
import tempfile
from pathlib import Path

import pyarrow as pa
import pytest
from properties import nightly

from kit.data.tables.source import Query
from kit.errors import KitError, QueryError

ROWS = pa.table({"row": range(10), "customer": [n % 3 for n in range(10)], "text": ["a;b", "c)--d"] * 5})
CANARY = "canary-of-a-file-2f9c"


@pytest.fixture
def secret(tmp_path):
    """A file that no declaration names, readable by every user; nothing is beside it after any test."""
    folder = Path(tempfile.mkdtemp(dir="/tmp", prefix="kit-hostile-"))
    folder.chmod(0o777)
    file = folder / "secret.csv"
    file.write_text(f"word\n{CANARY}\n")
    file.chmod(0o644)
    yield file
    found = os.listdir(folder)
    for left in folder.iterdir():
        left.unlink()
    folder.rmdir()
    assert found == [file.name]


@pytest.fixture
def hostile_to(secret):
    """Takes a place whose rows, once written, must all be there when the test has ended."""
    places = []

    def take(place):
        places.append(place.write(ROWS))
        return place

    yield take
    assert [place.open().row_count() for place in places] == [len(ROWS)] * len(places)


def refused(place, **fields):
    """That such a table is refused, at the latest when it is read, and shows nothing of the file it reached for."""
    with pytest.raises(KitError) as caught:
        table = place.open(**fields)
        pytest.fail(f"it was read: {[batch.to_pylist() for batch in table.read()]}")
    assert CANARY not in str(caught.value)
    return caught.value


SECOND = [
    "1=1); COPY purchases TO '{folder}/x' --",
    "1=1) AS x; DROP TABLE purchases; --",
    "1=1; DROP TABLE purchases",
    "1=1);",
    "1=1) OR (1=1",
    "1=1) UNION ALL SELECT 1 --",
    "1=1)) --",
    "1=1 /*",
    "1=1 GROUP BY 1",
    "1=1 ORDER BY 1",
    "1=1 LIMIT 1",
    "1=1 UNION SELECT 1",
    "SELECT true",
    "1, 2",
    "true\0); DROP TABLE purchases; --",
    "1=1); COMMIT; SET default_transaction_read_only = off; DROP TABLE purchases; --",
    "1=1); ATTACH '{folder}/x.duckdb' AS x; CREATE TABLE x.t AS SELECT 1; --",
]


@pytest.mark.parametrize("where", SECOND)
def test_a_condition_is_one_expression(place, secret, hostile_to, where):
    hostile_to(place)
    where = where.format(folder=secret.parent)
    assert "where" in str(refused(place, where=where))
    with pytest.raises(QueryError):
        list(place.open().read(Query(where=where)))
    with pytest.raises(QueryError):
        place.open().group_sizes("customer", where=where)


REACHES = {
    "duckdb": [
        "read_csv('{file}')", "read_text('{file}')", "read_blob('{file}')", "read_json('{file}')", "glob('/etc/*')",
        "'{file}'", "sniff_csv('{file}')", "read_csv('https://127.0.0.1:9/x.csv')", "read_text('s3://bucket/x')",
        "enable_logging(storage := 'file', storage_path := '{folder}/log')", "duckdb_secrets()",
        "read_csv('/dev/stdin')",
        "sqlite_scan('{file}', 't')", "postgres_scan('host=127.0.0.1', 'public', 't')", "iceberg_scan('{folder}')",
        "query('SELECT * FROM read_text(''{file}'')')", "query('COPY purchases TO ''{folder}/x''')", "ROWS",
        "json_execute_serialized_sql(json_serialize_sql('SELECT * FROM read_text(''{file}'')'))",
        "(WITH x AS (INSERT INTO purchases VALUES (1, 1, 'x') RETURNING *) SELECT * FROM x)",
    ],
    "postgresql": [
        "pg_read_file('{file}')", "pg_catalog.pg_read_file('{file}')", "\"pg_read_file\"('{file}')",
        "PG_READ_FILE('{file}')", "pg_read_file /* ( */ ('{file}')", "pg_read_file --\n('{file}')",
        "pg_read_binary_file('{file}')", "pg_ls_dir('/etc')", "pg_stat_file('{file}')", "lo_import('{file}')",
        "lo_export(1, '{folder}/x')", "lo_from_bytea(0, 'x')", "pg_sleep(600)", "pg_terminate_backend(1)",
        "set_config('default_transaction_read_only', 'off', false)", "pg_reload_conf()", "pg_notify('a', 'b')",
        "query_to_xml('SELECT pg_read_file(''{file}'')', true, true, '')", "pg_hba_file_rules", "pg_file_settings",
        "ts_stat('SELECT pg_read_file(''{file}'')::tsvector')", "nextval('s')", "pg_advisory_lock(1)",
        "U&\"pg\\005fread_file\"('{file}')", "u&\"pg!005fread_file\" UESCAPE '!' ('{file}')",
        "dblink('host=127.0.0.1', 'SELECT 1') AS t(a int)", "dblink_connect('host=127.0.0.1')",
        "(WITH x AS (DELETE FROM purchases RETURNING *) SELECT * FROM x) AS y", "pg_rotate_logfile()",
        "pg_export_snapshot()", "pg_switch_wal()", "pg_create_restore_point('x')", "pg_stat_reset()",
    ],
}  # fmt: skip
REACHES["parquet"] = REACHES["duckdb"]


@pytest.mark.parametrize("number", range(max(map(len, REACHES.values()))))
def test_no_function_reaches_out_of_the_database(place, secret, hostile_to, number):
    if number >= len(REACHES[place.kind]):
        return
    hostile_to(place)
    reached = REACHES[place.kind][number].format(file=secret, folder=secret.parent)
    wheres = [f"EXISTS (SELECT * FROM {reached})", f"row >= (SELECT count(*) FROM {reached})"]
    queries = [f"SELECT * FROM {reached}", f"WITH x AS (SELECT * FROM {reached}) SELECT * FROM x;"]
    some = slice(None) if nightly() else slice(number % 2, number % 2 + 1)
    for where in wheres[some]:
        refused(place, where=where)
    for query in queries[some] if place.kind != "parquet" else ():
        refused(place, query=query)


STATEMENTS = [
    "COPY purchases TO '{folder}/x'",
    "COPY (SELECT 1) TO PROGRAM 'touch {folder}/x'",
    "COPY purchases FROM '{file}'",
    "ATTACH '{folder}/x.duckdb' AS x",
    "INSTALL httpfs",
    "LOAD httpfs",
    "LOAD 'plpgsql'",
    "SET enable_external_access = true",
    "EXPORT DATABASE '{folder}/x'",
    "CREATE TABLE x AS SELECT 1",
    "SELECT 1 AS a INTO x",
    "INSERT INTO purchases VALUES (1, 1, 'x') RETURNING *",
    "UPDATE purchases SET row = 0",
    "DELETE FROM purchases",
    "DROP TABLE purchases",
    "TRUNCATE purchases",
    "CALL enable_logging()",
    "DO $$ BEGIN END $$",
    "EXPLAIN ANALYZE DELETE FROM purchases",
    "SELECT 1 AS a; SELECT 2 AS a",
    "SELECT 1 AS a; DROP TABLE purchases",
    "SELECT 1 AS a) AS x; DROP TABLE purchases; --",
    "SELECT 1 AS a) AS x, (SELECT 2 AS b",
    "PREPARE x AS SELECT 1",
    "",
    ";",
    "SELECT 1 AS a /*",
    "SELECT 1 AS a\0; DROP TABLE purchases",
]


@pytest.mark.parametrize("statement", STATEMENTS)
def test_a_query_is_one_select(database, secret, hostile_to, statement):
    refused(hostile_to(database), query=statement.format(file=secret, folder=secret.parent))


@pytest.mark.parametrize(
    "name",
    [
        "purchases; DROP TABLE purchases", 'purchases"; DROP TABLE purchases; --', 'purchases" AS x, "purchases',
        "{file}", "read_text('{file}')", "(SELECT 1)", "pg_hba_file_rules", "pg_catalog.pg_file_settings", "a\0b",
        "purchases WHERE false",
    ],
)  # fmt: skip
def test_the_name_of_a_table_is_a_name(database, secret, hostile_to, name):
    refused(hostile_to(database), name=name.format(file=secret))


@pytest.mark.parametrize("name", ["row; DROP TABLE purchases", 'row" FROM purchases; --', "read_text('{file}')", "*"])
def test_the_name_of_a_column_is_a_name(place, secret, hostile_to, name):
    name = name.format(file=secret)
    hostile_to(place)
    for fields in (
        {"main_entity_column": name, "type": "event"},
        {"columns": {"allow": [name]}},
        {"date_column": name},
    ):
        assert "no column" in str(refused(place, **fields))


def test_a_view_that_a_file_brings_with_it_reads_no_other_file(database, secret, hostile_to):
    if database.kind == "postgresql":
        return
    hostile_to(database).execute(f"CREATE VIEW spy AS SELECT * FROM read_text('{secret}')")
    error = refused(database, name="spy")
    assert "declare other files as sources" in str(error)


FAIR = {
    "row < 5": 5,
    "row < 5 -- ; the first half )": 5,
    "row < 5 /* ; ( */ AND true": 5,
    "text = 'a;b'": 5,
    "text = 'c)--d' OR text = '/*'": 5,
    "text <> 'it''s; DROP TABLE purchases; --'": 10,
    "text = $$a;b$$": 5,
    "(row > 2) AND (row < 5 OR customer IN (1, 2))": 5,
    "row IN (SELECT max(row) FROM {table} GROUP BY customer)": 3,
    "CASE WHEN text LIKE 'a;%' THEN row > 3 ELSE false END": 3,
    "substr(text, 1, 1) = 'a' AND length(text) = 3 AND abs(row - 4) <= 2": 3,
    "coalesce(row, 0) BETWEEN 2 AND 4 AND random() >= 0": 3,
    "EXISTS (WITH x AS (SELECT 1 AS a) SELECT * FROM x WHERE a = 1)": 10,
    '"row" = 1': 1,
}


@pytest.mark.parametrize("where", FAIR)
def test_fair_conditions_keep_working(place, where):
    given = where.format(table='"parquet files"' if place.kind == "parquet" else "purchases")
    assert place.write(ROWS).open(where=given).row_count() == FAIR[where]
    assert sum(batch.num_rows for batch in place.open().read(Query(where=given))) == FAIR[where]


QUERIES = {
    "SELECT * FROM purchases;": 10,
    "SELECT * FROM purchases -- all ; of them": 10,
    "WITH a AS (SELECT customer, count(*) AS n FROM purchases GROUP BY customer) SELECT * FROM a": 3,
    "SELECT p.row, q.text FROM purchases p JOIN purchases q ON p.row = q.row AND q.text = 'a;b'": 5,
    "SELECT row, rank() OVER (PARTITION BY customer ORDER BY row) AS place FROM purchases": 10,
    "SELECT row FROM purchases UNION ALL SELECT row FROM purchases": 20,
    "WITH RECURSIVE n AS (SELECT 1 AS i UNION ALL SELECT i + 1 FROM n WHERE i < 7) SELECT i FROM n": 7,
    "(SELECT row FROM purchases WHERE text = 'c)--d')": 5,
    "SELECT DISTINCT customer FROM purchases ORDER BY customer LIMIT 2": 2,
    "VALUES (1, 'a'), (2, 'b')": 2,
    "SELECT '; DROP TABLE purchases; --' AS words, CAST(random() AS INTEGER) AS number": 1,
    "SELECT max(row) FILTER (WHERE customer = 1) AS most, 'pg_sleep' AS word FROM purchases": 1,
}


@pytest.mark.parametrize("query", QUERIES)
def test_fair_queries_keep_working(database, query):
    table = database.write(ROWS).open(query=query)
    assert table.row_count() == QUERIES[query]
    assert sum(batch.num_rows for batch in table.read()) == QUERIES[query]


def test_two_tables_of_one_file_are_read_at_once_with_bounds_of_their_own(database):
    """A sealed DuckDB file takes other settings of kit's own, and each session is sealed."""
    database.write(ROWS)
    declared = database.declaration()
    first = database.open()
    opened = first.read(Query(batch_rows=1))
    next(opened)
    bounds = {"memory_bytes": "64 MiB"} | ({"threads": 2} if database.kind == "duckdb" else {})
    second = database.open(connection={**declared["connection"], **bounds})
    assert second.row_count() == 10
    assert sum(batch.num_rows for batch in opened) == 9


def test_parquet_files_of_any_name_are_read_and_no_others(tmp_path):
    import pyarrow.parquet as pq

    from kit.data.tables.declare import open_table

    folder = tmp_path / "a 'b' [c] *"
    folder.mkdir()
    for name in ("x[1].parquet", "x1.parquet", "y?.parquet", "ü;--.parquet"):
        pq.write_table(ROWS, folder / name)
    assert open_table(folder).row_count() == 40
    assert open_table(folder / "x[1].parquet").row_count() == 10
    other = str(folder / "x1.parquet").replace("'", "''")
    with pytest.raises(KitError, match="declare other files"):
        open_table(folder / "y?.parquet", where=f"row IN (SELECT row FROM '{other}')").row_count()
