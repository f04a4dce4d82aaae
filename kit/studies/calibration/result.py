"""Calibration: the loader setting that was chosen, with its evidence; kept in the run directory, taken up again.

A result holds as long as machine, data and config are those it was measured on; `changed` names what is not. It is one
JSON file beside the run, and one for each experiment name below the folder of runs, where the next run finds it.

calibrate: find the cheapest fast loader settings now, by measurement, in a process of its own.

What `kit.fit` does before training where `calibration.enabled` is set, without the training. The setting that is found
is that of the loader alone; give `calibration.step_seconds` to find what is enough for a step of that length.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self, overload

from kit.config import Config
from kit.errors import ConfigError, Problem, TrialError, TrialStopped
from kit.json_text import read_json
from kit.studies.calibration.rules import LoaderSetting, Measurement
from kit.tables import html_list, html_table, text_table
from kit.trial.directory import runs_folder
from kit.trial.submit import prepare
from kit.trial.trial import Trial
from kit.units import format_count, format_seconds

FOLDER = ".calibrations"
"""Below the folder of runs."""
_COLUMNS = ("processes × prefetch factor", "batches/s", "±", "of peak", "batches", "turns", "first batch")
_OWN_COLUMNS = ("setting", *_COLUMNS[1:])


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Calibration:
    """What a sweep found; print it, draw it with `kit.calibration_figure`, or `apply` it."""

    chosen: LoaderSetting | None
    """None when nothing could be measured."""
    measured: tuple[Measurement, ...] = ()
    """In the order in which they were tried."""
    dropped: tuple[tuple[str, str], ...] = ()
    """Settings left out, and why."""
    reasons: tuple[str, ...] = ()
    limits: Mapping[str, float] = field(default_factory=dict)
    """What the caps on processes were made from: cores, bytes, and how busy loading keeps a core."""
    identity: Mapping[str, Any] = field(default_factory=dict)
    """Machine, data and config that it holds for."""
    seconds: float = 0.0
    """What the sweep took."""
    reloaded: bool = False
    """Whether it was taken up from an earlier run."""
    again: str = ""
    """Why an earlier result was not; empty where there was none."""
    error: str = ""

    @property
    def peak(self) -> float:
        """Batches per second of the fastest setting."""
        return max((item.batches_per_second for item in self.measured), default=0.0)

    @property
    def batches_per_second(self) -> float:
        """Of the chosen setting."""
        return next((item.batches_per_second for item in self.measured if item.setting == self.chosen), 0.0)

    def apply(self, config: Config) -> Config:
        """The config with the chosen setting.

        Raises:
            ConfigError: when there is none.
        """
        if self.chosen is None:
            raise ConfigError([Problem("calibration", f"no setting was chosen: {self.error}")])
        return config.replace(self.chosen.changes)

    # -- keeping it

    def to_dict(self) -> dict[str, Any]:
        """Everything, as JSON values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """What `to_dict` gave."""
        chosen = values["chosen"]
        measured = [_measurement(item) for item in values["measured"]]
        read = {
            "chosen": LoaderSetting(**chosen) if chosen else None,
            "measured": tuple(measured),
            "dropped": tuple((text, reason) for text, reason in values["dropped"]),
            "reasons": tuple(values["reasons"]),
        }
        return cls(**{**values, **read})

    def save(self, path: Path) -> Path:
        """Write it; the file is replaced in one move."""
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_suffix(".tmp")
        draft.write_text(json.dumps(self.to_dict(), indent=2), encoding="utf-8")
        return draft.replace(path)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """A saved result, such as `calibration.json` of a run directory.

        Raises:
            TrialError: when the file cannot be read or holds none.
        """
        try:
            return cls.from_dict(read_json(Path(path).read_bytes()))
        except Exception as error:  # whatever the file says
            raise TrialError(f"{path} holds no calibration: {error}; calibrate again with kit.calibrate") from error

    # -- showing it

    @property
    def _columns(self) -> tuple[str, ...]:
        return _OWN_COLUMNS if any(item.setting.own for item in self.measured) else _COLUMNS

    @property
    def rows(self) -> list[list[str]]:
        return [self._row(item) for item in self.measured]

    def _row(self, item: Measurement) -> list[str]:
        return [
            str(item.setting), format_count(item.batches_per_second), f"{item.error:.0%}" if item.error < 1 else "?",
            f"{item.batches_per_second / self.peak:.0%}", str(item.batches), str(item.turns or ""),
            format_seconds(item.first_batch_seconds),
        ]  # fmt: skip

    @property
    def headline(self) -> str:
        if self.chosen is None:
            return f"loader not calibrated: {self.error}"
        speed = f"{format_count(self.batches_per_second)} batches/s"
        how = "taken up again" if self.reloaded else f"measured in {format_seconds(self.seconds)}"
        again = f"; again, since {self.again}" if self.again and not self.reloaded else ""
        return f"loader calibrated: {self.chosen}, {speed} ({how}{again})"

    @property
    def sentences(self) -> list[str]:
        return [*self.reasons, *(f"left out {text}: {reason}" for text, reason in self.dropped)]

    @property
    def _marked(self) -> int | None:
        settings = [item.setting for item in self.measured]
        return settings.index(self.chosen) if self.chosen in settings else None

    def __repr__(self) -> str:
        table = [text_table(self._columns, self.rows, self._marked)] if self.measured else []
        return "\n".join([self.headline, *table, *(f"- {text}" for text in self.sentences)])

    __str__ = __repr__

    def _repr_html_(self) -> str:
        table = html_table(self._columns, self.rows, caption=self.headline, marked=self._marked)
        return table + html_list(self.sentences)


