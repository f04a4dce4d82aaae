"""Batches: what a user's loader yields, as shapes, at any batch size, with as little read as that takes.

A few samples are collated by the loader's own function, two, three and four at a time; what grows with their number is
then known for any number. A few samples from all over the data set show whether they differ in size. Where they do, as
many as a time budget allows are looked at, and every sample of the batch is taken as long as the longest: a prediction
that holds for average data only is useless. What was looked at is said in `notes`. The patches of a config are known
from its source or store without reading a chunk, and rows from their array.

A batch is kept pickled, with a number in place of each tensor, so that any object that a loader can send between
processes (a dict, a named tuple, a batch class) can be made again at will. The pickle is written and read in this
process only. Numbers in small integer vectors are kept, because lengths and counts decide shapes.
"""

from __future__ import annotations

import io
import itertools
import math
import pickle
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import cloudpickle
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.nn.utils.rnn import PackedSequence
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler

from kit.config import Config
from kit.data.build.open_source import load_source
from kit.data.open_dataset import open_dataset
from kit.data.patches.module import EpochData, PatchData
from kit.data.rows.loader import RowData
from kit.errors import ConfigError, Problem, first_line
from kit.memory.record.samples import (
    AS_LONG,
    ENDLESS,
    FIRST_SAMPLES,
    LOOK_SECONDS,
    SCAN_SECONDS,
    SEVERAL_LENGTHS,
    Samples,
    largest_samples,
    spread_over,
    within,
)
from kit.memory.record.truth import SPARSE_LAYOUTS
from kit.memory.record.value_sizes import note_bounds
from kit.memory.replay.replay import DIFFERING, ON_AVERAGE
from kit.units import format_bytes

_BATCHES, _MOST_BATCHES = 8, 1000
_TRADED, _NEARLY = 1.25, 0.9
"""How much larger than any batch its largest parts together are where samples are traded for their length, and what
counts as nearly the largest."""
_LARGEST_COLLATION_BYTES = 1 << 31


def look_at(loader: Any, batch_size: int | None = None) -> Batches:
    """What `loader` (a DataLoader or any iterable of batches) yields, at its own batch size or at another.

    Raises:
        ConfigError: when there is no batch to look at, or it cannot be copied.
    """
    size = batch_size or own_batch_size(loader)
    if size is not None and isinstance(loader, DataLoader) and loader.batch_sampler is not None:
        if own_batch_size(loader) is None:
            _refuse_another_size(_from_batches(loader, None))
        found = _from_samples(loader, size)
    else:
        found = _from_batches(loader, batch_size)
    try:
        length = len(loader)
    except (TypeError, NotImplementedError):
        return found
    each = own_batch_size(loader) or found.mean_samples or found.batch_size
    return replace(found, length=length, epoch_samples=round(length * each))


def _refuse_another_size(found: Batches) -> None:
    if found.mean_samples is not None:
        decides = "its batch sampler puts fewer samples in a batch the longer they are, so no batch size can be asked"
        message = f"{decides}; kit.predict_memory tells what the largest of its batches needs"
        raise ConfigError([Problem("data", message)])


def look_for_real(loader: Any, batch_size: int | None = None) -> Batches:
    """The same with the numbers of real samples, for a step that is run for real: its first ones where all are of one
    size, else the longest again and again. Of a loader that makes whole batches, the beginning of the first.

    Raises:
        ConfigError: when there is no batch to look at, or it cannot be copied.
    """
    size = batch_size or own_batch_size(loader)
    if size is not None and isinstance(loader, DataLoader) and loader.batch_sampler is not None:
        found = _collatable(loader, size)
        chosen = list(itertools.islice(itertools.cycle(found.candidates), size))
        if not found.notes:  # all of one size: then as different as they are
            first = [sample for _, sample in within(spread_over(loader), size, LOOK_SECONDS)]
            chosen[: len(first)] = first
        batches = replace(describe(loader.collate_fn(chosen), size, whole=True), notes=found.notes)
    else:
        batches = describe(next(iter(_batches_of(loader))), whole=True)
        own = batches.batch_size
        if batch_size is not None and batch_size < own:
            cut = tuple(item.first(batch_size) if item.shape[:1] == (own,) else item for item in batches.tensors)
            batches = replace(batches, tensors=cut, batch_size=batch_size)
    try:
        return replace(batches, length=len(loader))
    except (TypeError, NotImplementedError):
        return batches


