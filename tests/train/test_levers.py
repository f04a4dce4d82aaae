import json
import warnings

import pytest
import torch
import train_parts
from torch import nn
from torch.utils.checkpoint import CheckpointError

from kit.config import Config
from kit.errors import ConfigError, KitWarning
from kit.models import UNet
from kit.train import (
    AttentionKernel,
    GradientCheckpointing,
    OptimizerChoice,
    SequenceChunks,
    ZeroGradAfterStep,
    make_trainer,
)
from kit.train.choices import lever_entries
from kit.train.fsdp import holding_their_parameters_alone, outermost, repeated_blocks
from kit.train.levers import blocks_by_label, lever_callbacks

LEVERS = (GradientCheckpointing, OptimizerChoice, ZeroGradAfterStep, SequenceChunks, AttentionKernel)


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


def fit(module, *levers, loader=None, steps=4):
    losses = train_parts.Losses()
    config = Config.make({"trial": {"max_steps": steps, "warmup_steps": 0}})
    trainer = make_trainer(
        config, accelerator="cpu", world_size=1, precision="32-true", module=module, callbacks=[*levers, losses]
    )
    trainer.fit(module, loader or train_parts.regression(8))
    return losses.values


def gradients_and_saved_bytes(module, lever):
    """Gradients of one step, and the bytes autograd kept for it, each storage counted once."""
    kept = {}

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    if lever is not None:
        lever.setup(None, module, "fit")
    batch = next(iter(train_parts.regression(64)))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = module.training_step(batch, 0)
    loss.backward()
    gradients = [parameter.grad.clone() for parameter in module.parameters()]
    if lever is not None:
        lever.teardown(None, module, "fit")
    return gradients, sum(kept.values())


def test_checkpointing_keeps_fewer_bytes_and_gives_equal_gradients():
    torch.manual_seed(0)
    module = train_parts.Net(layers=6)
    plain, plain_bytes = gradients_and_saved_bytes(module, None)
    module.zero_grad()
    checkpointed, checkpointed_bytes = gradients_and_saved_bytes(module, GradientCheckpointing())
    assert all(torch.equal(one, other) for one, other in zip(plain, checkpointed, strict=True))
    assert checkpointed_bytes < 0.5 * plain_bytes


class Remembering(train_parts.Net):
    """Hands its layers a cache of what they saw, as models of transformers do; each adds to it and looks at all."""

    class Cache:
        def __init__(self, seen):
            self.seen = dict(seen)

        def get_seq_length(self, layer):
            return len(self.seen.get(layer, ()))

        def update(self, values, layer):
            self.seen[layer] = torch.cat([*([self.seen[layer]] if layer in self.seen else []), values])
            return self.seen[layer]

    class Layer(train_parts.Layer):
        def __init__(self, layer_idx):
            super().__init__()
            self.layer_idx = layer_idx

        def forward(self, values, cache):
            all_values = values if cache is None else cache.update(values, self.layer_idx)
            return super().forward(values) + all_values.tanh().square().mean()

    def __init__(self, seen=()):
        super().__init__()
        self.layers = nn.ModuleList(self.Layer(number) for number in range(3))
        self.seen = seen

    def training_step(self, batch, batch_idx):
        cache, values = self.Cache(self.seen), batch[0]
        for layer in self.layers:
            values = layer(values, cache=cache) if layer.layer_idx else layer(values, cache)
        return nn.functional.mse_loss(values, batch[1])


def test_a_cache_that_is_empty_is_not_filled_twice():
    losses = []
    for levers in ([], [GradientCheckpointing()], [GradientCheckpointing(["1-2"])]):
        torch.manual_seed(0)
        losses.append(fit(Remembering(), *levers))
    assert losses[1:] == [pytest.approx(losses[0])] * 2


def test_a_cache_that_holds_something_is_not_taken_away():
    prefix = {number: torch.ones(2, train_parts.SIDE) for number in range(3)}
    with pytest.raises(CheckpointError):
        fit(Remembering(prefix), GradientCheckpointing())


def test_a_fit_with_the_lever_learns_exactly_as_without():
    losses = []
    for levers in ([], [GradientCheckpointing()], [GradientCheckpointing(["Layer"])]):
        torch.manual_seed(0)
        losses.append(fit(train_parts.Net(), *levers))
    assert losses[0] == losses[1] == losses[2]


