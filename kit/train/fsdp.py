"""ShardStrategy: any LightningModule sharded with FSDP2, on GPUs or, for tests and teaching, on CPUs through gloo.

The ranks form a mesh of (replicas, shard size): parameters, gradients and optimizer states are split over the shard
size, and gradients are averaged over all ranks. Every rank reads its own batches. Losses equal those of plain data
parallelism up to the order of additions. The invariant: all ranks start from the weights of rank 0, whatever their
seeds, as under data parallelism.

The unit that is gathered at a time, and whose activations gradient checkpointing computes again, is a repeated block: a
child of a container whose children are all of one class (the layers of a transformer, the levels of a U-Net). Bare
torch layers are not blocks: sharding or checkpointing each `Linear` costs more than it saves. What lies in no block is
gathered as one unit.

Known limits: each rank builds the whole module on the host before it is split (make the layers on the meta device in
`configure_model` if that is too much), and accumulation reduces gradients on every micro-batch, because keeping them
whole would need the memory that sharding saves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from lightning.fabric.utilities.init import _materialize_distributed_module
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import ModelParallelStrategy, ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy
from typing_extensions import override

from kit.errors import ConfigError, Problem, did_you_mean, first_few
from kit.train.sequences import is_chunked

# A module is fitted again by a learning-rate search, and can be sharded only once.
_SHARDED_HERE: WeakSet[nn.Module] = WeakSet()
_LISTS = (nn.ModuleList, nn.ModuleDict)
_CONTAINERS = (*_LISTS, nn.Sequential)
_NAMED = 3
"""Names in an error."""
_STEPS = ("training_step", "validation_step", "test_step", "predict_step")


def check_shards(replicas: int, shard_size: int, world_size: int) -> None:
    """Refuse a mesh that does not use every device once.

    Raises:
        ConfigError: with the product and the number of devices.
    """
    if replicas < 1 or shard_size < 1 or replicas * shard_size != world_size:
        fitting = ", ".join(f"fsdp:{r}:{world_size // r}" for r in range(1, world_size + 1) if world_size % r == 0)
        message = (
            f"fsdp:{replicas}:{shard_size} needs {replicas} × {shard_size} = {replicas * shard_size} devices, this run "
            f"has {world_size}; {fitting} would fit"
        )
        raise ConfigError([Problem("hardware.strategy", message)])


class ShardStrategy(ModelParallelStrategy):
    """FSDP2 for a module that knows nothing of it.

    A module in manual optimization runs its backward inside `training_step`, so that method cannot gather parameters.
    There, each child module gathers its own when called; a module that calls other methods of its own instead may name
    them in a class attribute `fsdp_forward_methods`.

    Args:
        replicas: Copies of the model.
        shard_size: Devices each copy is split over; by default the world size divided by `replicas`.
        blocks: Class names of the units gathered at a time; by default the repeated blocks. An empty list gathers
            the module as one unit, which any module bears.
        save_distributed_checkpoint: Save one file per rank instead of assembling the model on rank 0.
        process_group_backend: `gloo` or `nccl`; by default what fits the device.
    """

    def __init__(
        self,
        replicas: int = 1,
        shard_size: int | None = None,
        blocks: list[str] | None = None,
        save_distributed_checkpoint: bool = False,
        process_group_backend: str | None = None,
    ) -> None:
        super().__init__(
            data_parallel_size=1,
            tensor_parallel_size=1,
            save_distributed_checkpoint=save_distributed_checkpoint,
            process_group_backend=process_group_backend,
        )
        self.replicas = replicas
        self.shard_size = shard_size
        self.blocks = blocks

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    @override
    def setup_environment(self) -> None:
        """Join the ranks into a mesh.

        Raises:
            ConfigError: when replicas × shard size is not the world size.
        """
        shard_size = self.shard_size or max(1, self.world_size // max(1, self.replicas))
        check_shards(self.replicas, shard_size, self.world_size)
        ParallelStrategy.setup_environment(self)
        self._setup_distributed()
        self._device_mesh = init_device_mesh(
            self.root_device.type, (self.replicas, shard_size), mesh_dim_names=("replicate", "shard")
        )
        if self.lightning_module is not None:
            self.lightning_module._device_mesh = self._device_mesh

    @override
    def setup(self, trainer: Trainer) -> None:
        """Shard the module, then make its optimizers over the shards."""
        if self.accelerator is None or self.model is None:
            raise RuntimeError("ShardStrategy.setup is called by a Trainer, once it has a module")
        self.accelerator.setup(trainer)
        if self.model not in _SHARDED_HERE:
            if _is_sharded(self.model):
                raise ConfigError(
                    f"{type(self.model).__name__} shards itself in configure_model; use SelfShardedStrategy, as "
                    "kit.fit does",
                    "ShardStrategy",
                )
            _refuse_scalars(self.model)
            self.model = self.precision_plugin.convert_module(self.model)
            mesh = self.device_mesh if self.replicas > 1 else self.device_mesh["shard"]
            units = _units(self.model, self.blocks)
            _refuse_mixed_types(units)
            for unit in units:
                _take_weights_of_rank_0(unit, self.root_device)
                # Left to itself, a unit with no unit around it stays whole after a forward without a backward, and does
                # not see that its parameters are frozen or thawed then, as by optimizers that take turns.
                fully_shard(unit, mesh=mesh, reshard_after_forward=None if unit is self.model else True)
            _materialize_distributed_module(self.model, self.root_device)
            for name in _gathering_methods(self.model):
                register_fsdp_forward_method(self.model, name)
            _SHARDED_HERE.add(self.model)
        self.model_to_device()
        self.barrier()
        fitting = trainer.state.fn == TrainerFn.FITTING
        if fitting:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        if fitting:
            _optimizers_to_device(self.optimizers, self.root_device)


class SelfShardedStrategy(ModelParallelStrategy):
    """Lightning's ModelParallelStrategy, for a module that shards itself in `configure_model`.

    It mends two things that Lightning lets pass: ranks whose weights differ before they are sharded, and a module that
    shards nothing, whose ranks would train apart. Layers made in `configure_model` need the same seed on all ranks.
    """

    @override
    def setup_environment(self) -> None:
        """Join the ranks into Lightning's mesh, and agree on the weights made so far."""
        super().setup_environment()
        if self.lightning_module is not None:
            _take_weights_of_rank_0(self.lightning_module, self.root_device)

    @override
    def setup(self, trainer: Trainer) -> None:
        """Check that the module is sharded, then go on as Lightning does.

        Raises:
            ConfigError: when `configure_model` left every parameter whole on several ranks.
        """
        if self.world_size > 1 and self.model is not None and not _is_sharded(self.model):
            raise ConfigError(
                f"{type(self.model).__name__}.configure_model sharded nothing, so its {self.world_size} ranks would "
                "train apart; call fully_shard there with self.device_mesh, or make the layers in __init__ and kit "
                "shards them",
                "hardware.strategy",
            )
        super().setup(trainer)


