"""FakeMode answers as torch's FakeTensorMode, operator by operator and dry run by dry run."""

from collections import Counter

import numpy as np
import pytest
import torch
from dry_parts import Perceptron, images, loader, tokens, vectors
from lightning.pytorch.demos import Transformer
from properties import crossed
from torch import nn
from torch._library import simple_registry
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn import functional

from kit.config import Config
from kit.memory.record import dry_run, fake_mode, fakes
from kit.memory.record.dry_run import DryRun, record
from kit.memory.record.fake_mode import FakeMode, rules_found_once
from kit.memory.record.recorder import BlockRecorder
from kit.memory.replay.replay import Recording


class Language(Perceptron):
    def __init__(self):
        super().__init__()
        self.layers = Transformer(vocab_size=512, nlayers=3)

    def loss(self, batch):
        out = self.layers(batch[:, :-1], batch[:, 1:])
        return functional.nll_loss(out, batch[:, 1:].reshape(-1))


class Pictures(Perceptron):
    def __init__(self):
        super().__init__()
        block = [nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True)]
        self.layers = nn.Sequential(nn.Conv2d(3, 8, 3), *block, *block, nn.AdaptiveAvgPool2d(1), nn.Flatten())

    def loss(self, batch):
        return functional.cross_entropy(self.layers(batch[0]), batch[1] % 8)


class Absolute(Perceptron):
    """Its loss is no larger than a number, as torch's own mode believes of every loss."""

    def loss(self, batch):
        return functional.l1_loss(self.layers(batch[0]), batch[1])


class Recurrent(Perceptron):
    def __init__(self):
        super().__init__()
        self.lstm, self.layers = nn.LSTM(16, 32, 2, batch_first=True), nn.Linear(32, 8)

    def loss(self, batch):
        return functional.l1_loss(self.layers(self.lstm(batch[0].view(-1, 16, 16))[0][:, -1]), batch[1])


MODULES = [(Absolute, vectors), (Language, tokens), (Pictures, images), (Recurrent, vectors)]


@pytest.mark.slow
@pytest.mark.parametrize(("device", "case"), crossed([("cpu", None), ("cuda", (8, 0))], MODULES))
def test_a_dry_run_is_the_same_as_with_torchs_own_mode(monkeypatch, device, case):
    (kind, capability), (module, sample) = device, case
    precision = "32-true" if module is Recurrent else "bf16-mixed"  # not every CPU has an LSTM in bfloat16
    run = DryRun(config=Config(), precision=precision, device_kind=kind, capability=capability)
    monkeypatch.setattr(fake_mode, "NORMS", {})  # which torch's rules do not tell as they are
    modes = (dry_run.FakeMode, lambda _: FakeTensorMode(allow_non_fake_inputs=True))
    found = []
    for mode in modes:  # from one line, which recordings name
        monkeypatch.setattr(dry_run, "FakeMode", mode)
        found.append(record(module, lambda: loader(sample), run))
    quick, slow = found
    assert not quick.facts["unknown"]
    for facts in (quick.facts, slow.facts):
        facts["notes"] = [note for note in facts["notes"] if "__pycache__" not in note]
        del facts["seconds"]
    assert quick.facts == slow.facts
    for name in vars(Recording(**vars(quick))):
        if name == "calls":
            assert quick.calls == slow.calls
        elif name != "facts":
            np.testing.assert_array_equal(getattr(quick, name), getattr(slow, name))


@pytest.fixture
def asked(monkeypatch):
    """How often torch is asked, by operator."""
    counts = Counter()
    ask = FakeTensorMode.__torch_dispatch__

    def counted(mode, func, *args):
        counts[func.__name__] += 1
        return ask(mode, func, *args)

    monkeypatch.setattr(FakeTensorMode, "__torch_dispatch__", counted)
    return counts


