import gc
import linecache
import math
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
import time
import tracemalloc
import types
import weakref
from dataclasses import replace
from multiprocessing import Pipe
from types import SimpleNamespace

import lightning.pytorch as pl
import numpy as np
import pyarrow
import pytest
import torch
from diagnosis_parts import line
from lightning.pytorch import Callback
from PIL import Image
from pipeline_events import steps
from pyarrow import parquet
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset
from torch.utils.data._utils import worker as torch_worker
from waiting import PATIENCE_SECONDS, wait_until

import kit
from kit.studies.diagnosis import sampler as room
from kit.studies.diagnosis.evidence import _epoch_starts, _uneven, growth, slowing, timed_lines
from kit.studies.diagnosis.host import (
    HostWatch,
    arrays_bytes,
    embeddings,
    filled,
    held_bytes,
    objects_bytes,
    optimizer_of,
    padding,
)
from kit.studies.diagnosis.rules import RULES
from kit.studies.diagnosis.sampler import (
    DiskWatch,
    Sampler,
    Timer,
    WatchedLoop,
    copied_bytes,
    read_of,
    shared_bytes,
    summary,
    variables_of,
)
from kit.testing import TinyData, TinyModule
from kit.trial.recorder import StepClock


class Counting(Callback):
    """Counts in Python after each step, and collects what it leaves."""

    def __init__(self):
        self.seen = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.seen.append(sum(number % 7 for number in range(200_000)))
        gc.collect()


class InPython(Dataset):
    def __init__(self):
        self.rows = [[float(i), [i]] for i in range(20_000)]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        value = sum(number % 7 for number in range(100_000)) % 2
        return torch.full((8,), self.rows[index][0] / 20_000), torch.tensor([float(value)])


def test_a_callback_is_named_with_its_line_and_loader_processes_tell_what_they_do(config):
    data = DataLoader(InPython(), batch_size=4, num_workers=1)
    trial = kit.fit(config(max_steps=30, warmup_steps=3), TinyModule, data, callbacks=[Counting()]).wait()
    host = trial.event("host_watched")
    share = host["hooks"]["[Callback]Counting.on_train_batch_end"]
    assert 0.05 < share <= 1
    counting = [line for line in host["lines"] if line["hook"].endswith("Counting.on_train_batch_end")]
    own = [line for line in counting if "test_host.py" in line["place"]]
    assert counting
    assert sum(line["fraction"] for line in own) > 0.7 * sum(line["fraction"] for line in counting)
    assert 0 < host["garbage_fraction"] < share
    assert host["collections"] >= 20
    assert host["grown"]["Counting.seen"][1] >= 25
    assert host["loader"]["workers"] == 1
    assert host["loader"]["objects_bytes"] > 20_000 * 100
    (worker,) = host["workers"]
    assert any("test_host.py" in line["place"] for line in worker["lines"])
    assert [0 <= copied <= worker["inherited_bytes"] for _, copied in worker["copied"]] == [True, True]
    assert "StepRecorder" not in repr(host["hooks"]), "kit's own callbacks are no finding"


class Linked:
    def __init__(self, up):
        self.up, self.down = up, []
        if up is not None:
            up.down.append(self)


class Linking(TinyModule):
    """Makes circles of objects, each looked through with many others that stay."""

    def on_train_start(self):
        self.kept = [{"id": number, "near": [number]} for number in range(100_000)]
        gc.set_threshold(50, 2, 1000)

    def on_train_end(self):
        gc.set_threshold(700, 10, 10)

    def training_step(self, batch, batch_idx):
        root = Linked(None)
        for _ in range(20_000):
            Linked(root)
        return super().training_step(batch, batch_idx)


def test_garbage_that_is_collected_often_is_told_with_the_line_that_makes_it(config):
    data = DataLoader(TensorDataset(torch.ones(80, 8), torch.ones(80, 1)), batch_size=4)
    trial = kit.fit(config(max_steps=20, warmup_steps=3), Linking, data).wait()
    found = kit.studies.diagnose(trial, peaks=False, short_trials=False)
    assert "test_host.py, line" in found["garbage collection"].sentence


class Wide(TinyModule):
    """A step that makes and frees 40 MiB twice: from 32 MiB on glibc always gives them back."""

    def training_step(self, batch, batch_idx):
        for value in range(2):
            torch.full((10 << 20,), float(value))
        return super().training_step(batch, batch_idx)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells, and only glibc gives back")
def test_memory_given_back_costs_page_faults_unless_it_is_kept(config):
    faults = {}
    for keep in (False, True):
        asked = config(max_steps=40, warmup_steps=20).replace({"hardware.keep_freed_memory": keep})
        trial = kit.fit(asked, Wide, DataLoader(InPython(), batch_size=2)).wait()
        host = trial.event("host_watched")
        faults[keep] = host["page_faults_per_second"] * host["seconds"] / 20
        assert 0 <= host["system_fraction"] < 1
    assert faults[False] > 10 << 10
    assert faults[True] < faults[False] / 4


def test_anomaly_detection_is_seen(config):
    data = DataLoader(InPython(), batch_size=2)
    for asked in (True, False):
        trial = kit.fit(config(max_steps=4, warmup_steps=1), TinyModule, data, trainer={"detect_anomaly": asked}).wait()
        assert trial.event("host_watched")["anomaly_detection"] is asked


