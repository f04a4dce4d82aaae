import numpy as np
import pytest
import torch
import train_parts
import train_ranks
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy

from kit.config import Config
from kit.errors import ConfigError
from kit.train import SelfShardedStrategy, ShardStrategy, make_strategy

CLIPPED = {"training": {"gradient_clip_norm": 0.1}}
CHECKPOINTED = {"levers": {"gradient_checkpointing": True}}
SOME_CHECKPOINTED = {"levers": {"gradient_checkpointing": True, "checkpoint_blocks": ["0", "layers.2"]}}
ACCUMULATED = {"levers": {"accumulate_grad_batches": 2}}


def case(module, strategy, settings=None, **more):
    loader = {"UNet": "fields", "SmallGPT": "tokens"}.get(module, "regression")
    common = {"module": module, "strategy": strategy, "settings": settings or {}, "loader": loader, "global_batch": 8}
    return {**common, **more}


SIX_DIGITS = 2e-6
PAIRS = {
    "ddp": case("Net", "ddp"),
    "fsdp": case("Net", "fsdp"),
    "ddp, checkpointed": case("Net", "ddp", CHECKPOINTED),
    "fsdp, checkpointed": case("Net", "fsdp", CHECKPOINTED),
    "ddp, some blocks checkpointed": case("Net", "ddp", SOME_CHECKPOINTED),
    "fsdp, some blocks checkpointed": case("Net", "fsdp", SOME_CHECKPOINTED),
    "fsdp, clipped": case("Net", "fsdp", CLIPPED),
    "fsdp, accumulated": case("Net", "fsdp", ACCUMULATED),
    "fsdp, one replica each": case("Net", "fsdp:2:1"),
    "fsdp, tied over blocks": case("TiedNet", "fsdp"),
    "fsdp, manual": case("Manual", "fsdp"),
    "fsdp, manual by method": case("ManualByMethod", "fsdp"),
    "fsdp, manual by forward": case("ManualByForward", "fsdp"),
    "fsdp, shards itself": case("SelfSharded", "fsdp"),
    "fsdp, made late": case("Late", "fsdp"),
    "fsdp, fitted twice": case("Net", "fsdp", CHECKPOINTED, fits=2),
    "fsdp, manual, fitted twice": case("Manual", "fsdp", fits=2),
    "ddp, UNet": case("UNet", "ddp"),
    "fsdp, UNet": case("UNet", "fsdp", CHECKPOINTED),
    "ddp, UNet, masked": case("UNet", "ddp", loader="coasts"),
    "fsdp, UNet, masked": case("UNet", "fsdp", loader="coasts"),
    "ddp, sketches, masked": case("SmallSketches", "ddp", loader="entities"),
    "fsdp, sketches, masked": case("SmallSketches", "fsdp", loader="entities"),
    "fsdp, GPT": case("SmallGPT", "fsdp", CHECKPOINTED),
}
OTHERS = {
    "bf16-mixed": case("Net", "fsdp", precision="bf16-mixed"),
    "bf16-true": case("Net", "fsdp", precision="bf16-true"),
    "plain loader": case("Net", "fsdp", loader="plain"),
    "nothing sharded": case("Promising", "fsdp", fails=True),
}


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    saved = {"saved": case("Net", "fsdp", checkpoint=str(folder / "whole.ckpt"))}
    return folder, train_ranks.run_ranks({**PAIRS, **OTHERS, **saved}, 2, folder)


def alone(one):
    """The same training in this process: one device, the whole global batch."""
    if one["module"] == "SelfSharded":
        one = {**one, "module": "Net"}
    return train_ranks.fit({**one, "strategy": "none"}, 1)


def mean_losses(answers):
    return np.mean([answer["losses"] for answer in answers], axis=0)


@pytest.mark.slow
@pytest.mark.parametrize("name", PAIRS)
def test_two_ranks_train_as_one_process_with_the_same_global_batch(two_ranks, name):
    expected = alone(PAIRS[name])
    answers = two_ranks[1][name]
    assert np.ptp(expected["losses"]) > 0, "nothing was learnt, so nothing would be compared"
    np.testing.assert_allclose(mean_losses(answers), expected["losses"], rtol=SIX_DIGITS)
    assert [answer["steps"] for answer in answers] == [expected["steps"]] * 2


