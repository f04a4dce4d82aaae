"""pytorch_lightning as another name of lightning.pytorch, in the processes that train.

One library is published under two names, and classes of one are none of the other's: a Trainer refuses a module that
was written for `import pytorch_lightning as pl`. Here the second name leads to the first, submodules and all, so that
modules, data modules, callbacks and loggers of either are the same classes. It is done only where both are of the same
release, or the second is not installed at all. The kernel is left as it is.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType

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
