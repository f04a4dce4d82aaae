"""8-bit optimizers (bitsandbytes, and torchao's states for shards) on fake tensors.

They look their quantization maps up in tables of 256 numbers, sorted in Python while the first step makes its state.
Sorting needs numbers, which a fake tensor has not, so the tables are made for real; all else is as in a real step.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
from collections.abc import Iterator
from typing import Any

from torch._subclasses import fake_tensor

from kit.memory.patches import replaced
from kit.train.eight_bit import is_installed, make_tables, quiet_import


@contextlib.contextmanager
def eight_bit_on_fakes(wanted: bool = True) -> Iterator[None]:
    """Inside, 8-bit optimizers step on fake tensors. To be entered before any fake mode.

    Args:
        wanted: Load the libraries where they are installed; else only what is loaded already is looked after.
    """
    if is_installed() if wanted else "torchao.optim" in sys.modules:
        make_tables()
    functional = _functional(wanted)
    if functional is None:
        yield
        return
    make: Any = functional.create_dynamic_map
    unset: Any = fake_tensor.unset_fake_temporarily

    def make_for_real(*args: Any, **options: Any) -> Any:
        with unset():
            return make(*args, **options)

    with replaced(functional, "create_dynamic_map", make_for_real):
        yield


def _functional(wanted: bool) -> Any:
    if wanted and importlib.util.find_spec("bitsandbytes") is not None:
        with quiet_import():
            return importlib.import_module("bitsandbytes.functional")
    return sys.modules.get("bitsandbytes.functional")
