"""8-bit AdamW of shards: real ranks, beside AdamW, beside bitsandbytes on one device, and through checkpoints."""

import copy

import numpy as np
import pytest
import torch
import train_parts
import train_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor

from kit.train import ShardedAdamW8bit, optimizers

STEPS = 8


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


def case(strategy="fsdp", optimizer="adamw-8bit", **more):
    common = {"module": "Wide", "loader": "regression", "global_batch": 8, "steps": STEPS}
    return {**common, "strategy": strategy, "settings": {"levers": {"optimizer": optimizer}}, **more}


CASES = {
    "8 bits": case(),
    "32 bits": case(optimizer="adamw"),
    "8 bits, replicas": case("fsdp:2:1"),
    "8 bits, bf16-mixed": case(precision="bf16-mixed"),
    "8 bits, accumulated": case(settings={"levers": {"optimizer": "adamw-8bit", "accumulate_grad_batches": 2}}),
}


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    return train_ranks.run_ranks(CASES, 2, tmp_path_factory.mktemp("eight_bit"))


def losses(answers):
    return np.mean([answer["losses"] for answer in answers], axis=0)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["8 bits", "8 bits, replicas"])
def test_two_ranks_train_as_32_bits_do_and_as_bitsandbytes_does_on_one_device(two_ranks, name):
    alone = train_ranks.fit(case("none"), 1)
    assert alone["optimizers"] == ["AdamW8bit"]
    np.testing.assert_allclose(losses(two_ranks[name]), alone["losses"], rtol=1e-3)
    np.testing.assert_allclose(losses(two_ranks[name]), losses(two_ranks["32 bits"]), rtol=1e-3)
    assert losses(two_ranks[name])[-1] != losses(two_ranks["32 bits"])[-1]


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_the_optimizer_is_torchaos_on_the_modules_own_groups_and_schedule(two_ranks, name):
    for answer in two_ranks[name]:
        assert answer["optimizers"] == ["AdamW" if name == "32 bits" else "ShardedAdamW8bit"]
        assert answer["rates"] == [1e-3 * 0.5 ** answer["steps"], 2e-3 * 0.5 ** answer["steps"]]


@pytest.mark.slow
def test_each_rank_holds_about_a_quarter_of_the_state(two_ranks):
    wide = 2 * 1024 * train_parts.SIDE // 2  # elements of both large weights on one rank
    for narrow, full in zip(two_ranks["8 bits"], two_ranks["32 bits"], strict=True):
        saved = 2 * wide * (4 - 1 - 4 / 256) - 4 * 1024  # two tables of 256 floats for each of two weights
        assert full["state_bytes"] - narrow["state_bytes"] == pytest.approx(saved, rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("sharded", [True, False])
def test_it_goes_on_from_a_checkpoint_of_either_kind(tmp_path, sharded):
    one = case(sharded=sharded)
    saved = {**one, "resume": True, "steps": 10, "checkpoint": str(tmp_path / "saved")}
    found = train_ranks.run_ranks({"resumed": saved, "whole": {**one, "steps": 16}}, 2, tmp_path)
    assert (tmp_path / "saved").is_dir() == sharded
    np.testing.assert_allclose(losses(found["resumed"]), losses(found["whole"])[8:], rtol=1e-5)


# -- the rule itself, in one process


@pytest.fixture
def mesh():
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


def step(optimizer, weight, times=3):
    for place in range(times):
        torch.manual_seed(place)
        gradient = torch.randn(weight.shape)
        weight.grad = distribute_tensor(gradient, weight.device_mesh) if hasattr(weight, "device_mesh") else gradient
        optimizer.step()


def test_slices_change_nothing(mesh, monkeypatch):
    results = []
    for size in (1 << 20, 512):
        monkeypatch.setattr(optimizers, "SLICE", size)
        weight = nn.Parameter(distribute_tensor(torch.ones(96, 64), mesh))
        optimizer = ShardedAdamW8bit([weight], lr=0.1)
        step(optimizer, weight)
        results.append(weight.full_tensor().detach())
    assert torch.equal(*results)


@pytest.mark.parametrize(("rows", "bits"), [(64, 8), (63, 32), (65, 32), (68, 8)])
def test_small_and_odd_shards_keep_32_bits_and_step_as_adamw_does(mesh, rows, bits):
    weight = nn.Parameter(distribute_tensor(torch.ones(rows, 64), mesh))
    narrow = ShardedAdamW8bit([weight], lr=0.1)
    step(narrow, weight)
    plain = nn.Parameter(torch.ones(rows, 64))
    step(torch.optim.AdamW([plain], lr=0.1), plain)
    held = narrow.state[weight]["exp_avg"].to_local()
    assert hasattr(held, "codes") == (bits == 8)
    close = {"rtol": 1e-5, "atol": 1e-6} if bits == 32 else {"rtol": 0, "atol": 0.1}
    torch.testing.assert_close(weight.full_tensor().detach(), plain.detach(), **close)


def test_its_state_is_saved_as_numbers_and_taken_from_any_adamw(mesh):
    weight = nn.Parameter(torch.ones(64, 64))
    adamw = torch.optim.AdamW([weight], lr=0.1)
    step(adamw, weight)
    narrow = ShardedAdamW8bit([weight], lr=0.1)
    narrow.load_state_dict(copy.deepcopy(adamw.state_dict()))
    assert hasattr(narrow.state[weight]["exp_avg"], "codes")
    saved, expected = (optimizer.state_dict()["state"][0] for optimizer in (narrow, adamw))
    assert type(saved["exp_avg"]) is torch.Tensor
    largest = expected["exp_avg"].abs().max()
    assert (saved["exp_avg"] - expected["exp_avg"]).abs().max() < 0.02 * largest
    assert saved["step"] == expected["step"] == 3
    before = weight.detach().clone()
    step(narrow, weight, 1)
    assert not torch.equal(weight, before)


def test_a_closure_makes_the_gradients_and_its_answer_comes_back():
    weight = nn.Parameter(torch.ones(64, 64))
    optimizer = ShardedAdamW8bit([weight], lr=0.1)

    def closure():
        loss = weight.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure) == 4096
    assert weight.max() < 1