def own_batch_size(loader: Any) -> int | None:
    """Of a loader whose batches all hold as many samples; None for any other."""
    sampler = getattr(loader, "batch_sampler", None)
    return sampler.batch_size if type(sampler) is BatchSampler else None


# -- a loader that collates samples


def _from_samples(loader: DataLoader[Any], size: int) -> Batches:
    samples = _collatable(loader, size)
    collate: Callable[[list[Any]], Any] = loader.collate_fn
    few = len(samples.candidates)

    def collated(count: int) -> Batches:
        chosen = [*samples.candidates, *itertools.repeat(samples.candidates[0], max(0, count - few))]
        return describe(collate(chosen[:count] if count < few else chosen), count)

    if size <= few + 2:
        found = _of_several_lengths(replace(collated(size), notes=samples.notes), samples, loader)
        return _ones_kept(found, _singly(loader))
    probes = [collated(few + extra) for extra in (0, 1, 2)] if few > 1 else [collated(count) for count in (2, 3, 4)]
    grown = _extrapolated(probes, size)
    if grown is None:  # the batch does not simply grow with its samples: collate all of them, when they fit
        expected_bytes = probes[0].nbytes * size // probes[0].batch_size
        if expected_bytes > _LARGEST_COLLATION_BYTES:
            message = (
                f"a batch of {size} does not grow evenly with its samples, and to put it together would take "
                f"{format_bytes(expected_bytes)} (at most {format_bytes(_LARGEST_COLLATION_BYTES)}); predict a smaller "
                "one"
            )
            raise ConfigError([Problem("data", message)])
        grown = collated(size)
    grown = _of_several_lengths(replace(grown, notes=samples.notes + grown.notes), samples, loader)
    return _ones_kept(grown, _singly(loader))


def _of_several_lengths(found: Batches, samples: Samples, loader: DataLoader[Any]) -> Batches:
    """`found`, a batch of the longest samples, with the numbers of one that is as wide and holds shorter ones too: what
    packs its sequences holds as much as these say."""
    if not samples.fullest or not any(item.values is not None and item.values.dim() for item in found.tensors):
        return found
    dataset: Any = loader.dataset
    shorter = samples.fullest[len(samples.candidates) :]  # instead of its longest stand the longest of all
    others = itertools.cycle(within((dataset[index] for index in shorter), found.batch_size, SCAN_SECONDS))
    chosen = list(itertools.islice(itertools.chain(samples.candidates, others), found.batch_size))
    try:
        mixed = describe(loader.collate_fn(chosen), found.batch_size)
    except Exception:  # the loader's own function takes like samples only
        return found
    if _shapes_of(mixed) != _shapes_of(found):
        return found
    told = found.notes[0].replace(AS_LONG, "all are padded to ") + SEVERAL_LENGTHS
    return replace(mixed, notes=(told, *found.notes[1:]))


def _singly(loader: DataLoader[Any]) -> Iterator[Batches]:
    """Samples from all over the data set, each as a batch."""
    for _, sample in within(spread_over(loader), FIRST_SAMPLES, LOOK_SECONDS):
        yield describe(loader.collate_fn([sample]))


def _ones_kept(found: Batches, looked: Iterable[Batches]) -> Batches:
    """`found`, of whose tensors of ones those stay known that are of ones in every batch of `looked` too: none where
    sizes differ, since shorter samples are padded and masked."""
    known = [item.is_ones and not found.notes for item in found.tensors]
    if any(known):
        try:
            for batch in looked:
                known = [one and item.is_ones for one, item in zip(known, batch.tensors, strict=True)]
        except Exception:  # the loader's own function may take no fewer than a batch
            known = [False] * len(known)
    tensors = tuple(replace(item, is_ones=one) for item, one in zip(found.tensors, known, strict=True))
    return replace(found, tensors=tensors)


def _collatable(loader: DataLoader[Any], size: int) -> Samples:
    """The largest samples.

    Raises:
        ConfigError: when the loader's own function cannot collate two unlike ones and batches have such: they are
            drawn at random, or the first one does. Another sampler may put like ones together, which is then a note.
    """
    samples = largest_samples(loader, size)
    share = samples.mean_fraction if size == 1 else samples.padded_fraction
    if samples.unlike and size > 1:
        try:
            both = describe(loader.collate_fn(list(samples.unlike)))
        except Exception as error:
            cause = f"{type(error).__name__}: {first_line(error)}"
            told = f"samples that differ in size fit no batch ({cause})"
            if type(loader.sampler) is RandomSampler or _first_fails(loader, size):
                message = f"{told}; give the DataLoader a collate_fn that pads them, or make them of one size"
                raise ConfigError([Problem("data", message)]) from error
            samples = replace(samples, notes=(*samples.notes, f"{told}: batches were taken to be of one size"))
        else:
            if _lie_in_a_row(both, loader.collate_fn, samples.unlike):
                share = samples.mean_fraction
    if not samples.unlike:
        return samples
    return replace(samples, notes=(samples.notes[0] + ON_AVERAGE.format(share), *samples.notes[1:]))


