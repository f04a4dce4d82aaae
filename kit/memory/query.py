"""MemoryQuery: one configuration to dry-run, checked and complete, so that equal queries are recorded once.

It names the module and data as they travel, the config, and what of the target decides what is recorded: the kind of
device and its capability, the number format that `auto` becomes there, and the number of ranks. How much memory the
target has is no part of it. Whatever can be refused is refused here, before any process: what `kit.fit` refuses too,
except for devices, which need not exist.

Equal `key` means an equal recording, as long as the source files of module and data are unchanged; a module that those
import from another folder may change unseen. One of equal `any_card_key` serves too, where it says so of the card.

A prediction needs shapes only. So each tensor of the module travels as its shape, strides and type, and tensors that
share memory still share it. Data is sent whole up to `WHOLE_BYTES`, because its numbers may decide the shape of a
batch; beyond that each large array arrives as zeros, which take no memory, and a note says so.

Nothing here imports torch or numpy: only code that has loaded them can have made an object that needs them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import io
import json
import numbers
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cloudpickle

from kit.arguments import check_count
from kit.config import Config
from kit.errors import ConfigError, HardwareError, Problem
from kit.machine.machine import BF16_CAPABILITY, Machine, hardware
from kit.memory.replay.cards import THIS_MACHINE, DeviceTarget, target_of
from kit.train.choices import held_flags, validates_by
from kit.trial.payload import NO_PARTS, Part, TrainerParts, check_parts, parts_of, why_not_sent
from kit.trial.submit import check_targets, versions
from kit.units import format_bytes

MOST_RANKS = 1024
_IMMATERIAL = (
    "name", "trial", "calibration", "chunking", "training.seed", "training.max_epochs", "training.max_steps",
    "training.monitor", "training.monitor_mode", "training.early_stopping_patience", "hardware.accelerator",
    "hardware.devices", "hardware.precision", "hardware.threads_per_rank", "hardware.device_memory_bytes",
    "loader.prefetch_factor", "loader.batches_ahead", "loader.requests_in_flight", "loader.decode_threads",
    "loader.pin_memory",
)  # fmt: skip
"""Fields that change nothing of what a step allocates; precision counts as what it was resolved to."""


@dataclass(frozen=True, kw_only=True)
class MemoryQuery:
    """One configuration on one kind of device."""

    config: Config
    module: Part
    data: Part
    payload: Payload
    precision: str
    world_size: int
    device_kind: str
    """`cuda` or `cpu`."""
    capability: tuple[int, int] | None
    """CUDA compute capability; None on the CPU."""
    trainer: TrainerParts = NO_PARTS
    """Callbacks and arguments of the Trainer, beside those that the config says."""

    def with_config(self, config: Config, target: DeviceTarget, world_size: int | None = None) -> MemoryQuery:
        """The same module and data under another config or on another target."""
        check_parts(self.module, self.data, config)
        return _query(self.module, self.data, self.payload, config, target, world_size, self.trainer)

    @property
    def evaluations(self) -> tuple[int, ...]:
        """What of `trial` decides whether and how validation, test and prediction are recorded; empty without any."""
        trial = self.config.trial
        validates = trial.validate_every_steps or validates_by(self.trainer.flags)
        # After the second step a validation holds what it does after any other.
        every = min(2, trial.validate_every_steps)
        validation = (every, trial.validation_batches, trial.sanity_batches) if validates else ()
        after = (trial.test_batches, trial.predict_batches)
        return (*validation, *(after if any(after) else ()))

    @property
    def accumulation(self) -> int:
        """Micro-batches recorded per step: from the second on they are all alike."""
        return min(2, self.config.levers.accumulate_grad_batches)

    @property
    def ranks(self) -> int:
        """Ranks recorded: under ddp each holds the same, however many there are."""
        return min(2, self.world_size) if self.config.hardware.strategy == "ddp" else self.world_size

    @property
    def facts(self) -> dict[str, Any]:
        """What goes with its recording, where another card, or fewer ranks or micro-batches, are recorded than asked
        for."""
        levers = self.config.levers
        return {
            "world_size": self.world_size, "accumulate_grad_batches": levers.accumulate_grad_batches,
            "capability": self.capability,
        }  # fmt: skip

    @property
    def threads(self) -> int:
        """Threads that a rank computes with on the CPU: its kernels take their buffers by them. 1 for a GPU."""
        if self.device_kind != "cpu":
            return 1
        return self.config.hardware.threads_per_rank or max(1, hardware().cores // self.world_size)

    @functools.cached_property
    def key(self) -> str:
        """Hexadecimal digits, the same for queries of the same answer."""
        return hashlib.sha256(f"{self.any_card_key} {self.capability}".encode()).hexdigest()

    @functools.cached_property
    def any_card_key(self) -> str:
        """The same for queries that differ in the card alone; files count as they were when first asked."""
        config = self.config.values()
        for path in _IMMATERIAL:
            section, _, field = path.partition(".")
            config.pop(section) if not field else config[section].pop(field)
        config["levers"]["accumulate_grad_batches"] = self.accumulation
        recorded = [
            config, self.payload.digest, self.precision, self.ranks, self.device_kind, self.threads,
            versions(), list(_files(self)), *([self.evaluations] if self.evaluations else ()),
        ]  # fmt: skip
        canonical = json.dumps(recorded, sort_keys=True)
        return hashlib.sha256(canonical.encode()).hexdigest()


def make_query(
    module: object, data: object, config: object, device: str | int | DeviceTarget, world_size: int | None = None,
    trainer: TrainerParts = NO_PARTS,
) -> tuple[MemoryQuery, DeviceTarget]:  # fmt: skip
    """The query, and the target it is asked for; module and data are what `kit.fit` takes.

    Raises:
        ConfigError: for what `kit.fit` would refuse, and a number of ranks that does not fit the strategy.
        HardwareError: for a precision that the target does not compute.
        PlanError: for an unknown device.
    """
    if not isinstance(config, Config):
        raise ConfigError(
            f"a prediction takes a Config, got {type(config).__name__}; call predict_memory(config, module, data)"
        )
    parts = parts_of(module, data, config)
    check_targets(*parts, config)
    check_parts(*parts, config)
    target = find_target_device(device, config, world_size)
    trainer = TrainerParts(callbacks=trainer.callbacks, flags=held_flags(trainer.flags))
    return _query(*parts, strip_weights(*parts, trainer), config, target, world_size, trainer), target


def find_target_device(device: str | int | DeviceTarget, config: Config, world_size: int | None = None) -> DeviceTarget:
    """The target that `device` names; this machine's is the one the config would be fitted on."""
    if not (isinstance(device, str) and device.strip().lower() == THIS_MACHINE):
        return target_of(device)
    return target_here(config, hardware(), ranks_of(config, world_size))


