"""try_change: the same trial before and after a change, several times each, and whether they differ by more than noise.

Trials run one after another, before and after in turn (before after, after before, ...), so that a machine that slows
down slows both. What is compared is samples a second after the warm-up steps; seeds are the config's, the same in every
run. The noise is that of repeated runs: the change helps, or hurts, when Student's t-test on the logarithms (noise is
in proportion, and taken to be alike on both sides) tells the two apart at 95 %; else it is said to be within the noise,
and not to help. Speeds are geometric means for that reason. With few repeats only large effects can be told.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import Any, Literal

from kit.config import Config
from kit.errors import ConfigError, KitError, Problem, StoreError, TrialError
from kit.studies.series import samples_per_second
from kit.tables import FRAME, html_list, html_table, text_table
from kit.trial.directory import contents_to_run
from kit.trial.submit import again
from kit.trial.trial import Trial, try_out

Verdict = Literal["helps", "hurts", "within the noise", "did not run"]
Change = Mapping[str, Any]
_STUDENT = {2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 8: 2.306, 10: 2.228, 15: 2.131, 30: 2.042}
"""Student's t, two-sided 95 %, by degrees of freedom; between two, those of fewer."""
_COLUMNS = ("", "runs", "samples/s", "spread", "against before")


@dataclass(frozen=True, slots=True)
class RunSource:
    """What is run again: module and data as `kit.fit` takes them, or those of an earlier trial, and the config."""

    module: Any
    data: Any
    config: Config
    earlier: Trial | None = None
    trust: bool = False
    """Whether an earlier trial is run again also when this user did not write it here."""

    @classmethod
    def of(cls, given: Sequence[Any]) -> RunSource:
        """From the arguments of a call: a trial, a config, or module, data and config.

        Raises:
            ConfigError: for anything else.
        """
        if len(given) == 1 and isinstance(given[0], Trial):
            return cls(None, None, given[0].config, given[0])
        if len(given) == 1 and isinstance(given[0], Config):
            return cls(None, None, given[0])
        if len(given) == 3 and isinstance(given[2], Config):
            return cls(*given)
        names = ", ".join(type(item).__name__ for item in given)
        message = f"got ({names}); give a trial, a config, or module, data and config, as to kit.fit"
        raise ConfigError([Problem("arguments", message)])

    def start(self, config: Config) -> Trial:
        """A trial that tries it out with another config: what it writes is kept from everybody."""
        if self.earlier is not None:
            trial = Trial(again(self.earlier.paths, config, self.trust), config)
        else:
            return try_out(self.module, self.data, config)
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

    @property
    def mean(self) -> float:
        """Geometric; NaN without a run."""
        return statistics.geometric_mean(self.samples_per_second) if self.samples_per_second else math.nan

    @property
    def spread(self) -> float:
        """Sample standard deviation over the runs; NaN for a single one."""
        return statistics.stdev(self.samples_per_second) if len(self.samples_per_second) > 1 else math.nan


@dataclass(frozen=True, slots=True, repr=False, kw_only=True)
class Tried:
    """Before and after."""

    before: Side
    after: Side
    predicted_gain: float | None
    """What was foreseen, at most; None where nothing was."""

    @property
    def gain(self) -> float:
        """Throughput after over that before."""
        return self.after.mean / self.before.mean

    @property
    def noise(self) -> tuple[float, float]:
        """The 95 % interval of `gain`."""
        half = _half_width(self.before.samples_per_second, self.after.samples_per_second)
        return self.gain * math.exp(-half), self.gain * math.exp(half)

    @property
    def verdict(self) -> Verdict:
        if not self.after.samples_per_second:
            return "did not run"
        low, high = self.noise
        return "helps" if low > 1 else "hurts" if high < 1 else "within the noise"

    @property
    def sentence(self) -> str:
        if self.verdict == "did not run":
            return f"The change did not run: {self.after.note}"
        foreseen = "" if self.predicted_gain is None else f"; predicted was {self.predicted_gain:.2f} × at most"
        low, high = self.noise
        measured = f"{self.gain:.2f} × as fast, by the noise of repeated runs {low:.2f} to {high:.2f} ×{foreseen}"
        if self.verdict == "within the noise":
            return f"It is not seen to help, the difference is within the noise: {measured}."
        return f"It {self.verdict}: {measured}."

    @property
    def rows(self) -> list[list[str]]:
        return [_row(self.before, self.before), _row(self.after, self.before)]

    @property
    def sentences(self) -> list[str]:
        changes = self.before.config.diff(self.after.config)
        return [self.sentence, *(f"{path}: {mine} → {theirs}" for path, (mine, theirs) in changes.items())]

    def __repr__(self) -> str:
        return "\n".join([text_table(_COLUMNS, self.rows), *(f"- {text}" for text in self.sentences)])

    __str__ = __repr__

    def _repr_html_(self) -> str:
        said = f'<div style="{FRAME}; font-weight: bold">{escape(self.sentence)}</div>'
        return said + html_table(_COLUMNS, self.rows) + html_list(self.sentences[1:])