def test_dropout_is_drawn_the_same_again():
    losses = []
    for levers in ([], [GradientCheckpointing()]):
        torch.manual_seed(0)
        module = train_parts.Net()
        for layer in module.layers:
            layer.body.append(nn.Dropout(0.5))
        losses.append(fit(module, *levers))
    assert losses[0] == losses[1]


def test_names_classes_and_keys_stay_and_forward_comes_back_after_the_fit():
    module = train_parts.Net()
    names = [name for name, _ in module.named_parameters()]
    forwards = []

    class Look(train_parts.Losses):
        def on_train_start(self, trainer, pl_module):
            forwards.extend("forward" in vars(layer) for layer in pl_module.layers)
            assert [name for name, _ in pl_module.named_parameters()] == names
            assert all(type(layer) is train_parts.Layer for layer in pl_module.layers)

    lever = GradientCheckpointing()
    fit(module, lever, Look())
    assert forwards == [True] * 3
    assert lever.count == 0
    assert not any("forward" in vars(layer) for layer in module.layers)


def test_a_block_is_not_checkpointed_twice():
    losses = []
    for levers in ([GradientCheckpointing()], [GradientCheckpointing(), GradientCheckpointing()]):
        torch.manual_seed(0)
        losses.append(fit(train_parts.Net(), *levers))
    assert losses[0] == losses[1]
    first, second = GradientCheckpointing(), GradientCheckpointing()
    module = train_parts.Net()
    for lever in (first, second):
        lever.setup(None, module, "fit")
    assert (first.count, second.count) == (3, 0)


def test_batch_norm_blocks_are_left_alone_and_named():
    losses = []
    for levers in ([], [GradientCheckpointing()]):
        torch.manual_seed(0)
        module = train_parts.BatchNormNet()
        if levers:
            with pytest.warns(KitWarning, match=r"3 of 3 blocks \(BatchNormLayer\) are not checkpointed"):
                losses.append(fit(module, *levers))
        else:
            losses.append(fit(module))
        assert int(module.layers[0].body[1].num_batches_tracked) == 4
    assert losses[0] == losses[1]


def test_a_module_without_blocks_says_that_the_lever_does_nothing():
    with pytest.warns(KitWarning, match="Net .*no repeated blocks"):
        fit(train_parts.Net(layers=0), GradientCheckpointing(), steps=1)


def test_a_class_that_is_not_there_is_refused_with_those_that_are():
    with pytest.raises(ConfigError, match=r"checkpoint_blocks: Net .*no Transformer; .*Layer"):
        fit(train_parts.Net(), GradientCheckpointing(["Transformer"]))
    with pytest.raises(ConfigError, match=r"mean 'Layer'"):
        fit(train_parts.Net(), GradientCheckpointing(["Layers"]))


@pytest.mark.parametrize(
    ("blocks", "numbers"),
    [
        (["1", "3-4"], {1, 3, 4}),
        (["layers.0", "5"], {0, 5}),
        (["Layer"], {0, 1, 2, 3, 4, 5}),
        (["0-5"], {0, 1, 2, 3, 4, 5}),
    ],
)
def test_some_blocks_are_checkpointed_by_number_name_or_class(blocks, numbers):
    module, lever = train_parts.Net(layers=6), GradientCheckpointing(blocks)
    lever.setup(None, module, "fit")
    assert {number for number, layer in enumerate(module.layers) if "forward" in vars(layer)} == numbers
    lever.teardown(None, module, "fit")
    assert not any("forward" in vars(layer) for layer in module.layers)


def test_half_of_the_blocks_keep_their_bytes_and_gradients_stay_equal():
    torch.manual_seed(0)
    module, kept = train_parts.Net(layers=6), []
    gradients = []
    for lever in (None, GradientCheckpointing(["0-2"]), GradientCheckpointing()):
        found, saved_bytes = gradients_and_saved_bytes(module, lever)
        module.zero_grad()
        gradients.append(found)
        kept.append(saved_bytes)
    assert kept[1] == (kept[0] + kept[2]) // 2
    for found in gradients[1:]:
        assert all(torch.equal(one, other) for one, other in zip(gradients[0], found, strict=True))


