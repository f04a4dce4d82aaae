"""Config: the one frozen object that says what to run; YAML 1.2 both ways, a fingerprint, and the schema of every form.

Each field is declared once, with type, default, unit, bounds and a sentence. Form labels, tooltips, YAML comments and
error texts are all drawn from that declaration (`Config.fields()`), so they cannot disagree. Nothing here looks at the
machine: `auto` stays `auto` until a plan or a trial resolves it and says why. Secrets are never fields; `credentials`
names where one is found.

Relative paths in a config start at the project folder (see `project_folder`), wherever the notebook sits.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import hashlib
import itertools
import json
import math
import os
import re
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError, PydanticUndefined
from typing_extensions import override

from kit.errors import ConfigError, Problem, did_you_mean
from kit.other_configs import COMMAND, SECTIONS, Translation, changes_of
from kit.registry import Drawable, load
from kit.secrets_in_text import secrets_of
from kit.units import format_bytes, parse_bytes

_LARGEST_YAML_BYTES = 1 << 20
_DEEPEST_YAML = 20
_MOST_YAML_VALUES = 10_000
"""Reading costs a tenth of a millisecond each, and a config of all settings has about 200."""
_MOST_ITEMS = 10_000
_MOST_NAMES = 2_000
_MOST_PROBLEMS = 20
REPLACE = "kit.Config().replace({'loader.batch_size': 32}) changes one setting"
LARGEST_WHOLE = 2**63 - 1
"""What a whole number of any field may be at most: it fits 64 bits, and so every library that it is handed to."""


class FrozenMapping(dict[str, Any]):
    """A dict that refuses change, so that a frozen config is frozen all the way down."""

    def _refuse(self, *_: object, **__: object) -> typing.NoReturn:
        raise TypeError("a Config is frozen; use config.replace({'section.field': value}) for a changed copy")

    __setitem__ = __delitem__ = clear = pop = popitem = setdefault = update = __ior__ = _refuse

    def __reduce__(self) -> tuple[type[FrozenMapping], tuple[dict[str, Any]]]:
        return FrozenMapping, (dict(self),)


def _bytes(value: object) -> object:
    if isinstance(value, float) and value.is_integer():  # 4e9
        return int(value)
    return parse_bytes(value) if isinstance(value, str) else value


def _plain(value: Any) -> Any:
    """A number of numpy as one of Python's and a path as text, also in a list or mapping."""
    if type(value) in (str, int, float, bool):
        return value
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = map(_plain, value)
        return [*items] if isinstance(value, list) else (*items,)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    is_number = type(value).__module__ == "numpy" and getattr(value, "shape", None) == ()
    return value.item() if is_number else value


def _freeze(value: object) -> Any:
    """Plain YAML values only, made immutable; anything else has no place in a file."""
    value = _plain(value)
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            raise ValueError("keys must be text")
        return FrozenMapping({key: _freeze(item) for key, item in value.items()})
    if isinstance(value, list | tuple):
        return tuple(_freeze(item) for item in value)
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{value} is no number that every reader of YAML knows; leave it out, or write it as text")
    if isinstance(value, int) and not isinstance(value, bool):
        return _within_64_bits(value)
    if value is None or isinstance(value, bool | float | str):
        return value
    raise ValueError(f"{type(value).__name__} cannot be written to YAML; use numbers, text, lists and mappings")


def _from_list(value: object) -> object:
    if isinstance(value, list | tuple) and len(value) > _MOST_ITEMS:
        raise ValueError(f"{len(value):,} items, at most {_MOST_ITEMS:,} are read")
    return tuple(value) if isinstance(value, list) else value


def _names(value: object) -> object:
    """One name stands for a list of one."""
    value = _plain(value)
    return (value,) if isinstance(value, str) else _from_list(value)


def _blocks(value: object) -> object:
    """A block may be a number, which is kept as text: beside numbers stand names."""
    found = _names(value)
    return tuple(str(item) if type(item) is int else item for item in found) if isinstance(found, tuple) else found


def _within_64_bits(value: Any) -> Any:
    """Refuse a whole number that no float or array holds, also as a size of a dimension."""
    numbers = value.values() if isinstance(value, Mapping) else value if isinstance(value, tuple) else (value,)
    if any(isinstance(number, int) and abs(number) > LARGEST_WHOLE for number in numbers):
        raise ValueError(f"a whole number here is at most {LARGEST_WHOLE:,}")
    return value


Sizes = Annotated[dict[str, Annotated[int, Field(ge=1)]], AfterValidator(FrozenMapping)]
Arguments = Annotated[dict[str, Any], BeforeValidator(_freeze), AfterValidator(FrozenMapping)]
Bytes = Annotated[int, BeforeValidator(_bytes)]
Names = Annotated[tuple[str, ...], BeforeValidator(_names)]
Blocks = Annotated[tuple[str, ...], BeforeValidator(_blocks)]
Counts = Annotated[tuple[Annotated[int, Field(ge=0, le=256)], ...], BeforeValidator(_from_list)]
Indices = Annotated[tuple[Annotated[int, Field(ge=0)], ...], BeforeValidator(_from_list), Field(min_length=1)]


def setting(default: Any, description: str, *, unit: str = "", suggestions: Sequence[str] = (), **bounds: Any) -> Any:
    """Declare one field: default, sentence, unit, bounds, and words to suggest where others are accepted too."""
    extra: dict[str, Any] = {"unit": unit, "suggestions": list(suggestions)}
    make: dict[str, Any] = {"default_factory": default} if isinstance(default, type) else {"default": default}
    return Field(description=description, json_schema_extra=extra, **make, **bounds)


class Section(BaseModel):
    """Base of every section: frozen, strict about types, closed to unknown keys."""

    holds_sections: ClassVar[bool] = False
    model_config = ConfigDict(
        frozen=True, strict=True, extra="forbid", validate_default=True, allow_inf_nan=False, hide_input_in_errors=True
    )

    @model_validator(mode="before")
    @classmethod
    def _hold_no_secrets(cls, values: Any) -> Any:
        """Refuse passwords and tokens before anything is looked at that an error could show; else plain values."""
        for path, kind in secrets_of(values):
            message = (
                f"it holds {kind}, which would be written to files and rows; take it out, and name the variable or "
                "file that has it: data.credentials or checkpoint.credentials env:NAME, the password of a table "
                "env:NAME or ~/.pgpass"
            )
            raise PydanticCustomError("secret", "{message}", {"message": message, "path": path})
        return values if cls.holds_sections else _plain(values)  # each has its own looked at

    _bounded = field_validator("*", mode="after")(_within_64_bits)

    def __setattr__(self, name: str, value: Any) -> None:
        """Refuse every assignment, and say what changes a config instead."""
        raise ConfigError([Problem(name, f"a {type(self).__name__} is frozen; {REPLACE}")])

    if not TYPE_CHECKING:  # else every name would count as known

        def __getattr__(self, name: str) -> Any:
            try:
                return super().__getattr__(name)
            except AttributeError as error:
                raise AttributeError(f"{error}{'' if name.startswith('_') else self._meant(name)}") from None

    def _meant(self, name: str) -> str:
        """The end of an error about an attribute that it has not."""
        return did_you_mean(name, type(self).model_fields)


class Hardware(Section):
    """Which devices train, how they share the work, and in which precision."""

    accelerator: Literal["auto", "cpu", "gpu"] = setting(
        "auto", "Where to train. auto takes a GPU where there is one. The CPU suits smoke tests and teaching."
    )
    devices: Literal["auto"] | Annotated[int, Field(ge=-1)] | Indices = setting(
        "auto", "Which devices train. auto takes the least-occupied GPU, or the CPU where there is none. A number "
        "takes that many. A list names GPUs. -1 takes all of them, busy ones too.",
    )  # fmt: skip
    strategy: Annotated[str, Field(pattern=r"^(none|ddp|fsdp|fsdp:[1-9]\d*:[1-9]\d*)$")] = setting(
        "none", "How devices share the work. none: one device. ddp: each device holds the whole model and trains on a "
        "slice of the data. fsdp: the model is sharded over all devices. fsdp:R:S: R replicas, each sharded over S "
        "devices.", suggestions=("none", "ddp", "fsdp", "fsdp:1:2", "fsdp:2:1", "fsdp:2:2", "fsdp:2:4"),
    )  # fmt: skip
    ddp_find_unused_parameters: bool = setting(
        False, "For ddp: look in each step for parameters that the loss does not use, and do not wait for their "
        "gradients. A model that has such parameters needs it; for others it costs time.",
    )  # fmt: skip
    ddp_static_graph: bool = setting(
        False, "For ddp: every step uses the same parameters, so what is unused is found out once. Also needed where a "
        "block is checkpointed twice.",
    )  # fmt: skip
    ddp_bucket_bytes: Bytes = setting(
        "25 MiB", "For ddp: gradients that travel together. Smaller buckets leave earlier, each with its own latency.",
        unit="bytes", ge=1 << 20, le=1 << 40,
    )  # fmt: skip
    precision: Literal["auto", "32-true", "bf16-mixed", "16-mixed", "bf16-true"] = setting(
        "auto", "Number format of the computation. auto is bf16-mixed or 16-mixed, by the GPU's capability, and "
        "32-true on a CPU.",
    )  # fmt: skip
    threads_per_rank: int = setting(
        0, "CPU threads that each rank computes with. 0 shares the cores evenly among the ranks.", unit="threads", ge=0
    )
    device_memory_bytes: Bytes = setting(
        0, "Memory that a rank may use on each device. A step that needs more fails, as on a full GPU, so a CPU can "
        "stand in for a small GPU. 0 allows all there is.", unit="bytes", ge=0, le=1 << 50,
    )  # fmt: skip
    keep_freed_memory: bool = setting(
        False, "For the host: memory that a rank frees stays with it, where glibc would give large arrays back to the "
        "system, which takes a page fault for every 4 KiB of the next ones. On a CPU, steps with large tensors get "
        "faster; a rank then holds the most that it ever held.",
    )  # fmt: skip

    @property
    def shards(self) -> tuple[int, int] | None:
        """(replicas, shard size) of an `fsdp:R:S` strategy, else None."""
        match = re.fullmatch(r"fsdp:(\d+):(\d+)", self.strategy)
        return (int(match[1]), int(match[2])) if match else None


