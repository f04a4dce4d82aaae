"""GPU memory that others measured and published, beside what kit predicts for it on this machine.

    python benchmarks/published.py [--source NAME] [--row TEXT] [--answers FILE] [--record]

`published.jsonl` has a line for each figure: where it stands (repository, commit, path), what was measured, and the
configuration. Models are built from configurations with random weights, and nothing is downloaded. A row is a figure
in bytes (allocated, reserved, or NVML's for the whole process) or a bracket: a batch that ran and the next larger one,
which did not. Each loop is written as its source wrote it, where that changes memory: when gradients are cleared, and
what is still held then. What the source leaves open, and how it was settled, is the row's `note`; why a prediction is
far off is its `why`. Rows that are `held_out` are reported apart: nothing in kit may be fitted to them.

`--answers` keeps what was predicted, one JSON line each; rows that stand there are not predicted again, so that a long
run can be stopped and resumed. Some sources need packages beside kit's:

    pip install --no-deps --target .peers transformers==5.13.1 peft==0.20.0 diffusers==0.38.0 timm==1.0.31
    pip install --no-deps --target .peers accelerate 'huggingface_hub<2' tokenizers==0.22.1 safetensors regex pillow
    pip install --no-deps --target .peers scikit-learn joblib threadpoolctl
    pip install --no-deps --target .peers torchvision==0.28.0  # of the same build, CPU or CUDA, as the torch here

peft 0.20 does not know torchao 0.18: where that is installed, four of its methods cannot be made.
"""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule
from publish import publish
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override

import kit
from kit.models import Field, RandomData

ROWS = Path(__file__).with_name("published.jsonl")
PEERS = Path(__file__).parents[1] / ".peers"
NEEDED = {
    "llama": ("transformers", "peft"),
    "flux": ("diffusers", "transformers", "peft"),
    "bert": ("transformers", "bitsandbytes"),
    "vit": ("torchvision",),
    "timm": ("timm", "torchvision"),
    "gpt": (),
}
"""Packages of each family of models, beside kit's."""
PACKAGES = ("torch", "transformers", "peft", "diffusers", "timm", "torchvision")
UNITS = {"bytes": 1, "MB": 10**6, "MiB": 2**20, "GB": 10**9, "GiB": 2**30}
TIMEOUT_SECONDS = 300.0
EXPLAIN_BEYOND = 0.1
Configuration = Mapping[str, Any]
Row = dict[str, Any]


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
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = dict(configuration["shape"])
    model = LlamaForCausalLM._from_config(LlamaConfig(**shape), dtype=torch.bfloat16)
    return LanguageModel(adapted(model, configuration), configuration)


def flow_model(configuration: Configuration) -> Loop:
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

    float32 = configuration["float32_adapter"]
    return get_peft_model(model, get_peft_config(dict(adapter)), autocast_adapter_dtype=float32)


def classifier(configuration: Configuration) -> Loop:
    from transformers import BertConfig, BertForSequenceClassification

    shape = BertConfig(**configuration["shape"], attn_implementation="eager")
    model = BertForSequenceClassification(shape)
    if configuration["checkpointing"]:
        model.gradient_checkpointing_enable()
    return Classifier(model, configuration)


def vision_transformer(configuration: Configuration) -> Loop:
    from torchvision.models import vit_l_16

    model = vit_l_16()
    model.heads.head = nn.Linear(1024, 10)
    return Loop(model, configuration)


def timm_model(configuration: Configuration) -> Loop:
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
    """GPT-2 small with an untied head; `native` norms and GELU or spelled out, `fused` attention or spelled out."""

    def __init__(self, shape: Mapping[str, Any]) -> None:
        super().__init__()
        width = shape["width"]
        self.tokens, self.places = nn.Embedding(shape["vocabulary"], width), nn.Embedding(shape["context"], width)
        self.dropout = nn.Dropout(shape["dropout"])
        self.blocks = nn.Sequential(*(GptBlock(shape) for _ in range(shape["layers"])))
        self.norm = norm_of(shape)
        self.head = nn.Linear(width, shape["vocabulary"], bias=False)

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
        self.inward = nn.Linear(shape["width"], 3 * shape["width"], bias=False)
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
        self.inward = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(3))
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
    words = Field(shape=(length,), below=configuration["shape"]["vocabulary"])
    return words, words


def padded_tokens(configuration: Configuration) -> Any:
    length = (configuration["length"],)
    return {
        "input_ids": Field(shape=length, below=configuration["shape"]["vocab_size"]),
        "attention_mask": Field(shape=length, below=2),
    }


def labelled_tokens(configuration: Configuration) -> Any:
    return {"input_ids": Field(shape=(configuration["length"],), below=30_000), "labels": Field(below=2)}


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
    "vit": (vision_transformer, images),
    "timm": (timm_model, images),
    "gpt": (gpt, tokens),
}
"""Family: (what is trained, the fields of a sample)"""


