"""How a module is trained: the Trainer, the strategies and the memory levers, all importable by an exported config.

Names are loaded when first used, so that naming this package loads neither torch nor lightning.
"""

from typing import TYPE_CHECKING

from kit.registry import lazy

if TYPE_CHECKING:
    from kit.checkpoints.callback import CheckpointUpload as CheckpointUpload
    from kit.train.callbacks import CommittedConfig as CommittedConfig
    from kit.train.callbacks import CommittedData as CommittedData
    from kit.train.callbacks import LossLog as LossLog
    from kit.train.callbacks import WholeEpochs as WholeEpochs
    from kit.train.device_limit import DeviceLimit as DeviceLimit
    from kit.train.fsdp import SelfShardedStrategy as SelfShardedStrategy
    from kit.train.fsdp import ShardStrategy as ShardStrategy
    from kit.train.levers import GradientCheckpointing as GradientCheckpointing
    from kit.train.levers import ZeroGradAfterStep as ZeroGradAfterStep
    from kit.train.optimizers import OptimizerChoice as OptimizerChoice
    from kit.train.optimizers import ShardedAdamW8bit as ShardedAdamW8bit
    from kit.train.sequences import AttentionKernel as AttentionKernel
    from kit.train.sequences import SequenceChunks as SequenceChunks
    from kit.train.trainer import make_strategy as make_strategy
    from kit.train.trainer import make_trainer as make_trainer

__getattr__, __dir__ = lazy(__name__)
