"""What a class or function is made with: the names of its arguments and their defaults, read without importing it.

`signature_of` reads the source text that an import path points to, so that a notebook kernel can offer a model's
arguments without importing torch; a class at hand is asked itself. Names that a module takes from another are followed
there, and a class without an `__init__` of its own has that of its first base that can be found. Where reading cannot
tell, the answer is None, never a guess. A default that is no plain value (a name, a call) counts as unknown.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from kit.errors import TargetError
from kit.targets import find_target, parsed, top_level

UNKNOWN = inspect.Parameter.empty
"""The default of an argument that has none, or none that reading can tell."""
_DEEPEST = 8
_Definition = ast.ClassDef | ast.FunctionDef


def signature_of(value: str | Callable[..., Any]) -> dict[str, Any] | None:
    """Argument to default, in their order; None where it cannot be told.

    Args:
        value: An import path, or a class or function.

    Raises:
        TargetError: for a path that leads nowhere.
    """
    if isinstance(value, str):
        return _read(value, _DEEPEST)
    try:
        parameters = inspect.signature(value).parameters.values()
    except (TypeError, ValueError):
        return None
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {item.name: item.default for item in parameters if item.kind in kinds}


def class_bodies(text: str, until: str, depth: int = _DEEPEST) -> Iterator[ast.ClassDef]:
    """The class that an import path points to, then those of its bases whose source can be read.

    The class named `until` and its bases are left out.

    Raises:
        TargetError: for a path that leads nowhere.
    """
    target = find_target(text)
    if target.file is None or target.name == until or depth == 0:
        return
    body = _body(target.file)
    node = next((item for item in body if isinstance(item, ast.ClassDef) and item.name == target.name), None)
    if node is None:
        origin = _origin(body, target.name, target.file, target.module)
        if origin is not None:
            yield from class_bodies(origin, until, depth - 1)
        return
    yield node
    for base in node.bases:
        place = _base_place(base, target.file, target.module)
        with contextlib.suppress(TargetError):  # a base from a package that is not here
            yield from class_bodies(place, until, depth - 1) if place else ()


def class_constant(value: str | type, name: str, until: str) -> Any:
    """The plain value that a class, or a base of it, binds to a name in its body; UNKNOWN where none can be told.

    Args:
        value: An import path, or a class.
        name: The attribute.
        until: The base at which reading ends.

    Raises:
        TargetError: for a path that leads nowhere.
    """
    if not isinstance(value, str):
        return getattr(value, name, UNKNOWN)
    for item in (item for node in class_bodies(value, until) for item in node.body):
        if isinstance(item, ast.Assign | ast.AnnAssign) and item.value is not None and name in _bound(item):
            found = _plain_mapping(item.value) if isinstance(item.value, ast.Dict) else _plain(item.value)
            if found is not UNKNOWN:
                return found
    return UNKNOWN


def _plain_mapping(node: ast.Dict) -> Any:
    keys, values = [*map(_plain, node.keys)], [*map(_plain, node.values)]
    return UNKNOWN if UNKNOWN in [*keys, *values] else dict(zip(keys, values, strict=True))


def _bound(item: ast.Assign | ast.AnnAssign) -> list[str]:
    targets = item.targets if isinstance(item, ast.Assign) else [item.target]
    return [target.id for target in targets if isinstance(target, ast.Name)]


def _read(text: str, depth: int) -> dict[str, Any] | None:
    target = find_target(text)
    if target.file is None or depth == 0:
        return None
    body = _body(target.file)
    node = next((item for item in body if isinstance(item, _Definition) and item.name == target.name), None)
    if node is not None:
        return _made_with(node, target.file, target.module, depth)
    origin = _origin(body, target.name, target.file, target.module)
    return None if origin is None else _read(origin, depth - 1)


def _made_with(node: _Definition, file: Path, module: str, depth: int) -> dict[str, Any] | None:
    if isinstance(node, ast.FunctionDef):
        return _arguments(node)
    own = next((item for item in node.body if isinstance(item, ast.FunctionDef) and item.name == "__init__"), None)
    if own is not None:
        return dict(list(_arguments(own).items())[1:])
    for base in (item.id for item in node.bases if isinstance(item, ast.Name)):
        place = _place(base, file, module)
        try:
            found = _read(place, depth - 1) if place else None
        except TargetError:  # a base from a package that is not here
            continue
        if found is not None:
            return found
    return None


def _arguments(node: ast.FunctionDef) -> dict[str, Any]:
    names = [item.arg for item in (*node.args.posonlyargs, *node.args.args)]
    defaults = [*[None] * (len(names) - len(node.args.defaults)), *node.args.defaults]
    pairs = [*zip(names, defaults, strict=True)]
    pairs += [(item.arg, default) for item, default in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)]
    return {name: _plain(default) for name, default in pairs}


def _plain(default: ast.expr | None) -> Any:
    if isinstance(default, ast.Constant):
        return default.value
    if (
        isinstance(default, ast.UnaryOp)
        and isinstance(default.op, ast.USub)
        and isinstance(default.operand, ast.Constant)
    ):
        return -default.operand.value  # type: ignore[operator]
    if isinstance(default, ast.Tuple | ast.List):
        items = [_plain(item) for item in default.elts]
        if UNKNOWN not in items:
            return tuple(items) if isinstance(default, ast.Tuple) else items
    return UNKNOWN


# -- where a name comes from


def _body(file: Path) -> list[ast.stmt]:
    state = file.stat()
    return parsed(file, state.st_mtime_ns, state.st_size).body


def _base_place(base: ast.expr, file: Path, module: str) -> str | None:
    """The import path of a base, given by its name or as `package.Name`."""
    if isinstance(base, ast.Name):
        return _place(base.id, file, module)
    if not (isinstance(base, ast.Attribute) and isinstance(base.value, ast.Name)):
        return None
    imports = (alias for node in top_level(_body(file)) if isinstance(node, ast.Import) for alias in node.names)
    names = (alias.name for alias in imports if (alias.asname or alias.name) == base.value.id)
    return next((f"{name}:{base.attr}" for name in names), None)


def _place(name: str, file: Path, module: str) -> str | None:
    """The import path of a name that a module uses."""
    body = _body(file)
    if any(isinstance(item, _Definition) and item.name == name for item in body):
        return f"{module or file}:{name}"
    return _origin(body, name, file, module)


def _origin(body: list[ast.stmt], name: str, file: Path, module: str) -> str | None:
    """The import path of a name that a module takes from another one."""
    for node in top_level(body):
        if not isinstance(node, ast.ImportFrom):
            continue
        for alias in node.names:
            if (alias.asname or alias.name) == name:
                return _imported(node, alias.name, file, module)
    return None


def _imported(node: ast.ImportFrom, name: str, file: Path, module: str) -> str | None:
    if not node.level:
        return f"{node.module}:{name}"
    if not module:
        return None
    parts = module.split(".") if file.name == "__init__.py" else module.split(".")[:-1]
    package = parts[: len(parts) - (node.level - 1)]
    return f"{'.'.join([*package, *filter(None, [node.module])])}:{name}"
