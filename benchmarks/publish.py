"""How a benchmark is told: one table on screen, and with `--record` one JSON line in benchmarks/results.jsonl.

    python benchmarks/publish.py NAME...   prints the newest recorded table of each name, and runs nothing

Only ratios between things measured in the same run mean anything across machines; seconds are there to make sense of
them.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).with_name("results.jsonl")


def publish(benchmark: str, rows: Sequence[dict[str, Any]], *, record: bool | None = None, **facts: Any) -> None:
    """Print `rows` (same keys each) under the benchmark's name; record them when the command line says so.

    A benchmark with arguments of its own reads the command line itself and says whether to `record`.
    """
    if record is None:
        record = read_options(benchmark).record
    show(benchmark, rows, facts)
    if record:
        machine = {"cores": os.cpu_count(), "python": platform.python_version(), "system": platform.system()}
        when = datetime.now(UTC).isoformat(timespec="seconds")
        line = {"benchmark": benchmark, "time": when, "machine": machine, "rows": list(rows), **facts}
        with RESULTS.open("a") as file:
            file.write(json.dumps(line) + "\n")


def read_options(about: str | None) -> argparse.Namespace:
    """The command line of a benchmark without arguments of its own, which reads it before it measures anything."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true", help="append the rows to benchmarks/results.jsonl")
    return parser.parse_args()


def show(benchmark: str, rows: Sequence[dict[str, Any]], facts: Mapping[str, Any]) -> None:
    print(f"\n{benchmark}")
    for line in table_lines(rows):
        print(f"  {line}")
    for name, value in facts.items():
        print(f"  {name}: {value}")


def page(tables: Mapping[str, Sequence[dict[str, Any]]], last: str) -> str:
    """Several tables as one text, each under its heading, and a last line."""
    parts = ["\n".join([heading, "", *table_lines(rows), ""]) for heading, rows in tables.items()]
    return "\n".join([*parts, last, ""])


def table_lines(rows: Sequence[dict[str, Any]]) -> list[str]:
    """A head and a line for each row; what only some rows have is empty in the others."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    lines = [names, *([_text(row.get(name, "")) for name in names] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]


def main() -> None:
    lines = map(json.loads, RESULTS.read_text().splitlines())
    newest: dict[str, dict[str, Any]] = {line.pop("benchmark"): line for line in lines}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="+", choices=sorted(newest), metavar="NAME", help="as the table is headed")
    for name in parser.parse_args().names:
        found = newest[name]
        rows = found.pop("rows")
        del found["machine"]
        show(name, rows, found)


def _text(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
