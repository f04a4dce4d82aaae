"""A PostgreSQL server of the tests' own: on loopback, of an unprivileged user, gone when they are."""

import contextlib
import ctypes
import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
from pathlib import Path

from waiting import PATIENCE_SECONDS, wait_until

VARIABLE = "KIT_TESTS_POSTGRES_PASSWORD"
PASSWORD = "s3cret-of-the-tests"
USER = "tests"
_PR_SET_PDEATHSIG = 1


def folder_of_programs():
    """Where `postgres` and `initdb` are; None when this machine has none. Debian keeps them off the PATH."""
    found = shutil.which("postgres")
    if found:
        return Path(found).resolve().parent
    folders = sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"), key=lambda path: int(path.parts[-3]))
    return folders[-1].parent if folders else None


class PostgresServer:
    """A server, started; `stop` or `kill` end it."""

    def __init__(self):
        self.host, self.port, self.user, self.database = "127.0.0.1", _free_port(), USER, "postgres"
        self._folder = Path(tempfile.mkdtemp(prefix="kit-postgres-", dir="/tmp"))
        self._as = _unprivileged(self._folder)
        programs = folder_of_programs()
        secret = self._folder / "password"
        secret.write_text(PASSWORD)
        secret.chmod(0o644)
        self._run(
            programs / "initdb", "-D", self._folder / "data", "-U", USER, "--auth=scram-sha-256", "--no-sync",
            f"--pwfile={secret}", "--encoding=UTF8", "--locale=C",
        )  # fmt: skip
        self._log = (self._folder / "log").open("w")
        self.start()

    def start(self):
        """Serve, at first or again after `kill`; no vacuum of its own makes a new state of the data meanwhile."""
        programs = folder_of_programs()
        self._process = subprocess.Popen(
            [
                programs / "postgres", "-D", self._folder / "data", "-h", self.host, "-p", str(self.port),
                "-k", self._folder, "-F", "-c", "shared_buffers=16MB", "-c", "max_connections=40",
                "-c", "autovacuum=off",
            ],
            stdout=self._log, stderr=self._log, cwd=self._folder, preexec_fn=_end_with_the_tests, **self._as,
        )  # fmt: skip
        self._wait()

    def connection(self, **changes):
        """The connection of a declaration."""
        return {
            "kind": "postgresql", "host": self.host, "port": self.port, "user": self.user, "database": self.database,
            "password": f"env:{VARIABLE}", **changes,
        }  # fmt: skip

    def connect(self):
        import psycopg

        return psycopg.connect(
            host=self.host, port=self.port, user=self.user, dbname=self.database, password=PASSWORD, autocommit=True
        )

    def execute(self, sql, values=None):
        """Run a statement; its rows, if it has any."""
        with self.connect() as connection:
            cursor = connection.execute(sql, values)
            return cursor.fetchall() if cursor.description else []

    def kill(self):
        """End it at once, with all that it serves."""
        self._process.send_signal(signal.SIGQUIT)
        self._process.wait(PATIENCE_SECONDS)

    def stop(self):
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
            self._process.wait(PATIENCE_SECONDS)
        self._log.close()
        shutil.rmtree(self._folder)

    def _run(self, *command):
        done = subprocess.run(command, cwd=self._folder, capture_output=True, text=True, **self._as)
        assert done.returncode == 0, done.stderr

    def _wait(self):
        import psycopg

        def answers():
            assert self._process.poll() is None, (self._folder / "log").read_text()
            with contextlib.suppress(psycopg.OperationalError):
                self.connect().close()
                return True
            return False

        wait_until(answers)


def _unprivileged(folder):
    """Who runs the server: root may not."""
    if os.getuid() != 0:
        return {}
    names = {entry.pw_name for entry in pwd.getpwall()}
    user = pwd.getpwnam("postgres" if "postgres" in names else "nobody")
    os.chown(folder, user.pw_uid, user.pw_gid)
    return {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}


def _end_with_the_tests():
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGQUIT)


def _free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
