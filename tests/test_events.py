"""Events: appended whole by many, read tolerantly by one."""

import json
import math
import multiprocessing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kit.errors import EventLogError
from kit.events import EventReader, EventWriter, encode, number


def _append(path, rank, count):
    writer = EventWriter(path, rank)
    for step in range(count):
        writer.write("step", step=step, text="x" * 200)


def test_a_reader_sees_each_event_once_in_order_of_time(tmp_path):
    reader = EventReader(tmp_path)
    writers = [EventWriter(tmp_path / f"events.{rank}.jsonl", rank) for rank in range(2)]
    for step in range(3):
        for writer in writers:
            writer.write("step", step=step)
    events = reader.read()
    assert [event["time"] for event in events] == sorted(event["time"] for event in events)
    assert len(events) == 6
    assert reader.read() == []
    writers[1].write("fit_ended")
    assert [event["kind"] for event in reader.read()] == ["fit_ended"]


def test_a_torn_last_line_waits_for_its_rest(tmp_path):
    file = tmp_path / "events.0.jsonl"
    line = encode({"kind": "step", "time": 1.0, "rank": 0, "step": 1})
    file.write_bytes(line + line[:10])
    reader = EventReader(tmp_path)
    assert len(reader.read()) == 1
    with file.open("ab") as stream:
        stream.write(line[10:])
    assert len(reader.read()) == 1


@pytest.mark.parametrize("damage", [b"{broken\n", b"[]\n", b'{"kind": "step"}\n', b"\xff\xfe\n"])
def test_damage_in_the_middle_is_named_by_file_and_line(tmp_path, damage):
    line = encode({"kind": "step", "time": 1.0, "rank": 0, "step": 1})
    (tmp_path / "events.0.jsonl").write_bytes(line + damage + line)
    with pytest.raises(EventLogError, match=r"events\.0\.jsonl, line 2"):
        EventReader(tmp_path).read()


@given(st.floats(allow_nan=True, allow_infinity=True))
def test_every_number_survives_and_every_line_is_json(value):
    line = encode({"kind": "step", "time": 1.0, "rank": 0, "loss": value, "parts": [value, {"x": value}]})
    event = json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    again = number(event["loss"])
    assert again == value or (math.isnan(again) and math.isnan(value))


def test_many_processes_append_whole_lines_to_one_file(tmp_path):
    file = tmp_path / "events.0.jsonl"
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_append, args=(file, rank, 500)) for rank in range(8)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert len(EventReader(tmp_path).read()) == 4000


def test_a_folder_without_events_is_quiet(tmp_path):
    assert EventReader(tmp_path / "nothing").read() == []
