"""Overview: the four answers that stand on top of a panel: memory, speed, data and the whole run.

Each card is made by a plain function of what is known, and says why when nothing is: no number stands under a name that
it does not answer. The speed of training is measured, here or by earlier trials of the same, or predicted from the
operators of a step (`kit.predict_speed`), as it is on a GPU model that is not here; never is it derived from how fast
the store can be read. Cards keep their height, so that the page does not move while settings change.
"""

from __future__ import annotations

import contextlib
import dataclasses
import html
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ipywidgets

from kit.charts.memory import LOOKS, VERDICTS
from kit.charts.speed import COLOURS
from kit.charts.style import GREEN, ORANGE, VERMILION
from kit.chunks.cost import LayoutCost, slowest
from kit.config import Config
from kit.errors import KitError
from kit.machine.processes import BUSY_CORES, machine
from kit.records.ratios import NO_SPEED, SpeedRange, range_words, speed_key, speed_range
from kit.trial.payload import parts_of
from kit.trial.submit import given_of
from kit.units import format_bytes, format_count, format_seconds, plural
from kit.widgets.parts import QUIET, WAITING_STYLE, line, turn_grey

if TYPE_CHECKING:
    from kit.memory.replay.estimate import MemoryEstimate
    from kit.records.row import Row
    from kit.speed.prediction import SpeedEstimate
    from kit.studies.calibration.result import Calibration
    from kit.studies.scaling.predict import BigRun
    from kit.widgets.memory_view import CardAnswer

_BUSY = (("compute", 0.5, GREEN), ("data", 0.8, ORANGE))


