"""`kit.simulated_cloud()`: an object store on loopback that is as slow, narrow and faulty as one far away.

It speaks GCS (JSON and XML) and S3 (path style) to gcsfs, obstore, s3fs, tensorstore and any HTTP reader, runs in a
process of its own, so that it takes no time from the one being measured but cores, and ends with the process that
started it. Nothing is authenticated: it is for practice data on a machine of one's own.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import secrets
import select
import subprocess
import sys
import tempfile
import time
import urllib.parse
import weakref
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Literal, Self

import kit
from kit.cloud.counts import CloudCounts, Script, check_script
from kit.cloud.dials import PRESETS, Dials, preset
from kit.cloud.server import CONTROL, HOST, TOKEN_HEADER
from kit.config import resolve_path
from kit.errors import ConfigError, Problem, StoreError
from kit.machine.endpoints import forget_endpoint, name_endpoint

Scheme = Literal["gs", "s3", "http"]
_START_SECONDS = 30.0
_ANSWER_SECONDS = 30.0
_END_SECONDS = 2.0


class SimulatedCloud:
    """A running simulated cloud; made by `kit.simulated_cloud`."""

    def __init__(self, dials: Dials, name: str, folder: Path | None, port: int) -> None:
        self._dials, self._name = dials, name
        self._token = secrets.token_hex(16)
        self._complaints: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        self._process = _start(self._complaints)
        self._addresses: list[str] = []
        self._end = weakref.finalize(self, _end, self._process, self._complaints, os.getpid(), self._addresses)
        told = {"folder": str(folder or ""), "port": port, "token": self._token, "dials": dials.to_dict()}
        self.port = self._begin(told)
        self.address = f"http://{HOST}:{self.port}"
        """Where it listens, for readers of HTTP and as an endpoint of other clients."""
        self._addresses.append(self.address)

    def _begin(self, told: dict[str, Any]) -> int:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        line = b""
        try:
            stdin.write(json.dumps(told).encode() + b"\n")
            stdin.flush()
            if select.select([stdout], [], [], _START_SECONDS)[0]:
                line = stdout.readline()
        except OSError:
            pass
        if not line:
            words = self._last_words()
            self._end()
            raise StoreError(f"the simulated cloud did not start: {words}")
        return int(json.loads(line)["port"])

    def _last_words(self) -> str:
        self._complaints.seek(0)
        lines = self._complaints.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else f"exit code {self._process.poll()}"

    # -- where things are

    def url(self, path: str, scheme: Scheme = "gs") -> str:
        """The URL of `bucket/path` in this cloud, for `data.url`; the bucket is made when it is not there.

        From here on this process, and those it starts (ranks, loader workers), find the buckets `gs://bucket` and
        `s3://bucket` here and every other bucket where it always was.

        Raises:
            ConfigError: for a path without a bucket, or a scheme that is none of gs, s3 and http.
        """
        bucket = path.strip("/").partition("/")[0]
        if not bucket or "://" in path or bucket == "-":
            raise ConfigError([Problem("path", f"{path!r} names no bucket; write bucket/path")], "simulated cloud")
        if scheme not in ("gs", "s3", "http"):
            raise ConfigError([Problem("scheme", f"{scheme!r} is none of gs, s3 and http")], "simulated cloud")
        self._ask("bucket", {"name": bucket})
        name_endpoint((f"gs://{bucket}", f"s3://{bucket}"), self.address)
        return f"{self.address}/{path.strip('/')}" if scheme == "http" else f"{scheme}://{path.strip('/')}"

    def upload(self, source: str | Path, path: str, scheme: Scheme = "gs") -> str:
        """Copy a file or a folder with all below it to `bucket/path`, past the dials and the counts; returns its URL.

        Raises:
            StoreError: when the source is not there, or an object cannot be kept under its name.
            ConfigError: as `url`.
        """
        place, url = resolve_path(source), self.url(path, scheme)
        if not place.exists():
            raise StoreError(f"{place} does not exist; give the folder of a store, or a file")
        for file in [place] if place.is_file() else sorted(path for path in place.rglob("*") if path.is_file()):
            below = "" if file == place else f"/{file.relative_to(place).as_posix()}"
            name = urllib.parse.quote(f"{path.strip('/')}{below}", safe="")
            self._ask(f"object?name={name}", file.read_bytes())
        return url

    def storage_options(self, scheme: Scheme = "gs") -> dict[str, Any]:
        """Options with which fsspec (gcsfs, s3fs), and so xarray and pandas, reach this cloud."""
        if scheme == "http":
            return {}
        return {"endpoint_url": self.address, **({"token": "anon"} if scheme == "gs" else {"anon": True})}

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables with which other programs reach this cloud instead of the providers."""
        return {
            "STORAGE_EMULATOR_HOST": self.address,
            "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",  # else gcsfs asks over gRPC, for a minute, what bucket it is
 "TENSORSTORE_GCS_HTTP_URL": self.address,
            "AWS_ENDPOINT_URL": self.address, "AWS_ALLOW_HTTP": "true", "AWS_REGION": "us-east-1",
            "AWS_SKIP_SIGNATURE": "true", "AWS_VIRTUAL_HOSTED_STYLE_REQUEST": "false",
        }  # fmt: skip

    # -- dials and faults

    @property
    def dials(self) -> Dials:
        return self._dials

    def turn(self, situation: str = "", **dials: Any) -> Self:
        """Turn dials while it runs: to a preset, then each one given; requests that have come keep the old ones.

        Raises:
            ConfigError: for an unknown preset or dial, or a value it cannot take; nothing has changed then.
        """
        changed = (preset(situation) if situation else self._dials).change(**dials)
        self._ask("dials", changed.to_dict())
        self._dials = changed
        self._name = _called(situation or self._name, changed)
        return self

    def script(self, pattern: str, entries: Sequence[str | int], kind: str = "") -> Self:
        """What the first, second, … request of each key that matches `bucket/key` meets, such as `[503, 503, "ok"]`.

        `kind` limits it to read, info, write or delete requests. Faults: see `kit.cloud.counts`.

        Raises:
            ConfigError: for an unknown fault or kind.
        """
        problems = check_script(entries, kind)
        if problems:
            raise ConfigError([Problem("script", text) for text in problems], "simulated cloud")
        script = Script(pattern.strip("/"), tuple(map(str, entries)), kind)
        self._ask("script", {"pattern": script.pattern, "entries": script.entries, "kind": kind})
        return self

    def forget_scripts(self) -> Self:
        """Take back every script, and count the requests of each key from one again."""
        self._ask("unscript", {})
        return self

    # -- what it has served

    def counts(self, since: CloudCounts | None = None) -> CloudCounts:
        """Requests and bytes since the start or the last reset, or since earlier counts: `mark = cloud.counts()`."""
        now = CloudCounts.from_dict(self._ask("counts", {}))
        return now if since is None else now.since(since)

    def reset_counts(self) -> Self:
        self._ask("reset", {})
        return self

    def _ask(self, control: str, told: dict[str, Any] | bytes) -> dict[str, Any]:
        body = told if isinstance(told, bytes) else json.dumps(told)
        connection = http.client.HTTPConnection(HOST, self.port, timeout=_ANSWER_SECONDS)
        try:
            connection.request("POST", CONTROL + control, body, {TOKEN_HEADER: self._token})
            answer = connection.getresponse()
            text = answer.read()
        except OSError as error:
            raise StoreError(
                f"{self.address}: the simulated cloud does not answer ({error}); start a new one"
            ) from None
        finally:
            connection.close()
        if answer.status != 200:
            what = control if isinstance(told, bytes) else f"{control} {told}"
            raise StoreError(f"{self.address}: {what} was refused with {answer.status}")
        return dict(json.loads(text))

    # -- its end

    @property
    def process_id(self) -> int:
        """Of the process that serves, for whoever measures what it takes."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._end.alive and self._process.poll() is None

    def close(self) -> None:
        """End it; what it held in memory is gone. It also ends by itself with this process."""
        self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    # -- how it shows itself

    def __str__(self) -> str:
        return f"{self._headline()}\n{self.counts()}" if self.alive else self._headline()

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        from html import escape

        table = self.counts()._repr_html_() if self.alive else ""
        return f"<div><b>{escape(self._headline())}</b>{table}</div>"

    def _headline(self) -> str:
        state = "" if self.alive else " (closed)"
        return f"Simulated cloud at {self.address}{state}, {self._name}: {self._dials}"


def simulated_cloud(
    situation: str = "same region", *, folder: str | Path | None = None, port: int = 0, **dials: Any
) -> SimulatedCloud:
    """Start an object store on loopback that behaves like one in that situation.

    Args:
        situation: A preset: `same region`, `across the ocean`, `home WiFi`, `throttled bucket` or `no limits`.
        folder: Where objects are kept as files `bucket/key`; in the memory of its process when empty.
        port: Where to listen on loopback; 0 takes a free one.
        dials: Any of `kit.cloud.dials.Dials`, such as `latency_seconds=0.1` or `faults={"503": 0.01}`.

    Raises:
        ConfigError: for an unknown preset or dial, or a value it cannot take.
        StoreError: when it does not start, with why.
    """
    chosen = preset(situation).change(**dials)
    if not 0 <= port < 1 << 16:
        raise ConfigError([Problem("port", f"is {port}, but must be at most {(1 << 16) - 1}")], "simulated cloud")
    place = None if folder is None else resolve_path(folder)
    if place is not None and place.exists() and not place.is_dir():
        raise StoreError(f"{place} is a file; a simulated cloud keeps its objects in a folder")
    return SimulatedCloud(chosen, _called(situation, chosen), place, port)


def _called(situation: str, dials: Dials) -> str:
    name = situation.removesuffix(", turned")
    return name if PRESETS.get(name) == dials else f"{name}, turned"


def _start(complaints: IO[bytes]) -> subprocess.Popen[bytes]:
    home = str(Path(kit.__file__).parents[1])
    given = os.environ.get("PYTHONPATH")
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "kit.cloud.server"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=complaints, start_new_session=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([home, given]) if given else home},
    )  # fmt: skip


def _end(process: subprocess.Popen[bytes], complaints: IO[bytes], owner: int, addresses: list[str]) -> None:
    """End the process; not from a fork of its owner, which only inherited the handle."""
    if os.getpid() != owner:
        return
    for address in addresses:
        forget_endpoint(address)
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()
    began = time.monotonic()
    while process.poll() is None and time.monotonic() - began < _END_SECONDS:
        time.sleep(0.005)
    if process.poll() is None:
        process.kill()
        process.wait()
    complaints.close()
