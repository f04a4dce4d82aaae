"""try_change: the same trial before and after a change, until the noise is small enough to tell whether it helps.

Trials run one after another, before and after in turn (before after, after before, ...), so that a machine that slows
down slows both. They are repeated until the answer is decided: the change helps, hurts, or its difference is less than
`ENOUGH`; or until `repeats` or `seconds` are spent. "No difference found" is an answer too, and says which difference
would have been seen. Samples per second after the warm-up steps are compared; the seed is the config's in every run.
The change helps, or hurts, when Student's t-test at 95 % tells the two sides apart; otherwise the difference is within
the noise. The test is on logarithms, since noise is proportional, with one variance for both sides; so speeds are
geometric means. Looking after every pair would find differences that are not there, so until the last pair an answer
must hold at 99 %.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import Any, Literal

from kit.arguments import checks_arguments
from kit.config import Config
from kit.errors import ConfigError, KitError, Problem, StoreError, TrialError, TrialStopped
from kit.records.results import class_name
from kit.records.row import row_of
from kit.studies.series import samples_per_second
from kit.tables import FRAME, WaitingLine, html_list, html_table, text_table
from kit.trial.directory import RunPaths, contents_to_run
from kit.trial.payload import Part, refuse_unused
from kit.trial.submit import AS_GIVEN, Altered, again
from kit.trial.trial import Trial, try_out

Verdict = Literal["helps", "hurts", "within the noise", "did not run"]
Change = Mapping[str, Any]
_STUDENT = {2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 8: 2.306, 10: 2.228, 15: 2.131, 30: 2.042}
"""Student's t, two-sided 95 %, by degrees of freedom; between two of them the value of the fewer holds."""
_STUDENT_STRICT = {2: 9.925, 4: 4.604, 6: 3.707, 8: 3.355, 10: 3.169, 14: 2.977, 20: 2.845, 30: 2.750}
"""The same for 99 %."""
ENOUGH = 0.05
"""A difference in speed that is not worth another repeat."""
LEAST, MOST, MOST_SECONDS = 2, 6, 120.0
"""Repeats of each side, and the budget of all."""
_COLUMNS = ("", "runs", "samples/s", "spread", "against before")


@dataclass(frozen=True, slots=True)
class RunSource:
    """What is run again: module and data as `kit.fit` takes them, or those of an earlier trial, and the config.

    With an earlier trial, module and data are what takes the place of its own.
    """

    module: Any
    data: Any
    config: Config
    earlier: Trial | None = None
    trust: bool = False
    """Whether an earlier trial is run again also when this user did not write it here."""
    altered: Altered = AS_GIVEN

    @classmethod
    def of(cls, given: Sequence[Any], **named: Any) -> RunSource:
        """From the arguments of a call: a trial, or a config with or without module and data, which may be `named`.

        Raises:
            ConfigError: for anything else.
        """
        named = {name: part for name, part in named.items() if part is not None}
        if len(given) == 1 and isinstance(given[0], Trial) and not named:
            return cls(None, None, given[0].config, given[0])
        if len(given) == 3 and isinstance(given[2], Config):
            message = "(module, data, config) is the order of kit 0.1; give (config, module, data)"
            warnings.warn(message, DeprecationWarning, stacklevel=3)
            given = (given[2], *given[:2])
        if len(given) in (1, 2, 3) and isinstance(given[0], Config):
            parts = dict(zip(("module", "data"), given[1:], strict=False))
            if not parts.keys() & named.keys():
                parts |= named
                return cls(parts.get("module"), parts.get("data"), given[0])
        names = ", ".join([*(type(item).__name__ for item in given), *(f"{name}=" for name in named)])
        message = f"got ({names}); give a trial, or config, module and data, as to kit.fit"
        raise ConfigError([Problem("arguments", message)])

    def start(self, config: Config) -> Trial:
        """A trial that tries it out with another config: what it writes is kept from everybody."""
        if self.earlier is None:
            return try_out(self.module, self.data, config, altered=self.altered)
        trial = Trial(again(self.earlier.paths, config, self.trust, self.altered, self.module, self.data), config)
        trial.submit()
        return trial


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """Repeated runs of one config."""

    name: str
    config: Config
    samples_per_second: tuple[float, ...]
    """Of each run, all devices together."""
    run_directories: tuple[str, ...]
    note: str = ""
    """Why it did not run."""
    batch_size: int | None = None
    """Samples per batch on each device, where the data was told so."""

    @property
    def mean(self) -> float:
        """Geometric; NaN without a run."""
        return statistics.geometric_mean(self.samples_per_second) if self.samples_per_second else math.nan

    @property
    def spread(self) -> float:
        """Sample standard deviation over the runs; NaN for a single one."""
        return statistics.stdev(self.samples_per_second) if len(self.samples_per_second) > 1 else math.nan

    def trained(self, what: str) -> str:
        """The class of its `module` or `data`; empty where no run got so far or its folder is gone."""
        for folder in self.run_directories:
            with contextlib.suppress(TrialError):
                return class_name(str(row_of(RunPaths.open(folder))[what] or ""))
        return ""


