"""verify_levers: the same trial with and without a lever, or up a whole ladder of them; predicted beside measured.

Each rung is a config that differs from the one before in what its lever changes. Every rung is a trial in fresh
processes, one after another and never two at once, so that they do not slow each other. Memory is predicted before the
trials and measured in them; throughput is measured only. Savings are those of this machine on this day: no percentage
here comes from a book.

A rung that cannot be run, or fails, stands in the table with its reason, and the next one builds on the last that ran.

verify_sequences: peak memory against the length of a sequence, whole and in sequence chunks; predicted | measured.

For every length the same trial runs twice, once with whole sequences and once in chunks, each in fresh processes. The
model and all else stay as they are: only the data grows. Without chunks memory grows with the length, because every
position keeps its activations; with chunks it stays nearly flat, because a step keeps one chunk, its state, and the
batch itself. A module without `chunk_step` (`kit.train.SequenceChunks`) has no second line, and the reason is said.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, overload

from kit.config import Config
from kit.errors import ConfigError, KitError, Problem
from kit.memory.prediction import predict_memory
from kit.studies.series import measured_bytes, samples_per_second
from kit.tables import html_list, html_table, text_table
from kit.trial.trial import try_out
from kit.units import format_bytes

Change = Mapping[str, Any]
LEVERS: dict[str, dict[str, Any]] = {
    "bf16-mixed": {"hardware.precision": "bf16-mixed"},
    "gradient checkpointing": {"levers.gradient_checkpointing": True},
    "8-bit optimizer": {"levers.optimizer": "adamw-8bit"},
    "fused optimizer": {"levers.optimizer": "adamw-fused"},
    "flash attention": {"levers.attention": "flash"},
}
"""Levers by name, and what each changes."""
_COLUMNS = (
    "rung", "predicted", "measured", "ratio", "memory against first", "samples/s", "speed against first",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class LeverStep:
    """One config of a ladder and what came of it."""

    name: str
    config: Config
    predicted_bytes: int | None
    """Peak allocated on each device; None where it is not known."""
    measured_bytes: int | None
    """Peak allocated on the fullest device."""
    samples_per_second: float | None
    """Of all devices together, after the warm-up steps."""
    precision: str
    """What the trial really computed in, as its Trainer says."""
    run_directory: str
    note: str = ""
    """Why it did not run, or what it warned of."""

    @property
    def ran(self) -> bool:
        return self.samples_per_second is not None or self.measured_bytes is not None

    @property
    def ratio(self) -> float | None:
        """measured / predicted."""
        predicted, measured = self.predicted_bytes, self.measured_bytes
        return measured / predicted if predicted and measured else None


@dataclass(frozen=True, slots=True, repr=False)
class LeversCheck:
    """The rungs in order; the first is what the others are held against."""

    rungs: tuple[LeverStep, ...]

    def memory_fraction(self, rung: LeverStep) -> float | None:
        """Measured memory as a fraction of the first rung's."""
        first = self.rungs[0].measured_bytes
        return rung.measured_bytes / first if first and rung.measured_bytes else None

    def predicted_fraction(self, rung: LeverStep) -> float | None:
        """Predicted memory as a fraction of the first rung's."""
        first = self.rungs[0].predicted_bytes
        return rung.predicted_bytes / first if first and rung.predicted_bytes else None

    def speed_fraction(self, rung: LeverStep) -> float | None:
        """Throughput as a fraction of the first rung's."""
        first = self.rungs[0].samples_per_second
        return rung.samples_per_second / first if first and rung.samples_per_second else None

    @property
    def rows(self) -> list[list[str]]:
        return [self._row(rung) for rung in self.rungs]

    def _row(self, rung: LeverStep) -> list[str]:
        speed = "–" if rung.samples_per_second is None else f"{rung.samples_per_second:,.1f}"
        return [
            rung.name, _bytes(rung.predicted_bytes), _bytes(rung.measured_bytes), _times(rung.ratio),
            _times(self.memory_fraction(rung)), speed, _times(self.speed_fraction(rung)),
        ]  # fmt: skip

    @property
    def sentences(self) -> tuple[str, ...]:
        same = "memory is the peak allocated on one device, speed that of all devices together"
        notes = (f"{rung.name}: {rung.note}" for rung in self.rungs if rung.note)
        return (same, "a fraction below 1 is less than the first rung has", *notes)

    def __repr__(self) -> str:
        return "\n".join([text_table(_COLUMNS, self.rows), *(f"- {text}" for text in self.sentences)])

    __str__ = __repr__

    def _repr_html_(self) -> str:
        caption = f"{len(self.rungs) - 1} levers, each with those above it"
        return html_table(_COLUMNS, self.rows, caption=caption) + html_list(self.sentences)


