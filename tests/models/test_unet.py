import pytest
import torch
from torch.utils.data import DataLoader

from kit.config import Config
from kit.errors import ConfigError
from kit.models import UNet
from kit.train import make_trainer


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)
    torch.manual_seed(0)


def advected(samples, time=2, lat=12, lon=20):
    """(batch, variable, time, lat, lon): two smooth fields that move one cell east per slice."""
    generator = torch.Generator().manual_seed(1)
    angle = torch.arange(lon) * 2 * torch.pi / lon
    phase = torch.rand(samples, 2, 1, lat, 1, generator=generator) * 2 * torch.pi
    shift = torch.arange(time).reshape(1, 1, time, 1, 1) * 2 * torch.pi / lon
    return torch.sin(angle - shift + phase)


def batch_of(values, valid=None):
    return {"values": values, "valid": torch.ones_like(values, dtype=torch.bool) if valid is None else valid}


def trained(model, steps):
    samples = [{name: tensor[0] for name, tensor in batch_of(field[None]).items()} for field in advected(32)]
    config = Config.make({"trial": {"max_steps": steps}})
    trainer = make_trainer(config, accelerator="cpu", world_size=1, precision="32-true", module=model)
    trainer.fit(model, DataLoader(samples, batch_size=16))
    return model


def waken(model):
    """Give the last layer weights: an untrained UNet predicts no change whatever its other weights are."""
    with torch.no_grad():
        model.head.weight.normal_()
    return model


def test_an_untrained_unet_predicts_that_nothing_changes():
    values = advected(2)
    assert torch.equal(UNet(variables=2)(values[:, :, :1]), values[:, :, 0])


def test_it_learns_to_move_a_field_and_beats_persistence_on_fields_it_has_not_seen():
    model = UNet(variables=2, width=8, depth=2, learning_rate=5e-3)
    unseen = batch_of(advected(48)[32:])
    persistence = model.loss(unseen).item()
    assert trained(model, 60).loss(unseen).item() < 0.2 * persistence


@pytest.mark.parametrize("size", [(8, 8), (7, 13), (1, 9), (3, 2)])
@pytest.mark.parametrize("depth", [0, 1, 3])
def test_any_spatial_size_comes_back_as_it_was(size, depth):
    model = UNet(variables=2, history=3, width=4, depth=depth)
    past = torch.randn(2, 2, 3, *size)
    assert model(past).shape == (2, 2, *size)


def test_channels_double_at_every_level():
    model = UNet(variables=2, width=4, depth=3)
    assert [block.shortcut.out_channels for block in model.encoder] == [4, 8, 16, 32]


def test_the_loss_is_the_mean_squared_error_of_the_last_slice():
    values = advected(3, time=3)
    model = UNet(variables=2, history=2)
    expected = ((values[:, :, 1] - values[:, :, 2]) ** 2).mean()
    torch.testing.assert_close(model.loss(batch_of(values)), expected)


def test_what_lies_in_missing_elements_influences_neither_loss_nor_gradient():
    model = waken(UNet(variables=2, width=4, depth=2))
    values = advected(2)
    valid = torch.rand(values.shape, generator=torch.Generator().manual_seed(2)) > 0.3
    results = []
    for filler in (0.0, 1e6, float("nan")):
        model.zero_grad()
        loss = model.loss(batch_of(values.where(valid, filler), valid))
        loss.backward()
        results.append((loss.detach(), [parameter.grad.clone() for parameter in model.parameters()]))
    for loss, gradients in results[1:]:
        assert torch.equal(loss, results[0][0])
        assert all(torch.equal(one, other) for one, other in zip(gradients, results[0][1], strict=True))


def test_a_valid_element_does_influence_the_loss():
    model = waken(UNet(variables=2, width=4, depth=2))
    values = advected(1)
    changed = values.clone()
    changed[0, 0, 1, 3, 3] += 1
    assert not torch.equal(model.loss(batch_of(values)), model.loss(batch_of(changed)))


def test_a_batch_without_valid_elements_costs_nothing_and_stays_finite():
    model = UNet(variables=2, width=4, depth=1)
    values = advected(1)
    loss = model.loss(batch_of(values, torch.zeros_like(values, dtype=torch.bool)))
    loss.backward()
    assert loss.item() == 0
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


def test_the_forecast_slice_is_not_seen():
    model = waken(UNet(variables=2, width=4, depth=1))
    values = advected(1)
    changed = values.clone()
    changed[:, :, 1] = 0
    forecasts = [model(each[:, :, :1]) for each in (values, changed)]
    assert torch.equal(*forecasts)


def test_a_patch_with_other_variables_names_the_argument_to_set():
    with pytest.raises(ConfigError, match=r"3 variables, .*patch has 2; .*model\.arguments\.variables: 2"):
        UNet().loss(batch_of(advected(1)))


def test_a_patch_without_a_slice_to_forecast_names_the_argument_to_set():
    with pytest.raises(
        ConfigError, match=r"1 time slices, 1 of history and 1 to forecast need 2; set data\.patch to 2"
    ):
        UNet(variables=2).loss(batch_of(advected(1, time=1)))


def test_a_patch_of_other_dimensions_is_refused():
    with pytest.raises(ConfigError, match=r"takes \(batch, variable, time, lat, lon\), not shape \(1, 2, 12, 20\)"):
        UNet(variables=2).loss(batch_of(advected(1)[:, :, 0]))


def test_its_arguments_are_kept_with_its_checkpoint():
    assert dict(UNet(variables=2, width=4).hparams) == {
        "variables": 2,
        "history": 1,
        "width": 4,
        "depth": 3,
        "learning_rate": 1e-3,
    }
