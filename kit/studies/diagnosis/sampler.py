"""Sampler: what the training thread is at, by line of the user's code, without another thread that looks at it.

About every twenty milliseconds the training thread itself notes the part of the step, the innermost line of the user's
code, and the library that it called. It is asked as if by a signal but without one, so no system call is interrupted,
by a timer that needs no interpreter (`Timer`): a thread of Python, which waits for it, asks only after a call that
keeps it, and the next call is charged. The moments are planned by chance, whatever the training does, as steps are as
regular as a clock; an answer counts the same for each moment since the last one. So a long call counts as long as it
is, and no line counts for the time before it. Python before 3.13 sees that it is asked when a thread wants the
interpreter, which it gives after 5 ms (`_GIVEN_SECONDS` where only kit's threads can want it), or when a call has given
it; so Python that runs for less may count for the line after it. No thread looks at the frames of another, which Python
3.11 does not always survive. What an answer costs is timed, and it is asked for less often where that exceeds
`MOST_OVERHEAD` of the time; the cost is told (`own_fraction`).

A package is one that rules ask for (readers, decoders, loggers) wherever it stands, else what the user's line called:
by its frame, or, where that is a function in C, by the call in the text of the line. Frames of readers and decoders
(h5py, Zarr, Pillow) also tell what they read: the chunk, or the size of the picture. Other decoders need have no such
frames; there the largest picture among the variables of the user's function tells, and the package that this function
called most. Where a picture came from a JPEG file, one such file is told too, so that decoding it can be timed.

Loader processes are watched in the same way when they are forked, by a loop put around torch's own; they tell by a page
of memory that they share with the rank. Spawned ones are left alone: they would have to import kit.

The thread that wants the interpreter also looks at whether the one that is asked waits for a disk (`DiskWatch`).

Kept are counts, at most `MOST_LINES` lines, whatever the length of a training.
"""

from __future__ import annotations

import ast
import contextlib
import ctypes
import functools
import inspect
import itertools
import json
import linecache
import math
import mmap
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

import kit
from kit.machine.processes import disk_read_bytes, file_read_bytes, scheduled_seconds
from kit.trial.verdict import describe, is_library

if TYPE_CHECKING:  # it loads torch, and rules read their names from here
    from kit.trial.recorder import StepClock

INTERVAL_SECONDS = 0.02
SIGNAL = signal.SIGRTMIN + 7 if hasattr(signal, "SIGRTMIN") else None
"""A number that nobody sends: only Python's own flag is raised."""
MOST_OVERHEAD = 0.005
"""Of the time, what looking may take before it is done less often."""
MOST_LINES = 400
_GIVEN_SECONDS = 0.0001
"""After which Python gives the interpreter to who wants it: of lines with 0.7 ms of Python between calls that give it,
half a millisecond charged half to those calls, which took a seventh."""
MOST_WORKERS, PAGE_BYTES = 32, 1 << 15
_MOST_DEPTH = 200
_COLD = 2
"""Answers that fill caches, and tell nothing of what later ones cost."""
_TELL_SECONDS = 0.5
_MOST_PICKED = 10_000
_TOLD = 12
_READERS = {"h5py": "__getitem__", "zarr": "__getitem__", "npz": "__getitem__", "PIL": "load"}
"""Packages that read, and the function in which their arguments can be seen."""
_ORDERS = "sampler"
OWN_ORDER = "own sampler"
"""In place of a package, of a line of the user's that draws the indices of a batch for torch's loader."""
_DECODERS = ("PIL", "cv2", "torchvision")
MAKING = ("wait", "worker")
"""Parts in which data is made."""
GARBAGE = "gc"
COMPUTING = ("", "torch", "numpy", "lightning", "pytorch_lightning", "kit", GARBAGE, _ORDERS, OWN_ORDER)
"""Packages that neither read nor decode; the empty one is Python's own or not known."""
_NO_DECODERS = {*COMPUTING, *_READERS} - {"PIL"}
_MOST_MAKING, _MOST_COLOURS = 12, 4
LOGGERS = ("tensorboard", "tensorboardX", "wandb", "mlflow", "comet_ml", "neptune", "loggers")
SELF_LOG = "self.log"
"""What Lightning does about a value that a module logs, before any logger has it."""
_LOGGERS = ("matplotlib", "seaborn", "plotly", "bokeh", SELF_LOG, *LOGGERS)
DRAWERS = (*_LOGGERS, "PIL")
_NAMED = {*_READERS, *_DECODERS, *_LOGGERS, _ORDERS}
"""Packages that rules ask for. A stack has the name of the innermost, or of the outermost that draws or logs."""
_INDICES = ("torch/utils/data/dataloader.py", "_next_index")
"""Where a loader asks its sampler, in the training process however many loader processes there are."""
_FETCH = "torch/utils/data/_utils/fetch.py"
"""Where a loader makes a batch; a dataset of a library has no line of the user's, but a package that it called."""
_MODULE_OF_LIGHTNING = ("lightning/pytorch/core/module.py", "pytorch_lightning/core/module.py")
_LEAST_SIDE = 16
_KIT = f"{Path(kit.__file__).parent}/"
_MODELS_OF_KIT = (f"{_KIT}models/", f"{_KIT}testing.py")


