"""How a module is trained: the Trainer, the strategies and the memory levers, all importable by an exported config.

Names are loaded when first used, so that naming this package loads neither torch nor lightning.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kit.checkpoints.callback import CheckpointUpload as CheckpointUpload
    from kit.train.callbacks import CommittedConfig as CommittedConfig
    from kit.train.callbacks import CommittedData as CommittedData
    from kit.train.callbacks import DeviceLimit as DeviceLimit
    from kit.train.callbacks import LossLog as LossLog
    from kit.train.callbacks import WholeEpochs as WholeEpochs
    from kit.train.fsdp import SelfShardedStrategy as SelfShardedStrategy
    from kit.train.fsdp import ShardStrategy as ShardStrategy
    from kit.train.levers import GradientCheckpointing as GradientCheckpointing
    from kit.train.optimizers import OptimizerChoice as OptimizerChoice
    from kit.train.optimizers import ShardedAdamW8bit as ShardedAdamW8bit
    from kit.train.sequences import AttentionKernel as AttentionKernel
    from kit.train.sequences import SequenceChunks as SequenceChunks
    from kit.train.trainer import make_strategy as make_strategy
    from kit.train.trainer import make_trainer as make_trainer

_HOMES = {
    "AttentionKernel": "kit.train.sequences",
    "CheckpointUpload": "kit.checkpoints.callback",
    "CommittedConfig": "kit.train.callbacks",
    "CommittedData": "kit.train.callbacks",
    "DeviceLimit": "kit.train.callbacks",
    "GradientCheckpointing": "kit.train.levers",
    "LossLog": "kit.train.callbacks",
    "OptimizerChoice": "kit.train.optimizers",
    "SelfShardedStrategy": "kit.train.fsdp",
    "SequenceChunks": "kit.train.sequences",
    "ShardStrategy": "kit.train.fsdp",
    "ShardedAdamW8bit": "kit.train.optimizers",
    "WholeEpochs": "kit.train.callbacks",
    "make_strategy": "kit.train.trainer",
    "make_trainer": "kit.train.trainer",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'kit.train' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
