"""saving: torch.save and torch.load in a dry run, where tensors have shapes and no numbers.

What is saved is kept as its shapes, and the file (or buffer) says which of them it is. Whoever loads it again gets
tensors of these shapes, made then, as from a file. Files that were saved by somebody else are loaded as ever.
"""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from kit.memory.batch_shapes import Batches, TensorShape, Writer
from kit.memory.patches import replaced

_MARK = b"kit kept this from being written: "
_LONGEST = len(_MARK) + 20


@contextlib.contextmanager
def saving_shapes() -> Iterator[None]:
    """Inside, `torch.save` writes a line, and `torch.load` knows what it stood for."""
    saved: list[Batches] = []
    load_file = torch.load

    def save(value: Any, target: Any, *_rest: Any, **_options: Any) -> None:
        saved.append(_shapes(value))
        text = _MARK + str(len(saved) - 1).encode()
        if isinstance(target, str | bytes | os.PathLike):
            Path(os.fsdecode(target)).write_bytes(text)
        else:
            target.write(text)

    def load(source: Any, *rest: Any, **options: Any) -> Any:
        number = _number(source)
        return load_file(source, *rest, **options) if number is None else saved[number].make()[0]

    with replaced(torch, "save", save), replaced(torch, "load", load):
        yield


def _shapes(value: Any) -> Batches:
    file = io.BytesIO()
    writer = Writer(file)
    writer.dump(value)
    shapes = tuple(TensorShape(tuple(tensor.shape), tensor.dtype) for tensor in writer.tensors)
    return Batches(file.getvalue(), shapes, 1)


def _number(source: Any) -> int | None:
    """Of what was saved here; None for anything else."""
    try:
        if isinstance(source, str | bytes | os.PathLike):
            with Path(os.fsdecode(source)).open("rb") as file:
                text = file.read(_LONGEST)
        else:
            place = source.tell()
            text = source.read(_LONGEST)
            source.seek(place)
    except (OSError, AttributeError):
        return None
    return int(text.removeprefix(_MARK)) if text.startswith(_MARK) else None