class Training(Section):
    """What the optimizer sees: nothing here depends on the machine."""

    seed: int = setting(13, "Seed of the weights, the sample order and the loader workers.", ge=0, le=2**32 - 1)
    max_epochs: int = setting(
        1, "Epochs of the real training, which schedules see in a trial too. A trial stops at trial.max_steps.",
        unit="epochs", ge=1,
    )  # fmt: skip
    max_steps: int = setting(
        0, "Optimizer steps of the real training, in place of max_epochs and over as many epochs as they take. 0 goes "
        "by max_epochs.", unit="steps", ge=0,
    )  # fmt: skip
    gradient_clip_norm: float | None = setting(
        None, "Gradients with a larger norm are scaled down to it. Empty clips nothing.", gt=0
    )
    monitor: str = setting(
        "", "Metric that the best checkpoint and early stopping go by, under the name that the module logs it by. "
        "Empty goes by none.", suggestions=("", "val_loss"),
    )  # fmt: skip
    monitor_mode: Literal["min", "max"] = setting("min", "Whether a lower (min) or a higher (max) monitor is better.")
    early_stopping_patience: int = setting(
        0, "Validations without a better monitor after which the training ends. 0 never ends it early.",
        unit="validations", ge=0,
    )  # fmt: skip

    @property
    def length(self) -> str:
        """How long the real training is, in words."""
        count, unit = (self.max_steps, "step") if self.max_steps else (self.max_epochs, "epoch")
        return f"{count:,} {unit}" + "s" * (count != 1)


class Loader(Section):
    """How batches are read ahead of the model."""

    batch_size: int = setting(16, "Samples per batch on each device.", unit="samples", ge=1)
    num_workers: int = setting(
        0, "Loader processes of each rank. 0 streams in threads, which is enough unless a transform is heavy.",
        unit="processes", ge=0, le=256,
    )  # fmt: skip
    prefetch_factor: int = setting(2, "Batches that each loader process keeps ready.", unit="batches", ge=1, le=64)
    batches_ahead: int = setting(
        2, "Batches that the streaming engine reads before they are asked for.", unit="batches", ge=0, le=256
    )
    requests_in_flight: int = setting(
        32, "Requests that are open at once, at most. Several hide the latency of each; more than 32 rarely make "
        "reading faster.", unit="requests", ge=1, le=1024,
    )  # fmt: skip
    decode_threads: int = setting(2, "Threads that decompress chunks.", unit="threads", ge=1, le=64)
    pin_memory: bool = setting(False, "Copy batches to pinned memory first. Transfers to a GPU are faster from there.")
    cache_bytes: Bytes = setting(
        0, "Decoded chunks that each rank keeps for later batches. The least recently used are evicted first. 0 keeps "
        "none.", unit="bytes", ge=0, le=1 << 50,
    )  # fmt: skip
    memory_bytes: Bytes = setting(
        "4 GiB", "Budget of host memory for each rank: batches, chunks in flight, the cache and the windows. It is "
        "never exceeded. Opening a store takes up to 12 MiB more in each process, once.",
        unit="bytes", ge=1 << 20, le=1 << 50,
    )  # fmt: skip
    window_bytes: Bytes = setting(
        "512 MiB", "In block order: decoded chunks that each rank holds, of the window in use and of the next.",
        unit="bytes", ge=1 << 10, le=1 << 50,
    )  # fmt: skip
    window_blocks: int = setting(
        64, "In block order: blocks of the array that one window mixes. More blocks mix better, and each is smaller.",
        unit="blocks", ge=1, le=1 << 20,
    )  # fmt: skip
    block_reuse: float = setting(
        1.0, "In block order: samples drawn from a block, as a multiple of the patches that fit into it side by side.",
        gt=0, le=1000,
    )  # fmt: skip
    shuffle: bool = setting(True, "Draw samples in a new order each epoch.")
    drop_last: bool = setting(False, "Leave out the last samples of an epoch when they do not fill a global batch.")


class Calibration(Section):
    """Finding the loader settings by measurement, before training begins."""

    enabled: bool = setting(
        False, "Measure loader settings before training begins, and train with the cheapest of the fast ones."
    )
    candidate_workers: Counts = setting(
        (), "Numbers of loader processes to try. Empty tries 0, 1, 2, 4 and so on, up to 32 or what CPUs and memory "
        "allow.", unit="processes",
    )  # fmt: skip
    candidate_prefetch: Counts = setting(
        (2, 4, 8), "Prefetch factors to try with each number of loader processes.", unit="batches", min_length=1
    )
    timeout_seconds: float = setting(
        20.0, "Longest measurement of one candidate, from its first batch on.", unit="seconds", gt=0, le=3600
    )
    max_measure_batches: int = setting(
        200, "Batches that one candidate is measured over, at most, after its warm-up. The measurement ends earlier "
        "once the pace is steady.", unit="batches", ge=2, le=100_000,
    )  # fmt: skip
    cap_workers_by_ram: bool = setting(
        True, "Leave out numbers of loader processes whose measured memory exceeds the free memory."
    )
    ram_safety_margin: float = setting(
        0.2, "Fraction of the free memory that loader processes must leave free. A lower value allows more of them.",
        ge=0, lt=1,
    )  # fmt: skip
    step_seconds: float | None = setting(
        None, "Time of a training step, simulated after each batch. A loader that is faster than the step brings "
        "nothing. Empty measures it with some steps of the module itself. 0 looks for the fastest loader, whatever a "
        "step takes.", unit="seconds", ge=0, le=3600,
    )  # fmt: skip


class Levers(Section):
    """Switches that trade time for memory."""

    accumulate_grad_batches: int = setting(
        1, "Micro-batches of each optimizer step. More of them make a larger global batch without its memory.",
        unit="micro-batches", ge=1,
    )  # fmt: skip
    gradient_checkpointing: bool = setting(
        False, "Drop the activations of repeated blocks and compute them again in the backward pass."
    )
    checkpoint_blocks: Blocks = setting(
        (), "Blocks that gradient_checkpointing applies to: numbers of the repeated blocks as 3 or 0-5, names of "
        "modules, or class names. Empty takes all repeated blocks of the module.",
    )  # fmt: skip
    optimizer: Literal["module", "adamw", "adamw-fused", "adamw-8bit", "sgd"] = setting(
        "module", "module keeps what configure_optimizers returns. The others replace it, on the same parameter "
        "groups and schedulers: adamw-fused needs no temporaries, adamw-8bit a quarter of the state, sgd no state "
        "without momentum.",
    )  # fmt: skip
    attention: Literal["auto", "math", "efficient", "flash", "cudnn"] = setting(
        "auto", "Preferred kernel of scaled_dot_product_attention. auto is torch's own choice. math stores all "
        "attention scores, the others none.",
    )  # fmt: skip
    zero_grad_after_step: bool = setting(
        False, "Free the gradients as soon as the optimizer has stepped. Lightning keeps them through the next forward "
        "pass.",
    )  # fmt: skip
    sequence_chunk: int = setting(
        0, "Positions of a long sequence that are trained at a time, for a module with a chunk_step method. 0 takes "
        "sequences whole.", unit="positions", ge=0,
    )  # fmt: skip


