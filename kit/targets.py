"""Import paths: `package.module:Name` or `path/to/file.py:Name`, checked without importing, or loaded.

`find_target` reads source text only, so a notebook kernel can refuse a misspelt model without importing torch. It is
exact for what a module binds at its top level (definitions, assignments, re-exports, a lazy `__getattr__` over a
table); where reading cannot decide (star imports from elsewhere, a computed `__getattr__`) it accepts, and
`load_target` has the last word. Relative files start at the project folder; so do packages that are not installed.

`hf:NAME` and `timm:NAME` are models by name: a class of kit, with the name as its first argument (`named_target`).

What a class or function is made with: the names of its arguments and their defaults, read without importing it.

`signature_of` reads the source text that an import path points to, so that a notebook kernel can offer a model's
arguments without importing torch; a class at hand is asked itself. Names that a module takes from another are followed
there, and a class without an `__init__` of its own has that of its first base that can be found. Where reading cannot
tell, the answer is None, never a guess. A default that is no plain value (a name, a call) counts as unknown.

`digest_of` tells a module or data from others of the same class: by the code, by the arguments and variables that a
function holds, by the shapes of parameters and by what a loader is set to. Numbers in tensors do not count.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import importlib
import importlib.machinery
import importlib.util
import inspect
import itertools
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from kit.config import project_folder, resolve_path
from kit.errors import TargetError, did_you_mean
from kit.registry import registered

_FORM = re.compile(r"(?P<place>[^:\s][^:]*|[A-Za-z]:[^:]+):(?P<name>[A-Za-z_]\w*)")
_DEEPEST_STAR = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Where a name was found."""

    text: str
    name: str
    module: str
    """Dotted module; empty for a file."""
    file: Path | None
    """Source file; None for a module without one."""


def find_target(text: str) -> Target:
    """Where `text` points, found by reading source, never by running it.

    Raises:
        TargetError: when the form is wrong, the module or file does not exist, or it has no such name.
    """
    path, given = named_target(text)
    if given:
        package, extra = _NAMED[text.strip().partition(":")[0]]
        if importlib.util.find_spec(package) is None:
            raise TargetError(f"{text} is made by {package}, which is not installed; pip install 'kit[{extra}]'")
    place, name = _split(path)
    if place.endswith(".py"):
        file: Path | None = _file(text, place)
        module = ""
    else:
        module, file = place, _module_file(text, place)
    names = _names(file) if file is not None else None
    if names is not None and name not in names:
        raise TargetError(f"{text}: {place} has no {name!r}{_hint(name, names)}")
    return Target(text=text, name=name, module=module, file=file)


def load_target(text: str) -> Any:
    """The object `text` points to; its module is imported, and a file is read again when it has changed.

    Raises:
        TargetError: when it cannot be found, or its module fails to import (with the cause).
    """
    target = find_target(text)
    try:
        module = load_module_of_file(target.file) if not target.module and target.file else _load_module(target.module)
    except Exception as error:
        raise TargetError(f"{text}: importing it failed: {type(error).__name__}: {error}") from error
    given = named_target(text)[1]
    try:
        found = getattr(module, target.name)
        return functools.partial(found, **given) if given else found
    except AttributeError:
        names = [name for name in dir(module) if not name.startswith("_")]
        place = target.module or str(target.file)
        raise TargetError(f"{text}: {place} has no {target.name!r}{_hint(target.name, names)}") from None


_NAMED = {"hf": ("transformers", "transformers"), "timm": ("timm", "timm")}
"""Libraries whose models are known by name: the package, and the extra of kit that brings it."""


def named_target(text: str) -> tuple[str, dict[str, Any]]:
    """The import path of a model by name, and the arguments that the name stands for; any other text as it is."""
    library, _, name = text.strip().partition(":")
    path = registered(f"model.{library}") if name and library in _NAMED else None
    return (text, {}) if path is None else (path, {"name": name})


def _split(text: str) -> tuple[str, str]:
    match = _FORM.fullmatch(text.strip())
    if match is None:
        place, _, name = text.strip().rpartition(".")
        hint = "write package.module:Name or path/to/file.py:Name"
        if name == "py":
            hint = f"name what is in the file, as {text.strip()}:Name"
        elif name[:1].isupper() and all(part.isidentifier() for part in place.split(".")):
            hint = f"did you mean '{place}:{name}'?"
        raise TargetError(f"{text!r} is no import path; {hint}")
    return match["place"], match["name"]