# -- the predictions


def question(row: Row) -> tuple[kit.Config, Callable[[], Loop], Callable[[], Any]]:
    """Config, module and data of a row."""
    configuration = row["configuration"]
    model, fields = FAMILIES[configuration["family"]]
    devices = configuration.get("devices", 1)
    strategy = "ddp" if devices > 1 else "none"
    hardware = {"devices": devices, "precision": configuration["precision"], "strategy": strategy}
    config = kit.Config.make(
        {
            "hardware": hardware,
            "training": {"gradient_clip_norm": configuration.get("clip_norm")},
            "levers": {"accumulate_grad_batches": configuration.get("accumulate", 1)},
        }
    )
    return config, functools.partial(model, configuration), functools.partial(data_of, fields, configuration)


def data_of(fields: Callable[[Configuration], Any], configuration: Configuration) -> Any:
    return RandomData(fields(configuration), configuration["batch_size"])


def answer(row: Row) -> dict[str, Any]:
    """What kit says of a row: bytes, or whether a bracket holds."""
    start = time.perf_counter()
    try:
        found = bracketed(row) if row["measure"] == "fits" else predicted(row)
    except Exception as error:  # that kit has no answer is an answer too
        found = {"error": f"{type(error).__name__}: {error}".strip().splitlines()[0][:300]}
    return {"case": row["case"], **found, "seconds": round(time.perf_counter() - start, 1)}


def predicted(row: Row) -> dict[str, Any]:
    estimate = kit.predict_memory(*question(row), device=row["device"], timeout_seconds=TIMEOUT_SECONDS)
    if not estimate.complete:
        return {"error": unknown(estimate)}
    return {
        "allocated": estimate.device_allocated_bytes,
        "reserved": estimate.device_reserved_bytes,
        "trainable": estimate.trainable_parameters,
    }


def unknown(estimate: Any) -> str:
    """Why its activations are not known."""
    return next(reason for reason in estimate.reasons if reason.startswith("activations unknown"))[:300]


def bracketed(row: Row) -> dict[str, Any]:
    model = kit.memory.model(*question(row), device=row["device"], timeout_seconds=TIMEOUT_SECONDS)
    ran, failed = model.estimate(row["figure"][0]), model.estimate(row["figure"][1])
    if not ran.complete:
        return {"error": unknown(ran)}
    return {
        "verdicts": [ran.verdict, failed.verdict],
        "reserved": [ran.device_reserved_bytes, failed.device_reserved_bytes],
        "capacity": ran.capacity_bytes,
    }


def answers_of(rows: Iterable[Row], path: Path | None) -> Iterator[tuple[Row, dict[str, Any]]]:
    """Each row with its answer, from `path` where it stands there already."""
    known = {item["case"]: item for item in read_lines(path)} if path and path.exists() else {}
    for row in rows:
        if row["case"] not in known:
            known[row["case"]] = answer(row)
            if path:
                with path.open("a") as file:
                    file.write(json.dumps(known[row["case"]]) + "\n")
        print(json.dumps(known[row["case"]]), file=sys.stderr, flush=True)
        yield row, known[row["case"]]


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# -- the tables


def figure_bytes(row: Row) -> int:
    return round(row["figure"] * UNITS[row["unit"]])


def predicted_bytes(row: Row, found: Mapping[str, Any]) -> int:
    """As the row's source measured: its own context, where it states one, is added to what the allocator takes."""
    key = "allocated" if row["measure"] == "allocated" else "reserved"
    return int(found[key]) + row.get("context_bytes", 0)


def ratio_of(row: Row, found: Mapping[str, Any]) -> float:
    return predicted_bytes(row, found) / figure_bytes(row)


def inside(found: Mapping[str, Any]) -> bool:
    ran, failed = found["verdicts"]
    return bool(ran == "fits" and failed != "fits")


def bytes_table(pairs: Iterable[tuple[Row, dict[str, Any]]]) -> Iterator[Row]:
    for row, found in pairs:
        known = "error" not in found
        ratio = ratio_of(row, found) if known else None
        off = ratio is None or abs(ratio - 1) > EXPLAIN_BEYOND
        yield {
            "source": f"{row['repository']}@{row['commit'][:7]}",
            "case": row["case"],
            "measured": f"{row['measure']}, {row['device']}, torch {row['torch']}",
            "predicted GiB": round(predicted_bytes(row, found) / 2**30, 2) if known else "–",
            "published GiB": round(figure_bytes(row) / 2**30, 2),
            "ratio": round(ratio, 3) if ratio else "–",
            "held out": "yes" if row["held_out"] else "",
            "why": (row.get("why") or found.get("error", "not known")) if off else "",
        }