class Data(Section):
    """What is stored where, and what one sample is."""

    source: str | None = setting(
        None, "What the store is built from: an import path such as datasets/ocean/source.py:Ocean, a Zarr store, a "
        ".nc, .npy or .npz file, or a folder of images. Empty for a store that exists.",
    )  # fmt: skip
    arguments: Arguments = setting(
        dict, "Keyword arguments of the source, such as its size and seed. Without a source, those of a data class or "
        "import path.",
    )  # fmt: skip
    url: str = setting(
        "data/dataset.zarr", "Where the Zarr store is: a path, or a file://, gs://, s3://, az://, http(s):// or "
        "memory:// URL. NetCDF, .npz, Icechunk and kerchunk are read there too.",
    )  # fmt: skip
    more: Names = setting((), "Further stores that are read with url as one dataset, without a copy. See join.")
    join: str = setting(
        "", "Dimension along which url and more follow one another, such as time. One that they do not have, such as "
        "member, makes each an element of it. Empty puts different variables side by side.",
    )  # fmt: skip
    match: Annotated[dict[str, Literal["equal", "last", "nearest"]], AfterValidator(FrozenMapping)] = setting(
        dict, "Stores of other resolutions beside url: how their elements are found along each dimension that differs, "
        "such as {time: last, lat: nearest, lon: nearest}, by the coordinates' values. equal: the same value. last: "
        "the last at or before it. nearest: the nearest. At most their usual step away.",
    )  # fmt: skip
    unmatched: Literal["refuse", "leave-out", "missing"] = setting(
        "refuse",
        "What an element of url without a match is: an error, a reason to leave out the patches that hold "
        "it, or a missing value in them.",
    )
    align: Literal["exact", "override"] = setting(
        "exact", "Stores that are joined, or lie side by side: the coordinates of the other dimensions that they share "
        "must be equal (exact), or those of url hold for all of them, element by element (override).",
    )  # fmt: skip
    gap_dimension: str = setting(
        "", "Dimension, such as time, whose coordinate may have gaps: no patch reaches over one. Empty looks for none."
    )
    credentials: Annotated[
        str, Field(pattern=r"^(default|anonymous|requester-pays|env:[A-Za-z_][A-Za-z0-9_]*)$")
    ] = setting(
        "default", "Where the key to the store is found: default, anonymous, or env:NAME. Never the key itself. "
        "requester-pays is default where the reader pays for the requests.",
        suggestions=("default", "anonymous", "requester-pays"),
    )  # fmt: skip
    variables: Names = setting((), "Variables stacked as channels, in this order. Empty takes all of one shape.")
    patch: Sizes = setting(
        dict, "Size of one sample along each named dimension. A dimension that is left out has size 1.", unit="elements"
    )
    order: Literal["random", "grid", "block"] = setting(
        "random", "How samples are drawn. random: at any offset. grid: at every stride-th offset, each once an epoch. "
        "block: at any offset within a few blocks of the array at a time, so that each chunk is read once for many "
        "samples.",
    )  # fmt: skip
    stride: Sizes = setting(
        dict, "Distance between samples along each dimension. Empty is the patch size in grid order, and 1 in block "
        "order.", unit="elements",
    )  # fmt: skip
    samples_per_epoch: int = setting(
        1024, "Random samples of one epoch. In grid order the grid decides.", unit="samples", ge=1
    )
    validation_fraction: float = setting(
        0.0, "Part of the data that is kept for validation: of patches as split says, of rows the last, of a table the "
        "last entities of each query. Nothing of it is trained on. 0 keeps none.", ge=0, lt=1,
    )  # fmt: skip
    test_fraction: float = setting(
        0.0, "Part of the patches that is kept for a test, in the same way. 0 keeps none.", ge=0, lt=1
    )
    split: Literal["end", "regions"] = setting(
        "end", "Which patches are kept. end: those at the end of validation_dimension, test last. regions: the array "
        "is cut into regions, each of which goes to one part as a whole, by split_seed.",
    )  # fmt: skip
    validation_dimension: str = setting(
        "", "Dimension whose end is kept, such as time. Empty takes the first of the array."
    )
    split_region: Sizes = setting(
        dict, "Size of a region along each dimension. A dimension that is left out is not cut. Empty takes the chunks.",
        unit="elements",
    )  # fmt: skip
    split_seed: int = setting(
        0, "Seed of the regions. It is not training.seed, so that trials with other seeds keep the same parts.",
        ge=0, le=2**32 - 1,
    )  # fmt: skip
    guard: Sizes = setting(
        dict, "Elements that are left out between patches of different parts, along each dimension. Patches of "
        "different parts never overlap, with or without it.", unit="elements",
    )  # fmt: skip
    least_valid_fraction: float = setting(
        0.0, "Patches with fewer valid values, such as those with too little sea, are left out. Estimated without "
        "reading, by the tiles of kit.data.statistics. 0 leaves none out.", ge=0, le=1,
    )  # fmt: skip
    weight_by: Literal["nothing", "valid", "mean", "deviation"] = setting(
        "nothing", "Train more often on patches with more of it, in proportion: valid values, or the mean or the "
        "standard deviation of the first variable. Estimated by the tiles of kit.data.statistics. Not in grid order.",
    )  # fmt: skip
    standardize: bool = setting(
        True, "Subtract each variable's mean and divide by its standard deviation, computed while building; by "
        "kit.data.statistics over the part for training alone.",
    )  # fmt: skip
    strict: bool = setting(
        False, "Make a missing chunk an error in every store, as it always is in stores that kit built. Otherwise a "
        "missing chunk of another writer is read as the fill value, as Zarr defines it, and counted.",
    )  # fmt: skip


class Chunking(Section):
    """How the store is cut: the chunk is what a reader fetches, the shard is what a writer writes."""

    chunk: Literal["auto"] | Sizes = setting(
        "auto", "Size of a chunk along each dimension. auto is computed from the sampling pattern, with its reasons.",
        unit="elements",
    )  # fmt: skip
    shard: Literal["auto", "none"] | Sizes = setting(
        "auto", "Size of a shard, a multiple of the chunk. auto fills target_shard_bytes. none stores each chunk as "
        "one object.", unit="elements",
    )  # fmt: skip
    target_shard_bytes: Bytes = setting(
        "64 MiB", "Uncompressed size that an automatic shard does not exceed.", unit="bytes", ge=1024, le=1 << 40
    )
    compression_level: int = setting(
        3, "Level of zstd. A higher level makes smaller chunks and takes longer to write.", ge=0, le=19
    )
    latency_seconds: float = setting(
        0.03, "For the plan: mean time to the first byte of a request.", unit="seconds", ge=0, le=60
    )
    latency_deviation_seconds: float = setting(
        0.012, "For the plan: standard deviation of the latency. A batch waits for its slowest request.",
        unit="seconds", ge=0, le=600,
    )  # fmt: skip
    bandwidth_bytes_per_second: Bytes = setting(
        "80 MB", "For the plan: bytes per second of one connection.", unit="bytes/s", ge=1
    )
    total_bandwidth_bytes_per_second: Bytes = setting(
        "400 MB", "For the plan: bytes per second of all connections of all ranks together.", unit="bytes/s", ge=1
    )
    requests_per_second: int = setting(
        5000, "For the plan: reads per second that the store allows all ranks together. A GCS bucket starts at about "
        "5,000. 0 is no limit.", unit="requests/s", ge=0,
    )  # fmt: skip
    decode_bytes_per_second: Bytes = setting(
        "500 MB", "For the plan: decoded bytes per second of one decoding thread.", unit="bytes/s", ge=1
    )
    request_cpu_seconds: float = setting(
        0.0003, "For the plan: CPU time of one request in the thread that makes it.", unit="seconds", ge=0, le=60
    )
    compression_ratio: float | None = setting(
        None, "For the plan: decoded bytes per stored byte. Empty takes the ratio of a built store, and 1 where there "
        "is none.", gt=0, le=10_000,
    )  # fmt: skip
    divisibility: Literal["any", "divides", "power-of-two"] = setting(
        "any", "What an automatic chunk size must be along each dimension: any size, a divisor of the array's, or a "
        "power of two.",
    )  # fmt: skip
    multiple_of: Sizes = setting(
        dict, "Number that an automatic chunk size must be a multiple of, along each dimension.", unit="elements"
    )
    largest_object_bytes: Bytes = setting(
        "5 TiB", "Uncompressed size that no chunk or shard may exceed. Object stores allow 5 TiB.",
        unit="bytes", ge=1, le=5 << 40,
    )  # fmt: skip
    readers: Arguments = setting(
        dict, "Other access patterns that the layout must serve, as {series: {patch: {time: 8760}, weight: 1}}. Each "
        "may also have order, stride, batch_size and shuffle.",
    )  # fmt: skip
    price_per_thousand_reads: float | None = setting(
        None, "Price of 1,000 reads in your currency. Empty leaves money out. GCS and S3 standard storage listed "
        "0.0004 USD in 2025.", ge=0,
    )  # fmt: skip
    price_per_gigabyte: float | None = setting(
        None, "Price of 10^9 bytes that leave the store, in your currency. Empty leaves it out. GCS listed 0.12 USD "
        "to the internet in 2025, and 0 within a region.", ge=0,
    )  # fmt: skip


