"""Which batch size rules: the config's, or that of a loader which the caller brought, and what to do about it.

The rule, the same in `kit.fit`, `kit.predict_memory`, `kit.what_if` and the panel: kit makes the loader of its own data
and of a Dataset, with `loader.batch_size`; every other loader keeps the batches it makes. Nothing of the caller's runs
to find that out: what a loader or data module says of itself is read, and where it says nothing its size is known once
it is made, in the process that trains or predicts.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from kit.config import Config
from kit.errors import KitWarning
from kit.run.payload import Part, own_arguments

BATCH = "loader.batch_size"


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRule:
    """Whose batch size runs."""

    asked: int
    """What the config says."""
    size: int | None
    """What runs; None while only the loader knows."""
    whose: str
    """Who makes the batches; empty where that is the config."""

    @property
    def by_config(self) -> bool:
        return not self.whose

    @property
    def ignores_config(self) -> bool:
        """Whether another number than the config's is known to run."""
        return not self.by_config and self.size not in (None, self.asked)

    @property
    def note(self) -> str:
        """What a user should know; empty where the config's number runs."""
        if self.by_config or self.size == self.asked:
            return ""
        if self.size is None:
            return f"{BATCH} is {self.asked}, but {self.whose} may make batches of another size, and these run"
        return (
            f"{BATCH} is {self.asked}, but {self.whose} makes batches of {self.size}, and these run; set "
            f"{BATCH}: {self.size}, make that loader with {self.asked}, or give a Dataset, whose loader kit makes"
        )

    def made(self, size: int) -> BatchRule:
        """The same once the batches are known."""
        return replace(self, size=size)

    @property
    def is_worth_a_warning(self) -> bool:
        """Whether a number that somebody chose is ignored: the default is nobody's wish, and is noted only."""
        return self.ignores_config and self.asked != Config().loader.batch_size

    def warn(self, stacklevel: int = 3) -> None:
        if self.is_worth_a_warning:
            warnings.warn(self.note, KitWarning, stacklevel=stacklevel)

    @classmethod
    def of_environment(cls, environment: Mapping[str, Any]) -> BatchRule | None:
        """As a run directory keeps it; None in runs that keep none."""
        kept = environment.get("batch")
        if not isinstance(kept, Mapping) or not isinstance(kept.get("asked"), int):
            return None
        return cls(asked=kept["asked"], size=_whole(kept.get("size")), whose=str(kept.get("whose", "")))


def batch_rule(data: Part, config: Config) -> BatchRule:
    """The rule for `data` as `kit.fit` takes it."""
    asked, kind, known = config.loader.batch_size, _class_of(data), _arguments(data, config)
    if data.kind == "default" or _is_a(kind, _DATASET) or (data.kind == "class" and _is_a(kind, _PATCHES)):
        return BatchRule(asked=asked, size=asked, whose="")
    if not _is_a(kind, _KITS):
        size = _declared(data.value) if data.kind == "instance" else _argument(kind, known)
    elif data.kind == "instance":
        size = _of_kits_own(data.value, asked)
    else:  # takes the config that it is trained under, less what it was given
        size = None if _is_a(kind, _PATCHES) else _whole(known.get("batch_size")) or asked
    return BatchRule(asked=asked, size=size, whose=_name(data, kind))


_DATASET = ("torch.utils.data.dataset", "Dataset")
_KITS, _PATCHES = ("kit.data.epoch_data", "EpochData"), ("kit.data.module", "PatchData")
"""Told by name, as the kernel imports no torch for it."""


def _is_a(kind: type | None, base: tuple[str, str]) -> bool:
    return kind is not None and base in [(item.__module__, item.__name__) for item in kind.__mro__]


def _class_of(data: Part) -> type | None:
    """What will make the batches; None where that cannot be told without making it."""
    if data.kind == "instance":
        return type(data.value)
    found = data.value.func if isinstance(data.value, functools.partial) else data.value
    return found if isinstance(found, type) else None


def _name(data: Part, kind: type | None) -> str:
    return f"the data of {data}" if kind is None else f"your {kind.__name__}"


def _arguments(data: Part, config: Config) -> Mapping[str, Any]:
    """What the data will be made with, as far as it is named."""
    if isinstance(data.value, functools.partial):
        return data.value.keywords
    return own_arguments(config) if data.kind in ("class", "path") else {}


def _of_kits_own(data: Any, asked: int) -> int:
    """Data that takes the config it is trained under keeps what it was given; other data keeps its own config."""
    if hasattr(data, "use_config"):
        return int(data._given.get(BATCH, asked))
    return int(data.config.loader.batch_size)


def _declared(data: Any) -> int | None:
    """What a loader or data module says of itself."""
    places = (data, getattr(data, "batch_sampler", None), getattr(data, "hparams", None))
    sizes = (_whole(getattr(place, "batch_size", None)) for place in places)
    return next((size for size in sizes if size is not None), None)


def _argument(kind: type | None, known: Mapping[str, Any]) -> int | None:
    """The `batch_size` that a class is made with, or its default."""
    if "batch_size" in known or kind is None:
        return _whole(known.get("batch_size"))
    try:
        found = inspect.signature(kind).parameters.get("batch_size")
    except (TypeError, ValueError):
        return None
    return None if found is None else _whole(found.default)


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None
