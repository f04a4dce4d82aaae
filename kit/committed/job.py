"""From a config (and the trial that won) to a Job: everything left open is settled here, each with its reason.

Devices, precision and loader settings are those of the trial where it ran with the same `hardware`; otherwise this
machine is asked, as `kit.fit` would. A config that leaves nothing open about its devices needs no such machine. Chunks
are those of the store as it is, or of its plan while it is not built.

A committed file names the module and the data by import paths that hold on another machine. What is no class of
Lightning's (a function, a data set) is called there by `kit.train.made`, as a trial calls it. A file cannot hold an
object, a function of no name, or a class that only a notebook knows: those are refused with the way to a name. So are
loggers and callbacks of which it is not known how they were made. For a class or function of a notebook `write_drafts`
writes a draft of a module: the text of its cell, with the imports, constants and definitions of the
notebook that it names, each once, in the order they need each other. What cannot be written stays as a comment, for the
author to see to. Source is read, never imported or run.
"""

from __future__ import annotations

import ast
import builtins
import functools
import importlib
import inspect
import itertools
import linecache
import re
import sys
import textwrap
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from kit.committed.yaml import Job
from kit.config import Config, project_folder
from kit.errors import ConfigError, HardwareError, KitError, Problem, TargetError
from kit.machine.machine import hardware, resolve_devices
from kit.studies.calibration.result import Calibration, saved_path
from kit.targets import class_bodies, find_target, named_target, parsed, path_of
from kit.train.choices import Entry, asked_stages, entry, trainer_flags
from kit.train.one_lightning import real_name
from kit.trial.payload import (
    Part,
    TrainerParts,
    batch_rule,
    check_parts,
    is_manual,
    is_patch_data,
    own_arguments,
    parts_of,
    shards_itself,
    takes_config,
)
from kit.trial.trial import Trial

_PLAIN = (int, float, str, bool, type(None))
_IRRELEVANT = ("trial.", "commit.", "checkpoint.", "profiler.", "name")
"""Settings that may differ from the trial's without another number coming out."""


def make_job(
    config: Config, trial: Trial | None = None, module: Any = None, data: Any = None,
    logger: Any = None, callbacks: Any = None, trainer: Mapping[str, Any] | None = None,
) -> tuple[Job, list[str]]:  # fmt: skip
    """The job, and what its user should know.

    Raises:
        ConfigError: for what a file cannot say, each under its field.
        HardwareError: for devices left open that are not here.
    """
    given = trial.environment.get("given", {}) if trial is not None else {}
    for name, part in (("module", module), ("data", data)):  # a trial does not know which object it was given
        if given.get(name, "default") not in ("default", "module") and part is None:
            message = f"the trial was given a {name} of its own; give the same: kit.commit(config, trial, {name}=...)"
            raise ConfigError([Problem(name, message)])
    target, model = module_entry(module, config)
    loaders = parts_of(module, data, config)[1]
    source = None if loaders.kind == "module" else data_entry(data, config)
    accelerator, devices, precision, reasons = _devices(config, trial)
    if config.commit.nodes > 1 and config.hardware.strategy == "none":
        message = f"{config.commit.nodes} nodes are more than one device; set hardware.strategy to ddp or fsdp"
        raise ConfigError([Problem("commit.nodes", message)])
    resolved, notes = _loader_settings("" if source is None else source["class_path"], config, trial, reasons)
    rule = batch_rule(loaders, config)
    own = {"logger": logger, "callbacks": callbacks, "trainer": trainer}
    more, left = _trainer_parts(config, trial, is_manual(target), own)
    job = Job(
        config=config, accelerator=accelerator, devices=devices, precision=precision, model=model, data=source,
        shards_itself=shards_itself(target), manual=is_manual(target), resolved=resolved, reasons=reasons,
        batch_size=rule.size if rule.by_config or trial is None else trial.config.loader.batch_size, **more,
    )  # fmt: skip
    left += [f"the run trains only: {stage} is a command of its own, afterwards" for stage in asked_stages(config)]
    return job, [*_differences(config, trial), *notes, *left]