def _first_fails(loader: DataLoader[Any], size: int) -> bool:
    """Whether the first batch of a loader that goes through its data in order is one that cannot be put together."""
    if type(loader.sampler) is not SequentialSampler or isinstance(loader.dataset, IterableDataset):
        return False
    dataset: Any = loader.dataset
    try:
        loader.collate_fn([dataset[index] for index in range(min(size, len(dataset)))])
    except Exception:
        return True
    return False


def _lie_in_a_row(both: Batches, collate: Callable[[list[Any]], Any], unlike: Sequence[Any]) -> bool:
    """Whether a batch of the largest and the smallest sample holds as much as the two, as of graphs, rather than twice
    the larger, to which the other is padded; False where one sample makes no batch."""

    def numbers(batch: Batches) -> int:
        return sum(math.prod(item.shape) for item in batch.tensors)

    try:
        large, small = (numbers(describe(collate([sample]))) for sample in unlike)
    except Exception:
        return False
    return abs(numbers(both) - large - small) < abs(numbers(both) - 2 * large)


def _extrapolated(probes: Sequence[Batches], size: int) -> Batches | None:
    """The batch of `size` samples, or None when three sizes do not lie on a line or differ in more than tensors."""
    first, second, third = probes
    if not first.template == second.template == third.template:
        return None
    more = size - first.batch_size
    grown: list[TensorShape] = []
    for small, middle, large in zip(first.tensors, second.tensors, third.tensors, strict=True):
        if not len(small.shape) == len(middle.shape) == len(large.shape):
            return None
        steps = [b - a for a, b in zip(small.shape, middle.shape, strict=True)]
        if steps != [c - b for b, c in zip(middle.shape, large.shape, strict=True)]:
            return None
        values = small.values
        if values is not None and values.dim():
            # Numbers of a grown vector: what the third sample added, again and again.
            added = None if middle.values is None else middle.values[len(values) :]
            fits = added is not None and len(values) + more * len(added) <= LARGEST_CONSTANT
            values = torch.cat([values, added.repeat(more)]) if fits and added is not None else None
        shape = tuple(a + more * step for a, step in zip(small.shape, steps, strict=True))
        grown.append(TensorShape(shape, small.dtype, values, small.is_ones and middle.is_ones and large.is_ones))
    return replace(first, tensors=tuple(grown), batch_size=size)


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


def _from_batches(loader: Any, batch_size: int | None) -> Batches:
    batches = _batches_of(loader)
    looked = [describe(batch) for batch in within(batches, _BATCHES, LOOK_SECONDS)]
    if len(looked) == _BATCHES and len({_shapes_of(batch) for batch in looked}) > 1:
        looked += [describe(batch) for batch in within(batches, _MOST_BATCHES, SCAN_SECONDS)]
    if isinstance(batches, Generator):
        batches.close()  # it may hold threads or files
    if not looked:
        raise ConfigError([Problem("data", "the loader yields no batch; there must be one to look at")])
    found = _ones_kept(_elementwise_largest(looked), looked)
    own = found.batch_size
    if batch_size is None or batch_size == own:
        return found
    tensors = tuple(
        replace(item, shape=(batch_size, *item.shape[1:]), values=None) if item.shape[:1] == (own,) else item
        for item in found.tensors
    )
    note = f"the loader makes whole batches of {own}: sizes of {own} were taken for its own"
    return replace(found, tensors=tensors, batch_size=batch_size, notes=(*found.notes, note))


def _shapes_of(batch: Batches) -> tuple[tuple[int, ...], ...]:
    return tuple(item.shape for item in batch.tensors)


