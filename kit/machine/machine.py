"""What this machine has, and which of it a config gets: devices, ranks and precision, each with a reason.

`hardware()` looks (NVML and cgroups, never CUDA, never torch). `resolve_devices` decides; it is a pure function of the
config's hardware section and the machine. "auto" is the one least-occupied GPU that no trial has claimed: most free
memory (to a quarter of a GiB), then least utilised, then fewest processes, then first. Without GPUs it is the CPU,
where several devices mean several ranks that share the cores. GPUs are handed on as UUIDs only.

Refused before any process starts: devices that are not there, strategies that do not fit their number, several MIG
instances, and 16-mixed on a CPU.

`share()` says how many cores and how much memory this process may use, which in a container is less than the machine
has. Cores are the smaller of the CPU affinity and the cgroup's quota, rounded down and never below one. Memory is the
smaller of the cgroup's limit and what is installed; available memory can be taken without swapping or being killed,
page cache counted as free. Both cgroup versions are read, from the process's own group up to the root, because the
tightest counts. Without cgroups (other systems) the machine's own numbers stand. Paths start at `root`, so that a
folder can stand in for the machine.

Where several people share a machine, `KIT_SEAT=3/8 ada` is the third of eight equal shares, and `ada` who has it: every
eighth core, but one at least, and an eighth of the memory of host and GPUs. `hardware()` tells the share as if it were
the machine, so whatever kit chooses or predicts fits in it; the processes of trials are bound to its cores, and their
devices to its memory. What the notebook's own process does is not bound.
"""

from __future__ import annotations

import functools
import os
import re
import time
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from kit.errors import HardwareError
from kit.machine.claims import GpuLease, claims
from kit.machine.gpus import Gpu as Gpu
from kit.machine.gpus import GpuTable, read_gpus, visible
from kit.tables import html_list, html_table, text_table
from kit.units import format_bytes

if TYPE_CHECKING:
    from kit.config import Config
    from kit.sections import Hardware as HardwareSection

_UNLIMITED_BYTES = 1 << 60
"""Version 1 writes "no limit" as a number about this large."""
_OCCUPANCY_BYTES = 256 << 20
_CROWDED_FRACTION = 0.5
BF16_CAPABILITY = (8, 0)
"""From which CUDA compute capability on products of bf16 have units of their own."""
_COLUMNS = ("GPU", "name", "free", "memory", "busy", "processes", "capability", "UUID")


SEAT = "KIT_SEAT"
_SEAT_FORM = re.compile(r"(\d{1,4})/(\d{1,4})(?:\s+(\S.*))?")


@dataclass(frozen=True, slots=True)
class Seat:
    """One of `of` equal shares of a machine that several people use."""

    number: int
    """From 1 to `of`."""
    of: int
    name: str = ""

    def cores(self, allowed: Iterable[int]) -> tuple[int, ...]:
        """Of the cores that the process may use, those of this share: the same when asked again of the answer."""
        usable = sorted(allowed)
        mine = tuple(core for core in usable if core % self.of == self.number - 1)
        return mine or (usable[(self.number - 1) % len(usable)],)

    def bytes_of(self, total_bytes: int) -> int:
        """This share of that much memory."""
        return total_bytes // self.of

    def __str__(self) -> str:
        return f"share {self.number} of {self.of}" + (f" ({self.name})" if self.name else "")


def seat(environment: Mapping[str, str] | None = None) -> Seat | None:
    """This process's share of a machine that several people use, from `KIT_SEAT`; None without one.

    Raises:
        HardwareError: for a text that is no share.
    """
    text = (os.environ if environment is None else environment).get(SEAT, "").strip()
    if not text:
        return None
    match = _SEAT_FORM.fullmatch(text)
    number, of = (int(match[1]), int(match[2])) if match else (0, 0)
    if match is None or not 1 <= number <= of:
        raise HardwareError(f"{SEAT} is {text!r}, but must be a share such as '3/8' or '3/8 ada': the third of eight")
    return Seat(number, of, match[3] or "")


def take_seat() -> None:
    """Bind this process, and all that it starts, to the cores of its share; nothing without one."""
    mine = seat()
    if mine is not None and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, mine.cores(os.sched_getaffinity(0)))


