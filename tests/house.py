"""The house as it stands: files, folders and who imports whom. `python tests/house.py` prints its figures.

An import by a string counts: any text in the source that names a module of kit, alone or before a colon. Imports for
type checkers alone do not count, and neither do the maps of public names, which load what they name when it is used.
"""

from __future__ import annotations

import ast
import importlib
import itertools
import re
from collections import Counter, defaultdict
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1] / "kit"
MAPS = (
    "kit",
    "kit.checkpoints",
    "kit.cloud",
    "kit.course",
    "kit.data",
    "kit.memory",
    "kit.models",
    "kit.studies",
    "kit.train",
)
"""Packages whose names are loaded from elsewhere when they are first used."""
CORE = ("machine", "chunks", "data", "checkpoints", "train", "models", "confinement", "memory", "trial")
"""Everything below studies, with the files of the root: what a maintainer must know."""
_NAMED = re.compile(r"kit(\.\w+)+(:\w+)?")


@cache
def modules() -> dict[str, Path]:
    """Every module of kit by its dotted name; a package is its `__init__`."""
    paths = (path for path in sorted(ROOT.rglob("*.py")) if "__pycache__" not in path.parts)
    return {_dotted(path): path for path in paths}


def _dotted(path: Path) -> str:
    return ".".join(("kit", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")


def room(module: str) -> str:
    """The folder that a module lies in, as a path below kit; "" for the root's own files."""
    return str(modules()[module].parent.relative_to(ROOT)).replace(".", "")


@cache
def imports(module: str) -> frozenset[str]:
    """The modules of kit that one imports, also within functions and by a string."""
    if module in MAPS:
        return frozenset()
    found = set(_imported(ast.parse(modules()[module].read_text())))
    return frozenset(name for name in found if name in modules()) - {module}


def _imported(tree: ast.AST) -> itertools.chain[str]:
    return itertools.chain.from_iterable(map(_names, running(tree)))


def running(node: ast.AST):
    """All nodes but those that only a type checker sees."""
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
        return
    yield node
    for child in ast.iter_child_nodes(node):
        yield from running(child)


def _names(node: ast.AST):
    if isinstance(node, ast.Import):
        yield from (item.name for item in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module:
        inner = [f"{node.module}.{item.name}" for item in node.names]
        yield from inner
        if not all(name in modules() for name in inner):
            yield node.module
    elif isinstance(node, ast.Constant) and isinstance(node.value, str) and _NAMED.fullmatch(node.value):
        yield from {node.value.partition(":")[0]} - set(MAPS)


def circles(edges: dict[str, set[str]]) -> list[list[str]]:
    """Sets of more than one name that all reach each other."""

    def reached(start: str) -> set[str]:
        seen, waiting = set(), [start]
        while waiting:
            for other in edges.get(waiting.pop(), ()):
                if other not in seen:
                    seen.add(other)
                    waiting.append(other)
        return seen

    reach = {name: reached(name) for name in edges}
    found = {frozenset(other for other in reach[name] if name in reach.get(other, ())) for name in edges}
    return sorted(sorted(circle) for circle in found if len(circle) > 1)


def between_files() -> dict[str, set[str]]:
    return {name: set(imports(name)) for name in modules()}


def between_rooms() -> dict[str, set[str]]:
    """The root's own files are the ground; maps of public names are no room."""
    found: dict[str, set[str]] = defaultdict(set)
    for name in modules():
        found[room(name)] |= {room(other) for other in imports(name) if room(other)} - {room(name)}
    return {name: others for name, others in found.items() if name}


def files_of_rooms() -> Counter[str]:
    return Counter(str(path.parent.relative_to(ROOT)) for path in modules().values())


def public_classes() -> dict[str, list[str]]:
    """Where each class stands whose name has no underscore."""
    found: dict[str, list[str]] = defaultdict(list)
    for module, path in modules().items():
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(module)
    return found


def public() -> dict[str, list[str]]:
    """The public names by package: those of kit and of the packages that `help(kit)` names."""
    packages = {name: importlib.import_module(name) for name in MAPS if name not in ("kit.models", "kit.train")}
    inner = {name.removeprefix("kit.") for name in MAPS}
    return {name: [item for item in dir(package) if item not in inner] for name, package in packages.items()}


def lines(names: list[str] | None = None) -> int:
    chosen = modules() if names is None else names
    return sum(len(modules()[name].read_text().splitlines()) for name in chosen)


def figures() -> list[tuple[str, str]]:
    """What the house is like, by name."""
    core = [name for name in modules() if (room(name).split("/")[0] or "kit") in ("kit", *CORE)]
    longest = max(modules(), key=lambda name: lines([name]))
    (largest, count), *_ = files_of_rooms().most_common(1)
    code = sum(
        1
        for path in modules().values()
        for line in path.read_text().splitlines()
        if line.strip() and not line.strip().startswith("#")
    )
    return [
        ("files", f"{sum(1 for path in ROOT.rglob('*') if path.is_file() and '__pycache__' not in path.parts)}"),
        ("lines", f"{lines():,}"),
        ("lines that are neither empty nor a comment", f"{code:,}"),
        ("lines of the core", f"{lines(core):,}"),
        ("largest folder", f"{count} files ({largest})"),
        ("longest file", f"{lines([longest]):,} lines ({longest})"),
        ("public names of kit", f"{sum(len(names) for names in public().values())}"),
        ("circles of files", f"{len(circles(between_files()))}"),
        ("circles of folders", f"{len(circles(between_rooms()))}"),
        ("class names that stand twice", f"{sum(len(where) > 1 for where in public_classes().values())}"),
    ]


if __name__ == "__main__":
    for name, value in figures():
        print(f"{name:45} {value}")
