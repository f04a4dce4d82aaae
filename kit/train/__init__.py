"""How a module is trained: the Trainer, the strategies and the memory levers, all importable by an exported config."""

from kit.train.levers import GradientCheckpointing as GradientCheckpointing
from kit.train.shard import SelfShardedStrategy as SelfShardedStrategy
from kit.train.shard import ShardStrategy as ShardStrategy
from kit.train.strategies import make_strategy as make_strategy
from kit.train.trainer import make_trainer as make_trainer