def target_here(config: Config, machine: Machine, world_size: int) -> DeviceTarget:
    """This machine as a target: its CPU where the config asks for it."""
    gpus = () if config.hardware.accelerator == "cpu" else machine.gpus
    target = target_of(THIS_MACHINE, dataclasses.replace(machine, gpus=gpus), world_size)
    limit_bytes = config.hardware.device_memory_bytes
    if not 0 < limit_bytes < target.capacity_bytes:
        return target
    # A limit on the allocator: what is held outside it lies outside the limit too.
    reason = f"hardware.device_memory_bytes leaves {format_bytes(limit_bytes)} for the allocator of each rank"
    return dataclasses.replace(target, capacity_bytes=limit_bytes, outside_bytes=(0, 0), reasons=(reason,))


def _query(
    module: Part, data: Part, payload: Payload, config: Config, target: DeviceTarget, world_size: int | None,
    trainer: TrainerParts,
) -> MemoryQuery:  # fmt: skip
    return MemoryQuery(
        config=config, module=module, data=data, payload=payload, precision=precision_of(config, target),
        world_size=ranks_of(config, world_size), device_kind=target.device_kind, capability=target.capability,
        trainer=trainer,
    )  # fmt: skip


def precision_of(config: Config, target: DeviceTarget) -> str:
    """What `auto` is on the target.

    Raises:
        HardwareError: for 16-mixed on a CPU.
    """
    wanted = config.hardware.precision
    if target.device_kind == "cpu":
        if wanted == "16-mixed":
            raise HardwareError(
                f"hardware.precision is 16-mixed, which needs a GPU, but {target.name} has none; name a GPU with "
                "device=, or use bf16-mixed or 32-true"
            )
        return "32-true" if wanted == "auto" else wanted
    if wanted != "auto":
        return wanted
    return "bf16-mixed" if (target.capability or (0, 0)) >= BF16_CAPABILITY else "16-mixed"


def as_ddp(config: Any, devices: object) -> tuple[Any, tuple[str, ...]]:
    """The config with which several devices without a strategy each have a copy of the model, and that this is so; any
    other as it is. What is no such number is for `ranks_of` to refuse."""
    several = isinstance(devices, numbers.Integral) and 1 < int(devices) <= MOST_RANKS
    if not (several and isinstance(config, Config) and config.hardware.strategy == "none"):
        return config, ()
    reason = f"{devices} devices have no strategy in the config, so each has a copy of the model (ddp)"
    return config.replace({"hardware.strategy": "ddp", "hardware.devices": devices}), (reason,)