def _elementwise_largest(looked: Sequence[Batches]) -> Batches:
    """The largest batch, each of its parts as large as in any batch like it, unless that would be none that there is:
    where a batch holds fewer samples the longer they are."""
    shapes = [_shapes_of(batch) for batch in looked]
    if len(set(shapes)) == 1:
        return looked[0]
    largest = max(looked, key=lambda batch: batch.nbytes)
    ranks = [len(item.shape) for item in largest.tensors]
    alike = [batch for batch, sizes in zip(looked, shapes, strict=True) if [*map(len, sizes)] == ranks]
    columns = zip(*(batch.tensors for batch in alike), strict=True)
    most = [tuple(map(max, zip(*(item.shape for item in column), strict=True))) for column in columns]
    tensors = tuple(
        item if item.shape == shape else TensorShape(shape, item.dtype)
        for item, shape in zip(largest.tensors, most, strict=True)
    )
    found = replace(largest, tensors=tensors, batch_size=max(batch.batch_size for batch in alike))
    if found.nbytes > _TRADED * largest.nbytes and len({batch.batch_size for batch in alike}) > 1:
        return _longest_of(alike, sum(batch.batch_size for batch in looked) / len(looked))
    note = f"{DIFFERING[1]}each part is as large as the largest of {len(looked)} batches"
    return replace(found, notes=(note,))


def _longest_of(looked: Sequence[Batches], mean: float) -> Batches:
    """Of the batches that are nearly as large as any, the one of the longest samples, whose attention holds most."""
    least = _NEARLY * max(batch.nbytes for batch in looked)
    found = max(
        (batch for batch in looked if batch.nbytes >= least),
        key=lambda batch: max((max(item.shape[1:], default=0) for item in batch.tensors), default=0),
    )
    counts = [batch.batch_size for batch in looked]
    note = (
        f"{DIFFERING[1]}{min(counts)} to {max(counts)} samples, fewer where they are longer; the step is that of the "
        f"longest of the largest of {len(looked)} batches, and speed counts the mean of {mean:.3g} samples"
    )
    return replace(found, notes=(note,), mean_samples=mean)


# -- the patches of a config


def patch_batches(config: Config, batch_size: int | None = None) -> Batches:
    """The batches of `PatchData(config)`, from what its source or store declares; no chunk is read.

    Raises:
        ConfigError: for what does not fit the data, each under the dotted path of its field.
        StoreError: when there is no source and the store cannot be opened.
    """
    if config.data.source is None:
        chosen = open_dataset(config).select(config.data.variables)
        dims, shape, variables = chosen[0].dims, chosen[0].shape, len(chosen)
    else:
        source = load_source(config)
        unknown = [name for name in config.data.variables if name not in source.variables]
        if unknown:
            message = f"the source has no {', '.join(unknown)}; it has {', '.join(source.variables)}"
            raise ConfigError([Problem("data.variables", message)])
        dims, shape = tuple(source.dims), tuple(source.shape)
        variables = len(config.data.variables or source.variables)
    unknown = [name for name in config.data.patch if name not in dims]
    if unknown:
        message = f"no dimension {', '.join(unknown)}; there are {', '.join(dims)}"
        raise ConfigError([Problem("data.patch", message)])
    patch = tuple(config.data.patch.get(name, 1) for name in dims)
    large = [f"{name} {size} > {whole}" for name, size, whole in zip(dims, patch, shape, strict=True) if size > whole]
    if large:
        raise ConfigError([Problem("data.patch", f"larger than the data: {', '.join(large)}")])
    size = batch_size or config.loader.batch_size
    values = torch.empty((size, variables, *patch), device="meta")
    found = describe({"values": values, "valid": values.bool()}, size)
    return replace(found, length=1, epoch_samples=config.data.samples_per_epoch)


def row_batches(data: RowData, batch_size: int | None = None) -> Batches:
    """The batches of rows, from the shape of their array; no row is read.

    Raises:
        ConfigError: when an epoch of one rank has no such batch.
    """
    size = batch_size or data.config.loader.batch_size
    values = torch.empty((size, *data.shape[1:]), dtype=data.rows.dtype, device="meta")
    found = describe((values, torch.arange(size)), size)
    return replace(found, length=1, epoch_samples=data.config.data.samples_per_epoch)


# -- what Trainer.fit takes

Ends = Callable[[list[int]], bool]


class FakeLoader:
    """Yields batches of shapes, as many as are asked for, or until `ends` says so of what was held before each."""

    def __init__(self, batches: Batches, make: Callable[[Batches], Any], ends: Ends | None = None) -> None:
        self.batches = batches
        self._make, self._ends = make, ends

    def __iter__(self) -> Iterator[Any]:
        held_bytes: list[int] = []
        while self._ends is None or not self._ends(held_bytes):
            yield self._make(self.batches)


