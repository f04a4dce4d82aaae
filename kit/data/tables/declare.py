"""Declarations: tables described in YAML, and opened by name.

    data_sources:
      - type: event
        name: purchases
        connection: {kind: duckdb, path: data/shop/shop.duckdb}
        table: purchases
        main_entity_column: customer_id
        date_column: time

A mistake in the text is refused before any database is opened, under its dotted path (`data_sources.0.table`); a table
or column that is not there, when it is opened. A password is never part of it: `env:NAME` names the variable that has
it. How many query chunks a table is read in, and where results are kept, is of a run and not of a table: `queries` in
the Config.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from os import PathLike
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, Field, ValidationError

from kit.config import near, resolve_path
from kit.data.tables.duckdb import DuckDBDatabase, ParquetDatabase
from kit.data.tables.postgres import PostgresDatabase
from kit.data.tables.table import Database, DatabaseTable
from kit.errors import ConfigError, Problem, did_you_mean
from kit.sections import Bytes, Names, Section, setting
from kit.yaml_text import read_yaml, write_yaml

_DUCKDB = (".duckdb", ".ddb", ".db")
_YAML = (".yaml", ".yml")
Validated = TypeVar("Validated", bound=Section)
_NAME = Field(pattern=r"^[A-Za-z_][A-Za-z0-9_.-]{0,63}$")


def _threads() -> Any:
    return setting(0, "Threads of the embedded database; 0 takes one per core.", unit="threads", ge=0, le=1024)


def _memory() -> Any:
    return setting(
        0, "Memory a query may take: the limit of an embedded database, or a server's for each sort (work_mem); 0 for "
        "the database's own.", unit="bytes", ge=0, le=1 << 50,
    )  # fmt: skip


class DuckDBConnection(Section):
    """A DuckDB file."""

    kind: Literal["duckdb"]
    path: str = Field(description="The file; relative paths start at the project folder.")
    memory_bytes: Bytes = _memory()
    threads: int = _threads()


class ParquetConnection(Section):
    """Parquet files, read by an embedded DuckDB."""

    kind: Literal["parquet"]
    path: str = Field(description="A file, a folder (searched with its subfolders) or a pattern such as day-*.parquet.")
    memory_bytes: Bytes = _memory()
    threads: int = _threads()


class PostgresConnection(Section):
    """A PostgreSQL server."""

    kind: Literal["postgresql"]
    host: Annotated[str, Field(pattern=r"^[^@\s]*$")] = setting(
        "localhost", "Name or address of the server, or the folder of its socket."
    )
    port: int = setting(5432, "Port of the server.", ge=1, le=65_535)
    database: str = setting("", "Name of the database.")
    user: str = setting("", "The user to connect as.")
    password: Annotated[str, Field(pattern=r"^(env:[A-Za-z_][A-Za-z0-9_]*)?$")] = setting(
        "", "env:NAME, the variable that holds it; empty leaves it to ~/.pgpass or the service. Never the password."
    )
    service: str = setting("", "A name in the service file of libpq, which then says host, database and user.")
    memory_bytes: Bytes = _memory()
    connect_seconds: int = setting(
        5, "How long an address may take to answer, before it counts as unreachable.", unit="seconds", ge=2, le=600
    )


class Columns(Section):
    """Which columns are read."""

    allow: Names = setting((), "Columns to read; empty reads all.")
    deny: Names = setting((), "Columns not to read.")


class DataSource(Section):
    """One table and what it means."""

    type: Literal["event", "main_entity", "attribute"] = Field(
        description="event: rows that happened to an entity. main_entity: one row for each. attribute: any other table."
    )
    name: Annotated[str, _NAME] = Field(description="Name of the table in kit: letters, digits, dot, dash, underscore.")
    connection: Annotated[DuckDBConnection | ParquetConnection | PostgresConnection, Field(discriminator="kind")]
    table: str = setting("", "The table, as table or schema.table.")
    query: str = setting("", "A SELECT in the database's SQL, in place of a table.")
    main_entity_column: str = setting("", "The column that says which entity a row belongs to.")
    date_column: str = setting("", "The column that says when an event happened.")
    partition_column: str = setting("", "The column that query chunks are cut by; empty takes the main_entity_column.")
    partition_values_transformation: Literal["hash_mod", "exact_group"] = setting(
        "hash_mod", "hash_mod: about equally many entities in each query chunk. exact_group: equally many rows."
    )
    columns: Columns = setting(Columns, "Which columns are read.")
    where: str = setting("", "A condition in the database's SQL that rows must meet.")
    version: str = setting(
        "",
        "A text that stands for the state of the data, where other tables of the database change all the time; "
        "empty reads the state from the database.",
    )

    def open(self, path: str = "") -> DatabaseTable:
        """The table, looked at and ready to be read.

        Args:
            path: Where the declaration stands in its file, for errors.

        Raises:
            ConfigError: when the file, the table or a column that is named is not there, or its type is not read.
            UnreachableDatabaseError: when the database does not answer.
        """
        problems = self.contradictions(path)
        if problems:
            raise ConfigError(problems)
        connection = self.connection
        database: Database
        if isinstance(connection, PostgresConnection):
            database = PostgresDatabase(connection, self.table, self.query, path)
        elif isinstance(connection, ParquetConnection):
            database = ParquetDatabase(connection, path)
        else:
            database = DuckDBDatabase(connection, self.table, self.query, path)
        return DatabaseTable(self, database, path)

    def contradictions(self, path: str = "") -> list[Problem]:
        """Fields that are each fine and do not fit together."""
        start = f"{path}." if path else ""
        return [Problem(start + field, message) for field, message in self._disagreements()]

    def _disagreements(self) -> Iterator[tuple[str, str]]:
        connection = self.connection
        if isinstance(connection, ParquetConnection):
            for field in ("table", "query"):
                if getattr(self, field):
                    yield field, "Parquet files are one table; choose rows with where and columns with columns.allow"
        elif bool(self.table) == bool(self.query):
            yield ("query" if self.query else "table"), "give a table, or a query in its place"
        if self.type != "attribute" and not self.main_entity_column:
            yield "main_entity_column", f"missing; rows of type {self.type} belong to an entity"
        if isinstance(connection, PostgresConnection) and not (connection.database or connection.service):
            yield "connection.database", "missing; name the database, or a service that does"
        if self.where.rstrip().endswith(";"):
            yield "where", "it is a condition and ends without a semicolon"
        allow, deny = self.columns.allow, self.columns.deny
        for field in ("main_entity_column", "date_column", "partition_column"):
            name = getattr(self, field)
            if name and (name in deny or (allow and name not in allow)):
                way_out = "take it out of columns.deny" if name in deny else "allow it, too"
                yield field, f"{name!r} is not read; {way_out}"
        for name in sorted(set(allow) & set(deny)):
            yield "columns.deny", f"{name!r} is allowed, too"


class Sources(Section):
    """All tables of a file."""

    data_sources: Annotated[
        tuple[DataSource, ...],
        BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value),
        Field(min_length=1, description="One entry for each table."),
    ]

    @property
    def names(self) -> tuple[str, ...]:
        """What the tables are called."""
        return tuple(source.name for source in self.data_sources)

    def __getitem__(self, name: str) -> DataSource:
        if name not in self.names:
            hint = did_you_mean(name, self.names, "there are {}")
            raise ConfigError([Problem("data_sources", f"none is called {name!r}{hint}")])
        return self.data_sources[self.names.index(name)]

    def open(self, name: str) -> DatabaseTable:
        """The table of that name; see `DataSource.open`."""
        source = self[name]
        return source.open(f"data_sources.{self.names.index(name)}")

    def values(self) -> dict[str, Any]:
        """Nested plain values: what YAML holds."""
        return self.model_dump(mode="json", exclude_defaults=True)

    def to_yaml(self) -> str:
        """YAML 1.2 that reads back as equal Sources."""
        return write_yaml(self.values())


# -- reading declarations


def read_sources(place: str | Path | Mapping[str, Any]) -> Sources:
    """Read the data sources that a YAML file declares. No database is asked.

    Args:
        place: The file, or a mapping like its content.

    Returns:
        The sources. `open(name)` opens one.

    Raises:
        ConfigError: when the file cannot be read, and for every unknown key, wrong type and contradiction, under its
            path.

    Example:
        >>> "purchases" in kit.data.read_sources("datasets/shop/sources.yaml").names
        True
    """
    where = "" if isinstance(place, Mapping) else str(place)
    if isinstance(place, Mapping):
        values = place
    else:
        try:
            text = resolve_path(place).read_bytes().decode("utf-8-sig")
        except FileNotFoundError:
            file = resolve_path(place)
            raise ConfigError(f"cannot read {place}: there is no file {file}{near(file)}") from None
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read {place}: {error}") from None
        values = read_yaml(text, where)
    sources, problems = _validated(Sources, values, where), []
    for number, source in enumerate(sources.data_sources):
        problems += source.contradictions(f"data_sources.{number}")
        if source.name in sources.names[:number]:
            problems.append(Problem(f"data_sources.{number}.name", f"{source.name!r} is the name of another one, too"))
    if problems:
        raise ConfigError(problems, where)
    return sources


def open_table(place: str | Path | Mapping[str, Any] | DataSource, **fields: Any) -> DatabaseTable:
    """Open a table of a database, and check that its columns are what its declaration says.

    Args:
        place: A DuckDB file; Parquet files as a path, folder or pattern; a YAML file of data sources, with `name` where
            it has several event tables; or a mapping like one entry of it.
        fields: The other fields of the entry, such as `table`, `main_entity_column`, `where`.

    Returns:
        The table, ready to be read in query chunks.

    Raises:
        ConfigError: for a wrong declaration, or a file, table or column that is not there.
        UnreachableDatabaseError: when the database does not answer.

    Example:
        >>> table = kit.data.open_table(shop, table="purchases", main_entity_column="customer_id")
        >>> "price" in table.schema().names
        True
    """
    if isinstance(place, DataSource):
        return _validated(DataSource, {**place.model_dump(), **fields}).open() if fields else place.open()
    if isinstance(place, Mapping):
        return _validated(DataSource, {**place, **fields}).open()
    given: Any = place  # by a user, who may give anything
    if not isinstance(given, str | PathLike):
        way_out = "a DuckDB or Parquet file, a YAML file of data sources, or a mapping like an entry of one"
        if hasattr(given, "to_parquet"):
            way_out = "the path that its to_parquet(path) has written"
        raise ConfigError([Problem("connection", f"{type(given).__name__} is no table; give {way_out}")])
    if str(place).lower().endswith(_YAML):
        sources, others = read_sources(place), sorted({*fields} - {"name"})
        if others:
            message = f"{', '.join(others)}: to be set in the file, which describes its tables whole"
            raise ConfigError(message, str(place))
        events = [source.name for source in sources.data_sources if source.type == "event"]
        if not fields.get("name") and len(events) != 1:
            raise ConfigError(f"it describes {', '.join(sources.names)}; say which with name=", str(place))
        return sources.open(fields.get("name") or events[0])
    if re.match(r"(?!postgres(ql)?:|file:)[a-z][a-z0-9+.-]+://", str(place), re.IGNORECASE):
        message = "tables are read from a disk, not from a URL; kit.data.download_once(url, folder) brings one there"
        raise ConfigError([Problem("connection.path", message)])
    place = str(place).removeprefix("file://")
    if re.match(r"postgres(ql)?://", str(place)):
        parts = "{'type': ..., 'name': ..., 'connection': {'kind': 'postgresql', 'host': ..., 'database': ...}}"
        raise ConfigError([Problem("connection", f"a server is named by its parts, not by a URL; give {parts}")])
    if str(place).lower().endswith((".csv", ".tsv", ".csv.gz")):
        message = f"{place} is CSV, which has no types; write it as Parquet once: pandas.read_csv(...).to_parquet(...)"
        raise ConfigError([Problem("connection.path", message)])
    kind = "duckdb" if str(place).lower().endswith(_DUCKDB) else "parquet"
    connection = {"kind": kind, "path": str(place), **fields.pop("connection", {})}
    name = re.sub(r"[^A-Za-z0-9_.-]", "", fields.get("table") or Path(place).stem).lstrip(".-0123456789") or "table"
    of_entities = "event" if "main_entity_column" in fields else "attribute"
    return _validated(DataSource, {"type": of_entities, "name": name, "connection": connection, **fields}).open()


# -- errors

_ELSEWHERE = {
    **dict.fromkeys(("query_optimization", "data_params", "cache_path"), "that is in the Config, section queries"),
    "connection_params": "its fields stand in connection itself",
    **dict.fromkeys(("training_params", "data_loader_params", "memory_constraining_params"), "that is in the Config"),
}
"""Words that others use in such files, and where they went."""
_CONNECTIONS: dict[int | str, type[BaseModel]] = {
    "duckdb": DuckDBConnection, "parquet": ParquetConnection, "postgresql": PostgresConnection,
}  # fmt: skip
_SECTIONS: dict[int | str, type[BaseModel]] = {"data_sources": DataSource, "columns": Columns}


def _validated(section: type[Validated], values: Mapping[str, Any], where: str = "") -> Validated:
    try:
        return section.model_validate(dict(values))
    except ValidationError as error:
        problems: dict[str, Problem] = {}
        for detail in error.errors(include_url=False, include_context=True):
            if detail["type"] == "secret":
                problem = Problem(detail["ctx"]["path"], detail["ctx"]["message"])
                raise ConfigError([*problems.values(), problem], where) from None
            problem = _problem(section, dict(detail))
            problems.setdefault(problem.path, problem)
        raise ConfigError([*problems.values()], where) from None


def _problem(section: type[BaseModel], detail: Mapping[str, Any]) -> Problem:
    """One error of pydantic's, under its dotted path, with the help of the section that its field is in."""
    path: list[str] = []
    owner = inner = section
    for part in detail["loc"]:
        if path[-1:] == ["connection"] and part in _CONNECTIONS:
            owner = inner = _CONNECTIONS[part]
        else:
            path.append(str(part))
            owner, inner = inner, _SECTIONS.get(part, inner)
    kind, given, name, context = detail["type"], detail.get("input"), path[-1] if path else "", detail.get("ctx", {})
    field = owner.model_fields.get(name)
    description = (field.description if field else "") or ""
    if kind == "extra_forbidden":
        elsewhere = _ELSEWHERE.get(name)
        known = did_you_mean(name, owner.model_fields, "there are {}")
        message = f"unknown key{f'; {elsewhere}' if elsewhere else known}"
    elif kind == "missing":
        message = f"missing. {description}".strip()
    elif kind in ("literal_error", "union_tag_invalid"):
        choices = re.findall(r"'([^']+)'", str(context.get("expected") or context.get("expected_tags")))
        given = str(context.get("tag") or given)
        message = f"{given!r} is not accepted{did_you_mean(given, choices, 'use one of {}')}"
    elif kind == "union_tag_not_found":
        message = "kind is missing; it is duckdb, parquet or postgresql"
    else:
        got = f", got {given!r}" if len(repr(given)) <= 80 else ""
        if isinstance(given, Mapping | list | tuple):  # what holds others could hold a password
            got = f", got a {'mapping' if isinstance(given, Mapping) else 'list'}"
        if name == "password" or "@" in str(given):
            got = ""
        message = f"{detail['msg'].removeprefix('Value error, ').removeprefix('Input ')}{got}. {description}".strip()
    return Problem(".".join(path), message)