class Sampler:
    """Counts what the main thread of this process is at, from `start`, which it calls itself, until it is stopped."""

    def __init__(self, clock: StepClock | None = None) -> None:
        self._clock = clock
        self.lines: dict[tuple[str, str, str, int, str, str], float] = {}
        """Seconds by part, hook, file, line, function and the package that was called."""
        self.step = 0
        """Which step it is, where somebody counts them."""
        self.moments: dict[tuple[str, str, str, int, str, str], float] = {}
        """Of a line its seconds, each times its step: of one that takes more and more, more of them are late."""
        self.reads: dict[str, dict[str, Any]] = {}
        """The last read of a kind that was seen."""
        self.made: dict[CodeType, Made] = {}
        """The user's functions that make data, with what they call."""
        self.samples = 0
        self.disk = DiskWatch()
        self.bytes_before = 0
        self.idle_seconds = self.cost_seconds = 0.0
        """`idle_seconds`: where no line of the user's code was on the stack."""
        self.interval_seconds = INTERVAL_SECONDS
        self._cold_seconds = 0.0
        self._chance = random.Random(0)
        self._timer: Timer | None = None
        self._stop = threading.Event()
        self.started = self._last = self._moment = time.perf_counter()

    def start(self) -> None:
        """Begin; without effect where this system has no such signal, somebody uses it, or in another thread."""
        global _answering
        if SIGNAL is None or not hold_signal() or not (_answering is None or _answering._stop.is_set()):
            return
        with contextlib.suppress(OSError, AttributeError):
            self._timer = Timer(SIGNAL)
        if self._timer is None:
            return
        _answering = self
        self.started = self._last = self._moment = time.perf_counter()
        self._plan(self.started)
        self.disk.begin(threading.get_native_id())
        self.bytes_before = file_read_bytes()
        threading.Thread(target=self._look, name="kit-host", daemon=True).start()

    def stop(self) -> None:
        """End, once; it may be asked after that, and does not answer."""
        self._stop.set()
        timer, self._timer = self._timer, None  # the C library frees it: ended twice, it would be read afterwards
        if timer is not None:
            timer.end()

    @property
    def seconds(self) -> float:
        """Between the first and the last answer."""
        return self._last - self.started

    def _look(self) -> None:
        usual = sys.getswitchinterval()
        while not self._stop.wait(max(self.interval_seconds / 2, self._moment - time.perf_counter())):
            sys.setswitchinterval(min(usual, _GIVEN_SECONDS) if _is_alone() else usual)
            with contextlib.suppress(Exception):  # the clock may turn meanwhile, and the system may not tell
                self.disk.look(self._clock.part if self._clock is not None else "worker", self.interval_seconds)
        sys.setswitchinterval(usual)
        self.disk.end()

    def _plan(self, now: float) -> float:
        """Ask at the next planned moment; the seconds that those until now stand for."""
        seconds = 0.0
        while self._moment <= now:
            self._moment += self.interval_seconds * self._chance.uniform(0.5, 1.5)
            seconds += self.interval_seconds
        if self._timer is not None:
            self._timer.ask_after(self._moment - now)
        return seconds

    def _on_asked(self, _: int, frame: FrameType | None) -> None:
        if self._stop.is_set():
            return
        now = time.perf_counter()
        with contextlib.suppress(Exception):  # looking must never end a training
            self._count(frame, self._plan(now))
        self._last = now
        self.cost_seconds += time.perf_counter() - now
        if self.samples == _COLD:
            self._cold_seconds = self.cost_seconds
        elif self.samples > _COLD:
            each = (self.cost_seconds - self._cold_seconds) / (self.samples - _COLD)
            self.interval_seconds = min(1.0, max(INTERVAL_SECONDS, each / MOST_OVERHEAD))

    def _count(self, frame: FrameType | None, seconds: float) -> None:
        self.samples += 1
        part, hook = ("worker", "") if self._clock is None else (self._clock.part, self._clock.action)
        line, is_fetching = self._line(frame, seconds if part in MAKING else 0.0)
        if not line[0] and not is_fetching and line[3] not in _READERS:
            self.idle_seconds += seconds
        key = (part, hook, *line)
        if len(self.lines) < MOST_LINES or key in self.lines:
            self.moments[key] = self.moments.get(key, 0.0) + seconds * self.step
            self.lines[key] = self.lines.get(key, 0.0) + seconds

    def _line(self, frame: FrameType | None, making_seconds: float = 0.0) -> tuple[tuple[str, int, str, str], bool]:
        """The innermost line of the user's code with the package that it called, and whether a batch was being made."""
        package, named, fetched, depth, is_fetching = "", "", "", 0, False
        if frame is not None and frame.f_code is Garbage.__call__.__code__:
            named = GARBAGE  # which answers as soon as garbage has been collected
        while frame is not None and depth < _MOST_DEPTH:
            file = frame.f_code.co_filename
            own, found = kind_of(file)
            if file.endswith(_MODULE_OF_LIGHTNING) and frame.f_code.co_name in ("log", "log_dict"):
                found = SELF_LOG
            if own:
                if named in self.reads and package != named:
                    self.reads[named]["through"] = package
                package = named or package or called_package(frame)
                if making_seconds and self._clock is not None and named != _ORDERS and _draws_indices(frame):
                    package = OWN_ORDER
                if making_seconds:
                    self._note_made(package, frame, making_seconds)
                return (file, line_of(frame), frame.f_code.co_name, package), is_fetching
            if file.endswith(_FETCH) and not is_fetching:
                fetched, is_fetching = package, True
            if found:
                package = found
                named = found if found in _LOGGERS or (found in _NAMED and not named) else named
                if frame.f_code.co_name == _READERS.get(found):
                    self._note_read(found, frame)
            frame, depth = frame.f_back, depth + 1
        return ("", 0, "", named or fetched or package), is_fetching

    def _note_read(self, package: str, frame: FrameType) -> None:
        found = read_of(package, frame)
        if found is not None:
            self.reads[package] = {**self.reads.get(package, {}), **found}

    def _note_made(self, package: str, frame: FrameType | None, seconds: float) -> None:
        """What the user's functions that run have at hand of a picture, and what they call, up to the loader."""
        for _ in range(_MOST_MAKING):
            if frame is None or frame.f_code.co_filename.endswith(_FETCH):
                return
            if kind_of(frame.f_code.co_filename)[0] and (frame.f_code in self.made or len(self.made) < MOST_LINES):
                made = self.made.setdefault(frame.f_code, Made())
                made.note(package, frame, seconds)
                decoder = max(made.packages, key=made.packages.__getitem__, default="")
                before = self.reads.get(decoder, {"pixels": 0})
                if decoder and made.picture.get("pixels", 0) > before.get("pixels", math.inf):  # not of a chunk
                    self.reads[decoder] = dict(made.picture)
            frame = frame.f_back


