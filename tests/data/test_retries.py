"""What passes is tried again, by one policy for every client, and counted; what is an answer comes back at once."""

import asyncio
import random
from functools import partial
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from waiting import PATIENCE_SECONDS

from kit.data.build.build import build
from kit.data.open_dataset import open_dataset
from kit.data.patches.module import PatchData
from kit.data.stores import transfer as policy
from kit.data.stores.counters import Counters
from kit.data.stores.http import HttpClient
from kit.data.stores.transfer import Retries, passing
from kit.data.stores.url import list_objects, open_store, read_object, sizes_of_objects, write_object
from kit.data.stream.engine import Engine
from kit.data.stream.fetch import AsyncClient, open_client
from kit.errors import MissingChunkError, StoreError

DATA = random.Random(5).randbytes(300_000)
SCHEMES = ("gs", "s3", "http")
WAYS = ("wire", "fsspec")
PASSING = ("408", "429", "500", "502", "503", "504", "reset", "lost", "truncate")


@pytest.fixture
def bucket(cloud, tmp_path):
    """The URL of a bucket with the object `a`, by scheme."""
    (tmp_path / "a").write_bytes(DATA)
    for scheme in SCHEMES:
        cloud.upload(tmp_path / "a", "faulty/x/a", scheme)
    return lambda scheme: cloud.url("faulty/x", scheme)


def _read(way, url, counters, seconds=PATIENCE_SECONDS, after_the_first=None):
    """Bytes 10 to 200,000 of `a`, by either client; `after_the_first`: called between two such reads."""
    store = open_store(url)
    client = open_client(store, url, seconds, counters, 4)
    assert isinstance(client, HttpClient)
    client = client if way == "wire" else AsyncClient(store, url, 4, seconds, counters)
    try:
        if after_the_first:
            client.read("a", 10, 200_000)
            after_the_first()
        return client.read("a", 10, 200_000)
    finally:
        client.close()
        store.close()


@pytest.mark.parametrize(("way", "fault"), [*product(WAYS, PASSING)])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_what_passes_is_tried_again_and_counted(cloud, bucket, scheme, way, fault):
    url, counters = bucket(scheme), Counters()
    cloud.script("faulty/x/a", [fault, fault])
    assert bytes(_read(way, url, counters)) == DATA[10:200_000]
    assert cloud.counts().faults == {fault: 2}
    assert cloud.counts().kinds["read"].requests == 3
    counted = counters.values()
    assert counted["requests"] == counted["retries"] + 1
    # aiohttp and libcurl ask once more by themselves when a connection that they kept is gone
    unseen = 1 if fault in ("reset", "lost") else 0
    assert 2 - unseen <= counted["retries"] <= 2


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_an_answer_comes_back_at_once(cloud, bucket, scheme, way):
    url, counters = bucket(scheme), Counters()
    cloud.script("faulty/x/a", [403, 404])
    with pytest.raises(StoreError, match=r"check data\.credentials"):
        _read(way, url, counters)
    assert _read(way, url, counters) is None
    assert cloud.counts().kinds["read"].requests == 2
    assert counters.values()["retries"] == 0


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_store_that_never_recovers_is_given_up_at_the_deadline_with_its_last_words(cloud, bucket, scheme, way):
    url, counters = bucket(scheme), Counters()
    # A first read that succeeds: making a client takes botocore longer than the whole deadline on a busy machine.
    break_it = partial(cloud.turn, faults={"503": 1.0})
    with pytest.raises(StoreError, match=r"tried \d+ times in|no answer .*4 s"):
        _read(way, url, counters, seconds=4.0, after_the_first=break_it)
    assert counters.values()["retries"] >= 2


@pytest.mark.parametrize("scheme", SCHEMES[:2])
def test_listing_measuring_and_writing_are_tried_again_too(cloud, bucket, scheme):
    url = bucket(scheme)
    store = open_store(url, read_only=False)
    cloud.script("faulty/x/*", ["503", "reset"])
    write_object(store, "b", b"new", url)
    cloud.forget_scripts().script("faulty/x/*", ["429", "lost"], kind="write")
    write_object(store, "b", b"newer", url)
    cloud.forget_scripts().script("faulty/x/*", ["500", "truncate"])
    assert read_object(store, "b", url) == b"newer"
    cloud.forget_scripts().script("faulty/x/*", ["503"], kind="info")
    assert sizes_of_objects(store, ["a", "b", "none"], url) == {"a": len(DATA), "b": 5}
    assert list_objects(store, "", url) == ["a", "b"]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_size_that_cannot_be_asked_for_is_an_error_and_not_a_missing_object(cloud, bucket, scheme, monkeypatch):
    url = bucket(scheme)
    store = open_store(url)
    store.retries = Retries(0.3)
    cloud.turn(faults={"503": 1.0})
    with pytest.raises(StoreError, match="tried"):
        sizes_of_objects(store, ["a"], url)


