"""verify_levers and verify_sequences: what a lever changes, predicted beside measured.

**verify_levers** runs the config as it is and then with levers added, on top of each other or each alone. Every step is
a trial in fresh processes, one after another, so that they do not slow each other. Memory is predicted before the trial
and measured in it; throughput is measured only. Savings are those of this machine on this day: no percentage here comes
from a book. A step that cannot run, or fails, stands in the table with its reason, and the next builds on the last that
ran.

**verify_sequences** compares peak memory at several sequence lengths, with whole sequences and with sequence chunks.
Nothing but the length changes. Whole sequences need memory in proportion to the length, because every position keeps
its activations; with chunks it stays nearly flat, because a step keeps one chunk, its state and the batch. A module
without `chunk_step` (`kit.train.SequenceChunks`) has no second line, and the reason is given.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any, Literal

from kit.arguments import config_first
from kit.config import Config
from kit.errors import ConfigError, KitError, Problem, TrialStopped, did_you_mean
from kit.memory.prediction import predict_memory
from kit.registry import Drawable
from kit.studies.repeats import MOST, Tried, try_change
from kit.studies.series import measured_bytes, samples_per_second
from kit.tables import WaitingLine, cell, html_list, html_table, text_table
from kit.trial.payload import Part, refuse_unused
from kit.trial.trial import try_out

Change = Mapping[str, Any]
LEVERS: dict[str, dict[str, Any]] = {
    "bf16-mixed": {"hardware.precision": "bf16-mixed"},
    "zero_grad after the step": {"levers.zero_grad_after_step": True},
    "gradient checkpointing": {"levers.gradient_checkpointing": True},
    "8-bit optimizer": {"levers.optimizer": "adamw-8bit"},
    "fused optimizer": {"levers.optimizer": "adamw-fused"},
    "flash attention": {"levers.attention": "flash"},
}
"""Levers by name, and what each changes."""
_two = "{:.2f}".format
_COLUMNS = (
    "config", "predicted", "measured", "ratio", "saved", "memory against first", "samples/s", "speed against first",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class LeverStep:
    """One config of the check and its figures."""

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
    tried: Tried | None = None
    """Speed beside the first config, run in turn; None for the first, and where it did not run."""

    @property
    def ran(self) -> bool:
        return self.samples_per_second is not None or self.measured_bytes is not None

    @property
    def ratio(self) -> float | None:
        """measured / predicted."""
        predicted, measured = self.predicted_bytes, self.measured_bytes
        return measured / predicted if predicted and measured else None


@dataclass(frozen=True, slots=True, repr=False)
class LeversCheck(Drawable):
    """The steps in order; the others are compared with the first."""

    steps: tuple[LeverStep, ...]
    cumulative: bool = True
    """Whether each holds the levers of those before it."""

    def memory_fraction(self, step: LeverStep) -> float | None:
        """Measured memory as a fraction of the first step's."""
        first = self.steps[0].measured_bytes
        return step.measured_bytes / first if first and step.measured_bytes else None

    def saved_bytes(self, step: LeverStep, kind: Literal["measured", "predicted"] = "measured") -> int | None:
        """Memory that this lever took away: from the step before that ran, or the first where each is alone.

        Below 0 where it needs more; None for the first step and what was not measured, or predicted.
        """
        peaks = [one.measured_bytes if kind == "measured" else one.predicted_bytes for one in self.steps]
        place = self.steps.index(step)
        before, mine = [peak for peak in peaks[:place] if peak], peaks[place]
        if not before or not mine:
            return None
        return before[-1 if self.cumulative else 0] - mine

    def speed_fraction(self, step: LeverStep) -> float | None:
        """Throughput as a fraction of the first step's, of runs in turn where there are some.

        None where these differ too much to compare.
        """
        if step.tried is not None and step.tried.after.samples_per_second:
            return step.tried.gain if step.tried.visible <= 1 else None
        first = self.steps[0].samples_per_second
        return step.samples_per_second / first if first and step.samples_per_second else None

    @property
    def rows(self) -> list[list[str]]:
        return [
            [
                step.name, cell(step.predicted_bytes), cell(step.measured_bytes), cell(step.ratio, _two),
                cell(self.saved_bytes(step)), cell(self.memory_fraction(step), _two),
                cell(step.samples_per_second, "{:,.1f}".format), self._speed_words(step),
            ]
            for step in self.steps
        ]  # fmt: skip

    def _speed_words(self, step: LeverStep) -> str:
        """The fraction and its 95 % interval."""
        shown = cell(self.speed_fraction(step), _two)
        if step.tried is None or not step.tried.after.samples_per_second:
            return shown
        low, high = step.tried.noise
        if step.tried.visible > 1:
            return "not known"
        return f"{'no difference: ' * (step.tried.is_alike)}{shown} ({low:.2f} to {high:.2f})"

    def _is_shifted(self, step: LeverStep) -> bool:
        """Whether its samples/s over the first's lie outside of what the runs in turn say."""
        first = self.steps[0].samples_per_second
        if step.tried is None or not first or not step.samples_per_second or not step.tried.after.samples_per_second:
            return False
        low, high = step.tried.noise
        return not low <= step.samples_per_second / first <= high

    @property
    def sentences(self) -> tuple[str, ...]:
        units = "memory is the peak allocated on one device, speed that of all devices together"
        shifted = (
            "samples/s are of one run, and the machine was slower or faster then than in the first config's; believe "
            "the fraction, which is of runs in turn"
        )
        told = [(shifted, step.name) for step in self.steps if self._is_shifted(step)]
        told += [
            (f"of speed, {step.tried.even}", step.name)
            for step in self.steps if step.tried is not None and step.tried.is_alike
        ]  # fmt: skip
        told += [(step.note, step.name) for step in self.steps if step.note]
        names: dict[str, list[str]] = {}
        for text, name in told:
            names.setdefault(text, []).append(name)
        against = "the row above" if self.cumulative else "the first"
        compared = f"saved is measured against {against}; a fraction below 1 is less than that of the first config"
        return (units, compared, *(f"{'; '.join(named)}: {text}" for text, named in names.items()))

    def __repr__(self) -> str:
        return "\n".join([text_table(_COLUMNS, self.rows), *(f"- {text}" for text in self.sentences)])

    def _repr_html_(self) -> str:
        caption = f"{len(self.steps) - 1} levers, each {'with those above it' if self.cumulative else 'alone'}"
        return html_table(_COLUMNS, self.rows, caption=caption) + html_list(self.sentences)


