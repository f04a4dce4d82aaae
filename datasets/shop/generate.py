"""A shop that never was: purchases of customers who each have a taste, as Parquet and as a DuckDB file.

    python datasets/shop/generate.py --rows 50000 --customers 2000 --folder data/shop

Purchases of a customer follow one another in time; three in four are of the one or two categories the customer prefers,
so the next purchases can be predicted from the earlier ones, though never surely. Few customers buy most: their numbers
of purchases follow a power law. Prices are log-normal around a level for each category. The same seed gives the same
rows on any machine. Rows are made and written block by block, so size costs disk and not memory.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

CATEGORIES = ("books", "coffee", "garden", "games", "kitchen", "music", "sports", "toys")
_NOUNS = {
    "books": ("novel", "atlas", "cookbook", "diary"), "coffee": ("beans", "grinder", "filter", "cup"),
    "garden": ("rake", "seeds", "hose", "pot"), "games": ("puzzle", "cards", "dice", "console"),
    "kitchen": ("pan", "knife", "kettle", "bowl"), "music": ("record", "strings", "headphones", "drum"),
    "sports": ("ball", "racket", "shoes", "bottle"), "toys": ("train", "doll", "blocks", "kite"),
}  # fmt: skip
_WORDS = ("small", "large", "red", "green", "blue", "wooden", "steel", "classic", "light", "new")
_LEVELS = (18.0, 12.0, 35.0, 40.0, 30.0, 25.0, 45.0, 20.0)
_START = np.datetime64("2025-01-01T00:00:00", "us")
_YEAR_MICROSECONDS = 365 * 86_400 * 1_000_000
_BLOCK_ROWS = 500_000
_FIRST_CUSTOMER = 1000
SCHEMA = pa.schema([
    ("customer_id", pa.int64()), ("time", pa.timestamp("us")), ("category", pa.string()), ("price", pa.float64()),
    ("title", pa.string()),
])  # fmt: skip


def write_shop(folder: str | Path, rows: int = 50_000, customers: int = 2_000, seed: int = 0) -> Path:
    """Write `purchases/part-000.parquet`, ... and the same rows as table `purchases` of `shop.duckdb`; the folder."""
    import duckdb

    folder = Path(folder)
    parts, database = folder / "purchases", folder / "shop.duckdb"
    parts.mkdir(parents=True, exist_ok=True)
    for old in (*parts.glob("part-*.parquet"), database):
        old.unlink(missing_ok=True)
    for place, block in enumerate(blocks(rows, customers, seed)):
        pq.write_table(block, parts / f"part-{place:03}.parquet", row_group_size=50_000)
    with duckdb.connect(str(database)) as opened:
        files = [str(file) for file in sorted(parts.glob("*.parquet"))]
        opened.read_parquet(files).create("purchases")
    return folder


def blocks(rows: int, customers: int, seed: int) -> Iterator[pa.Table]:
    """The rows in order of the customers, at most half a million at a time."""
    random = np.random.default_rng(seed)
    buyers = _buyers(random, rows, customers)
    tastes = random.integers(0, len(CATEGORIES), (customers, 2))
    for first in range(0, rows, _BLOCK_ROWS):
        yield _block(random, buyers[first : first + _BLOCK_ROWS], tastes)


def _buyers(random: np.random.Generator, rows: int, customers: int) -> NDArray[np.int64]:
    """Who bought, a number of 1000 upwards for each row: few of them most of the time, all of them if rows allow."""
    weights = random.permutation(1.0 / np.arange(1, customers + 1) ** 0.7)
    counts = random.multinomial(max(0, rows - customers), weights / weights.sum())
    counts += np.arange(customers) < rows
    return np.repeat(np.arange(customers, dtype=np.int64) + _FIRST_CUSTOMER, counts)


def _block(random: np.random.Generator, buyers: NDArray[np.int64], tastes: NDArray[np.int64]) -> pa.Table:
    size = len(buyers)
    preferred = tastes[buyers - _FIRST_CUSTOMER, (random.random(size) < 0.3).astype(int)]
    category = np.where(random.random(size) < 0.75, preferred, random.integers(0, len(CATEGORIES), size))
    moments = random.integers(0, _YEAR_MICROSECONDS, size)
    moments = moments[np.lexsort((moments, buyers))]  # buyers are in order, so only their own moments are sorted
    price = np.round(np.asarray(_LEVELS)[category] * np.exp(0.4 * random.standard_normal(size)), 2)
    word, noun = random.integers(0, len(_WORDS), size), random.integers(0, 4, size)
    names = [CATEGORIES[place] for place in category]
    columns: list[Any] = [
        buyers, _START + moments.astype("timedelta64[us]"), names, price,
        [f"{_WORDS[w]} {_NOUNS[name][n]}" for w, n, name in zip(word, noun, names, strict=True)],
    ]  # fmt: skip
    return pa.table(columns, schema=SCHEMA)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=50_000)
    parser.add_argument("--customers", type=int, default=2_000)
    parser.add_argument("--folder", default="data/shop")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    write_shop(given.folder, given.rows, given.customers, given.seed)


if __name__ == "__main__":
    main()
