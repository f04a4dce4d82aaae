"""PoissonNMF with kit's rows: a run that ended in mid-epoch goes on as if it had not, and rank 0 alone saves."""

from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback
from topic_model import topics

import kit
from kit.config import Config
from kit.train import make_trainer
from kit.trial import client

PoissonNMF, RowAdamW = topics.PoissonNMF, topics.RowAdamW
SIZES = {"documents": 96, "terms": 60, "topics": 4}
BATCHES = 6
STEPS, SAVED = 3 * BATCHES, BATCHES + 2


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture
def counts(tmp_path):
    corpus = kit.Corpus(**SIZES, length=80, seed=5)
    kit.data.write_rows(tmp_path / "counts.npy", corpus.rows, corpus.shape, progress=False)
    return tmp_path / "counts.npy"


class Seen(Callback):
    """Keeps loss and documents of every batch, and saves a checkpoint after one of them."""

    def __init__(self, path=None):
        self.path, self.losses, self.documents = path, [], []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.losses.append(outputs["loss"].item())
        self.documents.append(batch[1].tolist())
        if self.path is not None and trainer.global_step == SAVED:
            trainer.save_checkpoint(self.path)


def fitted(counts, updates, steps, path=None, ckpt_path=None, seed=3):
    """The module, and what was seen."""
    torch.manual_seed(seed)
    module, seen = PoissonNMF(**SIZES, updates=updates), Seen(path)
    trainer = make_trainer(
        Config().replace({"trial.max_steps": steps, "trial.warmup_steps": 0}), accelerator="cpu", world_size=1,
        precision="32-true", module=module, callbacks=[seen],
    )  # fmt: skip
    trainer.fit(module, datamodule=kit.data.RowData(counts, batch_size=16, row_block=4), ckpt_path=ckpt_path)
    return module, seen


def tables(module):
    """Every number that the next step depends on."""
    optimizer = module.trainer.optimizers[0]
    if isinstance(optimizer, RowAdamW):
        optimizer.settle()
    found = {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}
    for place, state in optimizer.state_dict()["state"].items():
        found |= {f"{place} {name}": torch.as_tensor(value).double() for name, value in state.items()}
    rates = [group["lr"] for group in optimizer.param_groups]
    return found | {"learning rates": torch.tensor(rates, dtype=torch.float64)}


@pytest.mark.parametrize("updates", ["rows", "all"])
def test_a_run_that_ended_in_mid_epoch_goes_on_as_if_unbroken(counts, tmp_path, updates):
    whole_module, whole = fitted(counts, updates, STEPS)
    assert [len(documents) for documents in whole.documents] == [16] * STEPS
    _, first = fitted(counts, updates, SAVED, path=tmp_path / "half.ckpt")
    resumed_module, later = fitted(counts, updates, STEPS, ckpt_path=tmp_path / "half.ckpt", seed=99)
    assert first.documents + later.documents == whole.documents
    assert first.losses + later.losses == pytest.approx(whole.losses, rel=1e-6)
    expected, found = tables(whole_module), tables(resumed_module)
    assert found.keys() == expected.keys()
    assert any("exp_avg_sq" in name for name in found)
    for name in found:  # rows are settled at another step, and so rounded otherwise
        torch.testing.assert_close(found[name], expected[name], rtol=5e-4, atol=1e-5)


def test_without_the_state_of_its_rows_it_would_not(counts, tmp_path):
    """What is compared above really rests on the state: the same run without it goes another way."""
    _, whole = fitted(counts, "rows", STEPS)
    fitted(counts, "rows", SAVED, path=tmp_path / "half.ckpt")
    saved = torch.load(tmp_path / "half.ckpt", weights_only=True)
    for state in saved["optimizer_states"][0]["state"].values():
        state["exp_avg"].zero_()
    torch.save(saved, tmp_path / "half.ckpt")
    _, later = fitted(counts, "rows", STEPS, ckpt_path=tmp_path / "half.ckpt")
    assert later.losses[-1] != pytest.approx(whole.losses[-1], rel=1e-5)


WATCHED = '''
from pathlib import Path
from kit.registry import load_file

topics = load_file("datasets/topics/topics.py")
Topics = topics.Topics


class Watched(topics.PoissonNMF):
    """Leaves an empty file with the rank of each process that saves topics."""

    def on_train_end(self):
        save, rank = Topics.save, self.global_rank

        def watched(topics, path):
            Path(f"{path}.rank{rank}").touch()
            save(topics, path)

        Topics.save = watched
        super().on_train_end()
        Path(f"{self.save_path}.ended{rank}").touch()
'''


@pytest.mark.timeout(300)
def test_of_two_ranks_the_first_alone_saves(counts, tmp_path, monkeypatch):
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "watched.py").write_text(WATCHED)
    monkeypatch.chdir(tmp_path)
    place = tmp_path / "found" / "topics.npz"
    config = Config.make({
        "hardware": {"accelerator": "cpu", "devices": 2, "strategy": "ddp", "threads_per_rank": 1},
        "loader": {"batch_size": 8}, "data": {"arguments": {"source": str(counts)}},
        "model": {"target": "watched.py:Watched", "arguments": {**SIZES, "save_path": str(place)}},
        "trial": {"max_steps": 6, "predict_memory": False, "measure_memory": False},
    })  # fmt: skip
    place.parent.mkdir()
    kit.fit(config, None, "kit.data:RowData").wait()
    client.close_supervisors()
    names = sorted(Path(item).name for item in place.parent.iterdir())
    assert names == ["topics.npz", "topics.npz.ended0", "topics.npz.ended1", "topics.npz.rank0"]
    assert kit.open_topics(place).shares.shape == (96, 4)
