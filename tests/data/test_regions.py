"""Regions: the copies of all chunks together are the patches, whatever the chunks are made of."""

from __future__ import annotations

import numpy as np
import pytest

from kit.data.stream.scatter import chunk_uses, touched

SHAPE, CHUNK = (5, 9, 11), (2, 4, 3)
PATCHES = [(1, 1, 1), (2, 3, 7), (5, 9, 11), (3, 5, 1)]


def chunks_of(field, order="C"):
    """Every chunk in full, the last ones filled up."""
    chunks = {}
    for place in np.ndindex(*(-(-size // side) for size, side in zip(SHAPE, CHUNK, strict=True))):
        chunk = np.zeros(CHUNK, field.dtype, order=order)
        piece = field[tuple(slice(at * side, (at + 1) * side) for at, side in zip(place, CHUNK, strict=True))]
        chunk[tuple(map(slice, piece.shape))] = piece
        chunks[place] = chunk
    return chunks


def gathered(offsets, patch, chunks, batch):
    uses = chunk_uses(offsets, patch, CHUNK)
    for place in uses.places:
        uses.scatter(place, chunks[place], batch)
    return batch


def some_offsets(patch, samples=6):
    random = np.random.default_rng(0)
    return np.stack([random.integers(0, size - side + 1, samples) for size, side in zip(SHAPE, patch, strict=True)], 1)


@pytest.mark.parametrize("patch", PATCHES)
@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize(
    ("stored", "given"),
    [("<f4", "<f4"), ("<i2", "<i2"), (">f4", "<f4"), (">i2", "<i2"), ("u1", "u1"), ("<f8", "<f8"), ("<i2", "<f4")],
)
def test_every_element_of_every_patch_is_there_whatever_type_and_order_a_chunk_has(patch, order, stored, given):
    field = np.random.default_rng(1).integers(0, 200, SHAPE).astype(stored)
    offsets = some_offsets(patch)
    batch = gathered(offsets, patch, chunks_of(field, order), np.full((len(offsets), *patch), 7, given))
    for offset, sample in zip(offsets, batch, strict=True):
        assert np.array_equal(sample, field[tuple(map(slice, offset, offset + np.array(patch)))])


def test_bits_that_are_no_number_are_copied_as_they_are():
    field = np.frombuffer(np.random.default_rng(2).bytes(4 * np.prod(SHAPE)), np.float32).reshape(SHAPE)
    patch = PATCHES[1]
    offsets = some_offsets(patch)
    batch = gathered(offsets, patch, chunks_of(field), np.zeros((len(offsets), *patch), np.float32))
    for offset, sample in zip(offsets, batch, strict=True):
        assert sample.tobytes() == field[tuple(map(slice, offset, offset + np.array(patch)))].tobytes()


def test_a_chunk_of_fill_values_may_repeat_one_element_and_a_batch_be_one_of_several_variables():
    patch = PATCHES[1]
    offsets = some_offsets(patch)
    filled = {place: np.broadcast_to(np.float32(3), CHUNK) for place in touched(offsets, patch, CHUNK)}
    batch = np.zeros((len(offsets), 2, *patch), np.float32)
    gathered(offsets, patch, filled, batch[:, 1])
    assert (batch[:, 1] == 3).all()
    assert (batch[:, 0] == 0).all()
