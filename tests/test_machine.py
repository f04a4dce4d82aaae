"""Hardware: tables as real machines give them, choices with reasons, refusals with a way out, and never CUDA."""

import inspect
import os
import re
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
from fake_nvml import FakeNvml, card
from waiting import PATIENCE_SECONDS

import kit.machine.gpus
import kit.machine.machine
from kit.config import Config
from kit.data.stores.url import answer_seconds
from kit.errors import HardwareError
from kit.machine.gpus import Gpu, GpuTable, read_joules, read_nvml, visible
from kit.machine.machine import (
    Machine,
    Seat,
    Share,
    _cores_at,
    core_quota,
    hardware,
    memory_limit,
    resolve_devices,
    seat,
    share,
    waiting_per_core,
)  # fmt: skip

GIB = 1 << 30


def gpu(index, free, busy=0.0, name="NVIDIA A100-SXM4-80GB", total=80, capability=(8, 0), processes=0, **more):
    return Gpu(
        index=index, uuid=more.pop("uuid", f"GPU-{index}aaa"), name=name, total_bytes=total * GIB,
        free_bytes=int(free * GIB), utilisation_fraction=busy, capability=capability, processes=processes, **more,
    )  # fmt: skip


SERVER = (gpu(0, 10, 0.05, processes=2), gpu(1, 79, 0.9), gpu(2, 79, 0.0), gpu(3, 75))
TURING = (gpu(0, 15, name="Tesla T4", total=16, capability=(7, 5)),)
SLICED = tuple(
    gpu(0, 9 + part, None, name="NVIDIA A100-SXM4-80GB MIG", total=10, uuid=f"MIG-{part}", parent="GPU-0aaa")
    for part in range(2)
)


def machine(gpus=()):
    return Machine(
        gpus=tuple(gpus), cores=8, cores_installed=64, memory_bytes=32 * GIB, memory_available_bytes=20 * GIB,
        memory_installed_bytes=256 * GIB, gpu_source="NVML" if gpus else "no NVIDIA driver",
    )  # fmt: skip


def resolve(gpus, **settings):
    config = Config().replace({f"hardware.{name}": value for name, value in settings.items()})
    return resolve_devices(config, machine(gpus))


# -- which devices


def test_auto_is_the_least_occupied_gpu_and_says_so():
    answer = resolve(SERVER)
    assert answer.devices == ("GPU-2aaa",)
    assert (answer.world_size, answer.accelerator, answer.precision) == (1, "gpu", "bf16-mixed")
    said = re.compile("GPU 2 .*least occupied of 4: 79 GiB of 80 GiB free, 0% busy")
    assert any(said.search(reason) for reason in answer.reasons)


def test_free_memory_within_a_quarter_gib_does_not_decide():
    idle_but_slightly_fuller = gpu(1, 79.95, 0.0)
    assert resolve((gpu(0, 79.99, 0.5), idle_but_slightly_fuller)).devices == (idle_but_slightly_fuller.uuid,)


def test_auto_without_gpus_is_the_cpu():
    answer = resolve(())
    assert (answer.devices, answer.world_size, answer.accelerator, answer.precision) == ((), 1, "cpu", "32-true")
    assert answer.reasons[0] == "the CPU: no NVIDIA driver"


def test_a_number_takes_the_least_occupied_in_their_order():
    assert resolve(SERVER, devices=2, strategy="ddp").devices == ("GPU-1aaa", "GPU-2aaa")


def test_a_list_names_gpus_by_the_number_the_table_shows():
    answer = resolve(SERVER, devices=[3, 0], strategy="ddp")
    assert answer.devices == ("GPU-3aaa", "GPU-0aaa")
    assert any("warning: GPU 0 is in use" in reason and "2 processes" in reason for reason in answer.reasons)


def test_all_gpus_come_with_a_warning():
    answer = resolve(SERVER, devices=-1, strategy="fsdp")
    assert answer.world_size == 4
    assert any("warning" in reason and "memory runs out" in reason for reason in answer.reasons)


