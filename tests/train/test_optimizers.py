"""The optimizer lever: another rule and state, on the module's own groups, schedulers and references."""

import sys
import warnings
from collections import Counter

import pytest
import torch
import train_parts
from torch import nn
from torch.distributed.tensor import DTensor

from kit.config import Config
from kit.errors import ConfigError, KitWarning
from kit.train import OptimizerChoice, ShardedAdamW8bit, make_trainer
from kit.train.optimizers import OPTIMIZERS, find_optimizers, turn

KINDS = {"adamw": "AdamW", "adamw-fused": "AdamW", "adamw-8bit": "AdamW8bit", "sgd": "SGD"}


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


def fit(module, steps=4, precision="32-true", **levers):
    config = Config.make({"trial": {"max_steps": steps, "warmup_steps": 0}, "levers": levers})
    trainer = make_trainer(config, accelerator="cpu", world_size=1, precision=precision, module=module)
    trainer.fit(module, train_parts.regression(8))
    return trainer


def tensor_bytes(states):
    """Bytes of the tensors in the states of parameters, scalars left out."""
    tensors = [value for state in states for value in state.values() if isinstance(value, torch.Tensor)]
    return sum(tensor.nbytes for tensor in tensors if tensor.numel() > 1)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_groups_rates_and_schedulers_go_on_as_the_module_made_them(name):
    module = train_parts.Wide()
    trainer = fit(module, optimizer=name)
    (optimizer,) = trainer.optimizers
    assert optimizer is module.mine
    assert type(optimizer).__name__ == KINDS[name]
    assert [len(group["params"]) for group in optimizer.param_groups] == [4, 22]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.5, 0]
    assert module.rates == [[1e-3 * 0.5**step, 2e-3 * 0.5**step] for step in range(4)]


@pytest.mark.parametrize(("name", "low", "high"), [("adamw", 8, 8), ("adamw-fused", 8, 8), ("sgd", 0, 0)])
def test_the_state_is_as_large_as_the_rule_says(name, low, high):
    module = train_parts.Wide()
    trainer = fit(module, optimizer=name)
    parameters = sum(p.numel() for p in module.parameters())
    assert low * parameters <= train_parts.state_bytes(trainer.optimizers[0]) <= high * parameters


def test_eight_bits_take_a_quarter_of_the_state_and_learn_as_well():
    losses = {}
    for name in ("adamw", "adamw-8bit"):
        torch.manual_seed(0)
        module = train_parts.Wide()
        trainer = fit(module, steps=30, optimizer=name)
        weights = [p for p in module.wide.parameters() if p.numel() >= 4096]
        kept = tensor_bytes(trainer.optimizers[0].state[p] for p in weights)
        # Two states of one byte, one fp32 scale per block of 256 elements each, two maps of 256 floats (shared).
        assert kept / sum(p.numel() for p in weights) == pytest.approx(8 if name == "adamw" else 2.3, abs=0.3)
        batch = next(iter(train_parts.regression(64)))
        losses[name] = float(train_parts.Net.training_step(module, (module.wide(batch[0]), batch[1]), 0).detach())
    assert losses["adamw-8bit"] == pytest.approx(losses["adamw"], rel=0.05)


def test_the_turned_optimizer_steps_exactly_as_one_made_new():
    results = []
    for turned in (True, False):
        torch.manual_seed(0)
        layer = nn.Linear(8, 8)
        if turned:
            optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
            turn(optimizer, "adamw")
        else:
            optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1, weight_decay=0.01)
        for _ in range(3):
            optimizer.zero_grad()
            layer(torch.ones(4, 8)).square().mean().backward()
            optimizer.step()
        results.append(layer.weight.detach().clone())
    assert torch.equal(*results)


def test_the_decay_of_adam_is_decoupled_once_it_is_adamw():
    layer = nn.Linear(4, 4, bias=False)
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.5, weight_decay=0.1)
    turn(optimizer, "adamw")
    before = layer.weight.detach().clone()
    layer.weight.grad = torch.zeros_like(layer.weight)
    optimizer.step()
    assert torch.allclose(layer.weight, before * (1 - 0.5 * 0.1))


def test_a_fused_module_optimizer_becomes_the_one_torch_would_choose():
    optimizer = torch.optim.AdamW(nn.Linear(4, 4).parameters(), fused=True)
    turn(optimizer, "adamw")
    assert (optimizer.param_groups[0]["fused"], optimizer.param_groups[0]["foreach"]) == (None, None)
    turn(optimizer, "adamw-fused")
    assert optimizer.param_groups[0]["fused"] is True


