"""Settings of other tools as settings of kit: a YAML of BaseModel, and a command line of AI-OS.

Each setting of theirs has one row in a table below: the field of kit that holds it, how its value is written there, and
a word where it means something else. A setting without a field says what takes its place. Nothing is guessed: a setting
that no table has is told as unknown. Where theirs is left out and their default is not kit's, theirs is taken. Names
and defaults are those of BaseModel's documentation 1.7 and of `aios hrm-hf train-actv1` 1.3.
"""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from kit.errors import ConfigError
from kit.json_text import leaves
from kit.tables import html_table, text_table

if TYPE_CHECKING:
    from kit.config import Config

_COLUMNS = ("theirs", "value", "kit", "value here", "note")


@dataclass(frozen=True, slots=True)
class Setting:
    """Where one setting of another tool went."""

    name: str
    value: Any
    path: str
    """Field of kit that holds it; empty for none."""
    here: Any
    """Its value there."""
    note: str

    @property
    def shown(self) -> str:
        """The value; of what kit does not take only numbers, because a connection may hold a password."""
        return str(self.value) if self.path or isinstance(self.value, int | float | None) else "…"


@dataclass(frozen=True, slots=True, repr=False)
class Translation:
    """A config of another tool as a Config, setting by setting; a notebook shows it as a table."""

    tool: str
    config: Config
    settings: tuple[Setting, ...]

    @property
    def left_out(self) -> tuple[Setting, ...]:
        """Those that no field of kit holds."""
        return tuple(setting for setting in self.settings if not setting.path)

    @property
    def _rows(self) -> list[list[str]]:
        return [
            [one.name, one.shown, one.path or "–", str(one.here) if one.path else "–", one.note]
            for one in self.settings
        ]

    @property
    def _headline(self) -> str:
        names, left_out = ({setting.name for setting in part} for part in (self.settings, self.left_out))
        return f"{len(names) - len(left_out)} of {len(names)} settings of {self.tool} as settings of kit"

    def __repr__(self) -> str:
        return f"{self._headline}\n{text_table(_COLUMNS, self._rows)}"

    def _repr_html_(self) -> str:
        return html_table(_COLUMNS, self._rows, caption=self._headline)


@dataclass(frozen=True, slots=True)
class _Rule:
    """Fields of kit for one setting, how its value is written there, and a word on it."""

    paths: tuple[str, ...] = ()
    convert: Callable[[Any], Any] = lambda value: value
    note: str = ""


def _to(*paths: str, note: str = "", convert: Callable[[Any], Any] = lambda value: value) -> _Rule:
    return _Rule(paths, convert, note)


def _none(note: str) -> _Rule:
    return _Rule(note=note)


def _is(value: Any) -> Callable[[Any], Any]:
    return lambda _: value


def _precision(value: Any) -> Any:
    known = {"32": "32-true", "fp32": "32-true", "bf16": "bf16-true", "fp16": "16-mixed"}
    return known.get(str(value), value)


_MODELS = "kit.models"
_GPT, _SKETCH = f"{_MODELS}:GPT", f"{_MODELS}:SketchModel"
_TRANSFORMER = f"{_MODELS}.named:Transformer"
"""Targets for a Config; nothing here imports them."""