class OneThread(TinyModule):
    def on_fit_start(self):
        torch.set_num_threads(1)


@pytest.mark.parametrize(("module", "ran"), [(OneThread, 1), (TinyModule, 2)])
def test_threads_are_those_that_ran_and_not_those_that_were_asked_for(config, module, ran):
    data = DataLoader(TensorDataset(torch.ones(80, 8), torch.ones(80, 1)), batch_size=4)
    asked = config(max_steps=6, warmup_steps=1).replace({"hardware.threads_per_rank": 2})
    diagnosis = kit.studies.diagnose(kit.fit(asked, module, data).wait(), peaks=False, short_trials=False)
    assert (diagnosis.evidence.compute_threads, diagnosis.evidence.asked_threads) == (ran, 2)
    assert any("torch.set_num_threads" in note for note in diagnosis.notes) is (ran == 1)


class Long(Dataset):
    def __len__(self):
        return 3_000_000

    def __getitem__(self, index):
        return torch.zeros(8), torch.zeros(1)


def test_an_order_that_is_drawn_at_every_epoch_is_told_apart_from_reading(config):
    data, short = DataLoader(Long(), batch_size=4, shuffle=True), {"limit_train_batches": 3}
    trial = kit.fit(config(max_steps=12, warmup_steps=1), TinyModule, data, trainer=short).wait()
    host = trial.event("host_watched")
    drawn = [line for line in host["lines"] if line["package"] == "sampler"]
    assert sum(line["fraction"] for line in drawn) > 0.3
    assert host["loader"]["samples"] == 3_000_000
    assert "order drawn anew every epoch" in kit.studies.diagnose(trial, peaks=False).names


class Balanced(torch.utils.data.Sampler):
    """Weighs all samples anew for each index."""

    def __len__(self):
        return 400

    def __iter__(self):
        for _ in range(len(self)):
            yield sum(number % 7 for number in range(150_000)) % 400


@pytest.mark.parametrize("workers", [0, 1])
def test_a_sampler_of_the_users_is_told_with_its_line_wherever_samples_are_read(config, workers):
    samples = TensorDataset(torch.ones(400, 8), torch.ones(400, 1))
    data = DataLoader(samples, batch_size=4, sampler=Balanced(), num_workers=workers)
    trial = kit.fit(config(max_steps=60, warmup_steps=5), TinyModule, data).wait()
    drawn = [one for one in trial.event("host_watched")["lines"] if one["package"] == room.OWN_ORDER]
    assert all(re.search("test_host.py.* in __iter__|genexpr", one["place"]) for one in drawn)
    diagnosis = kit.studies.diagnose(trial, peaks=False, short_trials=False)
    assert "test_host.py, line" in diagnosis["slow sampler"].sentence
    assert "Python in the data" not in diagnosis.names


class Utterances(Dataset):
    """Of 4 to 44 frames, most of them short."""

    def __len__(self):
        return 400

    def __getitem__(self, index):
        return torch.full((4 + index % 5 + 36 * (index % 4 == 0), 8), 1 + index % 4 / 4), torch.zeros(1)


def padded(samples):
    return torch.nn.utils.rnn.pad_sequence([x for x, _ in samples], batch_first=True), samples[0][1].expand(4, 1)


class OfFrames(TinyModule):
    def training_step(self, batch, batch_idx):
        return super().training_step((batch[0].mean(1), batch[1]), batch_idx)


def test_batches_that_are_filled_up_to_their_longest_sample_are_told(config):
    data = DataLoader(Utterances(), batch_size=4, collate_fn=padded, num_workers=1)
    trial = kit.fit(config(max_steps=12, warmup_steps=4), OfFrames, data).wait()
    found = trial.event("host_watched")["padding"]
    assert len(found["sizes"]) == 4
    assert all(max(end for (end,) in ends) == size for ends, (size,) in zip(found["ends"], found["sizes"], strict=True))
    diagnosis = kit.studies.diagnose(trial, peaks=False, short_trials=False)
    assert diagnosis["padding"].value == pytest.approx(1 - (40 + 3 * 6) / (4 * 42), abs=0.1)
    even = DataLoader(TensorDataset(torch.ones(80, 40, 8), torch.zeros(80, 1)), batch_size=4)
    assert kit.fit(config(max_steps=12, warmup_steps=4), OfFrames, even).wait().event("host_watched")["padding"] == {}


def ragged(*lengths, width=3, size=None):
    x = torch.zeros(len(lengths), size or max(lengths), width)
    for row, length in zip(x, lengths, strict=True):
        row[:length] = torch.rand(length, width) + 0.1
    return x


LENGTHS = ((9, 30, 12, 5), (22, 8, 3, 11), (40, 4, 9, 17))


def looked_at(batches, equal=False):
    return padding([filled(batch, len(batch[-1])) for batch in batches], equal)


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int64"])
def test_ends_of_samples_tell_padding_of_any_numbers(kind):
    ids = torch.zeros(4, dtype=torch.bool)
    batches = [((10 * ragged(*lengths)).to(getattr(torch, kind)), ids) for lengths in LENGTHS]
    before = torch.get_rng_state()
    found = looked_at(batches)
    assert torch.equal(torch.get_rng_state(), before)
    assert found["sizes"] == [[30], [22], [40]]
    assert found["ends"] == [[[one] for one in lengths] for lengths in LENGTHS]
    assert looked_at(batches, equal=True) == {}, "samples of one shape are not filled up by a loader"


