"""8-bit AdamW: fake, recorded on real tensors, and measured in the allocator: one number."""

import pytest
import torch
from emulation_parts import fakes, peak_bytes, record
from torch import nn

from kit.memory.record.truth import AllocatorTrace
from kit.memory.record.workspace import Workspaces, eight_bit_on_fakes
from kit.memory.replay.replay import CATEGORIES
from kit.train.optimizers import make_tables, turn


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


class Tower(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4)))

    def forward(self, values):
        return self.layers(values).square().mean()


def made():
    module = Tower()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    turn(optimizer, "adamw-8bit")
    return module, optimizer


def batch():
    return [torch.randn(8, 512)]


@pytest.mark.slow
def test_fake_steps_hold_what_real_ones_do():
    with fakes(), eight_bit_on_fakes():
        recording = record(*_with_batch(made()))
    fake = peak_bytes(recording)
    real = peak_bytes(record(*_with_batch(made())))
    assert fake == pytest.approx(real, rel=0.01)


def test_with_what_the_cpus_kernel_takes_it_is_what_the_allocator_gave():
    with fakes(), eight_bit_on_fakes():
        recording = record(*_with_batch(made()), workspace=Workspaces(None))
    module, optimizer = made()
    trace = AllocatorTrace()
    trace.start(module)
    for _ in range(2):
        loss = module(*batch())
        module.zero_grad()
        loss.backward()
        del loss
        optimizer.step()
    assert peak_bytes(recording) == pytest.approx(trace.stop().peak_bytes, rel=0.01)


def _with_batch(pair):
    module, optimizer = pair
    return module, batch, optimizer


def test_the_state_takes_a_quarter_of_adamws():
    with fakes(), eight_bit_on_fakes():
        module, optimizer = made()
        recording = record(module, batch, optimizer)
    kept = recording.block_category == CATEGORIES.index("optimizer_state")
    state = int(recording.block_bytes[kept].sum())
    elements = sum(parameter.numel() for parameter in module.parameters())
    assert state / elements == pytest.approx(2.1, abs=0.1)


def test_the_tables_are_made_by_bitsandbytes_again_afterwards():
    from bitsandbytes import functional

    make = functional.create_dynamic_map
    with eight_bit_on_fakes():
        assert functional.create_dynamic_map is not make
    assert functional.create_dynamic_map is make


def test_torchao_keeps_its_tables_of_real_numbers_also_when_a_dry_run_asks_first():
    from torchao.optim import subclass_8bit

    subclass_8bit.get_qmap_signed.cache_clear()
    with fakes():
        make_tables()
    assert subclass_8bit.get_qmap_signed() == tuple(subclass_8bit.create_dynamic_map(signed=True))