@config_first
def verify_levers(
    config: Any = None, module: Any = None, data: Any = None, *,
    levers: str | Change | Sequence[str | Change] | None = None, cumulative: bool = True, repeats: int = MOST,
    seconds: float = 60.0,
) -> LeversCheck:  # fmt: skip
    """Run a config, then run it again with each memory lever, and wait for all of it.

    Args:
        config: What the levers are added to; the default config when left out.
        module: What is trained, as `kit.fit` takes it.
        data: What it is trained on, as `kit.fit` takes it.
        levers: Names out of `kit.studies.levers.LEVERS`, or `{"section.field": value}`. None takes every lever that the
            config does not have yet.
        cumulative: Add each lever to those before. False takes each alone.
        repeats: Runs of the first config and of each lever at most, in turn, until it is decided whether their speeds
            differ (`kit.studies.try_change`); two at least.
        seconds: For each lever, after which no further pair of runs begins.

    Returns:
        A row for each lever: memory and samples per second, predicted and measured.

    Raises:
        ConfigError: for an unknown lever, no levers at all, and what `kit.fit` refuses of the config itself.
        TrialError: when the trial of the config itself fails.
        TrialStopped: after an interrupt.

    Example:
        >>> levers = [{"levers.optimizer": "sgd"}]
        >>> check = kit.studies.verify_levers(config, MyModule, MyData, levers=levers, repeats=2)
    """
    changes = _changes(config, levers)
    for change in changes.values():
        refuse_unused(Part.of(module), Part.of(data), change)
    with WaitingLine() as line:
        line.show("the config itself")
        steps, below = [_measured("as configured", module, data, config)], config
        for name, change in changes.items():
            line.show(f"{len(steps) - 1} of {len(changes)} levers done")
            shown = f"+ {name}" if cumulative else name
            try:
                changed = below.replace(change)
                step = _measured(shown, module, data, changed)
                steps.append(_compared(step, steps[0], module, data, repeats, seconds))
            except TrialStopped:  # an interrupt ends all
                raise
            except KitError as error:
                steps.append(_failed(shown, below, error))
                continue
            below = changed if cumulative else config
        line.show(f"{len(changes)} levers done")
    return LeversCheck(tuple(steps), cumulative)