def test_a_batch_with_its_samples_second_is_padded_along_the_first_dimension():
    batches = [(ragged(*lengths).transpose(0, 1), torch.zeros(4, dtype=torch.bool)) for lengths in LENGTHS]
    assert looked_at(batches)["sizes"] == [[30], [22], [40]]


def test_a_sample_that_ends_with_a_value_of_its_own_is_full():
    batches = [(ragged(*lengths), torch.zeros(4, dtype=torch.bool)) for lengths in LENGTHS]
    for x, _ in batches:
        x[x.abs().sum((1, 2)).argmax(), -3:] = 1.0
    assert looked_at(batches)["ends"] == [[[one] for one in lengths] for lengths in LENGTHS]


def test_padding_to_one_size_is_told_by_lengths_or_a_mask():
    full = [ragged(*lengths, size=64) for lengths in LENGTHS]
    counts = [torch.tensor(lengths) for lengths in LENGTHS]
    masks = [torch.arange(64) < count[:, None] for count in counts]
    for told in (counts, masks, [mask.long() for mask in masks], [mask.float() for mask in masks]):
        assert looked_at([*zip(full, told, strict=True)])["sizes"] == [[64]] * 3
    unlike = [torch.tensor((3, 2, 1, 0))] * 3
    assert looked_at([*zip(full, unlike, strict=True)]) == {}


def borders(side, ends):
    x = torch.zeros(len(ends), 3, side, side)
    for picture, end in zip(x, ends, strict=True):
        picture[:, 2:end, 2:end] = 1
    return x


def no_padding():
    label = torch.zeros(4, dtype=torch.bool)
    yield "digits of several sizes", [(borders(28, ends), label) for ends in ((20, 24, 22, 19), (25, 20, 18, 21))]
    yield "pictures of several sizes with borders", [(borders(side, (20, 24, 22, 19)), label) for side in (28, 36)]
    one_hot = [torch.eye(20)[torch.randperm(20)[:4]] for _ in range(3)]
    yield "classes, one of them 1", [(one, one.argmax(1) + 1) for one in one_hot]
    words = [torch.zeros(4, size).scatter(1, torch.tensor([[2], [9], [size - 1], [5]]), 1) for size in (20, 30)]
    yield "few words of many", [(one, label) for one in words]
    shown = [(torch.rand(4, 3, side, side), torch.zeros(4, side, side, dtype=torch.long)) for side in (24, 32, 40)]
    for _, mask in shown:
        for row, end in zip(mask, (8, 12, mask.shape[1], 9), strict=True):
            row[:end] = 1
    yield "masks of objects", [(*pair, label) for pair in shown]
    yield "all zeros", [(torch.zeros(4, size), label) for size in (20, 30)]
    yield "labels that decide nothing", [(torch.rand(4, 20), torch.arange(4))] * 3


@pytest.mark.parametrize(("name", "batches"), [*no_padding()])
def test_zeros_that_are_data_are_no_padding(name, batches):
    assert looked_at(batches) == {}


class Archived(Dataset):
    def __init__(self, path):
        self.path = path

    def __len__(self):
        return 64

    def __getitem__(self, index):
        return torch.from_numpy(np.load(self.path)["x"][index]), torch.zeros(1)


def test_a_row_of_a_compressed_archive_is_told_with_all_that_is_read_for_it(config, tmp_path):
    np.savez_compressed(tmp_path / "rows.npz", x=np.random.default_rng(0).normal(size=(50_000, 8)).astype("float32"))
    data = DataLoader(Archived(tmp_path / "rows.npz"), batch_size=2, shuffle=True)
    trial = kit.fit(config(max_steps=12, warmup_steps=1), TinyModule, data).wait()
    host = trial.event("host_watched")
    assert host["reads"]["npz"]["covered_bytes"] == pytest.approx(50_000 * 8 * 4, rel=0.01)
    assert host["sample_bytes"] == 36
    finding = kit.studies.diagnose(trial, peaks=False)["one row of a large chunk"]
    assert finding.value == pytest.approx(50_000 * 8 * 4 / 36, rel=0.01)
    assert "npz" in finding.sentence


class Planted:
    """Lines whose share of the time is known: loops, and calls that give the interpreter or keep it."""

    def __init__(self):
        self.clock = StepClock()
        self.seconds = {}
        self.numbers, self.wide = [float(number * 7919 % 100_003) for number in range(60_000)], torch.rand(600, 600)

    def step(self, began):
        in_python = counted(600_000)
        began = self.timed("counted", began)
        kept = sorted(self.numbers)
        began = self.timed("sorted", began)
        small = torch.neg(self.wide[:8])
        began = self.timed("neg", began)
        large = torch.mm(self.wide, self.wide)
        began = self.timed("mm", began)
        with self.clock.profile("[Callback]Planted.on_train_batch_end"):
            hooked = counted(600_000)
        self.timed("hook", began)
        return in_python, kept, small, large, hooked

    def timed(self, name, began):
        now = time.perf_counter()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - began
        return now


