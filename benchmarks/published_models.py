"""What published.py predicts: each source's training step, from its configuration, with random weights.

Each loop is written as its source wrote it, where that changes memory or time: when gradients are cleared, and what is
still held then. Nothing is downloaded. `FAMILIES` has, by the `family` of a row's configuration, what is trained and
the fields of a sample.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from typing_extensions import override

from kit.models import Field

Configuration = Mapping[str, Any]


# -- the loops


class Loop(LightningModule):
    """A published training step: a loss, an optimizer, and when its gradients are cleared.

    `clears` says when: `after forward` is Lightning's own order, `before forward` frees them a step earlier, and
    `in place` fills them with zeros, as torch did before 2.0.
    """

    def __init__(self, model: nn.Module, configuration: Configuration) -> None:
        super().__init__()
        self.model, self.configuration = model, configuration

    @property
    def clears(self) -> str:
        return self.configuration["clears"]

    @override
    def setup(self, stage: str) -> None:
        if "tf32" in self.configuration:
            torch.set_float32_matmul_precision("high" if self.configuration["tf32"] else "highest")

    @override
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def loss(self, batch: Any) -> Tensor:
        samples, targets = batch
        return functional.cross_entropy(self.model(samples), targets)

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.clears == "before forward" and batch_idx % self.trainer.accumulate_grad_batches == 0:
            self.optimizers().zero_grad()

    @override
    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=self.clears != "in place")

    def configure_optimizers(self) -> Any:
        return optimizer_of(self.model, **self.configuration["optimizer"])


def optimizer_of(model: nn.Module, name: str, **arguments: Any) -> Any:
    if name == "lora-fa":
        from peft.optimizers import create_lorafa_optimizer

        return create_lorafa_optimizer(model, **arguments)
    if name == "Adam8bit":
        from bitsandbytes.optim import Adam8bit

        return Adam8bit(model.parameters(), **arguments)
    if name == "Adafactor":
        from transformers.optimization import Adafactor

        return Adafactor(model.parameters(), **arguments)
    return getattr(torch.optim, name)(model.parameters(), **arguments)


class LanguageModel(Loop):
    """Its output, logits among it, is held until the next forward has ended, as a variable of the loop holds it."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        if hasattr(self.model, "disable_adapter"):
            with self.model.disable_adapter():
                pass  # the source measures the base model here, which unfreezes all of the adapter
        return optimizer

    def loss(self, batch: Any) -> Tensor:
        labels = batch["input_ids"].clone()
        self.outputs = self.model(**batch, labels=labels, num_items_in_batch=labels.numel())
        return self.outputs.loss


class Classifier(Loop):
    def loss(self, batch: Any) -> Tensor:
        return self.model(**batch).loss


class Pretraining(Loop):
    """Masked words and the order of sentences; the head sees only the words that are masked."""

    def loss(self, batch: Any) -> Tensor:
        hidden, pooled = self.model.bert(batch["input_ids"], return_dict=False)
        words, order = self.model.cls(hidden[:, : batch["words"].shape[1]], pooled)
        return functional.cross_entropy(words.flatten(0, 1), batch["words"].flatten()) + functional.cross_entropy(
            order, batch["order"]
        )


class Decoder(Loop):
    """Whose layers keep what torchtitan's policy keeps, where `checkpointing` is `operators`."""

    def __init__(self, model: Any, configuration: Configuration) -> None:
        super().__init__(model, configuration)
        if configuration["checkpointing"] == "operators":
            for layer in model.model.layers:
                layer.forward = functools.partial(
                    checkpoint, layer.forward, use_reentrant=False, context_fn=keep_products, preserve_rng_state=False
                )

    def loss(self, batch: Any) -> Tensor:
        tokens, targets = batch
        logits = self.model(input_ids=tokens, use_cache=False).logits
        return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def keep_products() -> Any:
    """Contexts of a checkpointed layer that keeps attention's outputs and those of every other matrix product."""
    products = {again: itertools.count(1) for again in (False, True)}

    def policy(context: Any, operator: Any, *_arguments: Any, **_named: Any) -> CheckpointPolicy:
        product = operator is torch.ops.aten.mm.default
        kept = next(products[context.is_recompute]) % 2 == 1 if product else "_scaled_dot_product" in str(operator)
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


class Flow(Loop):
    """Flow matching on latents, with the embedded prompts and the model that judges images kept on the device."""

    def __init__(self, model: nn.Module, configuration: Configuration) -> None:
        super().__init__(model, configuration)
        kept = configuration["kept_prompts"], configuration["text_length"], configuration["text_width"]
        self.register_buffer("prompts", torch.empty(kept, dtype=torch.bfloat16), persistent=False)
        self.register_buffer("judge", torch.empty(configuration["judge_parameters"]), persistent=False)

    def loss(self, batch: Any) -> Tensor:
        latents = batch["latents"]
        noise = torch.randn_like(latents)
        share = torch.rand(len(latents), 1, 1, device=latents.device, dtype=latents.dtype)
        output = self.model(
            hidden_states=(1 - share) * latents + share * noise, timestep=share.flatten(), guidance=None,
            encoder_hidden_states=batch["prompts"], txt_ids=batch["text_places"], img_ids=batch["image_places"],
            return_dict=False,
        )[0]  # fmt: skip
        return ((output.float() - (noise - latents).float()) ** 2).mean()