def people_per_core() -> float:
    """How many people share each core of this process, at least 1: what takes a minute alone may take as many."""
    mine, installed = seat(), os.cpu_count() or 1
    return 1.0 if mine is None else max(1.0, mine.of * len(mine.cores(range(installed))) / installed)


def waiting_per_core() -> float:
    """How many processes want each core, at least 1: in a room by its people, else by the load of the last minute."""
    load = os.getloadavg()[0]
    if load <= 1:
        return people_per_core()
    return max(people_per_core(), min(_MOST_WAITING, load / _cores_at(int(time.monotonic()), os.environ.get(SEAT))))


@functools.lru_cache(maxsize=1)
def _cores_at(second: int, seat: str | None) -> int:  # noqa: ARG001 - what the answer holds for
    """Cores of this process: read at most once a second, since readers of small objects ask for each."""
    return share().cores


_MOST_WAITING = 8.0
"""In a container the load is that of the whole machine, whose other cores are none of ours."""


@dataclass(frozen=True, slots=True)
class Share:
    """What this process may use."""

    cores: int
    cores_installed: int
    memory_bytes: int
    memory_available_bytes: int
    memory_installed_bytes: int


def share(root: Path = Path("/")) -> Share:
    """Cores and memory this process may use now."""
    import psutil

    memory = psutil.virtual_memory()
    limit, available = memory_limit(root, memory.total, memory.available)
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    quota, mine = core_quota(root), seat()
    usable = len(allowed)
    if mine is not None:
        usable = len(mine.cores(allowed))
        quota = None if quota is None else quota / mine.of
        limit = mine.bytes_of(limit)
        available = min(available, limit)
    cores = usable if quota is None else min(usable, max(1, int(quota)))
    return Share(cores, os.cpu_count() or cores, limit, available, memory.total)


def core_quota(root: Path) -> float | None:
    """Cores' worth of time the cgroup grants, such as 1.5; None when it sets no limit."""
    quotas = []
    for folder in _folders(root, "cpu"):
        words = _read(folder / "cpu.max").split()
        if not words:
            words = [_read(folder / "cpu.cfs_quota_us").strip(), _read(folder / "cpu.cfs_period_us").strip()]
        if len(words) == 2 and all(word.isdigit() for word in words) and int(words[1]) > 0:
            quotas.append(int(words[0]) / int(words[1]))
    return min(quotas, default=None)


def memory_limit(root: Path, installed_bytes: int, available_bytes: int) -> tuple[int, int]:
    """(limit, available) bytes: the tightest of the machine's own and every cgroup's."""
    limit, available = installed_bytes, available_bytes
    for folder in _folders(root, "memory"):
        bound = _number(folder / "memory.max") or _number(folder / "memory.limit_in_bytes")
        if bound is None or bound >= _UNLIMITED_BYTES:
            continue
        used = _number(folder / "memory.current") or _number(folder / "memory.usage_in_bytes") or 0
        stat = dict(line.split(" ", 1) for line in _read(folder / "memory.stat").splitlines() if " " in line)
        cached = stat.get("total_inactive_file") or stat.get("inactive_file") or "0"
        limit = min(limit, bound)
        available = min(available, max(0, bound - used + (int(cached) if cached.strip().isdigit() else 0)))
    return limit, available


