"""Tables: the same rows from every database, whole or not at all; query chunks lose no row and split no entity."""

import datetime
import math
import multiprocessing
import pickle
import shutil
import time
import traceback
from collections import Counter
from contextlib import closing

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from postgres_server import PASSWORD, VARIABLE, PostgresServer
from properties import examples
from table_places import Place
from waiting import PATIENCE_SECONDS

from kit.data.tables.declare import open_table
from kit.data.tables.loader import EventData
from kit.data.tables.source import Partition, Query, TableSource, hash_number, plan_partitions
from kit.data.tables.sql import quoted
from kit.errors import ConfigError, KitError, PartitionError, QueryError, SchemaChangedError, UnreachableDatabaseError

DAY = datetime.date(2026, 1, 31)
MOMENT = datetime.datetime(2026, 1, 31, 12, 30, 0, 250)
EVERY_KIND = pa.table({
    "customer": pa.array([1, 2, 1, 3], pa.int64()),
    "count": pa.array([1, None, -3, 2**31 - 1], pa.int32()),
    "price": pa.array([0.1, -2.5, None, 1e300], pa.float64()),
    "paid": pa.array([True, None, False, True]),
    "title": pa.array(["tea", "", None, "größer 'als'"]),
    "time": pa.array([MOMENT, None, MOMENT, MOMENT], pa.timestamp("us")),
    "sent": pa.array([MOMENT, MOMENT, None, MOMENT], pa.timestamp("us", tz="UTC")),
    "day": pa.array([DAY, DAY, DAY, None], pa.date32()),
})  # fmt: skip


def many(rows=5000, entities=97):
    """Rows of entities of very different size."""
    customers = [int(entities * (place / rows) ** 3) for place in range(rows)]
    return pa.table({
        "customer": pa.array(customers, pa.int64()),
        "row": pa.array(range(rows), pa.int64()),
        "title": pa.array([f"title {place % 50}" for place in range(rows)]),
    })  # fmt: skip


def rows_of(table, **query):
    names = query.get("columns") or table.schema().names
    return pa.Table.from_batches(table.read(Query(**query)), pa.schema([table.schema().field(name) for name in names]))


# -- rows and types


def test_every_database_gives_the_same_rows_in_the_same_types(place):
    table = place.write(EVERY_KIND).open()
    types = [pa.int64() if field.type == pa.int32() else field.type for field in EVERY_KIND.schema]
    expected = EVERY_KIND.cast(pa.schema(zip(EVERY_KIND.column_names, types, strict=True)))
    assert isinstance(table, TableSource)
    assert table.schema() == expected.schema
    assert rows_of(table, order_by=("customer", "price")).sort_by("price") == expected.sort_by("price")
    assert table.row_count() == 4
    assert table.null_count("price") == 1
    assert table.value_counts("customer") == [(1, 2), (2, 1), (3, 1)]
    sizes = table.group_sizes("customer", where="price IS NOT NULL")
    assert (sizes.groups, sizes.rows, sizes.squares, sizes.largest) == (3, 3, 3.0, 1)
    assert table.group_sizes("paid").squares == 1 + 4


def test_batches_have_the_columns_asked_for_in_that_order_and_no_more_rows_than_asked_for(place):
    table = place.write(many()).open()
    batches = list(table.read(Query(columns=("title", "row"), batch_rows=700)))
    assert {tuple(batch.schema.names) for batch in batches} == {("title", "row")}
    assert max(batch.num_rows for batch in batches) <= 700
    assert sum(batch.num_rows for batch in batches) == 5000


def test_a_batch_of_no_rows_is_no_batch():
    with pytest.raises(ValueError, match="batch_rows is 0"):
        Query(batch_rows=0)


def test_an_empty_table_has_a_schema_and_no_batch(place):
    table = place.write(EVERY_KIND.slice(0, 0)).open()
    assert table.schema().names == EVERY_KIND.column_names
    assert list(table.read()) == []


