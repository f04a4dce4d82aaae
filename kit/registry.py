"""registry: parts of kit that are found by name: those that stand above who uses them, and those that have moved.

`kit` itself fills it, which alone knows every part. What is registered is loaded when it is first asked for. Files that
earlier versions wrote name modules where they stood then; such a name is answered with the module of today.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import inspect
import re
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from kit.errors import ArgumentError, ConfigError, did_you_mean

if TYPE_CHECKING:
    from matplotlib.figure import Figure

REPOSITORY = Path(__file__).parents[1]
_paths: dict[str, str] = {}


def register(paths: Mapping[str, str]) -> None:
    """Add import paths (`module:name`) under their names."""
    _paths.update(paths)


def registered(name: str) -> str | None:
    """The import path that is registered under a name."""
    return _paths.get(name)


def load(name: str) -> Any:
    """What is registered under a name.

    Raises:
        KeyError: when nothing is.
    """
    module, _, attribute = _paths[name].partition(":")
    return getattr(importlib.import_module(module), attribute)


def display(name: str, result: object) -> None:
    """Show a result in a notebook by what is registered under a name; as text, where widgets are not installed."""
    try:
        load(name)(result)
    except ImportError:
        sys.stdout.write(f"{result!r}\n")


def load_file(path: str) -> ModuleType:
    """The module of a file of kit's repository that is no part of the package, such as `datasets/topics/topics.py`.

    Raises:
        ImportError: in an installed kit, which has no such file.
    """
    file = REPOSITORY / path
    if not file.is_file():
        raise ImportError(f"{path} is no part of an installed kit; work in a checkout of its repository")
    module: ModuleType = load("file.module")(file)
    return module


class Drawable:
    """A result that draws itself: its pictures are registered as `figure.CLASS` and `figure.CLASS.KIND`."""

    __slots__ = ()

    def figure(self, kind: str = "", *others: Any, **options: Any) -> Figure:
        """Draw the result.

        Args:
            kind: Which picture, where there are several; the main one by default.
            others: Results that are drawn beside it, where the picture compares.
            options: What the picture takes by name.

        Raises:
            ConfigError: for a picture that there is not, with those that there are.
            ArgumentError: for options that the picture does not take.
        """
        mains = (f"figure.{parent.__name__}" for parent in type(self).__mro__)
        main = next(main for main in mains if main in _paths)
        name = f"{main}.{kind}" if kind else main
        if name not in _paths:
            kinds = [path.removeprefix(f"{main}.") for path in _paths if path.startswith(f"{main}.")]
            has = did_you_mean(kind, kinds, otherwise="it has {}") if kinds else "; it has one only"
            raise ConfigError(f"a {type(self).__name__} has no picture {kind!r}{has}")
        draw = load(name)
        signature = inspect.signature(draw)
        try:
            signature.bind(self, *others, **options)
        except TypeError as error:
            raise ArgumentError(
                f"figure: {error}; it takes {', '.join([*signature.parameters][1:]) or 'none'}"
            ) from None
        drawn: Figure = draw(self, *others, **options)
        return drawn


def lazy(package: str, *inner: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` of a package whose names are loaded when they are first used.

    The names are those that the package's source imports for type checkers, as `from module import name as public`.

    Args:
        package: Its dotted name.
        inner: Packages below it that are names too.
    """
    file = Path(str(sys.modules[package].__file__))
    source = file.read_text(encoding="utf-8")
    homes = {public: (module, name) for module, name, public in _PUBLIC.findall(source)}
    names = sorted([*homes, *inner])

    def get(name: str) -> Any:
        if name in inner:
            return importlib.import_module(f"{package}.{name}")
        if name not in homes:
            it_has = did_you_mean(name, names)
            listed = re.compile(_LISTED.format(re.escape(name)), re.MULTILINE)  # in sources: nothing is imported
            below = [one for one in inner if listed.search((file.parent / one / file.name).read_text(encoding="utf-8"))]
            it_has = f"; it is {package}.{below[0]}.{name}" if below else it_has
            raise AttributeError(f"module {package!r} has no attribute {name!r}{it_has}")
        module, attribute = homes[name]
        return getattr(importlib.import_module(module), attribute)

    return get, lambda: names


_PUBLIC = re.compile(r"^    from (\S+) import (\w+) as (\w+)$", re.MULTILINE)
_LISTED = r'^    (?:from \S+ import \w+ as {0}|"{0}",)$'
"""How a package names something public: for type checkers, or in `__all__` where it imports at once."""


class Moved(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds modules under the names that they had."""

    def __init__(self, names: Mapping[str, str]) -> None:
        """
        Args:
            names: The name of today by that of before, or a file of the repository.
        """
        self.names = names

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,  # noqa: ARG002
        target: ModuleType | None = None,  # noqa: ARG002
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in self.names:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        warnings.warn(f"{name} is {self.names[name]} now", DeprecationWarning, stacklevel=2)
        now = self.names[name]
        sys.modules[name] = load_file(now) if now.endswith(".py") else importlib.import_module(now)


def answer_to(names: Mapping[str, str]) -> None:
    """Have modules found under the names that they had, as in pickles of earlier versions."""
    sys.meta_path.insert(0, Moved(names))