@pytest.mark.slow
@pytest.mark.parametrize("name", PAIRS)
def test_a_trainer_never_launches_ranks_of_its_own_even_inside_slurm(two_ranks, name):
    assert [answer["children"] for answer in two_ranks[1][name]] == [0, 0]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fsdp", "fsdp, checkpointed", "fsdp, manual", "fsdp, UNet", "fsdp, GPT"])
def test_sharding_halves_what_each_of_two_ranks_holds(two_ranks, name):
    whole = alone(PAIRS[name])["held"]
    held = [answer["held"] for answer in two_ranks[1][name]]
    assert sum(held) == whole
    assert max(held) < 0.6 * whole


@pytest.mark.slow
def test_data_parallel_ranks_hold_whole_models(two_ranks):
    whole = alone(PAIRS["ddp"])["held"]
    for name in ("ddp", "fsdp, one replica each"):
        assert [answer["held"] for answer in two_ranks[1][name]] == [whole, whole]


FOUR = {
    "ddp": case("Net", "ddp"),
    "fsdp": case("Net", "fsdp"),
    "fsdp:2:2": case("Net", "fsdp:2:2"),
    "fsdp:2:2, checkpointed and clipped": case("Net", "fsdp:2:2", {**CHECKPOINTED, **CLIPPED}),
    "fsdp:2:2, accumulated": case("Net", "fsdp:2:2", ACCUMULATED),
    "fsdp:2:2, GPT": case("SmallGPT", "fsdp:2:2"),
}


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory):
    return train_ranks.run_ranks(FOUR, 4, tmp_path_factory.mktemp("four"))


@pytest.mark.slow
@pytest.mark.parametrize("name", FOUR)
def test_four_ranks_train_as_one_process_with_the_same_global_batch(four_ranks, name):
    expected, answers = alone(FOUR[name]), four_ranks[name]
    np.testing.assert_allclose(mean_losses(answers), expected["losses"], rtol=SIX_DIGITS)
    copies = {"ddp": 4, "fsdp": 1}.get(name, 2)
    assert sum(answer["held"] for answer in answers) == copies * expected["held"]


RESUMED = {
    "ddp": case("Net", "ddp"),
    "fsdp, one file": case("Net", "fsdp", sharded=False),
    "fsdp, sharded": case("Net", "fsdp", sharded=True),
    "fsdp:2:1, sharded": case("Net", "fsdp:2:1", sharded=True),
}


@pytest.fixture(scope="module")
def resumed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("resumed")
    more = {"resume": True, "steps": 10}  # two beyond the epoch of eight that is saved
    cases = {name: {**one, **more, "checkpoint": str(folder / name)} for name, one in RESUMED.items()}
    return folder, train_ranks.run_ranks(cases, 2, folder)


@pytest.mark.slow
@pytest.mark.parametrize("name", RESUMED)
def test_ranks_go_on_from_their_checkpoint_exactly_as_one_process_does(resumed, tmp_path, name):
    folder, answers = resumed
    single = {**RESUMED[name], "strategy": "none", "sharded": False}
    broken_off = train_ranks.fit({**single, "resume": True, "steps": 10, "checkpoint": str(tmp_path / "one")}, 1)
    whole = train_ranks.fit({**single, "steps": 16}, 1)
    np.testing.assert_allclose(mean_losses(answers[name]), broken_off["losses"], rtol=SIX_DIGITS)
    np.testing.assert_allclose(broken_off["losses"], whole["losses"][8:], rtol=SIX_DIGITS)
    assert (folder / name).is_dir() == name.endswith("sharded")
    assert [answer["steps"] for answer in answers[name]] == [16, 16]


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_sharded_bfloat16_trains_close_to_float32(two_ranks, precision):
    answers = two_ranks[1][precision]
    assert {answer["precision"] for answer in answers} == {precision}
    np.testing.assert_allclose(mean_losses(answers), alone(PAIRS["fsdp"])["losses"], rtol=0.05)


