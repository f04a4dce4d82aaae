"""The corpus: any row block first, equal for equal seeds, and made of the topics that it names."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from properties import examples

import kit
from kit.errors import ConfigError

CORPUS = kit.Corpus(documents=300, terms=20, topics=3, length=50, seed=7)
WHOLE = CORPUS.rows(0, 300)


@examples(30)
@given(st.tuples(st.integers(0, 300), st.integers(0, 300)).map(sorted))
def test_a_row_block_is_the_same_however_documents_are_cut(span):
    assert np.array_equal(CORPUS.rows(*span), WHOLE[slice(*span)])
    assert np.array_equal(CORPUS.shares(*span), CORPUS.shares()[slice(*span)])


def test_equal_seeds_give_equal_corpora_and_others_others():
    assert np.array_equal(kit.Corpus(300, 20, 3, 50, 7).rows(100, 200), WHOLE[100:200])
    assert not np.array_equal(kit.Corpus(300, 20, 3, 50, 8).rows(100, 200), WHOLE[100:200])


def test_counts_are_those_of_the_topics_that_are_named():
    corpus = kit.Corpus(documents=4000, terms=12, topics=3, length=100, seed=1)
    counts, truth = corpus.rows(0, 4000), corpus.truth
    assert counts.dtype == np.float32
    assert counts.sum(1).mean() == pytest.approx(100, rel=0.01)
    assert counts.sum(1).var() == pytest.approx(100, rel=0.1)
    np.testing.assert_allclose(counts.mean(0), 100 * (truth.shares @ truth.terms).mean(0), rtol=0.05, atol=0.05)
    for rows in (truth.shares, truth.terms):
        np.testing.assert_allclose(rows.sum(1), 1)


def test_it_is_written_in_row_blocks_of_any_size(tmp_path):
    for block in (1, 77, 300):
        rows = kit.data.write_rows(
            tmp_path / f"{block}.npy", CORPUS.rows, CORPUS.shape, row_block=block, progress=False
        )
        assert np.array_equal(rows.take(slice(0, 300)).numpy(), WHOLE)


@pytest.mark.parametrize("wrong", [{"documents": 0}, {"topics": -1}, {"length": 0.0}, {"spread": float("nan")}])
def test_sizes_that_mean_nothing_are_refused_by_name(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        kit.Corpus(**wrong)


def test_there_are_no_documents_beyond_the_last():
    with pytest.raises(IndexError, match="there are 300"):
        CORPUS.rows(290, 301)