class Build(Section):
    """How a store is written: by which scheduler, and in how much memory."""

    scheduler: Literal["single-threaded", "threads", "distributed"] = setting(
        "threads", "What runs the tasks of a build: this thread, threads of this process, or Dask workers."
    )
    threads: int = setting(
        0, "Tasks that each process runs at once. 0 takes one per core, at most 8, and 1 in each Dask worker. Fewer "
        "run where memory_bytes is too small for all of them.", unit="threads", ge=0, le=256,
    )  # fmt: skip
    workers: int = setting(
        0, "For distributed: processes of a local cluster. 0 divides the cores by threads.",
        unit="processes", ge=0, le=1024,
    )  # fmt: skip
    memory_bytes: Bytes = setting(
        "2 GiB", "Memory that a build may add to each process: values read, chunks decoded and encoded, and bytes "
        "being sent.", unit="bytes", ge=1 << 20, le=1 << 50,
    )  # fmt: skip
    total_memory_bytes: Bytes = setting(
        0, "Memory of all processes of a build together, the libraries of Dask workers included. Where it is too "
        "small, each process gets less, or fewer run. 0 sets no limit beyond memory_bytes.",
        unit="bytes", ge=0, le=1 << 50,
    )  # fmt: skip
    address: Annotated[str, Field(pattern=r"^$|^(tcp|tls|ws|wss|inproc)://[^@\s]+$")] = setting(
        "", "For distributed: the address of a running Dask scheduler, such as tcp://host:8786. Empty starts a "
        "cluster on this machine.", suggestions=("", "tcp://127.0.0.1:8786"),
    )  # fmt: skip
    scratch: str = setting(
        "", "A path or URL for an intermediate copy, removed at the end. It saves reading the source many times when "
        "its chunks lie across the new ones. Empty makes no copy.",
    )  # fmt: skip


class Cache(Section):
    """A cache for the compressed bytes of a remote store."""

    size_bytes: Bytes = setting(
        0, "Compressed bytes of a remote store that are kept for later reads. 0 keeps none. Local paths are never "
        "cached.", unit="bytes", ge=0, le=1 << 50,
    )  # fmt: skip
    folder: str = setting(
        "", "Folder of the cache, shared by all processes of a machine and kept for later runs; prefetch fills it "
        "beforehand. Empty caches in the memory of each process.",
    )  # fmt: skip
    eviction: Literal["lru", "none"] = setting(
        "lru", "What happens when the cache is full: the least recently used bytes are evicted (lru), or nothing more "
        "is cached (none).",
    )  # fmt: skip


class Model(Section):
    """What is trained."""

    target: str = setting(
        "kit.models:UNet", "Import path of a LightningModule, as package.module:Name or path/to/file.py:Name, or a "
        "model by name: hf:gpt2 of transformers, timm:resnet18 of timm.",
    )  # fmt: skip
    arguments: Arguments = setting(dict, "Keyword arguments that the module is made with.")


class Trial(Section):
    """How a short run is started, bounded and kept."""

    max_steps: int = setting(40, "Optimizer steps of a trial.", unit="steps", ge=1)
    warmup_steps: int = setting(5, "First steps, which no throughput figure counts.", unit="steps", ge=0)
    folder: str = setting("runs", "Folder of the run directories.")
    start: Literal["warm", "cold"] = setting(
        "warm", "How ranks start. warm forks them from a process that has imported torch already. cold starts new "
        "interpreters.",
    )  # fmt: skip
    timeout_seconds: float = setting(3600.0, "A trial that runs longer than this is ended.", unit="seconds", gt=0)
    stall_seconds: float = setting(
        300.0, "A trial that makes no progress for this long is ended, and its log gets the stack of every thread.",
        unit="seconds", gt=0,
    )  # fmt: skip
    validate_every_steps: int = setting(
        0, "Optimizer steps between two validations of a trial. 0 validates nothing.", unit="steps", ge=0
    )
    validation_batches: int = setting(10, "Batches of each validation of a trial.", unit="batches", ge=1)
    sanity_batches: int = setting(
        2, "Batches that are validated before the first step of a trial that validates, so that a fault in the "
        "validation shows at once.", unit="batches", ge=0,
    )  # fmt: skip
    test_batches: int = setting(
        0, "Batches that Trainer.test takes after the last step of a trial. 0 tests nothing.", unit="batches", ge=0
    )
    predict_batches: int = setting(
        0, "Batches that Trainer.predict takes after the last step of a trial. 0 predicts nothing.",
        unit="batches", ge=0,
    )  # fmt: skip
    keep_best: bool = setting(
        False, "Keep the checkpoint with the best training.monitor in the run directory of a trial."
    )
    grace_seconds: float = setting(
        5.0, "Time that ranks get to finish their step after Stop, before they are killed.", unit="seconds", gt=0
    )
    predict_memory: bool = setting(
        True, "Predict the peak memory of the trial too, in a process beside it at the lowest priority. A known "
        "prediction is reused.",
    )  # fmt: skip
    measure_memory: bool = setting(
        True, "Measure the peak memory of the first two optimizer steps on the CPU; a GPU is always measured. Switch "
        "it off for a module that starts a profiler itself.",
    )  # fmt: skip
    count_work: bool = setting(
        True, "Count the FLOPs, memory traffic and host syncs of one warm-up step, and watch what the host does in the "
        "others. MFU and the diagnosis are computed from them. The warm-up step takes longer.",
    )  # fmt: skip
    codecarbon: Annotated[str, Field(pattern=r"^([A-Z]{3})?$")] = setting(
        "", "Country code, such as DEU, for whose grid codecarbon estimates energy and CO2 of the trial, offline. "
        "Empty leaves it out. Needs the extra kit[co2].",
    )  # fmt: skip


class Commit(Section):
    """How a committed run is laid out; a trial takes nothing from here."""

    folder: str = setting("committed", "Folder for the files that kit.commit writes.")
    output: str = setting(
        "output", "Folder for the checkpoints and logs of committed runs, each run in a folder of its own."
    )
    nodes: int = setting(
        1, "Machines of the committed run, each with hardware.devices. The number of ranks and the global batch grow "
        "with them.", unit="nodes", ge=1, le=100_000,
    )  # fmt: skip
    checkpoint_every_steps: int = setting(
        500, "Optimizer steps between two checkpoints. Each replaces the one before. A restart repeats at most so "
        "many steps.", unit="steps", ge=1,
    )  # fmt: skip
    restarts: int = setting(
        3, "Times that torchrun restarts all ranks after one of them failed.", unit="restarts", ge=0, le=1000
    )


class Checkpoint(Section):
    """Where the checkpoints of a committed run are copied to; a trial keeps none."""

    url: str = setting(
        "", "A path or URL, such as gs://bucket/run-7, to which checkpoints are copied during training. Empty copies "
        "none.",
    )  # fmt: skip
    credentials: Annotated[str, Field(pattern=r"^(default|anonymous|env:[A-Za-z_][A-Za-z0-9_]*)$")] = setting(
        "default", "Where the key to that place is found: default, anonymous, or env:NAME. Never the key itself.",
        suggestions=("default", "anonymous"),
    )  # fmt: skip
    every_seconds: float = setting(60.0, "Shortest time between two checks for a new checkpoint.", unit="seconds", ge=0)
    every_steps: int = setting(
        0, "Fewest optimizer steps between two checks for a new checkpoint. 0 goes by every_seconds alone.",
        unit="steps", ge=0,
    )  # fmt: skip
    during_training: bool = setting(
        True, "Copy checkpoints during training. Otherwise they are copied at its end only."
    )
    on_fit_end: bool = setting(True, "Copy the newest and the best checkpoint at the end of training, and wait for it.")
    keep: int = setting(
        0, "Complete checkpoints that are kept at the URL. The oldest are removed first. 0 keeps all.",
        unit="checkpoints", ge=0,
    )  # fmt: skip
    required: bool = setting(
        False, "End the training when a checkpoint cannot be copied. Otherwise kit warns, and tries the next one."
    )
    deadline_seconds: float = setting(
        300.0, "Longest wait for the last copy at the end of training.", unit="seconds", gt=0, le=86_400
    )
    part_bytes: Bytes = setting(
        "16 MiB", "Size of the objects that a checkpoint is cut into. After an interruption, complete parts are not "
        "sent again.", unit="bytes", ge=1 << 10, le=1 << 30,
    )  # fmt: skip
    parts_in_flight: int = setting(4, "Parts that are sent at once, each held in memory.", unit="parts", ge=1, le=256)


