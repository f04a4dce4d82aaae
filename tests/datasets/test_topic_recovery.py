"""Pairing topics is exact, and what a pair is worth is what numpy says."""

import re
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from properties import examples
from topic_model import topics

import kit
from kit.errors import ConfigError, PlanError

Topics, assign = topics.Topics, topics.assign
costs = st.tuples(st.integers(1, 5), st.integers(0, 2)).flatmap(
    lambda sizes: arrays.arrays(float, (sizes[0], sizes[0] + sizes[1]), elements=st.floats(-10, 10, width=16))
)


@examples(200)
@given(costs)
def test_no_assignment_costs_less(given_costs):
    rows, columns = given_costs.shape
    found = assign(given_costs)
    assert len(set(found)) == rows
    best = min(given_costs[range(rows), list(order)].sum() for order in permutations(range(columns), rows))
    assert given_costs[range(rows), list(found)].sum() == pytest.approx(best, abs=1e-9)


@pytest.mark.parametrize("wrong", [np.zeros((3, 2)), np.zeros(3), np.full((2, 2), np.nan)])
def test_costs_that_have_no_assignment_are_refused(wrong):
    with pytest.raises(PlanError, match="columns"):
        assign(wrong)


def topics(documents=50, count=6, terms=30, seed=0):
    random = np.random.default_rng(seed)
    return Topics(random.dirichlet(np.ones(count), documents), random.dirichlet(np.full(terms, 0.1), count))


def test_shuffled_topics_are_found_again_exactly():
    truth = topics()
    order = np.random.default_rng(3).permutation(6)
    recovery = kit.compare_topics(Topics(truth.shares[:, order], truth.terms[order]), truth)
    assert order[list(recovery.order)].tolist() == list(range(6))
    assert recovery.cosines == pytest.approx([1] * 6)
    assert recovery.correlations == pytest.approx([1] * 6)
    assert np.array_equal(recovery.aligned.terms, truth.terms)
    assert sum(recovery.sizes) == pytest.approx(1)


def test_cosines_and_correlations_are_numpys_and_topics_too_many_are_left_over():
    truth, found = topics(), topics(count=9, seed=1)
    recovery = kit.compare_topics(found, truth)
    for place, column in enumerate(recovery.order):
        one, other = truth.terms[place], found.terms[column]
        assert recovery.cosines[place] == pytest.approx(one @ other / np.linalg.norm(one) / np.linalg.norm(other))
        wanted = np.corrcoef(truth.shares[:, place], found.shares[:, column])[0, 1]
        assert recovery.correlations[place] == pytest.approx(wanted)
    assert recovery.median_cosine == np.median(recovery.cosines)
    assert recovery.median_correlation == np.median(recovery.correlations)


def test_a_topic_that_is_the_same_in_all_documents_has_no_correlation_and_no_warning():
    truth = topics(count=2)
    flat = Topics(np.full((50, 2), 0.5), truth.terms)
    recovery = kit.compare_topics(flat, truth)
    assert np.isnan(recovery.correlations).all()
    assert np.isnan(recovery.median_correlation)


def test_it_shows_itself_as_a_sentence_and_a_row_for_each_topic():
    recovery = kit.compare_topics(topics(), topics())
    assert re.search(r"6 topics: median cosine .*1\.000", repr(recovery))
    assert repr(recovery).count("\n") == 7
    assert recovery._repr_html_().count("<tr") == 7


def test_topics_of_another_corpus_and_too_few_are_refused():
    with pytest.raises(ConfigError, match="true ones of"):
        kit.compare_topics(topics(documents=49), topics())
    with pytest.raises(ConfigError, match="as many"):
        kit.compare_topics(topics(count=3), topics())


def test_topics_come_back_from_their_file_as_they_were(tmp_path):
    before = topics()
    after = kit.open_topics(before.save(tmp_path / "t.npz"))
    assert np.array_equal(after.shares, before.shares)
    assert np.array_equal(after.terms, before.terms)
    assert repr(after) == "6 topics of 50 documents and 30 terms"
    assert [place.name for place in tmp_path.iterdir()] == ["t.npz"]


def test_shares_and_terms_of_different_topics_are_refused():
    with pytest.raises(ConfigError, match="are not"):
        Topics(np.ones((3, 2)), np.ones((4, 5)))
