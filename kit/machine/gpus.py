"""The GPUs of this machine as a table, read from NVIDIA's management library and never through CUDA.

A CUDA context in the notebook kernel would hold GPU memory and break forking; NVML needs none. Where the Python binding
or its library is missing, `nvidia-smi` is asked; where there is no driver, the answer is an empty table, quietly.
Cards with MIG enabled are listed as their instances. Bytes are bytes, utilisation is a fraction, and the order is PCI
order. GPUs are named by UUID, because CUDA numbers them differently.

The one invariant: a card that cannot be read costs itself, with a note, and never the others.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

_SMI_SECONDS = 5.0
_SMI_FIELDS = (
    "index",
    "uuid",
    "name",
    "memory.total",
    "memory.free",
    "utilization.gpu",
    "compute_cap",
    "mig.mode.current",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU, or one MIG instance of it."""

    index: int
    """Of the card, in PCI order."""
    uuid: str
    name: str
    total_bytes: int
    free_bytes: int
    utilisation_fraction: float | None = None
    """Share of the last second in which a kernel ran; None where the card does not say (MIG)."""
    processes: int = 0
    """Compute processes that hold it, as far as the driver shows them."""
    capability: tuple[int, int] | None = None
    parent: str | None = None
    """UUID of the card, for a MIG instance."""
    claimed: str = ""
    """The trials that hold it, in words; see `kit.machine.claims`."""

    @property
    def is_mig(self) -> bool:
        return self.parent is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuTable:
    """What a reader found, from where, and what it could not read."""

    gpus: tuple[Gpu, ...] = ()
    source: str = "no NVIDIA driver"
    notes: tuple[str, ...] = field(default=())


def read_gpus() -> GpuTable:
    """Every GPU of this machine; an empty table where there is no driver."""
    try:
        import pynvml
    except ImportError:
        return read_smi()
    table = read_nvml(pynvml)
    return table if table is not None else read_smi()


# -- NVML


def read_nvml(nvml: Any) -> GpuTable | None:
    """The table as the module `pynvml` gives it; None when the library or the driver is missing."""
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return None
    gpus: list[Gpu] = []
    notes: list[str] = []
    try:
        for index in range(nvml.nvmlDeviceGetCount()):
            try:
                gpus += _card(nvml, index, nvml.nvmlDeviceGetHandleByIndex(index))
            except nvml.NVMLError as error:
                notes.append(f"GPU {index} cannot be read and is left out: {error}")
    finally:
        nvml.nvmlShutdown()
    return GpuTable(gpus=tuple(gpus), source="NVML", notes=tuple(notes))


def _card(nvml: Any, index: int, handle: Any) -> list[Gpu]:
    """One card, or its MIG instances."""
    name, uuid = _text(nvml.nvmlDeviceGetName(handle)), _text(nvml.nvmlDeviceGetUUID(handle))
    capability = _ask(nvml, nvml.nvmlDeviceGetCudaComputeCapability, handle)
    common: dict[str, Any] = {"index": index, "capability": tuple(capability) if capability else None}
    mode = _ask(nvml, nvml.nvmlDeviceGetMigMode, handle)
    if mode and mode[0] == 1:
        return [
            _gpu(nvml, instance, name=f"{name} MIG", parent=uuid, **common) for instance in _instances(nvml, handle)
        ]
    rates = _ask(nvml, nvml.nvmlDeviceGetUtilizationRates, handle)
    return [_gpu(nvml, handle, name=name, utilisation_fraction=rates.gpu / 100 if rates else None, **common)]


def _instances(nvml: Any, handle: Any) -> Iterator[Any]:
    for place in range(_ask(nvml, nvml.nvmlDeviceGetMaxMigDeviceCount, handle) or 0):
        instance = _ask(nvml, nvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, place)
        if instance is not None:
            yield instance


def _gpu(nvml: Any, handle: Any, **known: Any) -> Gpu:
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    processes = _ask(nvml, nvml.nvmlDeviceGetComputeRunningProcesses, handle)
    return Gpu(
        uuid=_text(nvml.nvmlDeviceGetUUID(handle)), total_bytes=int(memory.total), free_bytes=int(memory.free),
        processes=len(processes or ()), **known,
    )  # fmt: skip


def _ask(nvml: Any, question: Callable[..., Any], *arguments: Any) -> Any:
    """The answer, or None from a card or driver that does not know the question."""
    try:
        return question(*arguments)
    except nvml.NVMLError:
        return None


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def read_joules(uuid: str) -> float | None:
    """What the card of that UUID has taken since its driver was loaded; None where there is no such counter.

    Volta and newer have one, of the whole board; a MIG instance has none. It moves every 20 to 100 ms (PETSc's manual
    of `PetscLogGpuEnergyMeter`).
    """
    try:
        import pynvml as nvml
    except ImportError:
        return None
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return None
    try:
        handle = _ask(nvml, nvml.nvmlDeviceGetHandleByUUID, uuid)
        millijoules = None if handle is None else _ask(nvml, nvml.nvmlDeviceGetTotalEnergyConsumption, handle)
    finally:
        nvml.nvmlShutdown()
    return None if millijoules is None else millijoules / 1000