def bracket_table(pairs: Iterable[tuple[Row, dict[str, Any]]]) -> Iterator[Row]:
    for row, found in pairs:
        known = "error" not in found
        reserved = [round(size / 2**30, 2) for size in found["reserved"]] if known else ["–", "–"]
        yield {
            "source": f"{row['repository']}@{row['commit'][:7]}",
            "case": row["case"],
            "ran": row["figure"][0],
            "predicted GiB": reserved[0],
            "verdict": found["verdicts"][0] if known else "–",
            "did not run": row["figure"][1],
            "predicted GiB of that": reserved[1],
            "verdict of that": found["verdicts"][1] if known else "–",
            "inside": "yes" if known and inside(found) else "no",
            "held out": "yes" if row["held_out"] else "",
            "why": "" if known and inside(found) else row.get("why") or found.get("error", "not known"),
        }


def summary(name: str, pairs: list[tuple[Row, dict[str, Any]]]) -> Row:
    ratios = [ratio_of(row, found) for row, found in pairs if "error" not in found]
    errors = [100 * abs(ratio - 1) for ratio in ratios]
    return {
        "rows": name,
        "predicted": f"{len(ratios)} of {len(pairs)}",
        "median |error| %": round(statistics.median(errors), 1) if errors else "–",
        "worst %": round(max((100 * (ratio - 1) for ratio in ratios), key=abs), 1) if errors else "–",
        "within 3 %": sum(error <= 3 for error in errors),
        "within 10 %": sum(error <= 10 for error in errors),
        "too low by more than 3 %": sum(ratio < 0.97 for ratio in ratios),
    }


def bracket_summary(name: str, pairs: list[tuple[Row, dict[str, Any]]]) -> Row:
    known = [found for _, found in pairs if "error" not in found]
    return {
        "rows": name,
        "predicted": f"{len(known)} of {len(pairs)}",
        "inside": sum(map(inside, known)),
        "said to fit, did not": sum(found["verdicts"][1] == "fits" for found in known),
        "said not to fit, did": sum(found["verdicts"][0] == "does not fit" for found in known),
        "said to be tight, did": sum(found["verdicts"][0] == "tight" for found in known),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    rows = read_lines(ROWS)
    parser.add_argument("--source", choices=sorted({row["source"] for row in rows}), help="only these rows")
    parser.add_argument("--row", default="", help="only rows whose case contains this")
    parser.add_argument("--answers", type=Path, help="where predictions are kept and taken from")
    parser.add_argument("--record", action="store_true", help="append the tables to benchmarks/results.jsonl")
    asked = parser.parse_args()
    sys.path.append(str(PEERS))
    chosen = [row for row in rows if asked.source in (None, row["source"]) and asked.row in row["case"]]
    report(list(answers_of(with_packages(chosen), asked.answers)), asked.record)


def with_packages(rows: Iterable[Row]) -> Iterator[Row]:
    """The rows whose packages are installed; of the others it is said once what they lack."""
    missing = {family: [package for package in needed if not version_of(package)] for family, needed in NEEDED.items()}
    for family in [family for family, packages in missing.items() if packages]:
        print(f"{family} is left out: {', '.join(missing[family])} is not installed; {__file__} says how at its top")
    return (row for row in rows if not missing[row["configuration"]["family"]])


def report(pairs: list[tuple[Row, dict[str, Any]]], record: bool) -> None:
    facts = {package: version for package in PACKAGES if (version := version_of(package))}
    brackets = [pair for pair in pairs if pair[0]["measure"] == "fits"]
    figures = [pair for pair in pairs if pair[0]["measure"] != "fits"]
    for name, table, found in (
        ("published bytes", bytes_table, figures),
        ("published batches that ran and did not", bracket_table, brackets),
    ):
        if found:
            publish(name, list(table(found)), record=record, **facts)
    for name, summarize, found in (
        ("published bytes, in short", summary, figures),
        ("published batches, in short", bracket_summary, brackets),
    ):
        if found:
            publish(name, [summarize(title, group) for title, group in groups(found)], record=record, **facts)


def groups(pairs: list[tuple[Row, dict[str, Any]]]) -> Iterator[tuple[str, list[tuple[Row, dict[str, Any]]]]]:
    for source in dict.fromkeys(row["source"] for row, _ in pairs):
        yield source, [pair for pair in pairs if pair[0]["source"] == source]
    kinds: dict[str, Callable[[Row], bool]] = {
        "torch 2.6 and later": lambda row: tuple(map(int, row["torch"].split(".")[:2])) >= (2, 6),
        "held out": lambda row: row["held_out"],
        "not held out": lambda row: not row["held_out"],
    }
    for name, belongs in kinds.items():
        if group := [pair for pair in pairs if belongs(pair[0])]:
            yield name, group


def version_of(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


if __name__ == "__main__":
    main()
