"""The text of a committed file: a config with nothing left open, as LightningCLI reads it, each choice with its reason.

A pure function of a `Job`: the same job gives the same text, so that a file under version control changes only where
the run does. The parts of the file are LightningCLI's own (`seed_everything`, `trainer`, `model`, `data`, `ckpt_path`);
the Config it was made from is the text that `kit.train.CommittedConfig` carries, which `kit.Config.load` reads back.
What a trial switches off (checkpoints, logs, the progress bar) is on here; all that decides the numbers stays the same.

Lightning reads YAML 1.1, kit YAML 1.2, and `no`, `1e-5` or `12:30` mean different things to the two. So any text that
is not plainly a word is quoted, and a float always has its point: both readers see the same values. (ruamel.yaml writes
for one of the two at a time.) The text is ASCII, because LightningCLI reads it in the locale's encoding. Values are
mappings, lists, text, numbers, booleans and None; `Noted` puts a comment above a value, `YamlBlock` keeps the lines of
a text.
"""

from __future__ import annotations

import json
import re
import textwrap
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from kit.config import Config
from kit.train.choices import (
    Entry,
    entry,
    length_of,
    lever_entries,
    monitor_entries,
    strategy_entry,
    upload_entries,
    validates_by,
    validation_interval,
)
from kit.units import plural
from kit.yaml_text import COMMITTED

