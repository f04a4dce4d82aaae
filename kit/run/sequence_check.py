"""verify_sequences: peak memory against the length of a sequence, whole and in sequence chunks; predicted | measured.

For every length the same trial runs twice, once with whole sequences and once in chunks, each in fresh processes. The
model and all else stay as they are: only the data grows. Without chunks memory grows with the length, because every
position keeps its activations; with chunks it stays nearly flat, because a step keeps one chunk, its state, and the
batch itself. A module without `chunk_step` (`kit.train.SequenceChunks`) has no second line, and the reason is said.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from kit.config import Config
from kit.errors import ConfigError, KitError, Problem
from kit.run.levers_check import Rung, not_run, run_rung
from kit.tables import html_list, html_table, text_table
from kit.units import format_bytes

_COLUMNS = ("sequences", "positions", "predicted", "measured", "ratio", "samples/s")
_STEPS = 3


@dataclass(frozen=True, slots=True, repr=False)
class SequenceCheck:
    """What a device held at each length: `whole` and `chunked` hold one rung for each of `lengths`."""

    lengths: tuple[int, ...]
    chunk: int
    """Positions of a sequence chunk."""
    whole: tuple[Rung, ...]
    chunked: tuple[Rung, ...]

    @property
    def curves(self) -> dict[str, dict[int, Rung]]:
        """Name of a line to length to what came of it."""
        named = {"whole": self.whole, f"in chunks of {self.chunk}": self.chunked}
        return {name: dict(zip(self.lengths, rungs, strict=True)) for name, rungs in named.items()}

    def growth(self, rungs: Sequence[Rung]) -> float | None:
        """Measured memory at the longest sequence as a multiple of that at the shortest."""
        first, last = rungs[0].measured_bytes, rungs[-1].measured_bytes
        return last / first if first and last else None

    @property
    def rows(self) -> list[list[str]]:
        return list(self._rows())

    def _rows(self) -> Iterator[list[str]]:
        for name, of_length in self.curves.items():
            for length, rung in of_length.items():
                sizes = [_bytes(rung.predicted_bytes), _bytes(rung.measured_bytes)]
                ratio = "–" if rung.ratio is None else f"{rung.ratio:.3f}"
                speed = "–" if rung.samples_per_second is None else f"{rung.samples_per_second:,.1f}"
                yield [name, str(length), *sizes, ratio, speed]

    @property
    def sentences(self) -> tuple[str, ...]:
        longer = self.lengths[-1] / self.lengths[0]
        grown = [
            f"{name}: {longer:.3g} times the length held {growth:.2f} times the memory"
            for name, rungs in (("whole", self.whole), ("in chunks", self.chunked))
            if (growth := self.growth(rungs)) is not None
        ]
        notes = dict.fromkeys(rung.note for rung in (*self.whole, *self.chunked) if rung.note)
        return ("memory is the peak allocated on one device", *grown, *notes)

    def __repr__(self) -> str:
        return "\n".join([text_table(_COLUMNS, self.rows), *(f"- {text}" for text in self.sentences)])

    __str__ = __repr__

    def _repr_html_(self) -> str:
        caption = f"Sequences whole and in chunks of {self.chunk} positions"
        return html_table(_COLUMNS, self.rows, caption=caption) + html_list(self.sentences)


def verify_sequences(
    module: Any, data: Any, config: Config, *, lengths: Sequence[int], chunk: int, argument: str = "context"
) -> SequenceCheck:
    """Predict and measure memory at several lengths, with and without sequence chunks, and wait for all of it.

    Args:
        module: What `kit.fit` takes as module; it must take sequences of every length as it is.
        data: A class or an import path, as `kit.fit` takes it, that is made with the length as a keyword argument.
        config: What runs, but for the length of its sequences.
        lengths: Positions of a sequence, at least two of them.
        chunk: Positions of a sequence chunk.
        argument: The keyword that takes the length.

    Raises:
        ConfigError: for fewer than two lengths, a chunk without positions, and what `kit.fit` refuses.
        TrialError: when a trial of whole sequences fails.
    """
    ordered = tuple(sorted(set(lengths)))
    if len(ordered) < 2 or ordered[0] < 1:
        message = f"{list(lengths)} draw no line; give two or more numbers of positions, 1 or more each"
        raise ConfigError([Problem("lengths", message)])
    if chunk < 1:
        raise ConfigError([Problem("chunk", f"{chunk} positions are no chunk; use 1 or more")])
    if not (isinstance(data, type | str)):
        message = f"a {type(data).__name__} has its length already; give a class or an import path, to be made with "
        raise ConfigError([Problem("data", f"{message}{argument}=length")])
    steps = {"trial.max_steps": min(_STEPS, config.trial.max_steps), "trial.warmup_steps": 1}
    short = config.replace({**steps, "levers.sequence_chunk": 0})
    configs = [_of_length(short, argument, length) for length in ordered]
    whole = tuple(run_rung("whole", module, data, one) for one in configs)
    return SequenceCheck(ordered, chunk, whole, tuple(_in_chunks(module, data, one, chunk) for one in configs))


def _of_length(config: Config, argument: str, length: int) -> Config:
    return config.replace({"data.arguments": {**config.data.arguments, argument: length}})


def _in_chunks(module: Any, data: Any, config: Config, chunk: int) -> Rung:
    try:
        return run_rung("in chunks", module, data, config.replace({"levers.sequence_chunk": chunk}))
    except KitError as error:
        return not_run("in chunks", config, str(error))


def _bytes(value: int | None) -> str:
    return "–" if value is None else format_bytes(value)