@dataclass(frozen=True, slots=True, kw_only=True)
class OverviewCard:
    """One answer."""

    title: str
    value: str
    unit: str = ""
    why: str = ""
    bar: Sequence[tuple[float, str]] = ()
    """(fraction, colour) of the parts of a bar."""
    colour: str = ""
    """Of the value."""
    help: str = ""
    """A sentence for the pointer that rests on it, with the same thing in code."""
    stale: bool = False
    """Whether it is the answer to what was set before, shown grey until there is another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredSpeed:
    """What a trial gave, and what follows for the whole run."""

    config: Config
    """That was asked for."""
    name: str
    samples_per_second: float
    sentence: str
    """Where a step spends its time."""
    run: BigRun | None = None
    run_unknown: str = ""
    """Why the whole run is not known."""

    def holds_for(self, config: Config) -> bool:
        """Whether the trial ran what `config` asks for, as far as speed goes."""
        return not [path for path in self.config.diff(config) if not path.startswith(NO_SPEED)]


def measure_speed(trial: Any) -> MeasuredSpeed | None:
    """What is known from an ended trial; None when it has no step after its warm-up."""
    from kit.records.timing import timing
    from kit.records.trace import throughput_info
    from kit.studies.scaling.predict import predict_run

    rate = throughput_info([*trial.events, *trial.steps], trial.config)
    if not rate.measured_steps:
        return None
    run, unknown = None, ""
    try:
        run = predict_run(trial, memory=False)
    except KitError as error:
        problems = getattr(error, "problems", ())
        unknown = problems[0].message if problems else str(error)
    return MeasuredSpeed(
        config=trial.asked, name=trial.name, samples_per_second=rate.mean_samples_per_second,
        sentence=timing(trial).sentence, run=run, run_unknown=unknown,
    )  # fmt: skip


def speed_expected(config: Config, module: Any, data: Any, rows: Iterable[Row]) -> SpeedRange | None:
    """What trials that have run here, the newest last, say about this config; None where none was of the same."""
    from kit.machine.machine import hardware, resolve_devices

    try:
        resolved = resolve_devices(config, hardware())
    except KitError:  # devices that are not here
        return None
    environment = {
        "given": given_of(*parts_of(module, data, config)), "machine": machine(), "accelerator": resolved.accelerator,
        "world_size": resolved.world_size,
    }  # fmt: skip
    key = speed_key(config, environment)
    return speed_range(row for row in rows if row["speed_key"] == key)


def memory_card(
    answer: CardAnswer | None, estimate: MemoryEstimate | None, state: str = "", elsewhere: str = ""
) -> OverviewCard:
    """Whether it fits; `elsewhere` is a GPU model that is not here.

    `state` says why nothing is known of these settings: an estimate is of those before then.
    """
    title, code = "memory, predicted", "kit.predict_memory(config, device=...)"
    title = f"memory of {elsewhere}, predicted" if elsewhere and not (state and estimate) else title
    if estimate is None:
        return OverviewCard(title=title, value="not known", why=state, help=code)
    sign, colour = VERDICTS[estimate.verdict]
    size = f"{format_bytes(estimate.device_reserved_bytes)} of {format_bytes(estimate.capacity_bytes)}"
    if state:
        before = f"{size} before the change"
        return OverviewCard(
            title=title, value=f"{sign} {estimate.verdict}", unit=before, why=state, help=code, stale=True
        )
    parts = [(LOOKS[name].label, count) for name, count in estimate.breakdown.items() if count]
    largest = max(parts, key=lambda part: part[1], default=("nothing", 0))
    share = largest[1] / max(1, sum(count for _, count in parts))
    words = [text for text in (answer.words if answer else "").split(", ") if "batch" in text or "sample" in text]
    why = " · ".join([*estimate.conditions[:1], *words, f"{largest[0]} {share:.0%} of the peak"])
    whole = max(estimate.capacity_bytes, estimate.device_reserved_bytes)
    bar = [(count / whole, LOOKS[name].colour) for name, count in estimate.breakdown.items() if count]
    return OverviewCard(
        title=title, value=f"{sign} {estimate.verdict}", unit=size, why=why, bar=bar, colour=colour, help=code
    )


def speed_card(
    speed: MeasuredSpeed | None, config: Config, expected: SpeedRange | None = None, elsewhere: str = "",
    predicted: SpeedEstimate | None = None,
) -> OverviewCard:  # fmt: skip
    """Samples per second that a trial of these settings gave, or earlier ones did, or that its operators would take.

    `elsewhere` is the GPU model that is asked about and not here; what was measured here is no speed of it. `predicted`
    is of the device that is asked about.
    """
    code = "kit.fit(config).wait()"
    mine = speed if speed is not None and speed.holds_for(config) else None
    if predicted is not None and (elsewhere or (mine is None and expected is None)):
        return _predicted_card(predicted, elsewhere)
    if elsewhere:
        known = mine.samples_per_second if mine else expected.samples_per_second if expected else None
        why = "a trial on it measures it" if known is None else f"this machine gave {format_count(known)} samples/s"
        return OverviewCard(title="speed", value="not known", unit=f"on {elsewhere}", why=why, help=code)
    if mine is not None:
        rate = format_count(mine.samples_per_second)
        return OverviewCard(title="speed, measured", value=rate, unit="samples/s here", why=mine.sentence, help=code)
    if expected is not None:
        value = range_words(expected)
        return OverviewCard(
            title="speed, predicted", value=value, unit="samples/s here", why=f"by {expected.source}", help=code
        )
    if speed is None:
        why = f"Fit measures {config.trial.max_steps} steps"
        return OverviewCard(title="speed", value="not known", unit="before a trial", why=why, help=code)
    why = f"other settings gave {format_count(speed.samples_per_second)} samples/s ({speed.name})"
    return OverviewCard(title="speed", value="not known", unit="for these settings", why=why, help=code)


def _predicted_card(predicted: SpeedEstimate, elsewhere: str) -> OverviewCard:
    low, high = map(format_count, (predicted.low_samples_per_second, predicted.high_samples_per_second))
    title = f"speed of {elsewhere}, predicted" if elsewhere else "speed, predicted"
    mfu = "" if predicted.mfu is None else f" · {predicted.mfu:.0%} of its peak"
    step = f"{format_seconds(predicted.step_seconds)} a step · bound by {predicted.bound}{mfu}"
    if predicted.busy_cores > BUSY_CORES:
        step += f" · others used {predicted.busy_cores:.1f} cores while it was measured"
    whole = predicted.time.seconds or 1.0
    bar = [(spent / whole, COLOURS[kind]) for kind, spent in predicted.time.by_kind.items() if kind in COLOURS]
    code = "kit.predict_speed(config, device=...)"
    return OverviewCard(title=title, value=f"{low} to {high}", unit="samples/s", why=step, bar=bar, help=code)


def data_card(
    costs: Sequence[LayoutCost], ranks: int, speed: MeasuredSpeed | None, config: Config, missing: str,
    elsewhere: str = "", from_bucket: bool = False,
) -> OverviewCard:  # fmt: skip
    """What the store can give all ranks, beside what training takes here; `missing` says why nothing is known.

    `from_bucket` says that the store lies in a folder here, which the costs are not of.
    """
    code = "kit.plan_chunks(config)"
    if not costs:
        return OverviewCard(title="data", value="not known", why=missing, help=code)
    size = config.loader.batch_size
    requests = sum(cost.requests_made_per_batch for cost in costs) / size
    stored = format_bytes(sum(cost.bytes_made_per_batch for cost in costs) / size)
    why = f"{requests:.3g} requests, {stored} a sample where nothing is cached, bound by {slowest(costs).bound}"
    bar: list[tuple[float, str]] = []
    rate = ranks * size / sum(cost.seconds_per_batch for cost in costs)
    if speed is not None and speed.holds_for(config) and not elsewhere:
        used = speed.samples_per_second / rate
        colour = next((colour for _, most, colour in _BUSY if used <= most), VERMILION)
        why, bar = f"{used:.0%} of it used · {why}", [(min(1.0, used), colour)]
    return OverviewCard(
        title="data, predicted", value=format_count(rate), why=why, bar=bar, help=code,
        unit="samples/s from a bucket" if from_bucket else "samples/s can be read",
    )  # fmt: skip


def calibrated_card(found: Calibration | None, config: Config) -> OverviewCard | None:
    """What a loader gave with these settings; None where no calibration says so."""
    if found is None or found.chosen is None or found.apply(config) != config or not found.batches_per_second:
        return None
    processes = plural(found.chosen.num_workers, "loader process", "loader processes")
    rate = format_count(found.batches_per_second * config.loader.batch_size)
    why = f"{found.batches_per_second:.3g} batches/s with {processes}, without training beside it"
    code = "kit.studies.calibrate(config)"
    return OverviewCard(title="data, calibrated", value=rate, unit="samples/s on a device", why=why, help=code)


def run_card(
    speed: MeasuredSpeed | None, config: Config, elsewhere: str = "", predicted: SpeedEstimate | None = None
) -> OverviewCard:
    """Time and energy of the whole run, and from how many devices on more do not help."""
    code = "kit.studies.predict_run(trial)"
    training = config.training
    unit = training.length
    here = speed is not None and speed.holds_for(config)
    if predicted is not None and (elsewhere or not here):
        samples = speed.run.samples_per_epoch if here and speed is not None and speed.run is not None else None
        run = _predicted_run(predicted, config, samples)
        if run is not None:
            row = run.rows[0]
            value = f"{format_seconds(row.low_seconds)} to {format_seconds(row.high_seconds)}"
            power = _energy(row.watt_hours[0])
            why = f"{predicted.device}, by {predicted.costs} · {power} · without validation and checkpoints"
            title = f"whole run on {elsewhere}, predicted" if elsewhere else "whole run, predicted"
            return OverviewCard(title=title, value=value, unit=unit, why=why, help="kit.studies.predict_run(speed)")
    if elsewhere:
        return OverviewCard(title="whole run", value="not known", unit=f"on {elsewhere}", why=unit, help=code)
    if speed is None or not speed.holds_for(config):
        return OverviewCard(title="whole run", value="not known", unit="before a trial", why=unit, help=code)
    if speed.run is None:
        return OverviewCard(title="whole run", value="not known", unit=unit, why=speed.run_unknown, help=code)
    first = speed.run.rows[0]
    batches = math.ceil(speed.run.samples_per_epoch / (first.devices * speed.run.batch_size))
    epochs = training.max_steps * config.levers.accumulate_grad_batches / batches or training.max_epochs
    share = first.seconds_per_epoch * epochs / first.total_seconds
    hours = format_seconds(first.seconds_per_epoch * epochs)
    power = _energy(first.watt_hours[0] * share)
    devices = f"{first.devices} device" + "s" * (first.devices != 1)
    why = " · ".join([power, speed.run.sentence])
    return OverviewCard(title="whole run, predicted", value=hours, unit=f"{unit}, {devices}", why=why, help=code)


def _predicted_run(predicted: SpeedEstimate, config: Config, samples: int | None) -> BigRun | None:
    """The whole run before any trial; None where its length is not known."""
    from kit.studies.scaling.predict import predict_run

    speed = dataclasses.replace(predicted, config=config)
    with contextlib.suppress(KitError):
        return predict_run(speed, devices=[predicted.devices], samples_per_epoch=samples, memory=False)
    return None


def _energy(watt_hours: float) -> str:
    return f"{watt_hours:.3g} Wh" if watt_hours < 1000 else f"{watt_hours / 1000:.3g} kWh"


_TWO_LINES = (
    "display:-webkit-box;-webkit-box-orient:vertical;-webkit-line-clamp:2;overflow:hidden;line-height:1.3;height:2.6em"
)


def card_html(card: OverviewCard) -> str:
    """A card of one height, whatever it says: two lines say why, and all of it is in the tooltip."""
    quiet = f"color:{QUIET};font-size:.85em;overflow:hidden;text-overflow:ellipsis;white-space:nowrap"
    parts = "".join(
        f"<i style='display:block;width:{fraction:.2%};background:{colour}'></i>" for fraction, colour in card.bar
    )
    bar = (
        "<div style='display:flex;height:6px;border-radius:3px;overflow:hidden;margin:3px 0;"
        f"background:{'var(--jp-layout-color2, #eee)' if card.bar else 'none'}'>{parts}</div>"
    )
    colour = f"color:{card.colour}" if card.colour else ""
    tooltip = html.escape(f"{card.why} — {card.help}" if card.why else card.help, quote=True)
    name = html.escape(card.title, quote=True)
    return (
        f"<section aria-label='{name}' title='{tooltip}' style='line-height:1.45;min-width:0'>"
        f"<div style='{quiet};font-weight:600'>{html.escape(card.title)}</div>"
        "<div style='overflow:hidden;text-overflow:ellipsis;white-space:nowrap'>"
        f"<b style='font-size:1.25em;{colour}'>{html.escape(card.value)}</b> "
        f"<span style='color:{QUIET}'>{html.escape(card.unit)}</span></div>"
        f"{bar}<div style='{_TWO_LINES};color:{QUIET};font-size:.85em'>{html.escape(card.why)}</div></section>"
    )


_FOUR_OR_TWO = "repeat(auto-fit, minmax(min(100%, max(190px, min(calc(50% - 10px), calc((820px - 100%) * 999)))), 1fr))"
"""Columns: never three and one."""


class Overview:
    """The four cards in a row, two by two on a narrow page."""

    def __init__(self) -> None:
        self.cards: dict[str, OverviewCard] = {}
        self.places = {name: line() for name in ("memory", "speed", "data", "run")}
        layout = {
            "grid_template_columns": _FOUR_OR_TWO, "grid_gap": "4px 20px",
            "margin": "0 0 6px", "padding": "6px 0", "width": "100%",
            "border_top": "1px solid var(--jp-border-color2, #ddd)",
            "border_bottom": "1px solid var(--jp-border-color2, #ddd)",
        }  # fmt: skip
        self.ui = ipywidgets.GridBox([*self.places.values(), line(WAITING_STYLE, display="none")], layout=layout)

    def show(self, **cards: OverviewCard) -> None:
        """Replace these cards."""
        self.cards |= cards
        for name, card in cards.items():
            self.places[name].value = card_html(card)
            turn_grey(self.places[name], card.stale)

    @property
    def text(self) -> str:
        """The cards as a line of text."""
        return "; ".join(f"{card.title}: {card.value} {card.unit}".strip() for card in self.cards.values())
