"""kit: know what a training run will need, and how fast it will go, before paying for it.

The public map. Every name is loaded when first used, so `import kit` costs neither torch nor matplotlib nor zarr.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kit.config import Config as Config
    from kit.data.build import build as build
    from kit.data.dataset import open_dataset as open_dataset
    from kit.data.layout import plan_chunks as plan_chunks
    from kit.data.module import PatchData as PatchData
    from kit.data.size import expected_bytes as expected_bytes
    from kit.data.verify import verify as verify
    from kit.errors import KitError as KitError
    from kit.machine import hardware as hardware
    from kit.plan.chunks import chunk_table as chunk_table
    from kit.report.batch_map import batch_figure as batch_figure
    from kit.report.chunk_chart import chunk_figure as chunk_figure
    from kit.report.results import results as results
    from kit.run.trial import Trial as Trial
    from kit.run.trial import fit as fit
    from kit.widgets.panel import panel as panel

_HOMES = {
    "Config": "kit.config",
    "KitError": "kit.errors",
    "PatchData": "kit.data.module",
    "Trial": "kit.run.trial",
    "batch_figure": "kit.report.batch_map",
    "build": "kit.data.build",
    "chunk_figure": "kit.report.chunk_chart",
    "chunk_table": "kit.plan.chunks",
    "expected_bytes": "kit.data.size",
    "fit": "kit.run.trial",
    "hardware": "kit.machine",
    "open_dataset": "kit.data.dataset",
    "panel": "kit.widgets.panel",
    "plan_chunks": "kit.data.layout",
    "results": "kit.report.results",
    "verify": "kit.data.verify",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'kit' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
