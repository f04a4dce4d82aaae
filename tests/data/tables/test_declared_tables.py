"""Declarations: tables in YAML, there and back; every mistake under its path, and no password anywhere."""

import pickle
import re
import sys

import pytest

from kit.data.tables.declare import DataSource, open_table, read_sources
from kit.errors import ConfigError

GOOD = """
data_sources:
  - type: event
    name: purchases
    connection: {kind: duckdb, path: data/shop.duckdb, memory_bytes: 512 MiB, threads: 2}
    table: main.purchases
    main_entity_column: customer_id
    date_column: time
    partition_values_transformation: exact_group
    columns: {deny: [note]}
    where: price > 0
  - type: main_entity
    name: customers
    connection: {kind: postgresql, host: db.example.org, database: shop, user: reader, password: env:SHOP_PASSWORD}
    query: SELECT * FROM customers
    main_entity_column: id
  - type: attribute
    name: weather
    connection: {kind: parquet, path: data/weather/*.parquet}
"""


def written(tmp_path, text=GOOD):
    path = tmp_path / "sources.yaml"
    path.write_text(text)
    return path


def refused(text_or_values, tmp_path=None):
    """The problems of a text, as `path: message`."""
    with pytest.raises(ConfigError) as error:
        read_sources(written(tmp_path, text_or_values) if tmp_path else text_or_values)
    return [str(problem) for problem in error.value.problems]


def matched(problems, *patterns):
    """Whether the problems are as many as the patterns, and each begins as its own says."""
    return len(problems) == len(patterns) and all(map(re.match, patterns, problems))


def entry(**changes):
    values = {
        "type": "event", "name": "purchases", "connection": {"kind": "duckdb", "path": "x.duckdb"},
        "table": "purchases", "main_entity_column": "who",
    }  # fmt: skip
    return {"data_sources": [{key: value for key, value in (values | changes).items() if value is not None}]}


def test_tables_are_read_from_yaml_and_written_back(tmp_path):
    sources = read_sources(written(tmp_path))
    assert sources.names == ("purchases", "customers", "weather")
    assert sources["purchases"].connection.memory_bytes == 512 << 20
    assert sources["purchases"].columns.deny == ("note",)
    assert sources["customers"].connection.port == 5432
    again = read_sources(written(tmp_path, sources.to_yaml()))
    assert again == sources == read_sources(sources.values()) == pickle.loads(pickle.dumps(sources))
    assert "null" not in sources.to_yaml()


