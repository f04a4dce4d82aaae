"""Places that tests put tables in: the same rows, written from Arrow to each kind of database."""

_POSTGRES_TYPES = {
    "int64": "bigint", "int32": "integer", "double": "double precision", "bool": "boolean", "string": "text",
    "timestamp[us]": "timestamp", "timestamp[us, tz=UTC]": "timestamptz", "date32[day]": "date",
}  # fmt: skip


class Place:
    """One kind of database, with tables written to it from Arrow."""

    def __init__(self, kind, folder, server=None):
        self.kind, self.folder, self.server = kind, folder, server

    def write(self, table, name="purchases"):
        """Put the rows there, in place of what was there."""
        getattr(self, f"_write_{self.kind}")(table, name)
        return self

    def declaration(self, name="purchases", **fields):
        """An entry of data_sources."""
        connections = {
            "duckdb": {"kind": "duckdb", "path": str(self.folder / "shop.duckdb"), "threads": 1},
            "parquet": {"kind": "parquet", "path": str(self.folder / name), "threads": 1},
        }
        connection = connections.get(self.kind) or self.server.connection()
        table = {} if self.kind == "parquet" or "query" in fields else {"table": name}
        return {"type": "attribute", "name": "purchases", "connection": connection, **table, **fields}

    def open(self, name="purchases", **fields):
        from kit.data.tables.declare import open_table

        return open_table(self.declaration(name, **fields))

    def execute(self, sql):
        """Change a table by SQL."""
        if self.kind == "postgresql":
            self.server.execute(sql)
            return
        import duckdb

        with duckdb.connect(str(self.folder / "shop.duckdb")) as opened:
            opened.execute(sql)

    def _write_duckdb(self, table, name):
        import duckdb

        with duckdb.connect(str(self.folder / "shop.duckdb")) as opened:
            opened.register("given", table)
            opened.execute(f"CREATE OR REPLACE TABLE {quoted(name)} AS SELECT * FROM given")

    def _write_parquet(self, table, name):
        import pyarrow.parquet as pq

        (self.folder / name).mkdir(exist_ok=True)
        half = len(table) // 2
        pq.write_table(table.slice(0, half), self.folder / name / "a.parquet", row_group_size=1000)
        pq.write_table(table.slice(half), self.folder / name / "b.parquet", row_group_size=1000)

    def _write_postgresql(self, table, name):
        columns = ", ".join(f"{quoted(field.name)} {_POSTGRES_TYPES[str(field.type)]}" for field in table.schema)
        with self.server.connect() as connection:
            connection.execute(f"DROP TABLE IF EXISTS {quoted(name)}")
            connection.execute(f"CREATE TABLE {quoted(name)} ({columns})")
            with connection.cursor().copy(f"COPY {quoted(name)} FROM STDIN") as copy:
                for row in table.to_pylist():
                    copy.write_row(tuple(row.values()))


def quoted(name):
    return '"' + name.replace('"', '""') + '"'