def test_momentum_stays_when_the_module_had_it():
    optimizer = torch.optim.RMSprop(nn.Linear(4, 4).parameters(), lr=0.1, momentum=0.9)
    turn(optimizer, "sgd")
    assert optimizer.param_groups[0]["momentum"] == 0.9


def test_hooks_of_the_optimizer_are_kept():
    calls = Counter()
    layer = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    optimizer.register_step_post_hook(lambda *_: calls.update(["after"]))
    turn(optimizer, "adamw")
    layer(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    assert calls == {"after": 1}


@pytest.mark.parametrize("name", ["adamw", "adamw-8bit"])
def test_manual_optimization_with_several_optimizers_is_turned_whole(name):
    module = train_parts.Manual()
    trainer = fit(module, steps=4, optimizer=name)
    assert [type(optimizer).__name__ for optimizer in trainer.optimizers] == [KINDS[name]] * 2
    assert trainer.global_step == 4
    assert all(optimizer.state for optimizer in trainer.optimizers)


@pytest.mark.parametrize(
    "make", [list, tuple, lambda pair: [{"optimizer": one} for one in pair], lambda pair: (pair, [])]
)
def test_optimizers_are_found_in_every_form_that_lightning_takes(make):
    pair = [torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1) for _ in range(2)]
    assert list(find_optimizers(make(pair))) == pair
    assert list(find_optimizers(pair[0])) == pair[:1]
    assert list(find_optimizers(None)) == []


def test_the_module_gets_its_own_method_back():
    module = train_parts.Wide()
    fit(module, optimizer="adamw")
    assert "configure_optimizers" not in vars(module)
    module.configure_optimizers = lambda: torch.optim.SGD(module.parameters(), lr=0.1)
    module.mine = module.configure_optimizers()
    own = module.configure_optimizers
    fit(module, optimizer="adamw")
    assert module.configure_optimizers is own


def test_a_resumed_fit_reads_the_state_of_the_lever(tmp_path):
    trainer = fit(train_parts.Wide(), steps=8, optimizer="adamw")
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    again = train_parts.Wide()
    config = Config.make({"trial": {"max_steps": 10, "warmup_steps": 0}, "levers": {"optimizer": "adamw"}})
    more = make_trainer(config, accelerator="cpu", world_size=1, precision="32-true", module=again)
    more.fit(again, train_parts.regression(8), ckpt_path=tmp_path / "last.ckpt", weights_only=True)
    assert {int(state["step"]) for state in more.optimizers[0].state.values()} == {10}


def test_without_bitsandbytes_adamw_takes_its_place_and_says_why(monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    module = train_parts.Wide()
    with pytest.warns(KitWarning, match=r"adamw-8bit needs bitsandbytes, .*eight-bit.*; AdamW is used"):
        trainer = fit(module, optimizer="adamw-8bit")
    assert type(trainer.optimizers[0]) is torch.optim.AdamW


@pytest.fixture
def one_shard():
    """A parameter sharded over the one rank of a real group."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_tensor

    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield nn.Parameter(distribute_tensor(torch.ones(64, 64), init_device_mesh("cpu", (1,))))
    torch.distributed.destroy_process_group()


def test_sharded_parameters_get_8_bits_of_torchao(one_shard):
    optimizer = torch.optim.SGD([one_shard], lr=0.1)
    assert turn(optimizer, "adamw-8bit") == "adamw-8bit"
    assert type(optimizer) is ShardedAdamW8bit
    assert isinstance(optimizer.param_groups[0]["params"][0], DTensor)


def test_without_torchao_sharded_parameters_get_adamw_and_say_why(one_shard, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    optimizer = torch.optim.SGD([one_shard], lr=0.1)
    with pytest.warns(KitWarning, match=r"sharded parameters .*torchao, .*eight-bit.*; AdamW"):
        assert turn(optimizer, "adamw-8bit") == "adamw"


def test_a_module_without_an_optimizer_is_told_that_the_lever_does_nothing():
    class Bare(train_parts.Net):
        def configure_optimizers(self):
            return None

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        warnings.simplefilter("always", KitWarning)
        with pytest.warns(KitWarning, match="adamw does nothing: Bare .*no optimizer"):
            fit(Bare(), optimizer="adamw")


def test_a_name_that_is_not_offered_is_refused():
    with pytest.raises(ConfigError, match="'lion' .*none of adamw"):
        OptimizerChoice("lion")


def test_the_levers_of_a_config_and_the_classes_offer_the_same_words():
    from kit.train.sequences import KERNELS

    choices = {info.path: info.choices for info in Config.fields()}
    assert choices["levers.optimizer"] == ("module", *OPTIMIZERS)
    assert choices["levers.attention"] == ("auto", *KERNELS)
