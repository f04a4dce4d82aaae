"""The text of a committed file: a config with nothing left open, as LightningCLI reads it, each choice with its reason.

A pure function of a `Job`: the same job gives the same text, so that a file under version control changes only where
the run does. The parts of the file are LightningCLI's own (`seed_everything`, `trainer`, `model`, `data`, `ckpt_path`);
the Config it was made from is the text that `kit.train.CommittedConfig` carries, which `kit.Config.load` reads back.

What a trial switches off (checkpoints, logs, the progress bar) is on here; what decides the numbers is as it was there.

YAML that YAML 1.1 and 1.2 read alike, with a comment above each line that has a reason.

Lightning reads its files as YAML 1.1, kit as 1.2: `no`, `1e-5` or `12:30` mean different things to them. Text that is
not plainly a word is quoted here, and a float always has its point. Values are mappings, lists, text, numbers, booleans
and None; `Noted` puts a comment above a value, `YamlBlock` keeps the lines of a text as they are.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from kit.config import COMMITTED, Config
from kit.train.choices import Entry, entry, lever_entries, strategy_entry, upload_entries

_UNITS = "{batch} samples × {ranks} ranks × {micro} micro-batches = {samples} samples in each optimizer step"


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
    data: Entry
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
    lines = [*comment(f"{job.config.name}: committed by kit, to be run as it is."), "#"]
    lines += [f"#   {command}" for command in commands.values()]
    lines += ["#", *comment(f"Started again, it goes on from the last checkpoint in {job.output}.")]
    return "\n".join([*lines, "", yaml_text(sections(job))])


def sections(job: Job) -> dict[str, Any]:
    """What LightningCLI reads, with notes."""
    return {
        "seed_everything": job.config.training.seed,
        "trainer": {
            "accelerator": _noted(job, "hardware.devices", job.accelerator),
            "devices": Noted(job.devices, _batches(job)),
            "num_nodes": job.nodes,
            "strategy": Noted(_strategy(job), f"hardware.strategy: {job.config.hardware.strategy}"),
            **_precision(job),
            "max_epochs": job.config.training.max_epochs,
            "max_steps": -1,
            **_optimization(job),
            "num_sanity_val_steps": 0,
            "log_every_n_steps": 10,
            "callbacks": _callbacks(job),
            "logger": [entry("lightning.pytorch.loggers.CSVLogger", save_dir=job.output, name="log")],
            "default_root_dir": job.output,
        },
        "model": job.model,
        "data": job.data,
        "ckpt_path": Noted("last", "the last checkpoint where there is one, so that a restart goes on"),
    }


def _noted(job: Job, path: str, value: Any) -> Any:
    return Noted(value, job.reasons[path]) if job.reasons.get(path) else value


def _batches(job: Job) -> str:
    if job.batch_size is None:
        return f"batches of its own data × {job.world_size} ranks"
    return _UNITS.format(
        batch=job.batch_size, ranks=job.world_size, micro=job.config.levers.accumulate_grad_batches,
        samples=job.global_batch_size,
    )  # fmt: skip


def _strategy(job: Job) -> Entry:
    return strategy_entry(job.config.hardware, job.accelerator, job.world_size, job.nodes, job.shards_itself)


def _precision(job: Job) -> dict[str, Any]:
    """Lightning takes no `16-mixed` for sharded models, but its plugin shards the scaler correctly."""
    if job.precision == "16-mixed" and job.config.hardware.strategy.startswith("fsdp"):
        plugin = entry("lightning.pytorch.plugins.MixedPrecision", precision="16-mixed", device="cuda")
        return {"plugins": _noted(job, "hardware.precision", [plugin])}
    return {"precision": _noted(job, "hardware.precision", job.precision)}


def _optimization(job: Job) -> dict[str, Any]:
    if job.manual:
        return {}
    clip = job.config.training.gradient_clip_norm
    clipping = {} if clip is None else {"gradient_clip_val": clip, "gradient_clip_algorithm": "norm"}
    return {"accumulate_grad_batches": job.config.levers.accumulate_grad_batches, **clipping}


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
        *upload_entries(config),
        Noted(carried, "the config that this file was committed from: kit.Config.load reads it back"),
    ]


def _checkpoints(job: Job, **when: Any) -> Entry:
    """`last.ckpt`, replaced in one move each time; both callbacks write the same file."""
    return entry(
        "lightning.pytorch.callbacks.ModelCheckpoint",
        dirpath=f"{job.output}/checkpoints", save_last=True, save_top_k=0, enable_version_counter=False, **when,
    )  # fmt: skip


_WORD = re.compile(r"[A-Za-z_/][A-Za-z0-9_./-]*|[0-9]+-[a-z]+")
_NO_WORD = {"y", "n", "yes", "no", "on", "off", "true", "false", "null", "nan", "inf"}
_UNPRINTABLE = re.compile("[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]")
_WIDTH = 110


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
    return "\n".join(_mapping(values, "")) + "\n"


def _mapping(values: Mapping[str, Any], indent: str) -> Iterator[str]:
    for key, given in values.items():
        value, note = (given.value, given.note) if isinstance(given, Noted) else (given, "")
        yield from comment(note, indent)
        yield from _under(f"{indent}{_scalar(key)}:", value, indent)


def _under(head: str, value: Any, indent: str) -> Iterator[str]:
    if isinstance(value, YamlBlock):
        yield f"{head} |"
        yield from (f"{indent}  {line}".rstrip() for line in value.text.splitlines())
    elif isinstance(value, Mapping) and value:
        yield head
        yield from _mapping(value, indent + "  ")
    elif isinstance(value, list | tuple) and value:
        yield head
        for item in value:
            yield from _item(item, indent + "  ")
    else:
        yield f"{head} {_scalar(value)}"


def _item(given: Any, indent: str) -> Iterator[str]:
    item, note = (given.value, given.note) if isinstance(given, Noted) else (given, "")
    yield from comment(note, indent)
    if isinstance(item, Mapping) and item:
        first, *rest = _mapping(item, indent + "  ")
        yield f"{indent}- {first.removeprefix(indent + '  ')}"
        yield from rest
    elif isinstance(item, list | tuple) and item:
        yield f"{indent}-"
        for inner in item:
            yield from _item(inner, indent + "  ")
    else:
        yield f"{indent}- {_scalar(item)}"


def comment(note: str, indent: str = "") -> list[str]:
    """The note as comment lines."""
    words = " ".join(note.split())
    return [f"{indent}# {line}" for line in textwrap.wrap(words, _WIDTH, break_long_words=False)]


def _scalar(value: Any) -> str:
    if isinstance(value, Mapping | list | tuple):
        return "{}" if isinstance(value, Mapping) else "[]"
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, float):
        text = repr(value)
        return text.replace("e", ".0e", 1) if "e" in text and "." not in text else text
    return str(value) if isinstance(value, int) else _quoted(str(value))


def _quoted(text: str) -> str:
    if _WORD.fullmatch(text) and text.lower() not in _NO_WORD:
        return text
    quoted = json.dumps(text, ensure_ascii=False)
    return _UNPRINTABLE.sub(lambda found: f"\\u{ord(found[0]):04x}", quoted)
