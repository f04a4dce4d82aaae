"""Which optimizer a fit steps with, instead of the one the module returns, and without the module knowing.

An optimizer is turned into another kind in place: it stays the same object with the same parameter groups (learning
rates, weight decay, which parameters), so schedulers, Lightning and a module in manual optimization go on with what
they hold. Only the rule and its state change. Every optimizer that `configure_optimizers` returns is turned.

Bytes of state and temporaries per trainable parameter of p bytes: AdamW 2 p, and p more during the step (foreach, the
default on a GPU) or none (fused); 8-bit AdamW 2 bytes and one float per 128 for parameters of 4,096 elements or more
(bitsandbytes; `ShardedAdamW8bit` for shards); SGD p with momentum and none without.

`ShardedAdamW8bit` is AdamW with 8-bit state for parameters that are shards, in torchao's numbers. The state of a
parameter is two tensors of torchao's `OptimState8bit`: one byte an element, one float for each block of 256 and a table
of 256 floats, twice. A shard below 4,096 elements, or whose size is no multiple of 256, keeps 32 bits as it does in
torchao (pytorch/ao#4912): how much is saved depends a little on the number of devices. torchao's own step compiles
itself, which takes some twenty seconds in every fresh process; uncompiled it makes forty bytes for each element of the
largest shard, more than its 8 bits save. Here the same arithmetic runs on slices of SLICE elements, so that temporaries
stay below 64 MiB whatever the model, and nothing is compiled. A checkpoint holds the state as plain numbers, so that it
can be resumed on another number of devices, and by another AdamW.

Private parts used here, tested on each upgrade: of torch, what schedulers mark a step with (`_opt_called`,
`_wrapped_by_lr_sched`) and the names of an optimizer's hooks; of torchao, `single_param_adam`, `OptimState8bit` and its
tables.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import logging
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from typing_extensions import override

from kit.errors import ConfigError, Problem, warn_caller

OPTIMIZERS = ("adamw", "adamw-fused", "adamw-8bit", "sgd")
"""What `levers.optimizer` offers instead of the module's own."""


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
        original = pl_module.configure_optimizers

        @functools.wraps(original)
        def configure_optimizers() -> Any:
            configured = original()
            optimizers = list(find_optimizers(configured))
            if not optimizers:
                message = f"{self.name} does nothing: {type(pl_module).__name__} returns no optimizer"
                warn_caller(f"levers.optimizer: {message}")
            self.used += [turn(optimizer, self.name) for optimizer in optimizers]
            return configured

        vars(pl_module)["configure_optimizers"] = configure_optimizers

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        vars(pl_module).pop("configure_optimizers", None)
        if self._own is not None:
            vars(pl_module)["configure_optimizers"] = self._own


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
    if name == "adamw-8bit":
        sharded, how = _is_sharded(optimizer.param_groups), "which is not installed (pip install 'kit[eight-bit]')"
        if not (is_installed() if sharded else importlib.util.find_spec("bitsandbytes")):
            reason = f"of sharded parameters needs torchao, {how}" if sharded else f"needs bitsandbytes, {how}"
            warn_caller(f"levers.optimizer: adamw-8bit {reason}; AdamW is used")
            name = "adamw"
    before = vars(optimizer).copy()
    for group in optimizer.param_groups:  # all else in a group is the module's own
        group.update(foreach=None, fused=True if name == "adamw-fused" else None)
        if name != "sgd":
            group.update(decoupled_weight_decay=True)
    after = _make(name, optimizer.param_groups)
    optimizer.__class__ = type(after)
    vars(optimizer).clear()
    vars(optimizer).update(vars(after))
    for key, value in before.items():
        if key.startswith("_optimizer_") and key.endswith("_hooks"):
            vars(optimizer)[key] = value
    if "step" in before:
        _mark_steps(optimizer)
    return name


def _is_sharded(groups: Iterable[dict[str, Any]]) -> bool:
    return any(isinstance(value, DTensor) for group in groups for value in group["params"])


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


def _mark_steps(optimizer: Optimizer) -> None:
    """Mark each step as schedulers do when they are made; without it they warn of a wrong order of calls."""
    alive, step = weakref.ref(optimizer), type(optimizer).step

    @functools.wraps(step)
    def marked(*args: Any, **keywords: Any) -> Any:
        stepped: Any = alive()
        stepped._opt_called = True
        return step(stepped, *args, **keywords)

    marked._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.step = marked  # type: ignore[method-assign]