class Queries(Section):
    """How event tables are queried: in how many query chunks, by how many processes, and with which cache."""

    fit_query_chunks: int = setting(
        1, "Queries that a table is cut into while its features are fitted, one after another. More of them need less "
        "memory at once, here and in the database.", unit="query chunks", ge=1, le=65_536,
    )  # fmt: skip
    load_query_chunks: int = setting(
        1, "Queries that a table is cut into in each epoch. All events of an entity are in one query, so more queries "
        "cost time but lose no samples.", unit="query chunks", ge=1, le=65_536,
    )  # fmt: skip
    num_concurrent_features: int = setting(
        4, "Columns whose features are fitted at once.", unit="columns", ge=1, le=1024
    )
    num_cpus: int = setting(
        4, "Cores that one column may use while it is fitted. This times num_concurrent_features may not exceed the "
        "machine's cores.", unit="cores", ge=1, le=1024,
    )  # fmt: skip
    batch_rows: int = setting(
        65_536, "Rows that are fetched from a database at a time, at most.", unit="rows", ge=1, le=1 << 24
    )
    prefetch: bool = setting(
        True, "Read the next query chunk while the model trains on this one, where memory_bytes holds both."
    )
    memory_bytes: Bytes = setting(
        "4 GiB", "Budget of host memory for each rank's query chunks. It is never exceeded.",
        unit="bytes", ge=1 << 20, le=1 << 50,
    )  # fmt: skip
    cache_path: str = setting(
        "", "A folder that keeps the results of queries as Parquet, for later epochs and other tasks. Empty keeps none."
    )


class Profiler(Section):
    """Which profilers look at a trial, one pass with each."""

    folder: str = setting("output/profiler", "Folder of the results, in {name}/profiler_logs.")
    passes: Names = setting(
        (), "Which profilers run: simple times Lightning's actions, advanced times every Python function, pytorch "
        "times every operation on CPU and device. Empty runs all three.",
    )  # fmt: skip
    active_steps: int = setting(
        3, "Steps that the pytorch pass records. Each is about a megabyte of trace.", unit="steps", ge=1, le=100
    )
    memory: bool = setting(False, "Record every allocation in the pytorch pass too, which makes it slower.")


@dataclass(frozen=True, slots=True)
class FieldInfo:
    """One field as a form, a YAML comment or an error needs it."""

    path: str
    default: Any
    description: str
    unit: str
    choices: tuple[str, ...]
    """Words to offer: all that are accepted for kind `choice`, some of them otherwise."""
    bounds: dict[str, float]
    """Any of `ge`, `gt`, `le`, `lt`."""
    kind: Literal[
        "bool", "int", "float", "choice", "text", "sizes", "arguments", "names", "counts", "devices", "layout"
    ]

    @property
    def section(self) -> str:
        return self.path.partition(".")[0]

    @property
    def name(self) -> str:
        return self.path.rpartition(".")[2]

    @property
    def help(self) -> str:
        """The sentence with unit and bounds, as tooltips and comments show it."""
        words = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
        notes = [self.unit] if self.unit else []
        notes += [f"{words[key]} {_show(bound, self.unit)}" for key, bound in self.bounds.items()]
        notes += ["one of " + ", ".join(self.choices)] if self.choices and self.kind == "choice" else []
        return self.description + (f" [{'; '.join(notes)}]" if notes else "")