def told_and_planted():
    """Shares of the time by line: what a sampler tells of two hundred answers, and what a clock around it does."""
    planted = Planted()
    sampler = Sampler(planted.clock)
    sampler.start()
    while sampler.samples < 200:
        planted.step(time.perf_counter())
    sampler.stop()
    told = dict.fromkeys(planted.seconds, 0.0)
    for (_, hook, file, number, *_), seconds in sampler.lines.items():
        text = linecache.getline(file, number)
        names = [name for name in ("sorted", "neg", "mm") if f"{name}(" in text]
        told[names[0] if names else "hook" if hook else "counted"] += seconds
    assert sum(told.values()) == pytest.approx(sampler.seconds, rel=0.1)
    whole = sum(planted.seconds.values())
    shares = {name: seconds / sampler.seconds for name, seconds in told.items()}
    return shares, {name: seconds / whole for name, seconds in planted.seconds.items()}


def test_a_sampler_that_is_stopped_twice_ends_its_timer_once(monkeypatch):
    ended, end = [], Timer.end
    monkeypatch.setattr(Timer, "end", lambda timer: (ended.append(timer), end(timer)))
    sampler = Sampler()
    sampler.start()
    for _ in range(2):  # an exception in a callback's own end
        sampler.stop()
    assert len(ended) == 1


TRAINED = """
import time

from lightning.pytorch import Callback, Trainer

from kit.studies.diagnosis.sampler import Sampler, hold_signal
from kit.testing import TinyData, TinyModule


class Watch(Callback):
    def __init__(self):
        hold_signal()
        self.sampler = Sampler()

    def on_train_start(self, trainer, module):
        self.sampler.start()


watch = Watch()
silent = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
Trainer(max_steps=3, accelerator="cpu", callbacks=[watch], **silent).fit(TinyModule(), TinyData())
after = watch.sampler.samples
while watch.sampler.samples < after + 3:
    time.sleep(0.01)
watch.sampler.stop()
"""