class SizedFakeLoader(FakeLoader):
    """A FakeLoader that says how long an epoch is."""

    def __len__(self) -> int:
        return self.batches.length or 0


def fake_loaders(
    loaders: Any, batch_size: int | None, make: Callable[[Batches], Any], fewest: int, looked: list[Batches],
    ends: Ends | None = None, look: Callable[[Any, int | None], Batches] = look_at,
) -> Any:  # fmt: skip
    """The same loader, list, dict or CombinedLoader of loaders, of fake batches.

    `make` turns Batches into the next batch, an epoch that ends has at least `fewest`, and the Batches of each loader,
    which `look` finds, are added to `looked`; `ends` is for each FakeLoader.
    """

    def inside(loader: Any) -> Any:
        return fake_loaders(loader, batch_size, make, fewest, looked, ends, look)

    if isinstance(loaders, CombinedLoader):
        return CombinedLoader(inside(loaders.iterables), loaders._mode)
    if isinstance(loaders, Mapping):
        return {name: inside(loader) for name, loader in loaders.items()}
    if isinstance(loaders, list | tuple):
        return [inside(loader) for loader in loaders]
    batches = loaders if isinstance(loaders, Batches) else look(loaders, batch_size)
    if batches.length is not None:
        batches = replace(batches, length=max(batches.length, fewest))
    looked.append(batches)
    return (FakeLoader if batches.length is None else SizedFakeLoader)(batches, make, ends)


def loaders_of(data: Mapping[str, Any], batch_size: int | None) -> Any:
    """The training loaders of what `Trainer.fit` takes; their batches where these are known without a loader."""
    module = data.get("datamodule")
    if module is None:
        return data["train_dataloaders"]
    if (known := _known_batches(module, "train_dataloader", batch_size)) is not None:
        return known
    module.prepare_data()
    module.setup("fit")
    return module.train_dataloader()


def _known_batches(module: Any, hook: str, batch_size: int | None) -> Batches | None:
    """Those of kit's own data, unless a class of the user's makes its loaders."""
    if isinstance(module, PatchData) and getattr(type(module), hook) is getattr(PatchData, hook):
        return patch_batches(module.config, batch_size)
    if isinstance(module, RowData) and getattr(type(module), hook) is getattr(RowData, hook):
        return row_batches(module, batch_size)
    return None


def evaluation_loaders_of(what: str, source: Any, make: Callable[[], Any], batch_size: int | None) -> Any:
    """What a data module or a module is validated or tested on: what `make` makes, or batches known without it."""
    is_kits = isinstance(source, EpochData)
    if what == "validation":
        is_kits = is_kits and type(source).val_dataloader is EpochData.val_dataloader
    hook = {"validation": "_validation_batches", "test": "test_dataloader"}.get(what, "")
    known = _known_batches(source, hook, batch_size) if is_kits and hook else None
    # How many there are is not known before the data is opened; a trial takes so many as `trial` says.
    return make() if known is None else replace(known, length=ENDLESS)


LARGEST_CONSTANT = 4096
"""Elements of an integer vector whose numbers are kept."""


@dataclass(frozen=True)
class TensorShape:
    """A tensor of a batch: (sizes), dtype, and its numbers where they are few and whole, or where all are kept."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    values: Tensor | None = None
    is_ones: bool = False
    """Whether all its numbers are 1, as of a mask that hides nothing, in every batch that was looked at."""

    def make(self) -> Tensor:
        """A tensor of this shape: fake where fake tensors are made, else with the numbers kept, or random ones."""
        made = torch.empty(self.shape, dtype=self.dtype)
        if not isinstance(made, FakeTensor):
            if self.values is not None:
                return made.copy_(self.values)
            if self.dtype.is_floating_point:
                return made.normal_()
            return made.fill_(self.is_ones or self.dtype is torch.bool)
        if self.values is not None:
            with unset_fake_temporarily():
                values = self.values.clone()  # for code that writes to its batch
            converter = made.fake_mode.fake_tensor_converter
            made.constant = values
            converter.set_tensor_memo(values, made)
            converter.add_constant_storage_mapping(made)
        elif self.is_ones:
            note_bounds(made, 1, 1)
        return made

    def first(self, count: int) -> TensorShape:
        """The same for the first samples alone."""
        values = None if self.values is None else self.values[:count]
        return replace(self, shape=(count, *self.shape[1:]), values=values)


@dataclass(frozen=True)
class Batches:
    """What one loader yields again and again."""

    template: bytes
    """A batch, pickled, with a number for each tensor."""
    tensors: tuple[TensorShape, ...]
    batch_size: int
    length: int | None = None
    """Batches in an epoch, or None when the loader does not say (then Lightning keeps one more in hand)."""
    epoch_samples: int | None = None
    """Samples in an epoch of all ranks, by the loader or by kit's config; None when neither says."""
    notes: tuple[str, ...] = ()
    mean_samples: float | None = None
    """Of a batch, where batches hold fewer samples the longer they are, and `batch_size` is of one of them."""

    def make(self) -> tuple[Any, list[Tensor]]:
        """A new batch, and the new tensors in it."""
        tensors = [shape.make() for shape in self.tensors]
        return StandInReader(io.BytesIO(self.template), tensors).load(), tensors

    @property
    def nbytes(self) -> int:
        return sum(torch.Size(item.shape).numel() * item.dtype.itemsize for item in self.tensors)