class Config(Drawable, Section):
    """Everything that one run depends on. A config is frozen: `replace` makes a changed copy, `diff` names the changes.

    Sections and fields are those of the YAML file. `Config.load(path)` reads one, `config.save(path)` writes one, and
    `config.fingerprint` names its content.

    Example:
        >>> changed = kit.Config().replace({"loader.batch_size": 32, "hardware.precision": "bf16-mixed"})
        >>> changed.loader.batch_size
        32
        >>> sorted(kit.Config().diff(changed))
        ['hardware.precision', 'loader.batch_size']
    """

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,63}$")] = setting(
        "experiment", "Name of this experiment: lower-case letters, digits, dot, dash, underscore."
    )
    hardware: Hardware = setting(Hardware, "Devices, strategy and precision.")
    training: Training = setting(Training, "Seed, length and clipping.")
    loader: Loader = setting(Loader, "Batches and how they are read ahead.")
    calibration: Calibration = setting(Calibration, "Loader settings found by measurement.")
    levers: Levers = setting(Levers, "Switches that trade time for memory.")
    data: Data = setting(Data, "The store and what one sample is.")
    chunking: Chunking = setting(Chunking, "Chunks and shards of the store.")
    build: Build = setting(Build, "How the store is written.")
    cache: Cache = setting(Cache, "What is kept of a remote store.")
    model: Model = setting(Model, "What is trained.")
    trial: Trial = setting(Trial, "How a short run is started, bounded and kept.")
    commit: Commit = setting(Commit, "How a committed run is laid out.")
    checkpoint: Checkpoint = setting(Checkpoint, "Where the checkpoints of a committed run are copied to.")
    queries: Queries = setting(Queries, "How event tables are asked for.")
    profiler: Profiler = setting(Profiler, "How a trial is looked at from close by.")

    holds_sections = True

    # -- making one

    def __init__(self, /, *given: Any, **values: Any) -> None:
        """Take sections by name.

        Raises:
            ConfigError: naming every unknown key, wrong type and broken bound by its dotted path.
        """
        if given:
            raise _refusal(given[0], "a Config takes its sections by name")
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise ConfigError(_problems(error, values)) from None

    @classmethod
    def make(cls, values: Mapping[str, Any], where: str = "") -> Config:
        """A validated Config from nested plain values.

        Raises:
            ConfigError: naming every unknown key, wrong type and broken bound by its dotted path.
        """
        given: Any = values  # by a user, who may give anything
        if not isinstance(given, Mapping):
            raise _refusal(given, "sections are a mapping", where)
        if wrong := [Problem(_brief(key), "a key is text") for key in given if not isinstance(key, str)]:
            raise ConfigError(wrong, where)
        try:
            return cls(**values)
        except ConfigError as error:
            raise ConfigError(error.problems, where) from None

    @classmethod
    def from_yaml(cls, text: str, where: str = "") -> Config:
        """The Config a YAML 1.2 text describes; missing fields take their defaults.

        A file that `kit.commit` wrote gives the Config it was committed from.

        Raises:
            ConfigError: with line and column for broken YAML and duplicate keys, with the dotted path otherwise.
        """
        values = _load_yaml(text, where)
        if "trainer" not in values:
            return cls.make(values, where)
        return cls.make(_load_yaml(committed_text(values, where), where), where)

    @classmethod
    def load(cls, path: str | Path) -> Config:
        """The Config in a YAML file; a relative path is looked up from the working directory, then the project folder.

        Raises:
            ConfigError: when the file cannot be read or does not describe a Config.
        """
        return cls.from_yaml(_read_text(path), where=str(path))

    @classmethod
    def translate(cls, source: str | Path | Mapping[str, Any]) -> Translation:
        """The config of another tool as a Config, with a table that says where each of its settings went.

        Args:
            source: A BaseModel YAML, as its path or its values; or a command line of AI-OS that begins with `aios`.

        Returns:
            The Config, and a row for each setting; those without a field of kit say what takes their place.

        Raises:
            ConfigError: when it is neither, cannot be read, or holds a value that no field takes.

        Example:
            >>> found = kit.Config.translate("aios hrm-hf train-actv1 --model gpt2 --batch-size 1 --no-amp")
            >>> found.config.loader.batch_size, found.config.hardware.precision
            (1, '32-true')
        """
        if not isinstance(source, Mapping) and str(source).split()[:1] != [COMMAND]:
            source = _load_yaml(_read_text(source), str(source))
        tool, changes, settings = changes_of(source if isinstance(source, Mapping) else str(source))
        steps = changes.get("trial.max_steps")
        if isinstance(steps, int) and 0 < steps <= cls().trial.warmup_steps:
            changes["trial.warmup_steps"] = steps - 1  # of so few, the last is measured
        return Translation(tool, cls().replace(changes), settings)

    @classmethod
    def profile(cls, name: str) -> Config:
        """A starting config by name: `conservative memory` or `long context`.

        Raises:
            ConfigError: for another name.
        """
        if name not in PROFILES:
            close = difflib.get_close_matches(name, PROFILES, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise ConfigError([Problem("profile", f"{name!r} is none of {', '.join(PROFILES)}{hint}")])
        return cls().replace(PROFILES[name])

    # -- writing one

    def values(self) -> dict[str, Any]:
        """Nested plain values: what YAML and JSON hold."""
        return typing.cast(dict[str, Any], _thaw(self.model_dump()))

    def to_yaml(self, comments: bool = True) -> str:
        """YAML 1.2 that reads back as an equal Config; comments say what each field means."""
        return _dump_yaml(self.values(), {info.path: info.help for info in self.fields()} if comments else {})

    def save(self, path: str | Path) -> Path:
        """Write `to_yaml()`; the file is replaced in one move, never left half-written."""
        file = Path(path)
        file.parent.mkdir(parents=True, exist_ok=True)
        draft = file.with_name(file.name + ".tmp")
        draft.write_text(self.to_yaml(), encoding="utf-8")
        return draft.replace(file)

    # -- comparing and changing

    def get(self, path: str) -> Any:
        """The value at a dotted path, such as `loader.batch_size`.

        The path may go on into a mapping, as `model.arguments.width`; a key that it does not have is None.

        Raises:
            ConfigError: where there is no such field, with those that may have been meant.
        """
        value: Any = self
        for part in str(path).split("."):
            if isinstance(value, Mapping):
                value = value.get(part)
            elif isinstance(value, BaseModel) and part in type(value).model_fields:
                value = getattr(value, part)
            else:
                raise ConfigError([Problem(str(path), "no such field" + _did_you_mean(str(path), self.model.target))])
        return value

    def replace(self, changes: Mapping[str, Any] | None = None, **sections: Any) -> Config:
        """A copy with `{"section.field": value}` changed, validated as a whole.

        Args:
            changes: Values by dotted path; a path may go on into a mapping, as `model.arguments.learning_rate`.
            sections: The name, or whole sections.

        Raises:
            ConfigError: for an unknown path or a value that breaks a bound; this Config stays as it is.
        """
        given: Any = changes  # by a user, who may give anything
        if not isinstance(given, Mapping | None):
            raise _refusal(given, "changes are a mapping")
        values = self.values()
        for path, value in {**(given or {}), **sections}.items():
            self.get(path)
            *parents, last = str(path).split(".")
            target = values
            for part in parents:
                target = target.setdefault(part, {})
            target[last] = value.values() if isinstance(value, Config) else _thaw(value)
        return Config.make(values)

    def diff(self, other: Config) -> dict[str, tuple[Any, Any]]:
        """`{path: (mine, theirs)}` for every field that differs."""
        theirs: Any = other  # by a user, who may give anything
        if not isinstance(theirs, Config):
            raise _refusal(theirs, "a Config is compared with a Config")
        pairs = ((info.path, self.get(info.path), theirs.get(info.path)) for info in self.fields())
        return {path: (mine, theirs) for path, mine, theirs in pairs if mine != theirs}

    @functools.cached_property
    def fingerprint(self) -> str:
        """Twelve hex digits of the content: equal configs share it, in any key order, on any machine."""
        canonical = json.dumps(self.values(), sort_keys=True, separators=(",", ":"), allow_nan=False)
        return hashlib.sha256(canonical.encode()).hexdigest()[:12]

    def as_code(self, against: Config | None = None) -> str:
        """The expression that makes this Config from `against` (by default, from nothing)."""
        changes = (against or Config()).diff(self)
        base = "config" if against is not None else "kit.Config()"
        values = {path: _thaw(theirs) for path, (_, theirs) in changes.items()}
        return f"{base}.replace({_literal(values)})" if changes else base

    @classmethod
    def fields(cls) -> tuple[FieldInfo, ...]:
        """Every field, in file order: the one schema that forms, comments and errors are drawn from."""
        return _schema()

    @model_validator(mode="after")
    def _agree(self) -> Self:
        for path, message in _disagreements(self):
            raise PydanticCustomError("disagreement", "{message}", {"message": message, "path": path})
        return self

    def __str__(self) -> str:
        return self.to_yaml(comments=False)

    def __repr__(self) -> str:
        changed = Config().diff(self)
        lines = [f"  {path}: {_thaw(theirs)!r}" for path, (_, theirs) in changed.items()]
        head = f"Config {self.name} ({self.fingerprint}), {len(changed)} settings off their default"
        return "\n".join([head, *lines])

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    @override
    def _meant(self, name: str) -> str:
        return _did_you_mean(name)


PROFILES: dict[str, dict[str, Any]] = {
    "conservative memory": {
        "name": "conservative-memory",
        "loader.batch_size": 1,
        "levers.accumulate_grad_batches": 8,
        "levers.gradient_checkpointing": True,
        "levers.optimizer": "adamw-8bit",
        "trial.max_steps": 50,
    },
    "long context": {
        "name": "long-context",
        "loader.batch_size": 1,
        "levers.gradient_checkpointing": True,
        "levers.optimizer": "adamw-8bit",
        "model.target": "kit.models:GPT",
        "model.arguments": {"context": 16384, "window": 2048},
    },
}
"""Starting configs, as the settings they change; precision stays auto, which is mixed on every GPU."""


def project_folder(start: Path | None = None) -> Path:
    """The folder that relative paths in a config start from.

    The nearest folder, from the working directory upwards, that holds a `pyproject.toml` or a `.git`; else the working
    directory itself. So a notebook in `notebooks/` and a script beside it mean the same `data/ocean.zarr`.
    """
    here = (start or Path.cwd()).resolve()
    marks = ("pyproject.toml", ".git")
    return next((folder for folder in (here, *here.parents) if any((folder / mark).exists() for mark in marks)), here)


def resolve_path(path: str | Path) -> Path:
    """An absolute path: as given, else below the working directory, else below the project folder.

    Raises:
        ConfigError: for text that is no path.
    """
    try:
        given = Path(path).expanduser()
        if max((len(os.fsencode(part)) for part in given.parts), default=0) > 255 or len(os.fsencode(given)) > 4095:
            raise ValueError(f"{len(str(path)):,} characters; a path has at most 4,095 bytes, a name in it 255")
        return given.absolute() if given.is_absolute() or given.exists() else project_folder() / given
    except (OSError, RuntimeError, ValueError, TypeError) as error:
        raise ConfigError(f"{str(path)[:60]!r} is no path: {error!s:.200}") from None


def near(missing: Path) -> str:
    """What else is there in place of a file or folder that is not, as the end of an error; empty for nothing."""
    above = missing.parent
    if not above.is_dir() and above != missing:
        return f"; there is no folder {above}{near(above)}" if above.parent.is_dir() else near(above)
    try:
        names = [item.name for item in itertools.islice(above.iterdir(), _MOST_NAMES)]
    except OSError:  # a folder that may not be listed
        return ""
    return did_you_mean(missing.name, names, otherwise="", cutoff=0.5)


def _disagreements(config: Config) -> Iterator[tuple[str, str]]:
    """Fields that are each fine and do not fit together."""
    yield from _device_disagreements(config.hardware)
    for dimension in config.data.stride:
        if dimension not in config.data.patch:
            known = ", ".join(config.data.patch) or "empty"
            yield "data.stride", f"dimension {dimension!r} is not in data.patch ({known})"
    for factor in config.calibration.candidate_prefetch:
        if not 1 <= factor <= 64:
            yield "calibration.candidate_prefetch", f"{factor} is none; a loader process keeps 1 to 64 batches ready"
    for path in ("training.early_stopping_patience", "trial.keep_best"):
        if config.get(path) and not config.training.monitor:
            yield path, "goes by training.monitor, which is empty; name a metric there, such as val_loss"
    if config.trial.warmup_steps >= config.trial.max_steps:
        yield (
            "trial.warmup_steps",
            f"{config.trial.warmup_steps} warm-up steps leave nothing to measure in {config.trial.max_steps} steps; "
            f"make it {config.trial.max_steps - 1} at most, or trial.max_steps more",
        )


def _device_disagreements(hardware: Hardware) -> Iterator[tuple[str, str]]:
    devices = hardware.devices
    count = len(devices) if isinstance(devices, tuple) else None if devices in ("auto", -1) else int(devices)
    if devices == 0:
        yield "hardware.devices", "0 devices cannot train; use auto, a number from 1, a list, or -1 for all"
    if isinstance(devices, tuple) and len(set(devices)) < len(devices):
        yield "hardware.devices", f"{_brief(list(devices))} names a device twice"
    if isinstance(devices, tuple) and hardware.accelerator == "cpu":
        yield "hardware.devices", f"{_brief(list(devices))} names GPUs, but accelerator is cpu; give a number of ranks"
    if hardware.strategy == "none" and count is not None and count > 1:
        yield "hardware.strategy", f"none uses one device, but devices asks for {count}; use ddp or fsdp"
    if hardware.strategy in ("ddp", "fsdp") and count is None and devices != -1:
        yield "hardware.strategy", f"{hardware.strategy} needs at least 2 devices, but devices is auto (one device)"
    if hardware.strategy in ("ddp", "fsdp") and count == 1:
        yield "hardware.strategy", f"{hardware.strategy} needs at least 2 devices, but devices asks for 1; use none"
    if hardware.shards:
        replicas, size = hardware.shards
        product = f"{replicas} replicas × {size} devices each = {replicas * size}"
        if count is not None and replicas * size != count:
            yield "hardware.strategy", f"{hardware.strategy} needs {product} devices, but devices asks for {count}"
        if count is None and devices != -1:
            yield "hardware.strategy", f"{hardware.strategy} needs {product} devices, but devices is auto (one device)"


# -- schema


@functools.cache
def _schema() -> tuple[FieldInfo, ...]:
    return tuple(_fields(Config, ""))


def _fields(model: type[BaseModel], prefix: str) -> Iterator[FieldInfo]:
    for name, field in model.model_fields.items():
        annotation = field.annotation
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            yield from _fields(annotation, f"{prefix}{name}.")
            continue
        default = field.get_default(call_default_factory=True)
        assert default is not PydanticUndefined, f"{prefix}{name} has no default"
        extra = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
        keys = ("ge", "gt", "le", "lt")
        yield FieldInfo(
            path=prefix + name,
            default=getattr(model(), name),
            description=field.description or "",
            unit=str(extra.get("unit", "")),
            choices=_choices(annotation) or tuple(typing.cast(list[str], extra.get("suggestions", []))),
            bounds={key: getattr(item, key) for item in field.metadata for key in keys if hasattr(item, key)},
            kind=_kind(name, annotation),
        )


def _kind(name: str, annotation: Any) -> Any:
    if name in ("devices",):
        return "devices"
    if name in ("chunk", "shard"):
        return "layout"
    if typing.get_origin(annotation) is Literal:
        return "choice"
    parts = set(typing.get_args(annotation)) - {type(None)} if isinstance(annotation, types.UnionType) else {annotation}
    for kind, python in (("bool", bool), ("int", int), ("float", float), ("text", str)):
        if python in parts:
            return kind
    if typing.get_origin(annotation) is tuple:
        return "names" if typing.get_args(annotation)[0] is str else "counts"
    return "arguments" if name in ("arguments", "readers", "match") else "sizes"


def _choices(annotation: Any) -> tuple[str, ...]:
    if typing.get_origin(annotation) is Literal:
        return tuple(typing.get_args(annotation))
    if isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union:
        return tuple(choice for part in typing.get_args(annotation) for choice in _choices(part))
    return ()


def _show(value: float, unit: str) -> str:
    return format_bytes(value) if unit == "bytes" else f"{value:g}" if isinstance(value, float) else str(value)


def _literal(value: Any) -> str:
    """Python source of a plain value, with double quotes throughout."""
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_literal(key)}: {_literal(item)}" for key, item in value.items()) + "}"
    return "[" + ", ".join(map(_literal, value)) + "]" if isinstance(value, list) else repr(value)


