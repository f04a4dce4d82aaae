"""kit: know what a training run will need, and how fast it will go, before paying for it.

The public map. Every name is loaded when first used, so `import kit` costs neither torch nor matplotlib nor zarr.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kit.config import Config as Config

_HOMES = {
    "Config": "kit.config",
    "KitError": "kit.errors",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'kit' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
