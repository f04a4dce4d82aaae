"""This checkout beside another of kit: streaming from a simulated cloud and starting a trial, asked in turn.

    python benchmarks/versions.py ../kit-before [--record]

Each checkout runs its own `benchmarks/streaming_readers.py` and `benchmarks/startup.py` in a process of its own, so
that names may differ. The cloud is this checkout's. Ratios are medians over rounds of pairs, with their range: two
versions that are alike lie around 1.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from publish import publish, read_options
from streaming import BLOCK_LAYOUTS, LAYOUTS, SITUATION, Child
from streaming_readers import ANSWER, Question
from streaming_store import Layout, write

from kit.cloud.simulated import SimulatedCloud, simulated_cloud

ROUNDS = 5
HERE = Path(__file__).parents[1]
STARTER = f"""
import json, sys, tempfile
import startup
with tempfile.TemporaryDirectory() as folder:
    startup.warm_up()
    startup.kit_seconds(1, "warm", folder)
    for line in sys.stdin:
        print({ANSWER!r} + json.dumps(startup.kit_seconds(*json.loads(line), folder)), flush=True)
"""


class Version(Child):
    """A process of one checkout."""

    def __init__(self, checkout: Path, *command: str) -> None:
        self._checkout = checkout
        path = os.pathsep.join([str(checkout), str(checkout / "benchmarks")])
        super().__init__(*command, cwd=checkout, env=os.environ | {"PYTHONPATH": path})

    def ask(self, question: object) -> Any:
        """Raises: RuntimeError: when the process has no answer."""
        answer = super().ask(question)
        if isinstance(answer, str):
            raise RuntimeError(f"{self._checkout}: {answer}")
        return answer


def in_turn(ways: Sequence[Callable[[], float]]) -> tuple[list[float], list[float]]:
    """The two medians, and the ratio of first to second of each round, the order swapped from round to round."""
    pairs = []
    for turn in range(ROUNDS):
        order = [0, 1] if turn % 2 else [1, 0]
        found = {one: ways[one]() for one in order}
        pairs.append((found[0], found[1]))
    return [statistics.median(column) for column in zip(*pairs, strict=True)], [new / old for new, old in pairs]


def row(ways: Sequence[Callable[[], float]], **what: object) -> dict[str, object]:
    (new, old), ratios = in_turn(ways)
    shown = {"this": new, "other": old, "ratio": statistics.median(ratios), "least": min(ratios), "most": max(ratios)}
    return what | shown


def streaming_row(children: Sequence[Version], cloud: SimulatedCloud, layout: Layout, order: str) -> dict[str, object]:
    with tempfile.NamedTemporaryFile(suffix=".json") as requests:
        question = asdict(Question(
            layout=layout, url=cloud.url(layout.path), address=cloud.address, order=order, requests=requests.name,
            environment={"KIT_ENDPOINTS": os.environ["KIT_ENDPOINTS"]},
        ))  # fmt: skip
        ways = [lambda child=child: child.ask(question)["samples_per_second"] for child in children]
        return row(ways, layout=layout.name, order=order)


def streaming(checkouts: Sequence[Path]) -> list[dict[str, object]]:
    rows = []
    children = [Version(checkout, str(checkout / "benchmarks/streaming_readers.py"), "kit") for checkout in checkouts]
    for order, layouts in (("random", LAYOUTS), ("block", BLOCK_LAYOUTS)):
        for layout in layouts:
            with simulated_cloud(SITUATION) as cloud:
                write(cloud, [layout])
                rows.append(streaming_row(children, cloud, layout, order))
    for child in children:
        child.close()
    return rows


def startup(checkouts: Sequence[Path]) -> list[dict[str, object]]:
    children = [Version(checkout, "-c", STARTER) for checkout in checkouts]
    rows = []
    for start in ("warm", "cold"):
        for ranks in (1, 2):
            ways = [lambda child=child: child.ask([ranks, start])[0] for child in children]  # noqa: B023 - called now
            rows.append(row(ways, start=start, ranks=ranks))
    for child in children:
        child.close()
    return rows


def main() -> None:
    if len(sys.argv) < 2 or not (Path(sys.argv[1]) / "benchmarks/startup.py").is_file():
        raise SystemExit(f"{__file__} takes the folder of another checkout of kit")
    checkouts = [HERE, Path(sys.argv.pop(1)).resolve()]
    read_options(__doc__)
    facts = {"rounds": ROUNDS}
    publish("samples per second, two versions", streaming(checkouts), cloud=SITUATION, **facts)
    publish("seconds from click to first step, two versions", startup(checkouts), **facts)


if __name__ == "__main__":
    main()
