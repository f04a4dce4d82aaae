"""Declarations: tables described in YAML, and opened by name.

    data_sources:
      - type: event
        name: purchases
        connection: {kind: duckdb, path: data/shop/shop.duckdb}
        table: purchases
        main_entity_column: customer_id
        date_column: time

A mistake in the text is refused before any database is asked, under its dotted path (`data_sources.0.table`); a table
or column that is not there, when it is opened. A password is never part of it: `env:NAME` names the variable that has
it. How many query chunks a table is read in, and where results are kept, is of a run and not of a table: `queries` in
the Config.

Columns: what each column of a table is taken for, by its Arrow type unless it is said.

numeric (numbers: shifted and scaled, a null is flagged) · category (few values: a vocabulary, and a sketch) ·
identifier (many values: a sketch only) · text (a sketch of its words and pairs of words) · time (how long ago) · skip.
"""

from __future__ import annotations

import difflib
import importlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, get_args

from pydantic import BaseModel, BeforeValidator, Field, ValidationError

from kit.config import Bytes, Names, Section, read_yaml, resolve_path, setting, write_yaml
from kit.data.tables.duckdb import DuckDBDatabase, ParquetDatabase
from kit.data.tables.postgres import PostgresDatabase
from kit.data.tables.source import needed
from kit.data.tables.table import Database, DatabaseTable
from kit.errors import ConfigError, Problem

if TYPE_CHECKING:
    import pyarrow

_DUCKDB = (".duckdb", ".ddb", ".db")
_YAML = (".yaml", ".yml")
Made = TypeVar("Made", bound=Section)
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
    port: int = setting(5432, "Its port.", ge=1, le=65_535)
    database: str = setting("", "Which of its databases.")
    user: str = setting("", "Who asks.")
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

    allow: Names = setting((), "Only these; empty for all.")
    deny: Names = setting((), "Not these.")