def test_cpu_asked_for_wins_over_gpus():
    answer = resolve(SERVER, accelerator="cpu")
    assert (answer.accelerator, answer.devices, answer.precision) == ("cpu", (), "32-true")


@pytest.mark.parametrize("accelerator", ["cpu", "auto"])
def test_two_devices_without_gpus_are_two_cpu_ranks_that_share_the_cores(accelerator):
    answer = resolve((), accelerator=accelerator, devices=2, strategy="ddp")
    assert (answer.world_size, answer.accelerator, answer.threads_per_rank) == (2, "cpu", 4)
    assert any("2 CPU ranks share 8 cores" in reason for reason in answer.reasons)


def test_threads_asked_for_are_kept():
    assert resolve((), threads_per_rank=3).threads_per_rank == 3


def test_a_hardware_section_alone_is_enough():
    assert resolve_devices(Config().hardware, machine(SERVER)) == resolve(SERVER)


def test_one_mig_instance_is_a_device():
    assert resolve(SLICED).devices == ("MIG-1",)


@pytest.mark.parametrize(
    ("gpus", "settings", "message"),
    [
        ((), {"accelerator": "gpu"}, "no GPU .*auto or cpu"),
        ((), {"devices": [0]}, "names GPUs .0., .*none"),
        ((), {"devices": -1, "strategy": "ddp"}, "number of ranks"),
        ((), {"precision": "16-mixed"}, "needs a GPU"),
        (TURING, {"devices": 2, "strategy": "ddp"}, "2 GPUs, but only 1"),
        (TURING, {"devices": -1, "strategy": "ddp"}, "at least 2 GPUs, but only 1"),
        (SERVER, {"devices": [4]}, "names GPU 4, .*offers 0, 1, 2, 3"),
        (SERVER, {"devices": -1}, "strategy none .*one device, .*4 GPUs"),
        (SERVER, {"devices": -1, "strategy": "fsdp:3:2"}, "3 replicas × 2 devices = 6 GPUs, .*gives 4"),
        (SLICED, {"devices": 2, "strategy": "ddp"}, "MIG instances .* cannot work together"),
        (SLICED, {"devices": -1, "strategy": "ddp"}, "MIG instances .* cannot work together"),
    ],
)
def test_what_is_not_there_is_refused_with_the_way_out(gpus, settings, message):
    with pytest.raises(HardwareError, match=message):
        resolve(gpus, **settings)


# -- which precision


@pytest.mark.parametrize(
    ("gpus", "wanted", "precision", "reason"),
    [
        (SERVER, "auto", "bf16-mixed", "capability 8.0"),
        (TURING, "auto", "16-mixed", "7.5 has no bf16 in hardware"),
        ((gpu(0, 5, capability=None),), "auto", "16-mixed", "capability unknown"),
        (TURING, "bf16-mixed", "bf16-mixed", "warning: bf16-mixed is emulated"),
        (SERVER, "32-true", "32-true", "least occupied"),
        ((), "bf16-mixed", "bf16-mixed", "the CPU"),
    ],
)
def test_precision_follows_the_capability_and_says_why(gpus, wanted, precision, reason):
    answer = resolve(gpus, precision=wanted)
    assert answer.precision == precision
    assert any(reason in text for text in answer.reasons)


def test_one_older_gpu_among_new_ones_decides_the_precision():
    mixed = (SERVER[2], replace(TURING[0], index=1, uuid="GPU-t4"))
    assert resolve(mixed, devices=-1, strategy="ddp").precision == "16-mixed"


# -- CUDA_VISIBLE_DEVICES


@pytest.mark.parametrize(
    ("setting", "uuids"),
    [
        (None, ["GPU-0aaa", "GPU-1aaa", "GPU-2aaa", "GPU-3aaa"]),
        ("2,0", ["GPU-2aaa", "GPU-0aaa"]),
        ("2,-1,0", ["GPU-2aaa"]),
        ("", []),
        ("9", []),
        ("GPU-1", ["GPU-1aaa"]),
        ("GPU-", []),
        ("1,1", ["GPU-1aaa"]),
        (" 3 , 1 ", ["GPU-3aaa", "GPU-1aaa"]),
    ],
)
def test_only_visible_gpus_are_offered_in_the_order_named(setting, uuids):
    environment = {} if setting is None else {"CUDA_VISIBLE_DEVICES": setting}
    assert [g.uuid for g in visible(GpuTable(gpus=SERVER), environment).gpus] == uuids