@overload
def verify_levers(
    config: Config, /, *, levers: Sequence[str | Change] | None = None, ladder: bool = True
) -> LeversCheck: ...
@overload
def verify_levers(
    module: Any, data: Any, config: Config, *, levers: Sequence[str | Change] | None = None, ladder: bool = True
) -> LeversCheck: ...
def verify_levers(
    module: Any, data: Any = None, config: Config | None = None, *,
    levers: Sequence[str | Change] | None = None, ladder: bool = True,
) -> LeversCheck:  # fmt: skip
    """Run the config, then run it again with each lever, and wait for all of it.

    Args:
        module: What `kit.fit` takes as module.
        data: What `kit.fit` takes as data.
        config: What the levers are added to. `verify_levers(config)` alone takes module and data from it.
        levers: Names out of `LEVERS`, or `{"section.field": value}` of your own; by default every lever that the config
            does not have yet.
        ladder: Each lever comes on top of those before; False takes each alone.

    Raises:
        ConfigError: for an unknown lever, a ladder without rungs, and what `kit.fit` refuses of the config itself.
        TrialError: when the trial of the config itself fails.
    """
    if config is None and isinstance(module, Config):
        module, config = None, module
    if not isinstance(config, Config):
        raise ConfigError(f"verify_levers takes a Config, got {type(config).__name__}")
    changes = _changes(config, levers)
    first = run_rung("as configured", module, data, config)
    rungs, below = [first], config
    for name, change in changes.items():
        try:
            changed = below.replace(change)
            rungs.append(run_rung(f"+ {name}" if ladder else name, module, data, changed))
        except KitError as error:
            rungs.append(not_run(f"+ {name}" if ladder else name, below, str(error)))
            continue
        below = changed if ladder else config
    return LeversCheck(tuple(rungs))


def _changes(config: Config, levers: Sequence[str | Change] | None) -> dict[str, Change]:
    if levers is None:
        names = [name for name, change in LEVERS.items() if name != "fused optimizer" and _is_new(config, change)]
        return {name: LEVERS[name] for name in names}
    found: dict[str, Change] = {}
    for lever in levers:
        if isinstance(lever, Mapping):
            found[", ".join(f"{path.rpartition('.')[2]}: {value}" for path, value in lever.items())] = lever
        elif lever in LEVERS:
            found[lever] = LEVERS[lever]
        else:
            known = ", ".join(LEVERS)
            raise ConfigError([Problem("levers", f"{lever!r} is none of {known}; or give {{'section.field': value}}")])
    if not found:
        raise ConfigError([Problem("levers", "no levers are no ladder; leave it out for all of them")])
    return found


def _is_new(config: Config, change: Change) -> bool:
    return any(config.get(path) != value for path, value in change.items())


def run_rung(name: str, module: Any, data: Any, config: Config) -> LeverStep:
    """Predict one config, run it, and wait for it."""
    given = (module, data) if module is not None or data is not None else None
    predicted = _predict(given, config)
    quiet = config.replace({"trial.predict_memory": False, "trial.measure_memory": True})
    trial = try_out(module, data, quiet).wait()
    return LeverStep(
        name=name, config=config, predicted_bytes=predicted, measured_bytes=measured_bytes(trial),
        samples_per_second=samples_per_second(trial), precision=str(trial.event("fit_started", "precision")),
        run_directory=str(trial.run_directory), note="; ".join(trial.warnings),
    )  # fmt: skip


def _predict(given: tuple[Any, Any] | None, config: Config) -> int | None:
    estimate = predict_memory(*given, config) if given else predict_memory(config)
    return estimate.device_allocated_bytes if estimate.complete else None


def not_run(name: str, config: Config, reason: str) -> LeverStep:
    """What stands in place of a rung that could not be run."""
    return LeverStep(
        name=name, config=config, predicted_bytes=None, measured_bytes=None, samples_per_second=None, precision="",
        run_directory="", note=f"not run: {reason}",
    )  # fmt: skip


def _bytes(value: int | None) -> str:
    return "–" if value is None else format_bytes(value)


