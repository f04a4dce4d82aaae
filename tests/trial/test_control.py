import pytest
from hypothesis import given
from hypothesis import strategies as st
from properties import examples

from kit.trial.directory import KILL, STOP, Control


@pytest.fixture
def path(tmp_path):
    Control.create(tmp_path / "control")
    return tmp_path / "control"


def test_a_request_is_seen_by_everyone_who_opened_the_file(path):
    mine, theirs = Control(path), Control(path)
    assert theirs.requested == 0
    mine.request(STOP)
    assert theirs.requested == STOP


def test_a_request_to_kill_is_not_weakened_by_one_to_stop(path):
    control = Control(path)
    control.request(KILL)
    control.request(STOP)
    assert control.requested == KILL


def test_one_rank_leaves_after_the_step_at_which_it_sees_the_request(path):
    control = Control(path)
    assert not control.should_leave(1, rank=0, world_size=1)
    control.request(STOP)
    assert control.should_leave(2, rank=0, world_size=1)


@examples(200)
@given(choices=st.lists(st.integers(0, 3), min_size=40, max_size=160), request_at=st.integers(0, 39))
def test_all_ranks_leave_after_the_same_step_however_they_are_interleaved(tmp_path_factory, choices, request_at):
    """Ranks advance in any order that one collective a step allows: none ends a step that another has not begun."""
    path = tmp_path_factory.mktemp("control") / "control"
    Control.create(path)
    views = [Control(path) for _ in range(4)]
    done, looked, left = [0] * 4, [0] * 4, [False] * 4
    for moment, rank in enumerate([*choices, *(list(range(4)) * 40)]):
        if moment == request_at:
            views[rank].request(STOP)
        if left[rank]:
            continue
        if looked[rank] < done[rank]:  # a step was ended, and now this rank looks whether to leave
            looked[rank] = done[rank]
            left[rank] = views[rank].should_leave(done[rank], rank, world_size=4)
        elif all(looked[other] >= done[rank] and not (left[other] and done[other] == done[rank]) for other in range(4)):
            done[rank] += 1  # all have begun this step
    assert all(left)
    assert len(set(done)) == 1
