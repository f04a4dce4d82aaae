"""The numbers behind the charts of topics, and that no figure is known to pyplot."""

import itertools
import math
import sys

import numpy as np
import pytest
from matplotlib.colors import to_rgb
from topic_model import charts
from topic_model import topics as model

from kit.errors import ConfigError

Topics, structure_info, terms_info = model.Topics, charts.structure_info, charts.terms_info
topic_colours = charts.topic_colours


def topics(documents=2000, count=8, terms=40):
    random = np.random.default_rng(0)
    return Topics(random.dirichlet(np.full(count, 0.3), documents), random.dirichlet(np.full(terms, 0.2), count))


def test_documents_stand_by_their_largest_topic_and_then_by_its_share():
    shares = np.array([[0.6, 0.4], [0.1, 0.9], [0.8, 0.2], [0.3, 0.7]])
    assert structure_info(shares).heights.tolist() == [[0.8, 0.2], [0.6, 0.4], [0.1, 0.9], [0.3, 0.7]]


def test_more_documents_than_can_be_told_apart_are_means_that_still_add_to_one():
    info = structure_info(topics(documents=2001).shares)
    assert info.group == 4
    assert len(info.heights) == 501
    np.testing.assert_allclose(info.heights.sum(1), 1)


def test_terms_are_the_likeliest_ones_under_their_names():
    terms = np.array([[0.2, 0.5, 0.3], [0.1, 0.1, 0.8]])
    info = terms_info(terms, 2, ["sea", "ice", "air"])
    assert info.names == (("ice", "air"), ("air", "sea"))
    assert info.probabilities == ((0.5, 0.3), (0.8, 0.1))
    assert terms_info(terms, 5).names[0] == ("1", "2", "0")


@pytest.mark.parametrize(("count", "names"), [(0, None), (2, ["one"])])
def test_terms_without_a_name_or_none_at_all_are_refused(count, names):
    with pytest.raises(ConfigError):
        terms_info(np.ones((2, 3)) / 3, count, names)


@pytest.mark.parametrize("count", [1, 8, pytest.param(33, marks=pytest.mark.slow)])
def test_figures_of_any_number_of_topics_are_drawn_and_none_is_left_open(count):
    found = topics(documents=100, count=count)
    for figure in (found.figure("structure"), found.figure("terms")):
        assert figure._repr_png_()[0].startswith(b"\x89PNG")
    pyplot = sys.modules.get("matplotlib.pyplot")
    assert pyplot is None or not pyplot.get_fignums()


def test_the_first_twenty_four_topics_have_colours_of_their_own():
    assert len(set(topic_colours(24))) == 24
    assert topic_colours(26)[24] == topic_colours(26)[0]


def test_eight_topics_are_told_apart_and_stand_in_two_rows_of_four():
    parts = [to_rgb(colour) for colour in topic_colours(8)]
    assert min(math.dist(one, other) for one, other in itertools.combinations(parts, 2)) > 0.25
    lefts = [round(axes.get_position().x0, 3) for axes in topics(count=8).figure("terms").axes]
    assert len(set(lefts)) == 4
    assert lefts[:4] == lefts[4:]
