"""What a committed file calls the module and the data: import paths that hold on another machine, or a refusal.

A file can name a class by its module and say what it is made with; it cannot hold an object, nor a class that only a
notebook knows. Those are refused with the way to a name: for a notebook's class a draft of its module, which
`write_drafts` writes and nothing else does. Source is read, never run.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from kit.config import Config, project_folder
from kit.errors import ConfigError, Problem, TargetError
from kit.report.draft import draft_name, draft_place, is_importable, write_draft
from kit.run.payload import Part, check_parts, is_patch_data, own_arguments
from kit.targets import find_target
from kit.train.entries import Entry, entry

_FILE_MODULE = "kit_target_"


def module_target(module: Any, config: Config) -> str:
    """The import path of what is trained, as `kit.fit` was given it.

    Raises:
        ConfigError: for an object, a function, and a class that only a notebook knows.
    """
    return _target(Part.of(module), "module", "model.target", config.model.target)


def module_entry(target: str, config: Config) -> Entry:
    """The `model` of a file.

    Raises:
        TargetError: when there is no such class under a name that holds elsewhere.
    """
    return entry(dotted(target), **config.values()["model"]["arguments"])


def data_entry(data: Any, config: Config) -> Entry:
    """The `data` of a file; kit's own reads the config that the file carries.

    Raises:
        ConfigError: for what is no LightningDataModule class or import path.
    """
    part = Part.of(data)
    if part.kind == "default":
        return entry("kit.train.CommittedData")
    if part.kind == "class" and is_patch_data(part.value):
        raise ConfigError([Problem("data", f"{part} is made from a Config; leave data out for kit's own")])
    if part.is_dataset:
        message = f"{part} has no loader of its own; wrap it in a LightningDataModule, and give its class"
        raise ConfigError([Problem("data", message)])
    check_parts(Part("default"), part, config)
    return entry(dotted(_target(part, "data", "", "")), **own_arguments(config))


def _target(part: Part, name: str, field: str, default: str) -> str:
    if part.kind == "default":
        return default
    if part.kind == "path":
        return str(part.value)
    if part.kind == "class":
        return _path_of(part.value, name, field)
    arguments = f"{field.partition('.')[0] or 'data'}.arguments"
    message = f"{part} is no class that a file can name; give the class, or its import path, and {arguments}"
    raise ConfigError([Problem(name, message)])


def write_drafts(*given: Any) -> None:
    """Write a draft of the module of each class that only a notebook knows, into the project folder."""
    for part in map(Part.of, given):
        if part.kind == "class" and _known_path(part.value) is None:
            write_draft(part.value, project_folder())


def _path_of(kind: type, name: str, field: str) -> str:
    path = _known_path(kind)
    if path is None:
        raise ConfigError([Problem(name, _no_module(kind, name, field))])
    return path


def _known_path(kind: type) -> str | None:
    """The import path of a class; None for one that only a notebook knows."""
    module = sys.modules.get(kind.__module__)
    if kind.__module__.startswith(_FILE_MODULE) and module is not None:
        return f"{module.__file__}:{kind.__qualname__}"
    return f"{kind.__module__}:{kind.__qualname__}" if is_importable(kind) else None


def _no_module(kind: type, name: str, field: str) -> str:
    draft, _ = draft_place(kind, project_folder()) or (None, "")
    path = f"{draft_name(kind) if draft is None else draft.stem}:{kind.__name__}"
    use = f'config.replace({{"{field}": "{path}"}})' if field else f'kit.commit(config, {name}="{path}")'
    where = "a module"
    if draft is not None:
        there = f"{draft}, a draft of such a module: read it through"
        where = there if draft.exists() else f"a module, of which kit.commit writes a draft as {draft}"
    return f"class {kind.__name__} is known to this notebook only, and no other machine can import it; put it into " + (
        f"{where}, then use {use}"
    )


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
