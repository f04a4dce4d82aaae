"""kit.recommend(objective="speed") on the CPU under a limit of memory, beside checkpointing everything.

    python benchmarks/fastest.py [--model NAME] [--free] [--seconds 150] [--answers FILE] [--record]

Eight models of others' packages, chosen before the planner ran (`published.py` says how to install them, but for
`x-transformers==2.31.10 einx einops torch-einops-utils loguru frozendict`); nothing was tuned on those that are held
out. The budget lies midway between what a model needs with all repeated blocks
checkpointed and with none. Precision, optimizer and accumulation are kept, so that only the choice of blocks counts;
`--free` lets everything vary. Trials of the choice and of checkpointing everything are run in turns, twice each,
under the limit. Gradients of one batch with the chosen blocks checkpointed are compared with those without. To be run
on quiet cores, in pieces: no plan and no pair of trials begins after so many seconds, and what the answers hold is not
done again.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from publish import publish
from published_models import Classifier, Decoder, Loop
from torch import Tensor
from torch.nn import functional

import kit
from kit.models import Field, RandomData
from kit.records.row import row_of_trial
from kit.train.levers import GradientCheckpointing

PEERS = Path(__file__).parents[1] / ".peers"
ROUNDS, STEPS = 2, 8
LOOP = {"clears": "after forward", "optimizer": {"name": "AdamW", "lr": 1e-4}, "checkpointing": ""}
KEPT = ("hardware.precision", "levers.optimizer", "levers.accumulate_grad_batches")
Row = dict[str, Any]
EVERYTHING = {"levers.gradient_checkpointing": True}


def gpt2() -> Loop:
    from transformers import GPT2Config, GPT2LMHeadModel

    shape = GPT2Config(n_layer=8, n_embd=256, n_head=8, vocab_size=8192, n_positions=256)
    return Decoder(GPT2LMHeadModel(shape).train(), LOOP)


def bert() -> Loop:
    from transformers import BertConfig, BertForSequenceClassification

    shape = BertConfig(num_hidden_layers=8, hidden_size=256, num_attention_heads=4, intermediate_size=1024)
    return Classifier(BertForSequenceClassification(shape).train(), LOOP)


def x_transformer() -> Loop:
    from x_transformers import Decoder as Layers
    from x_transformers import TransformerWrapper

    return NextToken(
        TransformerWrapper(num_tokens=8192, max_seq_len=256, attn_layers=Layers(dim=256, depth=6, heads=4)), LOOP
    )


def t5() -> Loop:
    from transformers import T5Config, T5ForConditionalGeneration

    shape = T5Config(
        vocab_size=8192,
        d_model=256,
        d_kv=64,
        d_ff=1024,
        num_layers=4,
        num_heads=4,
        decoder_start_token_id=0,
        use_cache=False,
    )
    return Classifier(T5ForConditionalGeneration(shape).train(), LOOP)


def diffusers_unet() -> Loop:
    from diffusers import UNet2DModel

    return Denoiser(UNet2DModel(sample_size=64, block_out_channels=(32, 64, 64, 128), norm_num_groups=8), LOOP)


class NextToken(Loop):
    def loss(self, batch: Any) -> Tensor:
        return functional.cross_entropy(self.model(batch[0]).flatten(0, 1), batch[1].flatten())


class Denoiser(Loop):
    def loss(self, batch: Any) -> Tensor:
        noisy, noise, times = batch
        return functional.mse_loss(self.model(noisy, times).sample, noise)


def timm_model(name: str) -> Loop:
    import speed_models  # noqa: F401 - it names torchvision's operators, which belong to another build of torch
    import timm

    return Loop(timm.create_model(name), LOOP)


def tokens(batch: int) -> Any:
    words = Field(shape=(256,), below=8192)
    return RandomData((words, words), batch)


def labelled(batch: int) -> Any:
    return RandomData({"input_ids": Field(shape=(128,), below=30_000), "labels": Field(below=2)}, batch)


def images(batch: int) -> Any:
    return RandomData((Field(shape=(3, 224, 224)), Field(below=1000)), batch)


def pairs(batch: int) -> Any:
    return RandomData({"input_ids": Field(shape=(128,), below=8192), "labels": Field(shape=(128,), below=8192)}, batch)


def noises(batch: int) -> Any:
    return RandomData((Field(shape=(3, 64, 64)), Field(shape=(3, 64, 64)), Field(below=1000)), batch)


HELD_OUT = ("x-transformers decoder", "transformers T5", "diffusers UNet2D")
MODELS = {
    "transformers GPT-2": (gpt2, functools.partial(tokens, 8)),
    "transformers BERT": (bert, functools.partial(labelled, 16)),
    "timm vit_tiny": (functools.partial(timm_model, "vit_tiny_patch16_224"), functools.partial(images, 8)),
    "timm convnext_atto": (functools.partial(timm_model, "convnext_atto"), functools.partial(images, 8)),
    "timm swin_tiny": (functools.partial(timm_model, "swin_tiny_patch4_window7_224"), functools.partial(images, 4)),
    "x-transformers decoder": (x_transformer, functools.partial(tokens, 8)),
    "transformers T5": (t5, functools.partial(pairs, 8)),
    "diffusers UNet2D": (diffusers_unet, functools.partial(noises, 4)),
}


def measured(config: kit.Config, module: Any, data: Any) -> tuple[float, int]:
    """Samples per second and peak bytes of a trial."""
    trial = kit.fit(config, module, data)
    trial.wait()
    if trial.state != "COMPLETE":
        raise RuntimeError(f"{trial.state}: {trial.message}")
    row = row_of_trial(trial)
    return row["samples_per_second"], trial.event("memory_measured", "device_allocated_bytes")


def planned(name: str, free: bool) -> Row:
    """What the planner chooses for a budget midway between all blocks checkpointed and none."""
    module, data = MODELS[name]
    given = kit.Config.make({"name": "fastest", "hardware": {"accelerator": "cpu", "precision": "32-true"}})
    given = given.replace({"trial.max_steps": STEPS, "trial.warmup_steps": 2})
    ends = [
        kit.predict_memory(given.replace(changes), module, data).device_allocated_bytes for changes in ({}, EVERYTHING)
    ]
    limited = given.replace({"hardware.device_memory_bytes": sum(ends) // 2})
    keep = () if free else KEPT
    plan = kit.recommend(limited, module, data, device="this machine", objective="speed", keep=keep, confirm=False)
    assert plan.chosen is not None
    return {
        "limited": limited.values(), "chosen": plan.config.values(), "name": plan.chosen.name, "ends": ends,
        "samples/s": plan.chosen.samples_per_second, "looked at": len(plan.points),
        "gradients differ by": gradients_differ_by(plan.config, module, data),
    }  # fmt: skip


def gradients_differ_by(config: kit.Config, module: Any, data: Any) -> float:
    """The largest difference of a gradient of one batch, by its largest element, with the blocks of a config."""
    torch.manual_seed(0)
    loop, loader = module(), data()
    loader.setup("fit")
    batch = next(iter(loader.train_dataloader()))
    found: list[dict[str, Tensor]] = []
    for again in (False, True):
        lever = GradientCheckpointing(list(config.levers.checkpoint_blocks) or None)
        if again:
            lever._replace(loop)
        torch.manual_seed(1)
        loop.zero_grad()
        loop.loss(batch).backward()
        found.append({name: part.grad.clone() for name, part in loop.named_parameters() if part.grad is not None})
    assert found[0].keys() == found[1].keys()
    return max(
        float((one - found[1][name]).abs().max() / one.abs().max().clamp_min(1e-30)) for name, one in found[0].items()
    )


def round_of(name: str, plan: Row) -> Row:
    """One trial of the choice and one of checkpointing everything."""
    everything = kit.Config.make(plan["limited"]).replace(EVERYTHING)
    return {"pair": [measured(config, *MODELS[name]) for config in (kit.Config.make(plan["chosen"]), everything)]}


def collect(names: list[str], free: bool, seconds: float, answers: Path) -> dict[str, list[Row]]:
    """The plan of each model and its rounds, as far as the time goes; they stand in the answers."""
    lines = answers.read_text().splitlines() if answers.is_file() else []
    ends = time.monotonic() + seconds
    found: dict[str, list[Row]] = {name: [] for name in names}
    for row in map(json.loads, lines):
        if row["free"] == free and row["model"] in found:
            found[row["model"]].append(row)
    for name, rows in found.items():
        while len(rows) < 1 + ROUNDS and time.monotonic() < ends:
            row = round_of(name, rows[0]) if rows else planned(name, free)
            rows.append({"model": name, "free": free, **row})
            with answers.open("a") as file:
                file.write(json.dumps(rows[-1]) + "\n")
    return {name: rows for name, rows in found.items() if len(rows) > ROUNDS}


def case(name: str, rows: list[Row]) -> Row:
    plan, pairs = rows[0], [row["pair"] for row in rows[1:]]
    paces = [statistics.median(pair[place][0] for pair in pairs) for place in range(2)]
    limit = plan["limited"]["hardware"]["device_memory_bytes"]
    return {
        "model": name,
        "held out": name in HELD_OUT,
        "budget MiB": round(limit / 2**20, 1),
        "chosen": plan["name"],
        "measured peak / budget": round(max(pair[0][1] for pair in pairs) / limit, 3),
        "samples/s": round(paces[0], 2),
        "measured / predicted": round(paces[0] / plan["samples/s"], 2),
        "checkpointing everything, samples/s": round(paces[1], 2),
        "times as fast": round(paces[0] / paces[1], 2),
        "settings looked at": plan["looked at"],
        "gradients differ by": plan["gradients differ by"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, help="only this one")
    parser.add_argument("--free", action="store_true", help="let precision, optimizer and accumulation vary too")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin nothing after so many")
    parser.add_argument("--answers", type=Path, default=Path("fastest_answers.jsonl"), help="what was found before")
    parser.add_argument("--record", action="store_true", help="append the table to benchmarks/results.jsonl")
    asked = parser.parse_args()
    sys.path.append(str(PEERS))
    names = [asked.model] if asked.model else list(MODELS)
    what = "everything free" if asked.free else "blocks only"
    found = collect(names, asked.free, asked.seconds, asked.answers)
    if found:
        publish(f"the fastest that fits, {what}", [case(*item) for item in found.items()], record=asked.record)


if __name__ == "__main__":
    main()