class Writer(cloudpickle.Pickler):  # type: ignore[misc]
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.tensors: list[Tensor] = []
        self._numbers: dict[int, int] = {}

    def persistent_id(self, value: Any) -> int | None:
        if not isinstance(value, Tensor) or value.layout in SPARSE_LAYOUTS:  # of a sparse one its parts are numbered
            return None
        number = self._numbers.setdefault(id(value), len(self.tensors))
        if number == len(self.tensors):
            self.tensors.append(value)
        return number


class StandInReader(pickle.Unpickler):
    """Reads what `Writer` wrote in this process, never a file."""

    def __init__(self, file: io.BytesIO, tensors: Sequence[Tensor]) -> None:
        super().__init__(file)
        self.tensors = tensors

    def persistent_load(self, number: Any) -> Any:
        return self.tensors[number]


def describe(batch: Any, batch_size: int | None = None, whole: bool = False) -> Batches:
    """The shapes of one batch that a loader yields, and all its numbers if it is kept `whole`; `batch_size` is by
    default what `samples_in` finds.

    Raises:
        ConfigError: for a batch that cannot be pickled, as loaders with processes need it too.
    """
    file = io.BytesIO()
    writer = Writer(file)
    try:
        writer.dump(batch)
    except Exception as error:
        message = f"a batch of type {type(batch).__name__} cannot be copied: {error}"
        raise ConfigError([Problem("data", message)]) from error
    tensors = tuple(
        TensorShape(
            tuple(tensor.shape), tensor.dtype, tensor.detach().clone() if whole or _is_small_count(tensor) else None,
            _is_of_ones(tensor),
        )
        for tensor in writer.tensors
    )  # fmt: skip
    if batch_size is None:
        batch_size = samples_in(batch) or next((item.shape[0] for item in tensors if item.shape), 1)
    return Batches(file.getvalue(), tensors, batch_size)


def samples_in(batch: Any) -> int | None:
    """Samples in a batch: what it says of itself, else the length of the first tensor or array in it; None for none."""
    if isinstance(batch, PackedSequence):
        return int(batch.batch_sizes[0])
    if isinstance(batch, str | bytes | int | float | type(None)):
        return None
    if isinstance(shape := getattr(batch, "shape", None), Sequence):
        return int(shape[0]) if len(shape) else None
    if isinstance(batch, Mapping):
        parts: Any = batch.values()
    elif isinstance(batch, list | tuple):
        parts = batch
    else:
        said = getattr(batch, "batch_size", None)  # a batch of graphs, a dict of tensors
        if isinstance(said, int) and said > 0:
            return said
        if isinstance(said, Sequence) and said:
            return int(said[0])
        parts = getattr(batch, "__dict__", {}).values()
    return next((size for size in map(samples_in, parts) if size is not None), None)


def _is_small_count(tensor: Tensor) -> bool:
    whole = tensor.dtype in (torch.int64, torch.int32, torch.bool)
    return whole and tensor.numel() <= LARGEST_CONSTANT and tensor.dim() <= 1


def _is_of_ones(tensor: Tensor) -> bool:
    """Whether it may be a mask, and hides nothing."""
    is_plain = type(tensor) is Tensor and tensor.layout is torch.strided and not (tensor.is_meta or tensor.is_nested)
    if not is_plain or tensor.is_floating_point() or tensor.is_complex() or tensor.dim() < 2 or not tensor.numel():
        return False
    return bool((tensor == 1).all())