def test_a_timer_that_asks_after_a_trainer_has_ended_does_not_end_the_process():
    """A Trainer puts back the handlers that it found, and the C library's thread may be late on a busy machine."""
    done = subprocess.run([sys.executable, "-c", TRAINED], timeout=PATIENCE_SECONDS, check=False, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()


def test_a_watched_rank_has_the_signal_before_its_trainer_is_made(monkeypatch):
    monkeypatch.setattr(room, "_answering", None)
    before = signal.signal(room.SIGNAL, signal.SIG_DFL)
    try:
        HostWatch(SimpleNamespace(), None)
        assert signal.getsignal(room.SIGNAL) is not signal.SIG_DFL
    finally:
        signal.signal(room.SIGNAL, before)


def test_each_line_has_the_share_of_the_time_that_it_takes():
    found = []
    for _ in range(4):  # answers come by chance, and other programs stop this one by chance; a bias stays
        found.append(told_and_planted())
        told, planted = found[-1]
        if told == pytest.approx(planted, abs=0.11):  # three standard errors of two hundred answers, about
            return
    pytest.fail(f"{found}")


def test_python_gives_the_interpreter_soon_while_it_is_looked_at(monkeypatch):
    """Else short lines are charged to the calls after them, which give it at once."""
    monkeypatch.setattr(room, "_is_alone", lambda: True)  # tests before may have left threads
    usual, sampler = sys.getswitchinterval(), Sampler()
    sampler.start()
    wait_until(lambda: sys.getswitchinterval() <= 0.1 * usual)
    sampler.stop()
    wait_until(lambda: sys.getswitchinterval() == usual)


def counted(numbers):
    total = 0
    for number in range(numbers):
        total += number % 7
    return total


def reader(chunks, shape, given):
    def __getitem__(self, args):
        return sys._getframe()

    return __getitem__(SimpleNamespace(chunks=chunks, shape=shape, dtype=np.dtype("float32")), given)


@pytest.mark.parametrize(
    ("given", "wanted", "covered"),
    [
        (5, 256 * 4, 4096 * 256 * 4),
        ((5,), 256 * 4, 4096 * 256 * 4),
        ((slice(4000, 4200), slice(0, 8)), 200 * 8 * 4, 2 * 4096 * 256 * 4),
    ],
)
def test_a_read_of_a_row_covers_its_whole_chunk(given, wanted, covered):
    found = read_of("h5py", reader((4096, 256), (16_384, 256), given))
    assert (found["wanted_bytes"], found["covered_bytes"]) == (wanted, covered)


def test_what_is_read_in_a_way_nobody_knows_is_not_guessed():
    assert read_of("zarr", reader((8, 8), (64, 64), np.array([1, 2]))) is None
    assert read_of("zarr", reader(None, (64, 64), 3)) is None


def test_a_spawned_process_runs_the_loop_of_torch(monkeypatch):
    original = torch_worker._worker_loop
    watched = WatchedLoop(original, None, 0)
    monkeypatch.setattr(torch_worker, "_worker_loop", watched)
    text = pickle.dumps(watched)
    monkeypatch.setattr(torch_worker, "_worker_loop", original)
    assert pickle.loads(text) is original


def test_what_python_objects_take_is_about_what_was_allocated():
    tracemalloc.start()
    rows = [{"id": i, "box": [i, i + 1.0, i + 2.0]} for i in range(20_000)]
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert 0.6 < objects_bytes(SimpleNamespace(rows=rows)) / taken < 1.7
    assert objects_bytes(SimpleNamespace(rows=torch.zeros(20_000))) == 0


def test_long_lists_within_a_list_count_whole():
    rows = [{"x": [float(place) for place in range(300)], "path": f"/x/{row}.wav"} for row in range(10_000)]
    whole = sum(sys.getsizeof(row["x"]) + 300 * sys.getsizeof(0.5) for row in rows)
    assert objects_bytes(SimpleNamespace(rows=rows)) == pytest.approx(whole, rel=0.1)


def test_small_tensors_of_a_list_lie_beside_their_counters_and_large_ones_do_not():
    """A list of 64 numbers each took 701 B a tensor of resident memory, and one of 1024 numbers 3.8 KB."""
    small, large = ([torch.zeros(numbers)] * 10_000 for numbers in (64, 1 << 16))
    assert objects_bytes(SimpleNamespace(rows=small)) == pytest.approx(10_000 * 701, rel=0.1)
    assert objects_bytes(SimpleNamespace(rows=large)) < 10_000 * 701


def test_arrays_of_a_dataset_count_where_it_is_pickled_and_wrapped_ones_once():
    data = TensorDataset(torch.zeros(8))
    data.labels, data.rows = np.zeros(1000), [[number] for number in range(10_000)]
    assert arrays_bytes(data) == 8000
    assert objects_bytes(Subset(data, [0])) == objects_bytes(data)


@pytest.mark.skipif(shared_bytes(os.getpid()) is None, reason="this system does not tell what processes share")
def test_what_a_forked_process_reads_of_objects_is_copied_and_what_it_allocates_is_not():
    rows = [[number] for number in range(300_000)]
    ours, theirs = Pipe()
    process = os.fork()
    if process == 0:  # without torch, whose threads were not forked
        try:
            gc.disable()
            inherited = shared_bytes(os.getpid())[1]
            for read in (lambda: np.ones(1 << 25, np.float32), lambda: [row for row in rows]):  # noqa: C416
                kept = read()
                theirs.send(copied_bytes({"process": os.getpid(), "inherited_bytes": inherited}))
                del kept
        finally:
            os._exit(0)
    theirs.close()
    allocated, copied = ours.recv(), ours.recv()
    os.waitpid(process, 0)
    assert allocated < 8 << 20
    assert copied - allocated > 300_000 * 56 / 2, "lists whose references were counted"


def test_memory_grows_only_where_both_halves_of_a_trial_say_so():
    assert growth([(step, 1e9 + 1e6 * step) for step in range(5, 30, 2)]) == pytest.approx(1e6)
    assert growth([(step, 1e9 + 1e7 * min(step, 12)) for step in range(5, 30, 2)]) == 0
    assert growth([(step, 1e9) for step in range(5, 30, 2)]) == 0


def grown(seconds, count=24, **more):
    """Steps whose forward pass takes these seconds, by their number, and noise of a twentieth."""
    found = [*steps(count, wait=0.01, backward_seconds=0.03)]
    for number, step in enumerate(found):
        noise = 1 + 0.05 * math.sin(7.0 * number)
        step["forward_seconds"] = noise * seconds(number)
        step |= {name: value(number) for name, value in more.items()}
    return found


def test_steps_grow_only_where_one_part_does_and_all_the_time():
    found = slowing(0, grown(lambda number: 0.01 + 0.001 * number))
    assert found.part == "forward"
    assert found.each_seconds == pytest.approx(0.001, rel=0.2)
    assert slowing(0, grown(lambda number: 0.01)) is None, "noise alone"
    assert slowing(0, grown(lambda number: 0.01 if number < 12 else 0.03)) is None, "another program began"
    slower = {"backward_seconds": lambda number: 0.03 + 0.003 * number, "wait_seconds": lambda number: 0.01}
    assert slowing(0, grown(lambda number: 0.01 + 0.001 * number, **slower)) is None, "the machine becomes slower"
    longer = {"elements": lambda number: 100 + 10 * number}
    assert slowing(0, grown(lambda number: 0.01 + 0.001 * number, **longer)) is None, "longer and longer samples"


class Remembering(TinyModule):
    """Adds up all numbers that it has ever seen, at each step more of them."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def training_step(self, batch, batch_idx):
        self.seen += range(1_000 * (batch_idx + 1))
        sum(number % 101 for number in self.seen)
        return super().training_step(batch, batch_idx)


def test_steps_that_grow_by_what_is_kept_are_told_with_line_and_container(config):
    data = DataLoader(TensorDataset(torch.ones(160, 8), torch.ones(160, 1)), batch_size=4)
    for _ in range(3):  # on a busy machine all parts of a step grow, or hardly a line of it is seen
        trial = kit.fit(config(max_steps=40, warmup_steps=3), Remembering, data).wait()
        found = kit.studies.diagnose(trial, peaks=False, short_trials=False)
        if found.names[0] == "steps that grow" and "test_host.py" in found[found.names[0]].sentence:
            break
    assert found.names[0] == "steps that grow"
    assert "Remembering.seen" in found[found.names[0]].sentence
    assert "test_host.py" in found[found.names[0]].sentence


def test_what_is_kept_is_counted_and_what_was_freed_is_not():
    before = held_bytes(torch.device("cpu"))
    kept = torch.zeros(1 << 20)
    after = held_bytes(torch.device("cpu"))
    assert after - before == pytest.approx(kept.nbytes, abs=1 << 20)
    del kept
    assert held_bytes(torch.device("cpu")) - before < 1 << 20


def test_what_first_steps_of_epochs_take_longer_is_told():
    found = [*steps(20, epoch_steps=5, wait=0.0, train=0.1)]
    assert _epoch_starts(found) == pytest.approx(0)
    for step in found[5::5]:
        step["step_seconds"] = 0.3
    assert _epoch_starts(found) == pytest.approx(3 * 0.2 / (17 * 0.1 + 3 * 0.3))
    assert _epoch_starts([*steps(4)]) is None


def test_the_largest_batch_of_a_step_is_held_against_the_mean():
    ranks = [[*steps(4, rank=rank, elements=size)] for rank, size in ((0, 100), (1, 300))]
    assert _uneven([*ranks[0], *ranks[1]]) == {"uneven": pytest.approx(1.5), "uneven_rank": 1}
    ranks[0][2]["elements"] = 900
    assert _uneven([*ranks[0], *ranks[1]])["uneven_rank"] is None, "now one, now the other"


def spin(sampler, answers):
    while sampler.samples < answers:
        sum(range(1000))


def test_the_line_that_runs_is_named_and_all_time_is_counted():
    sampler = Sampler()
    sampler.start()
    spin(sampler, 5)
    sampler.stop()
    (_, _, file, _, function, _), seconds = max(sampler.lines.items(), key=lambda item: item[1])
    assert (file, function) == (__file__, "spin")
    assert sum(sampler.lines.values()) == pytest.approx(sampler.seconds, rel=0.5)  # five moments by chance
    assert seconds > 0.5 * sampler.seconds
    assert 0 < sampler.cost_seconds < sampler.seconds


def test_code_without_a_line_has_the_one_before_it():
    code = counted.__code__
    places = [(first, line) for first, _, line in code.co_lines() if line is not None]
    for first, at in places:
        for lasti in (first, first + 1):
            assert room.line_of(SimpleNamespace(f_lineno=None, f_code=code, f_lasti=lasti)) == at
    before_all = SimpleNamespace(f_lineno=None, f_code=code, f_lasti=-1)
    assert room.line_of(before_all) == code.co_firstlineno
    assert room.line_of(SimpleNamespace(f_lineno=7)) == 7


def test_a_signal_that_somebody_uses_is_left_to_them(monkeypatch):
    monkeypatch.setattr(room.signal, "getsignal", lambda _: print)
    sampler = Sampler()
    sampler.start()
    assert not any(thread.name == "kit-host" and thread.is_alive() for thread in threading.enumerate())
    assert sampler.seconds == 0


def test_a_function_in_c_is_known_by_the_text_of_its_call():
    values = np.arange(400_000)[::-1]

    def order(sampler):
        while sampler.samples < 6:
            values.argsort(kind="stable")

    sampler = Sampler()
    sampler.start()
    order(sampler)
    sampler.stop()
    (_, _, _, _, function, package), _ = max(sampler.lines.items(), key=lambda item: item[1])
    assert (function, package) == ("order", "numpy")


def test_what_reads_is_named_below_the_library_that_asked_for_it(tmp_path):
    xarray = pytest.importorskip("xarray")
    pytest.importorskip("h5netcdf")
    data = xarray.DataArray(np.random.default_rng(0).normal(size=(2048, 64)), dims=("time", "x"), name="t")
    encoding = {"t": {"chunksizes": (2048, 64), "zlib": True}}
    data.to_dataset().to_netcdf(tmp_path / "t.nc", engine="h5netcdf", encoding=encoding)
    sampler = Sampler()
    with xarray.open_dataset(tmp_path / "t.nc", engine="h5netcdf") as opened:
        sampler.start()
        while "h5py" not in sampler.reads:
            np.asarray(opened["t"].isel(time=7).values)
    sampler.stop()
    assert sampler.reads["h5py"]["covered_bytes"] == 2048 * 64 * 8
    assert sampler.reads["h5py"]["through"] == "xarray"
    assert any(package == "h5py" for *_, package in sampler.lines)


class LogsMany(TinyModule):
    """Each step logs so many values that this is what it does."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        for number in range(500):
            self.log(f"metric{number}", loss)
        return loss


def test_what_a_module_logs_is_told_as_logging_at_its_line(config):
    data = DataLoader(TensorDataset(torch.ones(64, 8), torch.ones(64, 1)), batch_size=4)
    trial = kit.fit(config(max_steps=12, warmup_steps=2), LogsMany, data).wait()
    finding = kit.studies.diagnose(trial, peaks=False, short_trials=False)["drawing or logging in the step"]
    assert "in training_step, in self.log" in finding.sentence


OF_A_LIBRARY = """
class Shelf(IterableDataset):
    def __iter__(self):
        yield look(sys._getframe())


def drain():
    for _ in DataLoader(Shelf(), batch_size=1):
        pass
"""


def test_a_data_set_of_a_library_is_told_by_its_package():
    """No line of the user's is on the stack, and the outermost package is who trains."""
    seen, sampler = [], Sampler()

    def look(frame):
        seen.append(sampler._line(frame))
        return 1.0

    names = {"DataLoader": DataLoader, "IterableDataset": IterableDataset, "look": look, "sys": sys}
    exec(compile(OF_A_LIBRARY, "/x/site-packages/shelf/shelf.py", "exec"), names | {"__name__": "shelf"}, names)
    outside = {"drain": types.FunctionType(names["drain"].__code__, names)}
    exec(compile("def train():\n    drain()", "/x/site-packages/trainer/trainer.py", "exec"), outside)
    thread = threading.Thread(target=outside["train"])  # where this test is not on the stack
    thread.start()
    thread.join()
    assert seen == [(("", 0, "", "shelf"), True)]


def test_the_size_of_a_picture_that_opencv_decodes_is_seen(tmp_path):
    cv2 = pytest.importorskip("cv2")
    path = str(tmp_path / "photo.jpg")
    cv2.imwrite(path, np.zeros((900, 1200, 3), np.uint8))

    def read(sampler):
        files = [path]
        while "cv2" not in sampler.reads:
            image = cv2.imread(files[0])
            cv2.GaussianBlur(image, (31, 31), 9)

    sampler = Sampler()
    sampler.start()
    read(sampler)
    sampler.stop()
    assert sampler.reads["cv2"] == {"pixels": 900 * 1200, "file": path}


def test_the_size_of_a_picture_is_seen_whatever_decodes_it(tmp_path):
    imagecodecs = pytest.importorskip("imagecodecs")
    path = str(tmp_path / "photo.png")
    Image.effect_noise((1200, 900), 60).convert("RGB").save(path)

    def scan(path):
        return imagecodecs.imread(path)

    def small(sampler):
        while sampler.samples < 60 and "imagecodecs" not in sampler.reads:
            image = torch.from_numpy(scan(path)).permute(2, 0, 1)
            torch.nn.functional.adaptive_avg_pool2d(image.float() / 255, 64)

    sampler = Sampler()
    sampler.start()
    small(sampler)
    sampler.stop()
    read = summary(sampler, {})["reads"]["imagecodecs"]
    assert read["pixels"] == 900 * 1200
    assert 0.5 < read["within"] <= 1.5


def test_tables_and_batches_are_no_pictures():
    colours, grey = np.zeros((40, 50, 3), np.float32), np.zeros((40, 50), np.uint8)
    assert [room._picture_pixels(one) for one in (colours, grey, torch.zeros(1, 40, 50))] == [2000] * 3
    others = (np.zeros((400, 500)), np.zeros((16, 16, 16)), torch.zeros(8, 3, 64, 64), [1, 2])
    assert [room._picture_pixels(one) for one in others] == [0] * 4


class Grouped(Dataset):
    """A row of a Parquet file, whose row group is read whole."""

    def __init__(self, path):
        self.path = path

    def __len__(self):
        return 4096

    def __getitem__(self, index):
        group = parquet.ParquetFile(self.path).read_row_group(index // 2048)
        return torch.tensor(group["x"][index % 2048].as_py()[:8]), torch.zeros(1)


def test_what_is_read_from_files_for_a_sample_is_held_against_it(config, tmp_path):
    values = np.random.default_rng(0).normal(size=(4096, 64)).astype("float32")
    column = pyarrow.FixedSizeListArray.from_arrays(values.ravel(), 64)
    parquet.write_table(pyarrow.table({"x": column}), tmp_path / "x.parquet", row_group_size=2048)
    rows = DataLoader(Grouped(tmp_path / "x.parquet"), batch_size=4, shuffle=True)
    trial = kit.fit(config(max_steps=30, warmup_steps=5), TinyModule, rows).wait()
    finding = kit.studies.diagnose(trial, peaks=False, short_trials=False)["one row of a large chunk"]
    assert "pyarrow" in finding.sentence
    assert finding.value > 2048


class Photographed(Dataset):
    """Opened here and decoded in a method below."""

    def __init__(self, folder):
        self.names = [folder / "one.jpg"]

    def __len__(self):
        return 64

    def __getitem__(self, index):
        image = np.asarray(self.small(Image.open(self.names[0]))).copy()
        return torch.from_numpy(image).permute(2, 0, 1) / 255, torch.zeros(1)

    def small(self, image):
        return image.convert("RGB").resize((16, 16))


def test_what_pillow_decodes_is_decoded_again_smaller_and_the_gain_is_of_that(config, tmp_path):
    Image.effect_noise((1600, 1200), 60).convert("RGB").save(tmp_path / "one.jpg")
    data = DataLoader(Photographed(tmp_path), batch_size=2)

    class Shown(TinyModule):
        def training_step(self, batch, batch_idx):
            x, y = batch
            return super().training_step((x.flatten(1)[:, :8], y), batch_idx)

    trial = kit.fit(config(max_steps=8, warmup_steps=1), Shown, data).wait()
    read = trial.event("host_watched")["reads"]["PIL"]
    assert (read["pixels"], read["file"]) == (1600 * 1200, str(tmp_path / "one.jpg"))
    assert read["format"] == "JPEG"
    found = kit.studies.diagnose(trial, peaks=False)
    timed = found.evidence.decoded["PIL"]
    assert timed.pixels_kept == pytest.approx(1 / 64)
    finding = found["images decoded at full size"]
    rule = next(rule for rule in RULES if rule.name == finding.name)
    guessed = rule.effect(replace(found.evidence, decoded={}))
    assert finding.predicted_gain < guessed[0], "noise is mostly Huffman codes, which are read at any size"


class Reloaded(pl.LightningDataModule):
    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.rand(16, 8), torch.rand(16, 1)), batch_size=4)

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return batch


