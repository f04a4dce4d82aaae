"""Data modules for Lightning: one loader for this rank that ends with the fit; `PatchData` reads patches of a store.

Each rank reads its own part of every global batch. Settings that were not given to a `ConfiguredData` are a config's:
the trial's where kit runs it (`use_config`), and in a committed run that of its file, which
`kit.train.CommittedConfig` carries among the callbacks of the Trainer. So a short file trains with every setting that
its trial had.

With `data.validation_fraction` a part of the data is kept for validation, and each module has a `val_dataloader` of it:
no sample of training reaches into that part. With `data.test_fraction` patches are kept for a test too, and
`Trainer.test` takes them. Means and deviations for `data.standardize` are of the whole store, or of the part for
training where `kit.data.statistics` has been there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from os import PathLike, fspath
from typing import TYPE_CHECKING, Any

from lightning.pytorch import LightningDataModule
from typing_extensions import override

from kit.arguments import checks_arguments
from kit.config import Config
from kit.data.build.layout import network_of
from kit.data.dataset import Dataset
from kit.data.open_dataset import open_dataset
from kit.data.patches.loader import EpochPasses, PatchLoader
from kit.data.patches.tiles import standardized_by
from kit.data.sampling import sample_plan
from kit.data.splits import Part
from kit.data.stores.disk_cache import ReadCache
from kit.data.stores.url import redact
from kit.data.stream.memory import loader_settings
from kit.errors import ConfigError
from kit.sections import Loader

if TYPE_CHECKING:
    from kit.data.dataset import XarrayObject


class EpochData(LightningDataModule):
    """A loader that is made for each fit."""

    def __init__(self) -> None:
        super().__init__()
        self.loader: EpochPasses[Any, Any] | None = None
        self.validation_loader: EpochPasses[Any, Any] | None = None
        self.test_loader: EpochPasses[Any, Any] | None = None

    @property
    def val_dataloader(self) -> Any:
        """Makes the batches of this rank to validate on, the same at each call.

        Where `data.validation_fraction` is 0 it is the method of Lightning that means no validation: one that gives
        nothing would have Lightning warn of a loader that nobody gave.
        """
        return self._validation_batches if self._validates() else super().val_dataloader

    def _validates(self) -> bool:
        return False

    def _validation_batches(self) -> Any:
        raise NotImplementedError

    @property
    def _contents(self) -> str:
        """What it reads, in a few words; empty where only the class is known."""
        return ""

    @override
    def __str__(self) -> str:
        """In one line, without a loader: Lightning would read an epoch to count it, and fail at its batches."""
        return f"{type(self).__name__}: {self._contents}" if self._contents else type(self).__name__

    def __repr__(self) -> str:
        return str(self)

    @property
    def ranks(self) -> tuple[int, int]:
        """World size and rank: the trainer's, or 1 and 0 without one."""
        return (self.trainer.world_size, self.trainer.global_rank) if self.trainer else (1, 0)

    @property
    def committed(self) -> Config | None:
        """What the file of a committed run carries; None elsewhere."""
        carried = (getattr(callback, "committed", None) for callback in getattr(self.trainer, "callbacks", ()))
        return next((config for config in carried if isinstance(config, Config)), None)

    @override
    def teardown(self, stage: str | None = None) -> None:
        self._close()
        for kept in (self.validation_loader, self.test_loader):
            if kept is not None:
                kept.close()

    def _close(self) -> None:
        if self.loader is not None:
            self.loader.close()

    def _tell_length(self, batches: int) -> None:
        """Give the Trainer the batches of the epoch that begins.

        It counts them once, when it asks for the loader: before it hands over the state of a checkpoint, and never
        again. An epoch that is resumed with other ranks or batches has its own number of them, and so has the next.
        """
        trainer = self.trainer
        limit = 1.0 if trainer is None else trainer.limit_train_batches
        if trainer is None or (isinstance(limit, float) and limit != 1.0):
            return
        loop = trainer.fit_loop
        if loop._combined_loader is not None:
            loop._combined_loader.limits = None if isinstance(limit, float) else limit
        loop.max_batches = batches if isinstance(limit, float) else min(batches, limit)
        interval = trainer.val_check_interval
        if isinstance(interval, float) and trainer.val_check_batch != float("inf"):
            trainer.val_check_batch = max(1, int(loop.max_batches * interval))


