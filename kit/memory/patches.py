"""replaced: an attribute of a class or module, exchanged for the length of a block.

A dry run makes Lightning and torch believe in devices and ranks that are not there. Every such change is made here and
undone here, in reverse order when several are nested.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """`owner.name` is `value` inside; afterwards it is what was stored there, static and class methods included.

    Raises:
        AttributeError: when `owner` itself has no such attribute (one it inherits is not exchanged).
    """
    if name not in vars(owner):
        raise AttributeError(f"{getattr(owner, '__name__', owner)} has no attribute {name} of its own")
    before = vars(owner)[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextlib.contextmanager
def overridden(owner: Any, name: str, value: Any) -> Iterator[None]:
    """As `replaced`, for an attribute that `owner` has or inherits; one that was inherited is inherited again."""
    if name in vars(owner):
        with replaced(owner, name, value):
            yield
        return
    setattr(owner, name, value)
    try:
        yield
    finally:
        delattr(owner, name)