def test_torch_is_asked_once_for_equal_calls_and_again_for_others(asked):
    with FakeMode():
        x = torch.ones(4, 6)
        for _ in range(5):
            made = x.mul(2)
        assert asked["mul.Tensor"] == 1
        assert (made.shape, made.dtype, type(made)) == (x.shape, x.dtype, FakeTensor)
        assert torch.ones(4, 6, dtype=torch.int64).mul(2).dtype is torch.int64
        assert torch.ones(4, 6, dtype=torch.int64).mul(2.0).dtype is torch.float32
        assert x.t().mul(2).stride() == (1, 6)


def test_views_share_memory_and_results_do_not(asked):
    with FakeMode():
        x = torch.ones(4, 6)
        for _ in range(3):
            views = [x.t(), x[1:], *x.split(2), *x.unbind()]
            assert all(view.untyped_storage()._cdata == x.untyped_storage()._cdata for view in views)
            assert x.add_(1) is x
        assert x[1:].storage_offset() == 6
        one, other = x.exp(), x.exp()
        assert one.untyped_storage()._cdata != other.untyped_storage()._cdata
        assert asked["split.Tensor"] == asked["exp.default"] == 1


def test_numbers_that_are_known_stay_known():
    with FakeMode():
        step = torch.tensor(1.0)
        for expected in (2.0, 3.0, 4.0):
            torch._foreach_add_([step], 1)
            assert step.item() == expected


def test_numbers_that_numpy_found_are_known():
    with fakes.fake_values() as answers, FakeMode():
        groups = torch.from_numpy(np.array([3, 0, 3])).long()
        assert groups.max().item() == 3
        assert torch.where(groups == 3)[0].shape == (2,)
        groups.copy_(torch.randint(9, (3,)))
        assert not answers.guesses
        assert groups.max().item() == 1
        assert len(answers.guesses) == 1


def test_numbers_of_a_known_tensor_are_gone_through_without_torch(monkeypatch):
    asked = Counter()
    convert = FakeTensorMode.__torch_dispatch__

    def counting(self, func, types, args=(), kwargs=None):
        asked[func] += 1
        return convert(self, func, types, args, kwargs)

    monkeypatch.setattr(FakeTensorMode, "__torch_dispatch__", counting)
    with fakes.fake_values() as answers, FakeMode():
        places = torch.arange(1000).view(10, 100)[1]
        asked.clear()
        assert [int(place) for place in places] == list(range(100, 200))
        assert set(asked) <= {torch.ops.prim.device.default}
        assert len({place.untyped_storage()._cdata for place in (*places, places)}) == 1
        assert places.unbind()[7].storage_offset() == 107
        assert not answers.guesses
        places.unbind()[7].copy_(torch.rand(()))
        assert int(places[0]) == 1  # not known any more


def test_numbers_are_written_to_places_without_torch(monkeypatch):
    asked = Counter()
    convert = FakeTensorMode.__torch_dispatch__

    def counting(self, func, types, args=(), kwargs=None):
        asked[func] += 1
        return convert(self, func, types, args, kwargs)

    with fakes.fake_values(), FakeMode(), BlockRecorder() as recorder:
        matrix = torch.rand(100, 100)
        matrix[0, 0] = 1  # what is not asked again
        monkeypatch.setattr(FakeTensorMode, "__torch_dispatch__", counting)
        before, version = recorder.held_bytes, matrix._version
        for _ in range(50):
            matrix[0, 0] = 1
        assert (recorder.held_bytes, matrix._version) == (before, version + 50)
        assert set(asked) <= {torch.ops.prim.device.default}
        known = torch.zeros(3)
        known[1] = 5
        assert known.tolist() == [0, 5, 0]


def test_lists_of_other_shapes_are_still_refused():
    with FakeMode():
        values = [torch.ones(3), torch.ones(4)]
        torch._foreach_mul_(values, [torch.ones(3), torch.ones(4)])
        with pytest.raises(RuntimeError):
            torch._foreach_mul_(values, [torch.ones(4), torch.ones(3)])