def ranks_of(config: Config, world_size: int | None = None) -> int:
    """How many ranks are asked for; no such devices need to be here.

    Raises:
        ConfigError: when the number does not fit the strategy, or is not known.
    """
    hardware = config.hardware
    shards, devices = hardware.shards, hardware.devices
    if world_size is None:
        counted = len(devices) if isinstance(devices, tuple) else int(devices) if devices not in ("auto", -1) else 0
        world_size = counted or (shards[0] * shards[1] if shards else 1 if hardware.strategy == "none" else 0)
        if not world_size:
            message = f"-1 (all) with {hardware.strategy} is no number of ranks to predict for; give world_size="
            raise ConfigError([Problem("hardware.devices", message)])
    check_count("world_size", world_size, MOST_RANKS)
    if hardware.strategy == "none" and world_size > 1:
        raise ConfigError([Problem("hardware.strategy", f"none uses one device, not {world_size}; use ddp or fsdp")])
    if shards and shards[0] * shards[1] != world_size:
        message = f"{hardware.strategy} is {shards[0]} × {shards[1]} = {shards[0] * shards[1]} ranks, not {world_size}"
        raise ConfigError([Problem("hardware.strategy", message)])
    if hardware.strategy in ("ddp", "fsdp") and world_size < 2:
        message = f"{hardware.strategy} needs at least 2 ranks, not {world_size}; use none"
        raise ConfigError([Problem("hardware.strategy", message)])
    return world_size


def _files(query: MemoryQuery) -> Iterator[tuple[str, int]]:
    """The newest change below each folder that the query's code or data comes from."""
    from kit.config import resolve_path
    from kit.data.stores.manifest import GROUP_KEY, MANIFEST_KEY
    from kit.targets import find_target

    files = [find_target(query.config.model.target).file] if query.module.kind == "default" else []
    for part in (query.module, query.data, *query.trainer.callbacks):
        if part.kind == "path":
            files.append(find_target(part.value).file)
        elif part.kind not in ("default", "module"):  # a class of a notebook has no file: it travels by value
            kind = part.value if part.kind in ("class", "factory") else type(part.value)
            file = getattr(sys.modules.get(getattr(kind, "__module__", "") or ""), "__file__", None)
            files.append(Path(file) if file and file.endswith(".py") else None)
    for folder in sorted({file.parent for file in files if file is not None}):
        # `versions` stands for what is installed.
        sources = () if "site-packages" in folder.parts else folder.glob("*.py")
        yield str(folder), max((file.stat().st_mtime_ns for file in sources), default=0)
    if query.data.kind == "default":
        url = query.config.data.url.removeprefix("file://")
        written = [] if "://" in url else [resolve_path(url) / name for name in (GROUP_KEY, MANIFEST_KEY)]
        changed = max((file.stat().st_mtime_ns for file in written if file.is_file()), default=0)
        yield query.config.data.url, changed


WHOLE_BYTES = 256 << 20
_LARGE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Payload:
    """Module and data, ready to be sent to a prediction."""

    module: bytes
    data: bytes
    trainer: bytes = b""
    """Callbacks and arguments of the Trainer; empty where there are none."""
    notes: tuple[str, ...] = ()
    """What was left out, in sentences."""

    @property
    def digest(self) -> str:
        """Equal for equal parts: the weights do not count."""
        return hashlib.sha256(self.module + b"\0" + self.data + self.trainer).hexdigest()


def strip_weights(module: Part, data: Part, trainer: TrainerParts = NO_PARTS) -> Payload:
    """Pack them, the module and callbacks without weights.

    Raises:
        ConfigError: naming the object that cannot be sent, and where it was found.
    """
    # How it was compiled says nothing of its memory, which is that without.
    plain = dataclasses.replace(module, compiled=b"compiled" if module.compiled else b"")
    without_weights = _dump("module", plain, _WithoutWeights).stream.getvalue()
    parts = b""
    if trainer != NO_PARTS:
        parts = _dump("callbacks", Part("instance", trainer), _WithoutWeights).stream.getvalue()
    thin = _dump("data", data, _WithoutLargeArrays)
    if not thin.left_out_bytes:
        return Payload(without_weights, thin.stream.getvalue(), parts)
    if thin.left_out_bytes <= WHOLE_BYTES:
        return Payload(without_weights, _dump("data", data, _Whole).stream.getvalue(), parts)
    note = (
        f"data holds {format_bytes(thin.left_out_bytes)} of arrays, which were taken as zeros: batches whose shape "
        "depends on these numbers are not predicted"
    )
    return Payload(without_weights, thin.stream.getvalue(), parts, (note,))


