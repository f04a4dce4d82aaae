"""The GPUs of this machine as a table, read from NVIDIA's management library (NVML) and never through CUDA.

A CUDA context in the notebook kernel would hold GPU memory and break forking; NVML needs none. Where there is no driver
the table is empty. Cards with MIG enabled are listed as their instances. Bytes are bytes, utilisation is a fraction,
and the order is PCI order. GPUs are named by UUID, because CUDA numbers them differently.

The one invariant: a card that cannot be read is left out with a note, and the others are listed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any


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
    card_used_bytes: int | None = None
    """Held on the whole card, where `total_bytes` and `free_bytes` are those of one person's share of it."""

    @property
    def used_bytes(self) -> int:
        """Held by all processes, of the whole card."""
        return self.total_bytes - self.free_bytes if self.card_used_bytes is None else self.card_used_bytes

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
    import pynvml

    return read_nvml(pynvml)


def read_nvml(nvml: Any) -> GpuTable:
    """The table as the module `pynvml` gives it."""
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return GpuTable()
    gpus: list[Gpu] = []
    notes: list[str] = []
    try:
        for index in range(nvml.nvmlDeviceGetCount()):
            try:
                gpus += list(_card(nvml, index, nvml.nvmlDeviceGetHandleByIndex(index)))
            except nvml.NVMLError as error:
                notes.append(f"GPU {index} cannot be read and is left out: {error}")
    finally:
        nvml.nvmlShutdown()
    return GpuTable(gpus=tuple(gpus), source="NVML", notes=tuple(notes))


def _card(nvml: Any, index: int, handle: Any) -> Iterator[Gpu]:
    """One card, or its MIG instances."""

    def gpu(handle: Any, **known: Any) -> Gpu:
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        processes = _ask(nvml, nvml.nvmlDeviceGetComputeRunningProcesses, handle)
        return Gpu(
            index=index, uuid=_text(nvml.nvmlDeviceGetUUID(handle)), total_bytes=int(memory.total),
            free_bytes=int(memory.free), processes=len(processes or ()),
            capability=tuple(capability) if capability else None, **known,
        )  # fmt: skip

    name = _text(nvml.nvmlDeviceGetName(handle))
    capability = _ask(nvml, nvml.nvmlDeviceGetCudaComputeCapability, handle)
    mode = _ask(nvml, nvml.nvmlDeviceGetMigMode, handle)
    if not mode or mode[0] != 1:
        rates = _ask(nvml, nvml.nvmlDeviceGetUtilizationRates, handle)
        yield gpu(handle, name=name, utilisation_fraction=rates.gpu / 100 if rates else None)
        return
    uuid = _text(nvml.nvmlDeviceGetUUID(handle))
    for place in range(_ask(nvml, nvml.nvmlDeviceGetMaxMigDeviceCount, handle) or 0):
        instance = _ask(nvml, nvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, place)
        if instance is not None:
            yield gpu(instance, name=f"{name} MIG", parent=uuid)


def _ask(nvml: Any, query: Callable[..., Any], *arguments: Any) -> Any:
    """The answer, or None from a card or driver that does not support the query."""
    try:
        return query(*arguments)
    except nvml.NVMLError:
        return None


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def read_joules(uuid: str) -> float | None:
    """What the card of that UUID has taken since its driver was loaded; None where there is no such counter.

    Volta and newer have one, of the whole board; a MIG instance has none. It moves every 20 to 100 ms (PETSc's manual
    of `PetscLogGpuEnergyMeter`).
    """
    import pynvml as nvml

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
    in_pci_order = environment.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID" or len({gpu.name for gpu in table.gpus}) < 2
    if re.search(r"(^|,)\s*\d", setting) and not in_pci_order:
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
