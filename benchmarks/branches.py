"""Peak memory of models whose branches or loops depend on numbers, predicted beside a real fit on the CPU.

    python benchmarks/branches.py [--model NAME] [--record]

Eleven models of other packages, all but torchdeq's chosen before the code that answers for them was written. Measured
is the peak of the allocator during the first two steps of a real fit; `dry` is what a dry run alone says, where both
were made; `seconds` is what the whole answer took. Packages: torchdiffeq, torchdeq, pytorch-adaptive-computation-time,
gpytorch, vector-quantize-pytorch, pytorch-metric-learning, torch-geometric, transformers, and scipy, with which DETR
matches boxes.
"""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Callable
from typing import Any

import torch
import zero_grad
from publish import publish
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override

import kit
from kit.models import Field, RandomData

WORDS = 1024
BATCH = 16
TIMEOUT_SECONDS = 60.0
CONFIG = kit.Config.make({
    "name": "branches", "hardware": {"accelerator": "cpu", "precision": "32-true"},
    "trial": {"max_steps": 3, "warmup_steps": 0, "predict_memory": False, "timeout_seconds": 600.0},
})  # fmt: skip


class Trained(zero_grad.Trained):
    """The same, by AdamW."""

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def neural_ode() -> Trained:
    """Adaptive steps: how many depends on an error estimate."""
    from torchdiffeq import odeint

    class Field(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64))

        def forward(self, t: Tensor, y: Tensor) -> Tensor:  # noqa: ARG002 - torchdiffeq's signature
            out: Tensor = self.layers(y)
            return out

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        ends = odeint(model, batch, torch.tensor([0.0, 1.0], device=batch.device), rtol=1e-6, atol=1e-6)
        return ends[-1].square().mean()

    return Trained(Field(), loss)


def fixed_point() -> Trained:
    """A layer is applied until it changes little."""
    from torchdeq import get_deq

    class Equilibrium(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.solve = nn.Linear(128, 128), get_deq(f_solver="anderson", f_max_iter=40, f_tol=1e-4)

        def forward(self, values: Tensor) -> Tensor:
            found, _ = self.solve(lambda state: torch.tanh(self.layer(state) + values), torch.zeros_like(values))
            out: Tensor = found[-1]
            return out

    return Trained(Equilibrium(), lambda model, batch: model(batch).square().mean())


def adaptive_gru() -> Trained:
    """Adaptive computation time: steps go on until every sample has halted."""
    from pytorch_adaptive_computation_time import AdaptiveGRU

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        out, _, ponder = model(batch)
        return out.square().mean() + ponder.mean()

    return Trained(AdaptiveGRU(32, 128, 1, time_penalty=1e-3, batch_first=True, initial_halting_bias=-1.0), loss)


def gaussian_process() -> Trained:
    """Conjugate gradients and Lanczos until convergence."""
    import gpytorch

    class Exact(gpytorch.models.ExactGP):
        def __init__(self) -> None:
            likelihood = gpytorch.likelihoods.GaussianLikelihood()
            super().__init__(None, None, likelihood)
            self.mean_module = gpytorch.means.ConstantMean()
            self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())

        def forward(self, x: Tensor) -> Any:
            return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))

    def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch[0].flatten(0, 1), batch[1].flatten()
        model.set_train_data(x, y, strict=False)
        with gpytorch.settings.max_cholesky_size(0), gpytorch.settings.cg_tolerance(0.01):
            found: Tensor = -gpytorch.mlls.ExactMarginalLogLikelihood(model.likelihood, model)(model(x), y)
        return found

    return Trained(Exact(), loss)


def quantizer() -> Trained:
    """Codes are made by k-means when first asked, and dead ones replaced."""
    from vector_quantize_pytorch import VectorQuantize

    class Coder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.into, self.out = nn.Linear(64, 128), nn.Linear(128, 64)
            self.codes = VectorQuantize(128, codebook_size=512, kmeans_init=True, threshold_ema_dead_code=2)

        def forward(self, values: Tensor) -> Tensor:
            kept, _, commitment = self.codes(self.into(values))
            return functional.mse_loss(self.out(kept), values) + commitment.sum()

    return Trained(Coder(), lambda model, batch: model(batch))


def mined_pairs() -> Trained:
    """Only the pairs that are hard count in the loss."""
    from pytorch_metric_learning.losses import TripletMarginLoss
    from pytorch_metric_learning.miners import TripletMarginMiner

    mine, triplets = TripletMarginMiner(margin=0.2, type_of_triplets="semihard"), TripletMarginLoss()

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        vectors = model(batch[0])
        found: Tensor = triplets(vectors, batch[1], mine(vectors, batch[1]))
        return found

    return Trained(nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 128)), loss)


def pooled_graph() -> Trained:
    """The best half of each graph's nodes goes on, and the edges between them."""
    from torch_geometric.nn import GCNConv, TopKPooling

    class Pooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.pool, self.last = GCNConv(32, 128), TopKPooling(128, ratio=0.5), GCNConv(128, 128)

        def forward(self, nodes: Tensor, ends: Tensor) -> Tensor:
            graphs, count = nodes.shape[:2]
            apart = torch.arange(graphs, device=nodes.device)
            edges = (ends + count * apart[:, None, None]).permute(1, 0, 2).flatten(1)
            values = self.first(nodes.flatten(0, 1), edges).relu()
            values, edges, *_ = self.pool(values, edges, batch=apart.repeat_interleave(count))
            out: Tensor = self.last(values, edges)
            return out

    return Trained(Pooled(), lambda model, batch: model(*batch).square().mean())


