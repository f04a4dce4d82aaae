"""Seconds until kit answers for what is large: each question put in an interpreter of its own, which has asked nothing.

    python benchmarks/large_models.py [--question NAME] [--record]

A LLaMA of 7 billion parameters, a GPT-2 and a LLaMA of 200 layers (of transformers) on a card that is not here, and
`kit.recommend` on a model that no setting makes fit. The seconds begin after `import kit`: starting a process in which
torch and transformers are imported, and making the model, are in them. To be run on quiet cores.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import LightningModule
from publish import publish
from torch import Tensor, nn
from typing_extensions import override

import kit
from kit.models import Field, RandomData

SEVEN_BILLION = {
    "vocab_size": 32_000, "hidden_size": 4096, "intermediate_size": 11_008, "num_hidden_layers": 32,
    "num_attention_heads": 32,
}  # fmt: skip
DEEP = {
    "vocab_size": 32_000, "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 200,
    "num_attention_heads": 16,
}  # fmt: skip
SECONDS = "seconds "


class Llama(LightningModule):
    def __init__(self, **shape: Any) -> None:
        super().__init__()
        self.model = self.made(shape).train()

    def made(self, shape: Mapping[str, Any]) -> nn.Module:
        from transformers import LlamaConfig, LlamaForCausalLM

        model: nn.Module = LlamaForCausalLM._from_config(LlamaConfig(**shape), dtype=torch.bfloat16)
        return model

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.model(input_ids=batch, labels=batch).loss
        return loss

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


class Gpt2(Llama):
    @override
    def made(self, shape: Mapping[str, Any]) -> nn.Module:
        from transformers import GPT2Config, GPT2LMHeadModel

        model: nn.Module = GPT2LMHeadModel._from_config(GPT2Config(**shape), dtype=torch.bfloat16)
        return model


def deep_gpt2() -> Gpt2:
    return Gpt2(n_layer=200, n_embd=1024, n_head=16, n_positions=2048, vocab_size=32_000)


def seven_billion() -> Llama:
    return Llama(**SEVEN_BILLION)


def deep() -> Llama:
    return Llama(**DEEP)


def tokens() -> RandomData:
    return RandomData(Field(shape=(2048,), below=32_000), 1)


def config() -> kit.Config:
    return kit.Config.make({"hardware": {"devices": 1, "precision": "bf16-true"}})


def ask_seven_billion() -> str:
    return str(kit.predict_memory(config(), seven_billion, tokens, device="H100-80GB")).splitlines()[0]


def ask_deep() -> str:
    return str(kit.predict_memory(config(), deep, tokens, device="H100-80GB")).splitlines()[0]


def ask_deep_gpt2() -> str:
    return str(kit.predict_memory(config(), deep_gpt2, tokens, device="H100-80GB")).splitlines()[0]


def ask_hopeless() -> str:
    found = kit.recommend(config(), "T4-16GB", seven_billion, tokens)
    return str(found).splitlines()[0]


QUESTIONS = {
    "LLaMA, 7 billion parameters": (ask_seven_billion, 10),
    "GPT-2, 200 layers": (ask_deep_gpt2, 10),
    "LLaMA, 200 layers": (ask_deep, 10),
    "recommend, 7 billion on a T4": (ask_hopeless, 30),
}
"""Name: (how it is asked, the seconds it may take)"""


def child(name: str) -> tuple[float, str]:
    done = subprocess.run([sys.executable, __file__, "--question", name, "--here"], capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith(SECONDS)]
    if not lines:
        raise SystemExit(f"{name} gave no answer:\n{done.stderr}")
    taken, _, answer = lines[-1].removeprefix(SECONDS).partition(" ")
    return float(taken), answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--question", choices=QUESTIONS, help="only this one")
    parser.add_argument("--record", action="store_true", help="append the table to benchmarks/results.jsonl")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    names = [asked.question] if asked.question else list(QUESTIONS)
    if asked.here:
        start = time.perf_counter()
        answer = QUESTIONS[names[0]][0]()
        print(f"{SECONDS}{time.perf_counter() - start} {answer}", flush=True)
        return
    rows = [
        {"question": name, "seconds": round(taken, 1), "may take": QUESTIONS[name][1], "answer": answer}
        for name in names
        for taken, answer in [child(name)]
    ]
    publish("seconds to an answer for large models", rows, record=asked.record)


if __name__ == "__main__":
    main()