def test_constants_and_unsafe_views_are_answered_again(asked):
    with fakes.fake_values(), FakeMode():
        half, x = torch.full((), 0.5), torch.empty(100, 100)
        made = [x * half for _ in range(3)]
        views = [torch.ops.aten._unsafe_view(x, [10, 1000]) for _ in range(3)]
        assert all(view.shape == (10, 1000) for view in views)
        assert {view.untyped_storage()._cdata for view in views} == {x.untyped_storage()._cdata}
        assert len({one.untyped_storage()._cdata for one in made}) == 3
        assert asked["mul.Tensor"] == asked["_unsafe_view.default"] == 1
        assert (half * 3).item() == 1.5
        x += half
        assert half.item() == 0.5


def test_constants_made_of_numbers_are_answered_again_each_with_numbers_of_its_own(asked):
    with fakes.fake_values(), FakeMode():
        first, second, third = (torch.zeros(3) for _ in range(3))
        assert asked["zeros.default"] == 1
        first.add_(1)
        assert (first.tolist(), second.tolist()) == ([1, 1, 1], [0, 0, 0])
        view = second[:2]
        assert view.untyped_storage()._cdata == second.untyped_storage()._cdata
        second.add_(2)
        assert view.tolist() == [2, 2]
        second.add_(torch.empty(3).normal_())
        assert view.constant is second.constant is None
        assert third.tolist() == [0, 0, 0]
        step = torch.tensor(1.0)
        step += 1
        assert step.item() == 2
        assert torch.zeros_like(torch.empty(2, 2).t()).stride() == (1, 2)


def test_a_constant_that_becomes_a_parameter_stays_one_with_its_storage_and_torch_is_not_asked(asked):
    with fakes.fake_values(), FakeMode():
        bias = torch.zeros(3)
        parameter = torch.nn.Parameter(bias)
        assert asked["detach.default"] == 0
        assert parameter.requires_grad
        assert parameter.untyped_storage()._cdata == bias.untyped_storage()._cdata
        with torch.no_grad():
            parameter.add_(2)
        assert (bias.tolist(), parameter.detach().tolist()) == ([2, 2, 2], [2, 2, 2])
        bias.normal_()
        assert bias.constant is parameter.constant is None


def test_zeros_like_a_constant_are_answered_again_each_with_numbers_of_its_own(asked):
    with fakes.fake_values(), FakeMode():
        first, second = (torch.zeros_like(torch.full((3,), value)) for value in (5.0, 7.0))
        assert asked["zeros_like.default"] == 1
        first.add_(1)
        assert (first.tolist(), second.tolist()) == ([1, 1, 1], [0, 0, 0])
        assert torch.zeros_like(torch.full((4,), 5.0)).shape == (4,)


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.resize_(2, 5),
        lambda x: x.t_(),
        lambda x: x.set_(torch.empty(2, 5).exp()),
        lambda x: x.unsqueeze_(0),
        lambda x: setattr(x, "data", torch.empty(2, 5, dtype=torch.float64)),
    ],
)
def test_a_tensor_whose_shape_is_changed_in_place_is_looked_at_again(change):
    found = []
    for mode in (FakeMode, lambda: FakeTensorMode(allow_non_fake_inputs=True)):
        with fakes.fake_values(), mode():
            values = [torch.empty(4, 6).exp() for _ in range(2)]
            made = [value.mul(2) for value in values]
            change(values[1])
            made.append(values[1].mul(2))
            found.append([(one.shape, one.stride(), one.dtype) for one in made])
    assert found[0] == found[1]
    assert found[0][-1] != found[0][0]


def test_rules_of_modes_are_found_once_and_as_before():
    find = simple_registry.find_torch_dispatch_rule
    with rules_found_once():
        found = [simple_registry.find_torch_dispatch_rule(torch.ops.aten.add.Tensor, FakeMode) for _ in range(2)]
        assert found == [find(torch.ops.aten.add.Tensor, FakeMode)] * 2
    assert simple_registry.find_torch_dispatch_rule is find
