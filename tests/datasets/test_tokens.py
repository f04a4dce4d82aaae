"""The random tokens: seeded, as long as the model of their recipe reads, and never beyond its vocabulary."""

from pathlib import Path

import pytest
import torch

from kit.config import Config
from kit.targets import load_target

RECIPE = Path(__file__).parents[2] / "datasets" / "tokens" / "recipe.yaml"
Tokens = load_target(f"{RECIPE.with_name('source.py')}:Tokens")


def test_equal_seeds_give_equal_sequences_and_no_two_sequences_are_alike():
    first, again, other = Tokens(seed=1), Tokens(seed=1), Tokens(seed=2)
    assert torch.equal(first[7], again[7])
    assert not torch.equal(first[7], other[7])
    assert len({tuple(first[place].tolist()) for place in range(20)}) == 20


def test_they_fit_the_model_of_the_recipe():
    arguments = Config.load(RECIPE).model.arguments
    sequence = Tokens()[0]
    assert sequence.dtype == torch.int64
    assert len(sequence) == arguments["context"] + 1
    assert max(int(Tokens()[place].max()) for place in range(50)) < arguments["vocabulary"]


def test_there_is_none_beyond_the_last():
    few = Tokens(sequences=3)
    assert len(few) == 3
    with pytest.raises(IndexError, match="there are 3"):
        few[3]
