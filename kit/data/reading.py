"""What reading one sample of a store should cost, to stand beside what it did.

Requests are those that bring the expected chunks of a batch over all variables, divided by its samples
(`kit.plan.cost`): each chunk of a batch is fetched once, and neighbours in a shard share a request where that pays.
Bytes are what those requests ask for, by the store's own ratio of stored to uncompressed bytes, known only for a store
that kit built. Not counted in either: the index of each shard (one request a shard, once), that batches on their way at
the same time share chunks, and that chunks of smooth fields compress better than those of rough ones."""

from __future__ import annotations

from itertools import groupby

from kit.config import Config
from kit.data.dataset import ArrayInfo, Dataset
from kit.data.layout import host_of, network_of, pattern_of, stored_fraction
from kit.plan.access import Access
from kit.plan.cost import LayoutCost, price


def predict_reading(config: Config, dataset: Dataset) -> dict[str, float]:
    """`requests_per_sample` and, where the store tells, `bytes_per_sample`.

    Raises:
        PlanError: for a patch that does not fit the data.
        ConfigError: for variables that do not exist.
    """
    costs, samples = price_store(config, dataset), config.loader.batch_size
    answer = {"requests_per_sample": sum(cost.sent_per_batch for cost in costs) / samples}
    if stored_fraction(dataset) is not None:
        answer["bytes_per_sample"] = sum(cost.sent_bytes_per_batch for cost in costs) / samples
    return answer


def price_store(config: Config, dataset: Dataset) -> tuple[LayoutCost, ...]:
    """The store as it is cut, priced with the config's network and host: one cost for all variables cut alike.

    Most stores give one. Of several, requests, bytes and seconds add up: each is priced as if it had the host alone.

    Raises:
        PlanError: for a patch that does not fit the data.
        ConfigError: for variables that do not exist.
    """
    arrays = sorted(dataset.select(config.data.variables), key=_cut)
    groups = [list(alike) for _, alike in groupby(arrays, key=_cut)]
    stored = stored_fraction(dataset)
    ratio = 1 / stored if stored else config.chunking.compression_ratio or 1.0
    return tuple(_price(config, alike[0], len(alike), ratio) for alike in groups)


def _cut(info: ArrayInfo) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    return info.chunk, info.shard or (), info.dtype.itemsize


def _price(config: Config, info: ArrayInfo, variables: int, compression_ratio: float) -> LayoutCost:
    data = config.data
    patch = tuple(data.patch.get(name, 1) for name in info.dims)
    default = patch if data.order == "grid" else (1,) * len(patch)
    access = Access(
        shape=info.shape, itemsize=info.dtype.itemsize, patch=patch, order=data.order, variables=variables,
        stride=tuple(data.stride.get(name, side) for name, side in zip(info.dims, default, strict=True)),
        batch_size=config.loader.batch_size, compression_ratio=compression_ratio, **pattern_of(config),
    )  # fmt: skip
    return price(access, network_of(config), info.chunk, host_of(config), shard=info.shard, closely=True)
