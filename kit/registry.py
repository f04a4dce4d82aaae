"""registry: parts of kit that are found by name: those that stand above who uses them, and those that have moved.

`kit` itself fills it, which alone knows every part. What is registered is loaded when it is first asked for. Files that
earlier versions wrote name modules where they stood then; such a name is answered with the module of today.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
import warnings
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

_paths: dict[str, str] = {}


def register(paths: Mapping[str, str]) -> None:
    """Add import paths (`module:name`) under their names."""
    _paths.update(paths)


def load(name: str) -> Any:
    """What is registered under a name.

    Raises:
        KeyError: when nothing is.
    """
    module, _, attribute = _paths[name].partition(":")
    return getattr(importlib.import_module(module), attribute)


class Moved(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds modules under the names that they had."""

    def __init__(self, names: Mapping[str, str]) -> None:
        """
        Args:
            names: The name of today by that of before.
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
        sys.modules[name] = importlib.import_module(self.names[name])


def answer_to(names: Mapping[str, str]) -> None:
    """Have modules found under the names that they had, as in pickles of earlier versions."""
    sys.meta_path.insert(0, Moved(names))