_BASEMODEL_DEFAULTS = {"data_loader_params.batch_size": 256, "training_params.learning_rate": 1e-4}
_BASEMODEL = {
    "training_params.accelerator": _to("hardware.accelerator"),
    "training_params.devices": _to("hardware.devices"),
    "training_params.strategy": _to("hardware.strategy", convert=lambda value: value or "none"),
    "training_params.precision": _to("hardware.precision", convert=_precision),
    "training_params.epochs": _to("training.max_epochs"),
    "training_params.learning_rate": _to("model.arguments.learning_rate"),
    "training_params.check_val_every_n_steps": _to("trial.validate_every_steps", convert=lambda value: value or 0),
    "training_params.check_val_every_n_epochs": _none("kit.fit(..., trainer={'check_val_every_n_epoch': N})"),
    "training_params.limit_train_batches": _to("trial.max_steps", note="of a trial; training.max_steps is of a run"),
    "training_params.limit_val_batches": _to("trial.validation_batches"),
    "training_params.loss": _none("the module's own: a subclass of kit.models.SketchModel"),
    "training_params.checkpoint_dir": _to("commit.output"),
    "training_params.metric_to_monitor": _to("training.monitor"),
    "training_params.metric_monitoring_mode": _to("training.monitor_mode"),
    "training_params.gradient_clip_val": _to("training.gradient_clip_norm"),
    "training_params.checkpoint_every_n_steps": _to("commit.checkpoint_every_steps"),
    "training_params.early_stopping.patience": _to(
        "training.early_stopping_patience", note="by val_loss where no metric is named"
    ),
    "training_params.early_stopping": _none("training.early_stopping_patience counts validations"),
    "data_loader_params.batch_size": _to("loader.batch_size"),
    "data_loader_params.num_workers": _to("loader.num_workers", note="the engine has threads; processes rarely pay"),
    "data_loader_params.prefetch_factor": _to("loader.prefetch_factor"),
    "data_loader_params.pin_memory": _to("loader.pin_memory"),
    "data_loader_params.pin_memory_device": _none("each rank pins for its own device"),
    "data_loader_params.drop_last": _to("loader.drop_last"),
    **{
        f"calibration_params.{name}": _to(f"calibration.{name}")
        for name in ("enabled", "ram_safety_margin", "candidate_workers", "timeout_seconds", "max_measure_batches",
                     "cap_workers_by_ram")
    },
    "memory_constraining_params.hidden_dim": _to("model.arguments.hidden_dim"),
    "memory_constraining_params.num_layers": _to("model.arguments.num_layers"),
    "memory_constraining_params.emde_quality": _to("model.arguments.sketch_quality", "data.arguments.sketch_quality"),
    "query_optimization.cleora_num_query_chunks": _to("queries.fit_query_chunks"),
    "query_optimization.data_loading_num_query_chunks": _to("queries.load_query_chunks"),
    "query_optimization.num_query_chunks": _to("queries.fit_query_chunks", "queries.load_query_chunks"),
    "query_optimization.num_cpus": _to("queries.num_cpus"),
    "query_optimization.num_concurrent_features": _to("queries.num_concurrent_features"),
    "data_params.cache_path": _to("queries.cache_path"),
    "data_params": _none("kit.data.EventData takes the table, the entity and the time; see datasets/shop/recipe.yaml"),
    "data_sources": _none("declared in a file of their own, as datasets/shop/sources.yaml, that data.arguments names"),
}  # fmt: skip
_AIOS_DEFAULTS = {
    "--batch-size": 8, "--steps": 200, "--max-seq-len": 128, "--lr": 2e-4, "--gradient-checkpointing": True,
}  # fmt: skip
_AIOS = {
    "--model": _to("model.target", convert=lambda _: _GPT),
    "--dataset-file": _to("data.arguments.files", note="with data='kit.models:TextData'"),
    "--batch-size": _to("loader.batch_size"),
    "--steps": _to("training.max_steps", "trial.max_steps"),
    "--lr": _to("model.arguments.learning_rate"),
    "--gradient-accumulation-steps": _to("levers.accumulate_grad_batches"),
    "--gradient-checkpointing": _to("levers.gradient_checkpointing"),
    "--amp": _to("hardware.precision", convert=lambda on: "auto" if on else "32-true",
                 note="auto takes bf16 where the device has it"),
    "--use-8bit-optimizer": _to("levers.optimizer", convert=lambda on: "adamw-8bit" if on else "module"),
    "--model-dtype": _to("hardware.precision", convert=_precision,
                         note="fp16 keeps weights of 32 bits: smaller ones underflow"),
    "--use-flash-attn": _to("levers.attention", convert=lambda on: "flash" if on else "auto"),
    "--window-size": _to("model.arguments.window"),
    "--chunk-size": _to("levers.sequence_chunk"),
    "--use-chunked-training": _none("levers.sequence_chunk above 0 is chunked training"),
    "--ddp": _to("hardware.strategy", convert=_is("ddp")),
    "--zero-stage": _to("hardware.strategy", convert=lambda stage: {"zero3": "fsdp", "none": None}.get(stage, "ddp"),
                        note="fsdp shards what zero3 does; stages 1 and 2 have no equal here"),
    "--cuda-ids": _to("hardware.devices", convert=lambda value: [int(index) for index in str(value).split(",")]),
    "--world-size": _to("hardware.devices", convert=int),
    "--eval-batches": _to("trial.validation_batches"),
    "--optimize": _none("kit.studies.find_batch_size(config)"),
    "--stop-file": _none("trial.stop(), or Stop in the panel"),
    "--resume": _none("a committed run goes on from its newest checkpoint by itself"),
    "--log-file": _none("every trial writes its events to a run directory in trial.folder"),
    "--cpu-offload": _none("not there; fsdp shards over devices, gradient checkpointing and sequence chunks save most"),
    "--dataset-chunk-size": _none("not needed: data is streamed within loader.memory_bytes"),
    "--strict": _none("always so: kit never falls back to another device"),
    "--parallel-independent": _none("not there: ranks of a trial train one model"),
    "--sys-mem-cap-pct": _none("loader.memory_bytes and queries.memory_bytes are budgets that are never exceeded"),
    "--load-in-8bit": _none("not there; kit.models.named:Transformer takes a method of peft"),
    "--load-in-4bit": _none("not there; kit.models.named:Transformer takes a method of peft"),
}  # fmt: skip
_DECIDING = ("--zero-stage", "--cuda-ids")
"""Settings that say more than another one of the same field."""
SECTIONS = frozenset(name.partition(".")[0] for name in _BASEMODEL)
"""Top-level keys of a BaseModel YAML."""
COMMAND = "aios"


