"""profile: a trial run three times, each under another profiler of Lightning, and the results as tables.

The files lie in `output/profiler/{name}/profiler_logs`, with the names that Lightning gives them; every rank writes its
own: `fit-simple_profiler_output.txt`, `fit-advanced_profiler_output.txt` (with a `.prof` of the whole fit),
`fit-pytorch_profiler_output.txt` and its trace; with several ranks `-{rank}` is added. Tables are read from the JSON
files beside them, never from text. A folder of an earlier profile is kept under the next free number.

A profiler slows what it measures, the advanced one most; take speeds from `kit.studies.timing`. The passes neither
predict nor measure memory, since that would show in the profile.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from typing_extensions import override

from kit.arguments import config_first
from kit.config import Config, project_folder
from kit.errors import ConfigError, Problem, TrialError
from kit.json_text import read_json
from kit.records.row import read_whole
from kit.registry import Drawable
from kit.studies.profiling.trace import TraceInfo, read_trace
from kit.studies.profiling.viewer import TraceViewer
from kit.studies.series import Series
from kit.tables import html_list, html_table, text_table
from kit.trial.submit import REHEARSAL, prepare
from kit.trial.trial import Trial
from kit.units import format_count, format_seconds

PASSES = ("simple", "advanced", "pytorch")
MANY_CALLS, SHORT_CALL_SECONDS, MANY_CALLS_FRACTION = 1000, 20e-6, 0.03
"""A function called so often and so briefly, that takes so much of the time, is better called for many at once."""
_SHOWN = 8
_PREFIX = "fit-"
Row = dict[str, Any]


class Profile(Drawable, Series):
    """A running or finished profile; print it, or read `actions`, `functions`, `traces`."""

    def __init__(self, folder: Path, passes: Sequence[str], grace_seconds: float = 5.0) -> None:
        super().__init__("profile", grace_seconds)
        self.folder = folder
        self.passes = tuple(passes)
        self.trials: dict[str, Trial] = {}
        """By pass."""
        self._task: tuple[Any, Any, Config] | None = None

    @classmethod
    def open(cls, folder: str | Path) -> Profile:
        """A profile from its folder of files.

        Raises:
            TrialError: when there are none.
        """
        place = Path(folder)
        found = [which for which in PASSES if [*place.glob(f"{_PREFIX}{which}_profiler_output*")]]
        if not found:
            raise TrialError(f"{place} holds no output of a profiler; kit.studies.profile(config) makes it")
        profile_ = cls(place, found)
        profile_.state = "COMPLETE"
        profile_._ended.set()
        return profile_

    def begin(self, module: Any, data: Any, config: Config) -> Profile:
        """Start the passes, one after another; the first is checked before anything is made or moved."""
        self._task = (module, data, config)
        first = self._prepare(self.passes[0])
        if self.folder.exists():  # an earlier profile moves to the next free number
            others = (self.folder.with_name(f"{self.folder.name}.{number}") for number in itertools.count(1))
            self.folder.rename(next(path for path in others if not path.exists()))
        self.folder.mkdir(parents=True)
        first.submit()
        self.start()
        return self

    @override
    def work(self) -> None:
        for which in self.passes:
            if self._stopping.is_set():
                return
            trial = self.trials.get(which)
            if trial is None:
                trial = self._prepare(which)
                trial.submit()
            self.follow(trial)
            if trial.state == "STOPPED":
                self._stopping.set()
            elif trial.state != "COMPLETE":
                raise trial.failure()

    def _prepare(self, which: str) -> Trial:
        assert self._task is not None
        module, data, config = self._task
        looking = {"pass": which, "folder": str(self.folder)}
        trial = Trial(prepare(module, data, config, profile=looking, confined=REHEARSAL, kind="profile"), config)
        self.trials[which] = trial
        return trial

    @property
    @override
    def kept(self) -> str:
        return f"interrupted in the {[*self.trials][-1]} pass; what the ones before it found is kept in {self.folder}"

    # -- what was found

    @property
    def files(self) -> tuple[Path, ...]:
        """Everything in the folder."""
        return tuple(sorted(path for path in self.folder.iterdir() if path.is_file()))

    @property
    def actions(self) -> list[Row]:
        """Lightning's actions of every rank, those with most exclusive time first."""
        rows = [
            {"rank": found["rank"], **row, "own_fraction": row["own_seconds"] / found["fit_seconds"]}
            for found in self._read("simple")
            for row in found["actions"]
        ]
        return sorted(rows, key=lambda row: -row["own_seconds"])

    @property
    def functions(self) -> list[Row]:
        """Python functions of every rank, those with most exclusive time first; fractions of the accounted time."""
        rows = [
            {
                "rank": found["rank"], **row, "call_seconds": row["own_seconds"] / row["calls"],
                "own_fraction": row["own_seconds"] / (found["accounted_seconds"] or math.nan),
            }
            for found in self._read("advanced")
            for row in found["functions"]
        ]  # fmt: skip
        return sorted(rows, key=lambda row: -row["own_seconds"])

    @property
    def many_calls(self) -> list[Mapping[str, Any]]:
        """Functions called very often, briefly each time, that are costly together."""
        return [row for row in many_short_calls(self.functions) if row["own_fraction"] >= MANY_CALLS_FRACTION]

    @property
    def traces(self) -> dict[int, TraceInfo]:
        """By rank; empty without the pytorch pass."""
        found = [_trace(path, path.stat().st_mtime_ns) for path in self.trace_files.values()]
        return {trace.rank: trace for trace in found}

    @property
    def trace(self) -> TraceInfo | None:
        """Of the first rank."""
        traces = self.traces
        return traces[min(traces)] if traces else None

    @property
    def trace_files(self) -> dict[int, Path]:
        """The trace of each rank, for chrome://tracing, Perfetto, or `viewer`."""
        files = sorted(self.folder.glob(f"{_PREFIX}pytorch_profiler_output*.pt.trace.json"))
        return {_trace(path, path.stat().st_mtime_ns).rank: path for path in files}

    def viewer(self, rank: int | None = None) -> TraceViewer:
        """The traces of all ranks, or of one, to look at in the notebook; it needs no network.

        Raises:
            TrialError: when there is none.
        """
        files = self.trace_files
        if not files or (rank is not None and rank not in files):
            known = ", ".join(map(str, files)) or "none"
            raise TrialError(f"no trace of rank {rank or 0} in {self.folder}; there are {known}")
        return TraceViewer(*(files.values() if rank is None else [files[rank]]))

    def _read(self, which: str) -> list[Mapping[str, Any]]:
        files = sorted(self.folder.glob(f"{_PREFIX}{which}_profiler_output*.json"))
        kept = (path for path in files if not path.name.endswith(".pt.trace.json"))
        return [read_whole(path, lambda file: dict(read_json(file.read_bytes()))) for path in kept]

    # -- displays

    @property
    def sentences(self) -> list[str]:
        """What the passes say, the most telling first."""
        texts = [trace.sentence + (f" (rank {rank})" if rank else "") for rank, trace in self.traces.items()]
        texts += [
            f"{_place(row)} was called {format_count(row['calls'])} times, "
            f"{format_seconds(row['call_seconds'])} each, and takes {row['own_fraction']:.0%} of the time"
            for row in self.many_calls[:3]
        ]
        texts += [str(self.error)] if self.error is not None else []
        return [*texts, f"files: {self.folder}"]

    @property
    def tables(self) -> dict[str, tuple[list[str], list[list[str]]]]:
        """By title: columns and rows, as they are shown."""
        actions = _timed_rows(self.actions, lambda row: str(row["action"]), "total_seconds")
        functions = _timed_rows(self.functions, _place, "call_seconds")
        operations, gaps = _trace_rows(self.trace)
        timed = ["calls", "its own", "share"]
        found = {
            "Lightning's actions, by time of their own": (["action", *timed, "with all inside"], actions),
            "Python functions, by time of their own": (["function", *timed, "a call"], functions),
            "operations, by time of their own": (["operation", "calls", "host", "device", "share"], operations),
            "time without work for the device": (["meanwhile", "time", "share", "gaps"], gaps),
        }
        return {title: table for title, table in found.items() if table[1]}

    @property
    def _head(self) -> str:
        if self.state == "RUNNING":
            return f"Profile: {[*self.trials][-1]} pass, {len(self.trials)} of {len(self.passes)}"
        return f"Profile: {self.state}"

    def __repr__(self) -> str:
        if not self.ended:
            return self._head
        tables = [f"\n{title}\n{text_table(*table)}" for title, table in self.tables.items()]
        return "\n".join([self._head, *(f"- {text}" for text in self.sentences), *tables])

    @override
    def _repr_html_(self) -> str:
        if not self.ended:
            return f"<div>{self._head} …</div>"
        tables = "".join(html_table(*table, caption=title, dense=True) for title, table in self.tables.items())
        return html_list(self.sentences) + tables


