import functools
import subprocess
import sys
import textwrap
import threading

import cloudpickle
import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from kit.errors import ConfigError
from kit.memory import query as query_module
from kit.memory.query import strip_weights
from kit.testing import TinyModule
from kit.trial.payload import Part

BIG = 64 << 20


class Tied(torch.nn.Module):
    """Two layers with one weight, two halves of one buffer, and a scalar."""

    def __init__(self, width=64):
        super().__init__()
        self.first = torch.nn.Linear(width, width)
        self.second = torch.nn.Linear(width, width)
        self.second.weight = self.first.weight
        self.first.bias.requires_grad_(False)
        whole = torch.arange(2.0 * width)
        self.register_buffer("left", whole[:width])
        self.register_buffer("right", whole[width:])
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.strided = torch.empty(width, 3).t()


def arrived(payload_part):
    with FakeTensorMode():
        return cloudpickle.loads(payload_part).value


def test_a_module_arrives_with_shapes_types_and_sharing_but_without_weights():
    module = Tied()
    payload = strip_weights(Part.of(module), Part.of(None))
    found = arrived(payload.module)
    assert found.first.weight is found.second.weight
    for (name, tensor), (_, given) in zip(found.state_dict().items(), module.state_dict().items(), strict=True):
        assert isinstance(tensor, FakeTensor), name
        assert (tensor.shape, tensor.stride(), tensor.dtype) == (given.shape, given.stride(), given.dtype)
    assert [p.requires_grad for p in found.parameters()] == [p.requires_grad for p in module.parameters()]
    assert found.left.untyped_storage()._cdata == found.right.untyped_storage()._cdata
    assert found.left.untyped_storage()._cdata != found.first.weight.untyped_storage()._cdata
    assert found.right.storage_offset() == 64
    assert found.strided.stride() == (1, 3)
    assert isinstance(found.first.weight, torch.nn.Parameter)


def test_weights_do_not_travel():
    module = torch.nn.Linear(4096, 4096)
    payload = strip_weights(Part.of(module), Part.of(None))
    assert len(payload.module) < 10_000


def test_equal_parts_have_one_digest_whatever_the_weights():
    torch.manual_seed(0)
    first = strip_weights(Part.of(Tied()), Part.of(None)).digest
    torch.manual_seed(1)
    assert strip_weights(Part.of(Tied()), Part.of(None)).digest == first
    assert strip_weights(Part.of(Tied(32)), Part.of(None)).digest != first


def test_small_data_travels_whole():
    data = torch.utils.data.TensorDataset(torch.arange(1_000_000))
    payload = strip_weights(Part.of(None), Part.of(data))
    assert torch.equal(cloudpickle.loads(payload.data).value.tensors[0], data.tensors[0])
    assert payload.notes == ()


def test_large_data_arrives_as_zeros_and_says_so(monkeypatch):
    monkeypatch.setattr(query_module, "WHOLE_BYTES", BIG // 2)
    data = {"x": torch.ones(BIG // 4), "y": np.ones(BIG // 8), "lengths": torch.tensor([3, 5]), "names": ["a", "b"]}
    payload = strip_weights(Part.of(None), Part.of(functools.partial(dict, **data)))
    found = cloudpickle.loads(payload.data).value()
    assert len(payload.data) < 10_000
    assert (found["x"].shape, found["x"].dtype, int(found["x"].count_nonzero())) == (data["x"].shape, torch.float32, 0)
    assert (found["y"].shape, found["y"].dtype, np.count_nonzero(found["y"])) == (data["y"].shape, np.float64, 0)
    assert found["lengths"].tolist() == [3, 5]
    (note,) = payload.notes
    assert note.startswith("data holds 128 MiB")
    assert "zeros" in note


def test_what_cannot_be_sent_is_named():
    module = TinyModule()
    module.guard = threading.Lock()
    with pytest.raises(ConfigError, match=r"module: TinyModule .*sent .*attribute guard \(lock\)"):
        strip_weights(Part.of(module), Part.of(None))


def test_packing_paths_needs_no_torch():
    code = textwrap.dedent("""
        import sys
        from kit.memory.query import strip_weights
        from kit.trial.payload import Part
        strip_weights(Part.of("kit.models:UNet"), Part.of(lambda: None))
        print("torch" in sys.modules)
    """)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
