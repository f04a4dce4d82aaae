"""Memory against the length of a sequence, predicted and measured: flat with sequence chunks, growing without."""

import pytest

import kit
from kit.charts.compare import sequence_figure
from kit.errors import ConfigError, TrialError
from kit.models import Field, RandomData

LENGTHS = (256, 1024)
CHUNK = 64
TOKENS = "datasets/tokens/source.py:Tokens"


class Series(RandomData):
    def __init__(self, context):
        field = Field(shape=(context, 16))
        super().__init__((field, field), batch_size=4, samples=16)


def recurrent(config):
    arguments = {"features": 16, "width": 64, "layers": 1}
    return config.replace({"model.target": "kit.models:Recurrent", "model.arguments": arguments})


def windowed(config):
    arguments = {"vocabulary": 256, "width": 64, "heads": 2, "layers": 3, "context": 1024, "window": 32}
    changes = {"model.target": "kit.models:GPT", "model.arguments": arguments, "loader.batch_size": 2}
    return config.replace({**changes, "data.arguments": {"vocabulary": 256}})


@pytest.mark.slow
@pytest.mark.parametrize(("of", "data"), [(recurrent, Series), (windowed, TOKENS)])
def test_prediction_and_measurement_are_flat_with_chunks_and_grow_without(config, of, data):
    check = kit.studies.verify_sequences(of(config(max_steps=3)), None, data, lengths=LENGTHS, chunk=CHUNK)
    steps = [*check.whole, *check.chunked]
    assert [step.config.data.arguments["context"] for step in steps] == 2 * list(LENGTHS)
    assert [step.config.levers.sequence_chunk for step in steps] == [0, 0, CHUNK, CHUNK]
    assert all(step.ratio == pytest.approx(1, abs=0.01) for step in steps)
    assert check.growth(check.whole) > 3
    assert check.growth(check.chunked) < 1.3  # the batch itself is longer
    assert "4 times the length" in repr(check)
    (axes,) = sequence_figure(check).axes
    assert [list(line.get_xdata()) for line in axes.lines] == [list(LENGTHS)] * 4
    assert {text.get_text().splitlines()[0] for text in axes.texts} == {"whole", "in chunks of 64"}


def test_a_module_without_chunk_step_keeps_its_one_line_and_says_why(config):
    plain = config(max_steps=2).replace({"model.target": "kit.testing:TinyModule", "data.arguments": {}})
    check = kit.studies.verify_sequences(
        plain, None, "kit.testing:TinyData", lengths=(8, 16), chunk=4, argument="samples"
    )
    assert all(step.ran for step in check.whole)
    assert not any(step.ran for step in check.chunked)
    assert "has no chunk_step" in repr(check)
    assert len(sequence_figure(check).axes[0].texts) == 1


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"lengths": (8,)}, "two or more"),
        ({"lengths": (0, 8)}, "two or more"),
        ({"chunk": 0}, "is empty"),
        ({"data": Series(8)}, "length .*is fixed"),
    ],
)
def test_what_draws_no_line_is_refused_before_any_process(config, changes, words):
    given = {"data": Series, "lengths": LENGTHS, "chunk": CHUNK, **changes}
    with pytest.raises(ConfigError, match=words):
        kit.studies.verify_sequences(config(), None, given.pop("data"), **given)


def test_whole_sequences_that_fail_are_a_failure(config):
    short = windowed(config()).replace({"model.arguments": {"vocabulary": 256, "width": 64, "heads": 2, "context": 8}})
    with pytest.raises((TrialError, ConfigError), match="made for 8 tokens"):
        kit.studies.verify_sequences(short, None, TOKENS, lengths=LENGTHS, chunk=CHUNK)