@config_first
def profile(
    config: Any = None, module: Any = None, data: Any = None, *, passes: Sequence[str] | None = None,
    memory: bool | None = None,
) -> Profile:  # fmt: skip
    """Run a trial under each profiler, one after another. Returns at once.

    Args:
        config: What to run; the default config when left out.
        module: What is trained, as `kit.fit` takes it.
        data: What it is trained on, as `kit.fit` takes it.
        passes: Some of simple, advanced and pytorch. None takes `profiler.passes`.
        memory: Record every allocation in the pytorch pass. None takes `profiler.memory`.

    Returns:
        The profile as it runs. `wait()` waits for its tables, `viewer()` shows the timeline.

    Raises:
        ConfigError: for an unknown pass, a trial too short for the pytorch pass, and what `kit.fit` refuses.
        HardwareError: for devices that are not there.

    Example:
        >>> sorted(kit.studies.profile(config, MyModule, MyData, passes=["simple"]).wait().tables)
        ["Lightning's actions, by time of their own"]
    """
    asked = check_passes(config.profiler.passes if passes is None else tuple(passes))
    if "pytorch" in asked and config.trial.max_steps * config.levers.accumulate_grad_batches < 3:
        message = f"{config.trial.max_steps} steps are too few: the pytorch pass needs 3, one of them to warm up"
        raise ConfigError([Problem("trial.max_steps", message)])
    watched = config.replace({
        "profiler.memory": config.profiler.memory if memory is None else memory,
        "trial.predict_memory": False, "trial.measure_memory": False, "trial.count_work": False,
    })  # fmt: skip
    return Profile(profile_folder(config), asked, config.trial.grace_seconds).begin(module, data, watched)


