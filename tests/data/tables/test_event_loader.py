"""Batches of whole entities: the same whatever the number of query chunks, ranks and resumes; nothing half-read."""

import collections
import itertools

import event_tables
import pyarrow
import pytest
from event_tables import by_entity, expected, loader, shop
from hypothesis import given
from hypothesis import strategies as st
from postgres_server import PASSWORD, VARIABLE, PostgresServer
from properties import examples
from table_places import Place

from kit.data.tables.cache import QueryCache
from kit.data.tables.chunks import EventPlan
from kit.data.tables.measure import measure_queries
from kit.errors import ConfigError, PartitionError, QueryError, SchemaChangedError, UnreachableDatabaseError


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    """One table, in Parquet and DuckDB, divided in either way."""
    folder = tmp_path_factory.mktemp("shops")
    return {
        (kind, way): shop(folder, kind, partition_values_transformation=way)
        for kind in ("parquet", "duckdb")
        for way in ("hash_mod", "exact_group")
    }


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["parquet", "duckdb"])
@given(
    query_chunks=st.integers(1, 7), way=st.sampled_from(["hash_mod", "exact_group"]), batch_size=st.integers(1, 50),
    epoch=st.integers(0, 3), shuffle=st.booleans(), prefetch=st.booleans(), batch_rows=st.sampled_from([1, 7, 400]),
)  # fmt: skip
@examples(6)
def test_every_epoch_has_every_entity_with_all_its_events(tables, kind, query_chunks, way, batch_size, epoch, **others):
    loaded = loader(tables[kind, way], query_chunks, batch_size, **others)
    loaded.set_epoch(epoch)
    batches = [*loaded]
    assert len(batches) == len(loaded)
    assert by_entity(batches) == expected(event_tables.events())


@given(
    query_chunks=st.integers(1, 7), way=st.sampled_from(["hash_mod", "exact_group"]), batch_size=st.integers(1, 50),
    epoch=st.integers(0, 3), prefetch=st.booleans(), batch_rows=st.sampled_from([7, 400]),
)  # fmt: skip
@examples(6)
def test_every_epoch_from_a_server_has_them_too(postgres, tmp_path, query_chunks, way, batch_size, epoch, **others):
    source = served(postgres, tmp_path, partition_values_transformation=way)
    loaded = loader(source, query_chunks, batch_size, **others)
    loaded.set_epoch(epoch)
    assert by_entity([*loaded]) == expected(event_tables.events())


def served(server, folder, **fields):
    """The events in a table of a server."""
    place = Place("postgresql", folder, server)
    if not server.execute("SELECT to_regclass('shop')")[0][0]:
        place.write(event_tables.events(), "shop")
    return place.open("shop", type="event", main_entity_column="customer", date_column="time", **fields)


@pytest.mark.slow
def test_epochs_differ_in_their_order_and_seeds_repeat_it(tables):
    def order(epoch, query_chunks=3, **changes):
        loaded = loader(tables["duckdb", "hash_mod"], query_chunks, **changes)
        loaded.set_epoch(epoch)
        return [row[0] for batch in loaded for row in batch]

    assert order(0) == order(0)
    assert order(0) != order(1)
    assert order(0) != order(0, seed=4)
    assert order(0, shuffle=False) == order(1, shuffle=False)
    assert order(0, 1, shuffle=False) == sorted(order(0))