@pytest.mark.slow
def test_a_sharded_model_is_saved_whole_and_loads_into_a_plain_module(two_ranks):
    folder, _ = two_ranks
    checkpoint = torch.load(folder / "whole.ckpt", weights_only=True)
    train_parts.Net().load_state_dict(checkpoint["state_dict"], strict=True)


@pytest.mark.slow
def test_a_module_that_promises_to_shard_itself_and_does_not_is_refused(two_ranks):
    for answer in two_ranks[1]["nothing sharded"]:
        assert "ConfigError" in answer["error"]
        assert "sharded nothing" in answer["error"]


@pytest.mark.slow
def test_a_loader_that_knows_nothing_of_ranks_is_shared_among_them(two_ranks):
    assert [answer["batches_per_epoch"] for answer in two_ranks[1]["plain loader"]] == [8, 8]
    assert alone(OTHERS["plain loader"])["batches_per_epoch"] == 8
    first, second = (answer["losses"] for answer in two_ranks[1]["plain loader"])
    assert set(first).isdisjoint(second)


def hardware(strategy, devices):
    return Config.make({"hardware": {"strategy": strategy, "devices": devices}}).hardware


def test_each_strategy_of_a_config_has_its_lightning_strategy():
    assert isinstance(make_strategy(hardware("none", 1), "cpu", 1), SingleDeviceStrategy)
    assert isinstance(make_strategy(hardware("ddp", 2), "cpu", 2), DDPStrategy)
    sharded = make_strategy(hardware("fsdp:2:4", 8), "gpu", 8)
    assert isinstance(sharded, ShardStrategy)
    assert (sharded.replicas, sharded.shard_size, sharded.process_group_backend) == (2, 4, "nccl")
    assert isinstance(make_strategy(hardware("fsdp", 2), "cpu", 2, train_parts.SelfSharded()), SelfShardedStrategy)


def test_the_one_device_of_a_gpu_run_is_the_first_visible():
    assert make_strategy(hardware("none", 1), "gpu", 1).root_device == torch.device("cuda", 0)


def test_a_mesh_that_does_not_use_every_device_is_refused_with_its_arithmetic():
    with pytest.raises(ConfigError, match=r"fsdp:2:4 needs 2 × 4 = 8 devices, .*has 4; .*fsdp:2:2.* would fit"):
        make_strategy(hardware("fsdp:2:4", 8), "cpu", 4)


def test_one_device_is_not_stretched_over_two_ranks():
    with pytest.raises(ConfigError, match="none uses 1 device, not 2"):
        make_strategy(hardware("none", 1), "cpu", 2)


YAML = """
trainer:
  accelerator: cpu
  devices: 1
  max_steps: 3
  logger: false
  enable_checkpointing: false
  enable_progress_bar: false
  enable_model_summary: false
  callbacks:
    - class_path: kit.train.GradientCheckpointing
      init_args: {blocks: [Block]}
  strategy:
    class_path: kit.train.ShardStrategy
    init_args: {replicas: 1, shard_size: 1}
model:
  class_path: kit.models.UNet
  init_args: {variables: 2, width: 4, depth: 1}
"""


@pytest.mark.filterwarnings("ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning")  # Lightning's own call
def test_an_exported_yaml_can_name_the_strategy_the_lever_and_the_model(tmp_path, monkeypatch):
    from lightning.pytorch.cli import LightningCLI

    path = tmp_path / "config.yaml"
    path.write_text(YAML)
    environment = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("sys.argv", ["job.py", "--config", str(path)])
    cli = LightningCLI(save_config_callback=None, seed_everything_default=False, run=False)
    assert isinstance(cli.trainer.strategy, ShardStrategy)
    assert (cli.trainer.strategy.replicas, cli.trainer.strategy.shard_size) == (1, 1)
    assert type(cli.model).__name__ == "UNet"
