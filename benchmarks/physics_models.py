"""Models of weather and physics from other packages, chosen after all rules of kit: a group of `other_models.py`.

Operators in the space of Fourier, a model of the atmosphere, differential equations whose solver chooses its steps, a
flow of splines, a Gaussian process, spiking and equivariant networks. They need, beside what the others need:

    pip install --no-deps --target .peers neuraloperator tensorly tensorly-torch opt_einsum torch-harmonics
    pip install --no-deps --target .peers microsoft-aurora torchdiffeq zuko gpytorch linear_operator jaxtyping
    pip install --no-deps --target .peers wadler-lindig snntorch segmentation-models-pytorch e3nn opt-einsum-fx
    pip install --no-deps --target .peers scipy sympy mpmath netCDF4 cftime
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

Tensors = tuple[Tensor, ...]
Parts = tuple[Callable[[], nn.Module], Callable[[], Tensors], Callable[[nn.Module, Tensors], Tensor]]
SPIKES = 20
LEVELS, LATITUDES, LONGITUDES = (100, 250, 500, 850), 17, 32
SURFACE, STATIC, ATMOSPHERE = ("2t", "10u", "10v", "msl"), ("lsm", "z", "slt"), ("z", "u", "v", "t", "q")


def operator(name: str, **settings: Any) -> nn.Module:
    from neuralop import models

    sizes = {"n_modes": (12, 12), "in_channels": 3, "out_channels": 3, "hidden_channels": 24, "n_layers": 3}
    made: nn.Module = getattr(models, name)(**sizes, **settings)
    return made


class Solved(nn.Module):
    """A differential equation from 0 to 1, whose right side is a network."""

    def __init__(self, method: str) -> None:
        super().__init__()
        self.method = method
        self.net = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16))

    def forward(self, begins: Tensor) -> Tensor:
        from torchdiffeq import odeint

        times = torch.linspace(0, 1, 11 if self.method == "rk4" else 2)
        found: Tensor = odeint(lambda _, state: self.net(state), begins, times, method=self.method)[-1]
        return found


def flow() -> nn.Module:
    import zuko

    made: nn.Module = zuko.flows.NSF(features=8, context=4, transforms=3, hidden_features=(64, 64))
    return made


def gaussian_process() -> nn.Module:
    import gpytorch

    class Variational(gpytorch.models.ApproximateGP):  # type: ignore[misc]
        def __init__(self, points: Tensor) -> None:
            chosen = gpytorch.variational.CholeskyVariationalDistribution(len(points))
            super().__init__(gpytorch.variational.VariationalStrategy(self, points, chosen))
            self.mean = gpytorch.means.ConstantMean()
            self.kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.MaternKernel(nu=2.5, ard_num_dims=4))

        def forward(self, place: Tensor) -> Any:
            return gpytorch.distributions.MultivariateNormal(self.mean(place), self.kernel(place))

    class Evidence(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.process = Variational(torch.randn(64, 4))
            self.likelihood = gpytorch.likelihoods.GaussianLikelihood()

        def forward(self, place: Tensor, value: Tensor) -> Tensor:
            bound = gpytorch.mlls.VariationalELBO(self.likelihood, self.process, num_data=320)
            found: Tensor = -bound(self.process(place), value)
            return found

    return Evidence()


def spiking() -> nn.Module:
    import snntorch

    class Spiking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(64, 128), nn.Linear(128, 10)
            self.leaks, self.leaks_last = snntorch.Leaky(beta=0.9), snntorch.Leaky(beta=0.9)

        def forward(self, values: Tensor) -> Tensor:
            inner, outer, sum_of_spikes = self.leaks.init_leaky(), self.leaks_last.init_leaky(), torch.zeros(())
            for _ in range(SPIKES):
                spikes, inner = self.leaks(self.first(values), inner)
                spikes, outer = self.leaks_last(self.last(spikes), outer)
                sum_of_spikes = sum_of_spikes + spikes
            return sum_of_spikes

    return Spiking()


def equivariant() -> nn.Module:
    from e3nn import o3

    class Equivariant(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            fields = "8x0e+4x1o"
            self.product, self.last = o3.FullyConnectedTensorProduct(fields, fields, fields), o3.Linear(fields, "1x1o")

        def forward(self, values: Tensor) -> Tensor:
            found: Tensor = self.last(self.product(values, values))
            return found

    return Equivariant()


def segmentation() -> nn.Module:
    import segmentation_models_pytorch

    made: nn.Module = segmentation_models_pytorch.Unet("resnet18", encoder_weights=None, in_channels=4, classes=3)
    return made


def atmosphere() -> nn.Module:
    from aurora import AuroraSmallPretrained

    made: nn.Module = AuroraSmallPretrained(
        encoder_depths=(1, 1, 1), encoder_num_heads=(2, 4, 8), decoder_depths=(1, 1, 1), decoder_num_heads=(8, 4, 2),
        embed_dim=64, num_heads=4, use_lora=False,
    )  # fmt: skip
    return made


def weather() -> Tensors:
    """Two times of the surface, what does not change, and two times of the levels of the air."""
    plane = (LATITUDES, LONGITUDES)
    return (
        torch.randn(1, 2, len(SURFACE), *plane), torch.randn(1, len(STATIC), *plane),
        torch.randn(1, 2, len(ATMOSPHERE), len(LEVELS), *plane),
    )  # fmt: skip


def of_weather(model: nn.Module, batch: Tensors) -> Tensor:
    from aurora import Batch, Metadata

    surface, static, air = batch
    found = model(Batch(
        surf_vars={name: surface[:, :, place] for place, name in enumerate(SURFACE)},
        static_vars={name: static[0, place] for place, name in enumerate(STATIC)},
        atmos_vars={name: air[:, :, place] for place, name in enumerate(ATMOSPHERE)},
        metadata=Metadata(
            lat=torch.linspace(90, -90, LATITUDES), lon=torch.linspace(0, 360, LONGITUDES + 1)[:-1],
            time=(datetime(2020, 6, 1, 12, tzinfo=UTC),), atmos_levels=LEVELS,
        ),
    ))  # fmt: skip
    losses = [values.square().mean() for values in (*found.surf_vars.values(), *found.atmos_vars.values())]
    return torch.stack(losses).sum()


def rows(*widths: int, count: int = 64) -> Callable[[], Tensors]:
    return lambda: tuple(torch.randn(count, width) if width else torch.randn(count) for width in widths)


def fields(channels: tuple[int, int], *plane: int) -> Callable[[], Tensors]:
    return lambda: tuple(torch.randn(4, channel, *plane) for channel in channels)


def near(model: nn.Module, batch: Tensors) -> Tensor:
    return functional.mse_loss(model(batch[0]), batch[1])


def likely(model: nn.Module, batch: Tensors) -> Tensor:
    found: Tensor = -model(batch[1]).log_prob(batch[0]).mean()
    return found


CASES: dict[str, Parts] = {
    "FNO": (partial(operator, "FNO"), fields((3, 3), 48, 64), near),
    "TFNO": (partial(operator, "TFNO", factorization="tucker", rank=0.1), fields((3, 3), 48, 64), near),
    "Aurora": (atmosphere, weather, of_weather),
    "neural ODE, dopri5": (partial(Solved, "dopri5"), rows(16, 16), near),
    "neural ODE, rk4": (partial(Solved, "rk4"), rows(16, 16), near),
    "zuko NSF": (flow, rows(8, 4), likely),
    "gpytorch SVGP": (gaussian_process, rows(4, 0), lambda model, batch: model(*batch)),
    "snntorch": (spiking, rows(64, 10, count=32), near),
    "e3nn": (equivariant, rows(20, 3), near),
    "smp U-Net": (segmentation, fields((4, 3), 64, 64), near),
}
