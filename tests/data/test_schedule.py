"""Schedules: the rules of practice, never more threads than cores, and warnings with their arithmetic."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from properties import examples

from kit.config import Config
from kit.data.build.schedulers import advise_schedule
from kit.errors import ConfigError, PlanError

GIB = 1 << 30


def advise(cores, ranks, gib=256, **more):
    return advise_schedule(cores=cores, ranks=ranks, memory_bytes=gib * GIB, **more)


@pytest.mark.parametrize(("cores", "ranks", "workers"), [(20, 1, 18), (160, 8, 18), (60, 3, 18)])
def test_two_cores_a_gpu_are_kept_and_the_rest_load(cores, ranks, workers):
    found = advise(cores, ranks, heavy_transform=True, gib=1024)
    assert found.loader_workers == workers
    assert found.decode_threads == 1
    assert f"{ranks * workers} for loading" in found.reasons[0]
    assert found.warnings == ()


def test_a_light_transform_needs_no_loader_process():
    found = advise(20, 1)
    assert (found.loader_workers, found.decode_threads) == (0, 8)
    assert "for heavy transforms" in found.reasons[1]


def test_dask_inside_a_rank_follows_its_share_of_the_cores():
    assert str(advise(20, 1).dask) == "threads(8)"
    assert advise(160, 8).dask == advise(20, 1, gib=32).dask
    small = advise(20, 8)
    assert (small.dask.mode, small.dask.workers, small.dask.threads) == ("distributed", 1, 2)
    assert any(re.search("one cluster .*12 threads .*share", text) for text in small.reasons)
    assert advise(8, 8).dask.mode == "single-threaded"


def test_a_build_takes_threads_on_a_small_machine_and_workers_on_a_large_one():
    assert str(advise(2, 1).build) == "threads(2)"
    large = advise(160, 8).build
    assert (large.mode, large.workers, large.threads) == ("distributed", 40, 4)
    assert 40 * large.memory_bytes <= 256 * GIB


def test_eight_processes_of_four_threads_on_twenty_cores_are_too_many():
    (warning,) = advise(20, 8, dask_threads=4).warnings
    assert warning.startswith("8 processes × 4 threads = 32 threads on 20 cores")
    assert "share one cluster" in warning
    config = Config.make({"loader": {"num_workers": 8, "decode_threads": 4}})
    (warning,) = advise_schedule(config, cores=20, ranks=1, memory_bytes=64 * GIB).warnings
    assert "8 processes × 4 threads = 32 threads on 20 cores" in warning
    assert "lower loader.num_workers" in warning


def test_one_thread_more_than_cores_is_no_reason_to_warn():
    config = Config.make({"loader": {"num_workers": 17, "decode_threads": 1}})
    assert advise_schedule(config, cores=16, ranks=1, memory_bytes=64 * GIB).warnings == ()


def test_workers_of_a_build_that_do_not_fit_are_named_with_their_sizes():
    config = Config.make({"build": {"scheduler": "distributed", "workers": 6, "threads": 4, "memory_bytes": "8 GiB"}})
    first, second = advise_schedule(config, cores=8, ranks=1, memory_bytes=16 * GIB).warnings
    assert "6 processes × 4 threads = 24 threads on 8 cores" in first
    assert "6 workers × build.memory_bytes 8 GiB exceed 16 GiB" in second


def test_scarce_memory_means_fewer_loader_processes():
    found = advise(20, 1, gib=8, heavy_transform=True)
    assert found.loader_workers == 4
    assert any("4, not 18, loader processes" in text for text in found.reasons)


def test_what_is_advised_can_be_put_into_a_config_and_is_not_warned_about():
    found = advise(160, 8, gib=1024, heavy_transform=True)
    config = found.apply(Config())
    assert config.loader.num_workers == 18
    assert config.build.scheduler == "distributed"
    again = advise_schedule(config, cores=160, ranks=8, memory_bytes=1024 * GIB, heavy_transform=True)
    assert again.warnings == ()


def test_this_machine_is_looked_at_when_nothing_is_said():
    found = advise_schedule(Config())
    assert found.ranks == 1
    assert "Schedule for 1 rank" in str(found)
    assert "<table" in found._repr_html_()


def test_memory_may_be_written_with_its_unit():
    assert str(advise_schedule(cores=20, ranks=1, memory_bytes="128 GiB")) == str(advise(20, 1, gib=128))
    with pytest.raises(ConfigError, match="memory_bytes: 'plenty' .*size"):
        advise_schedule(cores=20, ranks=1, memory_bytes="plenty")


def test_a_limit_for_the_whole_build_takes_the_place_of_the_sum_of_its_workers():
    build = {"scheduler": "distributed", "workers": 6, "threads": 1, "memory_bytes": "8 GiB"}
    config = Config.make({"build": {**build, "total_memory_bytes": "12 GiB"}})
    assert advise_schedule(config, cores=8, ranks=1, memory_bytes="16 GiB").warnings == ()
    (warning,) = advise_schedule(config, cores=8, ranks=1, memory_bytes="8 GiB").warnings
    assert warning == "build.total_memory_bytes 12 GiB exceeds 8 GiB"


def test_more_building_threads_than_cores_are_warned_of():
    config = Config.make({"build": {"scheduler": "threads", "threads": 32}})
    (warning,) = advise_schedule(config, cores=8, ranks=1, memory_bytes="64 GiB").warnings
    assert re.search(r"32 threads .*8 cores: .*build\.threads", warning)


@pytest.mark.parametrize("wrong", [{"cores": 0}, {"ranks": 0}, {"memory_bytes": 0}])
def test_nothing_to_divide_is_refused(wrong):
    with pytest.raises(PlanError, match="at least 1"):
        advise_schedule(**{"cores": 4, "ranks": 1, "memory_bytes": GIB, **wrong})


@examples(200)
@given(cores=st.integers(1, 512), ranks=st.integers(1, 64), gib=st.integers(1, 4096), heavy=st.booleans())
def test_the_advice_never_oversubscribes(cores, ranks, gib, heavy):
    found = advise(cores, ranks, gib=gib, heavy_transform=heavy)
    assert ranks * max(1, found.loader_workers) * found.decode_threads <= max(cores, ranks)
    assert ranks * found.dask.total_threads <= max(cores, ranks)
    assert found.build.total_threads <= cores
    assert found.build.workers * found.build.memory_bytes <= gib * GIB
    assert found.loader_workers == 0 or heavy
