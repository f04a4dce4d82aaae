"""Loader processes: what they copy, and what starting them costs."""

from __future__ import annotations

import torch
from torch.utils.data import DataLoader, Dataset, Sampler, TensorDataset

from pipelines import Parts, Pipeline
from pipelines.models import Classifier, convolutions

ENTRIES = 1_500_000


class Annotations(Dataset):
    """One Python object an annotation, as read from JSON."""

    def __init__(self, as_tensor=False):
        if as_tensor:
            self.boxes = torch.arange(ENTRIES, dtype=torch.float32)[:, None].repeat(1, 4)
        else:
            self.boxes = [{"id": i, "box": [i, i + 1.0, i + 2.0, i + 3.0]} for i in range(ENTRIES)]

    def __len__(self):
        return len(self.boxes)

    def __getitem__(self, index):
        found = self.boxes[index]
        box = found if isinstance(found, torch.Tensor) else torch.tensor(found["box"])
        return box.mean() * torch.ones(3, 32, 32) / ENTRIES, index % 10


class Plain(Dataset):
    def __len__(self):
        return 100_000

    def __getitem__(self, index):
        return torch.full((3, 32, 32), index / 1e5), index % 10


VOCABULARY: dict[str, tuple[int, list[int]]] = {}


def with_vocabulary():
    """A network beside a large table of words in the process."""
    if not VOCABULARY:
        VOCABULARY.update({f"word{i}": (i, [i]) for i in range(1_500_000)})
    return net()


class Collecting(Plain):
    """Collects garbage now and then, as its author was told to."""

    def __getitem__(self, index):
        if index % 64 == 0:
            import gc

            gc.collect()
        return super().__getitem__(index)


WORDS: dict[str, list[float]] = {}


class Embedded(Dataset):
    """Sentences as vectors of their words, looked up in a table of the process, as read from a text file."""

    def __init__(self, as_array=False):
        import numpy as np

        self.as_array = as_array
        if as_array:
            self.vectors = np.arange(4 * ENTRIES, dtype="float64").reshape(-1, 4)
        elif not WORDS:
            WORDS.update({f"word{i}": [i, i + 1.0, i + 2.0, i + 3.0] for i in range(ENTRIES)})

    def __len__(self):
        return 100_000

    def __getitem__(self, index):
        words = [(index * 7919 + place * 104_729) % ENTRIES for place in range(256)]
        rows = self.vectors[words] if self.as_array else [WORDS[f"word{word}"] for word in words]
        mean = torch.as_tensor(rows, dtype=torch.float32).mean() / ENTRIES
        return mean * torch.ones(3, 32, 32), index % 10


class Heavy(Plain):
    """Needs half of the scientific stack to be imported where it is unpickled."""

    def __setstate__(self, state):
        import pandas
        import scipy.ndimage
        import scipy.signal
        import scipy.stats
        import skimage.transform
        import xarray

        self.__dict__.update(state, used=[pandas, scipy, skimage, xarray])

    def __getstate__(self):
        return {}


class Balanced(Sampler):
    """Each class as often as the others, weighed anew for each index."""

    def __init__(self, once=False):
        import numpy as np

        self.once, self.classes = once, np.random.default_rng(0).integers(0, 10, 100_000)

    def __len__(self):
        return 100_000

    def __iter__(self):
        import numpy as np

        random = np.random.default_rng(0)
        for _ in range(1 if self.once else len(self)):
            weights = 1 / np.bincount(self.classes)[self.classes]
            weights /= weights.sum()
            if self.once:
                yield from random.choice(len(weights), len(self), p=weights).tolist()
            else:
                yield int(random.choice(len(weights), p=weights))


def net():
    return Classifier(convolutions())


def loader(dataset, **options):
    return lambda: DataLoader(dataset(), batch_size=16, **{"num_workers": 2, "persistent_workers": True, **options})


def short(persistent):
    """Epochs of eight batches."""
    x = torch.randn(128, 3, 32, 32)
    data = TensorDataset(x, torch.randint(0, 10, (128,)))
    return lambda: DataLoader(data, batch_size=16, shuffle=True, num_workers=2, persistent_workers=persistent)


def pipelines(folder):
    yield Pipeline(
        name="a list of annotations", planted="dataset copied into workers", speeds_up=False,
        parts=Parts(module=net, data=loader(Annotations)),
        cure=Parts(module=net, data=loader(lambda: Annotations(as_tensor=True))),
    )  # fmt: skip
    yield Pipeline(
        name="words in a table of the process", planted="workers copy the parent", speeds_up=False,
        parts=Parts(module=net, data=loader(Embedded)),
        cure=Parts(module=net, data=loader(lambda: Embedded(as_array=True))),
    )  # fmt: skip
    yield Pipeline(
        name="workers beside a vocabulary", planted="workers copy the parent", speeds_up=False, kind="kept aside",
        also=("garbage collection", "waiting for data"),
        parts=Parts(module=with_vocabulary, data=loader(Collecting)),
        cure=Parts(module=with_vocabulary, data=loader(Plain)),
    )  # fmt: skip
    yield Pipeline(
        name="classes balanced by a sampler", planted="slow sampler", also=("page faults",),
        parts=Parts(module=net, data=loader(Plain, sampler=Balanced())),
        cure=Parts(module=net, data=loader(Plain, sampler=Balanced(once=True))),
    )  # fmt: skip
    yield Pipeline(
        name="spawned workers", planted="workers start slowly", speeds_up=False, also=("loader start-up",),
        parts=Parts(module=net, data=loader(Heavy, multiprocessing_context="spawn")),
        cure=Parts(module=net, data=loader(Plain)),
    )  # fmt: skip
    yield Pipeline(
        name="epochs of eight batches", planted="workers started every epoch", kind="kept aside",
        parts=Parts(module=net, data=short(False)), cure=Parts(module=net, data=short(True)),
    )  # fmt: skip