def test_rows_come_sorted_with_nulls_last_and_text_by_its_code_points(place):
    table = place.write(pa.table({"word": ["b", "ä", None, "B", "a"], "n": [1, 2, 3, 4, 5]})).open()
    assert rows_of(table, order_by=("word",))["word"].to_pylist() == ["B", "a", "b", "ä", None]
    assert rows_of(table, order_by=("-word", "n"), columns=("word",))["word"].to_pylist() == ["ä", "b", "a", "B", None]
    assert rows_of(table, order_by=("-n",), columns=("word",))["word"].to_pylist() == ["a", "B", None, "ä", "b"]


def test_conditions_of_the_declaration_and_of_the_query_both_hold_also_with_a_comment_at_their_end(place):
    table = place.write(many()).open(where="row < 100 OR row > 4900 -- the ends")
    assert table.row_count() == 199
    assert rows_of(table, where="row % 2 = 0 -- even")["row"].to_pylist() == [*range(0, 100, 2), *range(4902, 5000, 2)]


def test_columns_are_allowed_or_denied(place):
    place.write(EVERY_KIND)
    assert place.open(columns={"allow": ["price", "paid"]}).schema().names == ["price", "paid"]
    assert "paid" not in place.open(columns={"deny": ["paid"]}).schema().names


def test_an_unknown_column_is_answered_with_the_known_ones(place):
    table = place.write(EVERY_KIND).open()
    with pytest.raises(QueryError, match="purchases .*no column 'prize'.*mean 'price'"):
        table.read(Query(columns=("prize",)))
    with pytest.raises(QueryError, match="customer, count, price"):
        table.read(Query(order_by=("-xyz",)))
    with pytest.raises(QueryError, match="no column 'custommer'"):
        table.null_count("custommer")


def test_a_query_stands_for_a_table(database):
    database.write(many())
    query = "SELECT customer, count(*) AS rows, avg(row) AS middle FROM purchases GROUP BY customer;"
    table = database.open(query=query, main_entity_column="customer")
    assert [(field.name, field.type) for field in table.schema()] == [
        ("customer", pa.int64()), ("rows", pa.int64()), ("middle", pa.float64()),
    ]  # fmt: skip
    assert sum(rows_of(table)["rows"].to_pylist()) == 5000


def test_a_query_with_two_columns_of_a_name_is_refused(postgres):
    declared = {"type": "attribute", "name": "t", "query": "SELECT 1 AS n, 2 AS n, 3 AS m"}
    with pytest.raises(ConfigError, match="^query: .* n .*more than once"):
        open_table({**declared, "connection": postgres.connection()})


def test_enumerations_ids_and_decimals_have_a_type_that_is_read(database):
    database.execute("CREATE TYPE mood AS ENUM ('sad', 'glad')")
    database.execute("CREATE TABLE t (mood mood, id uuid, amount decimal(12, 2), small smallint, real real)")
    database.execute("INSERT INTO t VALUES ('glad', 'A0EEBC99-9C0B-4EF8-BB6D-6BB9BD380A11', 12.34, 5, 0.5)")
    assert rows_of(database.open("t")).to_pylist() == [
        {"mood": "glad", "id": "a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11", "amount": 12.34, "small": 5, "real": 0.5}
    ]


def test_a_misspelt_table_is_answered_with_one_that_is_there(database):
    database.execute("CREATE TABLE purchases (n integer)")
    with pytest.raises(ConfigError, match="did you mean 'purchases'"):
        database.open("purchses")


def test_a_type_that_is_not_read_is_named_with_two_ways_out(database):
    blob = "bytea" if database.kind == "postgresql" else "BLOB"
    database.execute(f"CREATE TABLE t (n integer, raw {blob}, list integer[])")
    with pytest.raises(ConfigError, match=rf"^columns: raw is {blob}, list is .*cast"):
        database.open("t")
    with pytest.raises(ConfigError, match=r"list is (integer|INTEGER)\[\]"):
        database.open("t", columns={"deny": ["raw"]})
    assert database.open("t", columns={"allow": ["n"]}).schema().names == ["n"]