def line_of(frame: FrameType) -> int:
    """The line that a frame is at; of code that has none, as what Python puts around a loop, the one before it."""
    if (line := frame.f_lineno) is not None:
        return line
    lines = [line for first, _, line in frame.f_code.co_lines() if line is not None and first <= frame.f_lasti]
    return lines[-1] if lines else frame.f_code.co_firstlineno


def _draws_indices(frame: FrameType | None) -> bool:
    """Whether a function of the user's was called by a loader that asks for the indices of a batch."""
    for _ in range(_MOST_MAKING):
        if frame is None or frame.f_code.co_filename.endswith(_FETCH):
            return False
        if frame.f_code.co_name == _INDICES[1] and frame.f_code.co_filename.endswith(_INDICES[0]):
            return True
        frame = frame.f_back
    return False


_answering: Sampler | None = None


def hold_signal() -> bool:
    """Have the number of the signal for good, from before a Trainer notes the handlers that it puts back at its end.

    A timer that has asked ends later than it is told to. Where it found the handler that Python has by default, Python
    would compare two numbers without the interpreter, which ends the process.

    Returns:
        False where this system has no such signal, somebody uses it, or in another thread.
    """
    if SIGNAL is None or threading.current_thread() is not threading.main_thread():
        return False
    before = signal.getsignal(SIGNAL)
    if before is signal.SIG_DFL:
        signal.signal(SIGNAL, _answer)
    return before in (signal.SIG_DFL, _answer)


