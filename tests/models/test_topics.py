"""PoissonNMF beside tinytopics' own formulas, alone and on two ranks, and what it refuses."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback
from topic_model import topics
from torch.utils.data import DataLoader, TensorDataset

import kit
from kit.config import Config
from kit.errors import ConfigError, StoreError
from kit.train import make_trainer

Corpus, PoissonNMF, RowAdamW = topics.Corpus, topics.PoissonNMF, topics.RowAdamW
SIZES = {"documents": 96, "terms": 60, "topics": 4}


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.fixture(scope="module")
def corpus():
    return Corpus(**SIZES, length=80, seed=5)


class Reference(torch.nn.Module):
    """What tinytopics does, written down from its source: softmax of both tables, autograd, dense AdamW."""

    def __init__(self, documents, terms, topics):
        super().__init__()
        self.shares = torch.nn.Embedding(documents, topics)
        torch.nn.init.uniform_(self.shares.weight, 0.0, 0.1)
        self.terms = torch.nn.Parameter(torch.empty(topics, terms))
        torch.nn.init.uniform_(self.terms, 0.0, 0.1)

    def loss(self, batch):
        counts, documents = batch
        rates = self.shares(documents).softmax(1) @ self.terms.softmax(1)
        return (rates - counts * torch.log(torch.clamp(rates, min=1e-10))).sum()


class Losses(Callback):
    def __init__(self):
        self.values, self.rates = [], []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.values.append(outputs["loss"].item())
        self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])


def trained(model, corpus, steps=60, batch=16, config=(), **options):
    """A fit on batches in a fixed order; returns (losses, learning rates)."""
    counts = torch.from_numpy(corpus.rows(0, corpus.shape[0]))
    rows = torch.arange(len(counts))
    seen = Losses()
    asked = Config.make({"trial": {"max_steps": steps, "warmup_steps": 0}}).replace(dict(config))
    trainer = make_trainer(
        asked, accelerator="cpu", world_size=1, precision=options.pop("precision", "32-true"), module=model,
        callbacks=[seen],
    )  # fmt: skip
    trainer.fit(model, DataLoader(TensorDataset(counts, rows), batch_size=batch), **options)
    return seen.values, seen.rates


def reference_losses(corpus, steps=60, batch=16, model=None):
    """tinytopics' loop over the same batches."""
    counts = torch.from_numpy(corpus.rows(0, corpus.shape[0]))
    model = model or Reference(**SIZES)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=1e-5)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=20, T_mult=1, eta_min=0.01)
    batches, losses, rates = len(counts) // batch, [], []
    for step in range(steps):
        epoch, place = divmod(step, batches)
        rows = torch.arange(place * batch, (place + 1) * batch)
        optimizer.zero_grad()
        loss = model.loss((counts[rows], rows))
        loss.backward()
        optimizer.step()
        scheduler.step(epoch + place / batches)
        losses.append(loss.item())
        rates.append(optimizer.param_groups[0]["lr"])
    return losses, rates


def test_equal_seeds_draw_the_weights_that_tinytopics_draws():
    torch.manual_seed(3)
    ours = PoissonNMF(**SIZES)
    torch.manual_seed(3)
    theirs = Reference(**SIZES)
    assert torch.equal(ours.table, theirs.shares.weight)
    assert torch.equal(ours.terms, theirs.terms)


@pytest.mark.parametrize("updates", ["rows", "all"])
def test_losses_and_learning_rates_are_those_of_tinytopics(corpus, updates):
    torch.manual_seed(3)
    model = PoissonNMF(**SIZES, updates=updates)
    torch.manual_seed(3)
    losses, rates = trained(model, corpus)
    torch.manual_seed(3)
    wanted, wanted_rates = reference_losses(corpus)
    np.testing.assert_allclose(losses, wanted, rtol=1e-5)
    np.testing.assert_allclose(rates, wanted_rates, rtol=1e-12)