class DataSource(Section):
    """One table and what it means."""

    type: Literal["event", "main_entity", "attribute"] = Field(
        description="event: rows that happened to an entity. main_entity: one row for each. attribute: any other table."
    )
    name: Annotated[str, _NAME] = Field(description="What it is called here: letters, digits, dot, dash, underscore.")
    connection: Annotated[DuckDBConnection | ParquetConnection | PostgresConnection, Field(discriminator="kind")]
    table: str = setting("", "The table, as table or schema.table.")
    query: str = setting("", "A SELECT in the database's SQL, in place of a table.")
    main_entity_column: str = setting("", "Who a row belongs to.")
    date_column: str = setting("", "When it happened.")
    partition_column: str = setting("", "What query chunks are cut by; empty for the main_entity_column.")
    partition_values_transformation: Literal["hash_mod", "exact_group"] = setting(
        "hash_mod", "hash_mod: about equally many entities in each query chunk. exact_group: equally many rows."
    )
    columns: Columns = setting(Columns, "Which columns are read.")
    where: str = setting("", "A condition in the database's SQL that rows must meet.")
    version: str = setting(
        "", "Stands for the state of the data, for a database that changes elsewhere all the time; empty asks it."
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
        return DatabaseTable(self, self._database(path), path)

    def contradictions(self, path: str = "") -> list[Problem]:
        """Fields that are each fine and do not fit together."""
        start = f"{path}." if path else ""
        return [Problem(start + field, message) for field, message in _disagreements(self)]

    def _database(self, path: str) -> Database:
        connection = self.connection
        if isinstance(connection, PostgresConnection):
            return PostgresDatabase(connection, self.table, self.query, path)
        if isinstance(connection, ParquetConnection):
            return ParquetDatabase(connection, path)
        return DuckDBDatabase(connection, self.table, self.query, path)


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
        return self.data_sources[self._place(name)]

    def open(self, name: str) -> DatabaseTable:
        """The table of that name; see `DataSource.open`."""
        place = self._place(name)
        return self.data_sources[place].open(f"data_sources.{place}")

    def values(self) -> dict[str, Any]:
        """Nested plain values: what YAML holds."""
        return self.model_dump(mode="json", exclude_defaults=True)

    def to_yaml(self) -> str:
        """YAML 1.2 that reads back as equal Sources."""
        return write_yaml(self.values())

    def _place(self, name: str) -> int:
        if name not in self.names:
            close = difflib.get_close_matches(name, self.names, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(self.names)}"
            raise ConfigError([Problem("data_sources", f"none is called {name!r}; {hint}")])
        return self.names.index(name)


# -- reading declarations


def read_sources(place: str | Path | Mapping[str, Any]) -> Sources:
    """The tables that a YAML file, or a mapping like one, describes. No database is asked.

    Raises:
        ConfigError: when the file cannot be read; for every unknown key, wrong type and contradiction, under its path.
    """
    if isinstance(place, Mapping):
        return _made(Sources, place, "")
    try:
        text = resolve_path(place).read_bytes().decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {place}: {error}") from None
    return _made(Sources, read_yaml(text, str(place)), str(place))


def open_table(place: str | Path | Mapping[str, Any] | DataSource, **fields: Any) -> DatabaseTable:
    """A table, looked at and ready to be read.

    Args:
        place: A DuckDB file; Parquet files as a path, folder or pattern; a YAML file of data sources, with `name` where
            it has several of events; a mapping like one entry of it; or such an entry.
        fields: The other fields of the entry, such as `table`, `main_entity_column`, `where`.

    Raises:
        ConfigError: for a wrong declaration, or a file, table or column that is not there.
        UnreachableDatabaseError: when the database does not answer.
    """
    if isinstance(place, DataSource):
        return _made(DataSource, {**place.model_dump(), **fields}, "").open() if fields else place.open()
    if isinstance(place, Mapping):
        return _made(DataSource, {**place, **fields}, "").open()
    if str(place).lower().endswith(_YAML):
        return _named(read_sources(place), str(place), fields)
    kind = "duckdb" if str(place).lower().endswith(_DUCKDB) else "parquet"
    connection = {"kind": kind, "path": str(place), **fields.pop("connection", {})}
    name = re.sub(r"[^A-Za-z0-9_.-]", "", fields.get("table") or Path(place).stem).lstrip(".-0123456789") or "table"
    of_entities = "event" if "main_entity_column" in fields else "attribute"
    return _made(DataSource, {"type": of_entities, "name": name, "connection": connection, **fields}, "").open()


def _named(sources: Sources, where: str, fields: Mapping[str, Any]) -> DatabaseTable:
    name, others = fields.get("name", ""), sorted({*fields} - {"name"})
    if others:
        raise ConfigError(f"{', '.join(others)}: to be set in the file, which describes its tables whole", where)
    events = [source.name for source in sources.data_sources if source.type == "event"]
    if not name and len(events) != 1:
        raise ConfigError(f"it describes {', '.join(sources.names)}; say which with name=", where)
    return sources.open(name or events[0])


def _made(section: type[Made], values: Mapping[str, Any], where: str) -> Made:
    try:
        made = section.model_validate(dict(values))
    except ValidationError as error:
        raise ConfigError(list(_problems(section, error)), where) from None
    problems = _contradictions(made) if isinstance(made, Sources) else []
    if problems:
        raise ConfigError(problems, where)
    return made


def _contradictions(sources: Sources) -> list[Problem]:
    problems = []
    for place, source in enumerate(sources.data_sources):
        path = f"data_sources.{place}"
        problems += source.contradictions(path)
        if source.name in sources.names[:place]:
            problems.append(Problem(f"{path}.name", f"{source.name!r} is the name of another one, too"))
    return problems


def _disagreements(source: DataSource) -> Iterator[tuple[str, str]]:
    """Fields that are each fine and do not fit together."""
    if isinstance(source.connection, ParquetConnection):
        for field in ("table", "query"):
            if getattr(source, field):
                yield field, "Parquet files are one table; choose rows with where and columns with columns.allow"
    elif bool(source.table) == bool(source.query):
        yield ("query" if source.query else "table"), "give a table, or a query in its place"
    if source.type != "attribute" and not source.main_entity_column:
        yield "main_entity_column", f"missing; rows of type {source.type} belong to an entity"
    if isinstance(source.connection, PostgresConnection) and not (
        source.connection.database or source.connection.service
    ):
        yield "connection.database", "missing; name the database, or a service that does"
    if source.where.rstrip().endswith(";"):
        yield "where", "it is a condition and ends without a semicolon"
    yield from _unread(source)


def _unread(source: DataSource) -> Iterator[tuple[str, str]]:
    allow, deny = source.columns.allow, source.columns.deny
    for field in ("main_entity_column", "date_column", "partition_column"):
        name = getattr(source, field)
        if name and (name in deny or (allow and name not in allow)):
            yield field, f"{name!r} is not read; {'take it out of columns.deny' if name in deny else 'allow it, too'}"
    for name in sorted(set(allow) & set(deny)):
        yield "columns.deny", f"{name!r} is allowed, too"


# -- errors

_ELSEWHERE = {
    **dict.fromkeys(("query_optimization", "data_params", "cache_path"), "that is in the Config, section queries"),
    "connection_params": "its fields stand in connection itself",
    **dict.fromkeys(("training_params", "data_loader_params", "memory_constraining_params"), "that is in the Config"),
}
"""Words that others use in such files, and where they went."""


def _problems(section: type[BaseModel], error: ValidationError) -> Iterator[Problem]:
    seen = set()
    for detail in error.errors(include_url=False, include_context=True):
        if detail["type"] == "secret":
            yield Problem(detail["ctx"]["path"], detail["ctx"]["message"])
            return
        path, model = _followed(section, detail["loc"])
        if path not in seen:
            yield Problem(path, _message(path, model, dict(detail)))
        seen.add(path)


def _followed(section: type[BaseModel], loc: tuple[int | str, ...]) -> tuple[str, type[BaseModel]]:
    """The dotted path of a problem, and the section that its last name is a field of."""
    kinds: dict[str, type[BaseModel]] = {
        "duckdb": DuckDBConnection, "parquet": ParquetConnection, "postgresql": PostgresConnection,
    }  # fmt: skip
    sections: dict[str, type[BaseModel]] = {"data_sources": DataSource, "columns": Columns}
    path: list[str] = []
    models: list[type[BaseModel]] = [section]
    for part in loc:
        if path and path[-1] == "connection" and part in kinds:
            models[-1] = kinds[str(part)]
            continue
        path.append(str(part))
        models.append(sections.get(str(part), models[-1]))
    of_field = isinstance(loc[-1], str) and loc[-1] in sections if loc else False
    return ".".join(path), models[-2] if of_field and len(models) > 1 else models[-1]


def _message(path: str, model: type[BaseModel], detail: Mapping[str, Any]) -> str:
    kind, name = detail["type"], path.rpartition(".")[2]
    if kind == "extra_forbidden":
        return f"unknown key; {_ELSEWHERE.get(name) or _known(name, model)}"
    described = (model.model_fields[name].description or "") if name in model.model_fields else ""
    if kind == "missing":
        return f"missing. {described}".strip()
    if kind in ("literal_error", "union_tag_invalid"):
        return _choice(detail)
    if kind == "union_tag_not_found":
        return "kind is missing; it is duckdb, parquet or postgresql"
    text = detail["msg"].removeprefix("Value error, ").removeprefix("Input ")
    shown = "" if name == "password" or "@" in str(detail.get("input")) else _shown(detail.get("input"))
    return f"{text}{shown}. {described}".strip()


def _choice(detail: Mapping[str, Any]) -> str:
    context = detail.get("ctx", {})
    choices = re.findall(r"'([^']+)'", str(context.get("expected") or context.get("expected_tags")))
    given = str(context.get("tag") or detail.get("input"))
    close = difflib.get_close_matches(given, choices, n=1)
    return f"{given!r} is not accepted; " + (
        f"did you mean {close[0]!r}?" if close else f"it is {' or '.join(choices)}"
    )


def _known(name: str, model: type[BaseModel]) -> str:
    close = difflib.get_close_matches(name, model.model_fields, n=1)
    return f"did you mean {close[0]}?" if close else f"there are {', '.join(model.model_fields)}"


def _shown(value: object) -> str:
    """A value as an error may show it: what holds others could hold a password."""
    if isinstance(value, Mapping | list | tuple):
        return f", got a {'mapping' if isinstance(value, Mapping) else 'list'}"
    return f", got {value!r}" if len(repr(value)) <= 80 else ""


Kind = Literal["numeric", "category", "identifier", "text", "time", "skip"]
KINDS: tuple[Kind, ...] = get_args(Kind)
FITTED: tuple[Kind, ...] = ("numeric", "category", "time")
"""Kinds that must be read once before they are features."""
SKETCHED: tuple[Kind, ...] = ("category", "identifier", "text")


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One column and what it is taken for."""

    name: str
    kind: Kind
    type: str
    """Its Arrow type in words."""


def compute() -> Any:
    """pyarrow's functions on columns."""
    needed("pyarrow")
    return importlib.import_module("pyarrow.compute")


def choose_columns(
    schema: pyarrow.Schema, entity_column: str, kinds: Mapping[str, str], columns: Sequence[str] = ()
) -> tuple[Column, ...]:
    """The columns that become features, in the order of the schema.

    Args:
        schema: That of the table.
        entity_column: Says whose row it is, and is no feature.
        kinds: Kind by column, where the Arrow type does not say.
        columns: Columns to take; empty for all.

    Raises:
        ConfigError: for a column that is not there, a kind that is none or does not go with the type of its column,
            and when nothing is left.
    """
    problems = [*_unknown_columns(schema, "kinds", kinds), *_unknown_columns(schema, "columns", columns)]
    problems += [*_unknown_kinds(kinds)]
    if problems:
        raise ConfigError(problems)
    taken = [
        Column(name=item.name, kind=_kind(item, kinds), type=str(item.type))
        for item in schema
        if item.name != entity_column and (not columns or item.name in columns)
    ]
    found = tuple(column for column in taken if column.kind != "skip")
    if not found:
        raise ConfigError([Problem("columns", f"no column is left to make features of, beside {entity_column!r}")])
    return found


def kind_of_type(type_: pyarrow.DataType) -> Kind:
    """What a column of that Arrow type is taken for when nothing is said."""
    types = needed("pyarrow").types
    if types.is_integer(type_) or types.is_floating(type_) or types.is_decimal(type_):
        return "numeric"
    if types.is_timestamp(type_) or types.is_date(type_):
        return "time"
    return "category" if types.is_boolean(type_) or types.is_string(type_) or types.is_large_string(type_) else "skip"


def _kind(field: pyarrow.Field, kinds: Mapping[str, str]) -> Kind:
    by_type = kind_of_type(field.type)
    said = next((kind for kind in KINDS if kind == kinds.get(field.name)), by_type)
    numeric = by_type == "numeric" or str(field.type) == "bool"
    fits = {"numeric": numeric, "time": by_type == "time", "text": str(field.type).endswith("string")}
    if not fits.get(said, True):
        raise ConfigError([Problem(f"kinds.{field.name}", f"a column of {field.type} is no {said}")])
    return said


def _unknown_columns(schema: pyarrow.Schema, path: str, names: Sequence[str] | Mapping[str, str]) -> list[Problem]:
    missing = [name for name in names if name not in schema.names]
    return [Problem(path, f"the table has no column {name!r}{_hint(name, schema.names)}") for name in missing]


def _unknown_kinds(kinds: Mapping[str, str]) -> list[Problem]:
    wrong = [(name, kind) for name, kind in kinds.items() if kind not in KINDS]
    return [
        Problem(f"kinds.{name}", f"{kind!r} is none of {', '.join(KINDS)}{_hint(kind, KINDS)}") for name, kind in wrong
    ]


def _hint(name: str, names: Sequence[str]) -> str:
    close = difflib.get_close_matches(str(name), names, n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; it has {', '.join(names)}" if names is not KINDS else ""
