"""From a payload to what is trained: the module and the data, made inside the process that uses them.

Every job makes them the same way, so that what is predicted is what is fitted.
"""

from __future__ import annotations

import linecache
from typing import Any

from lightning.pytorch import LightningDataModule, LightningModule
from torch.utils.data import DataLoader, Dataset

from kit.config import Config
from kit.errors import ConfigError, Problem
from kit.run.payload import Part, is_patch_data, own_arguments
from kit.targets import load_target


def show_cells(cells: dict[str, tuple[str, str]]) -> None:
    """Let tracebacks quote notebook cells, whose text is in no file."""
    for file, (_, source) in cells.items():
        linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)


def make_module(part: Part, config: Config) -> LightningModule:
    """The module that `part` names, holds or makes.

    Raises:
        ConfigError: when it is no LightningModule.
    """
    value, arguments = part.value, config.model.arguments
    if part.kind in ("default", "path"):
        path = config.model.target if part.kind == "default" else value
        target = load_target(path)
        value = target if isinstance(target, LightningModule) else target(**arguments)
    elif part.kind == "class":
        value = value(**arguments)
    elif part.kind == "factory":
        value = value()
    if not isinstance(value, LightningModule):
        message = (
            f"{part if part.value else config.model.target} gave {type(value).__name__}, which is no LightningModule"
        )
        raise ConfigError([Problem("module", message)])
    return value


def load_part(part: Part, config: Config) -> None:
    """Import what `make_module` will need, without making anything.

    Raises:
        TargetError: when it cannot be found or imported.
    """
    if part.kind in ("default", "path"):
        load_target(config.model.target if part.kind == "default" else part.value)


def make_data(part: Part, config: Config) -> dict[str, Any]:
    """What `Trainer.fit` takes: a data module or a loader.

    Raises:
        ConfigError: when it is neither, nor a data set.
    """
    value = _data_object(part, config)
    if isinstance(value, LightningDataModule):
        use_config = getattr(value, "use_config", None)
        if use_config is not None:  # one of kit's own, which leaves the rest to the config
            use_config(config)
        return {"datamodule": value}
    if isinstance(value, Dataset) and not isinstance(value, DataLoader):
        value = _loader(value, config)
    if not hasattr(value, "__iter__"):
        message = f"{part} gave {type(value).__name__}; give a LightningDataModule, a DataLoader or a Dataset"
        raise ConfigError([Problem("data", message)])
    return {"train_dataloaders": value}


def _data_object(part: Part, config: Config) -> Any:
    value = load_target(part.value) if part.kind == "path" else part.value
    if part.kind == "default":
        from kit.data.module import PatchData

        return PatchData(config)
    if isinstance(value, type):
        return value(config) if is_patch_data(value) else value(**own_arguments(config))
    if part.kind == "path" and callable(value):
        return value(**own_arguments(config))
    return value() if part.kind == "factory" else value


def _loader(dataset: Dataset[Any], config: Config) -> DataLoader[Any]:
    loader = config.loader
    return DataLoader(
        dataset,
        batch_size=loader.batch_size,
        shuffle=loader.shuffle and hasattr(dataset, "__getitem__"),
        num_workers=loader.num_workers,
        prefetch_factor=loader.prefetch_factor if loader.num_workers else None,
        pin_memory=loader.pin_memory,
        drop_last=loader.drop_last,
    )
