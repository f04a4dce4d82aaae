"""Features: the same for every number of query chunks, columns at once and workers; rows of an entity in any order."""

import datetime
import hashlib
import json
import math
import random
import re
import statistics

import pyarrow
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from memory_table import MemoryTable
from properties import examples

import kit
from kit.config import Config
from kit.data.tables.features import DEPTH, Features, sketch_width
from kit.data.tables.fit import fit_features
from kit.data.tables.source import Query
from kit.data.tables.statistics import MOST_WORDS
from kit.errors import ConfigError, PartitionError, QueryError, SchemaChangedError

START = datetime.datetime(2026, 1, 1)
TYPES = pyarrow.schema(
    {
        "customer": pyarrow.int64(), "time": pyarrow.timestamp("us"), "kind": pyarrow.string(),
        "price": pyarrow.float64(), "title": pyarrow.string(), "member": pyarrow.bool_(),
    }
)  # fmt: skip
KINDS = {"title": "text"}
PRICES = st.none() | st.floats(-1e9, 1e9) | st.sampled_from([math.inf, math.nan, 1e300, -0.0])
ROWS = st.lists(
    st.fixed_dictionaries(
        {
            "customer": st.integers(-3, 3),
            "time": st.none() | st.integers(0, 5).map(lambda days: START + datetime.timedelta(days=days)),
            "kind": st.none() | st.sampled_from("abcd"),
            "price": PRICES,
            "title": st.none() | st.sampled_from(["", "Red shoes", "red  SHOES!", "two red shoes", "Schuh übergroß"]),
            "member": st.none() | st.booleans(),
        }
    ),
    max_size=30,
)


def queries(chunks=1, at_once=1, cpus=1, batch_rows=65_536):
    return Config().replace(
        {
            "queries.fit_query_chunks": chunks, "queries.num_concurrent_features": at_once,
            "queries.num_cpus": cpus, "queries.batch_rows": batch_rows,
        }
    )  # fmt: skip


def table_of(rows):
    return pyarrow.Table.from_pylist(rows, TYPES)


def some_rows(count=200, seed=0):
    draw = random.Random(seed)
    return [
        {
            "customer": draw.randrange(20), "time": START + datetime.timedelta(hours=draw.randrange(5000)),
            "kind": draw.choice("aaabbc"), "price": draw.gauss(30, 5), "title": draw.choice(["red shoes", "blue hat"]),
            "member": draw.random() < 0.5,
        }
        for _ in range(count)
    ]  # fmt: skip


def fitted(rows, config=None, source=MemoryTable, **changes):
    return fit_features(source(table_of(rows)), config, kinds=KINDS, announce=None, **changes)


@examples(40)
@given(
    rows=ROWS, chunks=st.integers(1, 5), at_once=st.integers(1, 4), cpus=st.integers(1, 4),
    batch_rows=st.integers(1, 10), seed=st.integers(0, 99),
)  # fmt: skip
def test_fitting_is_the_same_for_any_cut_and_any_concurrency(rows, chunks, at_once, cpus, batch_rows, seed):
    shuffled = random.Random(seed).sample(rows, len(rows))
    assert fitted(shuffled, queries(chunks, at_once, cpus, batch_rows)) == fitted(rows)


@examples(25)
@given(rows=ROWS, seed=st.integers(0, 99), dated=st.booleans())
def test_neither_order_nor_company_changes_a_bit_of_an_entity(rows, seed, dated):
    features = fit_features(MemoryTable(table_of(rows), date_column="time" * dated), kinds=KINDS, announce=None)
    together = features.encode(table_of(random.Random(seed).sample(rows, len(rows))))
    assert len(together["entity"]) == len({row["customer"] for row in rows})
    for place, customer in enumerate(together["entity"].tolist()):
        alone = features.encode(table_of([row for row in rows if row["customer"] == customer]))
        for name, values in alone.items():
            torch.testing.assert_close(values[0], together[name][place], rtol=0, atol=0)
        assert all(torch.isfinite(values).all() for values in alone.values())


def test_what_was_fitted_is_what_plain_python_finds():
    rows = some_rows()
    _, time, kind, price, title, member = (None, *fitted(rows, queries(3, 2, 2, 16)).columns)
    prices = [row["price"] for row in rows]
    assert price.mean == pytest.approx(statistics.fmean(prices), rel=1e-15)
    assert price.deviation == pytest.approx(statistics.pstdev(prices), rel=1e-14)
    assert kind.vocabulary == ("a", "b", "c")
    assert member.kind == "category"
    assert title == type(title)(name="title", kind="text", type="string")
    latest = max(row["time"] for row in rows)
    assert time.latest == (latest - datetime.datetime(1970, 1, 1)) // datetime.timedelta(microseconds=1)


def test_a_deviation_far_smaller_than_the_mean_survives():
    rows = [{"customer": 1, "price": 1e9 + part} for part in (0.0, 0.25, 0.5)]
    (price,) = fitted(rows, columns=["price"]).columns
    assert price.deviation == pytest.approx(statistics.pstdev([0.0, 0.25, 0.5]), rel=1e-15)