class _Whole(cloudpickle.Pickler):  # type: ignore[misc]
    """Leaves nothing out."""

    def __init__(self) -> None:
        self.stream = io.BytesIO()
        self.left_out_bytes = 0
        super().__init__(self.stream, protocol=5)


class _WithoutWeights(_Whole):
    """Sends plain tensors as their shapes."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, EmptyStorage] = {}

    def reducer_override(self, value: Any) -> Any:
        torch = sys.modules.get("torch")
        if torch is None or not _is_plain_tensor(torch, value):
            return super().reducer_override(value)
        storage = value.untyped_storage()
        key = storage.data_ptr() or id(storage)
        held = self._storages.setdefault(key, EmptyStorage(storage.nbytes()))
        kind = "parameter" if isinstance(value, torch.nn.Parameter) else "tensor"
        shape = (tuple(value.shape), value.stride(), value.storage_offset())
        return empty_tensor, (held, value.dtype, shape, value.requires_grad, kind)


class _WithoutLargeArrays(_Whole):
    """Sends large tensors and arrays as zeros."""

    def reducer_override(self, value: Any) -> Any:
        modules: Any = sys.modules
        torch, numpy = modules.get("torch"), modules.get("numpy")
        if torch is not None and _is_plain_tensor(torch, value) and value.nbytes > _LARGE_BYTES:
            self.left_out_bytes += value.nbytes
            # The system gives zeros no memory before they are written to.
            return functools.partial(torch.zeros, dtype=value.dtype), (tuple(value.shape),)
        is_array = numpy is not None and isinstance(value, numpy.ndarray)
        if is_array and value.nbytes > _LARGE_BYTES and not value.dtype.hasobject:
            self.left_out_bytes += value.nbytes
            return numpy.zeros, (value.shape, value.dtype)
        return super().reducer_override(value)


def _is_plain_tensor(torch: Any, value: Any) -> bool:
    """A tensor that is its storage, shape and strides, and no more."""
    if not isinstance(value, torch.Tensor) or type(value) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
        return False
    return value.layout is torch.strided and value.device.type != "meta" and not value.is_quantized


def _dump(name: str, part: Part, kind: type[_Whole]) -> _Whole:
    pickler = kind()
    try:
        pickler.dump(part)
    except Exception as error:
        raise ConfigError([Problem(name, why_not_sent(part, error))]) from error
    return pickler


# -- where it arrives


@contextlib.contextmanager
def without_memory() -> Iterator[None]:
    """Inside, tensors that arrive have no memory at all: they are read only to import the code they belong to."""
    EmptyStorage.device = "meta"
    try:
        yield
    finally:
        EmptyStorage.device = "cpu"


@contextlib.contextmanager
def with_numbers() -> Iterator[None]:
    """Inside, tensors that arrive hold small numbers, with which a step can be run for real."""
    EmptyStorage.has_numbers = True
    try:
        yield
    finally:
        EmptyStorage.has_numbers = False


class EmptyStorage:
    """Memory of so many bytes, shared by the tensors that point into it; made when first asked for."""

    device = "cpu"
    has_numbers = False

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self._made: Any = None

    def __reduce__(self) -> tuple[type[EmptyStorage], tuple[int]]:
        return EmptyStorage, (self.size_bytes,)

    def tensor(self) -> Any:
        """(bytes,) of type uint8."""
        import torch

        if self._made is None:
            self._made = torch.empty(self.size_bytes, dtype=torch.uint8, device=self.device)
        return self._made


_WEIGHT_DEVIATION = 0.02


def empty_tensor(storage: EmptyStorage, dtype: Any, shape: tuple[Any, Any, int], requires_grad: bool, kind: str) -> Any:
    """A tensor as it was, but for the numbers; under fake tensors it is fake."""
    import torch

    size, stride, offset = shape
    values = storage.tensor().view(dtype).as_strided(size, stride, offset).detach()
    if EmptyStorage.has_numbers:
        # Variances and masks that are added may not be near nothing; counts are places where something lies.
        is_weight = kind == "parameter" and dtype.is_floating_point
        values.normal_(0, _WEIGHT_DEVIATION) if is_weight else values.fill_(dtype.is_floating_point)
    if kind == "parameter":
        return torch.nn.Parameter(values, requires_grad)
    return values.requires_grad_(requires_grad)
