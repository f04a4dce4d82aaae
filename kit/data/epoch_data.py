"""EpochData: what the data modules of kit's own have in common: one loader, of this rank, that ends with the fit.

Settings that were not given to a `ConfiguredData` are a config's: the trial's where kit runs it (`use_config`), and in
a committed run that of its file, which `kit.train.CommittedConfig` carries among the callbacks of the Trainer. So a
file of three words trains with every setting that its trial had.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning.pytorch import LightningDataModule
from typing_extensions import override

from kit.config import Config
from kit.data.epoch_passes import EpochPasses


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