def _thaw(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _thaw(item) for key, item in value.items()}
    return [_thaw(item) for item in value] if isinstance(value, list | tuple) else value


# -- errors


_LOAD = "kit.Config.load('recipe.yaml') reads a file, kit.Config.make(values) takes nested values"


def _refusal(given: object, takes: str, where: str = "") -> ConfigError:
    """That something else was given, of which only the kind is told: it may hold a password."""
    return ConfigError(f"{takes}, got {type(given).__name__}; {REPLACE}, {_LOAD}", where)


def _problems(error: ValidationError, values: Mapping[str, Any]) -> list[Problem]:
    model = values.get("model")
    named = model.get("target") if isinstance(model, Mapping) else None
    target = named if isinstance(named, str) else ""
    found: dict[str, Problem] = {}
    for detail in error.errors(include_url=False):
        told = str(detail.get("ctx", {}).get("path", ""))  # within where pydantic found it
        path = ".".join(filter(None, [*map(str, detail["loc"]), told]))
        info = next((info for info in Config.fields() if path == info.path or path.startswith(info.path + ".")), None)
        if info and info.kind in ("devices", "layout"):
            # pydantic reports every branch of a union; one sentence about the field says more
            path = info.path
        found.setdefault(path, Problem(path, _message(path, info, dict(detail), target)))
        if len(found) > _MOST_PROBLEMS:
            return [*list(found.values())[:_MOST_PROBLEMS], Problem("", f"and more, {error.error_count():,} in all")]
    return list(found.values())


def _message(path: str, info: FieldInfo | None, detail: Mapping[str, Any], target: str) -> str:
    kind, value = detail["type"], detail.get("input")
    if kind == "extra_forbidden":
        if path in SECTIONS:
            return f"a BaseModel YAML has {path}; kit.Config.translate reads one"
        found = [] if "." in path else paths_of(path)
        way_out = f" kit.Config().replace({{{found[0]!r}: ...}}) sets it" if found else ""
        return f"unknown key{_did_you_mean(path, target)}{way_out}"
    if kind in ("disagreement", "secret"):
        return str(detail["ctx"]["message"])
    if path.endswith("credentials"):  # someone may have written the key itself
        return f"this value is not accepted. {info.help if info else ''}"
    shown = _brief(value)
    text = detail["msg"].removeprefix("Value error, ").removeprefix("Input ")
    if info is None:
        return f"{text}, got {shown}" + (" (this section takes a mapping of fields)" if kind == "model_type" else "")
    if isinstance(value, str) and (path, value) in _REFUSED:
        return f"{value} is refused: {_REFUSED[path, value]}"
    if isinstance(value, type):
        text = "is text, and a class is given beside the config: kit.fit(config, MyModule, MyData)"
    if info.kind in ("sizes", "layout") and path == info.path and not isinstance(value, Mapping | str):
        text = "names each dimension, as in {'time': 1, 'lat': 64, 'lon': 64}"
    elif info.kind in ("choice", "devices", "layout") or kind == "string_pattern_mismatch":
        given = "" if isinstance(value, bool) else shown if not isinstance(value, str) else value.strip()
        meant = _meant_by(path, given)
        spelled = {choice.lower(): choice for choice in info.choices}
        close = [spelled[one] for one in difflib.get_close_matches(given.lower(), spelled, n=1)]
        close = [meant] if meant else close
        meaning = "" if close and path != "name" else f" {info.help}"
        return f"{shown} is not accepted" + (f"; did you mean {close[0]!r}?" if close else ".") + meaning
    return f"{text}, got {shown}. {info.help}"


def _meant_by(path: str, given: str) -> Any:
    """What others call by that value; None where nobody does."""
    if path == "hardware.devices":
        count = re.fullmatch(r"(-?\d+)(\.0*)?", given)
        if count or given.lower() == "all":
            return int(count[1]) if count else -1
        return [*map(int, re.findall(r"\d+", given))] if re.match(r"[\[(]|cuda|gpu|\d+ *,", given.lower()) else None
    if path == "name":
        return re.sub(r"[^a-z0-9._-]+", "-", given.lower()).strip("-._")[:64] or None
    return _MEANT.get((path, given.lower()))


def _brief(value: Any) -> str:
    """What a value looks like, in a few words however large it is."""
    if isinstance(value, int) and abs(value) > LARGEST_WHOLE:
        return f"a number of about {round(value.bit_length() * math.log10(2)):,} digits"
    try:
        text = repr(value)
    except ValueError:  # a list of such numbers
        return f"a {type(value).__name__} of numbers too long to show"
    return text if len(text) <= 80 else text[:77] + "..."


_REFUSED = {
    ("hardware.accelerator", "mps"): "kit knows the CPU and GPUs of NVIDIA; use cpu on a Mac",
    ("hardware.accelerator", "tpu"): "kit knows the CPU and GPUs of NVIDIA",
    ("hardware.precision", "16-true"): "weights and gradients of 16 bits without a scaler underflow, and on a CPU are "
    "computed many times slower besides, and end in nan; use 16-mixed on a GPU, bf16-mixed or bf16-true anywhere",
}
"""Values that others know and kit does not take, and why."""