# -- the models


def language_model(configuration: Configuration) -> Loop:
    name_operators_of_torchvision()
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = dict(configuration["shape"])
    model = LlamaForCausalLM._from_config(LlamaConfig(**shape), dtype=torch.bfloat16)
    return LanguageModel(adapted(model, configuration), configuration)


def decoder(configuration: Configuration) -> Loop:
    name_operators_of_torchvision()
    from transformers import LlamaConfig, LlamaForCausalLM

    dtype = getattr(torch, configuration["dtype"])
    model = LlamaForCausalLM._from_config(LlamaConfig(**configuration["shape"]), dtype=dtype)
    return Decoder(model.train(), configuration)


def flow_model(configuration: Configuration) -> Loop:
    name_operators_of_torchvision()
    from diffusers import Flux2Transformer2DModel

    model = Flux2Transformer2DModel(**configuration["shape"]).to(torch.bfloat16)
    model.enable_gradient_checkpointing()
    return Flow(adapted(model, configuration).train(), configuration)


def adapted(model: Any, configuration: Configuration) -> Any:
    """With the adapter of the configuration, if it has one."""
    adapter = configuration["adapter"]
    if adapter is None:
        return model.requires_grad_(True)
    from peft import get_peft_config, get_peft_model
    from peft.utils import quantization_utils

    quantization_utils.is_torchao_available = bool  # it asks of every layer for a class that torchao 0.18 has no more
    float32 = configuration["float32_adapter"]
    return get_peft_model(model, get_peft_config(dict(adapter)), autocast_adapter_dtype=float32)


def classifier(configuration: Configuration) -> Loop:
    name_operators_of_torchvision()
    from transformers import BertConfig, BertForPreTraining, BertForQuestionAnswering, BertForSequenceClassification

    shape = BertConfig(**configuration["shape"], attn_implementation="eager")
    heads = {"answers": BertForQuestionAnswering, "pretraining": BertForPreTraining}
    model = heads.get(configuration.get("head", ""), BertForSequenceClassification)(shape)
    if configuration.get("head") == "pretraining":
        return Pretraining(model, configuration)
    if configuration["checkpointing"]:
        model.gradient_checkpointing_enable()
    return Classifier(model, configuration)