@pytest.mark.parametrize(
    ("blocks", "message"),
    [("6", "no repeated blocks 6; its 6 are numbered from 0 to 5"), ("4-2", "no repeated blocks 4-2"),
     ("layers.7", r"no layers\.7; did you mean 'layers\.\d")],
)  # fmt: skip
def test_a_block_that_is_not_there_is_refused(blocks, message):
    with pytest.raises(ConfigError, match=message):
        GradientCheckpointing([blocks]).setup(None, train_parts.Net(layers=6), "fit")


def test_numbers_of_blocks_are_read_as_text():
    config = Config.make({"levers": {"gradient_checkpointing": True, "checkpoint_blocks": [0, "2-3"]}})
    assert config.levers.checkpoint_blocks == ("0", "2-3")
    assert Config.from_yaml(config.to_yaml()) == config


def test_a_config_may_name_the_blocks():
    levers = {"gradient_checkpointing": True, "checkpoint_blocks": ["Linear"]}
    (lever,) = lever_callbacks(Config.make({"levers": levers}))
    assert lever.blocks == ("Linear",)
    (lever,) = lever_callbacks(Config.make({"levers": {"gradient_checkpointing": True}}))
    assert lever.blocks is None
    assert lever_callbacks(Config.make({"levers": {"checkpoint_blocks": ["Linear"]}})) == []


EVERY_LEVER = {
    "gradient_checkpointing": True,
    "checkpoint_blocks": ["0", "blocks.1"],
    "optimizer": "adamw-fused",
    "zero_grad_after_step": True,
    "sequence_chunk": 3,
    "attention": "math",
}


@pytest.mark.filterwarnings("ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning")  # Lightning's own call
def test_an_exported_yaml_names_every_lever_and_trains_as_the_config_does(tmp_path, monkeypatch):
    from lightning.pytorch.cli import LightningCLI

    config = Config.make({"levers": EVERY_LEVER, "trial": {"max_steps": 3, "warmup_steps": 0}})
    small = {"vocabulary": 32, "width": 16, "heads": 2, "layers": 2, "context": 8}
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = {"accelerator": "cpu", "max_steps": 3, "enable_model_summary": False, **quiet}
    job = {
        "seed_everything": 0,
        "trainer": {**trainer, "callbacks": lever_entries(config)},
        "model": {"class_path": "kit.models.GPT", "init_args": small},
    }
    path = tmp_path / "job.yaml"
    path.write_text(json.dumps(job))  # JSON is YAML
    monkeypatch.setattr("sys.argv", ["job.py", "--config", str(path)])
    cli = LightningCLI(save_config_callback=None, run=False)
    mine, exported = lever_callbacks(config), [part for part in cli.trainer.callbacks if type(part) in LEVERS]
    assert [type(part) for part in exported] == [type(part) for part in mine] == list(LEVERS)
    losses = []
    for trainer in (cli.trainer, make_trainer(config, accelerator="cpu", world_size=1, precision="32-true")):
        torch.manual_seed(0)
        kept = train_parts.Losses()
        trainer.callbacks.append(kept)
        trainer.fit(train_parts.SmallGPT(), train_parts.tokens(8))
        losses.append(kept.values)
    assert losses[0] == losses[1]


class Sums(train_parts.Net):
    """Sums gradients over pairs of batches by itself, and notes which are there as a forward pass begins."""

    def __init__(self):
        super().__init__()
        self.held = []

    def training_step(self, batch, batch_idx):
        self.held.append(self.first.weight.grad is not None)
        return super().training_step(batch, batch_idx)

    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        if batch_idx % 2 == 0:
            optimizer.zero_grad()


class Whole(Sums):
    optimizer_zero_grad = train_parts.Net.optimizer_zero_grad