_MEANT = {
    (path, name): meant
    for path, meant, names in (
        ("hardware.precision", "32-true", ("32", "fp32", "float32", "full", "32-full")),
        ("hardware.precision", "bf16-mixed", ("bf16", "bfloat16", "mixed")),
        ("hardware.precision", "16-mixed", ("16", "fp16", "float16", "half", "amp")),
        ("hardware.accelerator", "gpu", ("cuda", "cuda:0", "nvidia")),
        ("hardware.strategy", "none", ("auto", "single_device", "")),
        ("hardware.strategy", "ddp", ("dp", "ddp_spawn", "ddp_notebook", "ddp_fork")),
        ("hardware.strategy", "fsdp", ("deepspeed", "deepspeed_stage_2", "deepspeed_stage_3", "model_parallel")),
    )
    for name in names
}
"""What others call a value."""
_OF_MODULES = ("lr", "learning_rate", "weight_decay", "betas", "momentum", "hidden_dim", "hidden_size", "dropout")
"""What most modules are made with, and no field is called."""
_ELSEWHERE = {
    name: paths
    for paths, names in {
        ("hardware.accelerator", "hardware.devices"): ("device", "cuda", "no_cuda"),
        ("hardware.devices",): ("gpus", "num_gpus", "n_gpus", "ngpus", "world_size", "num_processes"),
        ("hardware.precision",): ("fp16", "bf16", "amp", "dtype", "mixed_precision"),
        ("levers.accumulate_grad_batches",): ("gradient_accumulation_steps", "accumulation", "accumulate"),
        ("loader.batch_size",): ("per_device_train_batch_size", "train_batch_size", "bs"),
        ("loader.num_workers",): ("workers", "dataloader_num_workers"),
        ("training.gradient_clip_norm",): ("gradient_clip_val", "max_grad_norm", "clip_grad_norm"),
        ("training.max_epochs",): ("epochs", "num_train_epochs", "num_epochs", "n_epochs"),
        ("trial.max_steps", "training.max_steps"): ("steps", "num_steps", "train_steps"),
        ("trial.folder", "commit.output"): ("output_dir", "default_root_dir", "save_dir"),
        ("data.url",): ("path", "dataset", "store", "zarr"),
        ("model.arguments",): _OF_MODULES,
    }.items()
    for name in names
}
"""What Lightning, transformers and others call a field."""


def paths_of(name: str) -> list[str]:
    """Fields under the last part of their path, or under what other libraries call them, or spelled nearly so."""
    paths = [info.path for info in Config.fields()]
    leaf = {known: known.rpartition(".")[2] for known in paths}
    found = [known for known in paths if leaf[known] == name] or list(_ELSEWHERE.get(name.lower(), ()))
    near = [] if found else difflib.get_close_matches(name, leaf.values(), n=1, cutoff=0.7)
    return found or [known for known in paths if [leaf[known]] == near]


def _did_you_mean(path: str, target: str = "") -> str:
    """The end of an error about a path that no field has.

    Args:
        path: What was given.
        target: Of the model, whose arguments may have been meant; empty for the default's.
    """
    section, _, name = path.rpartition(".")
    if section == "model" or name in _OF_MODULES:
        return _among_arguments(name, target or Model().target)
    paths, start = [*(info.path for info in Config.fields()), *Config.model_fields], f"{section}." * bool(section)
    close = [known for known in paths_of(name) if known.startswith(start)]
    close = close or difflib.get_close_matches(path, [one for one in paths if one.startswith(start)], n=1, cutoff=0.75)
    close = close or paths_of(name) or difflib.get_close_matches(path, paths, n=1, cutoff=0.75)
    return f"; did you mean {' or '.join(close)}?" if close else f"; the sections are {', '.join(Config.model_fields)}"


def _among_arguments(name: str, target: str) -> str:
    """Where a setting of the module goes, and what the module takes."""
    known: list[str] = []
    with contextlib.suppress(ConfigError):
        known = list(load("target.signature")(target) or ())
    near = difflib.get_close_matches(name, known, n=1) or (["learning_rate"] if name == "lr" else [])
    takes = f"; {target} takes {', '.join(known)}" if known else ""
    path = f"model.arguments.{(near or [name])[0]}"
    return f"; what the module is made with stands in model.arguments: replace({{{path!r}: ...}}){takes}"


# -- YAML

COMMITTED = "kit.train.CommittedConfig"
"""The callback that carries the Config in a committed file, which is otherwise LightningCLI's own."""


def _read_text(path: str | Path) -> str:
    file = resolve_path(path)
    try:
        return file.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(f"cannot read {path}: there is no file {file}{near(file)}") from None
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error


def read_yaml(text: str, where: str = "") -> dict[str, Any]:
    """The mapping that a YAML 1.2 text holds.

    Raises:
        ConfigError: with line and column for broken YAML, aliases, duplicate keys and what is too large or deep.
    """
    return _load_yaml(text, where)


def write_yaml(values: Mapping[str, Any]) -> str:
    """YAML 1.2 that `read_yaml` reads back as equal values."""
    return _dump_yaml(values, {})


def committed_text(values: Mapping[str, Any], where: str = "") -> str:
    """The text of the Config that a committed file carries.

    Raises:
        ConfigError: when it carries none.
    """
    trainer = values.get("trainer")
    callbacks = trainer.get("callbacks") if isinstance(trainer, dict) else None
    for entry in callbacks if isinstance(callbacks, list) else ():
        if isinstance(entry, dict) and entry.get("class_path") == COMMITTED:
            text = (entry.get("init_args") or {}).get("config")
            if isinstance(text, str):
                return text
    message = f"no {COMMITTED} with its config among trainer.callbacks; it is no file that kit.commit wrote"
    raise ConfigError([Problem("trainer.callbacks", message)], where)


def _load_yaml(text: str, where: str) -> dict[str, Any]:
    from ruamel.yaml import YAML
    from ruamel.yaml.error import MarkedYAMLError, YAMLError

    yaml = YAML(typ="safe", pure=True)
    yaml.Parser = _parser_without_bombs(where)
    try:
        if len(text.encode()) > _LARGEST_YAML_BYTES:
            raise ConfigError(f"larger than {format_bytes(_LARGEST_YAML_BYTES)}; a config is a page of text", where)
        values = yaml.load(text)
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        problem = (error.problem or error.context or "not YAML").splitlines()[0]
        problem = problem.partition(" with value ")[0]  # of a duplicate key: it may be a password
        raise ConfigError(f"{place}{problem}", where) from None
    except (YAMLError, ValueError, TypeError, RecursionError, UnicodeError, AttributeError, IndexError) as error:
        if isinstance(error, ConfigError):
            raise
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ConfigError(f"not YAML 1.2: {reason}", where) from None
    if values is None:
        return {}
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        is_path = isinstance(values, str) and values.endswith((".yaml", ".yml"))
        way_out = "; kit.Config.load reads a file" * is_path
        raise ConfigError(f"a config is a mapping of sections, such as 'loader:'{way_out}", where)
    return values


def _parser_without_bombs(where: str) -> type[Any]:
    """A parser that refuses aliases, deep nesting and very many values as it meets them: all can exhaust the reader."""
    from ruamel.yaml import events as kinds
    from ruamel.yaml.parser import Parser

    class WithoutBombs(Parser):
        values = depth = 0

        def get_event(self) -> Any:
            event = super().get_event()
            line = event.start_mark.line + 1
            self.values += isinstance(event, kinds.ScalarEvent)
            if self.values > _MOST_YAML_VALUES:
                problem = f"more than {_MOST_YAML_VALUES:,} values; a config is a page of text"
                raise ConfigError(f"line {line}, column {event.start_mark.column + 1}: {problem}", where)
            if isinstance(event, kinds.AliasEvent):
                raise ConfigError(f"line {line}: YAML aliases (*name) are not accepted", where)
            self.depth += isinstance(event, kinds.CollectionStartEvent) - isinstance(event, kinds.CollectionEndEvent)
            if self.depth > _DEEPEST_YAML:
                raise ConfigError(f"line {line}: nested deeper than {_DEEPEST_YAML} levels", where)
            return event

    return WithoutBombs


def _dump_yaml(values: Mapping[str, Any], comments: Mapping[str, str]) -> str:
    """Top-level keys are written one by one: most are as they were in the last text, and 25 ms write a whole config."""
    texts = []
    for key, value in values.items():
        known = key, repr(value), bool(comments)  # of equal values 1, 1.0 and True are written differently
        text = _written.get(known)
        if text is None:
            if len(_written) >= _MOST_WRITTEN:
                _written.clear()
            text = _written[known] = _dump_part({key: value}, comments)
        texts.append(text)
    return "".join(texts) or "{}\n"


_MOST_WRITTEN = 512
_written: dict[tuple[str, str, bool], str] = {}


def _dump_part(values: Mapping[str, Any], comments: Mapping[str, str]) -> str:
    import io

    from ruamel.yaml import YAML
    from ruamel.yaml.comments import CommentedMap

    def commented(mapping: Mapping[str, Any], prefix: str, indent: int) -> CommentedMap:
        result = CommentedMap()
        for key, value in mapping.items():
            path = f"{prefix}{key}"
            is_section = path in Config.model_fields and isinstance(value, Mapping)
            result[key] = commented(value, path + ".", indent + 2) if is_section else value
            if path in comments:
                result.yaml_set_comment_before_after_key(key, before=comments[path], indent=indent)
        return result

    yaml = YAML()
    yaml.width = 10_000
    null = "tag:yaml.org,2002:null"  # written out: an empty value reads as a slip
    yaml.representer.add_representer(type(None), lambda dumper, _: dumper.represent_scalar(null, "null"))
    stream = io.StringIO()
    yaml.dump(commented(values, "", 0), stream)
    return stream.getvalue()
