"""Errors: each refines a built-in and survives the way to another process."""

import pickle

import pytest
import torch

from kit import errors


def _all(kind):
    return [kind, *(found for child in kind.__subclasses__() for found in _all(child))]


@pytest.mark.parametrize("kind", _all(errors.KitError)[1:], ids=lambda kind: kind.__name__)
def test_every_error_refines_a_built_in_and_says_what_it_is_for(kind):
    assert [
        base
        for base in kind.__mro__
        if base.__module__ == "builtins" and base not in (Exception, BaseException, object)
    ]
    assert kind.__doc__


def test_a_config_error_keeps_its_problems_through_pickle():
    error = errors.ConfigError([errors.Problem("loader.batch_size", "too large"), errors.Problem("", "x")], "a.yaml")
    again = pickle.loads(pickle.dumps(error))
    assert again.problems == error.problems
    assert str(again) == str(error)
    assert "loader.batch_size: too large" in str(error)


@pytest.mark.parametrize(("most", "said"), [(1, "a and 2 more"), (2, "a, b and 1 more"), (3, "a, b, c")])
def test_many_names_are_named_in_part(most, said):
    assert errors.first_few(["a", "b", "c"], most) == said


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)

    def forward(self, **batch):
        return self.layer(batch["x"])


@pytest.mark.parametrize(
    ("fail", "word"),
    [
        (lambda: Model()(**[1, 2]), "mapping"),  # torch puts the module's many lines before what is wrong
        (lambda: Model().load_state_dict({}), "Missing"),
        (lambda: int("x"), "invalid"),
    ],
)
def test_the_line_of_an_error_says_what_is_wrong(fail, word):
    with pytest.raises(Exception) as caught:  # noqa: PT011 - three kinds
        fail()
    line = errors.first_line(caught.value)
    assert word in line
    assert "\n" not in line
    assert len(line) < 200
