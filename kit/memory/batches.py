"""Batches: what a user's loader yields, as shapes, at any batch size, with as little read as that takes.

A few samples are collated by the loader's own function, two, three and four at a time; what grows with their number is
known for any number then. Where samples differ in size, the longest is looked for within a time budget and every sample
of the batch is as long: a prediction that only holds for average data is none. What was looked at is said in `notes`.
The patches of a config are known from its source or store without reading a chunk, and rows from their array.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from kit.config import Config
from kit.data.dataset import open_dataset
from kit.data.module import PatchData
from kit.data.open_source import load_source
from kit.data.rows.module import RowData
from kit.errors import ConfigError, Problem
from kit.memory.batch_shapes import LARGEST_CONSTANT, Batches, TensorShape, describe
from kit.memory.samples import LOOK_SECONDS, largest_samples, within
from kit.units import format_bytes

_BATCHES = 8
_LARGEST_COLLATION_BYTES = 1 << 31


def look_at(loader: Any, batch_size: int | None = None) -> Batches:
    """What `loader` yields, at its own batch size or at another.

    Args:
        loader: A DataLoader or any iterable of batches.
        batch_size: Samples per batch; by default the loader's own.

    Raises:
        ConfigError: when there is no batch to look at, or it cannot be copied.
    """
    length = _length(loader)
    size = batch_size or own_batch_size(loader)
    if size is not None and isinstance(loader, DataLoader) and loader.batch_sampler is not None:
        found = _from_samples(loader, size)
    else:
        found = _from_batches(_batches_of(loader), batch_size)
    return replace(found, length=length)


def own_batch_size(loader: Any) -> int | None:
    """Of a loader whose batches all hold as many samples; None for any other."""
    sampler = getattr(loader, "batch_sampler", None)
    return sampler.batch_size if type(sampler) is BatchSampler else None


def _length(loader: Any) -> int | None:
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None


# -- a loader that collates samples


def _from_samples(loader: DataLoader[Any], size: int) -> Batches:
    samples = largest_samples(loader)
    collate: Callable[[list[Any]], Any] = loader.collate_fn
    few = len(samples.candidates)

    def collated(count: int) -> Batches:
        chosen = [*samples.candidates, *itertools.repeat(samples.candidates[0], max(0, count - few))]
        return describe(collate(chosen[:count] if count < few else chosen), count)

    if size <= few + 2:
        return replace(collated(size), notes=samples.notes)
    probes = [collated(few + extra) for extra in (0, 1, 2)] if few > 1 else [collated(count) for count in (2, 3, 4)]
    grown = _extrapolated(probes, size)
    if grown is None:
        grown = _collated_whole(collated, probes[0], size)
    return replace(grown, notes=samples.notes + grown.notes)


def _collated_whole(collated: Callable[[int], Batches], probe: Batches, size: int) -> Batches:
    """For a batch that does not simply grow with its samples: collate all of them, when they fit."""
    expected_bytes = probe.nbytes * size // probe.batch_size
    if expected_bytes > _LARGEST_COLLATION_BYTES:
        message = (
            f"a batch of {size} does not grow evenly with its samples, and to put it together would take "
            f"{format_bytes(expected_bytes)} (at most {format_bytes(_LARGEST_COLLATION_BYTES)}); predict a smaller one"
        )
        raise ConfigError([Problem("data", message)])
    return collated(size)


def _extrapolated(probes: Sequence[Batches], size: int) -> Batches | None:
    """The batch of `size` samples, or None when three sizes do not lie on a line or differ in more than tensors."""
    first, second, third = probes
    if not first.template == second.template == third.template:
        return None
    grown: list[TensorShape] = []
    for small, middle, large in zip(first.tensors, second.tensors, third.tensors, strict=True):
        if not len(small.shape) == len(middle.shape) == len(large.shape):
            return None
        steps = [b - a for a, b in zip(small.shape, middle.shape, strict=True)]
        if steps != [c - b for b, c in zip(middle.shape, large.shape, strict=True)]:
            return None
        more = size - first.batch_size
        shape = tuple(a + more * step for a, step in zip(small.shape, steps, strict=True))
        grown.append(TensorShape(shape, small.dtype, _repeated(small, middle, more)))
    return replace(first, tensors=tuple(grown), batch_size=size)


def _repeated(small: TensorShape, middle: TensorShape, more: int) -> Tensor | None:
    """Numbers of a grown vector: what the third sample added, again and again."""
    if small.values is None or middle.values is None or small.values.dim() != 1:
        return small.values if small.values is not None and small.values.dim() == 0 else None
    added = middle.values[len(small.values) :]
    count = len(small.values) + more * len(added)
    if count > LARGEST_CONSTANT:
        return None
    return torch.cat([small.values, added.repeat(more)])


# -- a loader that yields whole batches


def _batches_of(loader: Any) -> Iterator[Any]:
    """The batches of any iterable; those of a DataLoader without its processes."""
    if not isinstance(loader, DataLoader):
        return iter(loader)
    dataset: Any = loader.dataset
    if isinstance(dataset, IterableDataset):
        return (loader.collate_fn(batch) for batch in dataset)
    if loader.batch_sampler is None:
        return (loader.collate_fn(dataset[index]) for index in loader.sampler)
    return (loader.collate_fn([dataset[index] for index in indices]) for indices in loader.batch_sampler)


def _from_batches(batches: Iterator[Any], batch_size: int | None) -> Batches:
    looked = [describe(batch) for batch in within(batches, _BATCHES, LOOK_SECONDS)]
    if isinstance(batches, Generator):
        batches.close()  # it may hold threads or files
    if not looked:
        raise ConfigError([Problem("data", "the loader yields no batch; there must be one to look at")])
    found = _elementwise_largest(looked)
    if batch_size is None or batch_size == found.batch_size:
        return found
    note = f"the loader makes whole batches of {found.batch_size}: sizes of {found.batch_size} were taken for its own"
    tensors = tuple(_rescaled(item, found.batch_size, batch_size) for item in found.tensors)
    return replace(found, tensors=tensors, batch_size=batch_size, notes=(*found.notes, note))


def _elementwise_largest(looked: Sequence[Batches]) -> Batches:
    """The largest batch, each of its parts as large as in any batch like it."""
    if len({tuple(item.shape for item in batch.tensors) for batch in looked}) == 1:
        return looked[0]
    largest = max(looked, key=lambda batch: batch.nbytes)
    alike = [batch for batch in looked if _ranks(batch) == _ranks(largest)]
    shapes = [tuple(map(max, zip(*sizes, strict=True))) for sizes in _columns(alike)]
    tensors = tuple(
        item if item.shape == shape else TensorShape(shape, item.dtype)
        for item, shape in zip(largest.tensors, shapes, strict=True)
    )
    note = f"batches differ in size: each part is as large as the largest of {len(looked)} batches"
    return replace(largest, tensors=tensors, batch_size=max(batch.batch_size for batch in alike), notes=(note,))


def _ranks(batch: Batches) -> list[int]:
    return [len(item.shape) for item in batch.tensors]


def _columns(batches: Sequence[Batches]) -> list[list[tuple[int, ...]]]:
    rows = [[item.shape for item in batch.tensors] for batch in batches]
    return [list(column) for column in zip(*rows, strict=True)]


def _rescaled(item: TensorShape, own: int, wanted: int) -> TensorShape:
    if not item.shape or item.shape[0] != own:
        return item
    return TensorShape((wanted, *item.shape[1:]), item.dtype)


# -- the patches of a config


def patch_batches(config: Config, batch_size: int | None = None) -> Batches:
    """The batches of `PatchData(config)`, from what its source or store declares; no chunk is read.

    Raises:
        ConfigError: for what does not fit the data, each under the dotted path of its field.
        StoreError: when there is no source and the store cannot be opened.
    """
    dims, shape, variables = _patch_geometry(config)
    unknown = [name for name in config.data.patch if name not in dims]
    if unknown:
        message = f"no dimension {', '.join(unknown)}; there are {', '.join(dims)}"
        raise ConfigError([Problem("data.patch", message)])
    patch = tuple(config.data.patch.get(name, 1) for name in dims)
    large = [f"{name} {size} > {whole}" for name, size, whole in zip(dims, patch, shape, strict=True) if size > whole]
    if large:
        raise ConfigError([Problem("data.patch", f"larger than the data: {', '.join(large)}")])
    size = batch_size or config.loader.batch_size
    meta = (size, variables, *patch)
    batch = {
        "values": torch.empty(meta, device="meta"),
        "valid": torch.empty(meta, dtype=torch.bool, device="meta"),
    }
    return replace(describe(batch, size), length=1)


def _patch_geometry(config: Config) -> tuple[tuple[str, ...], tuple[int, ...], int]:
    """Dimensions, their sizes, and the number of variables."""
    if config.data.source is None:
        chosen = open_dataset(config).select(config.data.variables)
        return chosen[0].dims, chosen[0].shape, len(chosen)
    source = load_source(config)
    unknown = [name for name in config.data.variables if name not in source.variables]
    if unknown:
        message = f"the source has no {', '.join(unknown)}; it has {', '.join(source.variables)}"
        raise ConfigError([Problem("data.variables", message)])
    return tuple(source.dims), tuple(source.shape), len(config.data.variables or source.variables)


def row_batches(data: RowData, batch_size: int | None = None) -> Batches:
    """The batches of rows, from the shape of their array; no row is read.

    Raises:
        ConfigError: when an epoch of one rank has no such batch.
    """
    size = batch_size or data.config.loader.batch_size
    values = torch.empty((size, *data.shape[1:]), dtype=data.rows.dtype, device="meta")
    return replace(describe((values, torch.arange(size)), size), length=1)


# -- what Trainer.fit takes


class FakeLoader:
    """Yields batches of shapes, as many as are asked for."""

    def __init__(self, batches: Batches, make: Callable[[Batches], Any]) -> None:
        self.batches = batches
        self._make = make

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield self._make(self.batches)


class SizedFakeLoader(FakeLoader):
    """A FakeLoader that says how long an epoch is."""

    def __len__(self) -> int:
        return self.batches.length or 0


def fake_loaders(
    loaders: Any, batch_size: int | None, make: Callable[[Batches], Any], fewest: int, looked: list[Batches]
) -> Any:
    """The same loader, list, dict or CombinedLoader of loaders, of fake batches.

    Args:
        loaders: Loaders, or Batches in place of one.
        batch_size: Samples per batch; by default the loader's own.
        make: Turns Batches into the next batch.
        fewest: Batches an epoch is made to have at least, where it has an end.
        looked: What the loaders yield is added here.
    """
    if isinstance(loaders, CombinedLoader):
        inner = fake_loaders(loaders.iterables, batch_size, make, fewest, looked)
        return CombinedLoader(inner, loaders._mode)
    if isinstance(loaders, Mapping):
        return {name: fake_loaders(loader, batch_size, make, fewest, looked) for name, loader in loaders.items()}
    if isinstance(loaders, list | tuple):
        return [fake_loaders(loader, batch_size, make, fewest, looked) for loader in loaders]
    batches = loaders if isinstance(loaders, Batches) else look_at(loaders, batch_size)
    if batches.length is not None:
        batches = replace(batches, length=max(batches.length, fewest))
    looked.append(batches)
    return FakeLoader(batches, make) if batches.length is None else SizedFakeLoader(batches, make)


def loaders_of(data: Mapping[str, Any], batch_size: int | None) -> Any:
    """The training loaders of what `Trainer.fit` takes; their batches where these are known without a loader."""
    module = data.get("datamodule")
    if module is None:
        return data["train_dataloaders"]
    if _is_plain_patch_data(module):
        return patch_batches(module.config, batch_size)
    if isinstance(module, RowData) and type(module).train_dataloader is RowData.train_dataloader:
        return row_batches(module, batch_size)
    module.prepare_data()
    module.setup("fit")
    return module.train_dataloader()


def _is_plain_patch_data(module: LightningDataModule) -> bool:
    return isinstance(module, PatchData) and type(module).train_dataloader is PatchData.train_dataloader