def changes_of(source: Mapping[str, Any] | str) -> tuple[str, dict[str, Any], tuple[Setting, ...]]:
    """What the settings of another tool change in a Config.

    Args:
        source: A BaseModel YAML as nested values, or an AI-OS command line.

    Returns:
        The tool's name, the changes by path, and a row for each setting.

    Raises:
        ConfigError: when it is neither.
    """
    if isinstance(source, str):
        tool, given, defaults = "AI-OS", dict(_flags(source)), _AIOS_DEFAULTS
        table = _aios_table(given)
        changes: dict[str, Any] = {"model.target": _GPT if _is_gpt(given) else _TRANSFORMER}
    elif source.keys() & SECTIONS:
        tool, given, defaults = "BaseModel", dict(leaves(source)), _BASEMODEL_DEFAULTS
        table, changes = _BASEMODEL, {"model.target": _SKETCH}
    else:
        known = ", ".join(sorted(SECTIONS))
        raise ConfigError(f"neither a BaseModel YAML ({known}) nor a command line that begins with {COMMAND}")
    rows: list[Setting] = []
    for name, value in sorted({**defaults, **given}.items(), key=lambda setting: setting[0] in _DECIDING):
        rule = _rule(table, name)
        here = rule.convert(value)
        paths = rule.paths if here is not None else ()
        whose = "their default" if name not in given else "kit's default" if here is None else ""
        rows += [
            Setting(name, value, path, here, "; ".join(filter(None, [whose, rule.note]))) for path in paths or ("",)
        ]
        for path in paths:
            _put(changes, path, here)
    if "training.early_stopping_patience" in changes:
        changes.setdefault("training.monitor", "val_loss")
    if changes.get("hardware.strategy", "none") != "none":  # which needs a number of devices, and none may be named
        changes.setdefault("hardware.devices", -1)
    overruled = [row.path in changes and changes[row.path] != row.here for row in rows]
    return (
        tool,
        changes,
        tuple(
            replace(row, note="; ".join(filter(None, [row.note, "another setting decides"]))) if lost else row
            for row, lost in zip(rows, overruled, strict=True)
        ),
    )


def _is_gpt(given: Mapping[str, Any]) -> bool:
    return bool(given.get("--model", "gpt2") == "gpt2")


def _aios_table(given: Mapping[str, Any]) -> dict[str, _Rule]:
    """The rules for this command line: which arguments there are depends on its model, and on whether it names data."""
    context = ["data.arguments.context"] * ("--dataset-file" in given) + ["model.arguments.context"] * _is_gpt(given)
    table = {**_AIOS, "--max-seq-len": _to(*context) if context else _none("of the data, and no file is named")}
    if not _is_gpt(given):
        table["--model"] = _to("model.arguments.name", note=f"of {_TRANSFORMER}")
        table["--window-size"] = _none(f"{_GPT} alone takes a window")
    return table


def _rule(table: Mapping[str, _Rule], name: str) -> _Rule:
    """Of this setting, or of what it is a part of."""
    asked = name
    while name:
        if name in table:
            return table[name]
        name = name.rpartition(".")[0]
    close = difflib.get_close_matches(asked, table, n=1, cutoff=0.9)
    return _none(f"not known to kit; did you mean {close[0]}?" if close else "not known to kit")


def _put(changes: dict[str, Any], path: str, value: Any) -> None:
    """Arguments are collected, everything else is a field."""
    section, _, argument = path.partition(".arguments.")
    if argument:
        changes.setdefault(f"{section}.arguments", {})[argument] = value
    else:
        changes[path] = value


def _flags(command: str) -> Iterator[tuple[str, Any]]:
    """(flag, value) of a command line; a flag without a value is True, and False with `no-` before its name."""
    try:
        words = _words(command)
    except ValueError as error:
        raise ConfigError(f"the command line of AI-OS cannot be read: {error}") from None
    flags = [place for place, word in enumerate(words) if word.startswith("--")]
    for place, after in pairwise([*flags, len(words)]):
        name, _, joined = words[place].partition("=")
        name = name.replace("_", "-")  # its configs have the same names with underscores
        value: Any = joined or " ".join(words[place + 1 : after]) or True
        if name.startswith("--no-"):
            name, value = f"--{name.removeprefix('--no-')}", False
        yield name, _number(value)


def _words(command: str) -> list[str]:
    """A line goes on after a backslash at its end, in PowerShell after a backtick."""
    joined = re.sub(r"[\\`][ \t]*\r?\n", " ", command)
    lexer = shlex.shlex(joined, posix=True)
    lexer.whitespace_split, lexer.commenters = True, ""
    if re.search(r"\\[\w.]", joined):
        lexer.escape = ""  # a backslash between names is a path of Windows
    return list(lexer)


def _number(value: Any) -> Any:
    for kind in (int, float):
        try:
            return kind(value) if isinstance(value, str) else value
        except ValueError:
            continue
    return value