def _hint(name: str, names: list[str] | set[str]) -> str:
    public = sorted(known for known in names if not known.startswith("_"))
    it_has = f"it has {', '.join(public[:12])}{' and more' if len(public) > 12 else ''}"
    return did_you_mean(name, public, it_has if public else "it is empty")


# -- finding


def _file(text: str, place: str) -> Path:
    file = resolve_path(place)
    if not file.is_file():
        near = [item.name for item in file.parent.glob("*.py")] if file.parent.is_dir() else []
        hint = did_you_mean(file.name, near, otherwise="") or f"; relative files start at {project_folder()}"
        raise TargetError(f"{text}: there is no file {file}{hint}")
    return file


def _module_file(text: str, module: str) -> Path | None:
    """The source of a module, found part by part: importlib's own `find_spec` would import the parent packages."""
    parts = module.split(".")
    if not all(part.isidentifier() for part in parts):
        raise TargetError(f"{text!r} is no import path; write package.module:Name or path/to/file.py:Name")
    loaded = sys.modules.get(module)
    if loaded is not None and loaded.__spec__ is not None:
        return _python(loaded.__spec__)
    spec = _top_spec(parts[0])
    if spec is None:
        known = sorted({*_children([str(project_folder())]), *sys.modules, *sys.stdlib_module_names})
        hint = did_you_mean(parts[0], known, "install it, or give a file such as path/to/file.py:Name")
        raise TargetError(f"{text}: there is no package {parts[0]!r}{hint}")
    for index in range(1, len(parts)):
        parent, child = ".".join(parts[:index]), parts[index]
        folders = list(spec.submodule_search_locations or ())
        # By its own name alone: a folder without __init__ would ask for its parent, which is not imported.
        found = importlib.machinery.PathFinder.find_spec(child, folders) if folders else None
        if found is None:
            raise TargetError(f"{text}: {parent} has no module {child!r}{_hint(child, _children(folders))}")
        spec = found
    return _python(spec)


def _python(spec: importlib.machinery.ModuleSpec) -> Path | None:
    return Path(spec.origin) if spec.origin and spec.origin.endswith(".py") else None


def _top_spec(name: str) -> importlib.machinery.ModuleSpec | None:
    loaded = sys.modules.get(name)
    found = loaded.__spec__ if loaded is not None else importlib.util.find_spec(name)
    return found or importlib.machinery.PathFinder.find_spec(name, [str(project_folder())])


def _children(folders: list[str]) -> set[str]:
    items = [item for folder in folders if Path(folder).is_dir() for item in Path(folder).iterdir()]
    return {item.stem for item in items if item.suffix == ".py" or (item / "__init__.py").is_file()}


# -- reading


def _names(file: Path, depth: int = 0) -> set[str] | None:
    """Every name a module has after import; None when reading cannot tell."""
    state = file.stat()
    tree = parsed(file, state.st_mtime_ns, state.st_size)
    names: set[str] = set()
    for node in top_level(tree.body):
        is_star = isinstance(node, ast.ImportFrom) and any(alias.name == "*" for alias in node.names)
        found = _star(node, file, depth) if is_star else set(_bound(node))
        if found is None:
            return None
        names |= found
    if "__getattr__" in names and "lazy(__name__)" not in ast.unparse(tree):  # `kit.registry.lazy` adds no names
        lazy = _lazy_names(tree)
        return None if lazy is None else names | lazy
    return names


@functools.lru_cache(maxsize=32)
def parsed(file: Path, *_: int) -> ast.Module:
    """The source of a file, read again when its time or size has changed."""
    try:
        return ast.parse(file.read_bytes())
    except SyntaxError as error:
        raise TargetError(f"{file}, line {error.lineno}: {error.msg}; correct it first") from None


def top_level(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements that run when the module does, inside `if`, `try`, `with` and loops too."""
    for node in body:
        yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            for field in ("body", "orelse", "finalbody"):
                yield from top_level(getattr(node, field, []))
            for part in (*getattr(node, "handlers", []), *getattr(node, "cases", [])):
                yield from top_level(part.body)


def _bound(node: ast.stmt) -> Iterator[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.Import | ast.ImportFrom):
        yield from (alias.asname or alias.name.partition(".")[0] for alias in node.names)
    else:
        targets = getattr(node, "targets", None) or [getattr(node, "target", None)]
        for item in (part for target in targets if target is not None for part in ast.walk(target)):
            if isinstance(item, ast.Name):
                yield item.id


def _star(node: ast.stmt, file: Path, depth: int) -> set[str] | None:
    assert isinstance(node, ast.ImportFrom)
    if depth >= _DEEPEST_STAR or not node.level:
        return None
    folder = file.parents[node.level - 1].joinpath(*(node.module or "").split("."))
    for source in (folder.with_suffix(".py"), folder / "__init__.py"):
        if source.is_file():
            return _names(source, depth + 1)
    return None


def _lazy_names(tree: ast.Module) -> set[str] | None:
    """The keys of the literal tables that a module's `__getattr__` looks names up in."""
    tables = {
        target.id: {
            key.value for key in node.value.keys if isinstance(key, ast.Constant) and isinstance(key.value, str)
        }
        for node in tree.body
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Dict)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Name)
    }
    function = next((n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == "__getattr__"), None)
    used = {item.id for item in ast.walk(function) if isinstance(item, ast.Name)} if function else set()
    keys = [names for table, names in tables.items() if table in used]
    return set().union(*keys) if keys else None


