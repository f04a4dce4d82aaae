"""Levers that trade time for memory, as callbacks that need nothing of the module.

Gradient checkpointing keeps only the inputs of each block and computes the rest again in the backward pass: activation
memory falls from all blocks to about one, for roughly one more forward pass. Gradients stay equal; class, attribute and
parameter names stay as they are, because only `forward` is replaced. Blocks with running statistics (BatchNorm) are
left alone: computing them twice would update the statistics twice.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Sequence
from functools import partial
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.checkpoint import checkpoint
from typing_extensions import override

from kit.config import Config
from kit.errors import KitWarning
from kit.train.choices import Entry, lever_entries
from kit.train.fsdp import class_name, find_blocks, outermost


class GradientCheckpointing(Callback):
    """Compute the activations of blocks again in the backward pass instead of keeping them.

    Args:
        blocks: Class names of the blocks; by default the repeated blocks of the module.

    Raises:
        ConfigError: when the fit starts, if a class is named that the module does not hold.
    """

    def __init__(self, blocks: Sequence[str] | None = None) -> None:
        self.blocks = None if blocks is None else tuple(blocks)
        self._replaced: list[nn.Module] = []

    @property
    def count(self) -> int:
        """Blocks checkpointed now."""
        return len(self._replaced)

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        # A module that makes its layers in configure_model has none before; on_fit_start comes after it.
        if stage == "fit" and not is_overridden("configure_model", pl_module):
            self._replace(pl_module)

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if is_overridden("configure_model", pl_module):
            self._replace(pl_module)

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        while self._replaced:
            self._replaced.pop().__dict__.pop("forward", None)

    def _replace(self, module: LightningModule) -> None:
        found = outermost(find_blocks(module, self.blocks))
        able = [
            block for block in found
            if not any(isinstance(part, _NormBase) and part.track_running_stats for part in block.modules())
        ]  # fmt: skip
        left = sorted({class_name(block) for block in found if block not in able})
        message = ""
        if left:
            message = (
                f"{len(found) - len(able)} of {len(found)} blocks ({', '.join(left)}) are not checkpointed: their "
            )
            message += "BatchNorm would count every batch twice; GroupNorm or LayerNorm can be checkpointed"
        elif not found:
            message = f"gradient checkpointing does nothing: {class_name(module)} has no repeated blocks; name their "
            message += "classes in GradientCheckpointing(blocks=[...])"
        if message:
            warnings.warn(message, KitWarning, stacklevel=2)
        for block in able:
            if getattr(block.__dict__.get("forward"), "func", None) is not checkpoint:
                block.forward = partial(checkpoint, block.forward, use_reentrant=False)
                self._replaced.append(block)


def lever_callbacks(config: Config, stands_in: bool = False) -> list[Callback]:
    """Callbacks for the levers that `config` switches on; with `stands_in`, the CPU plays the part of a GPU."""
    more = {"kit.train.AttentionKernel": {"stands_in": stands_in}}
    return [instantiate(entry, **more.get(entry["class_path"], {})) for entry in lever_entries(config)]


def instantiate(entry: Entry, **more: Any) -> Any:
    """The object of an entry, as LightningCLI would make it."""
    module, _, name = entry["class_path"].rpartition(".")
    return getattr(importlib.import_module(module), name)(**entry.get("init_args", {}), **more)
