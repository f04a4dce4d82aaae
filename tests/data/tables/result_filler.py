"""Reads the table of a folder through its cache, checking every row; run as a process of its own.

`python result_filler.py FOLDER NUMBER`; ends with status 1 on a wrong row. With number -1 it says `writing` once the
first batch is on its way to the disk, and waits there for ever.
"""

import random
import sys
import time
from pathlib import Path

import event_tables
import pyarrow

from kit.data.tables.partition import plan_partitions
from kit.data.tables.query_cache import QueryCache
from kit.data.tables.source import Query


def say(text):
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


class Stuck:
    """A source that never comes to its end."""

    def __init__(self, source):
        self.source = source

    def __getattr__(self, name):
        return getattr(self.source, name)

    def read(self, query):
        yield from self.source.read(query)
        say("writing")
        time.sleep(600)


def main(folder, number):
    source = event_tables.opened(folder / "shop.parquet")
    cache = QueryCache(folder / "cache")
    if number < 0:
        [*cache.over(Stuck(source)).read(Query(batch_rows=10))]
    draw = random.Random(number)
    parts = list(plan_partitions(source, 4))
    for _ in range(2):
        draw.shuffle(parts)
        for part in parts:
            query = Query(partition=part)
            found = pyarrow.Table.from_batches([*cache.over(source).read(query)], source.schema())
            if found.to_pylist() != pyarrow.Table.from_batches([*source.read(query)], source.schema()).to_pylist():
                sys.exit(1)
    say("right")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
