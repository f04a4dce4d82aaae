"""compare_cards: each row is the run on that card, what fits comes first, and what cannot be compared is refused."""

import csv
import io

import pytest
import torch

import kit
from kit.errors import ConfigError, PlanError
from kit.speed.prediction import predict_speed
from kit.studies.scaling.cards import compare_cards
from kit.studies.scaling.predict import predict_run
from kit.testing import TinyData, TinyModule

PRICES = {"l4": 0.75, "A100-80GB": {"per_device_hour": 1.5}}


class Large(TinyModule):
    """More than a T4 holds, and less than an H200."""

    def __init__(self):
        super().__init__()
        self.unused = torch.nn.Parameter(torch.empty(5 << 30))


def test_a_row_is_the_run_on_that_card(config):
    found = compare_cards(config(), TinyModule, TinyData, prices=PRICES, epochs=3, devices=[1, 2])
    assert {(row.card, row.run.devices) for row in found} == {
        (card, count) for card in ("L4-24GB", "A100-80GB") for count in (1, 2)
    }
    speed = predict_speed(config(), TinyModule, TinyData, device="A100-80GB")
    run = predict_run(speed, devices=[1, 2], prices=1.5, epochs=3, module=TinyModule, data=TinyData, device="A100-80GB")
    for row in found:
        if row.card == "A100-80GB":
            own = run.row(row.run.devices)
            assert (row.run.total_seconds, row.run.money) == pytest.approx((own.total_seconds, own.money))
            assert row.run.memory.device_reserved_bytes == own.memory.device_reserved_bytes
    assert found.runs["A100-80GB"].reasons == run.reasons


def test_the_cheapest_and_the_fastest_are_told_and_drawn(config, tmp_path):
    found = kit.studies.compare_cards(config(), TinyModule, TinyData, prices=PRICES)
    assert [row.run.money for row in found] == sorted(row.run.money for row in found)
    assert found.cheapest is found[0]
    assert found.fastest.run.total_seconds == min(row.run.total_seconds for row in found)
    for shown in (str(found), found._repr_html_()):
        assert f"cheapest: {found.cheapest}" in shown
        assert f"fastest: {found.fastest}" in shown
    lines = list(csv.DictReader(io.StringIO(found.to_csv(tmp_path / "new" / "cards.csv"))))
    assert [float(line["money"]) for line in lines] == [row.run.money for row in found]
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["cards.csv"]
    (axes,) = found.figure().axes
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["L4-24GB", "A100-80GB"]


def test_without_prices_a_row_says_what_an_hour_is_worth(config):
    found = compare_cards(config(), TinyModule, TinyData, cards=["T4", "H200"], devices=1)
    assert found.cheapest is None
    assert [row.card for row in found] == sorted(found.runs, key=lambda card: found.runs[card].rows[0].total_seconds)
    first, last = found
    assert found.worth(first) == 1
    assert found.worth(last) * last.run.device_hours == pytest.approx(first.run.device_hours)
    assert "worth" in str(found)
    assert found.figure().axes[0].get_ylabel() == "device-hours"
    assert {row.card for row in compare_cards(config(), TinyModule, TinyData, devices=1)} >= {"T4-16GB", "H200-141GB"}


def test_what_does_not_fit_comes_last_and_is_said(config):
    found = compare_cards(config(), Large, TinyData, cards=["T4", "H200"], devices=1, prices={"T4": 0.01, "H200": 9})
    assert [(row.card, row.fits) for row in found] == [("H200-141GB", True), ("T4-16GB", False)]
    assert found.cheapest.card == "H200-141GB"
    assert "does not fit" in str(found)
    assert "kit.recommend" in str(found)
    assert "does not fit" in {text.get_text() for text in found.figure().axes[0].get_legend().get_texts()}
    none = compare_cards(config(), Large, TinyData, cards="T4", devices=1)
    assert none.fastest is None
    assert "none of them" in str(none)


def test_what_the_ranges_do_not_decide_is_said(config):
    def told(price):
        return str(compare_cards(config(), TinyModule, TinyData, prices={"L4": 1, "A100-80GB": price}, devices=1))

    assert "may cost less" in told(1.1), "so small a model takes about as long on any card"
    assert "may cost less" not in told(100)


def test_a_card_without_a_price_leaves_the_cheapest_open(config):
    found = compare_cards(config(), TinyModule, TinyData, prices=PRICES, cards=["L4", "T4"], devices=1)
    assert not found.priced
    assert found.cheapest is None
    assert found.fastest is not None
    (axes,) = found.figure().axes
    drawn = {(*line.get_xdata(), *line.get_ydata()) for line in axes.get_lines() if line.get_marker() == "o"}
    assert drawn == {(row.run.total_seconds, row.run.device_hours) for row in found}, "never money beside hours"


def test_a_card_that_costs_nothing_is_drawn_by_its_hours(config):
    found = compare_cards(config(), TinyModule, TinyData, prices={"L4": 0, "T4": 1}, devices=1)
    assert found.cheapest.card == "L4-24GB"
    assert found.figure().axes[0].get_ylabel() == "device-hours"


def test_what_is_to_be_known_of_one_card_is_said(config):
    asked = config().replace({"hardware.precision": "bf16-true"})
    found = compare_cards(asked, TinyModule, TinyData, cards=["T4", "H200"], devices=1)
    assert [text for text in found.reasons if "emulated" in text] == [
        f"T4-16GB: {text}" for text in found.runs["T4-16GB"].reasons if "emulated" in text
    ]
    with pytest.raises(PlanError, match="no such card"):
        compare_cards(config(), TinyModule, TinyData, cards="no such card")


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"prices": 3}, "by card"),
        ({"prices": {"L4": {"per_device_hour": 1, "currency": "USD"}, "T4": {"currency": "EUR"}}}, "one currency"),
        ({"cards": []}, "cards"),
    ],
)
def test_what_cannot_be_compared_is_refused(config, asked, words):
    with pytest.raises(ConfigError, match=words):
        compare_cards(config(), TinyModule, TinyData, **asked)


def test_speeds_on_several_cards_are_no_single_run(config):
    speeds = [predict_speed(config(), TinyModule, TinyData, device=card) for card in ("L4", "H200")]
    with pytest.raises(ConfigError, match="compare_cards"):
        predict_run(speeds, memory=False)
    with pytest.raises(PlanError, match="compare_cards"):
        kit.predict_memory(config(), TinyModule, TinyData, device=["L4", "H200"])


def test_recommend_under_its_older_name_still_answers():
    with pytest.warns(DeprecationWarning, match=r"kit\.recommend"):
        assert kit.studies.recommend is kit.recommend
