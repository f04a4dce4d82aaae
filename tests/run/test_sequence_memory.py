"""Memory against the length of a sequence, predicted and measured: flat with sequence chunks, growing without."""

import functools

import pytest

import kit
from kit.models import Field, RandomData
from kit.report.levers_chart import sequence_figure

LENGTHS = (256, 1024)
CHUNK = 64


def data(length):
    field = Field(shape=(length, 16))
    return functools.partial(RandomData, (field, field), batch_size=4, samples=8)


@pytest.fixture
def recurrent(config):
    arguments = {"features": 16, "width": 64, "layers": 1}
    return config(max_steps=3).replace({"model.target": "kit.models:Recurrent", "model.arguments": arguments})


def predicted(config, chunk, length):
    return kit.predict_memory(None, data(length), config.replace({"levers.sequence_chunk": chunk}))


def test_prediction_and_measurement_are_flat_with_chunks_and_grow_without(recurrent):
    curves = {
        name: {length: predicted(recurrent, chunk, length) for length in LENGTHS}
        for name, chunk in (("whole", 0), ("in chunks", CHUNK))
    }
    sizes = {name: [found.device_allocated_bytes for found in curve.values()] for name, curve in curves.items()}
    assert all(found.complete for curve in curves.values() for found in curve.values())
    assert sizes["whole"][1] > 3 * sizes["whole"][0]
    assert sizes["in chunks"][1] < 1.3 * sizes["in chunks"][0]  # the batch itself is longer
    for name, chunk in (("whole", 0), ("in chunks", CHUNK)):
        trial = kit.fit(None, data(LENGTHS[1]), recurrent.replace({"levers.sequence_chunk": chunk})).wait(60)
        measured = trial.event("memory_measured", "device_allocated_bytes")
        assert measured / sizes[name][1] == pytest.approx(1, abs=0.12)
    (axes,) = sequence_figure(curves).axes
    assert [list(line.get_xdata()) for line in axes.lines] == [list(LENGTHS)] * 2
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["whole", "in chunks"]
