"""PatchData: the data of a config as Lightning takes it; each rank reads its own part of every global batch."""

from __future__ import annotations

from lightning.pytorch import LightningDataModule
from typing_extensions import override

from kit.config import Config
from kit.data.dataset import Dataset, open_dataset
from kit.data.patches import PatchLoader
from kit.data.sampling import sample_plan


class PatchData(LightningDataModule):
    """Random or grid patches of the store that `config.data` names.

    The store is opened in `setup`, in the process that trains, and checked there: what does not fit is a ConfigError
    before the first batch. World size and rank are the trainer's, or 1 and 0 without one.
    """

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.dataset: Dataset | None = None
        self.loader: PatchLoader | None = None

    @override
    def setup(self, stage: str | None = None) -> None:
        self.dataset = open_dataset(self.config)

    @override
    def train_dataloader(self) -> PatchLoader:
        """The batches of this rank.

        Raises:
            ConfigError: for what does not fit the store, each under the dotted path of its field.
            StoreError: when the store cannot be opened.
        """
        dataset = self.dataset = self.dataset or open_dataset(self.config)
        world_size, rank = (self.trainer.world_size, self.trainer.global_rank) if self.trainer else (1, 0)
        self._close()
        self.loader = PatchLoader(
            dataset,
            sample_plan(self.config, dataset, world_size),
            self.config.loader,
            rank=rank,
            variables=self.config.data.variables,
            standardize=self.config.data.standardize,
        )
        return self.loader

    @override
    def teardown(self, stage: str | None = None) -> None:
        self._close()

    def _close(self) -> None:
        if self.loader is not None:
            self.loader.close()
