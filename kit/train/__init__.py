"""How a module is trained: the Trainer, the strategies and the memory levers, all importable by an exported config.

Names are loaded when first used, so that naming this package loads neither torch nor lightning.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kit.train.attention import AttentionKernel as AttentionKernel
    from kit.train.checkpoint_upload import CheckpointUpload as CheckpointUpload
    from kit.train.committed import CommittedConfig as CommittedConfig
    from kit.train.committed import CommittedData as CommittedData
    from kit.train.device_limit import DeviceLimit as DeviceLimit
    from kit.train.eight_bit import ShardedAdamW8bit as ShardedAdamW8bit
    from kit.train.levers import GradientCheckpointing as GradientCheckpointing
    from kit.train.loss_log import LossLog as LossLog
    from kit.train.optimizers import OptimizerChoice as OptimizerChoice
    from kit.train.resuming import WholeEpochs as WholeEpochs
    from kit.train.sequence_chunks import SequenceChunks as SequenceChunks
    from kit.train.shard import SelfShardedStrategy as SelfShardedStrategy
    from kit.train.shard import ShardStrategy as ShardStrategy
    from kit.train.strategies import make_strategy as make_strategy
    from kit.train.trainer import make_trainer as make_trainer

_HOMES = {
    "AttentionKernel": "kit.train.attention",
    "CheckpointUpload": "kit.train.checkpoint_upload",
    "CommittedConfig": "kit.train.committed",
    "CommittedData": "kit.train.committed",
    "DeviceLimit": "kit.train.device_limit",
    "GradientCheckpointing": "kit.train.levers",
    "LossLog": "kit.train.loss_log",
    "OptimizerChoice": "kit.train.optimizers",
    "SelfShardedStrategy": "kit.train.shard",
    "SequenceChunks": "kit.train.sequence_chunks",
    "ShardStrategy": "kit.train.shard",
    "ShardedAdamW8bit": "kit.train.eight_bit",
    "WholeEpochs": "kit.train.resuming",
    "make_strategy": "kit.train.strategies",
    "make_trainer": "kit.train.trainer",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'kit.train' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
