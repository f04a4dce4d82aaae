"""calibrate: find the cheapest loader setting that is fast enough, by measurement, in a process of its own.

`kit.fit` does the same before training where `calibration.enabled` is set. The loader is measured beside a simulated
training step, as long as some steps of the module itself took, or as `calibration.step_seconds` says; a setting is
enough that keeps up with it. Where the one that there is does, the loader is not what holds the training, and stays.

A result holds for the machine, data and config it was measured on; `changed` names the differences. It is a JSON file
in the run directory, and another for each experiment name below the folder of runs, where the next run finds it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from kit.arguments import config_first
from kit.config import Config
from kit.errors import ConfigError, Problem, TrialError, TrialStopped
from kit.json_text import leaves, read_json, write_json
from kit.registry import Drawable
from kit.studies.calibration.rules import LoaderSetting, Measurement
from kit.tables import html_list, html_table, text_table
from kit.trial.directory import CALIBRATIONS, runs_folder
from kit.trial.submit import prepare
from kit.trial.trial import Trial
from kit.units import format_count, format_seconds

NOT_THE_LOADER = "the loader is not what holds this training"
_COLUMNS = ("processes × prefetch factor", "batches/s", "±", "of peak", "batches", "turns", "first batch")
_OWN_COLUMNS = ("setting", *_COLUMNS[1:])


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Calibration(Drawable):
    """What a sweep found; print it, draw it with `figure()`, or `apply` it."""

    chosen: LoaderSetting | None
    """None when nothing could be measured."""
    measured: tuple[Measurement, ...] = ()
    """In the order in which they were tried."""
    dropped: tuple[tuple[str, str], ...] = ()
    """Settings left out, and why."""
    reasons: tuple[str, ...] = ()
    limits: Mapping[str, float] = field(default_factory=dict)
    """The inputs of the caps on processes: cores, bytes, and how busy loading keeps a core."""
    identity: Mapping[str, Any] = field(default_factory=dict)
    """Machine, data and config that it holds for."""
    seconds: float = 0.0
    """What the sweep took."""
    reloaded: bool = False
    """Whether it is the result of an earlier run."""
    again: str = ""
    """Why the result of an earlier run was not used; empty where there was none."""
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
        chosen, measured = values["chosen"], []
        for item in values["measured"]:
            paces = tuple(item.get("paces", ()))
            measured.append(Measurement(**{**item, "setting": LoaderSetting(**item["setting"]), "paces": paces}))
        read = {
            "chosen": LoaderSetting(**chosen) if chosen else None, "measured": tuple(measured),
            "dropped": tuple((text, reason) for text, reason in values["dropped"]), "reasons": tuple(values["reasons"]),
        }  # fmt: skip
        return cls(**{**values, **read})

    def save(self, path: Path) -> Path:
        """Write it; the file is replaced in one move."""
        return write_json(path, self.to_dict(), indent=2)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """A saved result, such as `calibration.json` of a run directory.

        Raises:
            TrialError: when the file cannot be read or holds none.
        """
        try:
            return cls.from_dict(read_json(Path(path).read_bytes()))
        except Exception as error:  # whatever the file says
            raise TrialError(
                f"{path} holds no calibration: {error}; calibrate again with kit.studies.calibrate"
            ) from error

    # -- showing it

    @property
    def _columns(self) -> tuple[str, ...]:
        return _OWN_COLUMNS if any(item.setting.own for item in self.measured) else _COLUMNS

    @property
    def rows(self) -> list[list[str]]:
        return [
            [
                str(item.setting), format_count(item.batches_per_second),
                f"{item.error:.0%}" if item.error < 1 else "?", f"{item.batches_per_second / self.peak:.0%}",
                str(item.batches), str(item.turns or ""), format_seconds(item.first_batch_seconds),
            ]
            for item in self.measured
        ]  # fmt: skip

    @property
    def headline(self) -> str:
        if self.chosen is None:
            return f"loader not calibrated: {self.error}"
        speed = f"{format_count(self.batches_per_second)} batches/s"
        if self.reasons and self.reasons[0].startswith(NOT_THE_LOADER):
            return f"{NOT_THE_LOADER}: it stays at {self.chosen}, {speed} beside the training's steps"
        how = "from an earlier run" if self.reloaded else f"measured in {format_seconds(self.seconds)}"
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

    def _repr_html_(self) -> str:
        table = html_table(self._columns, self.rows, caption=self.headline, marked=self._marked)
        return table + html_list(self.sentences)


def saved_path(config: Config) -> Path:
    """Where the last result of an experiment is kept for its next run."""
    return runs_folder(config.trial.folder) / CALIBRATIONS / f"{config.name}.json"


def changed(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What is no longer as it was, each as a sentence; empty when a result still holds."""
    old, new = dict(leaves(before)), dict(leaves(now))

    def short(value: Any) -> str:
        text = "not there" if value is None else str(value)
        return text if len(text) <= 60 else text[:57] + "..."

    names = [name for name in {**old, **new} if old.get(name) != new.get(name)]
    return [f"{name} was {short(old.get(name))}, now {short(new.get(name))}" for name in names]


@config_first
def calibrate(
    config: Any = None, module: Any = None, data: Any = None, *, on_start: Callable[[Trial], object] | None = None
) -> Calibration:
    """Measure loader settings and wait for the answer.

    It is kept: the next trial of this experiment with `calibration.enabled` takes it without measuring again, and
    `apply(config)` sets it in any.

    Args:
        config: What would run; the default config when left out.
        module: As `kit.fit` takes it. Nothing is trained.
        data: What is loaded, as `kit.fit` takes it.
        on_start: Is called with the running job, whose `events` tell what has been measured.

    Returns:
        The cheapest setting that reaches 90 % of the fastest, with all measurements. `apply(config)` takes it over.

    Raises:
        ConfigError: for what `kit.fit` refuses, and a loader whose settings cannot be changed.
        TrialError: when no setting could be measured.
        TrialStopped: after an interrupt, or when the job was stopped.

    Example:
        >>> few = {"calibration.candidate_workers": [0], "calibration.max_measure_batches": 4}
        >>> kit.studies.calibrate(config.replace(few), MyModule, MyData).chosen.num_workers
        0
    """
    folder = runs_folder(config.trial.folder) / CALIBRATIONS
    short = config.replace({"trial.folder": str(folder), "trial.predict_memory": False})
    trial = Trial(prepare(module, data, short, job="calibrate", confined="the calibration", kind="calibration"), short)
    trial.submit()
    if on_start is not None:
        on_start(trial)
    trial.wait()
    if trial.state == "STOPPED":
        raise TrialStopped(f"stopped; what was measured is in {trial.run_directory}")
    found = Calibration.load(trial.paths.calibration)
    found.save(saved_path(config))
    return found
