"""pytorch_lightning as another name of lightning.pytorch, in the processes that train.

One library is published under two names, and classes of one are none of the other's: a Trainer refuses a module that
was written for `import pytorch_lightning as pl`. Here the second name leads to the first, submodules and all, so that
modules, data modules, callbacks and loggers of either are the same classes. It is done only where both are of the same
release, or the second is not installed at all. The kernel is left as it is.

Lightning imports torchmetrics, and that matplotlib for the pictures that a metric may draw: a second of a core, and a
prediction draws none. `drawn_later` has it imported when the first picture is drawn.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType
from typing import Any

from typing_extensions import override

NAMES = {"pytorch_lightning": "lightning.pytorch", "lightning_fabric": "lightning.fabric"}
_DISTRIBUTIONS = {"pytorch_lightning": "pytorch-lightning", "lightning_fabric": "lightning-fabric"}


def real_name(module: str) -> str:
    """The name of a module in the library lightning; any other as it is."""
    first, dot, rest = module.partition(".")
    return f"{NAMES[first]}{dot}{rest}" if first in NAMES else module


class _OtherName(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Gives the module of the first name where one of the second is imported."""

    @override
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        known = real_name(fullname) != fullname
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True) if known else None

    @override
    def exec_module(self, module: ModuleType) -> None:
        sys.modules[module.__name__] = importlib.import_module(real_name(module.__name__))


def use_one_lightning() -> None:
    """From now on in this process, unless the second name is loaded already or of another release."""
    if any(name in sys.modules for name in NAMES) or any(isinstance(one, _OtherName) for one in sys.meta_path):
        return
    for name in _DISTRIBUTIONS.values():
        try:
            if version(name) != version("lightning"):
                return
        except PackageNotFoundError:
            continue
    sys.meta_path.insert(0, _OtherName())


# -- matplotlib, which torchmetrics imports

_PICTURES = "torchmetrics.utilities.plot"
_MATPLOTLIB = ("matplotlib", "matplotlib.axes", "matplotlib.pyplot")


class _Later(ModuleType):
    """Stands for a module of matplotlib, which is imported when something of it is used."""

    Axes = Colormap = Figure = object  # named in annotations alone

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(importlib.import_module(self.__name__), name)


@contextlib.contextmanager
def _styled(*args: Any, **options: Any) -> Iterator[None]:
    """In place of `pyplot.style.context`, which decorates functions that draw."""
    with importlib.import_module("matplotlib.pyplot").style.context(*args, **options):
        yield


class _DrawsLater(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Shows the one file of torchmetrics that draws stand-ins while it is imported."""

    def __init__(self) -> None:
        self._file: importlib.machinery.ModuleSpec | None = None

    @override
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != _PICTURES or "matplotlib" in sys.modules or importlib.util.find_spec("matplotlib") is None:
            return None
        self._file = importlib.machinery.PathFinder.find_spec(fullname, path)
        if self._file is None or self._file.origin is None:
            return None
        return importlib.util.spec_from_file_location(fullname, self._file.origin, loader=self)

    @override
    def exec_module(self, module: ModuleType) -> None:
        assert self._file is not None
        assert self._file.loader is not None
        library, axes, pyplot = stand_ins = [_Later(name) for name in _MATPLOTLIB]
        library.__spec__ = importlib.util.find_spec("matplotlib")
        vars(library).update(axes=axes, pyplot=pyplot, colors=_Later("matplotlib.colors"))
        vars(pyplot)["style"] = style = _Later("matplotlib.style")
        vars(style)["context"] = _styled
        sys.modules.update(zip(_MATPLOTLIB, stand_ins, strict=True))
        try:
            self._file.loader.exec_module(module)
        finally:
            for name in _MATPLOTLIB:
                del sys.modules[name]


@contextlib.contextmanager
def drawn_later() -> Iterator[None]:
    """Inside, torchmetrics is imported without matplotlib; its pictures are drawn as ever."""
    finder = _DrawsLater()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