def test_a_whole_number_that_does_not_fit_is_an_error_of_the_query(tmp_path):
    import duckdb

    with duckdb.connect(str(tmp_path / "t.duckdb")) as opened:
        opened.execute("CREATE TABLE t AS SELECT 18446744073709551615::UBIGINT AS n")
    with pytest.raises(QueryError, match="18446744073709551615"):
        rows_of(open_table(tmp_path / "t.duckdb", table="t"))


# -- query chunks


@pytest.mark.parametrize(("transformation", "column"), [("hash_mod", "customer"), ("exact_group", "title")])
def test_query_chunks_are_the_table_each_row_once_and_no_entity_in_two(place, transformation, column):
    table = place.write(many()).open(partition_column=column, partition_values_transformation=transformation)
    for count in (1, 2, 7):
        partitions = plan_partitions(table, count)
        parts = [rows_of(table, partition=part) for part in partitions]
        assert len(parts) == count
        assert sorted(row for part in parts for row in part["row"].to_pylist()) == list(range(5000))
        owners = Counter(value for part in parts for value in set(part[column].to_pylist()))
        assert set(owners.values()) == {1}


ENTITIES = {
    "int64": st.integers(-(2**63), 2**63 - 1),
    "string": st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=12),
    "date32[day]": st.dates(datetime.date(1, 1, 1)),
    "bool": st.booleans(),
}
KINDS = ("hash_mod", "exact_group")


def cut_into_query_chunks(place, data):
    """Check that any rows are cut into any number of query chunks, each row once and no entity in two."""
    transformation = data.draw(st.sampled_from(KINDS))
    type_name = data.draw(st.sampled_from(sorted(ENTITIES)))
    pool = data.draw(st.lists(ENTITIES[type_name], min_size=1, max_size=12))
    entities = data.draw(st.lists(st.sampled_from(pool), min_size=2, max_size=60))
    count = data.draw(st.integers(1, 9))
    types = {"int64": pa.int64(), "string": pa.string(), "date32[day]": pa.date32(), "bool": pa.bool_()}
    rows = pa.table({"entity": pa.array(entities, types[type_name]), "row": range(len(entities))})
    table = place.write(rows).open(partition_column="entity", partition_values_transformation=transformation)
    found = {}
    for part in plan_partitions(table, count):
        for row in rows_of(table, partition=part).to_pylist():
            assert row["row"] not in found
            found[row["row"]] = (part.number, row["entity"])
    assert len(found) == len(entities)
    assert len(set(found.values())) == len(set(entities))
    if transformation == "hash_mod":
        assert all(number == hash_number(entity) % count for number, entity in found.values())


@examples(15)
@given(data=st.data())
def test_for_any_entities_and_any_count_each_row_is_in_exactly_one_query_chunk(tmp_path_factory, data):
    kind = data.draw(st.sampled_from(["duckdb", "parquet"]))
    cut_into_query_chunks(Place(kind, tmp_path_factory.mktemp("place")), data)


@examples(10)
@given(data=st.data())
def test_a_server_cuts_any_entities_into_any_count_in_the_same_way(postgres, tmp_path, data):
    cut_into_query_chunks(Place("postgresql", tmp_path, postgres), data)


def test_more_query_chunks_than_entities_leave_some_empty(place):
    declared = {"partition_column": "n", "partition_values_transformation": "exact_group"}
    table = place.write(pa.table({"n": [1, 1, 2]})).open(**declared)
    parts = [rows_of(table, partition=part)["n"].to_pylist() for part in plan_partitions(table, 4)]
    assert parts == [[1, 1], [2], [], []]