def _refuse_scalars(module: nn.Module) -> None:
    """Raises: ConfigError: for parameters without a dimension, which no device could have a share of."""
    names = [name for name, parameter in module.named_parameters() if not is_lazy(parameter) and not parameter.dim()]
    if names:
        message = (
            f"fsdp shards no parameter without a dimension, as {first_few(names, _NAMED)}; give it one "
            "(torch.zeros(1) instead of torch.tensor(0.0)), or take ddp"
        )
        raise ConfigError([Problem("hardware.strategy", message)])


def _refuse_mixed_types(units: Sequence[nn.Module]) -> None:
    """Raises: ConfigError: where parameters that are gathered at once are of several number formats."""
    seen: set[nn.Parameter] = set()
    for unit in units:
        own = [one for one in unit.parameters() if one not in seen]
        seen.update(own)
        formats = sorted({str(one.dtype).removeprefix("torch.") for one in own if one.requires_grad})
        if len(formats) > 1:
            message = (
                f"fsdp gathers {class_name(unit)} at once, whose parameters are of {' and '.join(formats)}; take ddp"
            )
            raise ConfigError([Problem("hardware.strategy", message)])


def _is_sharded(module: nn.Module) -> bool:
    return any(isinstance(parameter, DTensor) for parameter in module.parameters())


def _is_manual(module: nn.Module) -> bool:
    return not getattr(module, "automatic_optimization", True)


def _declared_methods(module: nn.Module) -> tuple[str, ...]:
    return tuple(getattr(module, "fsdp_forward_methods", ()))


def _gathering_methods(module: nn.Module) -> list[str]:
    """Methods that gather the root's parameters when called, besides `forward`.

    A backward inside such a method would run before FSDP's post-forward hook and give wrong gradients in silence.
    """
    steps = _STEPS[1:] if _is_manual(module) or is_chunked(module) else _STEPS
    chunked = ("chunk_step",) if is_chunked(module) else ()
    names = dict.fromkeys((*steps, *chunked, *_declared_methods(module)))
    return [name for name in names if hasattr(module, name)]


def _units(module: nn.Module, names: Sequence[str] | None) -> list[nn.Module]:
    """Modules to shard, inner ones first; the root comes last and takes whatever parameters are left."""
    candidates = find_blocks(module, names)
    if _is_manual(module) and not _declared_methods(module):
        callable_children = [
            child for child in module.children() if not isinstance(child, nn.ModuleList | nn.ModuleDict)
        ]
        candidates = [*callable_children, *candidates]
    candidates = list(dict.fromkeys(reversed(candidates)))
    alone = holding_their_parameters_alone(candidates, module)
    inner = [unit for unit in alone if any(True for _ in unit.parameters())]
    covered = {parameter for unit in inner for parameter in unit.parameters()}
    loose = any(parameter not in covered for parameter in module.parameters())
    return [*inner, module] if loose or not _is_manual(module) or _declared_methods(module) else inner