def name_operators_of_torchvision() -> None:
    """Lets torchvision of another build than torch be imported, as that of most registries beside torch for the CPU.

    Its own operators cannot be loaded then. Models here call none of them; their names are enough.
    """
    try:
        import torchvision  # noqa: F401
    except ModuleNotFoundError:
        return
    except RuntimeError:
        for name in ("nms", "qnms"):
            operator = f"torchvision::{name}"
            torch.library.define(operator, "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def vision_transformer(configuration: Configuration) -> Loop:
    name_operators_of_torchvision()
    from torchvision.models import vit_l_16

    model = vit_l_16()
    model.heads.head = nn.Linear(1024, 10)
    return Loop(model, configuration)


def timm_model(configuration: Configuration) -> Loop:
    name_operators_of_torchvision()
    import timm

    timm.layers.set_fused_attn(False)  # scaled_dot_product_attention came with torch 2.0
    model = timm.create_model(configuration["model"], drop_rate=0.0, **configuration["arguments"])
    if configuration["channels_last"]:
        model = model.to(memory_format=torch.channels_last)
    return Loop(model, configuration)


def gpt(configuration: Configuration) -> Loop:
    return TokenLoop(Gpt(configuration["shape"]), configuration)


class TokenLoop(Loop):
    def loss(self, batch: Any) -> Tensor:
        tokens, targets = batch
        return functional.cross_entropy(self.model(tokens).flatten(0, 1), targets.flatten())


class Gpt(nn.Module):
    """GPT-2; `native` norms and GELU or spelled out, `fused` attention or spelled out, `tied` head, `biased` inputs."""

    def __init__(self, shape: Mapping[str, Any]) -> None:
        super().__init__()
        width = shape["width"]
        self.tokens, self.places = nn.Embedding(shape["vocabulary"], width), nn.Embedding(shape["context"], width)
        self.dropout = nn.Dropout(shape["dropout"])
        self.blocks = nn.Sequential(*(GptBlock(shape) for _ in range(shape["layers"])))
        self.norm = norm_of(shape)
        self.head = nn.Linear(width, shape["vocabulary"], bias=False)
        if shape.get("tied"):
            self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        embedded = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        return self.head(self.norm(self.blocks(self.dropout(embedded))))


class GptBlock(nn.Module):
    def __init__(self, shape: Mapping[str, Any]) -> None:
        super().__init__()
        width = shape["width"]
        self.attention = FusedAttention(shape) if shape["fused"] else SpelledAttention(shape)
        activation = nn.GELU(approximate="tanh") if shape["native"] else SpelledGelu()
        self.perceptron = nn.Sequential(nn.Linear(width, 4 * width), activation, nn.Linear(4 * width, width))
        self.norms = nn.ModuleList([norm_of(shape), norm_of(shape)])
        self.dropout = nn.Dropout(shape["dropout"])

    def forward(self, values: Tensor) -> Tensor:
        values = self.dropout(self.attention(self.norms[0](values))) + values
        return self.dropout(self.perceptron(self.norms[1](values))) + values


class FusedAttention(nn.Module):
    def __init__(self, shape: Mapping[str, Any]) -> None:
        super().__init__()
        self.heads, self.rate = shape["heads"], shape["dropout"]
        self.inward = nn.Linear(shape["width"], 3 * shape["width"], bias=shape.get("biased", False))
        self.outward = nn.Linear(shape["width"], shape["width"])

    def forward(self, values: Tensor) -> Tensor:
        parts = self.inward(values).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        rate = self.rate if self.training else 0.0
        mixed = functional.scaled_dot_product_attention(*parts, dropout_p=rate, is_causal=True)
        return self.outward(mixed.transpose(1, 2).contiguous().flatten(2))


class SpelledAttention(nn.Module):
    """Queries, keys and values one by one, and the scores as a tensor; `kept_mask` is a buffer of each layer."""

    def __init__(self, shape: Mapping[str, Any]) -> None:
        super().__init__()
        self.heads, self.dropout, width = shape["heads"], nn.Dropout(shape["dropout"]), shape["width"]
        biased = shape.get("biased", False)
        self.inward = nn.ModuleList(nn.Linear(width, width, bias=biased) for _ in range(3))
        self.outward = nn.Linear(width, width)
        self.mask: Tensor | None
        mask = torch.ones(shape["context"], shape["context"]).triu(1) if shape["kept_mask"] else None
        self.register_buffer("mask", mask)

    def forward(self, values: Tensor) -> Tensor:
        query, key, value = (part(values).unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.inward)
        scores = query @ key.transpose(2, 3)
        length = values.shape[1]
        mask = torch.ones(length, length, device=values.device).triu(1) if self.mask is None else self.mask
        scores.masked_fill_(mask.bool(), -torch.inf)
        weights = self.dropout(torch.softmax(scores / key.shape[-1] ** 0.5, dim=-1))
        return self.outward((weights @ value).transpose(1, 2).flatten(2))


def norm_of(shape: Mapping[str, Any]) -> nn.Module:
    return nn.LayerNorm(shape["width"]) if shape["native"] else SpelledNorm(shape["width"])


class SpelledNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, values: Tensor) -> Tensor:
        mean, variance = values.mean(-1, keepdim=True), values.var(-1, keepdim=True, unbiased=False)
        return self.scale * ((values - mean) / torch.sqrt(variance + 1e-5)) + self.shift


class SpelledGelu(nn.Module):
    def forward(self, values: Tensor) -> Tensor:
        root = torch.sqrt(torch.tensor(2 / torch.pi))
        return 0.5 * values * (1 + torch.tanh(root * (values + 0.044715 * torch.pow(values, 3))))


# -- the data


def images(configuration: Configuration) -> Any:
    side = configuration["image_side"]
    return Field(shape=(3, side, side)), Field(below=configuration["classes"])


def tokens(configuration: Configuration) -> Any:
    length = configuration["length"]
    shape = configuration["shape"]
    words = Field(shape=(length,), below=shape.get("vocabulary") or shape["vocab_size"])
    return words, words


def padded_tokens(configuration: Configuration) -> Any:
    length = (configuration["length"],)
    return {
        "input_ids": Field(shape=length, below=configuration["shape"]["vocab_size"]),
        "attention_mask": Field(shape=length, below=2),
    }


def labelled_tokens(configuration: Configuration) -> Any:
    length, words = configuration["length"], Field(shape=(configuration["length"],), below=30_000)
    head = configuration.get("head")
    if head == "answers":
        return {"input_ids": words, "start_positions": Field(below=length), "end_positions": Field(below=length)}
    if head == "pretraining":
        masked = Field(shape=(configuration["predicted_tokens"],), below=30_000)
        return {"input_ids": words, "words": masked, "order": Field(below=2)}
    return {"input_ids": words, "labels": Field(below=2)}


def latents(configuration: Configuration) -> Any:
    bf16, text, image = torch.bfloat16, configuration["text_length"], configuration["image_length"]
    return {
        "latents": Field(shape=(image, configuration["shape"]["in_channels"]), dtype=bf16),
        "prompts": Field(shape=(text, configuration["text_width"]), dtype=bf16),
        "text_places": Field(shape=(text, 4), below=text),
        "image_places": Field(shape=(image, 4), below=image),
    }


FAMILIES: dict[str, tuple[Callable[[Configuration], Loop], Callable[[Configuration], Any]]] = {
    "llama": (language_model, padded_tokens),
    "flux": (flow_model, latents),
    "bert": (classifier, labelled_tokens),
    "decoder": (decoder, tokens),
    "vit": (vision_transformer, images),
    "timm": (timm_model, images),
    "gpt": (gpt, tokens),
}
"""Family: (what is trained, the fields of a sample)"""