def test_a_card_with_mig_stands_for_its_first_instance():
    for setting in ("0", "GPU-0aaa"):
        assert visible(GpuTable(gpus=SLICED), {"CUDA_VISIBLE_DEVICES": setting}).gpus == SLICED[:1]
    assert visible(GpuTable(gpus=SLICED), {"CUDA_VISIBLE_DEVICES": "MIG-1"}).gpus == SLICED[1:]


def test_numbers_on_unlike_cards_are_noted_unless_the_order_is_fixed():
    table = GpuTable(gpus=(SERVER[0], replace(TURING[0], index=1)))
    loose = visible(table, {"CUDA_VISIBLE_DEVICES": "1"})
    fixed = visible(table, {"CUDA_VISIBLE_DEVICES": "1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"})
    assert any("PCI order" in note for note in loose.notes)
    assert not any("PCI order" in note for note in fixed.notes)


def test_hidden_gpus_are_the_reason_for_the_cpu():
    here = hardware(lambda: GpuTable(gpus=SERVER, source="NVML"), {"CUDA_VISIBLE_DEVICES": ""})
    assert here.auto.accelerator == "cpu"
    assert here.auto.reasons[0] == "the CPU: CUDA_VISIBLE_DEVICES= leaves 0 of 4 GPUs"
    with pytest.raises(HardwareError, match="CUDA_VISIBLE_DEVICES= leaves 0 of 4 GPUs"):
        resolve_devices(Config().replace({"hardware.accelerator": "gpu"}), here)


# -- readers


def test_the_real_binding_has_every_question_that_is_asked():
    import pynvml

    asked = set(re.findall(r"\bnvml\.(\w+)", inspect.getsource(kit.machine.gpus)))
    assert len(asked) > 10
    assert not [name for name in asked if not hasattr(pynvml, name)]


def test_a_card_is_read_from_nvml_and_the_library_closed_again():
    nvml = FakeNvml([card()])
    table = read_nvml(nvml)
    assert table.gpus == (
        Gpu(
            index=0, uuid="GPU-h100", name="NVIDIA H100", total_bytes=80 * GIB, free_bytes=60 * GIB,
            utilisation_fraction=0.37, processes=2, capability=(9, 0),
        ),
    )  # fmt: skip
    assert nvml.open == 0


def test_a_card_that_does_not_know_a_question_is_still_listed():
    old = card()
    for question in ("CudaComputeCapability", "MigMode", "UtilizationRates", "ComputeRunningProcesses"):
        old.pop(f"nvmlDeviceGet{question}")
    (read,) = read_nvml(FakeNvml([old])).gpus
    assert (read.capability, read.utilisation_fraction, read.processes, read.is_mig) == (None, None, 0, False)


def test_a_lost_card_costs_itself_and_leaves_a_note():
    nvml = FakeNvml([card(nvmlDeviceGetUUID="lost"), card()])
    table = read_nvml(nvml)
    assert [g.index for g in table.gpus] == [1]
    (note,) = table.notes
    assert re.search("GPU 0 .*left out: GPU is lost", note)
    assert nvml.open == 0


def test_mig_instances_are_listed_instead_of_their_card():
    slices = [
        {
            "nvmlDeviceGetUUID": f"MIG-{part}",
            "nvmlDeviceGetMemoryInfo": SimpleNamespace(total=10 * GIB, free=9 * GIB, used=GIB),
        }
        for part in range(2)
    ]
    sliced = card(nvmlDeviceGetMigMode=[1, 1], nvmlDeviceGetMaxMigDeviceCount=7, instances=slices)
    gpus = read_nvml(FakeNvml([sliced])).gpus
    assert [(g.uuid, g.parent, g.total_bytes, g.utilisation_fraction) for g in gpus] == [
        ("MIG-0", "GPU-h100", 10 * GIB, None),
        ("MIG-1", "GPU-h100", 10 * GIB, None),
    ]
    assert all(g.capability == (9, 0) for g in gpus)