# -- loading


def _load_module(name: str) -> ModuleType:
    top = name.partition(".")[0]
    folder = str(project_folder())
    if top not in sys.modules and importlib.util.find_spec(top) is None and folder not in sys.path:
        sys.path.append(folder)
    return importlib.import_module(name)


_FILE_MODULE = "kit_target"


def path_of(kind: type | FunctionType) -> str | None:
    """The import path of a class or function, under which another process finds it; None where only a notebook does."""
    found: Any = sys.modules.get(kind.__module__)
    if found is None or found.__name__ == "__main__":
        return None
    if kind.__module__.startswith(f"{_FILE_MODULE}_"):
        return f"{found.__file__}:{kind.__qualname__}"
    for name in kind.__qualname__.split("."):
        found = getattr(found, name, None)
    return f"{kind.__module__}:{kind.__qualname__}" if found is kind else None


def load_module_of_file(file: Path) -> ModuleType:
    """The module of a file, under a name made from its path; loaded again when the file has changed."""
    state = (file.stat().st_mtime_ns, file.stat().st_size)
    digest = hashlib.sha256(str(file).encode()).hexdigest()[:12]
    name = "_".join([_FILE_MODULE, digest, re.sub(r"\W", "_", file.stem)])
    module = sys.modules.get(name)
    if module is not None and getattr(module, "__kit_state__", None) == state:
        return module
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    module.__dict__["__kit_state__"] = state
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(name, None)
        raise
    return module


ANY = "**"
"""Among arguments that were read: any further name."""
UNKNOWN = inspect.Parameter.empty
"""The default of an argument that has none, or none that reading can tell."""
_DEEPEST = 8
_Definition = ast.ClassDef | ast.FunctionDef


def takes_any(value: str) -> bool:
    """Whether what an import path points to takes arguments under names of the caller's, or cannot be told.

    Raises:
        TargetError: for a path that leads nowhere.
    """
    found = _read(value, _DEEPEST)
    return found is None or ANY in found


def signature_of(value: str | Callable[..., Any]) -> dict[str, Any] | None:
    """Argument to default, in their order; None where it cannot be told.

    Args:
        value: An import path, or a class or function.

    Raises:
        TargetError: for a path that leads nowhere.
    """
    if isinstance(value, str):
        found, (_, given) = _read(value, _DEEPEST), named_target(value)
        return found and {name: default for name, default in found.items() if name not in (*given, ANY)}
    try:
        parameters = inspect.signature(value).parameters.values()
    except (TypeError, ValueError):
        return None
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {item.name: item.default for item in parameters if item.kind in kinds}


_SHARDING = re.compile(r"shard|parallel|mesh|distribut", re.IGNORECASE)


def tells_of_sharding(source: str) -> bool:
    """Whether a `configure_model` of this source shards or splits what it makes, as far as its words tell."""
    return _SHARDING.search(source) is not None


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
        if isinstance(item, ast.Assign | ast.AnnAssign) and item.value is not None and name in _assigned_names(item):
            found = _plain_mapping(item.value) if isinstance(item.value, ast.Dict) else _plain(item.value)
            if found is not UNKNOWN:
                return found
    return UNKNOWN


def _plain_mapping(node: ast.Dict) -> Any:
    keys, values = [*map(_plain, node.keys)], [*map(_plain, node.values)]
    return UNKNOWN if UNKNOWN in [*keys, *values] else dict(zip(keys, values, strict=True))


