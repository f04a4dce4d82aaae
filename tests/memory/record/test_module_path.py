import torch
from torch import nn

from kit.memory.record.recorder import ModulePath


class Names(dict):
    """Numbers for names, and back."""

    def number(self, text):
        return self.setdefault(text, len(self))

    def text(self, number):
        return [*self][number]


def watched(module):
    names = Names({"": 0})
    path = ModulePath(names.number)
    path.name_parts(module)
    for part in module.modules():
        part.register_forward_pre_hook(path.enter)
        part.register_forward_hook(path.leave, always_call=True)
    return path, names


def test_a_part_runs_between_its_call_and_its_return():
    module = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)))
    path, names = watched(module)
    seen = []
    module[1][0].register_forward_pre_hook(lambda *_: seen.append(names.text(path.current(0))))
    assert path.current(0) == 0
    module(torch.ones(1, 2))
    assert seen == ["1.0"]
    assert path.current(0) == 0


def test_a_part_that_raises_is_left_too():
    module = nn.Sequential(nn.Linear(2, 2))
    path, _ = watched(module)
    try:
        module(torch.ones(1, 3))
    except RuntimeError:
        assert path.current(0) == 0


def test_in_a_backward_pass_the_part_is_the_one_that_made_the_node():
    module = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    path, names = watched(module)
    seen = []

    def look(gradient):
        seen.append(names.text(path.current(1)))

    x = module[1](module[0](torch.ones(1, 2)))
    x.register_hook(look)
    module[2](x).sum().backward()
    # The hook runs ahead of the node that made x.
    assert seen == ["1"]


def test_a_module_that_is_not_a_part_counts_as_what_calls_it():
    stranger = nn.ReLU()
    module = nn.Linear(2, 2)
    path, names = watched(module)
    path.enter(module, None)
    path.enter(stranger, None)
    assert names.text(path.current(0)) == "Linear"
