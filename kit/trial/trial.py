"""Trials: one config run briefly in processes of its own, while the notebook stays free.

A trial is checked as far as it can be, gets a run directory, and a supervisor is told to start its ranks, all at once.
A `Trial` is a view of that directory: all it knows it reads from files, so that it can be opened again after a kernel
restart, and no thread of the kernel matters. The kernel never imports torch for it.

States: WAITING (submitted), RUNNING, then one of COMPLETE, FAILED (with a cause), STOPPED (by request; what was
measured is kept) and LOST (its supervisor went away, and with it every rank).

A trial found as a directory is LOST when nobody stands behind it. Processes are named by id and start time, which mean
something only on the machine they ran on and until it restarts. Of a run on another machine (a shared folder) nothing
is known but when it last wrote; it is given up after a silence that its own supervisor would not have let pass.

Displays are called back by one daemon thread for all trials of a kernel, alive only while one runs. Nothing a trial
does or is depends on that thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import html
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, Literal, Self

from kit.config import Config
from kit.errors import ConfigError, HardwareError, KitError, TrialError, TrialStopped
from kit.events import Event, EventReader
from kit.json_text import write_whole
from kit.machine.claims import hand_over, release
from kit.machine.processes import alive, machine
from kit.registry import Drawable, display, load
from kit.tables import WaitingLine
from kit.trial import client, scratch
from kit.trial.directory import EVENT_FILES, KILL, STOP, Control, RunPaths, contents_to_run
from kit.trial.settings_used import settings_used, used_event, with_values
from kit.trial.submit import AS_GIVEN, REHEARSAL, Altered, RunKind, prepare
from kit.trial.verdict import as_details

State = Literal["WAITING", "RUNNING", "COMPLETE", "FAILED", "STOPPED", "LOST"]
Cause = Literal["error", "device_oom", "host_oom", "killed", "diverged", "timeout", "stalled", "data"]
ENDED: tuple[State, ...] = ("COMPLETE", "FAILED", "STOPPED", "LOST")

_TICK_SECONDS = 0.03
_ASYNC_TICK_SECONDS = 0.1
_WATCH_TICK_SECONDS = 0.1
_LIFE_CHECK_SECONDS = 1.0
_FRESH_SECONDS = 0.2
"""What `state`, `ended` and `progress` say may be as old as that."""
_INTERRUPT_SECONDS = 10.0


def try_out(module: Any, data: Any, config: Config, kind: RunKind = "repeat", altered: Altered = AS_GIVEN) -> Trial:
    """Start a trial for its measurements alone: what its hooks write reaches nobody.

    Raises:
        ConfigError, HardwareError, StoreError: as `fit`.
    """
    trial = Trial(prepare(module, data, config, altered, confined=REHEARSAL, kind=kind), config)
    trial.submit()
    return trial


def warm_up() -> None:
    """Start the warm process in the background (it imports torch for about two seconds). Returns at once."""
    client.supervisor("warm")


@functools.lru_cache(maxsize=256)
def _config_of(text: str) -> Config:
    """Of a run's file; reading YAML takes 25 ms, and many runs are repeats of each other."""
    return Config.from_yaml(text, "config.yaml")


