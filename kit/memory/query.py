"""MemoryQuery: what a dry run is asked, checked and complete, so that equal questions need asking once.

It names the module and data as they travel, the config, and what of the target decides what is recorded: the kind of
device and its capability, the number format that `auto` is there, and the number of ranks. How much memory the target
has is no part of it. Everything a kernel can refuse is refused here, before any process: what `kit.fit` refuses too,
but not devices, which need not exist.

Equal `key` means an equal recording, while the source files of what is named are unchanged; a module that those import
from another folder may change unseen.

What travels to a prediction: the module without its weights, and the data, if large, without its numbers.

A prediction needs shapes only, so a tensor of the module becomes its shape, strides and type, and tensors that share
memory go on sharing it. Data is sent whole while it is small, because its numbers may decide the shape of a batch;
beyond `WHOLE_BYTES` each large array arrives as zeros that no memory stands behind, and a note says so.

Nothing here imports torch or numpy: an object that needs them is only met where they are loaded.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import io
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cloudpickle

from kit.config import Config
from kit.errors import ConfigError, HardwareError, Problem
from kit.machine.machine import Machine, hardware
from kit.memory.replay.cards import THIS_MACHINE, DeviceTarget, target_of
from kit.trial.payload import Part, check_parts, why_not_sent
from kit.trial.submit import check_targets, versions
from kit.units import format_bytes

MOST_RANKS = 1024
_BF16_CAPABILITY = (8, 0)
_IMMATERIAL = (
    "name",
    "trial",
    "calibration",
    "chunking",
    "training.seed",
    "training.max_epochs",
    "hardware.accelerator",
    "hardware.devices",
    "hardware.precision",
    "hardware.threads_per_rank",
    "hardware.device_memory_bytes",
    "loader.prefetch_factor",
    "loader.batches_ahead",
    "loader.requests_in_flight",
    "loader.decode_threads",
    "loader.pin_memory",
)
"""Fields that change nothing of what a step allocates; precision counts as what it was resolved to."""


@dataclass(frozen=True, kw_only=True)
class MemoryQuery:
    """One configuration on one kind of device."""

    config: Config
    module: Part
    data: Part
    parcel: Payload
    precision: str
    world_size: int
    device_kind: str
    """`cuda` or `cpu`."""
    capability: tuple[int, int] | None
    """CUDA compute capability; None on the CPU."""

    def with_config(self, config: Config, target: DeviceTarget, world_size: int | None = None) -> MemoryQuery:
        """The same module and data under another config or on another target."""
        check_parts(self.module, self.data, config)
        return _question(self.module, self.data, self.parcel, config, target, world_size)

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
        """What a recording says of it, where fewer ranks or micro-batches are recorded than were asked for."""
        return {
            "world_size": self.world_size,
            "accumulate_grad_batches": self.config.levers.accumulate_grad_batches,
        }

    @property
    def threads(self) -> int:
        """Threads that a rank computes with on the CPU: its kernels take their buffers by them. 1 for a GPU."""
        if self.device_kind != "cpu":
            return 1
        return self.config.hardware.threads_per_rank or max(1, hardware().cores // self.world_size)

    @functools.cached_property
    def key(self) -> str:
        """Hexadecimal digits, the same for questions of the same answer; files count as they were when first asked."""
        config = self.config.values()
        for path in _IMMATERIAL:
            section, _, field = path.partition(".")
            config.pop(section) if not field else config[section].pop(field)
        config["levers"]["accumulate_grad_batches"] = self.accumulation
        canonical = json.dumps(
            [
                config,
                self.parcel.digest,
                self.precision,
                self.ranks,
                self.device_kind,
                self.capability,
                self.threads,
                versions(),
                list(_files(self)),
            ],
            sort_keys=True,
        )
        return hashlib.sha256(canonical.encode()).hexdigest()


def make_query(
    module: object, data: object, config: object, device: str | int | DeviceTarget, world_size: int | None = None
) -> tuple[MemoryQuery, DeviceTarget]:
    """The question, and the target it is asked for.

    Args:
        module: What `kit.fit` takes.
        data: What `kit.fit` takes.
        config: A Config.
        device: A GPU model, a size, or "this machine".
        world_size: Ranks, instead of those that the config asks for.

    Raises:
        ConfigError: for what `kit.fit` would refuse, and a number of ranks that does not fit the strategy.
        HardwareError: for a precision that the target does not compute.
        PlanError: for an unknown device.
    """
    if not isinstance(config, Config):
        raise ConfigError(
            f"a prediction takes a Config, got {type(config).__name__}; call predict_memory(config) or "
            "predict_memory(module, data, config)"
        )
    parts = Part.of(module), Part.of(data)
    check_targets(*parts, config)
    check_parts(*parts, config)
    target = find_target_device(device, config, world_size)
    return _question(*parts, hollow(*parts), config, target, world_size), target


def find_target_device(device: str | int | DeviceTarget, config: Config, world_size: int | None = None) -> DeviceTarget:
    """The target that `device` names; this machine's is the one the config would be fitted on."""
    if not (isinstance(device, str) and device.strip().lower() == THIS_MACHINE):
        return target_of(device)
    return here(config, hardware(), ranks_of(config, world_size))


