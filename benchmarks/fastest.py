"""kit.recommend(objective="speed") on the CPU under a limit of memory, beside checkpointing everything.

    python benchmarks/fastest.py [--model NAME] [--free] [--record]

Five models of others' packages, chosen before the planner ran (`published.py` says how to install them). The budget
lies midway between what a model needs with all repeated blocks checkpointed and with none. Precision, optimizer and
accumulation are kept, so that only the choice of blocks counts; `--free` lets everything vary. Trials of the choice and
of checkpointing everything are run in turns, three times each, under the limit. To be run on quiet cores.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
from pathlib import Path
from typing import Any

from publish import publish
from published_models import Classifier, Decoder, Loop

import kit
from kit.models import Field, RandomData
from kit.records.row import row_of_trial

PEERS = Path(__file__).parents[1] / ".peers"
ROUNDS, STEPS = 3, 10
LOOP = {"clears": "after forward", "optimizer": {"name": "AdamW", "lr": 1e-4}, "checkpointing": ""}
KEPT = ("hardware.precision", "levers.optimizer", "levers.accumulate_grad_batches")
EVERYTHING = {"levers.gradient_checkpointing": True}


def gpt2() -> Loop:
    from transformers import GPT2Config, GPT2LMHeadModel

    shape = GPT2Config(n_layer=8, n_embd=256, n_head=8, vocab_size=8192, n_positions=256)
    return Decoder(GPT2LMHeadModel(shape).train(), LOOP)


def bert() -> Loop:
    from transformers import BertConfig, BertForSequenceClassification

    shape = BertConfig(num_hidden_layers=8, hidden_size=256, num_attention_heads=4, intermediate_size=1024)
    return Classifier(BertForSequenceClassification(shape).train(), LOOP)


def timm_model(name: str) -> Loop:
    import timm

    return Loop(timm.create_model(name), LOOP)


def tokens(batch: int) -> Any:
    words = Field(shape=(256,), below=8192)
    return RandomData((words, words), batch)


def labelled(batch: int) -> Any:
    return RandomData({"input_ids": Field(shape=(128,), below=30_000), "labels": Field(below=2)}, batch)


def images(batch: int) -> Any:
    return RandomData((Field(shape=(3, 224, 224)), Field(below=1000)), batch)


MODELS = {
    "transformers GPT-2": (gpt2, functools.partial(tokens, 8)),
    "transformers BERT": (bert, functools.partial(labelled, 16)),
    "timm vit_tiny": (functools.partial(timm_model, "vit_tiny_patch16_224"), functools.partial(images, 8)),
    "timm convnext_atto": (functools.partial(timm_model, "convnext_atto"), functools.partial(images, 8)),
    "timm swin_tiny": (functools.partial(timm_model, "swin_tiny_patch4_window7_224"), functools.partial(images, 4)),
}


def measured(config: kit.Config, module: Any, data: Any) -> tuple[float, int]:
    """Samples per second and peak bytes of a trial."""
    trial = kit.fit(config, module, data)
    trial.wait()
    if trial.state != "COMPLETE":
        raise RuntimeError(f"{trial.state}: {trial.message}")
    row = row_of_trial(trial)
    return row["samples_per_second"], trial.event("memory_measured", "device_allocated_bytes")


def case(name: str, free: bool) -> dict[str, Any]:
    module, data = MODELS[name]
    given = kit.Config.make({"name": "fastest", "hardware": {"accelerator": "cpu", "precision": "32-true"}})
    given = given.replace({"trial.max_steps": STEPS, "trial.warmup_steps": 2})
    ends = [
        kit.predict_memory(given.replace(changes), module, data).device_allocated_bytes for changes in ({}, EVERYTHING)
    ]
    limited = given.replace({"hardware.device_memory_bytes": sum(ends) // 2})
    keep = () if free else KEPT
    plan = kit.recommend(limited, module, data, device="this machine", objective="speed", keep=keep, confirm=False)
    chosen, everything = plan.config, limited.replace(EVERYTHING)
    found = [(measured(chosen, module, data), measured(everything, module, data)) for _ in range(ROUNDS)]
    paces = [statistics.median(one[place][0] for one in found) for place in range(2)]
    peak = max(one[0][1] for one in found)
    assert plan.chosen is not None
    return {
        "model": name,
        "budget MiB": round(limited.hardware.device_memory_bytes / 2**20, 1),
        "chosen": plan.chosen.name,
        "measured peak / budget": round(peak / limited.hardware.device_memory_bytes, 3),
        "samples/s": round(paces[0], 2),
        "measured / predicted": round(paces[0] / plan.chosen.samples_per_second, 2),
        "checkpointing everything, samples/s": round(paces[1], 2),
        "times as fast": round(paces[0] / paces[1], 2),
        "settings looked at": len(plan.points),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, help="only this one")
    parser.add_argument("--free", action="store_true", help="let precision, optimizer and accumulation vary too")
    parser.add_argument("--record", action="store_true", help="append the table to benchmarks/results.jsonl")
    asked = parser.parse_args()
    sys.path.append(str(PEERS))
    names = [asked.model] if asked.model else list(MODELS)
    what = "everything free" if asked.free else "blocks only"
    publish(f"the fastest that fits, {what}", [case(name, asked.free) for name in names], record=asked.record)


if __name__ == "__main__":
    main()
