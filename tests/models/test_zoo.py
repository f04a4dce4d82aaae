import pytest
import torch

from kit.config import Config
from kit.models import Encoder, Field, RandomData, Recommender, Recurrent, ResNet
from kit.train import make_trainer
from kit.train.fsdp import repeated_blocks

# (class, its defaults' parameters, a small one, samples for it)
ZOO = {
    "ResNet": (
        ResNet, 25_557_032, {"width": 8, "blocks": (2, 1), "classes": 4},
        (Field(shape=(3, 16, 24)), Field(below=4)),
    ),
    "Encoder": (
        Encoder, 108_897_802, {"vocabulary": 16, "width": 16, "heads": 2, "layers": 2, "context": 8, "classes": 4,
                               "dropout": 0.0},
        (Field(shape=(8,), below=16), Field(below=4)),
    ),
    "Recommender": (
        Recommender, 64_164_353, {"features": 3, "values": 10, "width": 4},
        (Field(shape=(3,), below=10), Field(below=2)),
    ),
    "Recurrent": (
        Recurrent, 3_194_896, {"features": 2, "width": 16, "layers": 2},
        (Field(shape=(5, 2)), Field(shape=(5, 2))),
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.mark.parametrize("name", ZOO)
def test_defaults_are_of_the_size_they_are_said_to_be(name):
    kind, parameters, *_ = ZOO[name]
    with torch.device("meta"):
        model = kind()
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters


@pytest.mark.parametrize("name", ZOO)
def test_each_learns_the_samples_it_sees_again(name):
    kind, _, arguments, fields = ZOO[name]
    model, data = kind(**arguments, learning_rate=1e-2), RandomData(fields, batch_size=8, samples=8)
    (batch,) = data.train_dataloader()
    before = model.loss(batch).item()
    config = Config.make({"trial": {"max_steps": 80}})
    trainer = make_trainer(config, accelerator="cpu", world_size=1, precision="32-true", module=model)
    trainer.fit(model, datamodule=data)
    assert model.loss(batch).item() < 0.7 * before


def test_a_resnet_halves_its_sides_and_doubles_its_channels_at_every_stage():
    model = ResNet(width=4, blocks=(1, 2, 1))
    features = model.stem(torch.randn(1, 3, 64, 64))
    shapes = []
    for block in model.blocks:
        features = block(features)
        shapes.append(tuple(features.shape[1:]))
    assert shapes == [(16, 16, 16), (32, 8, 8), (32, 8, 8), (64, 4, 4)]


def test_layers_of_the_encoder_and_blocks_of_the_resnet_are_found_by_the_levers():
    assert len(repeated_blocks(Encoder(**ZOO["Encoder"][2]))) == 2
    assert len(repeated_blocks(ResNet(**ZOO["ResNet"][2]))) == 3


def test_an_encoder_sees_every_token():
    model = Encoder(**ZOO["Encoder"][2]).eval()
    tokens = torch.zeros(1, 8, dtype=torch.int64)
    for place in range(8):
        changed = tokens.clone()
        changed[0, place] = 1
        assert not torch.allclose(model(tokens), model(changed))


def test_a_recurrent_network_does_not_see_the_future():
    model = Recurrent(features=2, width=8)
    series = torch.randn(1, 6, 2)
    changed = series.clone()
    changed[:, 4:] = 0
    torch.testing.assert_close(model(series)[:, :4], model(changed)[:, :4])


def test_nearly_all_parameters_of_a_recommender_are_embeddings():
    with torch.device("meta"):
        model = Recommender()
    held = sum(table.weight.numel() for table in model.tables)
    assert held / sum(parameter.numel() for parameter in model.parameters()) > 0.99
