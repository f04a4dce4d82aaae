"""A model and data that are right and slow, and the same without what makes them slow.

`Patches` limits every value to four deviations for a whole batch at once, `ValueByValue` does the same in Python, one
value after another. `Forecast` counts the extreme values of a batch on the device, `Counting` asks for them one by one.
`CURES` says what mends each mistake of the recipe, under the name that a diagnosis gives it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from typing_extensions import override

from kit.data.patches.module import PatchData
from kit.models import UNet

LIMIT = 4.0
CURES: dict[str, dict[str, Any]] = {
    "chunks that do not fit": {"change": {"chunking.chunk": "auto", "data.url": "data/slow-mended.zarr"}},
    "no prefetch": {"change": {"loader.batches_ahead": 4}},
    "Python in the data": {"new_data": "datasets/slow/parts.py:Patches"},
    "full precision": {"change": {"hardware.precision": "bf16-mixed"}},
    "sync in the step": {"new_module": "datasets/slow/parts.py:Forecast"},
}


class Limited:
    """A loader whose batches are limited; everything else about it stays."""

    def __init__(self, loader: Any, value_by_value: bool) -> None:
        self.loader, self.value_by_value = loader, value_by_value

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        for batch in self.loader:
            yield {**batch, "values": self._limited(batch["values"])}

    def _limited(self, values: torch.Tensor) -> torch.Tensor:
        if not self.value_by_value:
            return values.clamp_(-LIMIT, LIMIT)
        limited = [min(max(value, -LIMIT), LIMIT) for value in values.flatten().tolist()]
        return torch.tensor(limited).view_as(values)


class Patches(PatchData):
    """Limited a batch at a time."""

    value_by_value = False

    @override
    def train_dataloader(self) -> Any:
        return Limited(super().train_dataloader(), self.value_by_value)


class ValueByValue(Patches):
    """Limited a value at a time."""

    value_by_value = True


class Forecast(UNet):
    """Tells how many values are extreme."""

    def extremes(self, values: torch.Tensor) -> Any:
        return (values[..., ::8, ::8].abs() > 3).sum()

    @override
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.log("extremes", self.extremes(batch["values"]), batch_size=len(batch["values"]), reduce_fx="sum")
        return super().training_step(batch, batch_idx)


class Counting(Forecast):
    """Looks at one value after another."""

    @override
    def extremes(self, values: torch.Tensor) -> Any:
        return float(sum(bool(value.abs() > 3) for value in values[..., ::8, ::8].flatten()))