def test_what_a_table_lacks_or_has_too_much_of_is_said_under_its_path():
    assert matched(refused(entry(table=None)), "data_sources.0.table: .*table.*query")
    assert matched(refused(entry(query="SELECT 1")), "data_sources.0.query: .*table.*query")
    assert matched(refused(entry(main_entity_column=None)), "data_sources.0.main_entity_column: missing.*event.*entity")
    assert re.match(r"data_sources\.0\.type: missing\. event: .*happened", refused(entry(type=None))[0])
    assert matched(refused(entry(connection={"kind": "duckdb"})), "data_sources.0.connection.path: missing.*file")
    assert matched(
        refused(entry(connection={"kind": "postgresql"})), "data_sources.0.connection.database: missing.*service"
    )
    assert matched(
        refused(entry(connection={"kind": "parquet", "path": "x"})),
        "data_sources.0.table: Parquet.*one table.*where.*columns.allow",
    )
    assert matched(refused(entry(where="price > 0;")), "data_sources.0.where: .*condition.*semicolon")
    assert matched(
        refused(entry(columns={"deny": ["who"]})), "data_sources.0.main_entity_column: 'who' .*read.*columns.deny"
    )
    assert matched(
        refused(entry(columns={"allow": ["a"], "deny": ["a"]})),
        "data_sources.0.main_entity_column: 'who' .*allow it",
        "data_sources.0.columns.deny: 'a' .*allowed",
    )
    assert matched(refused({"data_sources": entry()["data_sources"] * 2}), "data_sources.1.name: 'purchases' .*another")
    assert matched(refused({}), "data_sources: missing.*each table")
    assert refused({"data_sources": []})[0].startswith("data_sources: ")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tabel": "x"}, r"data_sources.0.tabel: unknown.*mean 'table'\?"),
        ({"type": "evnt"}, r"data_sources.0.type: 'evnt' .*mean 'event'\?"),
        ({"partition_values_transformation": "hash"}, "data_sources.0.partition_values_transformation: 'hash' is not"),
        ({"connection": {"kind": "duckb", "path": "x"}}, "data_sources.0.connection: 'duckb' .*did you mean"),
        ({"connection": {"path": "x"}}, "data_sources.0.connection: kind.*missing.*duckdb.*parquet.*postgr"),
        (
            {"connection": {"kind": "duckdb", "path": "x", "thread": 2}},
            r"data_sources.0.connection.thread: unknown.*mean 'threads'\?",
        ),
        ({"connection": {"kind": "duckdb", "path": "x", "threads": -1}}, "data_sources.0.connection.threads: "),
        ({"connection": {"kind": "duckdb", "path": "x", "memory_bytes": "much"}}, "data_sources.0.connection.memory_b"),
        ({"columns": {"alow": ["x"]}}, r"data_sources.0.columns.alow: unknown.*mean 'allow'\?"),
        ({"columns": ["x"]}, "data_sources.0.columns: "),
        ({"cache_path": "x"}, "data_sources.0.cache_path: unknown.*Config, section queries"),
        ({"name": "two words"}, "data_sources.0.name: "),
    ],
)  # fmt: skip
def test_a_slip_is_named_by_its_path_with_the_likely_word(changes, message):
    assert re.match(message, refused(entry(**changes))[0])


def test_sections_of_others_are_told_where_theirs_is():
    assert matched(
        refused({**entry(), "query_optimization": {}}), "query_optimization: unknown.*Config, section queries"
    )


def test_broken_yaml_is_named_by_line_and_a_missing_file_by_name(tmp_path):
    assert refused("data_sources: [", tmp_path)[0].startswith("line ")
    with pytest.raises(ConfigError, match=r"cannot read .*nowhere\.yaml"):
        read_sources(tmp_path / "nowhere.yaml")


def test_a_password_in_the_file_is_refused_and_not_repeated(tmp_path):
    good = {"kind": "postgresql", "database": "shop"}
    for connection in (
        {**good, "password": "hunter2"},
        {**good, "password": ["hunter2"]},
        {**good, "pasword": "hunter2"},
        {**good, "host": "reader:hunter2@db"},
        {"kind": "postgres", "password": "hunter2"},
        {"password": "hunter2"},
        {**good, "port": {"password": "hunter2"}},
        ["hunter2"],
    ):
        said = " ".join(refused(entry(connection=connection)))
        assert "data_sources.0.connection" in said
        assert "hunter2" not in said
    twice = "data_sources:\n  - connection:\n      password: hunter2\n      password: env:X\n"
    said = " ".join(refused(twice, tmp_path))
    assert "password" in said
    assert "hunter2" not in said
    assert "env:NAME" in " ".join(refused(entry(connection={**good, "password": "hunter2"})))


def test_an_unknown_name_is_answered_with_the_known_ones(tmp_path):
    sources = read_sources(written(tmp_path))
    with pytest.raises(ConfigError, match="'purchase'.*mean 'purchases'"):
        sources["purchase"]
    with pytest.raises(ConfigError, match="purchases, customers, weather"):
        sources.open("xyz")


