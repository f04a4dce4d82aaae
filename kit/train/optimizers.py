"""Which optimizer a fit steps with, instead of the one the module returns, and without the module knowing.

An optimizer is turned into another kind in place: it stays the same object with the same parameter groups (learning
rates, weight decay, which parameters), so schedulers, Lightning and a module in manual optimization go on with what
they hold. Only the rule and its state change. Every optimizer that `configure_optimizers` returns is turned.

Bytes of state and temporaries per trainable parameter of p bytes: AdamW 2 p, and p more during the step (foreach, the
default on a GPU) or none (fused); 8-bit AdamW 2 bytes and one float per 128 for parameters of 4,096 elements or more
(bitsandbytes; `kit.train.eight_bit` for shards); SGD p with momentum and none without.

Private parts of torch used here, tested on its upgrade: what schedulers mark a step with (`_opt_called`,
`_wrapped_by_lr_sched`) and the names of an optimizer's hooks.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from typing_extensions import override

from kit.errors import ConfigError, KitWarning, Problem
from kit.train.eight_bit import ShardedAdamW8bit, is_installed, quiet_import

OPTIMIZERS = ("adamw", "adamw-fused", "adamw-8bit", "sgd")
"""What `levers.optimizer` offers instead of the module's own."""

_UNSET = {"foreach": None, "fused": None}


class OptimizerChoice(Callback):
    """Step with `name` wherever the module's `configure_optimizers` returns an optimizer.

    Args:
        name: One of OPTIMIZERS. `adamw-8bit` is bitsandbytes', and for sharded parameters, which its kernels do not
            take, torchao's; where that is not installed it becomes `adamw`, with a warning.

    Raises:
        ConfigError: for another name.
    """

    def __init__(self, name: str) -> None:
        if name not in OPTIMIZERS:
            raise ConfigError([Problem("levers.optimizer", f"{name!r} is none of {', '.join(OPTIMIZERS)}")])
        self.name = name
        self.used: list[str] = []
        """What each optimizer of the last fit was turned into, in the order of `configure_optimizers`."""
        self._own: Callable[[], Any] | None = None

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        self.used = []
        self._own = vars(pl_module).get("configure_optimizers")
        asked = pl_module.configure_optimizers

        @functools.wraps(asked)
        def configure_optimizers() -> Any:
            return self._turn_all(asked(), type(pl_module).__name__)

        vars(pl_module)["configure_optimizers"] = configure_optimizers

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        vars(pl_module).pop("configure_optimizers", None)
        if self._own is not None:
            vars(pl_module)["configure_optimizers"] = self._own

    def _turn_all(self, configured: Any, module_name: str) -> Any:
        optimizers = list(find_optimizers(configured))
        if not optimizers:
            message = f"levers.optimizer: {self.name} does nothing: {module_name} returns no optimizer"
            warnings.warn(message, KitWarning, stacklevel=2)
        for optimizer in optimizers:
            self.used.append(turn(optimizer, self.name))
        return configured


def find_optimizers(configured: Any) -> Iterator[Optimizer]:
    """The optimizers in what `configure_optimizers` returned, each once: alone, in lists, tuples or dicts."""
    seen: set[int] = set()
    waiting = [configured]
    while waiting:
        value = waiting.pop(0)
        if isinstance(value, Optimizer) and id(value) not in seen:
            seen.add(id(value))
            yield value
        elif isinstance(value, dict):
            waiting.append(value.get("optimizer"))
        elif isinstance(value, list | tuple):
            waiting.extend(value)


def turn(optimizer: Optimizer, name: str) -> str:
    """Turn `optimizer` into kind `name`, in place; returns the kind it became."""
    reason = _why_not_eight_bit(optimizer) if name == "adamw-8bit" else ""
    if reason:
        warnings.warn(f"levers.optimizer: adamw-8bit {reason}; AdamW is used", KitWarning, stacklevel=2)
        name = "adamw"
    before = vars(optimizer).copy()
    for group in optimizer.param_groups:
        group.update(_forced(name))
    after = _make(name, optimizer.param_groups)
    optimizer.__class__ = type(after)
    vars(optimizer).clear()
    vars(optimizer).update(vars(after))
    _keep_hooks(optimizer, before)
    if "step" in before:
        _tell_schedulers(optimizer)
    return name


def _is_sharded(groups: Iterable[dict[str, Any]]) -> bool:
    return any(isinstance(value, DTensor) for group in groups for value in group["params"])


def _why_not_eight_bit(optimizer: Optimizer) -> str:
    how = "which is not installed (pip install 'kit[eight-bit]')"
    if _is_sharded(optimizer.param_groups):
        return "" if is_installed() else f"of sharded parameters needs torchao, {how}"
    return "" if importlib.util.find_spec("bitsandbytes") is not None else f"needs bitsandbytes, {how}"


def _forced(name: str) -> dict[str, Any]:
    """What a parameter group must hold; all else in it is the module's own."""
    if name == "sgd":
        return _UNSET
    fused = {"foreach": None, "fused": True} if name == "adamw-fused" else _UNSET
    return {**fused, "decoupled_weight_decay": True}


def _make(name: str, groups: list[dict[str, Any]]) -> Optimizer:
    if name == "adamw-8bit" and _is_sharded(groups):
        return ShardedAdamW8bit(groups)
    if name == "adamw-8bit":
        with quiet_import():
            eight_bit: Any = importlib.import_module("bitsandbytes.optim")
        made: Optimizer = eight_bit.AdamW8bit(groups)
        return made
    if name == "sgd":
        return torch.optim.SGD(groups)
    return torch.optim.AdamW(groups, fused=True if name == "adamw-fused" else None)


def _keep_hooks(optimizer: Optimizer, before: dict[str, Any]) -> None:
    for name, value in before.items():
        if name.startswith("_optimizer_") and name.endswith("_hooks"):
            vars(optimizer)[name] = value


def _tell_schedulers(optimizer: Optimizer) -> None:
    """Mark each step as schedulers do when they are made; without it they warn of a wrong order of calls."""
    alive, step = weakref.ref(optimizer), type(optimizer).step

    @functools.wraps(step)
    def marked(*args: Any, **keywords: Any) -> Any:
        stepped: Any = alive()
        stepped._opt_called = True
        return step(stepped, *args, **keywords)

    marked._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.step = marked  # type: ignore[method-assign]