@given(
    entities=st.lists(st.integers(0, 30), min_size=1, max_size=6), batch_size=st.integers(1, 9),
    world_size=st.integers(1, 5), drop_last=st.booleans(), first=st.integers(0, 8), epoch=st.integers(0, 2),
)  # fmt: skip
def test_ranks_share_an_epoch_in_equal_steps(entities, batch_size, world_size, drop_last, first, epoch):
    try:
        plan = EventPlan(
            entities=tuple(entities), table={"name": "t"}, batch_size=batch_size, world_size=world_size, seed=5,
            shuffle=True, drop_last=drop_last,
        )  # fmt: skip
    except ConfigError:
        assert sum(entities) < (batch_size * world_size if drop_last else world_size)
        return
    first = min(first, plan.batches_per_epoch)
    seen = collections.Counter()
    for rank in range(world_size):
        sizes = [len(plan.steps.positions(step, rank)) for step in range(plan.batches_per_epoch)]
        assert min(sizes) > 0
        shares = [*plan.shares(epoch, first, rank)]
        assert all(len(share) for _, share in shares)
        assert sum(len(share) for _, share in shares) == sum(sizes[first:])
        seen.update((chunk, entity) for chunk, share in shares for entity in share.tolist())
    assert set(seen.values()) <= {1}
    left_out = sum(entities) % (batch_size * world_size) if drop_last else 0
    rest = sum(entities) - left_out - first * batch_size * world_size
    assert seen.total() == (rest if first < plan.batches_per_epoch else 0)


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_together_see_the_global_batches_of_one(tables, world_size):
    source = tables["duckdb", "hash_mod"]
    whole = [sorted(batch) for batch in [*loader(source, 4, 6, encode=keys)]]
    ranks = [[*loader(source, 4, 6 // world_size, world_size, rank, encode=keys)] for rank in range(world_size)]
    assert [sorted(itertools.chain(*parts)) for parts in zip(*ranks, strict=True)] == whole


def keys(batch):
    return batch.column("customer").unique().to_pylist()


# -- going on


@pytest.mark.parametrize("query_chunks", [1, 5])
def test_a_pass_goes_on_in_the_middle_and_reads_only_what_is_left(tables, query_chunks):
    source = tables["duckdb", "hash_mod"]
    first, later = loader(source, query_chunks), loader(source, query_chunks)
    first.set_epoch(1)
    batches = [*first]
    reads = count_reads(later)
    for stop in range(len(batches)):
        first.set_epoch(1)
        passed = iter(first)
        for _ in range(stop):
            next(passed)
        state = first.state_dict()
        passed.close()
        later.load_state_dict(state)
        reads.clear()
        assert [*later] == batches[stop:]
        assert later.state_dict()["step"] == 0
    if query_chunks > 1:
        assert len(reads) < query_chunks  # in the last batch


def count_reads(loaded):
    reads, read = [], loaded.table.read
    loaded.table.read = lambda number: (reads.append(number), read(number))[1]
    return reads


@pytest.mark.parametrize("batch_size", [4, 5])
def test_another_number_of_ranks_takes_the_entities_that_are_left(tables, batch_size):
    source = tables["duckdb", "hash_mod"]
    first = loader(source, 3, batch_size=8)
    passed = iter(first)
    before = [next(passed) for _ in range(2)]
    state = first.state_dict()
    passed.close()
    ranks = [loader(source, 3, batch_size, 2, rank) for rank in range(2)]
    rest = []
    for rank in ranks:
        rank.load_state_dict(state)
        rest += [*rank]
    assert by_entity(before + rest) == expected(event_tables.events())


def test_a_state_of_another_order_is_refused_with_every_reason(tables):
    source = tables["duckdb", "hash_mod"]
    state = loader(source, 3).state_dict()
    with pytest.raises(ConfigError, match=r"queries\.load_query_chunks: .*state .*3 query chunks"):
        loader(source, 4).load_state_dict(state)
    with pytest.raises(ConfigError) as caught:
        loader(source, 3, seed=9, shuffle=False).load_state_dict(state)
    assert {problem.path for problem in caught.value.problems} == {"training.seed", "loader.shuffle"}


@pytest.mark.parametrize("kind", ["parquet", "duckdb"])
def test_a_state_of_a_table_that_changed_is_refused_with_the_reason(tmp_path, kind):
    first = loader(shop(tmp_path, kind), 2)
    passed = iter(first)
    next(passed)
    state = first.state_dict()
    passed.close()
    later = loader(shop(tmp_path, kind, event_tables.events(seed=8)), 2)
    with pytest.raises(ConfigError, match=r"shop .*changed since .*state.*entities"):
        later.load_state_dict(state)
    later.set_epoch(1)
    assert len(by_entity([*later])) == 40


# -- what goes wrong


def test_a_table_that_changes_between_epochs_is_refused_and_a_new_loader_reads_it(tmp_path):
    source = shop(tmp_path)
    loaded = loader(source, 2)
    assert len([*loaded]) == len(loaded)
    event_tables.write(tmp_path / "shop.parquet", event_tables.events(seed=8))
    with pytest.raises(QueryError, match="changed since .*planned"):
        next(iter(loaded))
    assert by_entity([*loader(source, 2)]) == expected(event_tables.events(seed=8))


def test_columns_that_change_between_epochs_are_refused_by_name(tmp_path):
    source = shop(tmp_path, version="1")  # the state is declared, so the change does not show in it
    loaded = loader(source, 2)
    assert len([*loaded]) == len(loaded)
    changed = event_tables.events()
    changed = changed.set_column(3, "price", changed.column("price").cast("string"))
    event_tables.write(tmp_path / "shop.parquet", changed)
    with pytest.raises(SchemaChangedError, match="price"):
        next(iter(loaded))


def test_entities_that_come_under_a_declared_version_are_noticed_in_their_query_chunk(tmp_path):
    loaded = loader(shop(tmp_path, version="1"), 2)
    event_tables.write(tmp_path / "shop.parquet", event_tables.events(entities=60))
    with pytest.raises(QueryError, match=r"of 2 has \d+ entities, and \d+ .*planned"):
        collections.deque(loaded)


@pytest.mark.parametrize("prefetch", [False, True])
def test_a_query_that_fails_mid_way_ends_the_pass_and_loses_nothing(tables, prefetch, new_threads):
    source = tables["duckdb", "hash_mod"]
    whole = [*loader(source, 4)]
    loaded = loader(source, 4, prefetch=prefetch)
    read, calls = loaded.table.read, []

    def failing(number):
        calls.append(number)
        for batch in read(number):
            yield batch
            if len(calls) == 3:
                raise QueryError("shop: the connection was lost")

    loaded.table.read = failing
    got = []
    with pytest.raises(QueryError, match="the connection was lost"):
        got.extend(loaded)
    got = whole[: loaded.state_dict()["step"]]
    assert 0 < len(got) < len(whole)
    loaded.load_state_dict(loaded.state_dict())
    assert [*got, *loaded] == whole
    assert not new_threads("kit-query")


def test_a_pass_that_is_left_ends_its_thread(tables, new_threads):
    loaded = loader(tables["duckdb", "hash_mod"], 4)
    passed = iter(loaded)
    next(passed)
    loaded.close()
    assert not new_threads("kit-query")
    passed.close()
    assert len([*loaded]) == len(loaded)


def test_rows_without_an_entity_are_refused(tmp_path):
    table = event_tables.events()
    customers = pyarrow.array([None, *table.column("customer").to_pylist()[1:]], "int64")
    source = shop(tmp_path, table=table.set_column(0, "customer", customers))
    with pytest.raises(PartitionError, match="1 rows .*no customer"):
        loader(source, 2)


def test_an_entity_in_two_query_chunks_is_refused(tmp_path):
    table = event_tables.events()
    table = table.append_column("day", pyarrow.array([number % 3 for number in range(400)], "int64"))
    source = shop(tmp_path, table=table, partition_column="day", partition_values_transformation="exact_group")
    with pytest.raises(PartitionError, match="more than one .*chunk"):
        loader(source, 3)
    assert len(by_entity([*loader(source, 1)])) == 40


def test_more_ranks_than_entities_are_refused(tables):
    with pytest.raises(ConfigError, match="40 entities.*at least 41"):
        loader(tables["duckdb", "hash_mod"], world_size=41)


# -- memory


def test_a_query_chunk_that_does_not_fit_is_refused_with_the_way_out(tables):
    loaded = loader(tables["duckdb", "hash_mod"], 1, memory_bytes=20_000)
    with pytest.raises(ConfigError, match=r"queries\.memory_bytes: 19\.5 KiB cannot hold .*chunk of shop"):
        collections.deque(loaded)
    assert by_entity([*loader(tables["duckdb", "hash_mod"], 8, memory_bytes=20_000)]) == expected(event_tables.events())


@pytest.mark.parametrize(("memory_bytes", "reason"), [(1 << 30, "read while one"), (7_500, "at a time")])
def test_the_next_query_chunk_is_read_ahead_only_where_both_fit(tables, memory_bytes, reason):
    loaded = loader(tables["duckdb", "exact_group"], 6, memory_bytes=memory_bytes)
    assert len([*loaded]) == len(loaded)
    assert reason in loaded.reasons[0]


def test_without_prefetch_a_query_chunk_is_read_when_it_is_needed(tables):
    loaded = loader(tables["duckdb", "hash_mod"], 4, batch_size=2, prefetch=False)
    reads = count_reads(loaded)
    passed = iter(loaded)
    next(passed)
    assert len(reads) == 1
    passed.close()


# -- a server


def test_a_server_gives_the_same_batches_and_is_asked_once_with_a_cache(postgres, tmp_path):
    source = served(postgres, tmp_path)
    assert by_entity([*loader(source, 3)]) == expected(event_tables.events())
    cached = QueryCache(tmp_path / "cache").over(source)
    found = [by_entity([*loader(cached, 3)]) for _ in range(2)]
    assert found == [expected(event_tables.events())] * 2
    assert cached.counts == {"hit": 6, "filled": 6, "refilled": 0, "not kept": 0}
    loaded = loader(cached, 3)
    passed = iter(loaded)
    before = next(passed)
    state = loaded.state_dict()
    passed.close()
    again = loader(served(postgres, tmp_path), 3)
    again.load_state_dict(state)
    assert by_entity([before, *again]) == expected(event_tables.events())
    postgres.execute("INSERT INTO shop VALUES (1000, '2026-02-01', 'tea', 1)")
    with pytest.raises(ConfigError, match="changed since .*state"):
        loader(source, 3).load_state_dict(state)
    assert by_entity([*loader(cached, 3)])[1000][-1][1:] == ("tea", 1.0)


@pytest.mark.slow
def test_memory_of_a_server_is_measured_in_loading_and_fitting(postgres, tmp_path):
    source = served(postgres, tmp_path)
    for phase in ("load", "fit"):
        (setting,) = measure_queries(source, counts=(2,), phase=phase).settings
        assert setting.measured_client_bytes > 0
        assert setting.measured_database_bytes > 0


@pytest.mark.fault
def test_an_epoch_goes_on_after_its_server_was_gone(postgres_installed, monkeypatch, tmp_path):
    monkeypatch.setenv(VARIABLE, PASSWORD)
    server = PostgresServer()
    try:
        source = served(server, tmp_path, version="1")  # what a server's own state is after a crash is its own affair
        loaded = loader(source, 4, prefetch=False)
        passed = iter(loaded)
        got = [next(passed)]
        server.kill()
        with pytest.raises(UnreachableDatabaseError, match=f"127.0.0.1, port {server.port} cannot be used"):
            got.extend(passed)
        assert loaded.state_dict()["step"] == len(got) < len(loaded)
        server.start()
        later = loader(source, 4)
        later.load_state_dict(loaded.state_dict())
        assert by_entity([*got, *later]) == expected(event_tables.events())
    finally:
        server.stop()


def test_a_table_without_rows_is_not_blamed_on_the_batch():
    with pytest.raises(ConfigError, match="table: purchases has no rows .*where"):
        EventPlan(
            entities=(0, 0), table={"name": "purchases"}, batch_size=4, world_size=1, seed=5, shuffle=True,
            drop_last=False,
        )  # fmt: skip