class ConfiguredData(EpochData):
    """Data that leaves to a config what it was not given.

    Args:
        config: Until another comes.
        given: Settings by dotted path that hold whatever a config says.
    """

    def __init__(self, config: Config, given: Mapping[str, Any]) -> None:
        super().__init__()
        self._given = dict(given)
        self.config = config.replace(self._given)

    def use_config(self, config: Config) -> None:
        """Take from a config what was not given."""
        self.config = config.replace(self._given)

    def take_batches_of(self, batch_size: int) -> None:
        """Make batches of so many samples on each device, whatever was given before."""
        self._given["loader.batch_size"] = batch_size
        self.config = self.config.replace(self._given)

    @override
    def _validates(self) -> bool:
        self._use_committed()
        return self.config.data.validation_fraction > 0

    def _use_committed(self) -> None:
        """In a committed run, take its config; before anything is read."""
        found = self.committed
        if found is not None and self.config != found.replace(self._given):
            self.use_config(found)


def _no_config(given: object) -> ConfigError:
    """What to write in place of data that stands where the config does."""
    if isinstance(given, str | PathLike) and not fspath(given).endswith((".yaml", ".yml")):
        sizes = "'data.patch': {'time': 1, 'lat': 64, 'lon': 64}"
        how = f"kit.data.PatchData(kit.Config().replace({{'data.url': {redact(fspath(given))!r}, {sizes}}}))"
    elif isinstance(given, str | PathLike):
        how = f"kit.data.PatchData(kit.Config.load({fspath(given)!r}))"
    else:
        how = "kit.data.PatchData(config, data), where data.patch of the config says what a sample is"
    return ConfigError(f"PatchData takes a Config first, got {type(given).__name__}; write {how}")


class PatchData(EpochData):
    """Random, grid or block-shuffled patches of the store that `config.data` names, or of what is given instead.

    The store is opened in `setup`, in the process that trains, and checked there: what does not fit is a ConfigError
    before the first batch. World size and rank are the trainer's, or 1 and 0 without one.

    A batch is a dict of two tensors of shape (batch, variable, *dimensions of the store): `values`, float32, 0 for
    what is missing and standardized where `data.standardize` says so, and `valid`, bool. Variables are in the order of
    `data.variables`, or of the store.

    Args:
        config: Which samples, and how they are read.
        given: What to read instead of the store of the config: an xarray Dataset or DataArray, an open dataset, or
            another path or URL.

    Raises:
        ConfigError: for what is no Config, with how its place is given.
    """

    @checks_arguments
    def __init__(self, config: Config, given: Dataset | XarrayObject | str | PathLike[str] | None = None) -> None:
        super().__init__()
        first: Any = config  # by a user, who may give anything
        if not isinstance(first, Config):
            raise _no_config(first)
        self.config = config.replace({"data.url": fspath(given)}) if isinstance(given, str | PathLike) else config
        self.given: Dataset | XarrayObject | None = None if isinstance(given, str | PathLike) else given
        self.dataset: Dataset | None = None
        self.loader: PatchLoader | None = None
        self.validation_loader: PatchLoader | None = None
        self.test_loader: PatchLoader | None = None

    @override
    def setup(self, stage: str | None = None) -> None:
        self.dataset = self._open()

    @property
    @override
    def _contents(self) -> str:
        data = self.config.data
        patch = ", ".join(f"{name} {size}" for name, size in data.patch.items()) or "of size 1"
        place = redact(data.url) if self.given is None else f"a {type(self.given).__name__} that was given"
        return f"{data.order} patches {patch} of {place}, {self.config.loader.batch_size} in a batch"

    def _open(self) -> Dataset:
        if isinstance(self.given, Dataset):
            return replace(self.given, strict=self.given.strict or self.config.data.strict)
        return open_dataset(self.config if self.given is None else self.given)

    @override
    def train_dataloader(self) -> PatchLoader:
        """The batches of this rank.

        Raises:
            ConfigError: for what does not fit the store, each under the dotted path of its field.
            StoreError: when the store cannot be opened.
        """
        self._close()
        self.loader = self._patches(loader_settings(self.config)[0])
        self.loader.on_length = self._tell_length
        return self.loader

    @override
    def _validates(self) -> bool:
        return self.config.data.validation_fraction > 0

    @override
    def _validation_batches(self) -> PatchLoader:
        self.validation_loader = self._patches(loader_settings(self.config)[1], "validation")
        return self.validation_loader

    @override
    def test_dataloader(self) -> PatchLoader:
        """The patches of this rank that `data.test_fraction` keeps, the same at each call.

        Raises:
            ConfigError: where none are kept.
        """
        self.test_loader = self._patches(loader_settings(self.config)[1], "test")
        return self.test_loader

    def _patches(self, settings: Loader, part: Part = "train") -> PatchLoader:
        dataset = self.dataset = self.dataset or self._open()
        config, (world_size, rank) = self.config, self.ranks
        return PatchLoader(
            standardized_by(config, dataset), sample_plan(config, dataset, world_size, part=part), settings, rank=rank,
            variables=config.data.variables, standardize=config.data.standardize,
            coalescing=network_of(config).coalescing, read_cache=ReadCache.of(config.cache),
            whole_bytes=config.loader.memory_bytes,
        )  # fmt: skip
