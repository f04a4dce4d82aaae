"""What operators hold beside their results: a dry run beside the allocator's own events, where it decides the peak."""

import pytest
import torch
from dry_parts import loader, measure, one_thread, peak, predict
from lightning.pytorch import LightningModule
from torch import nn
from torch.nn import functional

from kit.config import Config

BATCH = 64
A_FEW_BYTES = 256  # numbers that Lightning counts and logs with


class Wide(LightningModule):
    """A megabyte of numbers out of a small layer, and what becomes of them."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(16, 4096), nn.BatchNorm2d(16)

    def training_step(self, batch, batch_idx):
        return self.ends(self, self.first(batch))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-6)


def half(values):
    return torch.full_like(values.detach(), 0.5)


def every_other(values):
    return torch.arange(values.numel()).view(values.shape) % 2 == 0


def normed(module, values, layout=torch.contiguous_format):
    images = values.view(-1, 16, 16, 16).to(memory_format=layout)
    return (module.norm(images) * half(images)).sum()


def products(rows, weights):
    return functional.bilinear(rows, half(rows), weights.view(-1, 64, 64)).sum()


def resized(values, channels, mode, layout=torch.contiguous_format):
    images = values.reshape(64, channels, -1, 64 if channels == 1 else 32).to(memory_format=layout)
    return functional.interpolate(images, scale_factor=2, mode=mode).sum()


def smoothly_resized(values, channels, scale, mode):
    images = values.float().reshape(64, channels, -1, 64 if channels == 1 else 32)
    return functional.interpolate(images, scale_factor=scale, mode=mode, antialias=True).sum()


def images(values, layout=torch.contiguous_format):
    return values.reshape(64, 4, 32, 32).to(memory_format=layout)


def sampled(values):
    return functional.grid_sample(images(values), half(values)[:, :512].view(64, 16, 16, 2), align_corners=False).sum()


def weighed_logits(values, shape=(64, 4096), weights=(4096,), **options):
    values = values.view(shape)
    options["pos_weight"] = torch.full(weights, 2.0)
    return functional.binary_cross_entropy_with_logits(values, half(values), **options).sum()


def halved(values):
    return values.detach() * 0.5


LOSSES = {
    "mse": lambda _, x: functional.mse_loss(x, half(x)),
    "mse, summed": lambda _, x: functional.mse_loss(x, half(x), reduction="sum"),
    "mse, each": lambda _, x: functional.mse_loss(x, half(x), reduction="none").sum(),
    "mse, spread out": lambda _, x: functional.mse_loss(x, half(x[:1]).expand(x.shape)),
    "smooth l1": lambda _, x: functional.smooth_l1_loss(x, half(x)),
    "l1": lambda _, x: functional.l1_loss(x, half(x)),
    "huber": lambda _, x: functional.huber_loss(x, half(x)),
    "bce": lambda _, x: functional.binary_cross_entropy(x.sigmoid(), half(x)),
    "bce of logits": lambda _, x: functional.binary_cross_entropy_with_logits(x, half(x)),
    "bce, weighed": lambda _, x: weighed_logits(x),
    "bce, weighed and summed": lambda _, x: weighed_logits(x, reduction="sum"),
    "bce, weighed, each": lambda _, x: weighed_logits(x, reduction="none"),
    "bce, weighed as one": lambda _, x: weighed_logits(x, weights=()),
    "bce, weighed twice": lambda _, x: weighed_logits(x, weight=half(x)),
    "bce, of three axes": lambda _, x: weighed_logits(x, (64, 64, 64), (64,)),
    "bce, weighed one by one": lambda _, x: weighed_logits(x, weights=(64, 4096)),
    "soft margin": lambda _, x: functional.soft_margin_loss(x, half(x)),
    "mean": lambda _, x: x.mean(),
    "mean of rows": lambda _, x: x.mean(1).sum(),
}
OTHERS = {
    "batch norm": normed,
    "batch norm, channels last": lambda module, x: normed(module, x, torch.channels_last),
    "logsumexp": lambda _, x: (x.detach() + 1).logsumexp(1).sum() + x[0, 0],
    "distances": lambda _, x: torch.cdist(x.view(-1, 256)[:64], x.detach().view(-1, 256)).sum(),
    "times a mask": lambda _, x: (x.detach() * every_other(x)).sum() + x[0, 0],
    "with integers": lambda _, x: (x.detach() + every_other(x).long()).sum() + x[0, 0],
    "with doubles": lambda _, x: x.clamp(min=half(x).double()).sum(),
    "where": lambda _, x: torch.where(every_other(x), x.detach(), half(x).double()).sum() + x[0, 0],
    "unfold": lambda _, x: functional.unfold(x.view(-1, 1, 64, 64), 3).sum(),
    "unfold, weighted": lambda _, x: (functional.unfold(x.view(-1, 1, 64, 64), 3) * 0.5).sum(),
    "fold": lambda _, x: functional.fold(x.view(-1, 64, 64), (64, 64), 8, stride=8).sum(),
    "kthvalue": lambda _, x: x.kthvalue(7, 1).values.sum(),
    "median": lambda _, x: (x.detach() * 2).median() + x[0, 0],
    "median across": lambda _, x: (x.detach() * 2).view(64, 64, 64).median(1).values.sum() + x[0, 0],
    "median, gradient": lambda _, x: x.median(1).values.sum(),
    "mode, gradient": lambda _, x: x.mode(1).values.sum(),
    "nanmedian, gradient": lambda _, x: x.nanmedian(1).values.sum(),
    "largest, gradient": lambda _, x: x.max(1).values.sum(),
    "few largest, gradient": lambda _, x: x.topk(8, 1).values.sum(),
    "half of them, gradient": lambda _, x: x.topk(2048, 1).values.sum(),
    "largest so far, gradient": lambda _, x: x.cummax(1).values.sum(),
    "sorted": lambda _, x: x.sort(1).values.sum(),
    "sorted, from the largest": lambda _, x: halved(x).sort(1, descending=True).values.sum() + x[0, 0],
    "sorted across": lambda _, x: halved(x).sort(0).values.sum() + x[0, 0],
    "sorted in the middle": lambda _, x: halved(x).view(64, 64, 64).sort(1).values.sum() + x[0, 0],
    "sorted whole": lambda _, x: halved(x).flatten().sort().values.sum() + x[0, 0],
    "sorted places": lambda _, x: halved(x).argsort(1).float().sum() + x[0, 0],
    "sorted, stable": lambda _, x: torch.sort(halved(x), dim=1, stable=True).values.sum() + x[0, 0],
    "sum, spread out": lambda _, x: half(x[:1]).expand(640, 4096).sum() + x[0, 0],
    "sum, spread out, gradient": lambda _, x: x[:, None].expand(64, 10, 4096).sum(),
    "sum, spread out twice": lambda _, x: half(x[0, :16])[:, None, None].expand(16, 300, 100).sum() + x[0, 0],
    "sum, cut": lambda _, x: halved(x)[:, :4000].sum() + x[0, 0],
    "sum, turned": lambda _, x: halved(x).view(64, 64, 64).permute(2, 0, 1).sum() + x[0, 0],
    "sum of outer axes": lambda _, x: halved(x).view(64, 64, 64).sum((0, 2)).sum() + x[0, 0],
    "sum of inner axes": lambda _, x: halved(x).view(64, 64, 64).sum((1, 2)).sum() + x[0, 0],
    "gather": lambda _, x: x.gather(1, every_other(x)[:, :64].long()).sum(),
    "scatter": lambda _, x: x.detach().scatter(1, every_other(x)[:, :64].long(), half(x)).sum() + x[0, 0],
    "products, of rows": lambda _, x: products(x.view(-1, 64), half(x).view(-1, 64)[:128]),
    "products, of weights": lambda _, x: products(half(x).view(-1, 64)[:512], x.view(-1, 64)),
    "bilinear, small": lambda _, x: resized(x, 4, "bilinear"),
    "bilinear, large": lambda _, x: resized(x, 1, "bilinear"),
    "bilinear, coloured": lambda _, x: resized(x[:, :3072], 3, "bilinear"),
    "smoothly larger": lambda _, x: smoothly_resized(x, 4, 2, "bilinear"),
    "smoothly smaller": lambda _, x: smoothly_resized(x, 4, 0.5, "bilinear"),
    "smoothly larger, gray": lambda _, x: smoothly_resized(x, 1, 2, "bilinear"),
    "smoothly smaller, coloured": lambda _, x: smoothly_resized(x[:, :3072], 3, 0.5, "bilinear"),
    "cubically larger": lambda _, x: smoothly_resized(x, 2, 2, "bicubic"),
    "cubically smaller": lambda _, x: smoothly_resized(x, 1, 0.25, "bicubic"),
    "nearest, small": lambda _, x: resized(x, 4, "nearest"),
    "nearest, channels last": lambda _, x: resized(x, 4, "nearest", torch.channels_last),
    "median of all, gradient": lambda _, x: x.median(),
    "largest of all, gradient": lambda _, x: x.max(),
    "rows picked, gradient": lambda _, x: x.view(-1, 64)[torch.arange(2048) % 100].sum(),
    "numbers taken, gradient": lambda _, x: x.take(torch.arange(100_000)).sum(),
    "summed in doubles": lambda _, x: (x.detach() * 2).sum(1, dtype=torch.float64).sum() + x[0, 0],
    "norm in doubles": lambda _, x: torch.linalg.vector_norm(halved(x), dim=1, dtype=torch.float64).sum() + x[0, 0],
    "spectra": lambda _, x: torch.fft.rfft(halved(x).float()).abs().sum() + x[0, 0],
    "rolled": lambda _, x: halved(x).view(64, 64, 64).roll((3, 5), (1, 2)).sum() + x[0, 0],
    "drawn": lambda _, x: halved(x).softmax(1).multinomial(100).float().sum() + x[0, 0],
    "chosen": lambda _, x: halved(x).masked_select(torch.ones(x.shape, dtype=torch.bool)).sum() + x[0, 0],
    "sampled": lambda _, x: sampled(x),
    "largest of windows, channels last": lambda _, x: functional.max_pool2d(
        images(x, torch.channels_last), 3, 1, 1
    ).sum(),
    "mean of windows": lambda _, x: functional.avg_pool2d(images(x), 2).sum(),
    "mirrored": lambda _, x: functional.pad(images(x), (3, 3, 3, 3), "reflect").sum(),
    "gelu": lambda _, x: functional.gelu(x).sum(),
    "product of rows, gradient": lambda _, x: (x * 0.01 + 1).prod(1).sum(),
    "product of all, gradient": lambda _, x: (x * 0.01 + 1).prod(),
    "products so far, gradient": lambda _, x: (x * 0.01 + 1).cumprod(1).sum(),
    "blocks of one": lambda _, x: torch.block_diag(halved(x)[:, :2048], halved(x)[:, 2048:]).sum() + x[0, 0],
    "truths counted": lambda _, x: every_other(x).sum() + x[0, 0],
}


@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
@pytest.mark.parametrize("ends", [*LOSSES.values(), *OTHERS.values()], ids=[*LOSSES, *OTHERS])
def test_a_dry_run_holds_what_the_allocator_held(ends, precision):
    module = type("Ending", (Wide,), {"ends": staticmethod(ends)})
    data = loader(lambda: torch.rand(16), BATCH)
    with one_thread():  # as the fit that is measured
        predicted = peak(predict(module, lambda: data, Config(), precision))
    assert abs(measure(module, lambda: data, Config(), precision) - predicted) <= A_FEW_BYTES