def many_short_calls(functions: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Functions that are called often and briefly, the costliest first."""
    often = (row for row in functions if row["calls"] >= MANY_CALLS)
    short = (row for row in often if row["call_seconds"] <= SHORT_CALL_SECONDS)
    return sorted(short, key=lambda row: -row["own_fraction"])


def check_passes(passes: Sequence[str]) -> tuple[str, ...]:
    """The passes in their order, all three for none.

    Raises:
        ConfigError: for one that is not there.
    """
    for which in passes:
        if which not in PASSES:
            raise ConfigError([Problem("profiler.passes", f"{which!r} is none of {', '.join(PASSES)}")])
    return tuple(which for which in PASSES if not passes or which in passes)


def profile_folder(config: Config) -> Path:
    """Where the newest profile of a config is."""
    given = Path(config.profiler.folder).expanduser()
    return (given if given.is_absolute() else project_folder() / given) / config.name / "profiler_logs"


@functools.lru_cache(maxsize=16)
def _trace(path: Path, changed: int) -> TraceInfo:  # noqa: ARG001 - a file that has changed is another one
    return read_trace(path)


# -- rows as they are shown


def _timed_rows(rows: Sequence[Row], name: Callable[[Row], str], last: str) -> list[list[str]]:
    return [
        [
            f"{name(row)} (rank {row['rank']})" if row["rank"] else name(row), format_count(row["calls"]),
            format_seconds(row["own_seconds"]), f"{row['own_fraction']:.0%}", format_seconds(row[last]),
        ]
        for row in rows[:_SHOWN]
    ]  # fmt: skip


def _trace_rows(trace: TraceInfo | None) -> tuple[list[list[str]], list[list[str]]]:
    """(operations, gaps)."""
    if trace is None:
        return [], []
    on_gpu, operations = trace.device == "gpu", []
    for operation in trace.operations[:_SHOWN]:
        seconds = operation.device_seconds if on_gpu else operation.own_seconds
        operations.append([
            operation.name, format_count(operation.calls), format_seconds(operation.own_seconds),
            format_seconds(operation.device_seconds) if on_gpu else "–", f"{seconds / trace.window_seconds:.0%}",
        ])  # fmt: skip
    counted = Counter(gap.cause for gap in trace.gaps)
    ordered = sorted(trace.gap_seconds.items(), key=lambda item: -item[1])
    gaps = [
        [cause, format_seconds(seconds), f"{trace.gap_fraction(cause):.0%}", str(counted[cause] or "many")]
        for cause, seconds in ordered
    ]
    return operations, gaps


def _place(row: Mapping[str, Any]) -> str:
    """A function as a reader finds it; what is built in has no file."""
    return row["function"] if row["file"] == "~" else f"{row['function']}, {Path(row['file']).name}:{row['line']}"