def _folders(root: Path, controller: str) -> Iterator[Path]:
    """Folders of the process's group for a controller, in both versions: innermost first, the mount itself last."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            mount = root / "sys/fs/cgroup"
        elif controller in controllers.split(","):
            mount = root / "sys/fs/cgroup" / controller
        else:
            continue
        inner = mount / path.strip().lstrip("/")
        # A container may see the host's path here and only its own group below the mount: missing folders are skipped.
        yield from (folder for folder in (inner, *inner.parents) if folder.is_relative_to(mount) and folder.is_dir())


def _number(path: Path) -> int | None:
    text = _read(path).strip()
    return int(text) if text.isdigit() else None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """What a config gets on a machine."""

    devices: tuple[str, ...]
    """UUIDs of the GPUs; empty on the CPU."""
    world_size: int
    accelerator: Literal["cpu", "gpu"]
    precision: str
    threads_per_rank: int
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Machine:
    """GPUs, cores and memory this process may use; `gpus` are numbered as `devices: [0, 1]` names them."""

    gpus: tuple[Gpu, ...]
    cores: int
    cores_installed: int
    memory_bytes: int
    memory_available_bytes: int
    memory_installed_bytes: int
    gpu_source: str
    """Where the GPU table came from, or why it is empty."""
    notes: tuple[str, ...] = ()

    @property
    def auto(self) -> Resolved:
        """What a config that leaves everything on auto gets here."""
        from kit.sections import Hardware

        return resolve_devices(Hardware(), self)

    def __repr__(self) -> str:
        lines = [self._headline]
        lines += [text_table(_COLUMNS, self._rows, self._marked)] if self.gpus else []
        return "\n".join([*lines, *(f"- {sentence}" for sentence in self._sentences)])

    def _repr_html_(self) -> str:
        if self.gpus:
            table = html_table(_COLUMNS, self._rows, caption=self._headline, marked=self._marked, mark="auto")
        else:
            row = [str(self.cores), format_bytes(self.memory_bytes), format_bytes(self.memory_available_bytes)]
            table = html_table(("cores", "memory", "available"), [row], caption=self._headline)
        return table + html_list(self._sentences)

    @property
    def _headline(self) -> str:
        count = len(self.gpus)
        gpus = "no GPU" if not count else "1 GPU" if count == 1 else f"{count} GPUs"
        cores = f"{self.cores} core" + ("" if self.cores == 1 else "s")
        cores += "" if self.cores == self.cores_installed else f" of {self.cores_installed}"
        free, total = format_bytes(self.memory_available_bytes), format_bytes(self.memory_bytes)
        return f"{gpus}, {cores}, {free} of {total} memory available"

    @property
    def _sentences(self) -> tuple[str, ...]:
        auto = self.auto
        what = "the CPU" if not auto.devices else f"GPU {self._marked}"
        notes = (note for note in (*self.notes, *_claims(self.gpus)) if not any(note in text for text in auto.reasons))
        return (f"auto is {what} with {auto.precision}", *auto.reasons, *notes)

    @property
    def _marked(self) -> int | None:
        chosen = self.auto.devices
        return next((place for place, gpu in enumerate(self.gpus) if gpu.uuid in chosen), None)

    @property
    def _rows(self) -> list[list[str]]:
        return [
            [
                str(place), gpu.name, format_bytes(gpu.free_bytes), format_bytes(gpu.total_bytes),
                "–" if gpu.utilisation_fraction is None else f"{gpu.utilisation_fraction:.0%}", str(gpu.processes),
                _capability(gpu), gpu.uuid,
            ]
            for place, gpu in enumerate(self.gpus)
        ]  # fmt: skip


def hardware(
    read: Callable[[], GpuTable] = read_gpus,
    environment: Mapping[str, str] | None = None,
    read_share: Callable[[], Share] = share,
) -> Machine:
    """What this machine has now: devices, cores and memory. CUDA is not touched.

    Args:
        read: Reads the GPUs. The arguments are for tests and for planning for another machine.
        environment: The environment variables; this process's when left out.
        read_share: Reads which part of the machine this process may use.

    Returns:
        The machine: `gpus`, `cores`, `memory_bytes`, and in `auto` what the word auto means in a config here.

    Raises:
        HardwareError: when the GPUs cannot be read.

    Example:
        >>> kit.hardware().cores >= 1
        True
    """
    asked: Any = read  # by a user, who may give anything
    if not callable(asked):
        way_out = "name a device in kit.predict_memory(config, device=...)"
        raise HardwareError(f"hardware() tells what is here and takes no {type(asked).__name__}; {way_out}")
    table = visible(read(), os.environ if environment is None else environment)
    mine, notes = seat(environment), table.notes
    gpus = table.gpus if mine is None else tuple(_part_of(gpu, mine) for gpu in table.gpus)
    if mine is not None:
        notes = (*notes, f"{mine} of this machine is yours: the cores and the memory told here, of host and GPUs")
    machine = Machine(gpus=gpus, gpu_source=table.source, notes=notes, **asdict(read_share()))
    return with_claims(machine, claims()) if machine.gpus else machine


def _part_of(gpu: Gpu, mine: Seat) -> Gpu:
    total = mine.bytes_of(gpu.total_bytes)
    return replace(gpu, total_bytes=total, free_bytes=min(gpu.free_bytes, total), card_used_bytes=gpu.used_bytes)


def with_claims(machine: Machine, claimed: Mapping[str, Sequence[GpuLease]]) -> Machine:
    """The machine with each GPU's claims, instead of those it knows."""
    words = {uuid: ", ".join(map(str, found)) for uuid, found in claimed.items()}
    return replace(machine, gpus=tuple(replace(gpu, claimed=words.get(gpu.uuid, "")) for gpu in machine.gpus))