def _changes(config: Config, levers: str | Change | Sequence[str | Change] | None) -> dict[str, Change]:
    if levers is None:
        return {
            name: change
            for name, change in LEVERS.items()
            if name != "fused optimizer" and any(config.get(path) != value for path, value in change.items())
        }
    found: dict[str, Change] = {}
    asked: Any = levers  # by a user, who may give anything
    for lever in asked if isinstance(asked, list | tuple) else [asked]:
        if isinstance(lever, Mapping):
            for path in lever:
                config.get(path)  # which refuses one that there is not
            found[", ".join(f"{path.rpartition('.')[2]}: {value}" for path, value in lever.items())] = lever
        elif isinstance(lever, str) and lever in LEVERS:
            found[lever] = LEVERS[lever]
        else:
            hint = did_you_mean(lever, LEVERS, "there are {}")
            raise ConfigError([Problem("levers", f"{lever!r} is no lever{hint}; or give {{'section.field': value}}")])
    if not found:
        raise ConfigError([Problem("levers", "no levers are listed; leave it out to try all of them")])
    return found


def _measured(name: str, module: Any, data: Any, config: Config) -> LeverStep:
    """Predict one config, run it, and wait for it."""
    estimate = predict_memory(config, module, data)
    predicted = estimate.device_allocated_bytes if estimate.complete else None
    quiet = config.replace({"trial.predict_memory": False, "trial.measure_memory": True})
    trial = try_out(module, data, quiet).wait()
    return LeverStep(
        name=name, config=config, predicted_bytes=predicted, measured_bytes=measured_bytes(trial),
        samples_per_second=samples_per_second(trial), precision=str(trial.event("fit_started", "precision")),
        run_directory=str(trial.run_directory), note="; ".join(trial.warnings),
    )  # fmt: skip


def _compared(
    step: LeverStep, first: LeverStep, module: Any, data: Any, repeats: int, seconds: float
) -> LeverStep:  # fmt: skip
    """The step, with its speed beside the first config's."""
    change = {path: after for path, (_, after) in first.config.diff(step.config).items()}
    if not change:
        return step
    tried = try_change(first.config, module, data, change=change, repeats=repeats, seconds=seconds)
    return replace(step, tried=tried)


def _failed(name: str, config: Config, error: KitError) -> LeverStep:
    return LeverStep(
        name=name, config=config, predicted_bytes=None, measured_bytes=None, samples_per_second=None, precision="",
        run_directory="", note=f"not run: {error}",
    )  # fmt: skip


_SEQUENCE_COLUMNS = ("sequences", "positions", "predicted", "measured", "ratio", "samples/s")
_STEPS = 3


