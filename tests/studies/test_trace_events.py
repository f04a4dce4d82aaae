"""Reading a trace piece by piece: whatever the pieces, the same events; whatever is wrong, one named error."""

import gzip
import json

import numpy as np
import pytest

from kit.errors import TrialError
from kit.studies.profiling import trace_events
from kit.studies.profiling.trace_events import read_events

EVENTS = [
    {"ph": "X", "name": f'a "quoted" ] }}, name {number}', "cat": "cpu_op", "ts": 1e15 + 10 * number,
     "dur": 5 + number / 8, "pid": 1, "tid": number % 2,
     "args": {"External id": number, "nested": {"list": [1, [2, {"deep": "]"}]]}}}
    for number in (3, 1, 0, 2)
]  # fmt: skip
TEXTS = {
    "written at once": json.dumps({"traceEvents": EVENTS}),
    "with a line for each value": json.dumps({"traceEvents": EVENTS}, indent=2),
    "with facts around": json.dumps({"deviceProperties": [{"name": "H100"}], "traceEvents": EVENTS, "traceName": "x"}),
    "a list alone": json.dumps(EVENTS),
    "with a comma after the last": json.dumps({"traceEvents": EVENTS})[:-2] + ",\n]}",
}


@pytest.mark.parametrize("piece", [1, 7, 64, 1 << 22])
@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_the_pieces_in_which_it_is_read_do_not_matter(tmp_path, monkeypatch, text, piece):
    monkeypatch.setattr(trace_events, "_PIECE", piece)
    path = tmp_path / "x.json"
    path.write_text(text)
    found = read_events(path)
    assert [found.names[name][-1] for name in found.name] == ["0", "1", "2", "3"]
    assert found.begin.tolist() == [0, 10, 20, 30]
    assert found.length.tolist() == [5, 5.125, 5.25, 5.375]
    assert found.external.tolist() == [0, 1, 2, 3]
    assert [found.threads[thread] for thread in found.thread] == [("1", "0"), ("1", "1")] * 2


def test_what_stands_around_the_events_is_known(tmp_path):
    path = tmp_path / "x.json"
    path.write_text(TEXTS["with facts around"])
    assert read_events(path).facts == {"deviceProperties": [{"name": "H100"}], "traceName": "x"}


def test_packed_and_plain_are_told_by_their_bytes(tmp_path):
    path = tmp_path / "packed.json"
    path.write_bytes(gzip.compress(TEXTS["written at once"].encode()))
    assert len(read_events(path)) == 4


def test_an_event_comes_after_those_that_hold_it(tmp_path):
    path = tmp_path / "x.json"
    inner = {"ph": "X", "name": "inner", "ts": 5, "dur": 1}
    path.write_text(json.dumps([inner, {**inner, "name": "outer", "dur": 9}]))
    found = read_events(path)
    assert [found.names[name] for name in found.name] == ["outer", "inner"]
    (part,) = found.by_thread(np.ones(2, bool))
    assert part.tolist() == [0, 1]


@pytest.mark.parametrize("cut", [0.3, 0.6, 0.99])
def test_a_file_that_is_cut_short_is_named(tmp_path, cut):
    path = tmp_path / "x.json"
    text = TEXTS["written at once"]
    path.write_text(text[: int(len(text) * cut)])
    with pytest.raises(TrialError, match=r"x\.json is no trace .*ends"):
        read_events(path)


def test_a_packed_file_that_is_cut_short_is_named(tmp_path):
    path = tmp_path / "x.json.gz"
    path.write_bytes(gzip.compress(TEXTS["written at once"].encode())[:-20])
    with pytest.raises(TrialError, match=r"x\.json\.gz is no trace"):
        read_events(path)


def test_too_many_events_say_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setattr(trace_events, "MOST_EVENTS", 3)
    path = tmp_path / "x.json"
    path.write_text(TEXTS["a list alone"])
    with pytest.raises(TrialError, match=r"active_steps"):
        read_events(path)