@pytest.mark.parametrize(("every", "remade"), [(0, False), (1, True)])
def test_a_loader_that_is_made_anew_every_epoch_is_seen_and_hooks_of_the_data_are_timed(config, every, remade):
    flags = {"reload_dataloaders_every_n_epochs": every}
    trial = kit.fit(config(max_steps=14, warmup_steps=2), TinyModule, Reloaded, trainer=flags).wait()
    host = trial.event("host_watched")
    assert bool(host["loaders_remade"]) is remade
    assert "[LightningDataModule]Reloaded.on_after_batch_transfer" in host["hooks"]


class Validating(TinyModule):
    def validation_step(self, batch, batch_idx):
        self.log("error", self.training_step(batch, batch_idx))


class WithValidation(TinyData):
    def val_dataloader(self):
        return self.train_dataloader()


@pytest.mark.parametrize(
    ("module", "data", "every", "said"),
    [(Validating, WithValidation, 0, True), (Validating, WithValidation, 3, False), (Validating, TinyData, 0, False)],
)
def test_a_validation_that_a_trial_leaves_out_is_said_to_be_in_no_figure(config, module, data, every, said):
    trial = kit.fit(config(max_steps=6, warmup_steps=2, validate_every_steps=every), module, data).wait()
    notes = kit.studies.diagnose(trial, peaks=False, short_trials=False).notes
    assert any("trial.validate_every_steps" in note for note in notes) is said


