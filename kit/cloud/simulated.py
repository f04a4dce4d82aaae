"""`kit.cloud.simulate()`: an object store on loopback that is as slow, narrow and faulty as one far away.

It speaks GCS (JSON and XML) and S3 (path style) to gcsfs, obstore, s3fs, tensorstore and any HTTP reader. It runs in a
separate process, which competes with the one being measured for cores only, and ends with the process that started it.
Nothing is authenticated: it is for practice data on your own machine.
"""

from __future__ import annotations

import contextlib
import html
import http.client
import json
import os
import secrets
import select
import subprocess
import sys
import tempfile
import urllib.parse
import weakref
from collections.abc import Sequence
from pathlib import Path
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
    """A running simulated cloud; made by `kit.cloud.simulate`."""

    def __init__(self, dials: Dials, name: str, folder: Path | None, port: int) -> None:
        self._dials, self._name = dials, name
        self._token = secrets.token_hex(16)
        self._complaints: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        home = [str(Path(kit.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "kit.cloud.server"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._complaints, start_new_session=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(home)},
        )  # fmt: skip
        addresses: list[str] = []
        self._end = weakref.finalize(self, _end, self._process, self._complaints, os.getpid(), addresses)
        settings = {"folder": str(folder or ""), "port": port, "token": self._token, "dials": dials.to_dict()}
        self.port = self._begin(json.dumps(settings))
        self.address = f"http://{HOST}:{self.port}"
        """Where it listens, for readers of HTTP and as an endpoint of other clients."""
        addresses.append(self.address)

    def _begin(self, settings: str) -> int:
        """The port that it listens on, once it does."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        line = b""
        with contextlib.suppress(OSError):
            stdin.write(settings.encode() + b"\n")
            stdin.flush()
            if select.select([stdout], [], [], _START_SECONDS)[0]:
                line = stdout.readline()
        if not line:
            self._complaints.seek(0)
            lines = self._complaints.read().decode(errors="replace").strip().splitlines()
            reason = lines[-1] if lines else f"exit code {self._process.poll()}"
            self._end()
            raise StoreError(f"the simulated cloud did not start: {reason}")
        return int(json.loads(line)["port"])

    # -- where things are

    def url(self, path: str, scheme: Scheme = "gs") -> str:
        """The URL of `bucket/path` in this cloud, for `data.url`; the bucket is made when it is not there.

        From here on this process, and those it starts (ranks, loader workers), find the buckets `gs://bucket` and
        `s3://bucket` here and every other bucket where it always was.

        Raises:
            ConfigError: for a path without a bucket, or a scheme that is none of gs, s3 and http.
        """
        path = str(path)
        bucket = path.strip("/").partition("/")[0]
        if not bucket or "://" in path or bucket == "-":
            raise ConfigError([Problem("path", f"{path!r} names no bucket; write bucket/path")], "simulated cloud")
        if scheme not in ("gs", "s3", "http"):
            raise ConfigError([Problem("scheme", f"{scheme!r} is none of gs, s3 and http")], "simulated cloud")
        self._control("bucket", {"name": bucket})
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
            self._control(f"object?name={name}", file.read_bytes())
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
        self._control("dials", changed.to_dict())
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
        self._control("script", {"pattern": script.pattern, "entries": script.entries, "kind": kind})
        return self

    def forget_scripts(self) -> Self:
        """Take back every script, and count the requests of each key from one again."""
        self._control("unscript", {})
        return self

    # -- what it has served

    def counts(self, since: CloudCounts | None = None) -> CloudCounts:
        """Requests and bytes since the start or the last reset, or since earlier counts: `mark = cloud.counts()`."""
        now = CloudCounts.from_dict(self._control("counts", {}))
        return now if since is None else now.since(since)

    def reset_counts(self) -> Self:
        self._control("reset", {})
        return self

    def _control(self, control: str, given: dict[str, Any] | bytes) -> dict[str, Any]:
        body = given if isinstance(given, bytes) else json.dumps(given)
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
            what = control if isinstance(given, bytes) else f"{control} {given}"
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

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- how it shows itself

    def __repr__(self) -> str:
        return f"{self._headline()}\n{self.counts()}" if self.alive else self._headline()

    def _repr_html_(self) -> str:
        table = self.counts()._repr_html_() if self.alive else ""
        return f"<div><b>{html.escape(self._headline())}</b>{table}</div>"

    def _headline(self) -> str:
        state = "" if self.alive else " (closed)"
        return f"Simulated cloud at {self.address}{state}, {self._name}: {self._dials}"


def simulated_cloud(
    situation: str = "same region", *, folder: str | Path | None = None, port: int = 0, **dials: Any
) -> SimulatedCloud:
    """Start an object store on loopback with the latency, bandwidth and faults of a real one.

    Args:
        situation: A preset: `same region`, `across the ocean`, `home WiFi`, `throttled bucket` or `no limits`.
        folder: Where objects are kept as files `bucket/key`. None keeps them in memory.
        port: Where to listen on loopback. 0 takes a free port.
        dials: Any field of `kit.cloud.dials.Dials`, such as `latency_seconds=0.1` or `faults={"503": 0.01}`.

    Returns:
        The cloud, which ends with `close()` or at the end of its `with` block.

    Raises:
        ConfigError: for an unknown preset or field, and a value that it cannot have.
        StoreError: when it does not start, with the reason.

    Example:
        >>> with kit.cloud.simulate("no limits") as cloud:
        ...     print(cloud.url("bucket/ocean.zarr"))
        gs://bucket/ocean.zarr
    """
    chosen = preset(situation).change(**dials)
    if not 0 <= port < 1 << 16:
        raise ConfigError([Problem("port", f"is {port}, but must be at most {(1 << 16) - 1}")], "simulated cloud")
    place = None if folder is None else resolve_path(folder)
    if place is not None and place.exists() and not place.is_dir():
        raise StoreError(f"{place} is a file; a simulated cloud keeps its objects in a folder")
    return SimulatedCloud(chosen, _called(situation, chosen), place, port)


def _called(situation: str, dials: Dials) -> str:
    same = next((name for name, given in PRESETS.items() if given == dials), None)
    return same or f"{situation.removesuffix(', turned')}, turned"


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
    try:
        process.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    complaints.close()