SLICE = 1 << 20
"""Elements that are stepped at a time; a multiple of the block."""
_BLOCK, _LEAST = 256, 4096
_AVERAGES = {"exp_avg": True, "exp_avg_sq": False}
"""What is kept of a parameter, and whether it has a sign."""
_LOUD = ("bitsandbytes", "torchao", "torch.utils._pytree")


@contextlib.contextmanager
def quiet_import() -> Iterator[None]:
    """Both libraries log, while they are loaded, that kernels are missing which no optimizer uses."""
    levels = {name: logging.getLogger(name).level for name in _LOUD}
    for name in _LOUD:
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)


def is_installed() -> bool:
    """Whether torchao can be imported."""
    return importlib.util.find_spec("torchao") is not None


def _torchao(module: str) -> Any:
    with quiet_import():
        return importlib.import_module(f"torchao.optim.{module}")


def make_tables() -> None:
    """Compute torchao's tables from real numbers, also in a dry run: it keeps what it computes first."""
    states = _torchao("subclass_8bit")
    with unset_fake_temporarily():
        states.get_qmap_signed()
        states.get_qmap_unsigned()


class ShardedAdamW8bit(Optimizer):
    """AdamW (Loshchilov and Hutter 2019) with decoupled decay and block-wise 8-bit state (Dettmers et al. 2022).

    Args:
        params: Parameters or parameter groups; whole ones are taken too.
        lr: Learning rate.
        betas: Decay of both averages.
        eps: Added to the root of the second average.
        weight_decay: Fraction of a parameter, times the learning rate, that each step takes away.

    Raises:
        ImportError: when torchao is not installed.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self._zeros: Callable[..., Tensor] = _torchao("subclass_8bit").OptimState8bit.zeros
        self._update: Callable[..., None] = _torchao("adam").single_param_adam

    @override
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step; `closure`, when given, makes the gradients first and its answer is returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step(parameter, group)
        return loss

    def _step(self, parameter: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.tensor(0.0)
            state.update({name: self._new(parameter, signed) for name, signed in _AVERAGES.items()})
        state["step"] += 1
        kept = (parameter.detach(), parameter.grad, *(state[name] for name in _AVERAGES))
        for value, gradient, average, square in zip(*(_slices(_local(tensor)) for tensor in kept), strict=True):
            self._update(
                value, gradient, state["step"], average, square, None, group["lr"], *group["betas"],
                group["weight_decay"], group["eps"], True, False,
            )  # fmt: skip

    def _new(self, parameter: Tensor, signed: bool) -> Tensor:
        """Zeros in as many bits as the shard is given."""
        shard = _local(parameter.detach())
        small = shard.numel() < _LEAST or shard.numel() % _BLOCK
        made = torch.zeros_like(shard) if small else self._zeros(shard.shape, signed, _BLOCK, shard.device, shard.dtype)
        return _like(parameter, made)

    @override
    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """As AdamW has it: averages as plain numbers."""
        found = super().state_dict()
        found["state"] = {place: dict(state) for place, state in found["state"].items()}
        for state in found["state"].values():
            for name, value in state.items():
                shard: Any = _local(value)
                if hasattr(shard, "codes"):
                    state[name] = _like(value, shard.dequantize(shard.dtype))
        return found

    @override
    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the state of any AdamW, in 8 bits where they are used."""
        super().load_state_dict(state_dict)
        for parameter, state in self.state.items():
            for name in _AVERAGES.keys() & state.keys():
                narrow = self._new(parameter, _AVERAGES[name])
                _local(narrow).copy_(_local(state[name]))
                state[name] = narrow


def _like(whole: Tensor, shard: Tensor) -> Tensor:
    """`shard` as that of a tensor which is sharded as `whole` is; itself when that is not sharded."""
    if not isinstance(whole, DTensor):
        return shard
    return DTensor.from_local(
        shard, whole.device_mesh, whole.placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


def _local(tensor: Any) -> Tensor:
    """The shard that this rank holds."""
    shard: Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return shard


def _slices(tensor: Any) -> Iterator[Tensor]:
    """Views of SLICE elements, of numbers or of their 8 bits."""
    count = tensor.numel()
    for start in range(0, count, SLICE):
        end = min(start + SLICE, count)
        if hasattr(tensor, "codes"):
            codes, scale = tensor.codes.view(-1)[start:end], tensor.scale[start // _BLOCK : end // _BLOCK]
            yield type(tensor)(codes, scale, tensor.qmap, tensor.signed, tensor.dtype)
        else:
            yield tensor.view(-1)[start:end]