def test_loss_and_gradients_are_those_of_autograd_also_below_the_least_rate(corpus):
    model, reference = PoissonNMF(**SIZES, updates="all"), Reference(**SIZES)
    with torch.no_grad():
        model.terms[:, :30] = -40.0  # rates below the least one
        model.terms[:, 30:].normal_()
        model.table.normal_()
    reference.load_state_dict({"shares.weight": model.table, "terms": model.terms})
    rows = torch.tensor([5, 9, 2, 5])
    batch = torch.from_numpy(corpus.rows(0, 4)), rows
    for one in (model, reference):
        one.double().loss((batch[0].double(), rows)).backward()
    torch.testing.assert_close(model.loss(batch), reference.loss(batch).float(), rtol=1e-5, atol=1e-3)
    torch.testing.assert_close(model.terms.grad, reference.terms.grad, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(model.table.grad, reference.shares.weight.grad, rtol=1e-3, atol=1e-4)


def test_counts_may_be_whole_numbers_and_the_arithmetic_stays_in_32_bits(corpus):
    model, counts = PoissonNMF(**SIZES), torch.from_numpy(corpus.rows(0, 8))
    wanted = model.loss((counts, torch.arange(8)))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(model.loss((counts.int(), torch.arange(8))), wanted)


def test_the_loss_of_kept_documents_is_that_of_their_best_shares_under_the_terms():
    corpus = Corpus(documents=64, terms=120, topics=4, length=150, seed=2)
    counts, truth = torch.from_numpy(corpus.rows(0, 64)).float(), corpus.truth
    terms, shares = torch.tensor(truth.terms), torch.tensor(truth.shares)

    def losses(found):
        rates = (found.float() @ terms.float()).clamp(min=topics.LEAST_RATE)
        return (rates - counts * rates.log()).sum(1)

    by_rounds = [losses(topics.find_shares(counts, terms.float(), rounds)) for rounds in (0, 1, 5, 50)]
    for before, after in pairwise(by_rounds):
        assert (after <= before + 1e-3).all()
    assert (by_rounds[-1] <= losses(shares) + 0.5).all()  # no worse than the shares that the counts were drawn from
    model, logged = PoissonNMF(64, 120, 4), {}
    with torch.no_grad():
        model.terms.copy_(terms.clamp(min=1e-30).log())
    model.log = lambda name, value, **_: logged.update({name: value.item()})
    model.validation_step((counts, torch.arange(64)), 0)
    assert logged["val_loss"] == pytest.approx(by_rounds[-1].mean().item(), rel=1e-4)


@pytest.mark.slow
def test_topics_are_recovered_from_a_corpus_that_was_made_of_them(corpus, tmp_path):
    corpus = Corpus(documents=400, terms=120, topics=4, length=150, seed=2)
    place = tmp_path / "deep" / "topics.npz"
    torch.manual_seed(1)
    model = PoissonNMF(400, 120, 4, save_path=str(place))
    untrained = kit.compare_topics(model.topics(), corpus.truth)
    trained(model, corpus, steps=2000)
    recovery = kit.compare_topics(kit.open_topics(place), corpus.truth)
    assert recovery.median_cosine > 0.95 > 0.8 > untrained.median_cosine
    assert recovery.median_correlation > 0.9


def test_a_checkpoint_in_the_middle_goes_on_to_the_same_losses(corpus, tmp_path):
    torch.manual_seed(3)
    whole, _ = trained(PoissonNMF(**SIZES), corpus, steps=24)
    torch.manual_seed(3)
    model = PoissonNMF(**SIZES)
    first, _ = trained(model, corpus, steps=12)
    model.trainer.save_checkpoint(tmp_path / "half.ckpt")
    other = PoissonNMF(**SIZES)
    second, _ = trained(other, corpus, steps=24, ckpt_path=tmp_path / "half.ckpt")
    np.testing.assert_allclose([*first, *second], whole, rtol=1e-5)


def test_what_is_saved_is_settled_and_loads_into_dense_updates_too(corpus, tmp_path):
    torch.manual_seed(3)
    rows, dense = PoissonNMF(**SIZES), PoissonNMF(**SIZES, updates="all")
    dense.load_state_dict(rows.state_dict())
    trained(rows, corpus, steps=6)
    rows.trainer.save_checkpoint(tmp_path / "rows.ckpt")
    trained(dense, corpus, steps=6)
    saved = torch.load(tmp_path / "rows.ckpt", weights_only=True)
    torch.testing.assert_close(saved["state_dict"]["shares.weight"], dense.table.detach(), rtol=1e-4, atol=1e-6)
    again = PoissonNMF(**SIZES, updates="all")
    trained(again, corpus, steps=12, ckpt_path=tmp_path / "rows.ckpt")
    assert torch.isfinite(again.table).all()


# -- kit's own rows, one rank and two, memory


@pytest.fixture
def config(corpus, tmp_path):
    source = tmp_path / "counts.npy"
    kit.data.write_rows(source, corpus.rows, corpus.shape, progress=False)
    return Config.make({
        "hardware": {"accelerator": "cpu", "threads_per_rank": 1},
        "loader": {"batch_size": 16}, "data": {"arguments": {"source": str(source)}},
        "model": {"target": "kit.models:PoissonNMF", "arguments": {**SIZES, "save_path": str(tmp_path / "t.npz")}},
        "trial": {"max_steps": 12, "predict_memory": False, "folder": str(tmp_path / "runs")},
    })  # fmt: skip


def losses_of(config):
    """The mean of the ranks' losses at every step."""
    trial = kit.fit(config, None, "kit.data:RowData").wait()
    found = {}
    for event in trial.steps:
        found.setdefault(event["step"], []).append(event["loss"])
    assert {len(values) for values in found.values()} == {trial.environment["world_size"]}
    return [sum(values) / len(values) for _, values in sorted(found.items())]


@pytest.mark.timeout(300)
def test_two_ranks_have_the_losses_of_one_with_the_same_global_batch(config, tmp_path):
    alone = losses_of(config.replace({"loader.batch_size": 20}))
    one = kit.open_topics(tmp_path / "t.npz")
    pair = {"hardware.devices": 2, "hardware.strategy": "ddp", "loader.batch_size": 10}
    together = losses_of(config.replace(pair))
    two = kit.open_topics(tmp_path / "t.npz")
    np.testing.assert_allclose(together, alone, rtol=1e-5)
    np.testing.assert_allclose(two.shares, one.shares, atol=1e-3)
    assert sorted(place.name for place in tmp_path.glob("*.npz")) == ["t.npz"]


@pytest.mark.timeout(300)
def test_memory_is_predicted_and_grows_with_the_topics(config):
    small = kit.predict_memory(config, None, "kit.data:RowData")
    dials = kit.memory.sizes(config)
    assert dials[0].name == "topics"
    large = kit.predict_memory(config.replace(dials.changes(topics=400)), None, "kit.data:RowData")
    assert large.device_allocated_bytes > small.device_allocated_bytes + 400 * (96 + 60) * 4 * 3


# -- what is refused


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"levers.optimizer": "adamw"}, "levers.optimizer"),
        ({"training.gradient_clip_norm": 1.0}, "gradient_clip_norm"),
    ],
)
def test_rows_that_wait_are_refused_where_they_would_be_left_behind(corpus, change, reason):
    with pytest.raises(ConfigError, match=reason):
        trained(PoissonNMF(**SIZES), corpus, steps=1, config=change)


