"""Data and modules of the user's that are no class of Lightning's: a loader, a data set, and what a function makes.

A trial and a committed file make them alike. `Trainer.fit` takes a loader for training and one for validation, and so
does kit: a pair is (training, validation). A list or a dict of loaders stays Lightning's combination of them. kit makes
the loader of a data set, by the settings of the config.

A file of LightningCLI names classes. `made_data` and `made_module` stand there for a function or a data set of the
user's: they call it by its import path and give what Lightning takes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset
from typing_extensions import override

from kit.config import Config
from kit.data.patches.module import ConfiguredData
from kit.errors import ConfigError, Problem
from kit.sections import Loader
from kit.targets import load_target


def loader_of(value: Any, settings: Loader, shuffle: bool = True) -> Any:
    """The loader of a data set; anything else as it is.

    Args:
        value: A data set, or a loader.
        settings: Of a loader that is made here.
        shuffle: Whether `settings.shuffle` counts; validation keeps its order.

    Raises:
        ConfigError: for a data set without samples.
    """
    if not isinstance(value, Dataset) or isinstance(value, DataLoader) or _holds_a_loader(value):
        return value
    if hasattr(value, "__len__") and not len(value):
        raise ConfigError([Problem("data", f"{type(value).__name__} holds no samples; look at where it finds them")])
    return DataLoader(
        value,
        batch_size=settings.batch_size,
        shuffle=shuffle and settings.shuffle and not isinstance(value, IterableDataset),  # which has its own order
        num_workers=settings.num_workers,
        prefetch_factor=settings.prefetch_factor if settings.num_workers else None,
        pin_memory=settings.pin_memory,
        drop_last=shuffle and settings.drop_last,
    )


def _holds_a_loader(value: Any) -> bool:
    """Whether it is steps behind a loader, as the WebLoader of webdataset, which is a data set by its class."""
    steps = getattr(value, "pipeline", None)
    return isinstance(steps, list) and any(isinstance(step, DataLoader) for step in steps)


def pair_of(value: Any, name: str) -> tuple[Any, ...]:
    """What is trained on, and what is validated on where that is given.

    Args:
        value: A loader or a data set, or a tuple of two.
        name: What gave it, for the error.

    Raises:
        ConfigError: when it is something else.
    """
    parts = value if isinstance(value, tuple) else (value,)
    wrong = [type(one).__name__ for one in parts if not hasattr(one, "__iter__") and not isinstance(one, Dataset)]
    if wrong or len(parts) not in (1, 2):
        found = wrong[0] if wrong else f"{len(parts)} values"
        message = f"{name} gave {found}; give a LightningDataModule, a DataLoader, a Dataset, or (training, validation)"
        raise ConfigError([Problem("data", message)])
    return parts


class GivenData(ConfiguredData):
    """A loader or data set for training, and one for validation.

    Args:
        training: What is trained on.
        validation: What is validated on; None validates nothing.
    """

    def __init__(self, training: Any, validation: Any = None) -> None:
        super().__init__(Config(), {})
        self.training, self.validation = training, validation

    @override
    def train_dataloader(self) -> Any:
        self._use_committed()
        return loader_of(self.training, self.config.loader)

    @override
    def _validates(self) -> bool:
        return self.validation is not None

    @override
    def _validation_batches(self) -> Any:
        self._use_committed()
        return loader_of(self.validation, self.config.loader, shuffle=False)

    @override
    def teardown(self, stage: str | None = None) -> None:
        """The loaders are the user's, who closes them."""


class ModuleData(LightningDataModule):
    """The loaders that a module makes itself.

    Args:
        make: Makes the module, for who asks for a loader without one.
    """

    def __init__(self, make: Callable[[], LightningModule]) -> None:
        super().__init__()
        self._make = make
        self.module: LightningModule | None = None
        """Whose loaders these are; it is the one that is trained."""

    @override
    def train_dataloader(self) -> Any:
        return self._known().train_dataloader()

    @property
    def val_dataloader(self) -> Any:
        """That of the module, or the method of Lightning that means no validation."""
        module = self._known()
        return module.val_dataloader if is_overridden("val_dataloader", module) else super().val_dataloader

    def _known(self) -> LightningModule:
        if self.module is None:
            self.module = self._make()
            self.module.prepare_data()
            self.module.setup("fit")
        return self.module


def made_data(function: str, arguments: Mapping[str, Any] | None = None) -> LightningDataModule:
    """The data that a function or a data set's class makes.

    Args:
        function: Its import path.
        arguments: What it is called with.

    Raises:
        ConfigError: when it gives neither a data module, a loader, a data set nor a pair of these.
        TargetError: for a path that leads nowhere.
    """
    value = load_target(function)(**(arguments or {}))
    return value if isinstance(value, LightningDataModule) else GivenData(*pair_of(value, function))


def no_module(given: object, value: Any) -> ConfigError:
    """The error for what a function or a path gave in place of a LightningModule."""
    if isinstance(value, type):
        found = f"the class {value.__name__}; return {value.__name__}(), or give the class itself"
    else:
        found = f"{type(value).__name__}, which is no LightningModule"
        if isinstance(value, nn.Module):
            found += "; write one that holds it, with training_step and configure_optimizers"
    return ConfigError([Problem("module", f"{given} gave {found}")])


def made_module(function: str, arguments: Mapping[str, Any] | None = None) -> LightningModule:
    """The module that a function makes, or that a name of a file holds.

    Args:
        function: Its import path.
        arguments: What it is called with.

    Raises:
        ConfigError: when it gives no LightningModule.
        TargetError: for a path that leads nowhere.
    """
    found = load_target(function)
    value = found if isinstance(found, LightningModule) else found(**(arguments or {}))
    if not isinstance(value, LightningModule):
        raise no_module(function, value)
    return value