def _measurement(values: Mapping[str, Any]) -> Measurement:
    read = {"setting": LoaderSetting(**values["setting"]), "paces": tuple(values.get("paces", ()))}
    return Measurement(**{**values, **read})


def saved_path(config: Config) -> Path:
    """Where the last result of an experiment is kept for its next run."""
    return runs_folder(config.trial.folder) / FOLDER / f"{config.name}.json"


def changed(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What is no longer as it was, each as a sentence; empty when a result still holds."""
    old, new = dict(_flat(before)), dict(_flat(now))
    names = [name for name in {**old, **new} if old.get(name) != new.get(name)]
    return [f"{name} was {_short(old.get(name))}, now {_short(new.get(name))}" for name in names]


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _short(value: Any) -> str:
    text = "not there" if value is None else str(value)
    return text if len(text) <= 60 else text[:57] + "..."


@overload
def calibrate(config: Config, /, *, on_start: Callable[[Trial], object] | None = None) -> Calibration: ...
@overload
def calibrate(
    module: Any, data: Any, config: Config, *, on_start: Callable[[Trial], object] | None = None
) -> Calibration: ...
def calibrate(
    module: Any, data: Any = None, config: Config | None = None, *, on_start: Callable[[Trial], object] | None = None
) -> Calibration:
    """Measure loader settings, and return when there is an answer; it is kept for the next fit of this experiment.

    Args:
        module: What `kit.fit` takes as module; nothing is trained.
        data: What `kit.fit` takes as data.
        config: What would run. `calibrate(config)` alone takes module and data from it.
        on_start: Called with the running job, whose `events` tell what has been measured and which can be stopped.

    Raises:
        ConfigError: for what `kit.fit` refuses, and a loader whose settings cannot be changed.
        TrialError: when no setting could be measured.
        TrialStopped: after an interrupt, or when the job was stopped.
    """
    if config is None and isinstance(module, Config):
        module, config = None, module
    if not isinstance(config, Config):
        raise ConfigError([Problem("", f"calibrate takes a Config, got {type(config).__name__}")])
    folder = runs_folder(config.trial.folder) / FOLDER
    short = config.replace({"trial.folder": str(folder), "trial.predict_memory": False})
    trial = Trial(prepare(module, data, short, job="calibrate", confined="the calibration"), short)
    trial.submit()
    if on_start is not None:
        on_start(trial)
    trial.wait()
    if trial.state == "STOPPED":
        raise TrialStopped(f"stopped; what was measured is in {trial.run_directory}")
    found = Calibration.load(trial.paths.calibration)
    found.save(saved_path(config))
    return found
