"""Tables for the tests: the same rows in DuckDB, in Parquet files, and in a real PostgreSQL server on loopback."""

import os

import pytest
from postgres_server import PASSWORD, VARIABLE, PostgresServer, folder_of_programs
from table_places import Place

REQUIRED = os.environ.get("KIT_REQUIRE_POSTGRES") == "1"


@pytest.fixture(scope="session")
def postgres_installed():
    """Skips where there is no PostgreSQL, or fails where there has to be one."""
    if folder_of_programs() is None:
        reason = "no PostgreSQL here; apt-get install postgresql"
        if REQUIRED:
            pytest.fail(f"{reason} (KIT_REQUIRE_POSTGRES=1)")
        pytest.skip(reason)


@pytest.fixture(scope="session")
def _postgres_server(postgres_installed):
    server = PostgresServer()
    yield server
    server.stop()


@pytest.fixture
def postgres(_postgres_server, monkeypatch):
    """An empty database of a server that all tests share, its password in the environment."""
    monkeypatch.setenv(VARIABLE, PASSWORD)
    yield _postgres_server
    _postgres_server.execute("SET lock_timeout = '30s'; DROP SCHEMA public CASCADE; CREATE SCHEMA public")


@pytest.fixture(params=["duckdb", "parquet", "postgresql"])
def place(request, tmp_path):
    """Each kind of database in turn."""
    server = request.getfixturevalue("postgres") if request.param == "postgresql" else None
    return Place(request.param, tmp_path, server)


@pytest.fixture(params=["duckdb", "postgresql"])
def database(request, tmp_path):
    """Each kind that tables can be changed in by SQL."""
    server = request.getfixturevalue("postgres") if request.param == "postgresql" else None
    return Place(request.param, tmp_path, server)
