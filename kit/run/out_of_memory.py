"""What helps when a device is out of memory, in the order to try it: what costs least first.

Smaller batches come first, then what stores less of the same training, then what computes some of it again, then more
devices, then a smaller model. What a config has already is left out. Words only: how much each saves is predicted by
`kit.what_if` and measured by `kit.verify_levers`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kit.config import Config


def advice(config: Config, batch_size: int | None = None, whose: str = "") -> tuple[str, ...]:
    """Sentences with the settings to change, the first to try first.

    Args:
        config: What ran out of memory.
        batch_size: Samples per batch on each device; by default the config's.
        whose: Who makes the batches, where that is not the config.
    """
    size = config.loader.batch_size if batch_size is None else batch_size
    return (
        *_smaller_batch(config, size, whose),
        *_stored_less(config),
        *_computed_again(config),
        *_spread(config),
        *_MODEL,
    )


def _smaller_batch(config: Config, size: int, whose: str) -> Iterator[str]:
    if size > 1:
        half = size // 2
        raised = config.levers.accumulate_grad_batches * 2
        setting = f"batches of {half} from {whose}" if whose else f"loader.batch_size: {half}"
        yield (
            f"a smaller batch: {setting} with levers.accumulate_grad_batches: {raised} keeps the "
            "global batch; kit.find_batch_size finds the largest that fits"
        )


def _stored_less(config: Config) -> Iterator[str]:
    if config.hardware.precision == "32-true":
        yield "fewer bits: hardware.precision: bf16-mixed"
    if config.levers.optimizer in ("module", "adamw", "adamw-fused"):
        yield "less optimizer state: levers.optimizer: adamw-8bit"
    if config.levers.attention == "math":
        yield "attention that keeps no scores: levers.attention: flash"


def _computed_again(config: Config) -> Iterator[str]:
    if not config.levers.gradient_checkpointing:
        yield "activations computed again instead of kept: levers.gradient_checkpointing: true"
    if not config.levers.sequence_chunk:
        yield (
            "shorter sequences, or sequences in chunks: levers.sequence_chunk, for a module that has chunk_step; an "
            "attention window in the model"
        )


def _spread(config: Config) -> Iterator[str]:
    if not config.hardware.strategy.startswith("fsdp"):
        yield "the model sharded over more devices: hardware.strategy: fsdp with hardware.devices: 2 or more"


_MODEL = ("a smaller model: first its width (hidden_dim), then its number of layers",)


def as_details(sentences: Sequence[str]) -> str:
    """The advice as it stands below an error."""
    numbered = (f"  {place}. {sentence}" for place, sentence in enumerate(sentences, 1))
    return "\n".join(["What helps, in the order to try it:", *numbered])