@dataclass(frozen=True, slots=True, repr=False, kw_only=True)
class Tried:
    """Before and after."""

    before: Side
    after: Side
    predicted: tuple[float, float] | None
    """The predicted gain, from and to; None where none was predicted."""

    @property
    def gain(self) -> float:
        """Throughput after over that before."""
        return self.after.mean / self.before.mean

    @property
    def predicted_gain(self) -> float | None:
        """The middle of `predicted`."""
        return None if self.predicted is None else math.sqrt(self.predicted[0] * self.predicted[1])

    @property
    def noise(self) -> tuple[float, float]:
        """The 95 % interval of `gain`: from the difference of mean logarithms, with the variance of both pooled."""
        return self.interval(_STUDENT)

    @property
    def visible(self) -> float:
        """The difference in speed, as a fraction, that these repeats would have told from noise."""
        low, high = self.noise
        return math.sqrt(high / low) - 1

    @property
    def even(self) -> str:
        """That no difference was found, and whether one could have been: runs may differ too much to compare."""
        seen = f"one of {self.visible:.0%} would have been seen"
        return f"no difference was found; {seen}" if self.visible <= 1 else "equal runs differ too much to tell"

    def interval(self, student_by_freedom: Mapping[int, float]) -> tuple[float, float]:
        """The interval of `gain` by these quantiles of Student's t."""
        before, after = self.before.samples_per_second, self.after.samples_per_second
        logarithms = [[math.log(value) for value in side] for side in (before, after)]
        freedom = len(before) + len(after) - 2
        squares = sum(statistics.variance(side) * (len(side) - 1) for side in logarithms)
        student = student_by_freedom[max(known for known in student_by_freedom if known <= freedom)]
        half = student * math.sqrt(squares / freedom * (1 / len(before) + 1 / len(after)))
        return self.gain * math.exp(-half), self.gain * math.exp(half)

    @property
    def verdict(self) -> Verdict:
        if not self.after.samples_per_second:
            return "did not run"
        low, high = self.noise
        return "helps" if low > 1 else "hurts" if high < 1 else "within the noise"

    @property
    def is_alike(self) -> bool:
        """Whether no difference was found."""
        return self.verdict == "within the noise"

    @property
    def sentence(self) -> str:
        if self.verdict == "did not run":
            return f"The change did not run: {self.after.note}"
        predicted = "" if self.predicted is None else "; predicted were {:.2f} to {:.2f} ×".format(*self.predicted)
        low, high = self.noise
        measured = f"{self.gain:.2f} × as fast, by the noise of repeated runs {low:.2f} to {high:.2f} ×{predicted}"
        if self.is_alike:
            return f"{self.even[0].upper()}{self.even[1:]}: {measured}."
        return f"It {self.verdict}: {measured}."

    @property
    def rows(self) -> list[list[str]]:
        rows = []
        for side in (self.before, self.after):
            speeds, against = side.samples_per_second, f"{side.mean / self.before.mean:.2f} ×"
            figures = [f"{side.mean:,.4g}", f"± {side.spread:,.2g}", against] if speeds else ["–"] * 3
            rows.append([side.name, str(len(speeds)), *figures])
        return rows

    @property
    def sentences(self) -> list[str]:
        changes = self.before.config.diff(self.after.config)
        told = [f"{path}: {mine} → {theirs}" for path, (mine, theirs) in changes.items()]
        for what in ("module", "data"):
            mine, theirs = self.before.trained(what), self.after.trained(what)
            told += [f"{what}: {mine} → {theirs}"] if mine and theirs and mine != theirs else []
        size = self.after.batch_size
        return [self.sentence, *told, *([] if size is None else [f"batches of your data: {size} samples each"])]

    def __repr__(self) -> str:
        return "\n".join([text_table(_COLUMNS, self.rows), *(f"- {text}" for text in self.sentences)])

    def _repr_html_(self) -> str:
        title = f'<div style="{FRAME}; font-weight: bold">{escape(self.sentence)}</div>'
        return title + html_table(_COLUMNS, self.rows) + html_list(self.sentences[1:])


