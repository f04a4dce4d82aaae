"""The table of projects: what trainings of other libraries must show on one rank, under ddp and under fsdp on two.

Alone, a trial has the losses of a plain Trainer of Lightning, step by step; so it has under ddp on two ranks, of
samples that each rank has for itself, where the loss of a step is the mean of both. fsdp has the losses of ddp. A row
says where it is otherwise, and why. Rows of libraries that are not installed are skipped, and say so.
"""

from __future__ import annotations

import importlib
import json
import warnings
from dataclasses import dataclass, field

import numpy as np
import plain_trainer
import pytest
import setups
from properties import at_night
from rank_processes import run_ranks
from waiting import PATIENCE_SECONDS

import kit
from kit.errors import TrialError

STEPS = 6
EQUAL, SHARDED = 1e-5, 1e-3


@dataclass(frozen=True)
class Project:
    """A row."""

    module: str
    data: str
    needs: tuple[str, ...] = ()
    """What it imports beyond torch and lightning."""
    changes: dict = field(default_factory=dict)
    """Of the config."""
    ddp: dict = field(default_factory=dict)
    """Settings without which ddp cannot train it, as the error says."""
    refused: str = ""
    """Why fsdp does not take it, as the error says before the first step."""


GPT2 = {"n_layer": 2, "n_head": 2, "n_embd": 16, "n_positions": 32, "vocab_size": 64}
STILL = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
T5 = {"num_layers": 1, "d_model": 16, "d_kv": 8, "num_heads": 2, "d_ff": 32, "vocab_size": 64, "dropout_rate": 0.0}
BART = {"d_model": 16, "vocab_size": 64, "max_position_embeddings": 32, "dropout": 0.0, "pad_token_id": 1} | {
    f"{part}_{name}": value
    for part in ("encoder", "decoder")
    for name, value in {"layers": 1, "attention_heads": 2, "ffn_dim": 32}.items()
}
LORA = {"peft_type": "LORA", "r": 2, "target_modules": ["c_attn"]}
HF, PEFT = ("transformers",), ("transformers", "peft")
PROJECTS = {
    "nanoGPT's training": Project("setups:NanoGPT", "setups:windows"),
    "Lightning's transformer": Project("setups:Translator", "setups:sentences"),
    "Lightning's GAN": Project("setups:Adversaries", "setups:reals", ddp={"hardware.ddp_find_unused_parameters": True}),
    "average of weights": Project("setups:Filled", "setups:Patches", ("xarray", "xbatcher")),
    "unused head": Project(
        "setups:with_unused_head", "setups:Patches", ("xarray", "xbatcher"),
        ddp={"hardware.ddp_find_unused_parameters": True},
    ),
    "LSTM in sequence chunks": Project(
        "kit.models:Recurrent", "setups:steps", changes={
            "model.arguments": {"features": 4, "width": 8, "layers": 1}, "levers.sequence_chunk": 4,
        },
    ),
    "hf:gpt2": Project("hf:gpt2", "setups:windows", HF, {"model.arguments": {"settings": {**GPT2, **STILL}}}),
    "hf:gpt2 with LoRA": Project(
        "hf:gpt2", "setups:windows", PEFT,
        {"model.arguments": {"settings": {**GPT2, **STILL}, "method": {**LORA, "fan_in_fan_out": True}}},
    ),
    "hf:t5": Project("hf:t5", "setups:windows", HF, {"model.arguments": {"settings": T5}}),
    "hf:bart": Project("hf:bart", "setups:windows", HF, {"model.arguments": {"settings": BART}}),
    "transformers, fine-tuned on datasets": Project("setups:FineTuned", "setups:labelled", (*HF, "datasets")),
    "transformers with LoRA": Project("setups:adapted", "setups:labelled", (*PEFT, "datasets")),
    "x-transformers": Project("setups:Wrapped", "setups:windows", ("x_transformers",)),
    "MONAI": Project("setups:Segmenter", "setups:scans", ("monai",)),
    "diffusers": Project("setups:Denoiser", "setups:noisy", ("diffusers",)),
    "torch_geometric": Project("setups:Graphs", "setups:graphs", ("torch_geometric",)),
    "pytorch-forecasting": Project("setups:forecast", "setups:forecasts", ("pytorch_forecasting",)),
    "litdata": Project("setups:Filled", "setups:streamed", ("litdata",)),
    "timm:resnet18": Project(
        "timm:resnet18", "setups:pictures", ("torchvision", "timm"), {"model.arguments": {"classes": 4}}
    ),
    "segmentation_models_pytorch": Project(
        "setups:Filters", "setups:masks", ("torchvision", "segmentation_models_pytorch")
    ),
    # Chosen before a line was written to suit them.
    "torchmetrics": Project("outsiders:Measured", "outsiders:classes", ("torchmetrics",)),
    "webdataset": Project("outsiders:Flat", "outsiders:tars", ("webdataset",)),
    "pytorch-metric-learning": Project("outsiders:Contrast", "outsiders:views", ("pytorch_metric_learning",)),
    "litgpt": Project("outsiders:Lit", "setups:windows", ("litgpt",)),
    "gluonts": Project("outsiders:deep_ar", "outsiders:endless", ("gluonts",)),
    "gpytorch": Project(
        "outsiders:Process", "outsiders:heights", ("gpytorch",), refused="no parameter without a dimension.*take ddp"
    ),
    "neuraloperator": Project(
        "outsiders:Operator", "outsiders:flows", ("neuralop",), refused="complex64 and float32; take ddp"
    ),
    "e3nn": Project("outsiders:Tetris", "outsiders:blocks", ("e3nn",)),
    "torchdiffeq": Project("outsiders:Flow", "outsiders:spirals", ("torchdiffeq",)),
    "vector-quantize-pytorch": Project("outsiders:Codes", "outsiders:images", ("vector_quantize_pytorch",)),
}  # fmt: skip
NOT_RUN = {
    "MosaicML streaming": "mosaicml-streaming 0.13 wants older releases of numpy, transformers and google-cloud-"
    "storage than kit's other development dependencies",
    "lightning-bolts": "lightning-bolts 0.7 wants pytorch-lightning 1.9, which has no lightning.pytorch",
}
IN_CI = ["nanoGPT's training", "Lightning's GAN", "unused head", "hf:gpt2 with LoRA", "torch_geometric"]