def here(config: Config, machine: Machine, world_size: int) -> DeviceTarget:
    """This machine as a target: its CPU where the config asks for it."""
    gpus = () if config.hardware.accelerator == "cpu" else machine.gpus
    target = target_of(THIS_MACHINE, dataclasses.replace(machine, gpus=gpus), world_size)
    limit_bytes = config.hardware.device_memory_bytes
    return _limited(target, limit_bytes) if 0 < limit_bytes < target.capacity_bytes else target


def _limited(target: DeviceTarget, limit_bytes: int) -> DeviceTarget:
    """A part of a target: what is held outside the allocator lies outside the limit too."""
    reason = f"hardware.device_memory_bytes leaves {format_bytes(limit_bytes)} for the allocator of each rank"
    return dataclasses.replace(target, capacity_bytes=limit_bytes, outside_bytes=(0, 0), reasons=(reason,))


def _question(
    module: Part, data: Part, parcel: Payload, config: Config, target: DeviceTarget, world_size: int | None
) -> MemoryQuery:
    return MemoryQuery(
        config=config, module=module, data=data, parcel=parcel, precision=precision_of(config, target),
        world_size=ranks_of(config, world_size), device_kind=target.device_kind, capability=target.capability,
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
    return "bf16-mixed" if (target.capability or (0, 0)) >= _BF16_CAPABILITY else "16-mixed"


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
    if not 1 <= world_size <= MOST_RANKS:
        raise ConfigError([Problem("world_size", f"{world_size} ranks; predictions go from 1 to {MOST_RANKS}")])
    if hardware.strategy == "none" and world_size > 1:
        raise ConfigError([Problem("hardware.strategy", f"none uses one device, not {world_size}; use ddp or fsdp")])
    if shards and shards[0] * shards[1] != world_size:
        message = f"{hardware.strategy} is {shards[0]} × {shards[1]} = {shards[0] * shards[1]} ranks, not {world_size}"
        raise ConfigError([Problem("hardware.strategy", message)])
    if hardware.strategy in ("ddp", "fsdp") and world_size < 2:
        message = f"{hardware.strategy} needs at least 2 ranks, not {world_size}; use none"
        raise ConfigError([Problem("hardware.strategy", message)])
    return world_size


# -- what may change while the question stays the same


def _files(question: MemoryQuery) -> Iterator[tuple[str, int]]:
    """The newest change below each folder that code or data of the question comes from."""
    from kit.targets import find_target

    names = [part.value for part in (question.module, question.data) if part.kind == "path"]
    if question.module.kind == "default":
        names.append(question.config.model.target)
    files = [find_target(name).file for name in names]
    files += [_file_of(part) for part in (question.module, question.data) if part.kind not in ("path", "default")]
    for folder in sorted({file.parent for file in files if file is not None}):
        yield str(folder), _newest(folder)
    if question.data.kind == "default":
        yield question.config.data.url, _changed(question.config)


def _file_of(part: Part) -> Path | None:
    """Where the class or function is defined; None for one of a notebook, which travels by value."""
    kind = part.value if part.kind in ("class", "factory") else type(part.value)
    module = sys.modules.get(getattr(kind, "__module__", "") or "")
    file = getattr(module, "__file__", None)
    return Path(file) if file and file.endswith(".py") else None


def _newest(folder: Path) -> int:
    if _is_installed(folder):
        return 0
    return max((file.stat().st_mtime_ns for file in folder.glob("*.py")), default=0)


@functools.cache
def _is_installed(folder: Path) -> bool:
    """Whether the folder belongs to an installed package, which `versions` stand for."""
    return "site-packages" in folder.parts


def _changed(config: Config) -> int:
    """When the store, if it is a folder here, was last written; 0 for any other."""
    from kit.config import resolve_path
    from kit.data.stores.manifest import GROUP_KEY, MANIFEST_KEY

    url = config.data.url.removeprefix("file://")
    if "://" in url:
        return 0
    marks = (resolve_path(url) / name for name in (GROUP_KEY, MANIFEST_KEY))
    return max((mark.stat().st_mtime_ns for mark in marks if mark.is_file()), default=0)


def plain(question: MemoryQuery) -> dict[str, Any]:
    """What the process that answers has to know beside config and parcel, as JSON values."""
    return {
        "precision": question.precision,
        "world_size": question.ranks,
        "device_kind": question.device_kind,
        "capability": question.capability,
        "facts": question.facts,
    }


WHOLE_BYTES = 256 << 20
_LARGE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Payload:
    """Module and data, ready to be sent to a prediction."""

    module: bytes
    data: bytes
    notes: tuple[str, ...] = ()
    """What was left out, in sentences."""

    @property
    def digest(self) -> str:
        """Equal for equal parts: the weights do not count."""
        return hashlib.sha256(self.module + b"\0" + self.data).hexdigest()


def hollow(module: Part, data: Part) -> Payload:
    """Pack both, the module without weights.

    Raises:
        ConfigError: naming the object that cannot be sent, and where it was found.
    """
    hollowed = _dump("module", module, _Hollow)
    thin = _dump("data", data, _Thin)
    if thin.left_out_bytes <= WHOLE_BYTES:
        whole = _dump("data", data, _Whole) if thin.left_out_bytes else thin
        return Payload(hollowed.value, whole.value)
    note = (
        f"data holds {format_bytes(thin.left_out_bytes)} of arrays, which were taken as zeros: batches whose shape "
        "depends on these numbers are not foreseen"
    )
    return Payload(hollowed.value, thin.value, (note,))


class _Whole(cloudpickle.Pickler):  # type: ignore[misc]
    """Leaves nothing out."""

    def __init__(self) -> None:
        self.stream = io.BytesIO()
        self.left_out_bytes = 0
        super().__init__(self.stream, protocol=5)

    @property
    def value(self) -> bytes:
        return self.stream.getvalue()


class _Hollow(_Whole):
    """Leaves out what all plain tensors hold."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, HollowStorage] = {}

    def reducer_override(self, value: Any) -> Any:
        torch = sys.modules.get("torch")
        if torch is None or not _is_plain_tensor(torch, value):
            return super().reducer_override(value)
        storage = value.untyped_storage()
        key = storage.data_ptr() or id(storage)
        held = self._storages.setdefault(key, HollowStorage(storage.nbytes()))
        kind = "parameter" if isinstance(value, torch.nn.Parameter) else "tensor"
        shape = (tuple(value.shape), value.stride(), value.storage_offset())
        return hollow_tensor, (held, value.dtype, shape, value.requires_grad, kind)


class _Thin(_Whole):
    """Leaves out what large tensors and arrays hold."""

    def reducer_override(self, value: Any) -> Any:
        torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
        if torch is not None and _is_plain_tensor(torch, value) and value.nbytes > _LARGE_BYTES:
            self.left_out_bytes += value.nbytes
            return blank_tensor, (tuple(value.shape), value.dtype)
        if numpy is not None and _is_large_array(numpy, value):
            self.left_out_bytes += value.nbytes
            return blank_array, (value.shape, value.dtype)
        return super().reducer_override(value)


def _is_plain_tensor(torch: Any, value: Any) -> bool:
    """A tensor that is its storage, shape and strides, and no more."""
    if not isinstance(value, torch.Tensor) or type(value) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
        return False
    return value.layout is torch.strided and value.device.type != "meta" and not value.is_quantized


def _is_large_array(numpy: Any, value: Any) -> bool:
    return isinstance(value, numpy.ndarray) and value.nbytes > _LARGE_BYTES and not value.dtype.hasobject


def _dump(name: str, part: Part, kind: type[Any]) -> Any:
    pickler = kind()
    try:
        pickler.dump(part)
    except Exception as error:
        raise ConfigError([Problem(name, why_not_sent(part, error))]) from error
    return pickler


# -- where it arrives


@contextlib.contextmanager
def without_memory() -> Iterator[None]:
    """Inside, hollow tensors have no memory at all, and can be read to load the code that belongs to them."""
    HollowStorage.device = "meta"
    try:
        yield
    finally:
        HollowStorage.device = "cpu"


class HollowStorage:
    """Memory of so many bytes, shared by the tensors that point into it; made when first asked for."""

    device = "cpu"

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self._made: Any = None

    def __reduce__(self) -> tuple[type[HollowStorage], tuple[int]]:
        return HollowStorage, (self.size_bytes,)

    def tensor(self) -> Any:
        """(bytes,) of type uint8."""
        import torch

        if self._made is None:
            self._made = torch.empty(self.size_bytes, dtype=torch.uint8, device=self.device)
        return self._made


def hollow_tensor(
    storage: HollowStorage,
    dtype: Any,
    shape: tuple[tuple[int, ...], tuple[int, ...], int],
    requires_grad: bool,
    kind: str,
) -> Any:
    """A tensor as it was, but for the numbers; under fake tensors it is fake."""
    import torch

    size, stride, offset = shape
    values = storage.tensor().view(dtype).as_strided(size, stride, offset).detach()
    if kind == "parameter":
        return torch.nn.Parameter(values, requires_grad)
    return values.requires_grad_(requires_grad)


def blank_tensor(shape: tuple[int, ...], dtype: Any) -> Any:
    """Zeros; the system gives them no memory before they are written to."""
    import torch

    return torch.zeros(shape, dtype=dtype)


def blank_array(shape: tuple[int, ...], dtype: Any) -> Any:
    """Zeros; the system gives them no memory before they are written to."""
    import numpy as np

    return np.zeros(shape, dtype)