def test_numbers_are_in_deviations_and_a_null_is_flagged():
    rows = [{"customer": 1, "price": 1.0}, {"customer": 1, "price": None}, {"customer": 2, "price": 3.0}]
    features = fitted(rows, columns=["price"], target_fraction=0)
    found = features.encode(table_of(rows))
    assert features.numbers == ("events", "price.mean", "price.lowest", "price.highest", "price.missing")
    torch.testing.assert_close(
        found["numeric"], torch.tensor([[math.log1p(2), -1, -1, -1, 0.5], [math.log1p(1), 1, 1, 1, 0]])
    )
    assert "target" not in found


def test_a_category_is_the_most_frequent_value_and_an_unseen_one_is_unknown():
    rows = [{"customer": 1, "kind": "a"}, {"customer": 1, "kind": "a"}, {"customer": 1, "kind": "b"}]
    features = fitted(rows, columns=["kind"], target_fraction=0)
    others = [{"customer": 5, "kind": "new"}, {"customer": 6, "kind": None}, *rows]
    assert features.encode(table_of(others))["categorical"].tolist() == [[1], [0], [2]]
    assert features.model_arguments()["categories"] == [4]


def test_a_vocabulary_has_a_cap_and_keeps_the_most_frequent():
    rows = [{"customer": 1, "kind": f"{number:05}"} for number in range(MOST_WORDS + 5)]
    rows += [{"customer": 1, "kind": "99999"}] * 2
    (kind,) = fitted(rows, columns=["kind"]).columns
    assert len(kind.vocabulary) == MOST_WORDS
    assert kind.vocabulary[0] == "99999"
    assert kind.values == MOST_WORDS + 6


def test_a_category_of_too_many_values_is_refused_with_the_way_out(monkeypatch):
    monkeypatch.setattr("kit.data.tables.statistics.MOST_VALUES", 3)
    rows = [{"customer": 1, "kind": letter} for letter in "abcd"]
    with pytest.raises(ConfigError, match=r"kinds\.kind: has more than 3 different values.*say identifier"):
        fitted(rows, queries(2, 2, 2, 1), columns=["kind"])


def test_rows_of_a_sketch_sum_to_one_and_hold_how_often_each_value_occurs():
    rows = [{"customer": 1, "kind": "a"}] * 3 + [{"customer": 1, "kind": "b"}]
    features = fitted(rows, columns=["kind"], target_fraction=0)
    sketch = features.encode(table_of(rows))["sketch"].view(DEPTH, sketch_width(1.0))
    assert [sorted(row[row > 0].tolist()) for row in sketch] == [[0.25, 0.75]] * DEPTH


def test_a_text_is_sketched_by_words_and_pairs_whatever_their_case():
    rows = [
        {"customer": 1, "title": "Red shoes!"},
        {"customer": 2, "title": "red, SHOES"},
        {"customer": 3, "title": "shoes red"},
    ]
    one, same, turned = fitted(rows, columns=["title"], target_fraction=0).encode(table_of(rows))["sketch"]
    assert torch.equal(one, same)
    assert not torch.equal(one, turned), "pairs have an order"


def test_the_target_is_of_the_last_events_and_those_of_one_moment_stay_together():
    days = [START + datetime.timedelta(days=day) for day in (3, 1, 2, 4)]
    rows = [{"customer": 1, "time": day, "kind": letter} for day, letter in zip(days, "cabd", strict=True)]
    rows += [{"customer": 2, "time": START, "kind": "a"}] * 4
    features = fitted(rows, columns=["kind"], target_fraction=0.5)
    found = features.encode(table_of(rows))
    assert found["events"].tolist() == [2, 4]
    assert found["target"].sum(dim=1).tolist() == [DEPTH, 0]
    early, late = (
        features.encode(table_of([{**row, "time": None} for row in rows[:4] if row["kind"] in part]))
        for part in ("ab", "cd")
    )
    assert torch.equal(found["sketch"][0], early["sketch"][0])
    assert torch.equal(found["target"][0], late["sketch"][0])


def test_a_quality_changes_the_width_without_another_pass():
    rows = some_rows()
    features = fitted(rows)
    half = features.with_quality(0.5)
    assert half.encode(table_of(rows))["sketch"].shape == (20, 3 * DEPTH * 64)
    assert half == fitted(rows, sketch_quality=0.5)
    assert half.model_arguments()["sketch_quality"] == 0.5


def test_its_memory_is_what_encode_returns():
    rows = some_rows()
    for fraction in (0, 0.25):
        features = fitted(rows, target_fraction=fraction)
        found = features.encode(table_of(rows))
        assert sum(values.nbytes for values in found.values()) == features.memory_bytes(20)