@pytest.mark.parametrize(
    ("made", "accumulate", "held"),
    [
        (Whole, 1, [False] * 5),
        (Whole, 2, [False, True, False, True, False, True, False, True]),
        (Sums, 1, [False, True, False, True, False]),
    ],
)
def test_gradients_freed_after_the_step_change_no_number(made, accumulate, held):
    losses, seen = [], []
    for lever in (False, True):
        torch.manual_seed(0)
        module, values = made(), train_parts.Losses()
        levers = {"zero_grad_after_step": lever, "accumulate_grad_batches": accumulate}
        config = Config.make({"levers": levers, "trial": {"max_steps": len(held) // accumulate, "warmup_steps": 0}})
        trainer = make_trainer(
            config, accelerator="cpu", world_size=1, precision="32-true", module=module, callbacks=[values]
        )
        trainer.fit(module, train_parts.regression(8))
        losses.append(values.values)
        seen.append(module.held)
    assert losses[0] == losses[1]
    assert seen == [[False, *[True] * (len(held) - 1)], held]


def test_who_looks_at_gradients_after_the_step_is_told():
    class Looks(train_parts.Losses):
        def on_before_zero_grad(self, trainer, pl_module, optimizer):
            pass

    with pytest.warns(KitWarning, match="on_before_zero_grad of Looks"):
        fit(train_parts.Net(), ZeroGradAfterStep(), Looks(), steps=1)


def test_a_module_that_optimizes_manually_frees_them_itself():
    class Manual(train_parts.Net):
        automatic_optimization = False

        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers()
            self.manual_backward(super().training_step(batch, batch_idx))
            optimizer.step()
            return {"loss": torch.tensor(0.0)}

    module = Manual()
    with pytest.warns(KitWarning, match="Manual optimizes manually"):
        fit(module, ZeroGradAfterStep(), steps=2)
    assert module.first.weight.grad is not None


def test_layers_made_in_configure_model_are_found():
    counts = []

    class Late(train_parts.Net):
        def configure_model(self):
            self.layers = nn.ModuleList(train_parts.Layer() for _ in range(2))

    class Count(train_parts.Losses):
        def on_train_start(self, trainer, pl_module):
            counts.append(sum("forward" in vars(layer) for layer in pl_module.layers))

    fit(Late(), GradientCheckpointing(), Count(), steps=1)
    assert counts == [2]


def test_every_block_of_the_unet_is_found_and_learns_the_same():
    losses = []
    for levers in ([], [GradientCheckpointing()]):
        torch.manual_seed(0)
        module = UNet(variables=2, width=8, depth=2)
        losses.append(fit(module, *levers, loader=train_parts.fields(8)))
    assert losses[0] == losses[1]
    assert len(repeated_blocks(module)) == 5


def test_bare_layers_lists_and_lone_blocks_are_no_blocks():
    class Lone(nn.Module):
        def __init__(self):
            super().__init__()
            self.linears = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))
            self.lists = nn.ModuleList(nn.ModuleList([nn.Linear(2, 2)]) for _ in range(3))
            self.one = nn.ModuleList([train_parts.Layer()])
            self.mixed = nn.Sequential(train_parts.Layer(), train_parts.BatchNormLayer())

    assert repeated_blocks(Lone()) == []


def test_outer_blocks_are_taken_for_those_inside_them():
    module = nn.Sequential(*(nn.Sequential(train_parts.Layer(), train_parts.Layer()) for _ in range(2)))
    assert len(repeated_blocks(module)) == 6
    assert outermost(repeated_blocks(module)) == list(module)


def test_what_recurs_in_lists_of_lists_is_found_and_norms_among_it_are_not():
    def norm():
        return nn.ModuleList([nn.Sequential(nn.LayerNorm(2)), None])

    lists = [[norm(), train_parts.Layer(), train_parts.BatchNormLayer()], [norm(), train_parts.Layer(), nn.Identity()]]
    module = nn.ModuleList(map(nn.ModuleList, lists))
    assert repeated_blocks(module) == [lists[0][1], lists[1][1]]


def test_a_block_with_a_weight_tied_to_the_outside_is_told_from_the_others():
    module = train_parts.TiedNet()
    alone = holding_their_parameters_alone(list(module.layers), module)
    assert alone == [module.layers[0], module.layers[2]]


def test_the_lever_emits_no_warning_of_its_own_when_all_is_well():
    with warnings.catch_warnings():
        warnings.simplefilter("error", KitWarning)
        fit(train_parts.Net(), GradientCheckpointing(), steps=1)


def test_blocks_are_numbered_and_those_within_few_stages_are_named():
    assert blocks_by_label(train_parts.Net(layers=9)) == {str(number): f"layers.{number}" for number in range(9)}
    stages = nn.ModuleList(nn.Sequential(*(train_parts.Layer() for _ in range(2))) for _ in range(3))
    names = [f"{stage}.{layer}" for stage in range(3) for layer in range(2)]
    assert blocks_by_label(stages) == dict(zip(names, names, strict=True))
    assert blocks_by_label(nn.ModuleList(train_parts.BatchNormLayer() for _ in range(3))) == {}