_WORD = re.compile(r"[A-Za-z_/][A-Za-z0-9_./-]*|[0-9]+-[a-z]+")
_NO_WORD = {"y", "n", "yes", "no", "on", "off", "true", "false", "null", "nan", "inf"}
_NOT_ASCII = re.compile("[^\x20-\x7e]")
_IN_COMMENTS = str.maketrans({"×": "x", "–": "-", "µ": "u", "≤": "<=", "≥": ">=", "→": "->"})
_WIDTH = 110


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A config, and what everything that it leaves open came to."""

    config: Config
    accelerator: Literal["cpu", "gpu"]
    devices: int
    """On each node."""
    precision: str
    batch_size: int | None
    """Samples per batch on each device; None where only the loader of the caller's own knows."""
    model: Entry
    data: Entry | None
    """None where the module makes its loaders itself."""
    loggers: Sequence[Entry] = ()
    """In the place of a CSV file, where there are any."""
    callbacks: Sequence[Entry] = ()
    """Beside those of the config."""
    flags: Mapping[str, Any] = field(default_factory=dict)
    """More arguments of the Trainer."""
    shards_itself: bool = False
    """The module does so in `configure_model`."""
    manual: bool = False
    """The module optimizes manually, so that accumulation and clipping are its own."""
    resolved: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the data that were open, by dotted path."""
    reasons: Mapping[str, str] = field(default_factory=dict)
    """By dotted path."""

    @property
    def nodes(self) -> int:
        return self.config.commit.nodes

    @property
    def world_size(self) -> int:
        return self.devices * self.nodes

    @property
    def global_batch_size(self) -> int | None:
        if self.batch_size is None:
            return None
        return self.batch_size * self.world_size * self.config.levers.accumulate_grad_batches

    @property
    def stem(self) -> str:
        """What its files are called."""
        return f"{self.config.name}-{self.config.fingerprint[:6]}"

    @property
    def output(self) -> str:
        """The folder of its checkpoints and logs, which no other config shares."""
        return f"{self.config.commit.output.rstrip('/')}/{self.stem}"


def committed_yaml(job: Job, commands: Mapping[str, str]) -> str:
    """The file; `commands` stand in its first lines."""
    lines = [*_comment(f"{job.config.name}: committed by kit, to be run as it is."), "#"]
    lines += [_ascii(f"#   {command}") for command in commands.values()]
    lines += ["#", *_comment(f"Started again, it goes on from the last checkpoint in {job.output}.")]
    return "\n".join([*lines, "", yaml_text(_sections(job))])


def _sections(job: Job) -> dict[str, Any]:
    """What LightningCLI reads, with notes."""
    config = job.config
    micro_batches = config.levers.accumulate_grad_batches
    strategy = strategy_entry(config.hardware, job.accelerator, job.world_size, job.nodes, job.shards_itself)
    ranks = plural(job.world_size, "rank")
    step = f"batches of its own data × {ranks}"
    if job.batch_size is not None:
        counted = f"{micro_batches} micro-batch" + "es" * (micro_batches != 1)
        step = f"{plural(job.batch_size, 'sample')} × {ranks} × {counted} = "
        step += f"{job.global_batch_size} samples in each optimizer step"
    optimization: dict[str, Any] = {} if job.manual else {"accumulate_grad_batches": micro_batches}
    if not job.manual and config.training.gradient_clip_norm is not None:
        optimization |= {"gradient_clip_val": config.training.gradient_clip_norm, "gradient_clip_algorithm": "norm"}
    return {
        "seed_everything": config.training.seed,
        "trainer": {
            "accelerator": _noted(job, "hardware.devices", job.accelerator),
            "devices": Noted(job.devices, step),
            "num_nodes": job.nodes,
            "strategy": Noted(strategy, f"hardware.strategy: {config.hardware.strategy}"),
            **length_of(config.training),
            **_validation(job),
            **optimization,
            "num_sanity_val_steps": config.trial.sanity_batches,
            "log_every_n_steps": 10,
            **job.flags,
            **_precision(job),
            "callbacks": _callbacks(job),
            "logger": [*job.loggers] or [entry("lightning.pytorch.loggers.CSVLogger", save_dir=job.output, name="log")],
            "default_root_dir": job.output,
        },
        "model": job.model,
        **({} if job.data is None else {"data": job.data}),
        "ckpt_path": Noted("last", "the last checkpoint where there is one, so that a restart goes on"),
    }


def _validation(job: Job) -> dict[str, Any]:
    """A run of so many steps may end within its first epoch, before whose end Lightning validates nothing."""
    interval = validation_interval(job.config)
    if not interval or not job.config.training.max_steps or validates_by(job.flags):
        return {}
    every = plural(job.config.trial.validate_every_steps, "step")
    why = f"every {every}, as its trial validates: trial.validate_every_steps"
    return {**interval, "val_check_interval": Noted(interval["val_check_interval"], why)}


def _noted(job: Job, path: str, value: Any) -> Any:
    return Noted(value, job.reasons[path]) if job.reasons.get(path) else value


def _precision(job: Job) -> dict[str, Any]:
    """Lightning takes no `16-mixed` for sharded models, but its plugin shards the scaler correctly."""
    if job.precision == "16-mixed" and job.config.hardware.strategy.startswith("fsdp"):
        plugin = entry("lightning.pytorch.plugins.MixedPrecision", precision="16-mixed", device="cuda")
        return {"plugins": _noted(job, "hardware.precision", [plugin, *job.flags.get("plugins", ())])}
    return {"precision": _noted(job, "hardware.precision", job.precision)}


def _callbacks(job: Job) -> list[Any]:
    config = job.config
    resolved = {path: _noted(job, path, value) for path, value in job.resolved.items()}
    carried = entry(
        COMMITTED, **({"resolved": resolved} if resolved else {}), config=YamlBlock(config.to_yaml(comments=False))
    )
    return [
        *lever_entries(job.config),
        entry("kit.train.WholeEpochs"),
        _checkpoints(job, every_n_train_steps=config.commit.checkpoint_every_steps),
        _checkpoints(job, every_n_epochs=1, save_on_train_epoch_end=True),
        *job.callbacks,
        *monitor_entries(config, f"{job.output}/checkpoints"),
        *upload_entries(config),
        Noted(carried, "the config that this file was committed from: kit.Config.load reads it back"),
    ]


def _checkpoints(job: Job, **when: Any) -> Entry:
    """`last.ckpt`, replaced in one move each time; both callbacks write the same file."""
    return entry(
        "kit.train.callbacks.LastModelCheckpoint",
        dirpath=f"{job.output}/checkpoints", save_last=True, save_top_k=0, enable_version_counter=False, **when,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Noted:
    """A value with the reason for it."""

    value: Any
    note: str


@dataclass(frozen=True, slots=True)
class YamlBlock:
    """Text of whole lines, the first of them not indented."""

    text: str


def yaml_text(values: Mapping[str, Any]) -> str:
    """The mapping as YAML, in its order."""
    return "\n".join(_lines(values, "")) + "\n"


def _lines(values: Mapping[str, Any] | Sequence[Any], indent: str) -> Iterator[str]:
    """Each entry is a head (`key:` or `-`) with its value behind or below it."""
    heads = [f"{_scalar(key)}:" for key in values] if isinstance(values, Mapping) else ["-"] * len(values)
    items = values.values() if isinstance(values, Mapping) else values
    for head, given in zip(heads, items, strict=True):
        value, note = (given.value, given.note) if isinstance(given, Noted) else (given, "")
        yield from _comment(note, indent)
        if isinstance(value, YamlBlock) and value.text.isascii():
            yield f"{indent}{head} |"
            yield from (f"{indent}  {line}".rstrip() for line in value.text.splitlines())
        elif isinstance(value, Mapping | list | tuple) and value:
            below = _lines(value, indent + "  ")
            beside = head == "-" and isinstance(value, Mapping)
            yield f"{indent}- {next(below).lstrip()}" if beside else f"{indent}{head}"
            yield from below
        else:
            text = f"{value.text.rstrip()}\n" if isinstance(value, YamlBlock) else value
            yield f"{indent}{head} {_scalar(text)}"


def _comment(note: str, indent: str = "") -> list[str]:
    words = _ascii(" ".join(note.split()))
    return [f"{indent}# {line}" for line in textwrap.wrap(words, _WIDTH, break_long_words=False)]


def _ascii(text: str) -> str:
    """What people read only, so that a letter may lose its accent."""
    return unicodedata.normalize("NFKD", text.translate(_IN_COMMENTS)).encode("ascii", "replace").decode()


def _scalar(value: Any) -> str:
    if isinstance(value, Mapping | list | tuple):
        return "{}" if isinstance(value, Mapping) else "[]"
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, float):
        text = repr(value)
        return text.replace("e", ".0e", 1) if "e" in text and "." not in text else text
    text = str(value)
    if isinstance(value, int) or (_WORD.fullmatch(text) and text.lower() not in _NO_WORD):
        return text
    return _NOT_ASCII.sub(lambda found: _escaped(ord(found[0])), json.dumps(text, ensure_ascii=False))


def _escaped(code: int) -> str:
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
