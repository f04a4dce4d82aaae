"""What a run directory can be found to hold: nothing yet, words of a later kit, times of a clock that was set back."""

import json

import pytest
from waiting import PATIENCE_SECONDS

from kit.events import EventReader, encode
from kit.memory.alongside import fit
from kit.trial.trial import Trial

MODULE, DATA = "kit.testing:TinyModule", "kit.testing:TinyData"


@pytest.fixture
def ended(config):
    """A trial that ran to its end."""
    return fit(config(), MODULE, DATA).wait(PATIENCE_SECONDS)


def test_a_run_whose_event_files_are_empty_is_waiting_while_its_supervisor_lives(ended):
    for path in ended.paths.event_files():
        path.write_bytes(b"")
    found = Trial.open(ended.run_directory)
    assert (found.state, found.steps, found.events) == ("WAITING", [], [])


def test_an_event_of_a_kind_that_is_not_known_is_kept_and_disturbs_nothing(ended):
    with ended.paths.events(0).open("ab") as file:
        file.write(encode({"kind": "foreseen_by_a_later_kit", "time": 1.0, "rank": 0, "value": [1, {"deep": 2}]}))
    again = Trial.open(ended.run_directory)
    assert again.event("foreseen_by_a_later_kit", "value") == [1, {"deep": 2}]
    assert (again.state, len(again.steps)) == ("COMPLETE", 8)


def set_back(path, after, seconds):
    """Give every event after the first `after` the time of a clock that was set back."""
    lines = [json.loads(line) for line in path.read_bytes().splitlines()]
    for event in lines[after:]:
        event["time"] -= seconds
    path.write_bytes(b"".join(map(encode, lines)))


def test_a_clock_that_is_set_back_neither_mixes_steps_nor_revives_a_trial(ended):
    set_back(ended.paths.supervisor_events, 1, 3600)
    set_back(ended.paths.events(0), 6, 3600)
    again = Trial.open(ended.run_directory)
    assert again.state == "COMPLETE"
    assert [event["step"] for event in again.steps] == list(range(1, 9))
    assert again.wait(PATIENCE_SECONDS).state == "COMPLETE"


def test_lines_of_one_file_keep_their_order_whatever_their_times_say(tmp_path):
    for rank, times in enumerate(([5.0, 1.0, 6.0], [5.5, 2.0])):
        file = tmp_path / f"events.{rank}.jsonl"
        file.write_bytes(b"".join(encode({"kind": "tick", "time": time, "rank": rank}) for time in times))
    read = EventReader(tmp_path).read()
    assert [event["time"] for event in read if event["rank"] == 0] == [5.0, 1.0, 6.0]
    assert [event["time"] for event in read if event["rank"] == 1] == [5.5, 2.0]
    assert [event["rank"] for event in read] == [0, 0, 1, 1, 0]