def _times(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


_SEQUENCE_COLUMNS = ("sequences", "positions", "predicted", "measured", "ratio", "samples/s")
_STEPS = 3


@dataclass(frozen=True, slots=True, repr=False)
class SequenceCheck:
    """What a device held at each length: `whole` and `chunked` hold one rung for each of `lengths`."""

    lengths: tuple[int, ...]
    chunk: int
    """Positions of a sequence chunk."""
    whole: tuple[LeverStep, ...]
    chunked: tuple[LeverStep, ...]

    @property
    def curves(self) -> dict[str, dict[int, LeverStep]]:
        """Name of a line to length to what came of it."""
        named = {"whole": self.whole, f"in chunks of {self.chunk}": self.chunked}
        return {name: dict(zip(self.lengths, rungs, strict=True)) for name, rungs in named.items()}

    def growth(self, rungs: Sequence[LeverStep]) -> float | None:
        """Measured memory at the longest sequence as a multiple of that at the shortest."""
        first, last = rungs[0].measured_bytes, rungs[-1].measured_bytes
        return last / first if first and last else None

    @property
    def rows(self) -> list[list[str]]:
        return list(self._rows())

    def _rows(self) -> Iterator[list[str]]:
        for name, of_length in self.curves.items():
            for length, rung in of_length.items():
                sizes = [_bytes(rung.predicted_bytes), _bytes(rung.measured_bytes)]
                ratio = "–" if rung.ratio is None else f"{rung.ratio:.3f}"
                speed = "–" if rung.samples_per_second is None else f"{rung.samples_per_second:,.1f}"
                yield [name, str(length), *sizes, ratio, speed]

    @property
    def sentences(self) -> tuple[str, ...]:
        longer = self.lengths[-1] / self.lengths[0]
        grown = [
            f"{name}: {longer:.3g} times the length held {growth:.2f} times the memory"
            for name, rungs in (("whole", self.whole), ("in chunks", self.chunked))
            if (growth := self.growth(rungs)) is not None
        ]
        notes = dict.fromkeys(rung.note for rung in (*self.whole, *self.chunked) if rung.note)
        return ("memory is the peak allocated on one device", *grown, *notes)

    def __repr__(self) -> str:
        return "\n".join([text_table(_SEQUENCE_COLUMNS, self.rows), *(f"- {text}" for text in self.sentences)])

    __str__ = __repr__

    def _repr_html_(self) -> str:
        caption = f"Sequences whole and in chunks of {self.chunk} positions"
        return html_table(_SEQUENCE_COLUMNS, self.rows, caption=caption) + html_list(self.sentences)


def verify_sequences(
    module: Any, data: Any, config: Config, *, lengths: Sequence[int], chunk: int, argument: str = "context"
) -> SequenceCheck:
    """Predict and measure memory at several lengths, with and without sequence chunks, and wait for all of it.

    Args:
        module: What `kit.fit` takes as module; it must take sequences of every length as it is.
        data: A class or an import path, as `kit.fit` takes it, that is made with the length as a keyword argument.
        config: What runs, but for the length of its sequences.
        lengths: Positions of a sequence, at least two of them.
        chunk: Positions of a sequence chunk.
        argument: The keyword that takes the length.

    Raises:
        ConfigError: for fewer than two lengths, a chunk without positions, and what `kit.fit` refuses.
        TrialError: when a trial of whole sequences fails.
    """
    ordered = tuple(sorted(set(lengths)))
    if len(ordered) < 2 or ordered[0] < 1:
        message = f"{list(lengths)} draw no line; give two or more numbers of positions, 1 or more each"
        raise ConfigError([Problem("lengths", message)])
    if chunk < 1:
        raise ConfigError([Problem("chunk", f"{chunk} positions are no chunk; use 1 or more")])
    if not (isinstance(data, type | str)):
        message = f"a {type(data).__name__} has its length already; give a class or an import path, to be made with "
        raise ConfigError([Problem("data", f"{message}{argument}=length")])
    steps = {"trial.max_steps": min(_STEPS, config.trial.max_steps), "trial.warmup_steps": 1}
    short = config.replace({**steps, "levers.sequence_chunk": 0})
    configs = [_of_length(short, argument, length) for length in ordered]
    whole = tuple(run_rung("whole", module, data, one) for one in configs)
    return SequenceCheck(ordered, chunk, whole, tuple(_in_chunks(module, data, one, chunk) for one in configs))


def _of_length(config: Config, argument: str, length: int) -> Config:
    return config.replace({"data.arguments": {**config.data.arguments, argument: length}})


def _in_chunks(module: Any, data: Any, config: Config, chunk: int) -> LeverStep:
    try:
        return run_rung("in chunks", module, data, config.replace({"levers.sequence_chunk": chunk}))
    except KitError as error:
        return not_run("in chunks", config, str(error))
