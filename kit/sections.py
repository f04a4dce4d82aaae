"""The sections of a Config and their fields: each declared once, with type, default, unit, bounds and a sentence.

A section is frozen, strict about types and closed to unknown keys. What is plainly meant is taken: a number of numpy, a
path as text, one name in place of a list of one. Defaults live here and nowhere else.
"""

from __future__ import annotations

import math
import os
import re
import typing
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from kit.errors import ConfigError, Problem, did_you_mean
from kit.secrets_in_text import secrets_of
from kit.units import parse_bytes

_MOST_ITEMS = 10_000
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
    return parse_bytes(value) if isinstance(value, str | float) else value


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
        True, "Where a CPU trains: memory that a rank frees stays with it. glibc would give large arrays back to the "
        "system, now and then or at every step, which takes a page fault for every 4 KiB of the next ones. A rank then "
        "holds the most that it ever held. On a GPU it changes nothing.",
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

    batch_size: int = setting(
        16, "Samples per batch on each device. The last batch of an epoch of kit's own data may hold one more, so that "
        "all ranks take as many steps.", unit="samples", ge=1,
    )  # fmt: skip
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
        "must be equal, and along join each store goes on where the one before ends (exact), or those of url hold for "
        "all, element by element, and stores follow as they come (override).",
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
    guard: Annotated[dict[str, Annotated[int, Field(ge=0)]], AfterValidator(FrozenMapping)] = setting(
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
    latency_slow_fraction: float = setting(
        0.0, "For the plan: fraction of requests that are slower than the others by latency_slow_factor.", ge=0, le=1
    )
    latency_slow_factor: float = setting(
        5.0, "For the plan: how many times the latency of the others the slow requests take.", ge=1, le=10_000
    )
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