def test_what_is_not_there_is_said_when_a_table_is_opened(tmp_path):
    import duckdb

    path = tmp_path / "shop.duckdb"
    connection = {"kind": "duckdb", "path": str(path)}
    with pytest.raises(ConfigError, match=rf"^data_sources.0.connection.path: .*no file {re.escape(str(path))}"):
        read_sources(entry(connection=connection)).open("purchases")
    with duckdb.connect(str(path)) as opened:
        opened.execute("CREATE TABLE bought (customer integer, price double)")
    with pytest.raises(ConfigError, match=r"^data_sources.0.table: .*purchases.*does not exist.*has bought"):
        read_sources(entry(connection=connection)).open("purchases")
    for slip in ("bougt", "main.bougt"):
        with pytest.raises(ConfigError, match=r"^data_sources.0.table: .*mean 'bought'"):
            read_sources(entry(connection=connection, table=slip)).open("purchases")
    with pytest.raises(
        ConfigError,
        match=r"^data_sources.0.main_entity_column: bought .*'custommer'.*mean 'customer'",
    ):
        read_sources(entry(connection=connection, table="bought", main_entity_column="custommer")).open("purchases")
    for field in ("date_column", "partition_column"):
        with pytest.raises(ConfigError, match=rf"^data_sources.0.{field}: bought .*no column 'x'.*customer, "):
            read_sources(
                entry(connection=connection, table="bought", main_entity_column="customer", **{field: "x"})
            ).open("purchases")
    with pytest.raises(ConfigError, match=r"^columns.allow: .*query .*no column 'prize'.*has one"):
        open_table(path, query="SELECT 1 AS one", columns={"allow": ["prize"]})
    with pytest.raises(ConfigError, match=r"^connection.path: .*no Parquet file .*nothing"):
        open_table(tmp_path / "nothing")


def test_a_file_is_opened_by_its_path_with_the_other_fields_as_keywords(tmp_path):
    import duckdb

    path = tmp_path / "shop.duckdb"
    with duckdb.connect(str(path)) as opened:
        opened.execute("CREATE TABLE bought AS SELECT range % 3 AS customer, range AS row FROM range(12)")
        opened.execute(f"COPY bought TO '{tmp_path / 'bought.parquet'}'")
    table = open_table(path, table="bought", main_entity_column="customer")
    assert (table.name, table.partition_column, table.declared.type) == ("bought", "customer", "event")
    assert open_table(tmp_path / "bought.parquet").row_count() == 12
    assert open_table(tmp_path / "b*.parquet", where="row < 5").row_count() == 5
    assert open_table(tmp_path).row_count() == 12
    assert open_table(table.declared, where="row < 5").row_count() == 5
    assert isinstance(table.declared, DataSource)
    described = written(tmp_path, read_sources({"data_sources": [table.declared.model_dump(mode="json")]}).to_yaml())
    assert open_table(described).row_count() == open_table(described, name="bought").row_count() == 12
    with pytest.raises(ConfigError, match="where: .*in the file"):
        open_table(described, where="row < 5")


@pytest.mark.parametrize(
    ("library", "connection"),
    [
        ("duckdb", {"kind": "duckdb", "path": "x.duckdb"}),
        ("duckdb", {"kind": "parquet", "path": "x"}),
        ("psycopg", {"kind": "postgresql", "database": "x"}),
    ],
)
def test_a_library_that_is_not_installed_is_named_with_the_line_that_installs_it(monkeypatch, library, connection):
    monkeypatch.setitem(sys.modules, library, None)
    table = None if connection["kind"] == "parquet" else "t"
    with pytest.raises(ConfigError, match=rf"data_sources.0.connection.kind: .*{library}.*pip install 'kit\[tables\]'"):
        read_sources(entry(connection=connection, table=table)).open("purchases")


def test_all_columns_that_are_not_read_are_told_at_once(tmp_path):
    import duckdb

    path = tmp_path / "shop.duckdb"
    with duckdb.connect(str(path)) as opened:
        opened.execute("CREATE TABLE bought (customer integer, items integer[], place struct(x integer))")
    with pytest.raises(ConfigError, match=r"columns: items is INTEGER\[\], place is STRUCT.*columns\.deny"):
        open_table(path, table="bought", main_entity_column="customer")


@pytest.mark.parametrize(
    ("place", "way_out"),
    [("postgresql://localhost/shop", "connection: .*'kind': 'postgresql'"), ("shop.csv", "CSV.*Parquet")],
)
def test_a_server_or_a_csv_is_not_looked_for_as_parquet(place, way_out):
    with pytest.raises(ConfigError, match=way_out):
        open_table(place, table="bought", main_entity_column="customer")
