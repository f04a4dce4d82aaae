"""Guesses: the first one counts, answers of any kind are compared, and one file holds all of them."""

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kit
from kit.charts import style as look
from kit.charts.compare import score_figure
from kit.course.guesses import BOUNDS, MOST_POINTS, ratio
from kit.errors import ConfigError


@pytest.fixture(autouse=True)
def project(tmp_path, monkeypatch):
    (tmp_path / "pyproject.toml").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("KIT_SEAT", raising=False)
    return tmp_path


def points(value, truth, **options):
    return kit.course.guess("q", value, **options).compare(measured=truth).points


def test_a_guess_shows_itself_and_what_to_do():
    asked = kit.course.guess("how much?", unit="bytes")
    assert re.search("^- how much. write .*size such as '600 MiB' in place of None", str(asked))
    assert "write a number in place" in str(kit.course.guess("how many fit?", unit="of 4"))
    assert str(kit.course.guess("how many?", 1, unit="devices")).rstrip().endswith("1 device")
    assert str(kit.course.guess("how fast?", 1, unit="samples/s")).rstrip().endswith("1 samples/s")
    answered = kit.course.guess("how much?", "7 MiB", unit="bytes")
    assert str(answered) == "- how much? you say 7 MiB"
    assert answered.compare(measured=8 << 20)._repr_html_().count("<tr") == 2


@pytest.mark.parametrize(
    ("value", "expected"), [(109, 3), (92, 3), (120, 2), (68, 2), (160, 1), (34, 1), (400, 0), (20, 0)]
)
def test_points_by_the_factor(project, value, expected):
    assert points(value, 100) == expected


def test_what_is_measured_is_the_truth_and_a_prediction_where_nothing_is():
    guess = kit.course.guess("a", 10)
    assert guess.compare(predicted=100, measured=10).points == MOST_POINTS
    assert kit.course.guess("b", 10).compare(predicted=10).points == MOST_POINTS


def test_zero_is_an_answer():
    assert points(0, 0) == MOST_POINTS
    assert kit.course.guess("r", 12).compare(0, 0).points == 0
    assert ratio(3, 0) == float("inf")


def test_words_are_right_or_wrong():
    words = {"choices": ["block", "random"]}
    assert points("block", "block", **words) == MOST_POINTS
    assert kit.course.guess("v", "random", **words).compare(measured="block").points == 0
    with pytest.raises(ConfigError, match="'tree', but the choices are 'block', 'random'"):
        kit.course.guess("w", "tree", **words)
    with pytest.raises(ConfigError, match="measured.*'tree'"):
        kit.course.guess("w", "block", **words).compare(measured="tree")


@pytest.mark.parametrize(("value", "unit"), [("many", ""), ("3 sheep", "bytes"), ([1], "seconds")])
def test_an_answer_that_is_no_number_is_refused_with_how_it_is_written(value, unit):
    with pytest.raises(ConfigError, match="must be a (number|size)"):
        kit.course.guess("q", value, unit=unit)


def test_sizes_are_texts_or_bytes():
    assert points("600 MiB", 600 << 20, unit="bytes") == MOST_POINTS
    assert points(float(600 << 20), 600 << 20, unit="bytes") == MOST_POINTS


def test_the_first_guess_counts_and_run_all_keeps_it(project):
    kit.course.guess("q", 10).compare(measured=100)
    again = kit.course.guess("q", 100).compare(measured=100)
    assert (again.points, again.first) == (0, 10)
    assert re.search("later guess was 100; .*first", str(again))
    unattended = kit.course.guess("q").compare(measured=100)
    assert (unattended.guess, unattended.points) == (100, 0)


def test_a_question_nobody_answered_can_be_answered_later():
    assert kit.course.guess("q").compare(predicted=90, measured=100).points is None
    assert kit.course.guess("q", 100).compare(predicted=90, measured=100).points == MOST_POINTS


def test_without_any_answer_nothing_is_kept(project):
    assert kit.course.guess("q", 10).compare().truth is None
    assert not (project / "guesses.json").exists()


def test_the_score_counts_what_was_guessed(project):
    for name, value in (("a", 100), ("b", None), ("c", 150)):
        kit.course.guess(name, value).compare(predicted=90, measured=100)
    score = kit.course.score()
    assert (score.points, score.most_points) == (5, 6)
    assert re.search("5 of 6 points, 2 of 3", str(score))
    assert [guess.question for guess in score.guesses] == ["a", "b", "c"]


