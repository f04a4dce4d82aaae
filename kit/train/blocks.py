"""The repeated blocks of a module: the unit in which a model is sharded and its activations are computed again.

A block is a child of a container whose children are all of one class (the layers of a transformer, the levels of a
U-Net). Bare torch layers are not blocks: sharding or checkpointing each `Linear` costs more than it saves. Nothing is
changed here; a module without blocks gives an empty list.
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Sequence

from torch import nn
from torch.distributed.fsdp import FSDPModule

from kit.errors import ConfigError, Problem

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def class_name(module: nn.Module) -> str:
    """Name of the class as its author wrote it, also after sharding has put a class in front of it."""
    return type(module).__mro__[2 if isinstance(module, FSDPModule) else 0].__name__


def repeated_blocks(root: nn.Module) -> list[nn.Module]:
    """Blocks of `root`, outer ones before those inside them."""
    blocks = [child for container in root.modules() for child in _alike(container)]
    return list(dict.fromkeys(blocks))


def _alike(container: nn.Module) -> list[nn.Module]:
    if not isinstance(container, _CONTAINERS):
        return []
    children = [child for child in container.children() if any(True for _ in child.parameters())]
    same = len({class_name(child) for child in children}) == 1
    return children if same and len(children) > 1 and not _is_bare(children[0]) else []


def _is_bare(module: nn.Module) -> bool:
    """A layer of torch itself, or a list that is never called."""
    of_torch = type(module).__module__.startswith("torch.nn.") and not any(True for _ in module.children())
    return of_torch or isinstance(module, nn.ModuleList | nn.ModuleDict)


def named_blocks(root: nn.Module, names: Sequence[str]) -> list[nn.Module]:
    """Modules inside `root` whose class is named in `names`, outer ones first.

    Raises:
        ConfigError: when a name fits no module.
    """
    inside = [module for module in root.modules() if module is not root]
    classes = sorted({class_name(module) for module in inside})
    absent = [name for name in names if name not in classes]
    if absent:
        close = difflib.get_close_matches(absent[0], classes, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        message = f"{class_name(root)} holds no {', '.join(absent)}; it has {', '.join(classes)}{hint}"
        raise ConfigError([Problem("levers.checkpoint_blocks", message)])
    return [module for module in inside if class_name(module) in names]


def find_blocks(root: nn.Module, names: Sequence[str] | None) -> list[nn.Module]:
    """`named_blocks` when names are given, else `repeated_blocks`."""
    return repeated_blocks(root) if names is None else named_blocks(root, names)


def outermost(blocks: Sequence[nn.Module]) -> list[nn.Module]:
    """Blocks that lie in no other of them."""
    nested = {inner for block in blocks for inner in block.modules() if inner is not block}
    return [block for block in blocks if block not in nested]


def holds_its_parameters_alone(block: nn.Module, root: nn.Module) -> bool:
    """False when a parameter of `block` is also used outside it (tied): FSDP takes it in one group only."""
    inside, everywhere = _uses(block), _uses(root)
    return all(everywhere[parameter] == count for parameter, count in inside.items())


def _uses(module: nn.Module) -> Counter[int]:
    return Counter(id(parameter) for _, parameter in module.named_parameters(remove_duplicate=False))