@pytest.fixture(params=at_night([*PROJECTS, *NOT_RUN], [name for name in PROJECTS if name in IN_CI]))
def project(request):
    """A row whose libraries are here."""
    if request.param in NOT_RUN:
        pytest.skip(NOT_RUN[request.param])
    found = PROJECTS[request.param]
    for name in found.needs:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                importlib.import_module(name)
        except (ImportError, RuntimeError) as error:
            pytest.skip(f"{name} cannot be imported here: {error}")
    return found


def asked(config, project, ranks, strategy):
    extra = project.ddp if strategy == "ddp" else {}
    base = config(ranks, strategy, max_steps=STEPS, count_work=False, measure_memory=False)
    return base.replace({"model.target": project.module, "loader.batch_size": setups.BATCH, "loader.shuffle": False,
                         **project.changes, **extra})  # fmt: skip


def plain(config, project, ranks, folder):
    """What a Trainer of Lightning has that knows nothing of kit: of each rank, the losses as `losses` has them."""
    row = plain_trainer.Row(
        module=project.module, arguments=dict(config.model.arguments), data=project.data, seed=config.training.seed,
        steps=STEPS, ranks=ranks, find_unused="hardware.ddp_find_unused_parameters" in project.ddp,
    )  # fmt: skip
    run_ranks(ranks, folder, plain_trainer.be_rank, row)
    found = [json.loads((folder / f"losses.{rank}.json").read_text()) for rank in range(ranks)]
    return np.mean([one["values"] for one in found], axis=0) if found[0]["of_steps"] else np.array(found[0]["values"])


def losses(trial):
    """As `plain_trainer.Losses` has them, the mean of all ranks where the module gives them."""
    trial.wait(PATIENCE_SECONDS)
    assert trial.state == "COMPLETE", trial.message
    steps = [event for event in trial.steps if event["rank"] == 0]
    assert steps[-1]["step"] >= STEPS  # an optimizer of two counts as one
    found = [[event["loss"] for event in trial.steps if event["rank"] == rank] for rank in range(ranks_of(trial))]
    if found[0][0] is not None:
        assert len({tuple(values) for values in found}) == len(found), "the ranks had the same samples"
        return np.mean(np.array(found, float), axis=0)
    names = sorted(steps[0]["metrics"])
    return np.array([event["metrics"][names[0]] for event in steps], float)


def ranks_of(trial):
    return trial.environment["world_size"]


@pytest.mark.filterwarnings("ignore")  # of those libraries
def test_a_project_trains_alone_as_with_a_plain_trainer(config, project, tmp_path):
    one = asked(config, project, 1, "none")
    found = losses(kit.fit(one, None, project.data))
    assert np.isfinite(found).all()
    if not one.levers.sequence_chunk:  # which a plain Trainer has not
        np.testing.assert_allclose(found, plain(one, project, 1, tmp_path), rtol=EQUAL)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_project_trains_on_two_ranks_alike_under_ddp_and_fsdp(config, project, tmp_path):
    found = {}
    for strategy in ("ddp", "fsdp"):
        if strategy == "fsdp" and project.refused:
            with pytest.raises(TrialError, match=project.refused):
                kit.fit(asked(config, project, 2, strategy), None, project.data).wait(PATIENCE_SECONDS)
            return
        found[strategy] = losses(kit.fit(asked(config, project, 2, strategy), None, project.data))
        assert np.isfinite(found[strategy]).all()
        if strategy == "ddp" and "levers.sequence_chunk" not in project.changes:
            two = asked(config, project, 2, strategy)
            np.testing.assert_allclose(found[strategy], plain(two, project, 2, tmp_path), rtol=EQUAL)
    np.testing.assert_allclose(found["fsdp"], found["ddp"], rtol=SHARDED)


def test_every_row_of_ci_is_a_project_and_every_reason_is_told():
    assert set(IN_CI) <= set(PROJECTS)
    assert all(reason for reason in NOT_RUN.values())
