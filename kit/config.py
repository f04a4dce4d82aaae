"""Config: the one frozen object that says what to run; YAML 1.2 both ways, a fingerprint, and the schema of every form.

Each field is declared once, with type, default, unit, bounds and a sentence. Form labels, tooltips, YAML comments and
error texts are all drawn from that declaration (`Config.fields()`), so they cannot disagree. Nothing here looks at the
machine: `auto` stays `auto` until a plan or a trial resolves it and says why. Secrets are never fields; `credentials`
names where one is found.

Relative paths in a config start at the project folder (see `project_folder`), wherever the notebook sits.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import hashlib
import itertools
import json
import math
import os
import re
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError, PydanticUndefined
from typing_extensions import override

from kit.errors import ConfigError, Problem, did_you_mean
from kit.json_text import write_whole
from kit.other_configs import COMMAND, SECTIONS, Translation, changes_of
from kit.registry import Drawable, load
from kit.sections import (
    LARGEST_WHOLE,
    REPLACE,
    Build,
    Cache,
    Calibration,
    Checkpoint,
    Chunking,
    Commit,
    Data,
    Hardware,
    Levers,
    Loader,
    Model,
    Profiler,
    Queries,
    Section,
    Training,
    Trial,
    setting,
)
from kit.units import format_bytes
from kit.yaml_text import committed_text, read_yaml, write_yaml

_MOST_NAMES = 2_000
_MOST_PROBLEMS = 20


@dataclass(frozen=True, slots=True)
class FieldInfo:
    """One field as a form, a YAML comment or an error needs it."""

    path: str
    default: Any
    description: str
    unit: str
    choices: tuple[str, ...]
    """Words to offer: all that are accepted for kind `choice`, some of them otherwise."""
    bounds: dict[str, float]
    """Any of `ge`, `gt`, `le`, `lt`."""
    kind: Literal[
        "bool", "int", "float", "choice", "text", "sizes", "arguments", "names", "counts", "devices", "layout"
    ]

    @property
    def section(self) -> str:
        return self.path.partition(".")[0]

    @property
    def name(self) -> str:
        return self.path.rpartition(".")[2]

    @property
    def help(self) -> str:
        """The sentence with unit and bounds, as tooltips and comments show it."""
        words = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
        notes = [self.unit] if self.unit else []
        notes += [f"{words[key]} {_show(bound, self.unit)}" for key, bound in self.bounds.items()]
        notes += ["one of " + ", ".join(self.choices)] if self.choices and self.kind == "choice" else []
        return self.description + (f" [{'; '.join(notes)}]" if notes else "")


class Config(Drawable, Section):
    """Everything that one run depends on. A config is frozen: `replace` makes a changed copy, `diff` names the changes.

    Sections and fields are those of the YAML file. `Config.load(path)` reads one, `config.save(path)` writes one, and
    `config.fingerprint` names its content.

    Example:
        >>> changed = kit.Config().replace({"loader.batch_size": 32, "hardware.precision": "bf16-mixed"})
        >>> changed.loader.batch_size
        32
        >>> sorted(kit.Config().diff(changed))
        ['hardware.precision', 'loader.batch_size']
    """

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,63}$")] = setting(
        "experiment", "Name of this experiment: lower-case letters, digits, dot, dash, underscore."
    )
    hardware: Hardware = setting(Hardware, "Devices, strategy and precision.")
    training: Training = setting(Training, "Seed, length and clipping.")
    loader: Loader = setting(Loader, "Batches and how they are read ahead.")
    calibration: Calibration = setting(Calibration, "Loader settings found by measurement.")
    levers: Levers = setting(Levers, "Switches that trade time for memory.")
    data: Data = setting(Data, "The store and what one sample is.")
    chunking: Chunking = setting(Chunking, "Chunks and shards of the store.")
    build: Build = setting(Build, "How the store is written.")
    cache: Cache = setting(Cache, "What is kept of a remote store.")
    model: Model = setting(Model, "What is trained.")
    trial: Trial = setting(Trial, "How a short run is started, bounded and kept.")
    commit: Commit = setting(Commit, "How a committed run is laid out.")
    checkpoint: Checkpoint = setting(Checkpoint, "Where the checkpoints of a committed run are copied to.")
    queries: Queries = setting(Queries, "How event tables are asked for.")
    profiler: Profiler = setting(Profiler, "How a trial is looked at from close by.")

    holds_sections = True

    # -- making one

    def __init__(self, /, *given: Any, **values: Any) -> None:
        """Take sections by name.

        Raises:
            ConfigError: naming every unknown key, wrong type and broken bound by its dotted path.
        """
        if given:
            raise _refusal(given[0], "a Config takes its sections by name")
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise ConfigError(_problems(error, values)) from None

    @classmethod
    def make(cls, values: Mapping[str, Any], where: str = "") -> Config:
        """A validated Config from nested plain values.

        Raises:
            ConfigError: naming every unknown key, wrong type and broken bound by its dotted path.
        """
        given: Any = values  # by a user, who may give anything
        if not isinstance(given, Mapping):
            raise _refusal(given, "sections are a mapping", where)
        if wrong := [Problem(_brief(key), "a key is text") for key in given if not isinstance(key, str)]:
            raise ConfigError(wrong, where)
        try:
            return cls(**values)
        except ConfigError as error:
            raise ConfigError(error.problems, where) from None

    @classmethod
    def from_yaml(cls, text: str, where: str = "") -> Config:
        """The Config a YAML 1.2 text describes; missing fields take their defaults.

        A file that `kit.commit` wrote gives the Config it was committed from.

        Raises:
            ConfigError: with line and column for broken YAML and duplicate keys, with the dotted path otherwise.
        """
        values = read_yaml(text, where)
        if "trainer" not in values:
            return cls.make(values, where)
        return cls.make(read_yaml(committed_text(values, where), where), where)

    @classmethod
    def load(cls, path: str | Path) -> Config:
        """The Config in a YAML file; a relative path is looked up from the working directory, then the project folder.

        Raises:
            ConfigError: when the file cannot be read or does not describe a Config.
        """
        return cls.from_yaml(_read_text(path), where=str(path))

    @classmethod
    def translate(cls, source: str | Path | Mapping[str, Any]) -> Translation:
        """The config of another tool as a Config, with a table that says where each of its settings went.

        Args:
            source: A BaseModel YAML, as its path or its values; or a command line of AI-OS that begins with `aios`.

        Returns:
            The Config, and a row for each setting; those without a field of kit say what takes their place.

        Raises:
            ConfigError: when it is neither, cannot be read, or holds a value that no field takes.

        Example:
            >>> found = kit.Config.translate("aios hrm-hf train-actv1 --model gpt2 --batch-size 1 --no-amp")
            >>> found.config.loader.batch_size, found.config.hardware.precision
            (1, '32-true')
        """
        if not isinstance(source, Mapping) and str(source).split()[:1] != [COMMAND]:
            source = read_yaml(_read_text(source), str(source))
        tool, changes, settings = changes_of(source if isinstance(source, Mapping) else str(source))
        steps = changes.get("trial.max_steps")
        if isinstance(steps, int) and 0 < steps <= cls().trial.warmup_steps:
            changes["trial.warmup_steps"] = steps - 1  # of so few, the last is measured
        return Translation(tool, cls().replace(changes), settings)

    @classmethod
    def profile(cls, name: str) -> Config:
        """A starting config by name: `conservative memory` or `long context`.

        Raises:
            ConfigError: for another name.
        """
        if name not in PROFILES:
            raise ConfigError([Problem("profile", f"there is none called {name!r}{did_you_mean(name, PROFILES)}")])
        return cls().replace(PROFILES[name])

    # -- writing one

    def values(self) -> dict[str, Any]:
        """Nested plain values: what YAML and JSON hold."""
        return typing.cast(dict[str, Any], thaw(self.model_dump()))

    def to_yaml(self, comments: bool = True) -> str:
        """YAML 1.2 that reads back as an equal Config; comments say what each field means."""
        return write_yaml(self.values(), {info.path: info.help for info in self.fields()} if comments else {})

    def save(self, path: str | Path) -> Path:
        """Write `to_yaml()`; the file is replaced in one move, never left half-written.

        Raises:
            ConfigError: where it cannot be written.
        """
        file = Path(path)
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            return write_whole(file, self.to_yaml())
        except OSError as error:
            message = f"cannot write {file}: {error.strerror or error}; give a place where you may write"
            raise ConfigError([Problem("path", message)]) from error

    # -- comparing and changing

    def get(self, path: str) -> Any:
        """The value at a dotted path, such as `loader.batch_size`.

        The path may go on into a mapping, as `model.arguments.width`; a key that it does not have is None.

        Raises:
            ConfigError: where there is no such field, with those that may have been meant.
        """
        value: Any = self
        for part in str(path).split("."):
            if isinstance(value, Mapping):
                value = value.get(part)
            elif isinstance(value, BaseModel) and part in type(value).model_fields:
                value = getattr(value, part)
            else:
                raise ConfigError([Problem(str(path), "no such field" + _did_you_mean(str(path), self.model.target))])
        return value

    def replace(self, changes: Mapping[str, Any] | None = None, **sections: Any) -> Config:
        """A copy with `{"section.field": value}` changed, validated as a whole.

        Args:
            changes: Values by dotted path; a path may go on into a mapping, as `model.arguments.learning_rate`.
            sections: The name, or whole sections.

        Raises:
            ConfigError: for an unknown path or a value that breaks a bound; this Config stays as it is.
        """
        given: Any = changes  # by a user, who may give anything
        if not isinstance(given, Mapping | None):
            raise _refusal(given, "changes are a mapping")
        values, unknown = self.values(), list[Problem]()
        for path, value in {**(given or {}), **sections}.items():
            try:
                self.get(path)
            except ConfigError as error:
                unknown += error.problems
                continue
            *parents, last = str(path).split(".")
            target = values
            for part in parents:
                target = target.setdefault(part, {})
            target[last] = value.values() if isinstance(value, Config) else thaw(value)
        if unknown:
            raise ConfigError(unknown)
        return Config.make(values)

    def diff(self, other: Config) -> dict[str, tuple[Any, Any]]:
        """`{path: (mine, theirs)}` for every field that differs."""
        theirs: Any = other  # by a user, who may give anything
        if not isinstance(theirs, Config):
            raise _refusal(theirs, "a Config is compared with a Config")
        pairs = ((info.path, self.get(info.path), theirs.get(info.path)) for info in self.fields())
        return {path: (mine, theirs) for path, mine, theirs in pairs if mine != theirs}

    @functools.cached_property
    def fingerprint(self) -> str:
        """Twelve hex digits of the content: equal configs share it, in any key order, on any machine."""
        canonical = json.dumps(self.values(), sort_keys=True, separators=(",", ":"), allow_nan=False)
        return hashlib.sha256(canonical.encode()).hexdigest()[:12]

    def as_code(self, against: Config | None = None) -> str:
        """The expression that makes this Config from `against` (by default, from nothing)."""
        changes = (against or Config()).diff(self)
        base = "config" if against is not None else "kit.Config()"
        values = {path: thaw(theirs) for path, (_, theirs) in changes.items()}
        return f"{base}.replace({_literal(values)})" if changes else base

    @classmethod
    def fields(cls) -> tuple[FieldInfo, ...]:
        """Every field, in file order: the one schema that forms, comments and errors are drawn from."""
        return _schema()

    @model_validator(mode="after")
    def _agree(self) -> Self:
        for path, message in _disagreements(self):
            raise PydanticCustomError("disagreement", "{message}", {"message": message, "path": path})
        return self

    def __str__(self) -> str:
        return self.to_yaml(comments=False)

    def __repr__(self) -> str:
        changed = Config().diff(self)
        lines = [f"  {path}: {thaw(theirs)!r}" for path, (_, theirs) in changed.items()]
        head = f"Config {self.name} ({self.fingerprint}), {len(changed)} settings off their default"
        return "\n".join([head, *lines])

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    @override
    def _meant(self, name: str) -> str:
        return _did_you_mean(name)


PROFILES: dict[str, dict[str, Any]] = {
    "conservative memory": {
        "name": "conservative-memory",
        "loader.batch_size": 1,
        "levers.accumulate_grad_batches": 8,
        "levers.gradient_checkpointing": True,
        "levers.optimizer": "adamw-8bit",
        "trial.max_steps": 50,
    },
    "long context": {
        "name": "long-context",
        "loader.batch_size": 1,
        "levers.gradient_checkpointing": True,
        "levers.optimizer": "adamw-8bit",
        "model.target": "kit.models:GPT",
        "model.arguments": {"context": 16384, "window": 2048},
    },
}
"""Starting configs, as the settings they change; precision stays auto, which is mixed on every GPU."""


def project_folder(start: Path | None = None) -> Path:
    """The folder that relative paths in a config start from.

    The nearest folder, from the working directory upwards, that holds a `pyproject.toml` or a `.git`; else the working
    directory itself. So a notebook in `notebooks/` and a script beside it mean the same `data/ocean.zarr`.
    """
    here = (start or Path.cwd()).resolve()
    return next((folder for folder in (here, *here.parents) if _is_project(folder)), here)


def _is_project(folder: Path) -> bool:
    return any((folder / mark).exists() for mark in ("pyproject.toml", ".git"))


def project_path(path: Path) -> str:
    """As a path is called from the project folder; one elsewhere as it is."""
    root = project_folder()
    return path.relative_to(root).as_posix() if path.is_relative_to(root) else str(path)


def resolve_path(path: str | Path) -> Path:
    """An absolute path: as given, else below the working directory, else below the project folder.

    Raises:
        ConfigError: for text that is no path.
    """
    try:
        given = Path(path).expanduser()
        if max((len(os.fsencode(part)) for part in given.parts), default=0) > 255 or len(os.fsencode(given)) > 4095:
            raise ValueError(f"{len(str(path)):,} characters; a path has at most 4,095 bytes, a name in it 255")
        return given.absolute() if given.is_absolute() or given.exists() else project_folder() / given
    except (OSError, RuntimeError, ValueError, TypeError) as error:
        raise ConfigError(f"{str(path)[:60]!r} is no path: {error!s:.200}") from None


def near(missing: Path) -> str:
    """What else is there in place of a file or folder that is not, as the end of an error; empty for nothing."""
    above = missing.parent
    if not above.is_dir() and above != missing:
        return f"; there is no folder {above}{near(above)}" if above.parent.is_dir() else near(above)
    try:
        names = [item.name for item in itertools.islice(above.iterdir(), _MOST_NAMES)]
    except OSError:  # a folder that may not be listed
        return ""
    return did_you_mean(missing.name, names, otherwise="", cutoff=0.5)


def _disagreements(config: Config) -> Iterator[tuple[str, str]]:
    """Fields that are each fine and do not fit together."""
    yield from _device_disagreements(config.hardware)
    for dimension in config.data.stride:
        if dimension not in config.data.patch:
            known = ", ".join(config.data.patch) or "empty"
            yield "data.stride", f"dimension {dimension!r} is not in data.patch ({known})"
    for factor in config.calibration.candidate_prefetch:
        if not 1 <= factor <= 64:
            yield "calibration.candidate_prefetch", f"{factor} is none; a loader process keeps 1 to 64 batches ready"
    for path in ("training.early_stopping_patience", "trial.keep_best"):
        if config.get(path) and not config.training.monitor:
            yield path, "goes by training.monitor, which is empty; name a metric there, such as val_loss"
    if config.trial.warmup_steps >= config.trial.max_steps:
        yield (
            "trial.warmup_steps",
            f"{config.trial.warmup_steps} warm-up steps leave nothing to measure in {config.trial.max_steps} steps; "
            f"make it {config.trial.max_steps - 1} at most, or trial.max_steps more",
        )


def _device_disagreements(hardware: Hardware) -> Iterator[tuple[str, str]]:
    devices = hardware.devices
    count = len(devices) if isinstance(devices, tuple) else None if devices in ("auto", -1) else int(devices)
    if devices == 0:
        yield "hardware.devices", "0 devices cannot train; use auto, a number from 1, a list, or -1 for all"
    if isinstance(devices, tuple) and len(set(devices)) < len(devices):
        yield "hardware.devices", f"{_brief(list(devices))} names a device twice"
    if isinstance(devices, tuple) and hardware.accelerator == "cpu":
        yield "hardware.devices", f"{_brief(list(devices))} names GPUs, but accelerator is cpu; give a number of ranks"
    if hardware.strategy == "none" and count is not None and count > 1:
        yield "hardware.strategy", f"none uses one device, but devices asks for {count}; use ddp or fsdp"
    if hardware.strategy in ("ddp", "fsdp") and count is None and devices != -1:
        yield (
            "hardware.strategy",
            f"{hardware.strategy} needs at least 2 devices, but devices is auto (one device); set hardware.devices in "
            "the same call",
        )
    if hardware.strategy in ("ddp", "fsdp") and count == 1:
        yield (
            "hardware.strategy",
            f"{hardware.strategy} needs at least 2 devices, but devices asks for 1; raise it, or use none",
        )
    if hardware.shards:
        replicas, size = hardware.shards
        product = f"{replicas} replicas × {size} devices each = {replicas * size}"
        if count is not None and replicas * size != count:
            yield "hardware.strategy", f"{hardware.strategy} needs {product} devices, but devices asks for {count}"
        if count is None and devices != -1:
            yield "hardware.strategy", f"{hardware.strategy} needs {product} devices, but devices is auto (one device)"


# -- schema


@functools.cache
def _schema() -> tuple[FieldInfo, ...]:
    return tuple(_fields(Config, ""))


def _fields(model: type[BaseModel], prefix: str) -> Iterator[FieldInfo]:
    for name, field in model.model_fields.items():
        annotation = field.annotation
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            yield from _fields(annotation, f"{prefix}{name}.")
            continue
        default = field.get_default(call_default_factory=True)
        assert default is not PydanticUndefined, f"{prefix}{name} has no default"
        extra = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
        keys = ("ge", "gt", "le", "lt")
        yield FieldInfo(
            path=prefix + name,
            default=getattr(model(), name),
            description=field.description or "",
            unit=str(extra.get("unit", "")),
            choices=_choices(annotation) or tuple(typing.cast(list[str], extra.get("suggestions", []))),
            bounds={key: getattr(item, key) for item in field.metadata for key in keys if hasattr(item, key)},
            kind=_kind(name, annotation),
        )


def _kind(name: str, annotation: Any) -> Any:
    if name in ("devices",):
        return "devices"
    if name in ("chunk", "shard"):
        return "layout"
    if typing.get_origin(annotation) is Literal:
        return "choice"
    parts = set(typing.get_args(annotation)) - {type(None)} if isinstance(annotation, types.UnionType) else {annotation}
    for kind, python in (("bool", bool), ("int", int), ("float", float), ("text", str)):
        if python in parts:
            return kind
    if typing.get_origin(annotation) is tuple:
        return "names" if typing.get_args(annotation)[0] is str else "counts"
    return "arguments" if name in ("arguments", "readers", "match") else "sizes"


def _choices(annotation: Any) -> tuple[str, ...]:
    if typing.get_origin(annotation) is Literal:
        return tuple(typing.get_args(annotation))
    if isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union:
        return tuple(choice for part in typing.get_args(annotation) for choice in _choices(part))
    return ()


def _show(value: float, unit: str) -> str:
    return format_bytes(value) if unit == "bytes" else f"{value:g}" if isinstance(value, float) else str(value)


def _literal(value: Any) -> str:
    """Python source of a plain value, with double quotes throughout."""
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_literal(key)}: {_literal(item)}" for key, item in value.items()) + "}"
    return "[" + ", ".join(map(_literal, value)) + "]" if isinstance(value, list) else repr(value)


def thaw(value: Any) -> Any:
    """The same as dicts and lists, as JSON has them."""
    if isinstance(value, Mapping):
        return {key: thaw(item) for key, item in value.items()}
    return [thaw(item) for item in value] if isinstance(value, list | tuple) else value


# -- errors

_LOAD = "kit.Config.load('recipe.yaml') reads a file, kit.Config.make(values) takes nested values"


def _refusal(given: object, takes: str, where: str = "") -> ConfigError:
    """That something else was given, of which only the kind is told: it may hold a password."""
    return ConfigError(f"{takes}, got {type(given).__name__}; {REPLACE}, {_LOAD}", where)


def _problems(error: ValidationError, values: Mapping[str, Any]) -> list[Problem]:
    model = values.get("model")
    named = model.get("target") if isinstance(model, Mapping) else None
    target = named if isinstance(named, str) else ""
    found: dict[str, Problem] = {}
    for detail in error.errors(include_url=False):
        inside = str(detail.get("ctx", {}).get("path", ""))  # of where pydantic found it
        path = ".".join(filter(None, [*map(str, detail["loc"]), inside]))
        info = next((info for info in Config.fields() if path == info.path or path.startswith(info.path + ".")), None)
        if info and info.kind in ("devices", "layout"):
            # pydantic reports every branch of a union; one sentence about the field says more
            path = info.path
        found.setdefault(path, Problem(path, _message(path, info, dict(detail), target)))
        if len(found) > _MOST_PROBLEMS:
            return [*list(found.values())[:_MOST_PROBLEMS], Problem("", f"and more, {error.error_count():,} in all")]
    return list(found.values())


def _message(path: str, info: FieldInfo | None, detail: Mapping[str, Any], target: str) -> str:
    kind, value = detail["type"], detail.get("input")
    if kind == "extra_forbidden":
        if path in SECTIONS:
            return f"a BaseModel YAML has {path}; kit.Config.translate reads one"
        found = [] if "." in path else paths_of(path)
        way_out = f" kit.Config().replace({{{found[0]!r}: ...}}) sets it" if found else ""
        return f"unknown key{_did_you_mean(path, target)}{way_out}"
    if kind in ("disagreement", "secret"):
        return str(detail["ctx"]["message"])
    if path.endswith("credentials"):  # someone may have written the key itself
        return f"this value is not accepted. {info.help if info else ''}"
    shown = _brief(value)
    text = detail["msg"].removeprefix("Value error, ").removeprefix("Input ")
    if info is None:
        return f"{text}, got {shown}" + (" (this section takes a mapping of fields)" if kind == "model_type" else "")
    if isinstance(value, str) and (path, value) in _REFUSED:
        return f"{value} is refused: {_REFUSED[path, value]}"
    if isinstance(value, type):
        text = "is text, and a class is given beside the config: kit.fit(config, MyModule, MyData)"
    if info.kind in ("sizes", "layout") and path == info.path and not isinstance(value, Mapping | str):
        text = "names each dimension, as in {'time': 1, 'lat': 64, 'lon': 64}"
    elif info.kind in ("choice", "devices", "layout") or kind == "string_pattern_mismatch":
        given = "" if isinstance(value, bool) else shown if not isinstance(value, str) else value.strip()
        meant = _meant_by(path, given)
        spelled = {choice.lower(): choice for choice in info.choices}
        close = [spelled[one] for one in difflib.get_close_matches(given.lower(), spelled, n=1)]
        close = [one for one in ([meant] if meant else close) if repr(one) != repr(value)]
        meaning = "" if close and path != "name" else f" {info.help}"
        return f"{shown} is not accepted" + (f"; did you mean {close[0]!r}?" if close else ".") + meaning
    return f"{text}, got {shown}. {info.help}"


def _meant_by(path: str, given: str) -> Any:
    """What others call by that value; None where nobody does."""
    if path == "hardware.devices":
        count = re.fullmatch(r"(-?\d+)(\.0*)?", given)
        if count or given.lower() == "all":
            return int(count[1]) if count else -1
        return [*map(int, re.findall(r"\d+", given))] if re.match(r"[\[(]|cuda|gpu|\d+ *,", given.lower()) else None
    if path == "name":
        return re.sub(r"[^a-z0-9._-]+", "-", given.lower()).strip("-._")[:64] or None
    return _MEANT.get((path, given.lower()))


def _brief(value: Any) -> str:
    """What a value looks like, in a few words however large it is."""
    if isinstance(value, int) and abs(value) > LARGEST_WHOLE:
        return f"a number of about {round(value.bit_length() * math.log10(2)):,} digits"
    try:
        text = repr(value)
    except ValueError:  # a list of such numbers
        return f"a {type(value).__name__} of numbers too long to show"
    return text if len(text) <= 80 else text[:77] + "..."


_REFUSED = {
    ("hardware.accelerator", "mps"): "kit knows the CPU and GPUs of NVIDIA; use cpu on a Mac",
    ("hardware.accelerator", "tpu"): "kit knows the CPU and GPUs of NVIDIA",
    ("hardware.precision", "16-true"): "weights and gradients of 16 bits without a scaler underflow, and on a CPU are "
    "computed many times slower besides, and end in nan; use 16-mixed on a GPU, bf16-mixed or bf16-true anywhere",
}
"""Values that others know and kit does not take, and why."""
_MEANT = {
    (path, name): meant
    for path, meant, names in (
        ("hardware.precision", "32-true", ("32", "fp32", "float32", "full", "32-full")),
        ("hardware.precision", "bf16-mixed", ("bf16", "bfloat16", "mixed")),
        ("hardware.precision", "16-mixed", ("16", "fp16", "float16", "half", "amp")),
        ("hardware.accelerator", "gpu", ("cuda", "cuda:0", "nvidia")),
        ("hardware.strategy", "none", ("auto", "single_device", "")),
        ("hardware.strategy", "ddp", ("dp", "ddp_spawn", "ddp_notebook", "ddp_fork")),
        ("hardware.strategy", "fsdp", ("deepspeed", "deepspeed_stage_2", "deepspeed_stage_3", "model_parallel")),
    )
    for name in names
}
"""What others call a value."""
_OF_MODULES = ("lr", "learning_rate", "weight_decay", "betas", "momentum", "hidden_dim", "hidden_size", "dropout")
"""What most modules are made with, and no field is called."""
_ELSEWHERE = {
    name: paths
    for paths, names in {
        ("hardware.accelerator", "hardware.devices"): ("device", "cuda", "no_cuda"),
        ("hardware.devices",): ("gpus", "num_gpus", "n_gpus", "ngpus", "world_size", "num_processes"),
        ("hardware.precision",): ("fp16", "bf16", "amp", "dtype", "mixed_precision"),
        ("levers.accumulate_grad_batches",): ("gradient_accumulation_steps", "accumulation", "accumulate"),
        ("loader.batch_size",): ("per_device_train_batch_size", "train_batch_size", "bs"),
        ("loader.num_workers",): ("workers", "dataloader_num_workers"),
        ("training.gradient_clip_norm",): ("gradient_clip_val", "max_grad_norm", "clip_grad_norm"),
        ("training.max_epochs",): ("epochs", "num_train_epochs", "num_epochs", "n_epochs"),
        ("trial.max_steps", "training.max_steps"): ("steps", "num_steps", "train_steps"),
        ("trial.folder", "commit.output"): ("output_dir", "default_root_dir", "save_dir"),
        ("data.url",): ("path", "dataset", "store", "zarr"),
        ("model.arguments",): _OF_MODULES,
    }.items()
    for name in names
}
"""What Lightning, transformers and others call a field."""


def paths_of(name: str) -> list[str]:
    """Fields under the last part of their path, or under what other libraries call them, or spelled nearly so."""
    paths = [info.path for info in Config.fields()]
    leaf = {known: known.rpartition(".")[2] for known in paths}
    found = [known for known in paths if leaf[known] == name] or list(_ELSEWHERE.get(name.lower(), ()))
    near = [] if found else difflib.get_close_matches(name, leaf.values(), n=1, cutoff=0.7)
    return found or [known for known in paths if [leaf[known]] == near]


def _did_you_mean(path: str, target: str = "") -> str:
    """The end of an error about a path that no field has.

    Args:
        path: What was given.
        target: Of the model, whose arguments may have been meant; empty for the default's.
    """
    section, _, name = path.rpartition(".")
    if section == "model" or name in _OF_MODULES:
        return _among_arguments(name, target or Model().target)
    paths, start = [*(info.path for info in Config.fields()), *Config.model_fields], f"{section}." * bool(section)
    close = [known for known in paths_of(name) if known.startswith(start)]
    close = close or difflib.get_close_matches(path, [one for one in paths if one.startswith(start)], n=1, cutoff=0.75)
    close = close or paths_of(name) or difflib.get_close_matches(path, paths, n=1, cutoff=0.75)
    return f"; did you mean {' or '.join(close)}?" if close else f"; the sections are {', '.join(Config.model_fields)}"


def _among_arguments(name: str, target: str) -> str:
    """Where a setting of the module goes, and what the module takes."""
    known: list[str] = []
    with contextlib.suppress(ConfigError):
        known = list(load("target.signature")(target) or ())
    near = difflib.get_close_matches(name, known, n=1) or (["learning_rate"] if name == "lr" else [])
    takes = f"; {target} takes {', '.join(known)}" if known else ""
    path = f"model.arguments.{(near or [name])[0]}"
    return f"; what the module is made with stands in model.arguments: replace({{{path!r}: ...}}){takes}"


def _read_text(path: str | Path) -> str:
    file = resolve_path(path)
    try:
        return file.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        why = ""
        if not Path(path).is_absolute() and not _is_project(project_folder()):
            why = "; the project folder is the nearest one upwards with a pyproject.toml, and there is none: make one"
        raise ConfigError(f"cannot read {path}: there is no file {file}{near(file)}{why}") from None
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
