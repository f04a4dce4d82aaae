"""What a step on a GPU moves to the host is no longer on the device."""

import pytest
import torch
from dry_parts import loader, peak, predict
from lightning.pytorch import LightningModule
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import offload_wrapper
from torchmetrics import CatMetric

from kit.config import Config

BATCH, WIDTH = 512, 256
OUTPUT_BYTES = BATCH * WIDTH * 4


class Layers(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(*[part for _ in range(4) for part in (nn.Linear(WIDTH, WIDTH), nn.Sigmoid())])
        self.kept = []

    def training_step(self, batch, _):
        output = self.net(batch)
        self.keep(output.detach())
        return output.square().mean()

    def keep(self, output):
        pass

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def keeping(keep):
    return type("Keeping", (Layers,), {"keep": lambda self, output: self.kept.append(keep(output))})


def peak_bytes(make_module, **options):
    data = loader(lambda: torch.rand(WIDTH), BATCH)
    return peak(predict(make_module, lambda: data, Config(), device_kind="cuda", **options))


HOST = device = torch.device("cpu")


def device_of_this_machine():
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize(
    "keep",
    [
        lambda output: output.cpu(),
        lambda output: output.to("cpu"),
        lambda output: output.to(torch.device("cpu"), non_blocking=True),
        lambda output: output.square().to(
            device="cpu",
            non_blocking=True,
        ),
        lambda output: output.to(HOST),
        lambda output: output.cpu().double().softmax(1),
        lambda output: torch.from_numpy(output.cpu().numpy()) + 1,
    ],
    ids=["cpu", "by name", "by device", "over several lines", "by a constant", "computed there", "by numpy"],
)
def test_what_is_kept_on_the_host_takes_nothing(keep):
    assert peak_bytes(keeping(keep)) == peak_bytes(Layers)


@pytest.mark.parametrize(
    "keep",
    [
        lambda output: output.to(device_of_this_machine()),
        lambda output: output.cpu().to(output.device),
        lambda output, where="cpu": output.to(where),
        lambda output: (output.to(device_of_this_machine()), output.mean().to("cpu"))[0],
    ],
    ids=["the device of the machine", "there and back", "a default", "beside what is moved"],
)
def test_what_is_on_the_device_or_comes_back_counts(keep):
    """A name that another machine would fill in otherwise says nothing."""
    assert peak_bytes(keeping(keep)) >= peak_bytes(Layers) + OUTPUT_BYTES


class BesideSparse(Layers):
    def keep(self, output):
        self.kept.append(output.cpu())
        places = torch.zeros(2, 4, dtype=torch.long, device=output.device)
        values = torch.ones(4, device=output.device)
        torch.sparse_coo_tensor(places, values, (WIDTH, WIDTH)).coalesce().to_dense()


def test_sparse_matrices_can_be_used_where_something_has_left():
    assert peak_bytes(BesideSparse) == peak_bytes(Layers)


class Collecting(Layers):
    on_host = False

    def __init__(self):
        super().__init__()
        self.outputs = CatMetric(compute_on_cpu=self.on_host)

    def keep(self, output):
        self.outputs.update(output)


def test_a_metric_that_computes_on_the_host_keeps_nothing_on_the_device():
    on_host = type("OnHost", (Collecting,), {"on_host": True})
    assert peak_bytes(Collecting) >= peak_bytes(on_host) + OUTPUT_BYTES


class Offloaded(Layers):
    pinned = False

    def training_step(self, batch, index):
        with save_on_cpu(pin_memory=self.pinned):
            return super().training_step(batch, index)


class Wrapped(Layers):
    def __init__(self):
        super().__init__()
        self.net = offload_wrapper(self.net)


@pytest.mark.parametrize("pinned", [False, True])
def test_activations_that_are_offloaded_come_back_one_after_another(pinned):
    offloaded = type("Pinned", (Offloaded,), {"pinned": pinned})
    assert peak_bytes(offloaded) <= peak_bytes(Layers) - 2 * OUTPUT_BYTES


def test_an_offloading_wrapper_takes_what_offloading_does():
    assert peak_bytes(Wrapped) <= peak_bytes(Layers) - 2 * OUTPUT_BYTES


class OfWeights(Layers):
    def training_step(self, batch, index):
        return super().training_step(batch, index) + sum(part.cpu().square().sum() for part in self.parameters())


def test_gradients_of_what_left_are_on_the_device():
    """A penalty computed on the host: weights keep gradients, and what is squared takes nothing."""
    weights_bytes = 4 * sum(weight.numel() for weight in Layers().parameters())
    assert 0 <= peak_bytes(OfWeights) - peak_bytes(Layers) <= weights_bytes


class FromTheStart(Layers):
    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.rand(BATCH, WIDTH).cpu())


def test_what_was_on_the_host_before_training_goes_to_the_device():
    assert peak_bytes(FromTheStart) == peak_bytes(Layers) + OUTPUT_BYTES


class Asking(FromTheStart):
    """Moves its table to the host, where it is not there anyway."""

    def training_step(self, batch, index):
        if self.table.device.type != "cpu":
            self.table = self.table.cpu()
        assert self.table.device.type == "cpu"
        return super().training_step(batch, index)


class Refusing(Layers):
    """Calls what only a machine with a card has."""

    def training_step(self, batch, index):
        if batch.device.type != "cpu":
            raise RuntimeError("no card here")
        return super().training_step(batch, index)


def test_code_that_asks_whether_a_tensor_is_on_the_cpu_is_told_of_the_card():
    assert peak_bytes(Asking) == peak_bytes(Layers)


def test_what_a_card_alone_can_do_is_recorded_as_on_the_cpu():
    assert peak_bytes(Refusing) == peak_bytes(Layers)


class Offloading(nn.Linear):
    """A layer that keeps its weight on the host and leaves it there when it is moved to a card."""

    def _apply(self, fn, recurse=True):
        super()._apply(fn, recurse)
        if self.weight.device.type != "cpu":
            self.weight.data = self.weight.data.cpu()
        return self

    def forward(self, values):
        return values


class HoldingBack(Layers):
    def __init__(self):
        super().__init__()
        self.table = Offloading(BATCH, 64 * WIDTH).requires_grad_(False)


def test_a_weight_that_goes_back_to_the_host_as_the_model_is_moved_takes_nothing():
    assert peak_bytes(HoldingBack) <= peak_bytes(Layers) + 2 * 64 * WIDTH * 4  # its bias stays
