"""resize: the caller's own data in batches of another size, for a search that tries several.

A DataLoader is made anew around the same data set, sampler and collation; everything else about it stays. A data module
keeps its class and answers `train_dataloader` with loaders made anew; kit's own takes the size. A loader that makes its
batches by itself cannot be asked for others, and is refused.
"""

from __future__ import annotations

from typing import Any

from lightning.pytorch import LightningDataModule
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from kit.data.rows.module import RowData
from kit.errors import ConfigError, Problem

_KEPT = (
    "num_workers", "collate_fn", "pin_memory", "drop_last", "timeout", "worker_init_fn", "multiprocessing_context",
    "generator", "prefetch_factor", "persistent_workers",
)  # fmt: skip


def resize(data: dict[str, Any], batch_size: int) -> dict[str, Any]:
    """What `Trainer.fit` takes, with `batch_size` samples in each batch of each device.

    Raises:
        ConfigError: when a loader makes its batches by itself; for a data module, once its loader is asked for.
    """
    module = data.get("datamodule")
    if isinstance(module, RowData):
        module.take_batches_of(batch_size)
        return data
    if not isinstance(module, LightningDataModule):
        return {"train_dataloaders": _resized(data["train_dataloaders"], batch_size)}
    own = module.train_dataloader
    vars(module)["train_dataloader"] = lambda: _resized(own(), batch_size)
    return {"datamodule": module}


def _resized(loader: Any, batch_size: int) -> Any:
    if not isinstance(loader, DataLoader) or type(loader.batch_sampler) not in (BatchSampler, type(None)):
        message = f"the batches of {type(loader).__name__} cannot be made larger or smaller; give a DataLoader whose "
        raise ConfigError([Problem("data", message + "batch_size is a number, or a Dataset")])
    if loader.batch_size is None:
        raise ConfigError([Problem("data", "the loader has no batch_size: its data set makes the batches itself")])
    kept: dict[str, Any] = {name: getattr(loader, name) for name in _KEPT}
    if not isinstance(loader.dataset, IterableDataset):
        kept["sampler"] = loader.sampler
    return DataLoader(loader.dataset, batch_size=batch_size, **kept)
