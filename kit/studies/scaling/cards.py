"""compare_cards: which card a run should be rented on, by its time, its price and whether it fits.

Each card is asked what `kit.predict_speed` and `kit.predict_memory` say of the config there, and
`kit.studies.predict_run` makes a run of it on each number of devices, so a row here is a row there. Nothing runs but
dry runs, and one that serves several cards is made once. The config is the same everywhere: what does not fit is told,
and `kit.recommend` finds what would. The batch of a device stays the same, so the global batch grows with the devices.

Known error: that of predicted speeds, whose range is in every row. Two rows whose ranges overlap are not decided.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kit.arguments import config_first
from kit.errors import ConfigError, Problem
from kit.json_text import written
from kit.memory.replay.cards import COMMON_CARDS, find_card
from kit.registry import Drawable
from kit.speed.prediction import predict_speed
from kit.studies.scaling.bill import RunPrices, prices_of
from kit.studies.scaling.predict import BigRun, BigRunRow, predict_run
from kit.tables import MISSING, ResultRows, WaitingLine, csv_text, html_list, html_table, text_table
from kit.units import format_amount, format_bytes, format_count, format_seconds

_COLUMNS = ("card", "devices", "memory", "samples/s", "whole run", "range", "device-hours")
_ENDS = ("energy", "limit")
_MONEY, _WORTH = "money", "worth"
_OF_ONE = ("warning: ", "memory ")
"""How reasons begin that a reader must know though they hold for one card only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CardRow:
    """The run on one number of devices of one card."""

    card: str
    run: BigRunRow
    prices: RunPrices

    @property
    def fits(self) -> bool:
        """False where it is known not to fit."""
        return self.run.fits is not False

    def __str__(self) -> str:
        return f"{self.run.devices} × {self.card}"


class CardComparison(ResultRows[CardRow], Drawable):
    """What fits comes first, the cheapest before others, or the fastest where a price is missing."""

    def __init__(self, runs: Mapping[str, BigRun]) -> None:
        rows = [CardRow(card=card, run=row, prices=run.prices) for card, run in runs.items() for row in run.rows]
        self.priced = all(row.run.money is not None for row in rows)
        """Whether every row has its price."""
        super().__init__(sorted(rows, key=lambda row: (not row.fits, self._rank(row))))
        self.runs = dict(runs)
        """What `kit.studies.predict_run` says of each card, with all its reasons."""

    def _rank(self, row: CardRow) -> float:
        return row.run.money if self.priced and row.run.money is not None else row.run.total_seconds

    @property
    def cheapest(self) -> CardRow | None:
        """The row that costs least of those that fit; None where a price is missing or nothing fits."""
        return self[0] if self.priced and len(self) and self[0].fits else None

    @property
    def fastest(self) -> CardRow | None:
        """The row that ends first of those that fit; None where nothing fits."""
        return min((row for row in self if row.fits), key=lambda row: row.run.total_seconds, default=None)

    def worth(self, row: CardRow) -> float:
        """How many times the price of a device-hour of the first row one of this row is worth: both runs cost the same
        then."""
        return self[0].run.device_hours / row.run.device_hours

    @property
    def reasons(self) -> tuple[str, ...]:
        """What holds for every card, and what is to be known of the rows."""
        first, *others = (run.reasons for run in self.runs.values())
        told = [text for text in first if all(text in other for other in others)]
        if not self.priced:
            told.append(f"worth: how many times the price of an hour of {self[0].card} an hour of this card may have")
        elif undecided := self._undecided():
            told.append(f"by their ranges these may cost less than the cheapest: {', '.join(undecided)}")
        if not all(row.fits for row in self):
            told.append("what does not fit is timed as on a card that had the memory; kit.recommend finds what would")
        for card, run in self.runs.items():
            told += [f"{card}: {text}" for text in run.reasons if text.startswith(_OF_ONE) and text not in told]
        return (*told, "the reasons of one card are those of .runs[card]")

    def _undecided(self) -> list[str]:
        """Other cards whose least cost is below the most that the cheapest may cost."""
        best = self.cheapest
        if best is None or best.run.money is None:
            return []
        most = best.run.money * best.run.high_seconds / best.run.total_seconds
        return list(dict.fromkeys(
            row.card for row in self
            if row.fits and row.card != best.card
            and (row.run.money or 0.0) * row.run.low_seconds / row.run.total_seconds < most
        ))  # fmt: skip

    @property
    def sentence(self) -> str:
        """The cheapest and the fastest in words."""
        fastest, cheapest = self.fastest, self.cheapest
        if fastest is None:
            return "it fits none of them as configured"
        told = f"fastest: {fastest}, {format_seconds(fastest.run.total_seconds)}"
        if fastest.run.money is not None:
            told += f" for {fastest.prices.text(fastest.run.money)}"
        if cheapest is None:
            return told
        if cheapest is fastest:
            return told.replace("fastest", "cheapest and fastest")
        seconds, money = format_seconds(cheapest.run.total_seconds), cheapest.prices.text(cheapest.run.money)
        return f"cheapest: {cheapest}, {money} in {seconds}; {told}"

    def to_csv(self, path: str | Path | None = None) -> str:
        """A line for each card and number of devices, in base units; written to `path` when given."""
        names = (
            "devices", "strategy", "total_seconds", "low_seconds", "high_seconds", "samples_per_second", "device_hours",
            "money", "fits", "bound",
        )  # fmt: skip
        cells = []
        for row in self:
            memory = row.run.memory
            reserved = None if memory is None else memory.device_reserved_bytes
            values = [getattr(row.run, name) for name in names]
            cells.append([row.card, *values, reserved, row.run.watt_hours[0]])
        return written(csv_text(["card", *names, "reserved_bytes", "watt_hours"], cells), path)

    @property
    def _headline(self) -> str:
        run = next(iter(self.runs.values()))
        return f"{run.length}; {self.sentence}"

    @property
    def _columns(self) -> list[str]:
        return [*_COLUMNS, _MONEY if self.priced else _WORTH, *_ENDS]

    def _cells(self, row: CardRow) -> list[str]:
        run = row.run
        memory = MISSING
        if run.memory is not None:
            memory = f"{run.memory.verdict}, {format_bytes(run.memory.device_reserved_bytes)}"
        last = row.prices.text(run.money) if self.priced else f"{self.worth(row):.2f} ×"
        return [
            row.card, str(run.devices), memory, format_count(run.samples_per_second), format_seconds(run.total_seconds),
            f"{format_seconds(run.low_seconds)} to {format_seconds(run.high_seconds)}", f"{run.device_hours:.3g}", last,
            format_amount(run.watt_hours[0], "Wh"), run.bound,
        ]  # fmt: skip

    @property
    def _marked(self) -> int | None:
        return 0 if self.cheapest is not None else None

    def __repr__(self) -> str:
        table = text_table(self._columns, [self._cells(row) for row in self], self._marked)
        return "\n".join([self._headline, table, *(f"- {text}" for text in self.reasons)])

    def _repr_html_(self) -> str:
        table = html_table(
            self._columns, [self._cells(row) for row in self], caption=self._headline, dense=True,
            marked=self._marked, mark="cheapest",
        )  # fmt: skip
        return f'<div style="overflow-x: auto">{table}</div>{html_list(self.reasons)}'