def test_the_score_has_the_order_of_the_course_whichever_notebook_was_run_first():
    for name in ("my own", "03 b", "11", "03 a", "00 c"):
        kit.course.guess(name, 1).compare(measured=1)
    assert [guess.question for guess in kit.course.score().guesses] == ["00 c", "03 b", "03 a", "11", "my own"]


def test_a_damaged_file_is_named_and_left(project):
    (project / "guesses.json").write_text("{")
    with pytest.raises(ConfigError, match="guesses.json cannot be read .* move it away"):
        kit.course.score()
    with pytest.raises(ConfigError, match="move it away"):
        kit.course.guess("a", 1).compare(measured=1)
    assert (project / "guesses.json").read_text() == "{"


def test_the_page_holds_table_chart_and_the_guesses_again(project, monkeypatch):
    monkeypatch.setenv("KIT_SEAT", "2/8 <ada>")
    kit.course.guess("a </script> b", 12, unit="requests").compare(0, 0)
    kit.course.guess("which?", "x", choices=["x", "y"]).compare("y", "x")
    kit.course.guess("far", 5000).compare(90, 100)
    kit.course.guess("nobody").compare(90, 100)
    page = kit.course.score().hand_in("handed/ada.html").read_text()
    kept = json.loads(re.search('<script type="application/json" id="guesses">(.*?)</script>', page)[1])
    assert kept["learner"] == "<ada>"
    assert [one["first"] for one in kept["guesses"]] == [12, "x", 5000, None]
    assert "<ada>" not in page.split('<script type="application/json"')[0]
    assert page.count("<svg") == 1
    assert "http" not in page.replace("http://www.w3.org", "").replace("http-equiv", "")
    kit.course.score().hand_in("handed/ada.html")


def test_a_file_of_somebody_else_is_left_alone(project):
    (project / "mine.html").write_text("mine")
    with pytest.raises(ConfigError, match="is no report of kit"):
        kit.course.score().hand_in("mine.html")
    assert (project / "mine.html").read_text() == "mine"
    with pytest.raises(ConfigError, match="is a folder"):
        kit.course.score().hand_in(project)


def test_an_empty_score_has_a_page_and_a_chart():
    assert kit.course.score().hand_in("empty.html").exists()
    assert look.svg(score_figure(kit.course.score()), "empty").startswith("<svg")


@given(st.floats(0.01, 1e12), st.floats(0.01, 1e12))
def test_points_fall_with_the_factor_and_both_ways_alike(guess, truth):
    asked = kit.course.guess("q", guess)
    there = type(asked)(question="q", first=guess, measured=truth).points
    back = type(asked)(question="q", first=truth, measured=guess).points
    factor = max(guess / truth, truth / guess)
    if all(abs(factor - bound) > 1e-9 * bound for bound in BOUNDS.values()):
        assert there == back == max((points for points, bound in BOUNDS.items() if factor <= bound), default=0)


@pytest.mark.parametrize(
    ("asked", "at_fault"),
    [
        ({"question": None, "value": 3}, "question"),
        ({"question": " ", "value": 3}, "question"),
        ({"question": "q", "value": 3, "unit": None}, "unit"),
        ({"question": "q", "value": "a", "choices": "abc"}, "choices"),
        *(({"question": "q", "value": value}, "value") for value in ("nan", float("inf"), -3, 1e308, 10**400)),
    ],
)
def test_what_no_file_of_guesses_could_hold_is_refused_when_it_is_asked(project, asked, at_fault):
    kit.course.guess("before", 3).compare(measured=4)
    with pytest.raises(ValueError, match=at_fault) as caught:
        kit.course.guess(**asked).compare(measured=4)
    assert len(str(caught.value)) < 200
    assert [one.question for one in kit.course.score().guesses] == ["before"]


def test_a_size_without_its_unit_is_refused():
    with pytest.raises(ConfigError, match="20 MiB"):
        kit.course.guess("12 how much", "20", unit="bytes")


def test_a_later_guess_is_told_that_the_first_counts():
    kit.course.guess("03 how much", "20 GiB", unit="bytes").compare(measured=3)
    again = kit.course.guess("03 how much", "26 GiB", unit="bytes")
    assert "20 GiB, counts" in str(again)
    assert again.compare(measured=3).first == 20 * 2**30
