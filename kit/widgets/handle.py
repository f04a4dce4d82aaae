"""Handle: what a user holds of a panel. The widgets behind it are given back when nobody can use them any more.

ipywidgets keeps every open widget, and a widget keeps whatever it calls, so a panel that its widgets called outright
would live as long as the kernel. They call it through `weakly` instead, and when a handle is forgotten its widgets are
closed. A handle is forgotten when

- no variable holds it, and no trial that it started runs,
- and no cell shows it: a cell that has been run again shows only what it displayed then, and what IPython had kept of
  the earlier result (`Out[3]`, `_3`, `_`) is dropped with it.

Front ends do not say when an output is cleared or a cell deleted; there, and where cells have no ids, `close()` does.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import ipywidgets

from kit.widgets.live import LiveDisplay

_HISTORY = re.compile(r"_{1,3}|_\d+")


class Handle:
    """Base of the panels. A subclass draws `ui` and a still of itself, and calls `_own` when it is complete."""

    ui: Any
    _display: LiveDisplay | None = None

    def _own(self) -> None:
        """From now on the widgets of all its parts end with this handle."""
        parts = [part for part in vars(self).values() if _is_part(part)]
        self._finish = weakref.finalize(self, close_widgets, parts)
        self._finish.atexit = False

    def close(self) -> None:
        """Give back every widget, as if the panel had been forgotten; what runs goes on, and what was found is kept."""
        for handles in _shown.values():
            handles[:] = [handle for handle in handles if handle is not self]
        _forget([self])
        self._finish()
        self._display = None

    @property
    def closed(self) -> bool:
        return not self._finish.alive

    def _still(self) -> tuple[str, bytes | str | None]:
        raise NotImplementedError

    def _refresh(self) -> None:
        """Renew the still beside the live view."""
        if self._display is not None:
            self._display.refresh()

    def _show(self) -> None:
        """Be the output of the current cell."""
        if self.closed:
            from IPython.display import display

            display({"text/plain": f"{self!r}\nClosed; make another one of its config."}, raw=True)  # type: ignore[no-untyped-call]
            return
        _remember(self)
        sentence = f"{self!r}\nRun this cell again for its controls."
        self._display = LiveDisplay(self.ui, sentence, weakly(self._still))


def weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method for callbacks that must not keep its object alive; once that is gone it does nothing."""
    held = weakref.WeakMethod(method)

    def call(*arguments: Any) -> Any:
        alive = held()
        return None if alive is None else alive(*arguments)

    return call


def close_widgets(parts: Iterable[Any]) -> None:
    """Close every widget that is found in these: views, containers and widgets, down to their layouts and styles."""
    seen: dict[int, Any] = {}
    waiting = list(parts)
    while waiting:
        item = waiting.pop()
        if id(item) in seen:
            continue
        seen[id(item)] = item
        if isinstance(item, ipywidgets.Widget):
            waiting += [getattr(item, name) for name in item.keys]
        elif isinstance(item, dict):
            waiting += item.values()
        elif isinstance(item, list | tuple):
            waiting += item
        elif _is_part(item):
            waiting += vars(item).values()
    for item in seen.values():
        if isinstance(item, ipywidgets.Widget):
            item.close()


def _is_part(item: Any) -> bool:
    is_view = type(item).__module__.startswith("kit.widgets.") and hasattr(item, "__dict__")
    return is_view or isinstance(item, ipywidgets.Widget | dict)


# -- what cells show

_shown: dict[str | None, list[Handle]] = {}
"""By the id of the cell that shows them; what is shown is kept, whoever else has let go of it."""
_replaced: list[Handle] = []
"""What the cell that runs had shown before."""


def _remember(handle: Handle) -> None:
    """Keep what the running cell shows, until that cell has been run again."""
    shell = _shell()
    if shell is None:
        return
    if _on_run not in shell.events.callbacks["pre_run_cell"]:
        shell.events.register("pre_run_cell", _on_run)
        shell.events.register("post_run_cell", _on_end)
    parent = shell.get_parent() if hasattr(shell, "get_parent") else {}
    shown = _shown.setdefault(parent.get("metadata", {}).get("cellId"), [])
    if not any(one is handle for one in shown):
        shown.append(handle)


def _on_run(info: Any) -> None:
    if info.cell_id is not None:
        _replaced.extend(_shown.pop(info.cell_id, ()))


def _on_end(_: Any) -> None:
    """Drop what the cell showed before, unless it is shown still."""
    ended, _replaced[:] = list(_replaced), []
    shown = {id(handle) for handles in _shown.values() for handle in handles}
    _forget([handle for handle in ended if id(handle) not in shown])


def _forget(handles: Iterable[Handle]) -> None:
    """Have IPython keep none of these as the result of a cell; variables of the user's keep theirs."""
    shell, gone = _shell(), {id(handle) for handle in handles}
    if shell is None or not gone:
        return
    names = shell.user_ns, shell.user_ns_hidden, shell.user_ns.get("_oh", {})
    for kept in names:
        for name in [name for name, value in kept.items() if id(value) in gone and _is_history(name)]:
            del kept[name]
    for name in ("_", "__", "___"):
        if id(getattr(shell.displayhook, name, None)) in gone:
            setattr(shell.displayhook, name, "")


def _is_history(name: Any) -> bool:
    return isinstance(name, int) or _HISTORY.fullmatch(name) is not None


def _shell() -> Any:
    from IPython import get_ipython

    return get_ipython()