def test_every_database_puts_an_entity_into_the_same_query_chunk(place):
    ids = [0, -1, 7, 2**62]
    table = place.write(pa.table({"id": ids * 2, "word": ["a", "ä", "'", "日本"] * 2})).open(partition_column="word")
    for part in plan_partitions(table, 5):
        assert {hash_number(word) % 5 for word in rows_of(table, partition=part)["word"].to_pylist()} <= {part.number}
    for number in range(5):
        part = Partition(column="id", transformation="hash_mod", number=number, count=5)
        assert {hash_number(value) % 5 for value in rows_of(table, partition=part)["id"].to_pylist()} <= {number}


def test_exact_groups_are_balanced_by_rows():
    class Counts:
        name, partition_column, partition_transformation = "counts", "who", "exact_group"

        def null_count(self, column):
            return 0

        def value_counts(self, column):
            return [(value, 1 + 1000 // (value + 1)) for value in range(200)]

    counts = dict(Counts().value_counts("who"))
    for count in (2, 3, 8):
        sizes = [sum(counts[value] for value in part.values) for part in plan_partitions(Counts(), count)]
        best = max(max(counts.values()), math.ceil(sum(counts.values()) / count))
        assert max(sizes) <= 4 / 3 * best


def test_nulls_among_the_entities_are_refused_with_how_many(place):
    rows = many().append_column(
        "who", pa.array([None if place % 1000 == 0 else 1 for place in range(5000)], pa.int64())
    )
    table = place.write(rows).open(partition_column="who")
    with pytest.raises(PartitionError, match=r"5 rows .*no who.*where: '.who. IS NOT NULL'"):
        plan_partitions(table, 4)
    cleaned = place.open(partition_column="who", where='"who" IS NOT NULL')
    assert sum(len(rows_of(cleaned, partition=part)) for part in plan_partitions(cleaned, 4)) == 4995


def test_what_cannot_be_cut_is_refused(place):
    table = place.write(EVERY_KIND).open()
    with pytest.raises(PartitionError, match="has no partition_column"):
        plan_partitions(table, 2)
    with pytest.raises(PartitionError, match="0 query chunks"):
        plan_partitions(place.open(main_entity_column="customer"), 0)
    with pytest.raises(PartitionError, match="names no entity"):
        rows_of(table, partition=Partition(column="price", transformation="hash_mod", number=0, count=2))
    with pytest.raises(PartitionError, match="numbers go from 0 to 1"):
        Partition(column="customer", transformation="hash_mod", number=2, count=2)


# -- names and values


NASTY = ['a"b', "a'b", 'x"; DROP TABLE purchases; --', "$1", "%s", "select", "ünï", "a b", "back\\slash"]


def test_no_name_is_ever_read_as_sql(place):
    rows = pa.table({name: pa.array([place], pa.int64()) for place, name in enumerate(NASTY)})
    table = place.write(many()).write(rows, "n'; x").open("n'; x", main_entity_column=NASTY[2])
    assert rows_of(table, order_by=tuple(NASTY)).to_pylist() == rows.to_pylist()
    assert sum(len(rows_of(table, partition=part)) for part in plan_partitions(table, 3)) == 1
    assert table.value_counts(NASTY[0]) == [(0, 1)]
    assert place.open().row_count() == 5000


def test_no_value_is_ever_read_as_sql(place):
    words = [*NASTY, "'; DROP TABLE purchases; --", "{1,2}", "NULL"]
    rows = pa.table({"word": words * 3, "row": range(3 * len(words))})
    table = place.write(rows).open(partition_column="word", partition_values_transformation="exact_group")
    found = [row for part in plan_partitions(table, 4) for row in rows_of(table, partition=part)["row"].to_pylist()]
    assert sorted(found) == list(range(3 * len(words)))


@pytest.mark.parametrize("name", ["", "a\0b"])
def test_what_no_database_takes_for_a_name_is_refused(name):
    with pytest.raises(QueryError, match="no name"):
        quoted(name)


def test_a_declared_query_cannot_change_the_database(database):
    database.write(many())
    ended = [f"SELECT 1 AS n) AS x; {end}; DROP TABLE purchases; --" for end in ("SELECT 1", "COMMIT", "ROLLBACK")]
    for query in (*ended, "SELECT 1 AS n); DROP TABLE purchases; --", "DELETE FROM purchases RETURNING customer"):
        with pytest.raises(ConfigError):
            database.open(query=query)
    assert database.open().row_count() == 5000


# -- what goes wrong


def test_a_query_that_fails_mid_way_raises_and_gives_no_part_of_a_batch(place):
    count = 5000 if place.kind == "postgresql" else 400_000  # DuckDB computes a few megabytes ahead
    table = place.write(many(count).append_column("text", pa.array(["5"] * (count - 1) + ["five"]))).open()
    read = []
    with pytest.raises(QueryError, match=r"purchases: .*failed after \d+,000 rows"):
        read.extend(batch.num_rows for batch in table.read(Query(batch_rows=1000, where="CAST(text AS INTEGER) > 0")))
    assert set(read) == {1000}
    assert sum(read) < count
    assert table.row_count() == count


def test_a_division_by_zero_late_in_the_data_is_an_error(postgres, tmp_path):
    table = Place("postgresql", tmp_path, postgres).write(many()).open(where="1000 / (4990 - row) IS NOT NULL")
    batches = table.read(Query(batch_rows=1000))
    assert sum(next(batches).num_rows for _ in range(4)) == 4000
    with pytest.raises(QueryError, match="after 4,000 rows.*division by zero"):
        next(batches)
    with pytest.raises(StopIteration):
        next(batches)


def test_a_query_that_makes_no_sense_is_refused_in_the_databases_words(place):
    table = place.write(many()).open()
    with pytest.raises(QueryError, match=r"purchases: the query failed: .*customr.*mean 'customer'"):
        rows_of(table, where="customr > 3")


def test_a_condition_on_a_column_that_is_not_there_is_refused_when_the_table_is_opened(place):
    place.write(many())
    for where in ("customr > 3", 'row > 1 AND "customr" IS NOT NULL'):
        with pytest.raises(ConfigError, match=r"where: .*customr.*mean 'customer'"):
            place.open(where=where)
    with pytest.raises(ConfigError, match=r"where: .*aggregate"):
        place.open(where="count(*) > 3")
    table = place.open(main_entity_column="customer")
    with pytest.raises(ConfigError, match=r"where: .*customr.*mean 'customer'"):
        EventData(table, where="customr > 3")


def test_a_changed_column_is_refused(database):
    table = database.write(many()).open()
    database.execute("ALTER TABLE purchases ALTER COLUMN row TYPE double precision")
    with pytest.raises(SchemaChangedError, match=r"row was (bigint|BIGINT) when .* is (double precision|DOUBLE) now"):
        rows_of(table, columns=("customer",))
    database.execute("ALTER TABLE purchases DROP COLUMN row")
    with pytest.raises(SchemaChangedError, match="purchases .*lost .*column 'row'"):
        table.row_count()
    database.execute("DROP TABLE purchases")
    with pytest.raises(QueryError, match="purchases"):
        rows_of(table)


def test_a_new_column_is_left_alone(database):
    table = database.write(many()).open()
    database.execute("ALTER TABLE purchases ADD COLUMN more integer")
    assert rows_of(table).column_names == ["customer", "row", "title"]


def test_parquet_files_that_changed_their_columns_are_refused(tmp_path):
    place = Place("parquet", tmp_path).write(many())
    table = place.open()
    place.write(many().drop_columns(["row"]))
    with pytest.raises(SchemaChangedError, match="lost its column 'row'"):
        rows_of(table)
    place.write(many())
    (tmp_path / "purchases" / "a.parquet").write_bytes(b"PAR1 cut short")
    with pytest.raises(QueryError, match="purchases"):
        rows_of(table)


def test_files_that_are_gone_are_an_error(tmp_path):
    for kind, error in (("duckdb", UnreachableDatabaseError), ("parquet", QueryError)):
        place = Place(kind, tmp_path).write(many())
        table = place.open()
        before = table.state()
        shutil.rmtree(tmp_path / "purchases", ignore_errors=True)
        (tmp_path / "shop.duckdb").unlink()
        with pytest.raises(error, match=str(tmp_path)):
            rows_of(table)
        assert table.state() != before
        (tmp_path / "shop.duckdb").touch()


def test_a_file_is_read_whatever_its_name(tmp_path):
    import pyarrow.parquet as pq

    for other in ("part1.parquet", "a and b.parquet", "what!.parquet"):
        pq.write_table(many().slice(0, 7), tmp_path / other)
    for name in ("part[1].parquet", "a*b.parquet", "it's.parquet", "what?.parquet"):
        pq.write_table(many(), tmp_path / name)
        assert open_table(tmp_path / name).row_count() == 5000


def test_parquet_files_that_disagree_are_an_error_of_the_query(tmp_path):
    import pyarrow.parquet as pq

    table = Place("parquet", tmp_path).write(many()).open()
    pq.write_table(many().drop_columns(["row"]), tmp_path / "purchases" / "b.parquet")
    with pytest.raises(QueryError, match="row"):
        rows_of(table)


def test_the_state_changes_with_the_data_and_with_nothing_else(database):
    table = database.write(many()).open()
    before = table.state()
    assert rows_of(table).num_rows == 5000
    assert table.state() == before
    database.execute("DELETE FROM purchases WHERE row = 7")
    after = table.state()
    assert after != before
    database.execute("UPDATE purchases SET title = 'x' WHERE row = 8")
    assert table.state() not in (before, after)
    assert database.open(version="v1").state() == "version v1"


def test_the_state_of_parquet_files_is_that_of_each(tmp_path):
    place = Place("parquet", tmp_path).write(many())
    table = place.open()
    before = table.state()
    (tmp_path / "purchases" / "b.parquet").rename(tmp_path / "purchases" / "c.parquet")
    assert table.state() != before


def test_what_is_read_and_where_has_one_identity(place):
    place.write(many())
    assert place.open().identity() == place.open().identity()
    assert place.open().identity() != place.open(where="row > 3").identity()
    assert place.open().identity() != place.open(columns={"deny": ["row"]}).identity()


# -- reads that overlap, end early, or are in another process


def test_reads_that_overlap_do_not_disturb_each_other(place):
    table = place.write(many()).open()
    one, two = table.read(Query(batch_rows=500)), table.read(Query(batch_rows=700, columns=("row",)))
    pairs = [(next(one).num_rows, next(two).num_rows) for _ in range(2)]
    assert table.row_count() == 5000
    assert sum(a for a, _ in pairs) + sum(batch.num_rows for batch in one) == 5000
    assert sum(b for _, b in pairs) + sum(batch.num_rows for batch in two) == 5000


def test_closing_ends_what_is_being_read_and_the_table_can_be_read_again(database):
    table = database.write(many()).open()
    read = table.read(Query(batch_rows=100))
    next(read)
    table.close()
    with pytest.raises((QueryError, StopIteration)):
        while True:
            next(read)
    database.execute("DELETE FROM purchases WHERE row < 1000")  # DuckDB lets nobody write while it is read
    assert rows_of(table).num_rows == 4000


def test_an_abandoned_read_holds_no_connection(postgres, tmp_path):
    table = Place("postgresql", tmp_path, postgres).write(many()).open()
    asked = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'kit'"

    def connections(expected):
        """How many there are, once the server has ended those that were closed."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while (found := postgres.execute(asked)) != [(expected,)] and time.monotonic() < deadline:
            pass
        return found

    with closing(table.read(Query(batch_rows=10))) as read:
        next(read)
        assert connections(1) == [(1,)]
    assert connections(0) == [(0,)]


FORKS = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # newer Pythons advise against it


def _count(table, queue):
    try:
        queue.put(sum(batch.num_rows for batch in table.read()))
    except KitError as error:
        queue.put(str(error))


@FORKS
def test_a_table_is_read_in_a_forked_process_too(place):
    table = place.write(many()).open()
    rows_of(table)
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=_count, args=(table, queue), daemon=True)
    child.start()
    assert queue.get(timeout=PATIENCE_SECONDS) == 5000
    child.join()
    assert rows_of(table).num_rows == 5000


@FORKS
def test_a_fork_in_the_middle_of_a_read_leaves_the_read_alone(place):
    table = place.write(many(50_000)).open()
    read = table.read(Query(batch_rows=1000))
    rows = next(read).num_rows
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=_count, args=(table, queue), daemon=True)
    child.start()
    answer = queue.get(timeout=PATIENCE_SECONDS)
    child.join()
    assert answer == 50_000 or (place.kind == "duckdb" and "forked" in answer)
    assert rows + sum(batch.num_rows for batch in read) == 50_000


def test_a_pickled_table_is_the_same_table_and_holds_no_password(place):
    table = place.write(many()).open()
    packed = pickle.dumps(table)
    assert PASSWORD.encode() not in packed
    assert rows_of(pickle.loads(packed)) == rows_of(table)


# -- memory


def test_the_databases_memory_is_measured_and_less_for_a_part(place):
    table = place.write(many(200_000)).open(main_entity_column="customer")
    assert table.memory_bytes() is None
    assert table.shares_process == (place.kind != "postgresql")
    for _ in table.read(Query(order_by=("title", "row"))):
        pass
    part = place.open(main_entity_column="customer")
    for _ in part.read(Query(order_by=("title", "row"), partition=plan_partitions(part, 16)[3])):
        pass
    assert 1 << 16 < part.memory_bytes() < table.memory_bytes() < 1 << 30


def test_an_embedded_database_keeps_to_its_memory(tmp_path):
    Place("duckdb", tmp_path).write(many(400_000))
    place = {"kind": "duckdb", "path": str(tmp_path / "shop.duckdb"), "threads": 1}
    declared = {"type": "attribute", "name": "t", "table": "purchases"}
    free = open_table({**declared, "connection": place})
    bound = open_table({**declared, "connection": {**place, "memory_bytes": "14 MiB"}})
    for table in (free, bound):
        assert sum(batch.num_rows for batch in table.read(Query(order_by=("-row", "title")))) == 400_000
    assert bound.memory_bytes() <= 14 << 20 < free.memory_bytes()
    starved = open_table({**declared, "connection": {**place, "memory_bytes": "1 MiB"}})
    with pytest.raises(QueryError, match=r"(?i)memory.*connection.memory_bytes"):
        rows_of(starved, order_by=("-row", "title"))


# -- servers


def everything_said(error):
    return "".join(traceback.format_exception(error.value))


@pytest.mark.fault
def test_a_server_that_dies_mid_way_is_named_and_then_unreachable(postgres_installed, monkeypatch, tmp_path):
    monkeypatch.setenv(VARIABLE, PASSWORD)
    server = PostgresServer()
    try:
        place = Place("postgresql", tmp_path, server).write(many(20_000))
        table = place.open()
        read = table.read(Query(batch_rows=1000))
        next(read)
        server.kill()
        with pytest.raises(QueryError, match=rf"after 1,000 rows.*127.0.0.1, port {server.port} was lost") as lost:
            list(read)
        with pytest.raises(UnreachableDatabaseError, match=f"127.0.0.1, port {server.port} cannot be used") as gone:
            rows_of(table)
        with pytest.raises(UnreachableDatabaseError):
            place.open()
        assert PASSWORD not in everything_said(lost) + everything_said(gone)
    finally:
        server.stop()


def test_a_session_that_is_ended_mid_way_is_an_error(postgres, tmp_path):
    table = Place("postgresql", tmp_path, postgres).write(many()).open()
    read = table.read(Query(batch_rows=100))
    next(read)
    postgres.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'kit'")
    with pytest.raises(QueryError, match=r"after [1-9]\d*00 rows.*terminat.*lost.*read again"):
        list(read)
    assert rows_of(table).num_rows == 5000


def test_a_wrong_password_is_refused_and_never_said(postgres, tmp_path, monkeypatch):
    place = Place("postgresql", tmp_path, postgres).write(many())
    table = place.open()
    monkeypatch.setenv(VARIABLE, "wrong-and-secret")
    with pytest.raises(UnreachableDatabaseError, match="password authentication failed") as error:
        rows_of(table)
    assert "wrong-and-secret" not in everything_said(error)
    for shown in (repr(table), repr(table.declared), str(table.declared), table.identity(), repr(table.__dict__)):
        assert PASSWORD not in shown
        assert "wrong-and-secret" not in shown


def test_a_password_that_is_not_set_is_asked_for_by_its_variable(postgres, monkeypatch):
    monkeypatch.delenv(VARIABLE)
    with pytest.raises(ConfigError, match=rf"connection.password: .*environment variable {VARIABLE}"):
        open_table({"type": "attribute", "name": "t", "table": "t", "connection": postgres.connection()})


def test_the_password_may_be_in_the_file_of_passwords_or_behind_a_service(postgres, tmp_path, monkeypatch):
    postgres.execute("CREATE TABLE t AS SELECT 1 AS n")
    passwords = tmp_path / "pgpass"
    passwords.write_text(f"127.0.0.1:{postgres.port}:*:{postgres.user}:{PASSWORD}\n")
    passwords.chmod(0o600)
    monkeypatch.setenv("PGPASSFILE", str(passwords))
    declared = {"type": "attribute", "name": "t", "table": "t"}
    assert open_table({**declared, "connection": postgres.connection(password="")}).row_count() == 1
    services = tmp_path / "services"
    services.write_text(f"[shop]\nhost=127.0.0.1\nport={postgres.port}\nuser={postgres.user}\ndbname=postgres\n")
    monkeypatch.setenv("PGSERVICEFILE", str(services))
    assert open_table({**declared, "connection": {"kind": "postgresql", "service": "shop"}}).row_count() == 1


def test_a_server_that_does_not_answer_is_given_up_after_connect_seconds():
    import socket

    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen(1)
        port = deaf.getsockname()[1]
        connection = {"kind": "postgresql", "host": "127.0.0.1", "port": port, "database": "d", "connect_seconds": 2}
        with pytest.raises(UnreachableDatabaseError, match=f"127.0.0.1, port {port}") as error:
            open_table({"type": "attribute", "name": "t", "table": "t", "connection": connection})
    assert isinstance(error.value, ConnectionError)


def test_a_file_that_is_being_written_to_is_not_read(tmp_path):
    import duckdb

    with duckdb.connect(str(tmp_path / "t.duckdb")) as opened:
        opened.execute("CREATE TABLE t AS SELECT 1 AS n")
        with pytest.raises(UnreachableDatabaseError, match="writing"):
            open_table(tmp_path / "t.duckdb", table="t")
    assert open_table(tmp_path / "t.duckdb", table="t").row_count() == 1
    (tmp_path / "none.duckdb").write_text("no database")
    with pytest.raises(UnreachableDatabaseError, match=r"none\.duckdb cannot"):
        open_table(tmp_path / "none.duckdb", table="t")