def mixtral() -> Trained:
    """Every token goes to two experts of eight."""
    from transformers import MixtralConfig, MixtralForCausalLM

    shape = MixtralConfig(
        vocab_size=WORDS, hidden_size=128, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=8, max_position_embeddings=128, output_router_logits=True,
    )  # fmt: skip
    return Trained(MixtralForCausalLM(shape), _language_loss)


def switch() -> Trained:
    """Every token goes to one expert, as far as it has room."""
    from transformers import SwitchTransformersConfig, SwitchTransformersForConditionalGeneration

    shape = SwitchTransformersConfig(
        vocab_size=WORDS, d_model=128, d_kv=32, d_ff=256, num_layers=4, num_decoder_layers=4, num_heads=4,
        num_experts=8, expert_capacity=32, decoder_start_token_id=0,
    )  # fmt: skip
    return Trained(SwitchTransformersForConditionalGeneration(shape), _language_loss)


def wav2vec2() -> Trained:
    """Layers are left out at random, and stretches of the input masked."""
    from transformers import Wav2Vec2Config, Wav2Vec2ForCTC

    shape = Wav2Vec2Config(
        vocab_size=32, hidden_size=128, num_hidden_layers=4, num_attention_heads=4, intermediate_size=256,
        conv_dim=(64,) * 7, num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=4, layerdrop=0.1,
    )  # fmt: skip
    return Trained(Wav2Vec2ForCTC(shape), lambda model, batch: model(batch[0], labels=batch[1] + 1).loss)


def detr() -> Trained:
    """Boxes are matched with the labels by scipy."""
    from transformers import DetrConfig, DetrForObjectDetection, ResNetConfig

    backbone = ResNetConfig(embedding_size=16, hidden_sizes=[16, 32, 64, 128], depths=[1, 1, 1, 1], layer_type="basic")
    backbone.out_features = ["stage4"]
    shape = DetrConfig(
        use_timm_backbone=False, backbone_config=backbone, d_model=64, encoder_layers=2, decoder_layers=2,
        encoder_ffn_dim=128, decoder_ffn_dim=128, encoder_attention_heads=4, decoder_attention_heads=4,
        num_queries=20, num_labels=10, use_pretrained_backbone=False,
    )  # fmt: skip

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        images, kinds, boxes = batch
        labels = [
            {"class_labels": kind, "boxes": box.sigmoid() * 0.4 + 0.3} for kind, box in zip(kinds, boxes, strict=True)
        ]
        found: Tensor = model(images, labels=labels).loss
        return found

    return Trained(DetrForObjectDetection(shape), loss)


def _language_loss(model: nn.Module, words: Tensor) -> Tensor:
    loss: Tensor = model(input_ids=words, labels=words).loss
    return loss


MODELS: dict[str, tuple[Callable[[], Trained], Any]] = {
    "torchdiffeq, dopri5": (neural_ode, Field(shape=(64,))),
    "torchdeq, Anderson": (fixed_point, Field(shape=(16, 128))),
    "adaptive computation time": (adaptive_gru, Field(shape=(16, 32))),
    "gpytorch, CG": (gaussian_process, (Field(shape=(32, 4)), Field(shape=(32,)))),
    "vector-quantize-pytorch": (quantizer, Field(shape=(64, 64))),
    "pytorch-metric-learning": (mined_pairs, (Field(shape=(64,)), Field(below=4))),
    "torch-geometric, top k": (pooled_graph, (Field(shape=(64, 32)), Field(shape=(2, 256), below=64))),
    "transformers Mixtral": (mixtral, Field(shape=(64,), below=WORDS)),
    "transformers Switch": (switch, Field(shape=(64,), below=WORDS)),
    "transformers Wav2Vec2": (wav2vec2, (Field(shape=(8000,)), Field(shape=(6,), below=30))),
    "transformers DETR": (detr, (Field(shape=(3, 128, 128)), Field(shape=(4,), below=10), Field(shape=(4, 4)))),
}
"""Name: (what is trained, its sample)"""


def case(name: str) -> dict[str, Any]:
    make, fields = MODELS[name]

    def data() -> RandomData:
        return RandomData(fields, BATCH)

    began = time.perf_counter()
    found = kit.predict_memory(CONFIG, make, data, timeout_seconds=TIMEOUT_SECONDS)
    seconds = time.perf_counter() - began
    trial = kit.fit(CONFIG, make, data)
    trial.wait()
    if trial.state != "COMPLETE":
        raise RuntimeError(f"{trial.state}: {trial.message}")
    measured = int(trial.event("memory_measured", "device_allocated_bytes"))
    told = found.device_allocated_bytes
    dry = re.search("a dry run ([0-9.]+ [KMG]iB)", " ".join(found.reasons))
    return {
        "model": name, "verdict": found.verdict, "open": len(found.conditions), "source": found.source,
        "dry": dry[1] if dry else "–", "told MiB": round(told / 2**20, 2), "measured": round(measured / 2**20, 2),
        "told / measured": round(told / measured, 3), "seconds": round(seconds, 1),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, help="only this one")
    parser.add_argument("--record", action="store_true", help="append the table to benchmarks/results.jsonl")
    asked = parser.parse_args()
    rows = [case(name) for name in ([asked.model] if asked.model else MODELS)]
    publish("models whose branches depend on numbers", rows, record=asked.record)


if __name__ == "__main__":
    main()
