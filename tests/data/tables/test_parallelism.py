"""Parallelism: never more workers than cores, and what was cut is told."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kit.data.tables.fit import plan_parallelism
from kit.errors import ConfigError


def test_the_seeds_settings_on_a_large_machine_are_obeyed():
    plan = plan_parallelism(9, 16, num_concurrent_features=4, num_cpus=4)
    assert str(plan).splitlines() == [
        "Processing 4 columns concurrently, of 9",
        "At most 4 workers per column",
        "At most 16 workers in all",
    ]


def test_a_product_beyond_the_cores_is_cut_with_the_reason():
    plan = plan_parallelism(9, 6, num_concurrent_features=4, num_cpus=4)
    assert (plan.columns_at_once, plan.workers_per_column, plan.workers) == (4, 1, 4)
    (reason,) = plan.reasons
    assert re.match("num_concurrent_features 4 x num_cpus 4 = 16 workers.* 6 cores", reason)
    assert str(plan).endswith(reason)


def test_few_columns_leave_their_cores_to_each_other():
    plan = plan_parallelism(1, 4, num_concurrent_features=4, num_cpus=4)
    assert (plan.columns_at_once, plan.workers_per_column) == (1, 4)


def test_without_columns_to_read_nothing_is_said_to_start():
    assert "No column" in str(plan_parallelism(0, 4, num_concurrent_features=4, num_cpus=4))


@given(columns=st.integers(0, 40), cores=st.integers(1, 64), asked=st.integers(1, 40), cpus=st.integers(1, 40))
def test_it_never_exceeds_cores_columns_or_what_was_asked(columns, cores, asked, cpus):
    plan = plan_parallelism(columns, cores, num_concurrent_features=asked, num_cpus=cpus)
    assert 1 <= plan.workers <= cores
    assert plan.columns_at_once <= max(1, min(columns, asked))
    assert plan.workers_per_column <= cpus
    assert bool(plan.reasons) == (asked * cpus > cores)


def test_none_at_once_is_refused():
    with pytest.raises(ConfigError, match=r"queries\.num_concurrent_features: is 0(.|\n)*queries\.num_cpus: is -1"):
        plan_parallelism(1, 4, num_concurrent_features=0, num_cpus=-1)