@pytest.mark.parametrize("way", WAYS)
def test_batches_are_whole_through_a_bad_day_and_what_it_cost_is_counted(cloud, tiny_config, monkeypatch, way):
    url = cloud.url(f"bad-day/{way}.zarr")
    dataset = build(tiny_config(url), progress=False)
    if way == "fsspec":
        monkeypatch.setattr("kit.data.stream.fetch.address_of", lambda *_: None)
    config = tiny_config(url, data__samples_per_epoch=24, loader__batch_size=4)
    calm = list(PatchData(config).train_dataloader())
    cloud.turn(faults={"503": 0.1, "429": 0.05, "reset": 0.05, "truncate": 0.1}, seed=3)
    loader = PatchData(config).train_dataloader()
    for before, after in zip(calm, loader, strict=True):
        assert all((before[name] == after[name]).all() for name in before)
    assert loader.counters()["retries"] > 0
    assert dataset.manifest is not None


def test_a_chunk_that_is_not_found_is_an_error_and_not_zeros(cloud, tiny_config):
    url = cloud.url("gone/x.zarr")
    build(tiny_config(url), progress=False)
    cloud.script("gone/x.zarr/*/c/*", [404] * 10)
    import numpy as np

    with Engine(open_dataset(url)) as engine, pytest.raises(MissingChunkError):
        next(engine.stream([np.zeros((2, 3), np.int64)], (1, 3, 3)))


# -- the policy alone


def _behind(outer, inner):
    outer.__cause__ = inner
    return outer


def test_an_error_is_judged_by_its_status_or_by_the_one_behind_it():
    class Response(Exception):
        def __init__(self, status):
            self.status = status

    assert all(passing(Response(status)) for status in (408, 429, 500, 503, 504))
    assert not any(passing(Response(status)) for status in (400, 401, 403, 404, 416, 501, 505))
    assert passing(ConnectionResetError())
    assert passing(_behind(FileNotFoundError("no size"), Response(503)))
    assert not passing(_behind(FileNotFoundError("no size"), Response(404)))
    assert not passing(_behind(Response(404), ConnectionResetError()))
    assert not any(map(passing, (OSError("disk"), ValueError("x"), FileNotFoundError("x"), PermissionError("x"))))


@given(st.lists(st.booleans(), max_size=6))
def test_work_is_done_until_it_succeeds_and_every_failure_is_counted(fails):
    outcomes, counted = [*fails, False], []
    asked = []

    def work():
        asked.append(1)
        if outcomes[len(asked) - 1]:
            raise ConnectionResetError("gone")
        return len(asked)

    async def work_async():
        return work()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(policy, "FIRST_PAUSE_SECONDS", 0.0)
        first = fails.index(False) if False in fails else len(fails)
        assert Retries(60, lambda: counted.append(1)).run(work) == first + 1
        assert len(counted) == first
        asked.clear()
        assert asyncio.run(Retries(60).run_async(work_async)) == first + 1


def test_pauses_grow_are_drawn_from_zero_and_end_before_the_deadline(monkeypatch):
    drawn = []
    monkeypatch.setattr(policy.random, "uniform", lambda low, high: drawn.append((low, high)) or 0.001)
    outcomes = iter([*"12345678", None])

    def work():
        if next(outcomes):
            raise TimeoutError
        return 1

    assert Retries(60).run(work) == 1
    assert {low for low, _ in drawn} == {0}
    assert [high for _, high in drawn][:3] == pytest.approx([0.1, 0.2, 0.4])
    assert drawn[-1][1] == policy.MOST_PAUSE_SECONDS

    def never():
        raise TimeoutError("slow")

    monkeypatch.setattr(policy.random, "uniform", lambda low, high: 10.0)
    monkeypatch.setattr(policy.time, "sleep", pytest.fail)
    with pytest.raises(TimeoutError) as caught:
        Retries(5).run(never)
    assert caught.value.__notes__[0].startswith("tried 1 times")