def test_no_driver_is_no_table():
    assert read_nvml(FakeNvml([], driver=False)) == GpuTable(gpus=(), source="no NVIDIA driver")


def test_joules_are_those_of_the_card_of_that_uuid(monkeypatch):
    nvml = FakeNvml([card(nvmlDeviceGetTotalEnergyConsumption=5500), card(nvmlDeviceGetUUID="GPU-old")])
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert read_joules("GPU-h100") == 5.5
    assert read_joules("GPU-old") is None, "no counter"
    assert read_joules("GPU-gone") is None
    assert nvml.open == 0


def test_no_joules_without_a_driver(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml([], driver=False))
    assert read_joules("GPU-h100") is None


# -- cores and memory


def folders(root, files):
    for path, text in files.items():
        file = root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return root


def test_version_two_limits_hold_up_to_the_root(tmp_path):
    root = folders(
        tmp_path,
        {
            "proc/self/cgroup": "0::/pod/box\n", "sys/fs/cgroup/pod/box/cpu.max": "max 100000\n",
            "sys/fs/cgroup/pod/cpu.max": "250000 100000\n", "sys/fs/cgroup/pod/box/memory.max": "max\n",
            "sys/fs/cgroup/pod/memory.max": f"{8 * GIB}\n", "sys/fs/cgroup/pod/memory.current": f"{6 * GIB}\n",
            "sys/fs/cgroup/pod/memory.stat": f"anon {5 * GIB}\ninactive_file {GIB}\n",
        },
    )  # fmt: skip
    assert core_quota(root) == 2.5
    assert memory_limit(root, 64 * GIB, 50 * GIB) == (8 * GIB, 3 * GIB)


def test_version_one_limits_are_read_even_when_only_the_own_group_is_mounted(tmp_path):
    root = folders(
        tmp_path,
        {
            "proc/self/cgroup": "9:memory:/host/abc\n4:cpu,cpuacct:/host/abc\n",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "50000\n", "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{4 * GIB}\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{GIB}\n",
        },
    )  # fmt: skip
    assert core_quota(root) == 0.5
    assert memory_limit(root, 64 * GIB, 2 * GIB) == (4 * GIB, 2 * GIB)