@checks_arguments
def try_change(
    *given: Any, module: Any = None, data: Any = None, change: Change | None = None, new_module: Any = None,
    new_data: Any = None, new_batch_size: int | None = None, repeats: int = MOST, seconds: float = MOST_SECONDS,
    predicted: tuple[float, float] | None = None, on_run: Callable[[Trial], object] | None = None, trust: bool = False,
) -> Tried:  # fmt: skip
    """Measure what a change brings: run before and after in turn until it is decided, and wait for all of it.

    Args:
        given: A trial, whose module, data, callbacks and logger are taken again; or config, module and data as
            `kit.fit` takes them.
        module: What is trained, where it is not given so.
        data: What it is trained on, where that is not given so.
        change: `{"section.field": value}`. A store that a change names and that is not there is built first.
        new_module: Trained afterwards instead of the module.
        new_data: Trained on afterwards instead of the data.
        new_batch_size: Samples per batch on each device afterwards, where a DataLoader of your own makes them. Batches
            that kit makes follow `loader.batch_size`, which is a change.
        repeats: Runs of each at most, two at least: a single run says nothing about noise. Fewer where the answer is
            decided before.
        seconds: No further pair of runs begins after so long.
        predicted: The gain that was predicted, from and to, to stand beside the measured one.
        on_run: Is called with each trial when it has started.
        trust: Run the code of a trial also when this user did not write its run directory here.

    Returns:
        Both groups of runs, the gain, and whether it is larger than the noise.

    Raises:
        ConfigError: for no change, fewer than two repeats, and what `kit.fit` refuses of the config itself.
        ForeignRunError: for a trial that this user did not write here, before anything of it is run.
        TrialError: when a trial before the change fails.
        TrialStopped: after an interrupt.
        BuildError: when the store that a change names cannot be built.

    Example:
        >>> tried = kit.studies.try_change(config, MyModule, MyData, change={"loader.pin_memory": True}, repeats=2)
    """
    source = replace(RunSource.of(given, module=module, data=data), trust=trust)
    if source.earlier is not None:
        contents_to_run(source.earlier.paths, trust)
    changed = _afterwards(source, change, new_module, new_data, new_batch_size, repeats)
    before = Side(name="before", config=source.config, samples_per_second=(), run_directories=())
    after = Side(
        name="after", config=changed.config, samples_per_second=(), run_directories=(), batch_size=new_batch_size
    )  # fmt: skip
    began = time.monotonic()
    with WaitingLine(f"{2 * repeats} at most") as line:
        line.show("0 runs done in turn")
        for number in range(repeats):
            tried = Tried(before=before, after=after, predicted=predicted)
            if number >= LEAST and (after.note or not undecided(tried) or time.monotonic() - began > seconds):
                break
            for name in ("before", "after") if number % 2 == 0 else ("after", "before"):
                if name == "before":
                    before = _with_run(before, source, on_run)
                elif not after.note:
                    try:
                        after = _with_run(after, changed, on_run)
                    except TrialStopped:  # an interrupt ends all
                        raise
                    except KitError as error:
                        after = replace(after, samples_per_second=(), note=str(error))
                line.show(f"{len(before.run_directories) + len(after.run_directories)} runs done in turn")
    return Tried(before=before, after=after, predicted=predicted)


def undecided(tried: Tried) -> bool:
    """Whether more repeats could tell more: the gain may be none, or is known less well than to `ENOUGH`."""
    low, high = tried.interval(_STUDENT_STRICT)
    is_effect = low > 1 or high < 1
    return not ((is_effect and tried.visible <= max(ENOUGH, abs(tried.gain - 1) / 2)) or tried.visible <= ENOUGH)


def _with_run(side: Side, source: RunSource, on_run: Callable[[Trial], object] | None) -> Side:
    """The side with one more run."""
    trial = source.start(side.config.replace({"trial.predict_memory": False}))  # a prediction would slow the trial
    if on_run is not None:
        on_run(trial)
    speed = samples_per_second(trial.wait())
    if not speed:
        raise TrialError(f"{trial.name} measured no step after its {trial.config.trial.warmup_steps} warm-up steps")
    return replace(
        side, samples_per_second=(*side.samples_per_second, speed),
        run_directories=(*side.run_directories, str(trial.run_directory)),
    )  # fmt: skip


def _afterwards(
    source: RunSource, change: Change | None, new_module: Any, new_data: Any, new_batch_size: int | None, repeats: int
) -> RunSource:  # fmt: skip
    if repeats < 2:
        raise ConfigError([Problem("repeats", f"{repeats} is too few to know the noise; give 2 or more")])
    if new_batch_size is not None and new_batch_size < 1:
        raise ConfigError([Problem("new_batch_size", f"a batch of {new_batch_size} is empty; give 1 or more")])
    if new_batch_size is not None:
        source = replace(source, altered=replace(source.altered, batch_size=new_batch_size))
    if not change and new_module is None and new_data is None and new_batch_size is None:
        raise ConfigError([Problem("change", "nothing is changed; give {'section.field': value}, or a new module")])
    if source.earlier is None:
        refuse_unused(Part.of(source.module), Part.of(source.data), change or {})
    config = source.config.replace(change or {})
    if config.data.url != source.config.data.url and config.data.source is not None:
        from kit.data.build.build import build
        from kit.data.open_dataset import open_dataset

        try:
            open_dataset(config)
        except StoreError:
            build(config)
    if source.earlier is not None:
        return replace(source, config=config, module=new_module, data=new_data)
    module = source.module if new_module is None else new_module
    data = source.data if new_data is None else new_data
    return RunSource(module, data, config, altered=source.altered)
