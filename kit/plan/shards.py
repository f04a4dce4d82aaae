"""Shards: how many chunks go into one object, and what is refused. A shard is what a writer writes."""

from __future__ import annotations

from collections.abc import Sequence

from kit.errors import PlanError


def fill_shard(shape: Sequence[int], chunk: Sequence[int], chunk_bytes: int, target_bytes: int) -> tuple[int, ...]:
    """Chunks packed into a shard of at most `target_bytes`, whole rows first, in C order.

    A row that does not fit is cut into parts as equal as they can be; a shard never passes the last chunk of the array.
    A chunk above the target is a shard by itself.
    """
    room, sides = max(1, target_bytes // chunk_bytes), []
    for extent, side in reversed(list(zip(shape, chunk, strict=True))):
        available = -(-extent // side)
        parts = -(-available // min(available, room))
        take = -(-available // parts)
        sides.append(take * side)
        room = room // take if parts == 1 else 1
    return tuple(reversed(sides))


def checked_shard(shard: Sequence[int], chunk: Sequence[int], dims: Sequence[str]) -> tuple[int, ...]:
    """A shard given by hand, its zeros filled from the chunk.

    Raises:
        PlanError: when it cuts through a chunk.
    """
    filled = tuple(side or inner for side, inner in zip(shard, chunk, strict=True))
    for name, side, inner in zip(dims, filled, chunk, strict=True):
        if side % inner:
            near = sorted({max(1, side // inner) * inner, -(-side // inner) * inner})
            raise PlanError(
                f"shard.{name} is {side}, which cuts through a chunk of {inner}; a shard is a multiple of the chunk, "
                f"such as {' or '.join(map(str, near))}"
            )
    return filled