def test_lines_of_a_part_are_together_as_long_as_the_part():
    lines = [line(fraction=0.1), line("train.py, line 9, in step", fraction=0.2), line("loop", part="worker")]
    found = timed_lines({"parts": {"forward": 0.3, "worker": 1.0}, "lines": lines}, {"forward": 0.45, "backward": 0.5})
    assert [one["fraction"] for one in found["lines"]] == pytest.approx([0.3, 0.2, 0.15])
    hardly = timed_lines({"parts": {"forward": 0.001}, "lines": [line(fraction=0.001)]}, {"forward": 0.5})
    assert hardly["lines"][0]["fraction"] < 0.01, "a part that was hardly seen tells nothing of its lines"


def test_what_waits_for_a_disk_is_charged_to_the_part_and_no_other_wait_is(tmp_path, monkeypatch):
    """Looked at each second by a clock of our own: a disk, a lock, a mapped file that holds the interpreter."""
    stat, schedule, now = tmp_path / "stat", tmp_path / "schedstat", 0.0
    stat.touch()
    schedule.touch()
    watch = DiskWatch(_files=tuple(os.open(file, os.O_RDONLY) for file in (stat, schedule)))
    monkeypatch.setattr(room.time, "perf_counter", lambda: now)

    def look(part, state, pages=0, active=0.0):
        nonlocal now
        now += 1
        stat.write_text(f"7 (py (thon)) {state} 1 7 7 0 -1 4194304 900 0 {pages} 0 5 5 0 0")
        schedule.write_text(f"{int(active * 1e9)} 0 9")
        watch.look(part, 1.0)

    look("wait", "D")
    look("wait", "S")
    look("forward", "R", active=1.0)
    look("wait", "R", pages=40, active=1.25)
    look("checkpoint", "D", pages=40, active=1.25)
    watch.end()
    assert watch.seconds == pytest.approx({"wait": 1.75, "forward": 0, "checkpoint": 1})


