"""The shop: seeded rows of any size, the same in Parquet and in DuckDB, in which tastes can be found again."""

from collections import Counter
from pathlib import Path

import pytest

from kit.data.tables.declare import read_sources
from kit.data.tables.source import Query
from kit.targets import load_target

FOLDER = Path(__file__).parents[2] / "datasets" / "shop"
write_shop = load_target(f"{FOLDER / 'generate.py'}:write_shop")
blocks = load_target(f"{FOLDER / 'generate.py'}:blocks")


@pytest.fixture(scope="module")
def shop(tmp_path_factory):
    """Its tables, as the file beside the generator describes them."""
    folder = write_shop(tmp_path_factory.mktemp("shop"), rows=6000, customers=300)
    text = (FOLDER / "sources.yaml").read_text().replace("data/shop", str(folder))
    described = folder / "sources.yaml"
    described.write_text(text)
    sources = read_sources(described)
    return {name: sources.open(name) for name in sources.names}


def rows_of(table):
    query = Query(order_by=("customer_id", "time", "price"))
    return [row for batch in table.read(query) for row in batch.to_pylist()]


def test_parquet_and_duckdb_hold_the_same_rows(shop):
    rows = rows_of(shop["purchases"])
    assert len(rows) == 6000
    assert len({row["customer_id"] for row in rows}) == 300
    assert rows == rows_of(shop["purchases_parquet"])


def test_the_seed_says_which_rows():
    first, again, other = (next(blocks(1000, 50, seed)) for seed in (0, 0, 1))
    assert first == again != other


def test_most_purchases_of_a_customer_are_of_two_categories(shop):
    of_customers = {}
    for row in rows_of(shop["purchases"]):
        of_customers.setdefault(row["customer_id"], Counter())[row["category"]] += 1
    frequent = [counts for counts in of_customers.values() if counts.total() >= 30]
    assert len(frequent) > 20
    shares = [sum(count for _, count in counts.most_common(2)) / counts.total() for counts in frequent]
    assert sum(shares) / len(shares) > 0.7  # of eight alike it would be 0.25
    assert max(counts.total() for counts in of_customers.values()) > 20 * 6000 / 300 / 4


def test_fewer_rows_than_customers_are_as_many_as_asked_for():
    assert sum(block.num_rows for block in blocks(7, 50, 0)) == 7