def unit_sizes(module: nn.Module) -> list[tuple[str, list[int], list[int]]]:
    """What fsdp would gather at a time: name, and elements of each parameter that has a gradient and that has none.

    The names are of parts of `module`, which itself has an empty one. Empty where its own code would say what is
    gathered, or where fsdp would refuse it.
    """
    if is_overridden("configure_model", module) or _is_manual(module) or is_chunked(module):
        return []
    units, names, seen = _units(module, None), {part: name for name, part in module.named_modules()}, set()
    found = []
    try:
        _refuse_scalars(module)
        _refuse_mixed_types(units)
    except ConfigError:
        return []
    for unit in units:
        own = [one for one in unit.parameters() if one not in seen]
        seen.update(own)
        with_gradient = [one.numel() for one in own if one.grad is not None]
        found.append((names[unit], with_gradient, [one.numel() for one in own if one.grad is None]))
    return found


@torch.no_grad()
def _take_weights_of_rank_0(module: nn.Module, device: torch.device) -> None:
    """Overwrite parameters and buffers with those of rank 0, one at a time on `device`; they stay where they are."""
    for tensor in (*module.parameters(), *module.buffers()):
        if isinstance(tensor, DTensor) or tensor.is_meta:
            continue
        # Bytes, because gloo and nccl each lack some number formats.
        data = tensor.data.to(device).contiguous().reshape(-1).view(torch.uint8)
        dist.broadcast(data, src=0)
        tensor.data.copy_(data.view(tensor.dtype).reshape(tensor.shape))


def class_name(module: nn.Module) -> str:
    """Name of the class as its author wrote it, also after sharding has put a class in front of it."""
    return type(module).__mro__[2 if isinstance(module, FSDPModule) else 0].__name__


def repeated_blocks(root: nn.Module) -> list[nn.Module]:
    """Blocks of `root`, outer ones before those inside them.

    They are the modules of one class that make up a list, or that recur in its lists, as attention and feed-forward do
    in a list of pairs.
    """
    blocks: dict[nn.Module, None] = {}
    for container in root.modules():
        if isinstance(container, _CONTAINERS):
            children = [child for child in container.children() if any(True for _ in child.parameters())]
            if len(children) > 1 and len({class_name(child) for child in children}) == 1:
                first = children[0]
                is_layer = type(first).__module__.startswith("torch.nn.") and not any(True for _ in first.children())
                if isinstance(first, _LISTS):
                    blocks |= dict.fromkeys(_recurring(children))
                elif not is_layer:
                    blocks |= dict.fromkeys(children)
    return list(blocks)


def _recurring(lists: Sequence[nn.Module]) -> list[nn.Module]:
    """What holds other modules and a matrix, and has its class in several of the lists, which are never called."""
    called = [[part for part in _called_in(one) if _is_block(part)] for one in lists]
    count = Counter(name for parts in called for name in {class_name(part) for part in parts})
    return [part for parts in called for part in parts if count[class_name(part)] > 1]


def _called_in(container: nn.Module) -> Iterator[nn.Module]:
    for child in container.children():
        if isinstance(child, _LISTS):
            yield from _called_in(child)
        else:
            yield child


def _is_block(part: nn.Module) -> bool:
    """False for layers and for norms, which are too small to be gathered or computed again by themselves."""
    return any(True for _ in part.children()) and any(parameter.dim() > 1 for parameter in part.parameters())


def find_blocks(root: nn.Module, names: Sequence[str] | None) -> list[nn.Module]:
    """Modules inside `root` whose class is named in `names`, outer ones first; its repeated blocks for None.

    Raises:
        ConfigError: when a name fits no module.
    """
    if names is None:
        return repeated_blocks(root)
    inside = [module for module in root.modules() if module is not root]
    classes = sorted({class_name(module) for module in inside})
    absent = [name for name in names if name not in classes]
    if absent:
        hint = did_you_mean(absent[0], classes, otherwise="")
        message = f"{class_name(root)} holds no {', '.join(absent)}; it has {', '.join(classes)}{hint}"
        raise ConfigError([Problem("levers.checkpoint_blocks", message)])
    return [module for module in inside if class_name(module) in names]


def outermost(blocks: Sequence[nn.Module]) -> list[nn.Module]:
    """Blocks that lie in no other of them."""
    nested = {inner for block in blocks for inner in block.modules() if inner is not block}
    return [block for block in blocks if block not in nested]


def holding_their_parameters_alone(blocks: Sequence[nn.Module], root: nn.Module) -> list[nn.Module]:
    """Those of `blocks` of which no parameter is also used outside (tied): FSDP takes it in one group only."""
    everywhere = _uses(root)  # counted once: asking it of each of hundreds of blocks takes seconds
    return [block for block in blocks if all(everywhere[one] == count for one, count in _uses(block).items())]


def _uses(module: nn.Module) -> Counter[int]:
    """How often each parameter has a name inside, by its id."""
    return Counter(id(parameter) for _, parameter in module.named_parameters(remove_duplicate=False))
