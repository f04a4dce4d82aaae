"""Hooks: the module's and its callbacks' own, while a dry run has them called.

A hook that trips over what it was kept from (an empty answer, a library in C that may write no file) ends there, and
the steps go on: it would not have changed them. What the step itself needs, such as `training_step`, is not passed
over.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

from lightning.pytorch.trainer import call
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _SingleProcessDataLoaderIter

from kit.confinement.confine import hooks_begin
from kit.confinement.kept import Kept
from kit.memory.patches import replaced

_CALLS = ("_call_lightning_module_hook", "_call_callback_hooks")


class Hooks:
    """What became of the hooks of one dry run."""

    def __init__(self) -> None:
        self.run = False
        """Whether the training runs now: everything is asked for by a hook then."""
        self.notes: list[str] = []

    @contextlib.contextmanager
    def running(self, kept: Kept) -> Iterator[None]:
        """Inside, the Trainer calls them."""
        with contextlib.ExitStack() as undo:
            for name in _CALLS:
                undo.enter_context(replaced(call, name, self._passing_over(getattr(call, name), kept)))
            self.run = True
            hooks_begin()
            try:
                yield
            finally:
                self.run = False

    def _passing_over(self, function: Callable[..., Any], kept: Kept) -> Callable[..., Any]:
        def _call_lightning_module_hook(trainer: Any, hook_name: str, *args: Any, **options: Any) -> Any:
            before, module = kept.count, trainer.lightning_module
            name = getattr(module, "_current_fx_name", None)
            try:
                return function(trainer, hook_name, *args, **options)
            except Exception as error:
                if kept.count == before or not (hook_name.startswith("on_") or hook_name in ("setup", "teardown")):
                    raise
                module._current_fx_name = name
                self.notes.append(f"{hook_name} ended early, with {type(error).__name__}: {_line(error)}")
                return None

        return _call_lightning_module_hook


def _line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "")


@contextlib.contextmanager
def in_this_process() -> Iterator[None]:
    """Inside, DataLoaders start no processes."""
    with replaced(DataLoader, "_get_iterator", _iterator):
        yield


def _iterator(loader: DataLoader[Any]) -> Any:
    alone = copy.copy(loader)
    vars(alone).update(num_workers=0, prefetch_factor=None, persistent_workers=False, timeout=0)
    return _SingleProcessDataLoaderIter(alone)