def _trainer_parts(
    config: Config, trial: Trial | None, manual: bool, own: Mapping[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    """Loggers, callbacks and flags of the Trainer: those given here, else the trial's; and what is left out of them.

    Raises:
        ConfigError: for those of which it is not known how they are made.
    """
    before = (trial.environment.get("trainer") or {}) if trial is not None else {}
    given = TrainerParts.of(own["logger"], own["callbacks"] or (), trainer_flags(own["trainer"], config, manual))
    made = given.summary().get("made", {})
    # A run of an earlier version tells names only.
    kept = before.get("made") or {
        "logger": [{"name": name} for name in before.get("loggers", ())],
        "callbacks": [{"name": name} for name in before.get("callbacks", ())],
        "trainer": {name: {"name": name} for name in before.get("flags", ())},
    }
    chosen = {name: (kept if own[name] is None else made).get(name) or () for name in own}
    settings = {name: _made(value, "trainer") for name, value in dict(chosen["trainer"]).items()}
    notes = []
    if settings.pop("enable_checkpointing", None) is False:
        notes = ["the trial's Trainer had enable_checkpointing: false; this file keeps a last checkpoint all the same"]
    entries = {name: tuple(_made(part, name) for part in chosen[name]) for name in ("logger", "callbacks")}
    return {"loggers": entries["logger"], "callbacks": entries["callbacks"], "flags": settings}, notes


def _made(part: Any, name: str) -> Any:
    """The entry, or the value, that a file has in the place of what the Trainer was given."""
    if isinstance(part, list):
        return [_made(one, name) for one in part]
    if "value" in part:
        return part["value"]
    if "class" not in part:
        way = f"{name}=[{{'class_path': 'package.Name', 'init_args': {{...}}}}, ...]"
        way = "trainer={'" + part["name"] + "': ...} with plain values" if name == "trainer" else way
        why = part.get("why", "its run tells its name only")
        again = f"give all of {name} again: kit.commit(config, trial, {way})"
        raise ConfigError([Problem(name, f"how {part['name']} is made is not known: {why}; {again}")])
    return entry(real_name(dotted(part["class"])), **_from_project(part["arguments"]))


def _from_project(value: Any) -> Any:
    """The same with paths below the project folder as they are called from there, and keys that are whole numbers."""
    if isinstance(value, dict):
        keys = (int(key) if str(key).lstrip("-").isdecimal() else key for key in value)
        return dict(zip(keys, map(_from_project, value.values()), strict=True))
    if isinstance(value, list | tuple):
        return [_from_project(item) for item in value]
    return value.removeprefix(f"{project_folder()}/") if isinstance(value, str) else value


def _devices(config: Config, trial: Trial | None) -> tuple[Literal["cpu", "gpu"], int, str, dict[str, str]]:
    """Accelerator, devices of a node, precision, and reasons."""
    if trial is not None and trial.config.hardware == config.hardware:
        known = trial.environment
        found = _sorted_reasons(known["reasons"], known["precision"])
        return known["accelerator"], int(known["world_size"]), str(known["precision"]), found
    try:
        here = resolve_devices(config, hardware())
    except HardwareError as error:  # then what the config says outright is for a machine that is not this one
        section = config.hardware
        count = len(section.devices) if isinstance(section.devices, tuple) else section.devices
        if section.accelerator == "auto" or not isinstance(count, int) or count < 1 or section.precision == "auto":
            raise HardwareError(
                f"{error}; to commit for another machine, say what it has: hardware.accelerator, a number of "
                "hardware.devices and hardware.precision"
            ) from None
        reason = "as the config says; this machine was not asked"
        return section.accelerator, count, section.precision, {"hardware.devices": reason}
    return here.accelerator, here.world_size, here.precision, _sorted_reasons(here.reasons, here.precision)


def _sorted_reasons(reasons: Sequence[str], precision: str) -> dict[str, str]:
    of_precision = [reason for reason in reasons if reason.startswith(precision)]
    rest = [reason for reason in reasons if reason not in of_precision]
    return {"hardware.precision": "; ".join(of_precision), "hardware.devices": "; ".join(rest)}


# -- what the data left open


def _loader_settings(
    data: str, config: Config, trial: Trial | None, reasons: dict[str, str]
) -> tuple[dict[str, Any], list[str]]:
    """What was left open of the data of that class, and notes for its user; adds to `reasons`."""
    is_kits, made, notes = data == "kit.train.CommittedData", data == _MADE_DATA, []
    event = trial.event("calibrated") if trial is not None and config.calibration.enabled else None
    changes, why = ({}, "") if event is None else (dict(event["changes"]), str(event["headline"]))
    if is_kits and config.calibration.enabled and event is None:
        try:
            found = Calibration.load(saved_path(config))
        except KitError:
            found = None
        if found is not None and found.chosen is not None:
            changes, why = dict(found.chosen.changes), found.headline
        else:
            notes = [
                "the loader was not calibrated: its settings are those of the config (kit.studies.calibrate measures)"
            ]
    if not data:  # the module makes its loaders itself
        return {}, []
    if not is_kits and not takes_config(":".join(data.rsplit(".", 1))):
        # Data of the user's own is made as its class makes it, without the settings that a trial gave its loader. Where
        # a function may give a data set, kit makes the loader, by these.
        settings = ", ".join(f"{path.partition('.')[2]}={value}" for path, value in changes.items())
        note = f"the trial's loader ran with {settings}; set them in your data module"
        return changes if made else {}, [note] if settings else []
    reasons.update(dict.fromkeys(list(changes)[:1], why))
    if not is_kits:
        return changes, []
    try:
        layout, why = _layout(config)
    except KitError as error:
        return changes, [*notes, f"the layout of the store was left open: {error}"]
    reasons.update(dict.fromkeys(list(layout)[:1], why))
    return {**changes, **layout}, notes


def _layout(config: Config) -> tuple[dict[str, Any], str]:
    """Chunk and shard where they are open: of the store, or of the plan for it."""
    from kit.data.build.layout import plan_chunks
    from kit.data.open_dataset import open_dataset
    from kit.data.stores.url import redact

    open_fields = [name for name in ("chunk", "shard") if getattr(config.chunking, name) == "auto"]
    if not open_fields:
        return {}, ""
    try:
        array = open_dataset(config).select(config.data.variables)[0]
        dims, chunk, shard, why = array.dims, array.chunk, array.shard, f"as {redact(config.data.url)} is cut"
    except KitError:
        if config.data.source is None:
            raise
        plan = plan_chunks(config)
        dims, chunk, shard, why = plan.dims, plan.chunk, plan.shard, "; ".join(plan.reasons)
    sizes = {
        "chunk": dict(zip(dims, chunk, strict=True)),
        "shard": dict(zip(dims, shard, strict=True)) if shard else "none",
    }
    return {f"chunking.{name}": sizes[name] for name in open_fields}, why


def _differences(config: Config, trial: Trial | None) -> list[str]:
    if trial is None:
        return ["no trial was given: nothing in this file was measured"]
    ended = [] if trial.state == "COMPLETE" else [f"the trial is {trial.state}: {trial.message}"]
    changed = [
        f"{path} was {before!r} in the trial and is {now!r} here"
        for path, (before, now) in trial.config.diff(config).items()
        if not path.startswith(_IRRELEVANT) and now != trial.asked.get(path)  # asked again, it comes out the same again
    ]
    return [*ended, *changed]


def module_entry(module: Any, config: Config) -> tuple[str, Entry]:
    """What is trained, as an import path, and the `model` of a file.

    Raises:
        ConfigError: for what a file cannot name.
    """
    part = Part.of(module)
    path, bound = _target(part, "module", "model.target", config.model.target)
    target, given = named_target(path)
    if part.kind == "factory":  # called without arguments, as in a trial
        return target, entry(_MADE_MODULE, function=_called(target), **({"arguments": bound} if bound else {}))
    arguments = {**given, **config.values()["model"]["arguments"]}
    if _is_called(target, "LightningModule"):
        return target, entry(_MADE_MODULE, function=_called(target), **({"arguments": arguments} if arguments else {}))
    return target, entry(dotted(target), **arguments)


_MADE_DATA, _MADE_MODULE = "kit.train.made.made_data", "kit.train.made.made_module"


def data_entry(data: Any, config: Config) -> Entry:
    """The `data` of a file; kit's own reads the config that the file carries.

    Raises:
        ConfigError: for what a file cannot name.
    """
    part = Part.of(data)
    if part.kind == "default":
        return entry("kit.train.CommittedData")
    if part.kind == "class" and is_patch_data(part.value):
        raise ConfigError([Problem("data", f"{part} is made from a Config; leave data out for kit's own")])
    check_parts(Part("default"), part, config)
    target, bound = _target(part, "data", "", "")
    arguments = bound if part.kind == "factory" else own_arguments(config)
    if part.kind == "factory" or part.is_dataset or _is_called(target, "LightningDataModule"):
        return entry(_MADE_DATA, function=_called(target), **({"arguments": arguments} if arguments else {}))
    return entry(dotted(target), **arguments)


def _target(part: Part, name: str, field: str, default: str) -> tuple[str, dict[str, Any]]:
    """The import path of a part, as `kit.fit` was given it, and what a `functools.partial` calls it with.

    Raises:
        ConfigError: for an object, a function of no name, and what only a notebook knows.
    """
    if part.kind in ("default", "path"):
        return (str(part.value) if part.kind == "path" else default), {}
    partial = isinstance(part.value, functools.partial)
    value = part.value.func if partial else part.value
    if not isinstance(value, type | types.FunctionType) or "<" in getattr(value, "__name__", "<"):
        arguments = f"{field.partition('.')[0] or 'data'}.arguments"
        message = f"{part} is nothing that a file can name; give a class or a function with a name, or the import path "
        raise ConfigError([Problem(name, f"{message}of one, and {arguments}")])
    bound: dict[str, Any] = {}
    if partial:
        names = inspect.signature(value).parameters
        bound = {**dict(zip(names, part.value.args, strict=False)), **part.value.keywords}
    if not _is_plain(list(bound.values())):
        message = f"{part} is called with what is no plain value ({', '.join(bound)}); give numbers and text only"
        raise ConfigError([Problem(name, message)])
    path = path_of(value)
    if path is None:
        raise ConfigError([Problem(name, _no_module(value, name, field))])
    return path, bound


def _is_called(path: str, kind: str) -> bool:
    """Whether a path is of a function that does not say to make a `kind`, of an object, or of a data set's class.

    LightningCLI takes a class for one by its bases, and a function by what it says to give.
    """
    found = find_target(path)
    body = parsed(found.file, found.file.stat().st_mtime_ns).body if found.file else []
    node = next((item for item in body if getattr(item, "name", "") == found.name), None)
    if isinstance(node, ast.FunctionDef):
        return node.returns is None or kind not in ast.unparse(node.returns)
    if node is None:
        assigned = (target for item in body if isinstance(item, ast.Assign) for target in item.targets)
        return any(isinstance(target, ast.Name) and target.id == found.name for target in assigned)
    functions = [item.name for one in class_bodies(path, until=kind) for item in one.body if hasattr(item, "name")]
    return not {"train_dataloader"}.intersection(functions) and bool({"__getitem__", "__iter__"} & {*functions})


def _called(target: str) -> str:
    """The path of a function as `kit.train.made` takes it, from the project folder of any machine."""
    return ":".join(dotted(target).rsplit(".", 1))


def write_drafts(*given: Any) -> None:
    """Write a draft of the module of each class or function that only a notebook knows, into the project folder."""
    for part in map(Part.of, given):
        value = part.value.func if isinstance(part.value, functools.partial) else part.value
        if not isinstance(value, type | types.FunctionType) or not value.__name__.isidentifier():
            continue
        if path_of(value) is None:
            place = draft_place(value, project_folder())
            if place is not None and not place[0].exists():
                place[0].write_text(place[1], encoding="utf-8")


def _no_module(kind: type | types.FunctionType, name: str, field: str) -> str:
    draft, _ = draft_place(kind, project_folder()) or (None, "")
    path = f"{draft_name(kind) if draft is None else draft.stem}:{kind.__name__}"
    use = f'config.replace({{"{field}": "{path}"}})' if field else f'kit.commit(config, {name}="{path}")'
    where = "a module"
    if draft is not None:
        there = f"{draft}, a draft of such a module: read it through"
        where = there if draft.exists() else f"a module, of which kit.commit writes a draft as {draft}"
    word = "class" if isinstance(kind, type) else "function"
    known = f"{word} {kind.__name__} is known to this notebook only, and no other machine can import it"
    return f"{known}; put it into {where}, then use {use}"


def dotted(target: str) -> str:
    """An import path as LightningCLI writes it: a file below the project folder becomes a module of that name.

    Raises:
        TargetError: when it leads nowhere, or to a file that has no such name.
    """
    found = find_target(target)
    if found.module:
        return f"{found.module}.{found.name}"
    assert found.file is not None
    return f"{_module_of(found.file, target, found.name)}.{found.name}"


def _module_of(file: Path, target: str, name: str) -> str:
    root = project_folder()
    if not file.resolve().is_relative_to(root):
        raise TargetError(f"{target}: {file} lies outside the project folder {root}; move it there, or install it")
    parts = file.resolve().relative_to(root).with_suffix("").parts
    module = ".".join(parts)
    if not all(part.isidentifier() for part in parts):
        raise TargetError(f"{target}: {'/'.join(parts)} is no name of a module; use letters, digits and _ only")
    try:
        seen = find_target(f"{module}:{name}").file
    except TargetError:
        seen = None
    if seen is None or seen.resolve() != file.resolve():
        raise TargetError(f"{target}: {parts[0]} is another package here; give that file or folder another name")
    return module


def draft_name(value: Any) -> str:
    """The name of a module for a class: `SeaNet` becomes `sea_net`."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", value.__name__).lower()


def draft_place(value: Any, folder: Path) -> tuple[Path, str] | None:
    """A new file in `folder`, or the one that holds the draft of `value`, and its text; None when it has no source."""
    text = draft_text(value)
    if text is None:
        return None
    stem = draft_name(value)
    for number in range(1, 1000):
        path = folder / f"{stem}{'' if number == 1 else f'_{number}'}.py"
        if not path.exists() or path.read_text(encoding="utf-8", errors="replace") == text:
            return path, text
    return None


def draft_text(value: Any) -> str | None:
    """The module; None when the source of `value` is not known."""
    draft = _Draft(vars(sys.modules.get(value.__module__, types.ModuleType("nowhere"))))
    if not draft.add(value):
        return None
    head = f'"""{value.__name__}, taken from a notebook. Read it through before it is used."""'
    parts = [head, "\n".join(sorted(draft.imports)), "\n".join(draft.notes), "\n".join(draft.constants)]
    return "\n\n".join([part for part in parts if part] + ["\n" + text for text in draft.definitions]) + "\n"


@dataclass
class _Draft:
    """What has been gathered so far."""

    names: Mapping[str, Any]
    """Everything the notebook has."""
    imports: set[str] = field(default_factory=set)
    constants: list[str] = field(default_factory=list)
    definitions: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    _seen: set[str] = field(default_factory=set)

    def add(self, value: Any) -> bool:
        """Gather a definition, after all that it needs; False when its source is not known."""
        found = _source(value)
        if found is None:
            return False
        text, node = found
        self._seen.add(node.name)
        for name in dict.fromkeys(item.id for item in ast.walk(node) if isinstance(item, ast.Name)):
            self._need(name)
        self.definitions.append(text)
        return True

    def _need(self, name: str) -> None:
        if name in self._seen or name not in self.names or hasattr(builtins, name):
            return
        self._seen.add(name)
        value = self.names[name]
        is_defined = isinstance(value, type | types.FunctionType)
        if isinstance(value, types.ModuleType):
            plain = value.__name__ == name
            self.imports.add(f"import {value.__name__}" + ("" if plain else f" as {name}"))
        elif _is_plain(value):
            self.constants.append(f"{name} = {value!r}")
        elif not (self._import(name, value) or (is_defined and self.add(value))):
            self.notes.append(f"# {name} was {type(value).__name__} in the notebook: define it here.")

    def _import(self, name: str, value: Any) -> bool:
        """From the outermost package that has it under its name, which is where its author offers it."""
        module, real = getattr(value, "__module__", None), getattr(value, "__name__", None)
        if not module or not real or module == "__main__":
            return False
        for package in itertools.accumulate(module.split("."), "{}.{}".format):
            found = sys.modules.get(package) or importlib.import_module(package)
            if getattr(found, real, None) is value:
                self.imports.add(f"from {package} import {real}" + ("" if name == real else f" as {name}"))
                return True
        return False


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple | set):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(map(_is_plain, [*value, *value.values()]))
    return type(value) in _PLAIN


def _source(value: Any) -> tuple[str, ast.ClassDef | ast.FunctionDef] | None:
    """Text and tree of a definition, from the file or cell that its code came from; the last of its name counts."""
    functions = [value] if isinstance(value, types.FunctionType) else vars(value).values()
    codes = (getattr(item, "__code__", None) for item in functions)
    lines = linecache.getlines(next((code.co_filename for code in codes if code is not None), ""))
    try:
        tree = ast.parse("".join(lines))
    except SyntaxError:  # a cell with magics
        return None
    nodes = [item for item in ast.walk(tree) if isinstance(item, ast.ClassDef | ast.FunctionDef)]
    named = [node for node in nodes if node.name == value.__name__]
    if not named:
        return None
    node = named[-1]
    first = min([node.lineno, *(item.lineno for item in node.decorator_list)])
    return textwrap.dedent("".join(lines[first - 1 : node.end_lineno])).rstrip(), node
