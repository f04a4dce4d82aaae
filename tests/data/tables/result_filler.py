"""Reads the table of a folder through its cache, checking every row; run as a process of its own.

`python result_filler.py FOLDER NUMBER [STEP]`; ends with status 1 on a wrong row. Where there is a step it says `there`
when it comes to it for the first time, and stays for ever: in the middle of a draft, before the file or the marker of a
result is moved into place, or after both.
"""

import random
import sys
import time
from pathlib import Path

import pyarrow

from kit.data.tables.cache import QueryCache
from kit.data.tables.declare import open_table  # not by way of a loader, which imports torch for seconds
from kit.data.tables.source import Query, plan_partitions

MOVES_BEFORE = {"file": 0, "marker": 1, "whole": 2}


def say(text):
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def stay():
    say("there")
    time.sleep(600)


class Stuck:
    """A source that never comes to its end."""

    def __init__(self, source):
        self.source = source

    def __getattr__(self, name):
        return getattr(self.source, name)

    def read(self, query):
        yield from self.source.read(query)
        stay()


def stay_after(moves):
    """Stop once so many files were moved into place: before the next one, or right after the last."""
    move, done = Path.replace, []

    def replace(draft, target):
        if len(done) == moves:
            stay()
        done.append(move(draft, target))
        if len(done) == moves == MOVES_BEFORE["whole"]:
            stay()
        return done[-1]

    Path.replace = replace


def main(folder, number, step):
    columns = {"main_entity_column": "customer", "date_column": "time"}
    source = open_table(folder / "shop.parquet", **columns, connection={"threads": 1})
    asked = Stuck(source) if step == "draft" else source
    if step in MOVES_BEFORE:
        stay_after(MOVES_BEFORE[step])
    draw = random.Random(number)
    parts = list(plan_partitions(source, 4))
    say("begun")
    for _ in range(2):
        draw.shuffle(parts)
        for part in parts:
            query = Query(partition=part, batch_rows=10)
            found = pyarrow.Table.from_batches([*QueryCache(folder / "cache").over(asked).read(query)], source.schema())
            if found.to_pylist() != pyarrow.Table.from_batches([*source.read(query)], source.schema()).to_pylist():
                sys.exit(1)
    say("right")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), "".join(sys.argv[3:]))
