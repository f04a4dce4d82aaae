"""Which lever works with which strategy in which precision: every cell is a real trial of two steps, none is guessed.

    python tests/trial/compatibility.py notebooks/compatibility.md

A cell says `works`, `works with a note` (what the trial warned of) or `refused` (the reason, from before or inside the
trial). On the CPU the strategies run over two ranks through gloo. Anything else that goes wrong is no outcome: it is
raised.
"""

from __future__ import annotations

import functools
import itertools
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from kit.config import Config
from kit.errors import ConfigError, HardwareError, TrialError
from kit.trial.trial import try_out

Outcome = Literal["works", "works with a note", "refused"]
LEVERS: dict[str, dict[str, Any]] = {
    "no lever": {},
    "accumulation": {"levers.accumulate_grad_batches": 2},
    "gradient checkpointing": {"levers.gradient_checkpointing": True},
    "zero_grad after the step": {"levers.zero_grad_after_step": True},
    "fused AdamW": {"levers.optimizer": "adamw-fused"},
    "8-bit AdamW": {"levers.optimizer": "adamw-8bit"},
    "SGD": {"levers.optimizer": "sgd"},
    "math attention": {"levers.attention": "math"},
    "flash attention": {"levers.attention": "flash"},
    "cuDNN attention": {"levers.attention": "cudnn"},
    "sequence chunks": {"levers.sequence_chunk": 4},
    "gradient clipping": {"training.gradient_clip_norm": 0.5},
}
STRATEGIES = ("none", "ddp", "fsdp")
PRECISIONS = ("32-true", "bf16-mixed", "bf16-true", "16-mixed")
_GPT = {"vocabulary": 32, "width": 16, "heads": 2, "layers": 2, "context": 16}
_SIGNS: dict[Outcome, str] = {"works": "works", "works with a note": "works", "refused": "refused"}


@dataclass(frozen=True, slots=True)
class Cell:
    """One lever under one strategy in one precision."""

    lever: str
    strategy: str
    precision: str

    def config(self, folder: Path) -> Config:
        """A small one, to be run on the CPU.

        Raises:
            ConfigError: when the combination is refused.
        """
        return Config().replace({
            "hardware.accelerator": "cpu", "hardware.devices": 1 if self.strategy == "none" else 2,
            "hardware.strategy": self.strategy, "hardware.precision": self.precision, "hardware.threads_per_rank": 1,
            "model.target": "kit.models:GPT", "model.arguments": _GPT,
            "trial.max_steps": 2, "trial.warmup_steps": 1, "trial.folder": str(folder),
            "trial.predict_memory": False, "trial.measure_memory": False, **LEVERS[self.lever],
        })  # fmt: skip


@dataclass(frozen=True, slots=True)
class Result:
    """What came of a cell."""

    cell: Cell
    outcome: Outcome
    note: str = ""


def cells() -> Iterator[Cell]:
    """Every combination, levers outermost."""
    return (Cell(*combination) for combination in itertools.product(LEVERS, STRATEGIES, PRECISIONS))


def run(cell: Cell, folder: Path) -> Result:
    """Run one cell, and wait for it.

    Raises:
        TrialError: when it fails for a reason that is no refusal of kit's.
    """
    try:
        trial = try_out(None, _data(), cell.config(folder)).wait()
    except (ConfigError, HardwareError) as error:
        return Result(cell, "refused", _plain(str(error)))
    except TrialError as error:
        if "ConfigError" not in error.details and "HardwareError" not in error.details:
            raise
        return Result(cell, "refused", _plain(str(error)))
    notes = " ".join(_plain(text) for text in trial.warnings)
    return Result(cell, "works with a note" if notes else "works", notes)


def _data() -> Any:
    from kit.models import Tokens

    return functools.partial(Tokens, vocabulary=_GPT["vocabulary"], context=_GPT["context"], batch_size=2, sequences=32)


def _plain(text: str) -> str:
    """In one line, without what differs from run to run."""
    return re.sub(r"\s+", " ", text).removesuffix(" [error]").strip()


def markdown(results: Sequence[Result]) -> str:
    """The table with its notes below, as a page."""
    notes: dict[str, int] = {}
    found = {result.cell: _shown(result, notes) for result in results}
    head = ["lever", *(f"{strategy}, {precision}" for strategy in STRATEGIES for precision in PRECISIONS)]
    lines = [_line(head), _line(["---"] * len(head))]
    for lever in LEVERS:
        row = [found[Cell(lever, *other)] for other in itertools.product(STRATEGIES, PRECISIONS)]
        lines.append(_line([lever, *row]))
    said = [f"{number}. {text}" for text, number in notes.items()]
    title = "# Which lever works with which strategy in which precision\n"
    how = (
        "Every cell is a trial of two steps on the CPU, over two ranks for ddp and fsdp; "
        "`python tests/trial/compatibility.py` writes this page, and a test holds it to what happens.\n"
    )
    return "\n".join([title, how, *lines, "", *said, ""])


def _shown(result: Result, notes: dict[str, int]) -> str:
    sign = _SIGNS[result.outcome]
    return sign if not result.note else f"{sign} ({notes.setdefault(result.note, len(notes) + 1)})"


def _line(values: Sequence[str]) -> str:
    return "| " + " | ".join(values) + " |"


def main(path: Path) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        results = [run(cell, Path(folder)) for cell in cells()]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(markdown(results), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "notebooks/compatibility.md"))