@dataclass(frozen=True, slots=True, repr=False)
class SequenceCheck(Drawable):
    """What a device held at each length: `whole` and `chunked` hold one step for each of `lengths`."""

    lengths: tuple[int, ...]
    chunk: int
    """Positions of a sequence chunk."""
    whole: tuple[LeverStep, ...]
    chunked: tuple[LeverStep, ...]

    @property
    def curves(self) -> dict[str, dict[int, LeverStep]]:
        """Name of a line to length to what came of it."""
        named = {"whole": self.whole, f"in chunks of {self.chunk}": self.chunked}
        return {name: dict(zip(self.lengths, steps, strict=True)) for name, steps in named.items()}

    def growth(self, steps: Sequence[LeverStep]) -> float | None:
        """Measured memory at the longest sequence as a multiple of that at the shortest."""
        first, last = steps[0].measured_bytes, steps[-1].measured_bytes
        return last / first if first and last else None

    @property
    def rows(self) -> list[list[str]]:
        return [
            [
                name, str(length), cell(step.predicted_bytes), cell(step.measured_bytes),
                cell(step.ratio, "{:.3f}".format), cell(step.samples_per_second, "{:,.1f}".format),
            ]
            for name, curve in self.curves.items()
            for length, step in curve.items()
        ]  # fmt: skip

    @property
    def sentences(self) -> tuple[str, ...]:
        longer = self.lengths[-1] / self.lengths[0]
        grown = [
            f"{name}: {longer:.3g} times the length held {growth:.2f} times the memory"
            for name, steps in (("whole", self.whole), ("in chunks", self.chunked))
            if (growth := self.growth(steps)) is not None
        ]
        notes = dict.fromkeys(step.note for step in (*self.whole, *self.chunked) if step.note)
        return ("memory is the peak allocated on one device", *grown, *notes)

    def __repr__(self) -> str:
        return "\n".join([text_table(_SEQUENCE_COLUMNS, self.rows), *(f"- {text}" for text in self.sentences)])

    def _repr_html_(self) -> str:
        caption = f"Sequences whole and in chunks of {self.chunk} positions"
        return html_table(_SEQUENCE_COLUMNS, self.rows, caption=caption) + html_list(self.sentences)


@config_first
def verify_sequences(
    config: Any = None,
    module: Any = None,
    data: Any = None,
    *,
    lengths: Sequence[int],
    chunk: int,
    argument: str = "context",
) -> SequenceCheck:
    """Predict and measure memory at several sequence lengths, with and without sequence chunks, and wait for all of it.

    Args:
        config: What runs, but for the length of its sequences; the default config when left out.
        module: What is trained, as `kit.fit` takes it. It must take sequences of every length.
        data: A class or an import path, as `kit.fit` takes it, that is made with the length as a keyword argument.
        lengths: Positions of a sequence, at least two numbers.
        chunk: Positions of a sequence chunk.
        argument: The keyword argument for the length.

    Returns:
        The peaks by length, whole and in chunks, predicted and measured.

    Raises:
        ConfigError: for fewer than two lengths, a chunk without positions, and what `kit.fit` refuses.
        TrialError: when a trial of whole sequences fails.
        TrialStopped: after an interrupt.

    Example:
        >>> check = kit.studies.verify_sequences(gpt, data="kit.models:Tokens", lengths=[16, 32], chunk=8)
        >>> sorted(check.lengths)
        [16, 32]
    """
    asked: Any = lengths  # by a user, who may give anything
    listed = set(asked) if isinstance(asked, Iterable) else {asked}
    if len(listed) < 2 or not all(isinstance(one, Integral) and int(one) > 0 for one in listed):
        message = f"{lengths!r} cannot be compared; give two or more whole numbers of positions, 1 or more each"
        raise ConfigError([Problem("lengths", message)])
    ordered = tuple(sorted(map(int, listed)))
    if chunk < 1:
        raise ConfigError([Problem("chunk", f"a chunk of {chunk} positions is empty; use 1 or more")])
    if not (isinstance(data, type | str)):
        message = f"the length of a {type(data).__name__} is fixed; give a class or an import path, to be made with "
        raise ConfigError([Problem("data", f"{message}{argument}=length")])
    steps = {"trial.max_steps": min(_STEPS, config.trial.max_steps), "trial.warmup_steps": 1}
    short = config.replace({**steps, "levers.sequence_chunk": 0})
    arguments = [{**config.data.arguments, argument: length} for length in ordered]
    configs = [short.replace({"data.arguments": values}) for values in arguments]
    whole = tuple(_measured("whole", module, data, one) for one in configs)
    chunked: list[LeverStep] = []
    for one in configs:
        try:
            changed = one.replace({"levers.sequence_chunk": chunk})
            chunked.append(_measured("in chunks", module, data, changed))
        except TrialStopped:
            raise
        except KitError as error:
            chunked.append(_failed("in chunks", one, error))
    return SequenceCheck(ordered, chunk, whole, tuple(chunked))