def test_another_precision_is_refused_by_rows_and_taken_by_all(corpus):
    with pytest.raises(ConfigError, match="bf16-true"):
        trained(PoissonNMF(**SIZES), corpus, steps=1, precision="bf16-true")
    assert trained(PoissonNMF(**SIZES, updates="all"), corpus, steps=1, precision="bf16-true")[0]


def test_other_terms_than_it_was_made_for_are_refused():
    with pytest.raises(ConfigError, match="model.arguments.terms: 7"):
        PoissonNMF(**SIZES).loss((torch.ones(2, 7), torch.arange(2)))


def test_data_of_another_shape_is_refused_before_the_first_batch(config):
    data = kit.data.RowData(config.data.arguments["source"])
    trainer = make_trainer(config, accelerator="cpu", world_size=1, precision="32-true")
    with pytest.raises(ConfigError, match="documents: 50, .* 96"):
        trainer.fit(PoissonNMF(50, 60, 4), datamodule=data)


@pytest.mark.parametrize(
    "wrong", [{"topics": 0}, {"documents": 2.5}, {"updates": "some"}, {"save_path": "topics.pt"}, {"restart_epochs": 0}]
)
def test_arguments_that_mean_nothing_are_refused_by_name(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        PoissonNMF(**{**SIZES, **wrong})


def test_a_file_that_holds_no_topics_is_refused_by_name(tmp_path):
    with pytest.raises(StoreError, match="is not there"):
        kit.open_topics(tmp_path / "absent.npz")
    (tmp_path / "other.npz").write_bytes(b"no")
    with pytest.raises(StoreError, match="holds no topics"):
        kit.open_topics(tmp_path / "other.npz")
    np.savez(tmp_path / "others.npz", shares=np.ones((3, 2)))
    with pytest.raises(StoreError, match="holds no topics"):
        kit.open_topics(tmp_path / "others.npz")
    np.savez(tmp_path / "wrong.npz", shares=np.ones((3, 2)), terms=np.ones((4, 5)))
    with pytest.raises(StoreError, match="holds no topics"):
        kit.open_topics(tmp_path / "wrong.npz")


def test_the_optimizer_is_the_one_that_lets_rows_wait():
    model = PoissonNMF(**SIZES)
    assert isinstance(model.configure_optimizers()["optimizer"], RowAdamW)
    assert not isinstance(PoissonNMF(**SIZES, updates="all").configure_optimizers()["optimizer"], RowAdamW)


def test_fit_model_is_the_line_of_tinytopics(corpus, tmp_path):
    counts = corpus.rows(0, corpus.shape[0])
    model, losses = topics.fit_model(counts, 4, num_epochs=3, batch_size=8, device="cpu")
    assert (model.shares.num_embeddings, model.terms.shape) == (96, (4, 60))
    assert len(losses) == 3
    assert losses[2] < losses[0]
    np.save(tmp_path / "counts.npy", counts)
    torch.manual_seed(0)
    one, from_file = topics.fit_model(str(tmp_path / "counts.npy"), 4, 3, 8, device="cpu")
    torch.manual_seed(0)
    other, from_memory = topics.fit_model(torch.from_numpy(counts), 4, 3, 8, device="cpu")
    assert from_file == from_memory
    np.testing.assert_array_equal(one.topics().terms, other.topics().terms)