def try_change(
    *given: Any, change: Change | None = None, new_module: Any = None, new_data: Any = None, repeats: int = 3,
    predicted_gain: float | None = None, on_run: Callable[[Trial], object] | None = None, trust: bool = False,
) -> Tried:  # fmt: skip
    """Run before and after, `repeats` times each, and wait for all of it.

    Args:
        given: A trial, a config, or module, data and config, as `kit.fit` takes them.
        change: `{"section.field": value}`. One that names another store has that built first, where it is not there.
        new_module: Trained afterwards in place of the module.
        new_data: Trained on afterwards in place of the data.
        repeats: Runs of each, two at least: one run says nothing of noise.
        predicted_gain: What the change was foreseen to bring, to stand beside what it did.
        on_run: Called with each trial when it has started.
        trust: Run the code of a trial also when this user did not write its run directory here.

    Raises:
        ConfigError: for changes of nothing, fewer than two repeats, and what `kit.fit` refuses of the config itself.
        ForeignRunError: for a trial that this user did not write here, before anything of it is run.
        TrialError: when a trial before the change fails.
        BuildError: when the store that a change names cannot be built.
    """
    source = replace(RunSource.of(given), trust=trust)
    if source.earlier is not None:
        contents_to_run(source.earlier.paths, trust)
    before = _Runs("before", source)
    after = _Runs("after", _afterwards(source, change, new_module, new_data, repeats))
    for number in range(repeats):
        for runs in (before, after) if number % 2 == 0 else (after, before):
            runs.add(on_run)
        if before.error is not None:
            raise before.error
    return Tried(before=before.side, after=after.side, predicted_gain=predicted_gain)


class _Runs:
    """The runs of one side so far; the first that fails is the last."""

    def __init__(self, name: str, source: RunSource) -> None:
        self.name, self.source = name, source
        self.error: KitError | None = None
        self._trials: list[Trial] = []
        self._speeds: list[float] = []

    def add(self, on_run: Callable[[Trial], object] | None) -> None:
        if self.error is not None:
            return
        try:
            # Nothing beside the trial that could slow it.
            trial = self.source.start(self.source.config.replace({"trial.predict_memory": False}))
            if on_run is not None:
                on_run(trial)
            self._speeds.append(_speed(trial.wait()))
            self._trials.append(trial)
        except KitError as error:
            self.error = error

    @property
    def side(self) -> Side:
        failed = self.error is not None
        return Side(
            name=self.name, config=self.source.config, samples_per_second=() if failed else tuple(self._speeds),
            run_directories=tuple(str(trial.run_directory) for trial in self._trials),
            note=str(self.error) if failed else "",
        )  # fmt: skip


def _afterwards(source: RunSource, change: Change | None, new_module: Any, new_data: Any, repeats: int) -> RunSource:
    if repeats < 2:
        raise ConfigError([Problem("repeats", f"{repeats} is too few to know the noise; give 2 or more")])
    if not change and new_module is None and new_data is None:
        raise ConfigError([Problem("change", "nothing is changed; give {'section.field': value}, or a new module")])
    if source.earlier is not None and (new_module is not None or new_data is not None):
        raise ConfigError(
            [Problem("new_module", "give module, data and config in place of a trial, then its new ones")]
        )
    config = source.config.replace(change or {})
    _build(source.config, config)
    if source.earlier is not None:
        return replace(source, config=config)
    module = source.module if new_module is None else new_module
    return RunSource(module, source.data if new_data is None else new_data, config)


def _build(before: Config, after: Config) -> None:
    """The store that only the changed config names, where it is not there."""
    if after.data.url == before.data.url or after.data.source is None:
        return
    from kit.data.build.build import build
    from kit.data.dataset import open_dataset

    try:
        open_dataset(after)
    except StoreError:
        build(after)


def _speed(trial: Trial) -> float:
    found = samples_per_second(trial)
    if not found:
        raise TrialError(f"{trial.name} measured no step after its {trial.config.trial.warmup_steps} warm-up steps")
    return found


def _half_width(before: Sequence[float], after: Sequence[float]) -> float:
    """Half the width of the 95 % interval of the difference of mean logarithms, with the variance of both pooled."""
    logarithms = [[math.log(value) for value in side] for side in (before, after)]
    freedom = len(before) + len(after) - 2
    squares = sum(statistics.variance(side) * (len(side) - 1) for side in logarithms)
    return _student(freedom) * math.sqrt(squares / freedom * (1 / len(before) + 1 / len(after)))


def _student(freedom: int) -> float:
    return _STUDENT[max(known for known in _STUDENT if known <= freedom)]


def _row(side: Side, before: Side) -> list[str]:
    if not side.samples_per_second:
        return [side.name, "0", "–", "–", "–"]
    count = str(len(side.samples_per_second))
    against = f"{side.mean / before.mean:.2f} ×"
    return [side.name, count, f"{side.mean:,.4g}", f"± {side.spread:,.2g}", against]