def test_a_thread_of_this_system_is_looked_at():
    watch = DiskWatch()
    watch.begin(threading.get_native_id())
    sum(range(10**6))
    watch.look("wait", 0.02)
    assert 0 <= watch.seconds["wait"] < 60
    assert watch._last[2] > 0
    watch.end()


def test_an_optimizer_that_could_be_fused_is_told():
    weights = [torch.nn.Parameter(torch.zeros(3, 4))]
    told = {
        name: optimizer_of(made) for name, made in (
            ("adamw", torch.optim.AdamW(weights)), ("adam", torch.optim.Adam(weights)),
            ("decaying", torch.optim.Adam(weights, weight_decay=0.1)), ("sgd", torch.optim.SGD(weights, lr=0.1)),
            ("fused", torch.optim.AdamW(weights, fused=True)),
        )
    }  # fmt: skip
    assert [name for name, one in told.items() if one["can_fuse"]] == ["adamw", "adam", "decaying"]
    assert [name for name, one in told.items() if one["decays_gradients"] and one["can_fuse"]] == ["decaying"]
    assert {one["parameters"] for one in told.values()} == {12}


def test_parameters_that_never_got_a_shape_are_not_counted():
    module = torch.nn.ModuleList([torch.nn.Embedding(10, 4), torch.nn.Linear(4, 2), torch.nn.LazyLinear(3)])
    assert embeddings(module) == {"name": "0", "elements": 40, "parameters": 40 + 10}


class Held:
    pass


def exchanged():
    value = Held()
    first = weakref.ref(value)
    assert variables_of(sys._getframe())["value"] is value
    value = None
    return first()


def keeping_its_locals():
    mine = locals()
    mine["own"] = True
    variables_of(sys._getframe())
    return mine


def test_variables_that_were_looked_at_live_no_longer():
    assert exchanged() is None
    assert keeping_its_locals()["own"]


def debugged():
    value = 1
    value += 1
    return value


def test_variables_stay_under_a_debugger():
    def look(frame, *_):
        if frame.f_code is debugged.__code__:
            variables_of(frame)
        return look

    before = sys.gettrace()
    sys.settrace(look)
    try:
        assert debugged() == 2
    finally:
        sys.settrace(before)
