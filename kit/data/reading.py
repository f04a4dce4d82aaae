"""What reading one sample of a store should cost, to stand beside what it did.

Requests are the expected different chunks of a whole batch over all variables, divided by its samples: the engine
fetches each chunk of a batch once. Bytes are those requests times a chunk's uncompressed bytes times the store's own
ratio of stored to uncompressed bytes, known only for a store that kit built. Not counted: the index of each shard (one
request a shard, once), and that chunks of smooth fields compress better than those of rough ones.
"""

from __future__ import annotations

import math

from kit.config import Config
from kit.data.dataset import ArrayInfo, Dataset
from kit.plan.geometry import axes_of, distinct_chunks


def predict_reading(config: Config, dataset: Dataset) -> dict[str, float]:
    """`requests_per_sample` and, where the store tells, `bytes_per_sample`.

    Raises:
        PlanError: for a patch that does not fit the data.
        ConfigError: for variables that do not exist.
    """
    arrays = dataset.select(config.data.variables)
    requests = {info: _requests_per_sample(config, info) for info in arrays}
    answer = {"requests_per_sample": sum(requests.values())}
    stored = _stored_fraction(dataset)
    if stored is not None:
        chunk_bytes = {info: math.prod(info.chunk) * info.dtype.itemsize for info in arrays}
        answer["bytes_per_sample"] = stored * sum(requests[info] * chunk_bytes[info] for info in arrays)
    return answer


def _requests_per_sample(config: Config, info: ArrayInfo) -> float:
    data, samples = config.data, config.loader.batch_size
    patch = tuple(data.patch.get(name, 1) for name in info.dims)
    strides = tuple(data.stride.get(name, side) for name, side in zip(info.dims, patch, strict=True))
    random = data.order == "random"
    axes = axes_of(info.shape, info.chunk, patch, (1,) * len(patch) if random else strides)
    return distinct_chunks(axes, samples, replacement=random) / samples


def _stored_fraction(dataset: Dataset) -> float | None:
    """Stored bytes per uncompressed byte."""
    whole = sum(info.nbytes for info in dataset.arrays.values())
    return dataset.manifest.stored_bytes / whole if dataset.manifest and whole else None