class Trial(Drawable):
    """A trial that runs or has ended: its run directory, its events and its result.

    `kit.fit` starts one and returns it at once; `Trial.open(folder)` opens one that an earlier kernel started. A trial
    shows itself in a notebook as a live chart.

    Example:
        >>> again = kit.Trial.open(trial.run_directory)
        >>> again.state
        'COMPLETE'
        >>> again.config.name
        'experiment'
    """

    def __init__(self, paths: RunPaths, config: Config | None = None) -> None:
        given: Any = paths  # by a user, who may give anything
        if isinstance(given, str | Path):
            raise TrialError(f"a trial is started by kit.fit, and opened by kit.Trial.open({str(given)!r})")
        self.run_directory: Path = paths.directory
        self.paths = paths
        self.environment: dict[str, Any] = paths.read_environment()
        self.config: Config = config or _config_of(paths.config.read_text(encoding="utf-8"))
        """What runs: with the settings that its loader stands at, once the first batch is there."""
        self.asked: Config = self.config
        """As it was submitted."""
        self._state: State = "WAITING"
        self.cause: Cause | None = None
        self.message: str = ""
        """How the trial ended, in one line; the root cause first."""
        self.steps: list[Event] = []
        """Every `step` event of every rank, in order of time."""
        self.events: list[Event] = []
        """Every other event, in order of time."""
        self._reader = EventReader(paths.directory, EVENT_FILES)
        self._lock = threading.RLock()
        self._callbacks: list[Callable[[Trial], object]] = []
        self._notifying = threading.Lock()
        self._news = False
        self._supervisor: client.SupervisorHandle | None = None
        self._life_checked = self._polled = 0.0
        self._resubmitted = False
        self._opened = config is None
        """Whether it was found, not made here."""

    @classmethod
    def open(cls, run_directory: str | Path) -> Self:
        """A trial from its run directory, whoever started it and whether or not it still runs.

        Raises:
            TrialError: when the directory is not a run, or one that is incomplete or damaged.
            EventLogError: when an event file is damaged.
        """
        paths = RunPaths.open(run_directory)
        try:
            trial = cls(paths)
        except (OSError, ValueError, TrialError) as error:
            raise TrialError(f"{paths.directory} is an incomplete run: {error}") from None
        try:
            trial.poll()
        except KitError:
            raise
        except Exception as error:  # whatever a file says that kit did not write
            raise TrialError(f"{paths.directory} is damaged: {type(error).__name__}: {error}") from error
        return trial

    # -- what is known

    @property
    def name(self) -> str:
        return self.run_directory.name

    @property
    def state(self) -> State:
        """As of now: where the last look is older than a fifth of a second, the files are read.

        Raises:
            EventLogError: when an event file is damaged.
        """
        begun = self._supervisor is not None or self._opened
        if begun and self._state not in ENDED and time.monotonic() - self._polled >= _FRESH_SECONDS:
            self.poll()
        return self._state

    @property
    def ended(self) -> bool:
        """Whether no more will come, as of now."""
        return self.state in ENDED

    @property
    def error(self) -> str | None:
        """The root cause of a trial that FAILED or is LOST, in one line."""
        return self.message if self.state in ("FAILED", "LOST") else None

    @property
    def traceback(self) -> str:
        """The traceback of the first rank that failed; empty when none left one."""
        return str(self._failed("traceback") or "")

    def _failed(self, field: str) -> Any:
        """What the first rank that failed said, if it said anything."""
        failed = self.event("trial_ended", "failed_rank")
        mine = [event for event in self.events if event["kind"] == "failed" and event["rank"] == failed]
        return mine[0].get(field) if mine else None

    def event(self, kind: str, field: str | None = None) -> Any:
        """The first event of that kind (rank 0 first), or one of its fields; None when there is none yet."""
        found = sorted((event for event in self.events if event["kind"] == kind), key=lambda event: event["rank"])
        if not found:
            return None
        return found[0] if field is None else found[0].get(field)

    @property
    def warnings(self) -> list[str]:
        """What the ranks and the submission warned of, each once."""
        return list(dict.fromkeys(str(event["message"]) for event in self.events if event["kind"] == "warned"))

    @property
    def counters(self) -> list[dict[str, Any]]:
        """What the loader of each rank counted, of those that have ended their fit."""
        return [event.get("counters") or {} for event in self.events if event["kind"] == "fit_ended"]

    def poll(self) -> State:
        """Read what is new in the files; the state afterwards."""
        with self._lock:
            self._polled = time.monotonic()
            if self._state not in ENDED:
                lifeless = self._seems_lifeless()
                self._take(self._reader.read())
                if lifeless and self._state not in ENDED:
                    self._end_lifeless(lifeless)
                if self._state in ENDED:
                    self._take(self._reader.read())  # what a rank wrote last, while other files were being read
                    self._keep_row()
        self._notify()
        return self._state

    def _take(self, events: list[Event]) -> None:
        for event in events:
            (self.steps if event["kind"] == "step" else self.events).append(event)
            if event["kind"] == "trial_started":
                self._state = "RUNNING"
            elif event["kind"] == "trial_ended":
                self._state, self.cause, self.message = event["state"], event.get("cause"), event["message"]
            elif used_event([event]) is not None:
                self.asked = with_values(self.config, event["asked"])
                self.config = with_values(self.asked, event["used"])
        self._news = self._news or bool(events)

    def _keep_row(self) -> None:
        """Leave the row of a trial that this process has started in its directory; the reports above know how."""
        is_trial = not {"job", "removed"} & self.environment.keys()
        if self._supervisor is not None and is_trial and self.run_directory.exists():
            load("trial.row")(self)

    # -- life and death

    def _seems_lifeless(self) -> str:
        """Why nothing more will come from this trial, if so; looked at before the files are, so that none is missed."""
        now = time.monotonic()
        if now - self._life_checked < _LIFE_CHECK_SECONDS:
            return ""
        self._life_checked = now
        if not self.run_directory.exists():
            return "its run directory was removed"
        if self._supervisor is not None:
            return "" if self._supervisor.alive else f"its supervisor went away ({self._supervisor.last_words()})"
        there, here = self.environment.get("machine", {}), machine()
        if there == here:
            known = self.environment.get("supervisor")
            processes = [*([known] if known else []), *(self.event("trial_started", "processes") or [])]
            return "" if any(map(alive, processes)) else "its supervisor went away"
        if there.get("host") == here["host"]:
            return "the machine was restarted"
        newest = max((path.stat().st_mtime for path in self.paths.event_files()), default=0.0)
        silent = time.time() - newest > self.config.trial.stall_seconds + self.config.trial.grace_seconds
        return f"it ran on {there.get('host', 'another machine')} and has been silent since" if silent else ""

    def _end_lifeless(self, reason: str) -> None:
        supervisor_died = self._supervisor is not None and not self._supervisor.alive
        if supervisor_died and self._state == "WAITING" and not self._resubmitted and self.run_directory.exists():
            self._resubmitted = True
            try:
                self.submit("cold", f"the warm process could not be used: {reason}")
            except (HardwareError, ConfigError) as error:
                reason = str(error)
            else:
                return
        scratch.sweep()
        self._state, self.message, self._news = "LOST", reason, True

    def submit(self, start: Literal["warm", "cold"] | None = None, reason: str = "") -> None:
        """Hand the run to a supervisor; `reason` says why it is not the one that the config names.

        Raises:
            TrialError: when none can be started.
            ConfigError: when the run directory cannot be written to; it is gone then.
            HardwareError: when a GPU of the run was given to another trial meanwhile.
            ForeignRunError: when it was opened, and this user did not write it here.
        """
        if self._opened:
            contents_to_run(self.paths)
        start = start or self.config.trial.start
        claims = [Path(file) for file in self.environment.get("claims", ())]
        try:
            for _ in range(2):
                supervisor = self._supervisor = client.supervisor(start)
                self.environment["supervisor"] = supervisor.identity
                text = json.dumps(self.environment, indent=2)
                with self.paths.whole_or_gone(len(text)):
                    write_whole(self.paths.environment, text)
                hand_over(claims, supervisor.identity, self.config.name)
                if supervisor.send(self._start_command(reason)):
                    return
            raise TrialError(f"no process to run trials in could be started: {client.supervisor(start).last_words()}")
        except BaseException:
            release(claims)
            raise

    def _start_command(self, reason: str) -> dict[str, Any]:
        """An `Order`. The environment goes down the pipe and never into a file, as it may hold keys."""
        trial, environment = self.config.trial, self.environment
        limits = {name: getattr(trial, name) for name in ("timeout_seconds", "stall_seconds", "grace_seconds")}
        return {
            "start": {
                "run_directory": str(self.run_directory),
                "job": environment.get("job", "fit"),
                "world_size": environment["world_size"],
                "devices": environment["devices"],
                "claims": environment.get("claims", []),
                "limits": limits,
                "variables": dict(os.environ),
                "reason": reason,
                "temporary": tempfile.gettempdir(),
                "removed": environment.get("removed", "never"),
            }
        }

    # -- ending it

    def stop(self) -> None:
        """Ask all ranks to leave after the same step; those that do not within `grace_seconds` are killed.

        Returns at once; works on a trial started elsewhere too.
        """
        self._request(STOP)

    def kill(self) -> None:
        """End all ranks now. Returns at once; what was measured is kept."""
        self._request(KILL)

    def _request(self, level: int) -> None:
        if self.poll() in ENDED:
            return
        control = Control(self.paths.control)
        control.request(level)
        control.close()
        if self._supervisor is not None:
            self._supervisor.send({})  # wakes it up

    # -- waiting for it

    def wait(self, timeout: float | None = None) -> Self:
        """Return when the trial is COMPLETE or STOPPED. An interrupt stops the trial and keeps what it measured.

        Raises:
            TrialError: when it FAILED or is LOST; the root cause first.
            TrialStopped: after an interrupt.
            TimeoutError: after `timeout` seconds; the trial goes on.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        try:
            with WaitingLine() as line:
                while self.poll() not in ENDED:
                    line.show(self.progress)
                    if deadline is not None and time.monotonic() > deadline:
                        raise TimeoutError(f"{self.name} is still {self.state} after {timeout} s; it goes on")
                    time.sleep(_TICK_SECONDS)
                line.show(self.progress)
        except KeyboardInterrupt:
            raise self._end_interrupted() from None
        return self._result()

    def __await__(self) -> Generator[Any, None, Self]:
        return self._wait_async().__await__()

    async def _wait_async(self) -> Self:
        try:
            with WaitingLine() as line:
                while self.poll() not in ENDED:
                    line.show(self.progress)
                    await asyncio.sleep(_ASYNC_TICK_SECONDS)
                line.show(self.progress)
        except (asyncio.CancelledError, KeyboardInterrupt):
            raise self._end_interrupted() from None
        return self._result()

    def _end_interrupted(self) -> TrialStopped:
        """Stop and see it end; a second interrupt kills."""
        self.stop()
        deadline = time.monotonic() + self.config.trial.grace_seconds + _INTERRUPT_SECONDS
        while self.poll() not in ENDED and time.monotonic() < deadline:
            try:
                time.sleep(_TICK_SECONDS)
            except KeyboardInterrupt:
                self.kill()
        return TrialStopped(f"interrupted after {self._steps_done} steps; they are kept in {self.run_directory}")

    @property
    def progress(self) -> str:
        """How far it is as of now, in a few words."""
        state = self.state
        if not self.steps:
            return f"{self.name}: {state}"
        return f"{self.name}: step {self._steps_done} of {self.config.trial.max_steps}"

    @property
    def _steps_done(self) -> int:
        return max((int(event["step"]) for event in self.steps), default=0)

    def _result(self) -> Self:
        if self.state in ("FAILED", "LOST"):
            raise self.failure()
        return self

    def failure(self) -> TrialError:
        """What `wait` raises for a trial that FAILED or is LOST."""
        rank = self.event("trial_ended", "failed_rank") or 0
        log = self.paths.log(rank)
        sentences = self._failed("advice") or ()
        helps = as_details(sentences) if sentences else ""
        parts = (helps, self.traceback.rstrip(), f"Log: {log}" if log.exists() else "")
        details = "\n".join(part for part in parts if part)
        word = self.cause or self.state.lower()
        return TrialError(f"{self.message} [{word}]", details)

    def memory_report(self, path: str | Path | None = None, *, timeout_seconds: float | None = None) -> Path:
        """Write a page about a device that ran out of memory: what held it, against what was predicted, and what helps.

        The page opens offline. What was held is read from the snapshot that the failed rank left; module and data are
        dry-run again, as they were sent, also with the changes that might fit.

        Args:
            path: The HTML file; by default `memory_report.html` in the run directory.
            timeout_seconds: After so long no further change is dry-run; by default as in `kit.recommend`.

        Returns:
            The path of the file.

        Raises:
            TrialError: when no rank left a snapshot.
            ConfigError: when the page cannot be written.
        """
        file = self.run_directory / "memory_report.html" if path is None else Path(path).expanduser()
        name = self._failed("memory_snapshot")
        if not name:
            raise TrialError(f"{self.name} has no snapshot of memory: no device ran out of it in a training step")
        rank = int(self.event("trial_ended", "failed_rank") or 0)
        written: Path = load("trial.memory_report")(self, self.paths.memory_snapshot(rank), file, timeout_seconds)
        return written

    # -- displays

    def on_change(self, callback: Callable[[Trial], object]) -> Callable[[], None]:
        """Call `callback(trial)` when there is news, at most ten times a second, until the trial has ended.

        Calls come from a background thread (or from `wait()`); one that raises is reported and not called again.

        Returns:
            A function that ends the calls.
        """
        global _watcher
        with self._lock:
            self._callbacks.append(callback)
            self._news = True
        with _watching:
            _watched.add(self)
            if _watcher is None:
                _watcher = threading.Thread(target=_watch, name="kit-watch", daemon=True)
                _watcher.start()

        return lambda: self._forget(callback)

    def _notify(self) -> None:
        """Call back outside the lock, one thread at a time; it also passes on what another thread read meanwhile."""
        while self._news and self._callbacks and self._notifying.acquire(blocking=False):
            try:
                self._news, ended = False, self._state in ENDED
                for callback in list(self._callbacks):
                    try:
                        callback(self)
                    except Exception as error:
                        self._forget(callback)
                        sys.excepthook(type(error), error, error.__traceback__)
                    if ended:  # there is no more news, and it need not be kept
                        self._forget(callback)
            finally:
                self._notifying.release()

    def _forget(self, callback: Callable[[Trial], object]) -> None:
        with self._lock, contextlib.suppress(ValueError):
            self._callbacks.remove(callback)

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(repr(self))}</pre>"

    def _ipython_display_(self) -> None:
        display("trial.display", self)

    def __repr__(self) -> str:
        lines = [f"Trial {self.name}: {self.state}, step {self._steps_done} of {self.config.trial.max_steps}"]
        lines += [f"  {self.cause or self.state.lower()}: {self.message}"] if self.message else []
        lines += [f"  {sentence}" for sentence in settings_used(self)]
        lines += [f"  warning: {text}" for text in self.warnings]
        return "\n".join([*lines, f"  {self.run_directory}"])


_watched: set[Trial] = set()
_watching = threading.Lock()
_watcher: threading.Thread | None = None


def _watch() -> None:
    """Poll the trials that have callbacks ten times a second, until all have ended."""
    global _watcher
    while True:
        with _watching:
            trials = list(_watched)
            if not trials:
                _watcher = None
                return
        for trial in trials:
            try:
                trial.poll()
                goes_on = not trial.ended and bool(trial._callbacks)
            except Exception as error:  # one that cannot be read is reported once and left alone
                sys.excepthook(type(error), error, error.__traceback__)
                goes_on = False
            if not goes_on:
                with _watching:
                    _watched.discard(trial)
        time.sleep(_WATCH_TICK_SECONDS)
