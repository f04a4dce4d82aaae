import torch
from dry_parts import Perceptron, Samples, at_peak, loader, predict, vectors
from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader, IterableDataset

from kit.config import Config
from kit.memory.replay.replay import CATEGORIES

SAMPLE_BYTES = (256 + 8) * 4


class Endless(IterableDataset):
    def __iter__(self):
        while True:
            yield vectors()


def inputs(recording):
    return recording.block_bytes[recording.block_category == CATEGORIES.index("inputs")].sum()


def test_a_batch_is_read_once_per_step():
    for kind in ("cpu", "cuda"):
        recording = predict(Perceptron, lambda: loader(vectors, 16), Config(), device_kind=kind)
        assert inputs(recording) == 2 * 16 * SAMPLE_BYTES


def test_a_loader_without_an_end_has_the_next_batch_in_hand_on_the_cpu_only():
    data = {"train_dataloaders": DataLoader(Endless(), batch_size=16)}
    on_cpu, on_gpu = (predict(Perceptron, lambda: data, Config(), device_kind=kind) for kind in ("cpu", "cuda"))
    assert at_peak(on_cpu)["inputs"] == 2 * 16 * SAMPLE_BYTES
    assert at_peak(on_gpu)["inputs"] == 16 * SAMPLE_BYTES
    assert len(on_cpu.batch_starts) == len(on_gpu.batch_starts) == 2


class ByHand(Perceptron):
    """Moves its batch itself."""

    def transfer_batch_to_device(self, batch, device, dataloader_idx):
        return batch

    def training_step(self, batch, batch_idx):
        x, y = batch
        return self.loss((x.to("cuda", non_blocking=True), y.cuda()))


def test_a_batch_moved_by_the_module_counts_from_then_on():
    recording = predict(ByHand, lambda: loader(vectors, 16), Config(), device_kind="cuda")
    assert inputs(recording) == 2 * 16 * SAMPLE_BYTES
    assert recording.facts["unknown"] == ""


class Batch:
    """A batch class of somebody's own, as graph libraries have."""

    def __init__(self, samples):
        self.x, self.y = (torch.stack(side) for side in zip(*samples, strict=True))

    def to(self, *args, **options):
        self.x, self.y = self.x.to(*args, **options), self.y.to(*args, **options)
        return self


class OfBatch(Perceptron):
    def training_step(self, batch, batch_idx):
        return self.loss((batch.x, batch.y))


def test_a_batch_class_moves_itself():
    data = {"train_dataloaders": DataLoader(Samples(vectors), batch_size=16, collate_fn=Batch)}
    recording = predict(OfBatch, lambda: data, Config(), device_kind="cuda")
    assert inputs(recording) == 2 * 16 * SAMPLE_BYTES


class Hooked(LightningDataModule):
    """Doubles the batch on the device."""

    def __init__(self):
        super().__init__()
        self.called = []

    def prepare_data(self):
        self.called.append("prepare_data")

    def setup(self, stage):
        self.called.append(f"setup {stage} on {self.trainer.world_size}")

    def train_dataloader(self):
        self.called.append("train_dataloader")
        return loader(vectors, 16)["train_dataloaders"]

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return [torch.cat([part, part]) for part in batch]


def test_a_data_module_keeps_its_hooks_and_is_read_once():
    data = Hooked()
    recording = predict(Perceptron, lambda: {"datamodule": data}, Config(), device_kind="cuda")
    assert data.called == ["prepare_data", "setup fit on 1", "train_dataloader"]
    assert at_peak(recording)["inputs"] == 2 * 16 * SAMPLE_BYTES
    assert "train_dataloader" not in vars(data)


class OfTwo(Perceptron):
    def training_step(self, batch, batch_idx):
        return self.loss(batch["a"]) + self.loss(batch["b"])


def test_several_loaders_make_one_batch():
    loaders = {"a": loader(vectors, 16)["train_dataloaders"], "b": loader(vectors, 4)["train_dataloaders"]}
    for kind in ("cpu", "cuda"):
        recording = predict(OfTwo, lambda: {"train_dataloaders": loaders}, Config(), device_kind=kind)
        assert inputs(recording) == 2 * (16 + 4) * SAMPLE_BYTES
        assert len(recording.batch_starts) == 2
        assert recording.batch_size == 16
