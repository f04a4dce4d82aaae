"""Money, energy and CO2 by hand; every assumption has a reason; prices that make no sense are refused."""

import re

import pytest

from kit.errors import ConfigError
from kit.memory.replay.cards import CARDS
from kit.studies.scaling.bill import CORE_WATTS, GRAMS_PER_KWH, PRICES, PUE, RunPrices, power_of, prices_of


def test_money_is_hours_reads_and_bytes_at_their_prices():
    prices = prices_of({"per_device_hour": 2.0, "per_thousand_reads": 0.5, "per_gigabyte": 0.1, "currency": "EUR"})
    assert prices.money(10, requests=4000, sent_bytes=3e9) == pytest.approx(20 + 2 + 0.3)
    assert prices.text(22.3) == "22.30 EUR"


def test_without_a_price_there_is_no_money():
    assert prices_of(None).money(10) is None
    assert prices_of(None).text(None) == "–"
    assert prices_of(3).money(2) == 6


def test_every_example_says_where_it_is_from_and_when():
    for name, prices in PRICES.items():
        assert prices.per_device_hour > 0
        assert "20" in prices.source, name
        assert prices_of(name) is prices


@pytest.mark.parametrize(
    ("wrong", "words"),
    [("AWS H10", "did you mean 'AWS H100'"), ({"per_hour": 3}, "mean 'per_device_hour'"), (-1, "no price"),
     (True, "no price"), ([3], "no price")],
)  # fmt: skip
def test_prices_that_make_no_sense_are_refused(wrong, words):
    with pytest.raises(ConfigError, match=words):
        prices_of(wrong)


def test_energy_is_watts_of_device_and_server_times_pue():
    power = power_of("H100-80GB", measured_watts=500, given={"server_watts": 100, "pue": 1.2, "grid": "France"})
    taken, low, high = power.watt_hours(3600)
    assert (taken, low, high) == pytest.approx((720, 720, 720))
    assert power.grams(taken) == pytest.approx(0.72 * GRAMS_PER_KWH["France"][0])


def test_without_a_measurement_rated_watts_are_taken_with_a_range_and_said():
    power = power_of("NVIDIA A100-SXM4-80GB")
    taken, low, high = power.watt_hours(3600)
    assert low < taken < high
    assert "400 W rated (A100)" in power.reasons[0]
    assert any("PUE" in reason for reason in power.reasons)
    assert any("grid: world" in reason for reason in power.reasons)


def test_a_cpu_is_counted_by_core():
    assert power_of("CPU").watt_hours(3600)[0] == pytest.approx(CORE_WATTS * PUE)


def test_the_rest_of_a_server_is_in_proportion_to_its_cards():
    assert power_of("H100-80GB").server_watts == pytest.approx(280)
    assert power_of("L4").server_watts < power_of("L4").device_watts


def test_every_card_in_the_table_has_its_own_rated_watts():
    for card in CARDS:
        rated = re.search(r"W rated \((\S+)\)", power_of(card.name).reasons[0])
        assert rated, f"{card.name} has another card's"
        assert rated[1].split("-")[0] in card.name


@pytest.mark.parametrize(
    ("given", "words"),
    [({"grid": "Mars"}, "no grid"), ({"pue": 0.5}, "below 1"), ({"watts": 5}, "unknown"), ({"device_watts": -1}, "0")],
)
def test_impossible_power_is_refused(given, words):
    with pytest.raises(ConfigError, match=words):
        power_of("T4", given=given)


def test_a_negative_price_names_its_field():
    with pytest.raises(ConfigError, match=r"prices\.per_gigabyte"):
        RunPrices(per_gigabyte=-1)