@config_first
def compare_cards(
    config: Any = None,
    module: Any = None,
    data: Any = None,
    *,
    cards: Sequence[str] | str | None = None,
    devices: Sequence[int] | int = (1, 8),
    prices: Mapping[str, Any] | None = None,
    epochs: int | None = None,
    samples_per_epoch: int | None = None,
    timeout_seconds: float | None = None,
) -> CardComparison:
    """Compare GPUs for a run that trains nothing yet: time, price, energy and whether it fits, on each.

    Args:
        config: What would run; the default config when left out.
        module: What would be trained, as `kit.fit` takes it.
        data: What it would be trained on, as `kit.fit` takes it.
        cards: GPU models such as "A100-40GB"; by default those of `prices`, else some that are common.
        devices: The numbers of devices to compare, or one.
        prices: What a device-hour costs by card, `{"L4": 0.75, "H100-80GB": 3.0}`, or for each what
            `kit.studies.predict_run` takes as prices. Without, a row says what an hour of its card is worth in hours of
            the first.
        epochs: Epochs of the run. None takes the config's `training.max_steps` or `training.max_epochs`.
        samples_per_epoch: Samples of an epoch. None takes what the config or the loader says.
        timeout_seconds: Limit of each dry run, as for `kit.predict_memory`.

    Returns:
        A row for each card and number of devices, those that fit first; `cheapest`, `fastest`, `to_csv()` and
        `figure()`.

    Raises:
        ConfigError: for prices of no card, in several currencies, and what `kit.studies.predict_run` refuses.
        PlanError: for a GPU that is not known, and where the step could not be recorded.
        TrialError: when the module cannot be made, with the user's traceback.

    Example:
        >>> found = kit.studies.compare_cards(config, MyModule, MyData, prices={"L4": 0.75, "H100-80GB": 3.0})
        >>> found.cheapest.run.money <= found.fastest.run.money
        True
    """
    charged = _prices(prices)
    asked = [cards] if isinstance(cards, str) else cards if cards is not None else charged or COMMON_CARDS
    names = list(dict.fromkeys(find_card(str(name)).name for name in asked))
    if not names:
        raise ConfigError([Problem("cards", f"names none; give some, such as {list(COMMON_CARDS[:2])}")])
    runs: dict[str, BigRun] = {}
    with WaitingLine() as waiting:
        for place, card in enumerate(names, start=1):
            waiting.show(f"predicting {card}, {place} of {len(names)}")
            speed = predict_speed(config, module, data, device=card, timeout_seconds=timeout_seconds)
            runs[card] = predict_run(
                speed, devices=devices, epochs=epochs, samples_per_epoch=samples_per_epoch, prices=charged.get(card),
                module=module, data=data, device=card,
            )  # fmt: skip
    return CardComparison(runs)


def _prices(given: Mapping[str, Any] | None) -> dict[str, RunPrices]:
    """By the name of a card of the table."""
    asked: Any = {} if given is None else given  # by a user, who may give anything
    if not isinstance(asked, Mapping):
        hint = 'give what an hour costs by card, as {"L4": 0.75, "H100-80GB": 3.0}'
        raise ConfigError([Problem("prices", f"{asked!r} names no card; {hint}")])
    found = {find_card(str(card)).name: prices_of(price) for card, price in asked.items()}
    if len(currencies := sorted({price.currency for price in found.values()})) > 1:
        raise ConfigError([Problem("prices", f"are in {currencies}; give all of them in one currency")])
    return found
