"""PatchData: the data of a config as Lightning takes it; each rank reads its own part of every global batch."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from typing_extensions import override

from kit.config import Config
from kit.data.dataset import Dataset, open_dataset
from kit.data.disk_cache import ReadCache
from kit.data.epoch_data import EpochData
from kit.data.patches import PatchLoader
from kit.data.sampling import sample_plan
from kit.plan.coalescing import Coalescing

if TYPE_CHECKING:
    from kit.data.dataset import XarrayObject


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