# -- nvidia-smi


def read_smi() -> GpuTable:
    """The table as `nvidia-smi` gives it; empty when there is none or it fails."""
    program = shutil.which("nvidia-smi")
    cards = _smi(program, f"--query-gpu={','.join(_SMI_FIELDS)}") if program else None
    if program is None or cards is None:
        return GpuTable()
    return parse_smi(cards, _smi(program, "--query-compute-apps=gpu_uuid") or "")


def parse_smi(cards: str, processes: str) -> GpuTable:
    """The table in two CSV texts of nvidia-smi, without header and units: cards, and one GPU UUID a process."""
    holders = Counter(line.strip() for line in processes.splitlines())
    gpus: list[Gpu] = []
    notes: list[str] = []
    for line in filter(str.strip, cards.splitlines()):
        fields = [cell.strip() for cell in line.split(",")]
        row = dict(zip(_SMI_FIELDS, fields, strict=False))
        if len(fields) != len(_SMI_FIELDS) or not row["memory.total"].isdigit() or not row["memory.free"].isdigit():
            notes.append(f"nvidia-smi: {line.strip()!r} cannot be read and is left out")
        elif row["mig.mode.current"] == "Enabled":
            notes.append(f"GPU {row['index']} has MIG enabled; its instances are seen with nvidia-ml-py only")
        else:
            gpus.append(_smi_gpu(row, holders[row["uuid"]]))
    return GpuTable(gpus=tuple(gpus), source="nvidia-smi", notes=tuple(notes))


def _smi_gpu(row: Mapping[str, str], processes: int) -> Gpu:
    capability = re.fullmatch(r"(\d+)\.(\d+)", row["compute_cap"])
    busy = row["utilization.gpu"]
    return Gpu(
        index=int(row["index"]), uuid=row["uuid"], name=row["name"], processes=processes,
        total_bytes=int(row["memory.total"]) << 20, free_bytes=int(row["memory.free"]) << 20,
        utilisation_fraction=int(busy) / 100 if busy.isdigit() else None,
        capability=(int(capability[1]), int(capability[2])) if capability else None,
    )  # fmt: skip


def _smi(program: str, query: str) -> str | None:
    command = [program, query, "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SMI_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return None
    return done.stdout


# -- CUDA_VISIBLE_DEVICES


def visible(table: GpuTable, environment: Mapping[str, str]) -> GpuTable:
    """The GPUs that `CUDA_VISIBLE_DEVICES` lets a process of this environment use, in its order.

    As CUDA reads it: entries are numbers or beginnings of UUIDs, and the first that names nothing ends the list. A
    number or a card's UUID stands for the first instance of a card with MIG enabled.
    """
    setting = environment.get("CUDA_VISIBLE_DEVICES")
    if setting is None:
        return table
    chosen: list[Gpu] = []
    for entry in (part.strip() for part in setting.split(",")):
        gpu = _named(table.gpus, entry)
        if gpu is None:
            break
        if gpu not in chosen:
            chosen.append(gpu)
    notes = [f"CUDA_VISIBLE_DEVICES={setting} leaves {len(chosen)} of {len(table.gpus)} GPUs"] if table.gpus else []
    if re.search(r"(^|,)\s*\d", setting) and _order_matters(table.gpus, environment):
        notes.append(
            "its numbers are taken in PCI order, but CUDA counts the fastest first; "
            "use UUIDs or CUDA_DEVICE_ORDER=PCI_BUS_ID"
        )
    return replace(table, gpus=tuple(chosen), notes=(*table.notes, *notes))


def _named(gpus: Sequence[Gpu], entry: str) -> Gpu | None:
    if entry.isdecimal():
        return next((gpu for gpu in gpus if gpu.index == int(entry)), None)
    if not entry.startswith(("GPU-", "MIG-")):
        return None
    cards = {gpu.uuid for gpu in gpus if gpu.uuid.startswith(entry)}
    cards |= {gpu.parent for gpu in gpus if gpu.parent is not None and gpu.parent.startswith(entry)}
    if len(cards) != 1:
        return None
    return next(gpu for gpu in gpus if gpu.uuid in cards or gpu.parent in cards)


def _order_matters(gpus: Sequence[Gpu], environment: Mapping[str, str]) -> bool:
    return environment.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID" and len({gpu.name for gpu in gpus}) > 1