def test_entities_that_are_texts_have_stable_numbers():
    rows = pyarrow.table({"who": ["ann", "bob", "ann"], "price": [1.0, 2.0, 3.0]})
    features = fit_features(MemoryTable(rows, "who", ""), announce=None)
    found = features.encode(rows)
    digests = [hashlib.blake2b(name, digest_size=8).digest() for name in (b"ann", b"bob")]
    assert found["entity"].tolist() == [int.from_bytes(digest, "little") >> 1 for digest in digests]
    assert found["events"].dtype == torch.int64


def test_json_brings_them_back_and_what_is_cut_off_is_refused():
    features = fitted(some_rows())
    text = features.to_json()
    assert Features.from_json(text) == features
    for broken in (text[:-10], "{}", "[]", text.replace('"version": 1', '"version": 99')):
        with pytest.raises(ConfigError, match="fit them again"):
            Features.from_json(broken)
    with pytest.raises(ConfigError, match="fit them again"):
        Features.from_json(json.dumps({**json.loads(text), "columns": [{"nonsense": 1}]}))


def test_parallelism_is_told_before_anything_is_read():
    source, told = MemoryTable(table_of(some_rows())), []
    fit_features(source, queries(2, 2, 2), announce=lambda words: told.append((words, source.batches)))
    ((words, batches),) = told
    assert "columns concurrently, of 5" in words or "column concurrently, of 5" in words
    assert batches == 0


def test_no_more_columns_are_read_at_once_than_was_said():
    source = MemoryTable(table_of(some_rows()))
    fit_features(source, queries(3, 1, 2, 10), announce=None)
    assert source.most_at_once == 1
    assert source.open == 0


@pytest.mark.parametrize("after", [0, 1, 7])
def test_a_query_that_fails_midway_is_the_answer_and_ends_the_others(after):
    source = MemoryTable(table_of(some_rows()), fail_after=after)
    with pytest.raises(QueryError, match="the connection was lost"):
        fit_features(source, queries(3, 4, 2, 10), announce=None)
    assert source.open == 0


def test_data_that_changes_meanwhile_is_refused():
    source = MemoryTable(table_of(some_rows()))
    source.states = iter(["before", "after"])
    with pytest.raises(QueryError, match="changed while.*fitted"):
        fit_features(source, announce=None)


def test_rows_without_an_entity_are_refused_when_fitted_and_when_encoded():
    rows = [*some_rows(), {"customer": None, "kind": "a"}]
    with pytest.raises(PartitionError):
        fitted(rows)
    with pytest.raises(PartitionError, match="1 of 201 events .*no customer.*where: '\"customer\" IS NOT NULL'"):
        fitted(some_rows()).encode(table_of(rows))


def test_a_changed_schema_is_refused_by_column():
    features = fitted(some_rows())
    table = table_of(some_rows())
    with pytest.raises(SchemaChangedError, match="column 'price' .*lack"):
        features.encode(table.drop_columns(["price"]))
    changed = table.set_column(3, "price", table.column("price").cast("string"))
    with pytest.raises(SchemaChangedError, match="'price' was double .*fitted.*string now"):
        features.encode(changed)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kinds": {"prize": "numeric"}}, "no column 'prize'.*mean 'price'"),
        ({"kinds": {"price": "number"}}, r"kinds\.price: 'number' .*none of numeric.*mean 'numeric'"),
        ({"kinds": {"kind": "numeric"}}, r"kinds\.kind: .*string .*no numeric"),
        ({"kinds": {"price": "text"}}, "double .*no text"),
        ({"columns": ["nothing"]}, "no column 'nothing'.*customer, time"),
        ({"columns": ["customer"]}, "no column.*left"),
        ({"sketch_quality": 0}, "sketch_quality: is 0, .*above 0"),
        ({"target_fraction": 1}, "target_fraction: is 1, .*from 0 to below 1"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_read(changes, message):
    source = MemoryTable(table_of(some_rows()))
    with pytest.raises(ConfigError, match=message):
        fit_features(source, announce=None, **changes)
    assert source.batches == 0


def test_the_table_says_what_each_column_became():
    features = fitted(some_rows())
    for text in (repr(features), features._repr_html_()):
        assert re.search("3 of 3 .*vocabulary", text)
        assert "a sketch of 3 x 4 x 128 numbers" in text


def test_no_rows_give_no_entities():
    features = fitted(some_rows())
    found = features.encode(table_of([]))
    assert {len(values) for values in found.values()} == {0}
    assert found["sketch"].shape == (0, features.sketch_numbers)


def test_every_database_gives_the_same_features(place):
    rows = table_of(some_rows()).sort_by([("customer", "ascending"), ("time", "ascending")])
    source = place.write(rows).open(main_entity_column="customer", date_column="time")
    features = kit.data.fit_features(source, queries(3, 2, 1), kinds=KINDS, announce=None)
    assert features == fitted(some_rows())
    read = pyarrow.Table.from_batches(source.read(Query(columns=features.query_columns)))
    found, expected = features.encode(read.sort_by("customer")), features.encode(rows)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