def _assigned_names(item: ast.Assign | ast.AnnAssign) -> list[str]:
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
    return {name: _plain(default) for name, default in pairs} | ({ANY: UNKNOWN} if node.args.kwarg else {})


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
    if not isinstance(base, ast.Attribute):
        return None
    first, _, inner = ast.unparse(base.value).partition(".")
    imports = (alias for node in top_level(_body(file)) if isinstance(node, ast.Import) for alias in node.names)
    roots = (alias.name if alias.asname else first for alias in imports
             if first == (alias.asname or alias.name.partition(".")[0]))  # fmt: skip
    return next((f"{root}.{inner}".rstrip(".") + f":{base.attr}" for root in roots), None)


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


# -- what tells one from another of the same class


_LIBRARIES = ("torch", "lightning", "lightning_fabric", "pytorch_lightning", "builtins", "abc", "typing", "collections")
"""Whose code is the same in all."""
_OF_LOADERS = (
    "batch_size", "num_workers", "drop_last", "pin_memory", "prefetch_factor", "dataset", "batch_sampler", "sampler",
    "collate_fn",
)  # fmt: skip
_MOST_PARTS, _MOST_ITEMS, _MOST_LETTERS = 20_000, 100, 1000
"""What is looked at: parts in all, items of each, letters of a text."""


def digest_of(value: Any) -> str:
    """Digits that differ where what is trained, or trained on, differs; of its code nothing runs but lengths."""
    return hashlib.sha256(repr(_PlainValues().of(value)).encode()).hexdigest()[:16]


class _PlainValues:
    """Makes plain values of objects, each once."""

    def __init__(self) -> None:
        self._left = _MOST_PARTS
        self._seen: dict[int, Any] = {}  # which keeps them alive, so that no other gets their id

    def of(self, value: Any) -> Any:
        if isinstance(value, str | bytes):
            return [len(value), value[:_MOST_LETTERS]]
        if value is None or isinstance(value, int | float | complex):
            return value
        self._left -= 1
        if self._left < 0 or id(value) in self._seen:
            return type(value).__qualname__
        self._seen[id(value)] = value
        try:
            return self._parts(value)
        except Exception as error:  # whatever classes of the user's make of being asked
            return [type(value).__qualname__, type(error).__name__]

    def _parts(self, value: Any) -> Any:
        kind = type(value)
        if isinstance(value, Mapping):
            return [len(value), self._each((str(key), item) for key, item in value.items())]
        if isinstance(value, list | tuple):
            return [len(value), self._each(value)]
        if isinstance(value, set | frozenset):
            return sorted(map(repr, value))[:_MOST_ITEMS]
        if isinstance(value, functools.partial):
            return self._each((value.func, value.args, value.keywords))
        if isinstance(value, MethodType):
            return self._each((value.__func__, value.__self__))
        if isinstance(value, FunctionType):
            return self._function(value)
        if isinstance(value, CodeType):
            return [value.co_code, self._each(value.co_consts), value.co_names]
        if isinstance(value, type):
            return self._class(value)
        if hasattr(value, "shape") and hasattr(value, "dtype"):
            return [kind.__qualname__, str(value.shape), str(value.dtype)]
        own = {name: item for name, item in getattr(value, "__dict__", {}).items() if not name.startswith("_")}
        if hasattr(value, "named_parameters"):
            parameters = [(name, one.requires_grad, self.of(one)) for name, one in value.named_parameters()]
            return [self._class(kind), parameters, [type(one).__qualname__ for one in value.modules()], self.of(own)]
        if hasattr(value, "batch_sampler"):
            return [self._class(kind), self._each(getattr(value, name, None) for name in _OF_LOADERS)]
        return [self._class(kind), len(value) if hasattr(kind, "__len__") else None, self.of(own)]

    def _each(self, values: Iterable[Any]) -> list[Any]:
        return [self.of(one) for one in itertools.islice(values, _MOST_ITEMS)]

    def _class(self, kind: type) -> Any:
        """Its name, and the code of all that is not torch's or Lightning's."""
        own = [one for one in kind.__mro__ if one.__module__.partition(".")[0] not in _LIBRARIES]
        code = [self.of(item.__code__) for one in own for item in vars(one).values() if hasattr(item, "__code__")]
        return [f"{kind.__module__}:{kind.__qualname__}", code]

    def _function(self, function: FunctionType) -> Any:
        """Its code, its defaults, and what it takes from where it was made."""
        taken = [function.__globals__.get(name) for name in function.__code__.co_names]
        for cell in function.__closure__ or ():
            with contextlib.suppress(ValueError):  # one that is still empty
                taken.append(cell.cell_contents)
        used = [one for one in taken if not isinstance(one, ModuleType)]
        return [self.of(function.__code__), self.of(function.__defaults__), self._each(used)]
