"""Levers of memory, as callbacks that need nothing of the module.

Gradient checkpointing keeps only the inputs of each block and computes the rest again in the backward pass: activation
memory falls from all blocks to about one, for roughly one more forward pass. Gradients stay equal; class, attribute and
parameter names stay as they are, because only `forward` is replaced. Blocks with running statistics (BatchNorm) are
left alone: computing them twice would update the statistics twice.

Lightning clears gradients between the forward and the backward pass, so that those of the last step lie beside all
activations of the next. `ZeroGradAfterStep` clears them once the optimizer has stepped, which costs no time and changes
no number.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.checkpoint import checkpoint
from typing_extensions import override

from kit.config import Config
from kit.errors import ConfigError, Problem, did_you_mean, warn_caller
from kit.train.choices import Entry, lever_entries
from kit.train.fsdp import class_name, find_blocks, outermost, repeated_blocks

_NUMBERS = re.compile(r"(\d+)(?:-(\d+))?")


class GradientCheckpointing(Callback):
    """Compute the activations of blocks again in the backward pass instead of keeping them.

    Args:
        blocks: Which ones: numbers of the repeated blocks from 0 on, as "3" or "0-5", names of modules as "decoder.3",
            or class names. By default all repeated blocks of the module.

    Raises:
        ConfigError: when the fit starts, if a block is named that the module does not hold.
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
        found = chosen_blocks(module, self.blocks)
        able = [block for block in found if may_run_twice(block)]
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
            warn_caller(message)
        for block in able:
            if getattr(block.__dict__.get("forward"), "func", None) is not _checkpointed:
                layer: Any = next((part.layer_idx for part in block.modules() if hasattr(part, "layer_idx")), 0)
                block.forward = partial(_checkpointed, block.forward, layer)
                self._replaced.append(block)


def _checkpointed(forward: Callable[..., Any], layer: int, *args: Any, **options: Any) -> Any:
    """The forward of a block, which is the cache's layer of that number, to be run again by the backward pass.

    Models of transformers hand their blocks a cache of keys and values unless told `use_cache=False`. The second run
    would add to it once more, and no training reads it, so blocks run without, as under transformers' own
    checkpointing. A cache that holds something before, such as a prefix, stays.
    """
    values = [None if _is_empty_cache(value, layer) else value for value in args]
    named: Any = {name: None if _is_empty_cache(value, layer) else value for name, value in options.items()}
    return checkpoint(forward, *values, use_reentrant=False, **named)


def _is_empty_cache(value: Any, layer: int) -> bool:
    if isinstance(value, Tensor) or not (hasattr(value, "get_seq_length") and hasattr(value, "update")):
        return False
    return not value.get_seq_length(layer)


class ZeroGradAfterStep(Callback):
    """Free the gradients after each optimizer step, instead of after the next forward pass.

    It asks the module's own `optimizer_zero_grad`, as Lightning does. Whoever looks at gradients afterwards, in
    `on_train_batch_end` or `on_before_zero_grad`, finds none: `on_before_optimizer_step` has them.
    """

    def __init__(self) -> None:
        self._step = 0

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        name, parts = class_name(pl_module), (pl_module, *getattr(trainer, "callbacks"))  # noqa: B009
        looking = [part for part in parts if is_overridden("on_before_zero_grad", part)]
        message = ""
        if not pl_module.automatic_optimization:
            message = f"{name} optimizes manually, so levers.zero_grad_after_step does nothing; call "
            message += "optimizer.zero_grad() after optimizer.step() in its training_step"
        elif looking:
            message = f"on_before_zero_grad of {', '.join(map(class_name, looking))} finds no gradients, because "
            message += "levers.zero_grad_after_step frees them sooner; look at them in on_before_optimizer_step"
        if message:
            warn_caller(message)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._step = trainer.global_step

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not pl_module.automatic_optimization or trainer.global_step == self._step:
            return  # batches are still accumulated
        self._step = trainer.global_step
        following = 0 if trainer.is_last_batch else batch_idx + 1
        # That of the class: sequence chunks have an empty one in the instance.
        zero_grad = type(pl_module).optimizer_zero_grad
        for optimizer in trainer.optimizers:
            zero_grad(pl_module, trainer.current_epoch, following, optimizer)


def chosen_blocks(root: nn.Module, names: Sequence[str] | None) -> list[nn.Module]:
    """The blocks that `names` means (see `GradientCheckpointing`), in the order of the module, none inside another.

    Raises:
        ConfigError: for what the module does not hold.
    """
    blocks = outermost(repeated_blocks(root))
    if names is None:
        return blocks
    modules = dict(root.named_modules())
    found: set[nn.Module] = set()
    classes = []
    for name in names:
        if numbers := _NUMBERS.fullmatch(name):
            first, last = int(numbers[1]), int(numbers[2] or numbers[1])
            if not first <= last < len(blocks):
                has = f"its {len(blocks)} are numbered from 0 to {len(blocks) - 1}" if blocks else "it has none"
                message = f"{class_name(root)} holds no repeated blocks {name}; {has}"
                raise ConfigError([Problem("levers.checkpoint_blocks", message)])
            found.update(blocks[first : last + 1])
        elif name in modules:
            found.add(modules[name])
        elif "." in name:
            hint = did_you_mean(name, modules, otherwise="")
            raise ConfigError([Problem("levers.checkpoint_blocks", f"{class_name(root)} holds no {name}{hint}")])
        else:
            classes.append(name)
    found.update(find_blocks(root, classes))
    return outermost([module for module in modules.values() if module in found])


_FEW = 8
"""Blocks, below which those inside them are told apart."""


def blocks_by_label(root: nn.Module) -> dict[str, str]:
    """The blocks that may be checkpointed one by one: as `checkpoint_blocks` names them, to the name of the module.

    They are the repeated blocks by number; where these are few, such as the stages of a convolutional network, the
    innermost ones by name.
    """
    names = {part: name for name, part in root.named_modules()}
    repeated = repeated_blocks(root)
    outer = outermost(repeated)
    labels = {block: str(number) for number, block in enumerate(outer)}
    if len(outer) < _FEW:
        inner = [
            block for block in repeated if not any(other in repeated for other in block.modules() if other is not block)
        ]
        if len(inner) > len(outer):
            labels = {block: names[block] for block in inner}
    return {label: names[block] for block, label in labels.items() if may_run_twice(block)}


def may_run_twice(block: nn.Module) -> bool:
    """False where a second forward pass would count the batch twice in running statistics."""
    return not any(isinstance(part, _NormBase) and part.track_running_stats for part in block.modules())


def lever_callbacks(config: Config, stands_in: bool = False) -> list[Callback]:
    """Callbacks for the levers that `config` switches on; with `stands_in`, the CPU plays the part of a GPU."""
    more = {"kit.train.AttentionKernel": {"stands_in": stands_in}}
    return [instantiate(entry, **more.get(entry["class_path"], {})) for entry in lever_entries(config)]


def instantiate(entry: Entry, **more: Any) -> Any:
    """The object of an entry, as LightningCLI would make it."""
    module, _, name = entry["class_path"].rpartition(".")
    return getattr(importlib.import_module(module), name)(**entry.get("init_args", {}), **more)