def _answer(number: int, frame: FrameType | None) -> None:
    if _answering is not None:
        _answering._on_asked(number, frame)


class Garbage:
    """The seconds that Python's garbage collection takes, and of those the ones of collections that are not full."""

    def __init__(self) -> None:
        self.seconds, self.young_seconds, self.collections = 0.0, 0.0, 0
        self._began = 0.0

    def __call__(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._began = time.perf_counter()
        elif self._began:
            spent, is_full = time.perf_counter() - self._began, info.get("generation") == 2
            self.seconds += spent
            self.young_seconds += 0.0 if is_full else spent
            self.collections += is_full


def _is_alone() -> bool:
    """Whether no thread of Python but the main one and kit's own are there, whom giving it sooner would change."""
    return all(one.name.startswith(("MainThread", "kit-")) for one in threading.enumerate())


@dataclass(slots=True)
class Made:
    """A function of the user's that makes data: the largest picture among its variables, and seconds by package."""

    picture: dict[str, Any] = field(default_factory=dict)
    packages: dict[str, float] = field(default_factory=dict)
    """Without those that compute, and readers of chunks."""
    seconds: float = 0.0
    """All of it, with what it calls."""

    def note(self, package: str, frame: FrameType, seconds: float) -> None:
        self.seconds += seconds
        if package not in _NO_DECODERS:
            self.packages[package] = self.packages.get(package, 0.0) + seconds
        seen = max((_picture_pixels(value) for value in variables_of(frame).values()), default=0)
        if seen > self.picture.get("pixels", 0):
            self.picture = {"pixels": seen, **_jpeg_of(frame)}


class Timer:
    """Asks the main thread as by a signal of this number, after a while, without the interpreter.

    The C library does so in a thread of its own, which runs nothing but `PyErr_SetInterruptEx`; no signal reaches
    another thread.

    Raises:
        OSError: where the system gives no timer.
        AttributeError: where its C library has none.
    """

    def __init__(self, number: int) -> None:
        library = ctypes.PyDLL(None)  # which keeps the interpreter for so short a call
        self._set, self._delete = library.timer_settime, library.timer_delete
        self._id = ctypes.c_void_p()
        told = _Event(number, 0, _IN_A_THREAD, ctypes.cast(ctypes.pythonapi.PyErr_SetInterruptEx, ctypes.c_void_p))
        if library.timer_create(time.CLOCK_MONOTONIC, ctypes.byref(told), ctypes.byref(self._id)):
            raise OSError("no timer")

    def ask_after(self, seconds: float) -> None:
        """Once; at once where that is over."""
        nanoseconds = max(1, int(seconds * 1e9))
        after = (ctypes.c_long * 4)(0, 0, nanoseconds // 10**9, nanoseconds % 10**9)
        self._set(self._id, 0, after, None)

    def end(self) -> None:
        self._delete(self._id)


_IN_A_THREAD = 2


class _Event(ctypes.Structure):
    """The C library's `sigevent`."""

    _fields_ = (
        ("value", ctypes.c_long), ("signal", ctypes.c_int), ("how", ctypes.c_int), ("function", ctypes.c_void_p),
        ("rest", ctypes.c_char * 40),
    )  # fmt: skip


@dataclass(slots=True)
class DiskWatch:
    """How long a thread waits for disks, by part of the step: as the system says, looked at now and then.

    Until the next look a thread counts as it was found: waiting for a disk, which no lock, network or sleep is. Reading
    a mapped file holds the interpreter, so nobody can look meanwhile: where pages were fetched from a disk since the
    last look, the time in which the thread neither ran nor queued for a core counts.
    """

    seconds: dict[str, float] = field(default_factory=dict)
    cost_seconds: float = 0.0
    bytes_before: int = 0
    _files: tuple[int, ...] = ()
    """Open ones, which are read anew from their beginning."""
    _last: tuple[float, int, float] = (0.0, 0, 0.0)
    """When it was looked at, pages fetched, and seconds on a core or queued for one."""

    def begin(self, thread: int) -> None:
        """Look at this thread of this process from now on; without effect where the system does not tell."""
        self.bytes_before = disk_read_bytes()
        with contextlib.suppress(OSError, ValueError, IndexError):
            for name in ("stat", "schedstat"):
                self._files += (os.open(f"/proc/self/task/{thread}/{name}", os.O_RDONLY),)
            self._last = (time.perf_counter(), *self._now()[1:])

    def look(self, part: str, interval_seconds: float) -> None:
        """Charge the time since the last look to a part.

        Raises:
            ValueError: where the system does not tell.
        """
        (before, pages_before, active_before), now = self._last, time.perf_counter()
        is_waiting, pages, active = self._now()
        if pages > pages_before:
            waited = max(0.0, now - before - (active - active_before))
        else:
            waited = min(now - before, 1.5 * interval_seconds) if is_waiting else 0.0
        self.seconds[part] = self.seconds.get(part, 0.0) + waited
        self._last = (now, pages, active)
        self.cost_seconds += time.perf_counter() - now

    def end(self) -> None:
        """Look no more."""
        files, self._files = self._files, ()
        for file in files:
            os.close(file)

    def _now(self) -> tuple[bool, int, float]:
        stat, schedule = (os.pread(file, 1024, 0).decode() for file in self._files)
        state, *fields = stat.rpartition(")")[2].split()
        running, queued, *_ = map(int, schedule.split())
        return state == "D", int(fields[8]), (running + queued) / 1e9

    @property
    def read_bytes(self) -> int:
        """What this process has had read from disks since `begin`; not what was in memory already."""
        return max(0, disk_read_bytes() - self.bytes_before)


@functools.lru_cache(4096)
def kind_of(file: str) -> tuple[bool, str]:
    """Whether a file is the user's, and else the package that it belongs to; empty for Python's own."""
    if file.startswith(_KIT) and not file.startswith(_MODELS_OF_KIT):
        return False, "kit"
    path = file.rpartition("site-packages/")[2] if "site-packages/" in file else ""
    if path.startswith(("torch/utils/tensorboard/", "lightning/pytorch/loggers/", "lightning/fabric/loggers/")):
        return False, path.split("/")[2]
    if path in ("torch/utils/data/sampler.py", "torch/utils/data/distributed.py"):
        return False, _ORDERS
    if path in ("numpy/lib/_npyio_impl.py", "numpy/lib/npyio.py"):
        return False, "npz"
    return not is_library(file), path.partition("/")[0].removesuffix(".py")


def variables_of(frame: FrameType) -> dict[str, Any]:
    """The variables of a function that runs.

    Before 3.13 Python keeps what it once told of them until the function ends, so an optimizer's tensors that are long
    exchanged would stay and the step would take more memory than without being looked at. They are let go, but where
    the function itself holds what `locals()` gave it, and under a debugger: what it has been told is written back.
    """
    told = frame.f_locals
    found = dict(told)
    kept = frame.f_code.co_flags & inspect.CO_OPTIMIZED and sys.version_info < (3, 13)
    debugged = sys.gettrace() is not None or threading.gettrace() is not None
    if kept and not debugged and sys.getrefcount(told) <= _UNSHARED:
        told.clear()
    return found


_UNSHARED = 3
"""References to what Python tells of variables: its own, that of `variables_of`, and an argument's."""


def called_package(frame: FrameType) -> str:
    """The package of the function in C that a frame has just called; empty for Python's own and what is not told."""
    names = _call_at(frame.f_code, frame.f_lasti)
    if not names:
        return ""
    base = names[0]
    value = variables_of(frame).get(base, frame.f_globals.get(base))
    for name in names[1:-1]:
        value = getattr(value, "__dict__", {}).get(name)
    if isinstance(value, ModuleType):
        module = value.__name__
    else:  # a function by its own name, or a method of an object
        module = getattr(value if len(names) == 1 else type(value), "__module__", None) or ""
    package = str(module).partition(".")[0]
    return "" if package in sys.stdlib_module_names or package == "__main__" else package


@functools.lru_cache(4096)
def _call_at(code: CodeType, offset: int) -> tuple[str, ...]:
    """The names in the call at a place of a function, as `("cv2", "imread")`, from its text; empty where it is none."""
    first, last, begin, end = next(itertools.islice(code.co_positions(), offset // 2, None), (None,) * 4)
    if first is None or last is None or begin is None or end is None:
        return ()
    lines = [linecache.getline(code.co_filename, number).encode() for number in range(first, last + 1)]
    lines[-1] = lines[-1][:end]
    lines[0] = lines[0][begin:]
    try:
        found = ast.parse(b"".join(lines), mode="eval").body
    except (SyntaxError, ValueError):
        return ()
    if not isinstance(found, ast.Call):
        return ()
    names, target = list[str](), found.func
    while isinstance(target, ast.Attribute):
        names.append(target.attr)
        target = target.value
    return (target.id, *reversed(names)) if isinstance(target, ast.Name) else ()


def _picture_pixels(value: Any) -> int:
    """Of an array that is a picture: of bytes, or of few colours; 0 for anything else."""
    shape = getattr(value, "shape", None)
    if not isinstance(shape, tuple) or len(shape) not in (2, 3):
        return 0
    if "uint8" not in str(getattr(value, "dtype", "")) and (len(shape) == 2 or min(shape) > _MOST_COLOURS):
        return 0
    sides = sorted(shape)[-2:]
    return int(sides[0] * sides[1]) if sides[0] >= _LEAST_SIDE else 0


_JPEG = (".jpg", ".jpeg")


def _jpeg_of(frame: FrameType) -> dict[str, str]:
    """The JPEG file that a function has at hand, as `file`: by its variables, or the first of a list that `self` holds.

    Only exact types are looked into, so no code of the user's runs.
    """
    variables = variables_of(frame)
    own = getattr(variables.get("self"), "__dict__", {})
    for value in (*variables.values(), *own.values()):
        one = value[0] if type(value) in (list, tuple) and value else value
        if isinstance(one, str | Path) and str(one).lower().endswith(_JPEG) and Path(one).is_file():
            return {"file": str(Path(one).absolute())}
    return {}


def read_of(package: str, frame: FrameType) -> dict[str, Any] | None:
    """What a frame of a reader reads: bytes asked for and bytes of the chunks they lie in, or pixels decoded."""
    variables = variables_of(frame)
    seen = variables.get("self")
    if package == "PIL":
        size = getattr(seen, "size", None)
        if not isinstance(size, tuple) or len(size) != 2:
            return None
        kind = getattr(seen, "format", None)  # none of what was made of a picture
        return {"pixels": int(size[0] * size[1]), **({"format": str(kind)} if kind else {}), **_jpeg_of(frame)}
    if package == "npz":
        name = variables.get("key")
        members = getattr(getattr(seen, "zip", None), "NameToInfo", {})
        member = members.get(name) or members.get(f"{name}.npy")
        return None if member is None else {"chunk": [], "covered_bytes": int(member.file_size)}
    chunk, shape, kind = (getattr(seen, name, None) for name in ("chunks", "shape", "dtype"))
    if not chunk or not shape or kind is None or len(chunk) != len(shape):
        return None
    given = variables.get("args", variables.get("selection"))
    asked = given if isinstance(given, tuple) else (given,)
    if package == "h5py" and len(asked) == 1 and isinstance(asked[0], tuple):
        asked = asked[0]
    item = int(np.dtype(kind).itemsize)
    wanted, covered, touched = item, item, 1
    for axis, length in enumerate(shape):
        index = asked[axis] if axis < len(asked) else slice(None)
        if isinstance(index, slice):
            picked: Sequence[int] = range(*index.indices(length))
        elif isinstance(index, int | np.integer):
            picked = [int(index)]
        else:
            return None
        chunks = len({place // chunk[axis] for place in picked}) if len(picked) <= _MOST_PICKED else 1
        wanted, covered = wanted * max(1, len(picked)), covered * min(length, max(1, chunks) * chunk[axis])
        touched *= max(1, chunks)
    sides = [int(side) for side in chunk]
    return {"chunk": sides, "chunks": touched, "wanted_bytes": wanted, "covered_bytes": covered}


class WatchedLoop:
    """torch's loop of a loader process, watched. It pickles as torch's own, so that a spawned process runs that."""

    __module__ = "torch.utils.data._utils.worker"

    def __init__(self, original: Any, pages: mmap.mmap, parent: int) -> None:
        self._original, self._pages, self._parent = original, pages, parent

    def __reduce__(self) -> str:
        return "_worker_loop"

    def __call__(self, *args: Any, **options: Any) -> None:
        with contextlib.suppress(Exception):
            number = inspect.signature(self._original).bind(*args, **options).arguments["worker_id"]
            if number < MOST_WORKERS and os.getpid() != self._parent:
                forked = Forked(os.getpid(), (shared_bytes(os.getpid()) or (0, 0))[1], sys.getallocatedblocks())
                sampler = Sampler()
                sampler.start()
                given = (sampler, number, forked)
                threading.Thread(target=self._tell, args=given, name="kit-tell", daemon=True).start()
        self._original(*args, **options)

    def _tell(self, sampler: Sampler, number: int, forked: Forked) -> None:
        pause = 0.0
        while True:
            time.sleep(pause)
            pause = min(60.0, max(_TELL_SECONDS, 1.5 * pause))
            with contextlib.suppress(Exception):
                queued, watched = scheduled_seconds(os.getpid())[1], max(1e-9, sampler.seconds)
                found = {
                    **summary(sampler, {}), **asdict(forked), "queued_fraction": queued / watched,
                    "idle_fraction": sampler.idle_seconds / watched,
                }  # fmt: skip
                text = json.dumps(found).encode()[: PAGE_BYTES - 8]
                begin = number * PAGE_BYTES
                self._pages[begin : begin + 8 + len(text)] = len(text).to_bytes(8, "little") + text


@dataclass(frozen=True, slots=True)
class Forked:
    """What a loader process began with."""

    process: int
    inherited_bytes: int
    """Memory that it shared with its parent: 0 where the system does not tell."""
    objects: int
    """Blocks of Python's allocator."""


def shared_bytes(process: int) -> tuple[int, int] | None:
    """Memory that a process wrote or was forked with, held alone and with others; None where nobody tells."""
    with contextlib.suppress(OSError, ValueError, IndexError, KeyError):
        rows = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
        found = {row.split()[0]: int(row.split()[1]) * 1024 for row in rows if "_Dirty:" in row}
        return found["Private_Dirty:"], found["Shared_Dirty:"]
    return None


def copied_bytes(worker: Mapping[str, Any]) -> int | None:
    """Of the memory that a forked process began with, what it holds a second time by now: writing copies a page.

    A page is shared no longer when it is copied or given back; what is held alone may be new. So the lesser of the two
    is a copy.
    """
    held = shared_bytes(worker["process"]) if worker.get("inherited_bytes") else None
    return None if held is None else max(0, min(held[0], worker["inherited_bytes"] - held[1]))


def summary(sampler: Sampler, cells: dict[str, tuple[str, str]]) -> dict[str, Any]:
    """Fractions of the time: the lines seen most, at which of the steps on average, and what readers read."""
    total = sampler.seconds or 1.0
    most = sorted(dict(sampler.lines).items(), key=lambda item: -item[1])[:_TOLD]
    lines = [
        {"part": part, "hook": hook, "place": describe((file, number, function), cells) if file else "",
         "package": package, "fraction": seconds / total,
         "middle": sampler.moments[part, hook, file, number, function, package] / (seconds * (sampler.step or 1))}
        for (part, hook, file, number, function, package), seconds in most
    ]  # fmt: skip
    parts: dict[str, float] = {}
    for (part, *_), seconds in dict(sampler.lines).items():
        parts[part] = parts.get(part, 0.0) + seconds / total
    return {
        "samples": sampler.samples, "lines": lines, "parts": parts, "seconds": total, "reads": {
            package: {**read, **({"within": within / total} if (within := _within(sampler, package)) else {})}
            for package, read in dict(sampler.reads).items()
        },
        "disk": {part: seconds / total for part, seconds in dict(sampler.disk.seconds).items()},
        "disk_read_bytes": sampler.disk.read_bytes, "file_read_bytes": file_read_bytes() - sampler.bytes_before,
    }  # fmt: skip


def _within(sampler: Sampler, package: str) -> float:
    """Seconds of the function that has a picture of a package's at hand."""
    held = (made for made in dict(sampler.made).values() if made.picture and package in made.packages)
    return max((made.seconds for made in held), default=0.0)