def resolve_devices(config: Config | HardwareSection, machine: Machine) -> Resolved:
    """The devices, ranks and precision a config gets on a machine.

    Takes a whole config or its hardware section.

    Raises:
        HardwareError: for devices that are not there, that the strategy cannot use, or a precision they cannot compute.
    """
    section: HardwareSection = typing.cast("HardwareSection", getattr(config, "hardware", config))
    if section.accelerator == "gpu" and not machine.gpus:
        raise HardwareError(
            f"hardware.accelerator is gpu, but no GPU can be used here ({_why_none(machine)}); use auto or cpu"
        )
    on_cpu, chosen = section.accelerator == "cpu" or not machine.gpus, list[Gpu]()
    if on_cpu:
        ranks = _cpu_ranks(section)
        reasons = ["the CPU, as asked" if section.accelerator == "cpu" else f"the CPU: {_why_none(machine)}"]
        if ranks > 1:
            reasons.append(f"{ranks} CPU ranks share {machine.cores} cores: for tests and teaching, not for speed")
    else:
        chosen, reasons = _choose(section, machine)
        ranks = len(chosen)
    _check_strategy(section, ranks, "CPU ranks" if on_cpu else "GPUs")
    precision, why = _precision(section, chosen)
    return Resolved(
        devices=tuple(gpu.uuid for gpu in chosen), world_size=ranks, accelerator="cpu" if on_cpu else "gpu",
        precision=precision, threads_per_rank=section.threads_per_rank or max(1, machine.cores // ranks),
        reasons=(*reasons, *why),
    )  # fmt: skip


# -- devices


def _choose(section: HardwareSection, machine: Machine) -> tuple[list[Gpu], list[str]]:
    """GPUs for `devices`, and why these; with a warning for each that others already use or have claimed."""
    gpus, devices = machine.gpus, section.devices

    def occupancy(gpu: Gpu) -> tuple[bool, int, float, int]:  # claimed ones only when there are no others
        free = gpu.free_bytes // _OCCUPANCY_BYTES
        return bool(gpu.claimed), -free, gpu.utilisation_fraction or 0.0, gpu.processes

    if isinstance(devices, tuple):
        absent = [place for place in devices if place >= len(gpus)]
        if absent:
            names = ", ".join(map(str, range(len(gpus))))
            raise HardwareError(f"hardware.devices names GPU {absent[0]}, but this machine offers {names}")
        chosen, reasons = [gpus[place] for place in devices], [f"GPUs {list(devices)} as named"]
    elif devices == -1:
        chosen, reasons = list(gpus), [f"all {len(gpus)} GPUs: warning, the fullest one decides when memory runs out"]
    else:
        count = 1 if devices == "auto" else devices
        if count > len(gpus):
            raise HardwareError(
                f"hardware.devices asks for {count} GPUs, but only {len(gpus)} can be used here; take at most "
                f"{len(gpus)}, or accelerator: cpu for {count} CPU ranks"
            )
        chosen = sorted(sorted(gpus, key=occupancy)[:count], key=gpus.index)
        reasons = [_why_least(gpus, chosen)]
    if len(chosen) > 1 and any(gpu.is_mig for gpu in chosen):
        raise HardwareError(
            f"{len(chosen)} devices with MIG instances among them cannot work together: a process sees one instance, "
            "and instances have no path between them; use one instance, or whole GPUs"
        )
    reasons += [
        f"warning: GPU {gpus.index(gpu)} is claimed by {gpu.claimed}: two trials would share it"
        for gpu in chosen
        if gpu.claimed
    ]
    return chosen, reasons + [
        f"warning: GPU {gpus.index(gpu)} is in use ({_state(gpu)}): the run may be slow or out of memory"
        for gpu in chosen
        if gpu.processes or gpu.free_bytes < gpu.total_bytes * _CROWDED_FRACTION
    ]


def _why_least(gpus: Sequence[Gpu], chosen: Sequence[Gpu]) -> str:
    places = ", ".join(str(gpus.index(gpu)) for gpu in chosen)
    verb = f"GPU {places} is the" if len(chosen) == 1 else f"GPUs {places} are the"
    state = f": {_state(chosen[0])}" if len(chosen) == 1 else ""
    claimed = _claims(gpus)
    if not claimed or len(claimed) == len(gpus):
        return f"{verb} least occupied of {len(gpus)}{state}"
    return f"{verb} least occupied of the {len(gpus) - len(claimed)} unclaimed{state}; {'; '.join(claimed)}"


def _claims(gpus: Sequence[Gpu]) -> list[str]:
    return [f"GPU {place} is claimed by {gpu.claimed}" for place, gpu in enumerate(gpus) if gpu.claimed]


def _cpu_ranks(section: HardwareSection) -> int:
    """Ranks on the CPU; there `devices` counts processes."""
    devices = section.devices
    if isinstance(devices, tuple):
        raise HardwareError(f"hardware.devices names GPUs {list(devices)}, but none can be used here; give a number")
    if isinstance(devices, int) and devices > 0:
        return devices
    if section.shards:
        return section.shards[0] * section.shards[1]
    if devices == -1 and section.strategy != "none":
        raise HardwareError(
            f"hardware.devices is -1 (all GPUs) with {section.strategy}, but this runs on the CPU; "
            "give a number of ranks, such as 2"
        )
    return 1


def _check_strategy(section: HardwareSection, ranks: int, what: str) -> None:
    """The strategy against the number of ranks, where the config alone could not tell (devices: -1)."""
    strategy = section.strategy
    if strategy == "none" and ranks > 1:
        raise HardwareError(f"strategy none uses one device, but devices gives {ranks} {what}; use ddp or fsdp")
    if strategy in ("ddp", "fsdp") and ranks < 2:
        raise HardwareError(
            f"strategy {strategy} needs at least 2 {what}, but only {ranks} can be used here; use strategy none, or "
            "accelerator: cpu with devices: 2"
        )
    if section.shards and section.shards[0] * section.shards[1] != ranks:
        replicas, size = section.shards
        raise HardwareError(
            f"{strategy} is {replicas} replicas × {size} devices = {replicas * size} {what}, but devices gives {ranks}"
        )


# -- precision


def _precision(section: HardwareSection, chosen: Sequence[Gpu]) -> tuple[str, list[str]]:
    """The number format, and why; bf16 is computed in hardware from capability 8.0 on."""
    native = all(gpu.capability is not None and gpu.capability >= BF16_CAPABILITY for gpu in chosen)
    precision = section.precision
    if precision == "16-mixed" and not chosen:
        raise HardwareError("hardware.precision is 16-mixed, which needs a GPU; on the CPU use bf16-mixed or 32-true")
    if precision.startswith("bf16") and chosen and not native:
        why = f"warning: {precision} is emulated below capability 8.0 ({_capabilities(chosen)}); 16-mixed is faster"
        return precision, [why]
    if precision != "auto":
        return precision, []
    if not chosen:
        return "32-true", ["32-true: exact numbers on the CPU; fewer bits pay on GPUs"]
    if native:
        return "bf16-mixed", [f"bf16-mixed: capability {_capabilities(chosen)} computes it in hardware"]
    return "16-mixed", [f"16-mixed: capability {_capabilities(chosen)} has no bf16 in hardware, which starts at 8.0"]


def _capabilities(gpus: Sequence[Gpu]) -> str:
    return ", ".join(sorted({_capability(gpu) for gpu in gpus}))


def _capability(gpu: Gpu) -> str:
    return "unknown" if gpu.capability is None else f"{gpu.capability[0]}.{gpu.capability[1]}"


# -- words


def _why_none(machine: Machine) -> str:
    hidden = next((note for note in machine.notes if note.startswith("CUDA_VISIBLE_DEVICES")), "")
    return hidden or (machine.gpu_source if machine.gpu_source.startswith("no ") else "no GPU found")


def _state(gpu: Gpu) -> str:
    busy = "" if gpu.utilisation_fraction is None else f", {gpu.utilisation_fraction:.0%} busy"
    holders = "" if not gpu.processes else f", {gpu.processes} process" + ("es" if gpu.processes > 1 else "")
    return f"{format_bytes(gpu.free_bytes)} of {format_bytes(gpu.total_bytes)} free{busy}{holders}"
