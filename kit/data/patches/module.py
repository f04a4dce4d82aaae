"""EpochData: what the data modules of kit's own have in common: one loader, of this rank, that ends with the fit.

Settings that were not given to a `ConfiguredData` are a config's: the trial's where kit runs it (`use_config`), and in
a committed run that of its file, which `kit.train.CommittedConfig` carries among the callbacks of the Trainer. So a
file of three words trains with every setting that its trial had.

PatchData: the data of a config as Lightning takes it; each rank reads its own part of every global batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from lightning.pytorch import LightningDataModule
from typing_extensions import override

from kit.chunks.requests import Coalescing
from kit.config import Config
from kit.data.dataset import Dataset, open_dataset
from kit.data.patches.loader import EpochPasses, PatchLoader
from kit.data.sampling import sample_plan
from kit.data.stores.disk_cache import ReadCache

if TYPE_CHECKING:
    from kit.data.dataset import XarrayObject


class EpochData(LightningDataModule):
    """A loader that is made for each fit."""

    def __init__(self) -> None:
        super().__init__()
        self.loader: EpochPasses[Any] | None = None

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

    def _close(self) -> None:
        if self.loader is not None:
            self.loader.close()


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

    def _use_committed(self) -> None:
        """In a committed run, take its config; before anything is read."""
        found = self.committed
        if found is not None and self.config != found.replace(self._given):
            self.use_config(found)


class PatchData(EpochData):
    """Random, grid or block-shuffled patches of the store that `config.data` names, or of what is given instead.

    The store is opened in `setup`, in the process that trains, and checked there: what does not fit is a ConfigError
    before the first batch. World size and rank are the trainer's, or 1 and 0 without one.

    Args:
        config: Which samples, and how they are read.
        given: An xarray Dataset or DataArray, or an open dataset, to read instead of the store of the config.
    """

    def __init__(self, config: Config, given: Dataset | XarrayObject | None = None) -> None:
        super().__init__()
        self.config = config
        self.given = given
        self.dataset: Dataset | None = None
        self.loader: PatchLoader | None = None

    @override
    def setup(self, stage: str | None = None) -> None:
        self.dataset = self._open()

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
        dataset = self.dataset = self.dataset or self._open()
        world_size, rank = self.ranks
        self._close()
        self.loader = PatchLoader(
            dataset,
            sample_plan(self.config, dataset, world_size),
            self.config.loader,
            rank=rank,
            variables=self.config.data.variables,
            standardize=self.config.data.standardize,
            coalescing=_coalescing(self.config),
            read_cache=ReadCache.of(self.config.cache),
        )
        return self.loader


def _coalescing(config: Config) -> Coalescing:
    """What pays on the network that the config describes."""
    chunking, loader = config.chunking, config.loader
    return Coalescing.of(
        chunking.latency_seconds,
        chunking.bandwidth_bytes_per_second,
        chunking.total_bandwidth_bytes_per_second,
        loader.requests_in_flight,
    )