def test_no_limit_leaves_what_the_machine_has(tmp_path):
    root = folders(
        tmp_path,
        {
            "proc/self/cgroup": "9:memory:/\n4:cpu:/\n0::/\n", "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        },
    )  # fmt: skip
    assert core_quota(root) is None
    assert memory_limit(root, 64 * GIB, 50 * GIB) == (64 * GIB, 50 * GIB)
    assert core_quota(tmp_path / "nothing") is None


def test_this_machine_grants_at_least_a_core_and_no_more_than_it_has():
    here = share()
    assert 1 <= here.cores <= here.cores_installed
    assert 0 < here.memory_available_bytes <= here.memory_bytes <= here.memory_installed_bytes


# -- shown


def test_the_table_leads_with_numbers_and_marks_what_auto_takes():
    text, markup = repr(machine(SERVER)), machine(SERVER)._repr_html_()
    assert text.startswith("4 GPUs, 8 cores of 64, 20 GiB of 32 GiB memory available")
    assert "→ 2" in text
    assert "auto is GPU 2 with bf16-mixed" in text
    assert "GPU-2aaa" in markup
    assert "(auto)" in markup


def test_a_machine_without_gpus_shows_its_cpu_and_why():
    assert repr(machine()).startswith("no GPU, 8 cores of 64")
    assert "the CPU: no NVIDIA driver" in machine()._repr_html_()


def test_names_from_the_driver_cannot_inject_markup():
    assert "<script>" not in machine([gpu(0, 1, name="<script>alert(1)</script>")])._repr_html_()


def test_looking_needs_neither_torch_nor_an_open_device():
    code = (
        "import os, sys; from kit.machine.machine import hardware; print(hardware())\n"
        "assert not {'torch', 'lightning', 'matplotlib'} & set(sys.modules)\n"
        "fds = [os.readlink(f'/proc/self/fd/{fd}') for fd in os.listdir('/proc/self/fd') "
        "if os.path.exists(f'/proc/self/fd/{fd}')]\n"
        "assert not [path for path in fds if path.startswith('/dev/nvidia')], fds"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=PATIENCE_SECONDS)


def test_hardware_reads_what_it_is_given():
    limits = Share(3, 4, 8 * GIB, 5 * GIB, 16 * GIB)
    here = hardware(lambda: GpuTable(gpus=TURING, source="NVML"), {}, lambda: limits)
    assert (here.cores, here.memory_available_bytes, here.gpus) == (3, 5 * GIB, TURING)


# -- one of several people on a machine


@pytest.mark.parametrize(
    ("text", "expected"),
    [("", None), ("3/8", Seat(3, 8)), (" 3/8  ada l. ", Seat(3, 8, "ada l.")), ("1/1", Seat(1, 1))],
)
def test_a_share_is_read_from_the_environment(text, expected):
    assert seat({"KIT_SEAT": text}) == expected


@pytest.mark.parametrize("text", ["0/8", "9/8", "3", "3/0", "a/b", "-1/8", "1/8ada"])
def test_what_is_no_share_is_refused_with_an_example(text):
    with pytest.raises(HardwareError, match=re.escape(repr(text)) + ".* such as '3/8'"):
        seat({"KIT_SEAT": text})


def test_a_share_is_told_as_if_it_were_the_machine(monkeypatch):
    whole = share()
    monkeypatch.setenv("KIT_SEAT", "2/4 ada")
    part = share()
    assert part.cores == max(1, len(Seat(2, 4).cores(os.sched_getaffinity(0))))
    assert part.memory_bytes == whole.memory_bytes // 4 >= part.memory_available_bytes
    found = hardware(read=lambda: GpuTable(gpus=SERVER, source="NVML"), read_share=lambda: part)
    assert [one.total_bytes for one in found.gpus] == [20 * GIB] * 4
    assert [one.free_bytes // GIB for one in found.gpus] == [10, 20, 20, 20]
    assert [one.used_bytes // GIB for one in found.gpus] == [70, 1, 1, 5], "of the whole card"
    assert re.search(r"share 2 of 4 \(ada\)", str(found))


def test_a_process_that_takes_its_seat_keeps_to_its_cores():
    code = "import os; from kit.machine.machine import share, take_seat; take_seat(); take_seat(); "
    code += "print(sorted(os.sched_getaffinity(0)), share().cores)"
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "KIT_SEAT": "2/8"}, capture_output=True, text=True, check=True
    )
    mine = Seat(2, 8).cores(os.sched_getaffinity(0))
    assert done.stdout.strip() == f"{list(mine)} {len(mine)}"


@pytest.mark.parametrize(("load", "waiting"), [(0.1, 1.0), (12.0, 3.0), (400.0, 8.0)])
def test_a_busy_machine_says_how_many_wait_for_each_core(load, waiting, monkeypatch):
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))
    monkeypatch.setattr("kit.machine.machine.share", lambda: SimpleNamespace(cores=4))
    _cores_at.cache_clear()
    assert waiting_per_core() == waiting
    _cores_at.cache_clear()


def test_a_busy_machine_is_not_looked_at_for_each_object_that_is_read(monkeypatch):
    reads, read = [], kit.machine.machine._read
    monkeypatch.setattr("kit.machine.machine._read", lambda path: reads.append(path) or read(path))
    monkeypatch.setattr(os, "getloadavg", lambda: (7.0, 0.0, 0.0))
    _cores_at.cache_clear()
    answer_seconds()
    once = len(reads)
    for _ in range(100):
        answer_seconds()
    assert 0 < once <= len(reads) < 100 * once
