"""Extras: the libraries that only tables need, loaded when first used, or refused with the line that installs them."""

from __future__ import annotations

import importlib
from typing import Any

from kit.errors import ConfigError, Problem

_PURPOSES = {
    "duckdb": "DuckDB and Parquet tables are read by duckdb",
    "psycopg": "PostgreSQL tables are read by psycopg",
    "pyarrow": "tables are passed on as pyarrow's record batches",
}


def needed(name: str, path: str = "connection.kind") -> Any:
    """The library `name`, imported.

    Raises:
        ConfigError: at `path` when it is not installed, with the line that installs it.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        why = "which is not installed" if error.name == name else f"which does not load ({error})"
        raise ConfigError([Problem(path, f"{_PURPOSES[name]}, {why}; pip install 'kit[tables]'")]) from None
