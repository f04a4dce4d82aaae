"""What a committed file runs with beside Lightning's own parts: the Config it was committed from, and kit's data.

`CommittedConfig` carries the Config in the file, as text that stock LightningCLI passes on untouched, and what `auto`
came to. It changes nothing in a fit but the threads that each rank computes with, where the config gives their number.
`kit.RowData` and `kit.EventData` take from it what the file does not name of their own (see `kit.data.epoch_data`).
`CommittedData` is `kit.PatchData` of that Config: it is written once in a file, and read from there by both.
"""

from __future__ import annotations

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from kit.config import Config
from kit.data.module import PatchData
from kit.data.patches import PatchLoader
from kit.errors import ConfigError, Problem

Resolved = dict[str, int | float | str | dict[str, int]]


class CommittedConfig(Callback):
    """Carries the Config of a committed run.

    Args:
        config: Its YAML.
        resolved: What settings left on `auto` came to, by dotted path.

    Raises:
        ConfigError: when that is no Config, or `resolved` does not fit it.
    """

    def __init__(self, config: str, resolved: Resolved | None = None) -> None:
        self.given = Config.from_yaml(config, "trainer.callbacks, CommittedConfig.config")
        self.committed = self.given.replace(resolved or {})
        """As it runs."""

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self.committed.hardware.threads_per_rank:
            torch.set_num_threads(self.committed.hardware.threads_per_rank)


class CommittedData(PatchData):
    """The patches that the committed Config names."""

    def __init__(self) -> None:
        super().__init__(Config())

    @override
    def setup(self, stage: str | None = None) -> None:
        self.config = self._config()
        super().setup(stage)

    @override
    def train_dataloader(self) -> PatchLoader:
        self.config = self._config()
        return super().train_dataloader()

    def _config(self) -> Config:
        found = self.committed
        if found is None:
            message = "CommittedData reads the config of kit.train.CommittedConfig, which is not among the callbacks"
            raise ConfigError([Problem("trainer.callbacks", message)])
        return found
