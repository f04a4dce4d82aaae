"""The bill of a run: device-hours as money, electricity and carbon dioxide.

    money    = device-hours × price + reads and bytes that leave the store, at its prices
    energy   = device-hours × watts of a device × PUE
    watts    = of a device, measured by NVML or rated × utilisation, and of its share of the rest of the server
    CO2      = energy × grams of CO2-equivalent per kWh of the grid

Prices are yours: `PRICES` are dated examples with their source, to be checked before use. Every assumption is a field
with its source and can be replaced. Making the hardware, idle devices and storage are not counted. Known error: a
trial's watts are those of its card; without a measurement utilisation is a guess between half and full, and the range
shows its effect.

Where codecarbon ran in a trial, `carbon_reasons` gives its estimate as a second opinion. Its watts are of the whole
machine, with memory and without the overhead of a data centre (PUE), so they differ from those of the bill, and its
grams are of its own table of grids.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from kit.errors import ConfigError, Problem, did_you_mean
from kit.trial.trial import Trial
from kit.units import format_price

_SECONDS_PER_HOUR = 3600.0
_CENTS = 0.1
"""Money below this is written with three digits."""
RATED_WATTS = {
    "B200": 1000.0, "H200": 700.0, "H100": 700.0, "A100": 400.0, "V100": 300.0, "L40S": 350.0, "A40": 300.0,
    "A10G": 300.0, "L4": 72.0, "T4": 70.0, "RTX-A6000": 300.0, "RTX-5090": 575.0, "RTX-4090": 450.0,
    "RTX-3090": 350.0, "RTX-4080": 320.0, "RTX-3060": 170.0, "RTX-3070": 220.0, "RTX-3080": 320.0,
    "RTX-2080-Ti": 250.0, "GTX-1080-Ti": 250.0, "RTX-A4000": 140.0, "RTX-A5000": 230.0, "P100": 300.0, "A10": 150.0,
    "A30": 165.0, "TITAN-RTX": 280.0, "L40": 300.0, "RTX-6000-Ada": 300.0, "H100-NVL": 400.0, "GH200": 700.0,
    "RTX-PRO-6000": 600.0,
}  # fmt: skip
"""Board power by GPU model, as NVIDIA's data sheets state it; of the SXM form where there is one."""
CORE_WATTS = 7.3
"""Of a CPU core in use: 205 W over the 28 cores of a Xeon Platinum 8280 (Intel's data sheet)."""
SERVER_SHARE = 0.4
"""Watts of the rest of the server for each rated watt of its GPUs: a DGX H100 takes 10.2 kW at most, of which 8 GPUs
are 5.6 kW, and is taken to need half of the difference (NVIDIA's data sheet, 2023). That servers of smaller cards are
smaller in proportion is an assumption."""
UTILISATION = (0.5, 0.8, 1.0)
"""Of rated watts while training: (low, taken, high). An assumption."""
PUE = 1.56
"""Power of a data centre over that of its computers: the mean of Uptime Institute's survey, 2024. Large clouds state
1.1."""
GRAMS_PER_KWH: Mapping[str, tuple[float, str]] = {
    "world": (480.0, "Ember, Global Electricity Review 2024, for 2023"),
    "Germany": (381.0, "Ember by Our World in Data, for 2023"),
    "France": (56.0, "Ember by Our World in Data, for 2023"),
    "Australia": (549.0, "Ember by Our World in Data, for 2023"),
    "China": (582.0, "Ember by Our World in Data, for 2023"),
    "India": (713.0, "Ember by Our World in Data, for 2023"),
    "Canada": (170.0, "Ember by Our World in Data, for 2023"),
    "Brazil": (98.0, "Ember by Our World in Data, for 2023"),
}
"""Grams of CO2-equivalent per kWh of a grid, and who says so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPrices:
    """What is charged, in one currency of yours."""

    per_device_hour: float | None = None
    currency: str = ""
    per_thousand_reads: float | None = None
    """Of the store."""
    per_gigabyte: float | None = None
    """Of 10^9 bytes that leave the store."""
    source: str = ""
    """Where the figures are from, and when."""

    def __post_init__(self) -> None:
        for name in ("per_device_hour", "per_thousand_reads", "per_gigabyte"):
            value = getattr(self, name)
            if value is not None and not value >= 0:
                raise ConfigError([Problem(f"prices.{name}", f"{value} is no price; give a number from 0")])

    def money(self, device_hours: float, requests: float = 0.0, sent_bytes: float = 0.0) -> float | None:
        """Of a run; None where no price is known."""
        parts = (
            (self.per_device_hour, device_hours),
            (self.per_thousand_reads, requests / 1000),
            (self.per_gigabyte, sent_bytes / 1e9),
        )
        known = [price * amount for price, amount in parts if price is not None]
        return sum(known) if known else None

    def text(self, amount: float | None) -> str:
        if amount is None:
            return "–"
        return f"{format_price(amount) if 0 < amount < _CENTS else f'{amount:,.2f}'} {self.currency}".rstrip()


_MARCH_2026 = "costnimbus.com, GPU prices of March 2026, on demand"
_TINYTOPICS = "tinytopics documentation, distributed training, 2025: money over hours and devices of its runs"
_EXAMPLES = {
    _MARCH_2026: {
        "AWS H100": 3.90, "GCP H100": 3.00, "Azure H100": 6.98, "Lambda H100": 2.99, "GCP L4": 0.75,
    },
    _TINYTOPICS: {"A100-40GB of 2025": 1.29, "H100 of 2025": 3.09},
}  # fmt: skip
PRICES: Mapping[str, RunPrices] = {
    name: RunPrices(per_device_hour=price, currency="USD", source=source)
    for source, prices in _EXAMPLES.items()
    for name, price in prices.items()
}
"""Examples of a device-hour, dated: look prices up before you rely on them."""


def prices_of(value: float | str | Mapping[str, Any] | RunPrices | None) -> RunPrices:
    """Prices from a number per device-hour, the name of an example, a mapping of the fields, or None for none.

    Raises:
        ConfigError: for anything else.
    """
    if value is None:
        return RunPrices()
    if isinstance(value, RunPrices):
        return value
    if isinstance(value, str):
        if value in PRICES:
            return PRICES[value]
        hint = did_you_mean(value, PRICES, "examples are {}", cutoff=0.5)
        raise ConfigError([Problem("prices", f"{value!r} is no example{hint}; a number is a price per device-hour")])
    if isinstance(value, Mapping):
        return RunPrices(**_checked("prices", RunPrices, value))
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError([Problem("prices", f"{value!r} is no price; give a number per device-hour")])
    return RunPrices(per_device_hour=float(value))


def _checked(what: str, kind: type, values: Mapping[str, Any]) -> dict[str, Any]:
    known = [item.name for item in fields(kind)]
    for name in values:
        if name not in known:
            raise ConfigError([Problem(f"{what}.{name}", f"unknown{did_you_mean(name, known, 'there are {}')}")])
    return dict(values)


@dataclass(frozen=True, slots=True, kw_only=True)
class Power:
    """Watts of a device and its share of a server, and emissions of the grid."""

    device_watts: float
    """While training: measured, or rated watts × the utilisation taken."""
    least_device_watts: float
    most_device_watts: float
    server_watts: float
    """Of the rest of the server, for each device."""
    pue: float = PUE
    grams_per_kwh: float = GRAMS_PER_KWH["world"][0]
    reasons: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("device_watts", "server_watts", "grams_per_kwh"):
            if not getattr(self, name) >= 0:
                raise ConfigError([Problem(f"power.{name}", f"{getattr(self, name)} must be at least 0")])
        if not self.pue >= 1:
            raise ConfigError([Problem("power.pue", f"{self.pue} is below 1, the power of the computers alone")])

    def watt_hours(self, device_seconds: float) -> tuple[float, float, float]:
        """(taken, low, high) of so many seconds of one device."""
        watts = (self.device_watts, self.least_device_watts, self.most_device_watts)
        hours = device_seconds / _SECONDS_PER_HOUR
        taken, low, high = (hours * (one + self.server_watts) * self.pue for one in watts)
        return taken, low, high

    def grams(self, watt_hours: float) -> float:
        """Of CO2-equivalent."""
        return watt_hours / 1000 * self.grams_per_kwh


def power_of(device: str, *, measured_watts: float | None = None, given: Mapping[str, Any] | None = None) -> Power:
    """Watts of a device and its server, with the reasons.

    Args:
        device: A GPU's name, as in the table of cards or as the driver says it; CPU for one core.
        measured_watts: Of one device while it trained.
        given: Fields that replace those assumed; `grid` names one of `GRAMS_PER_KWH`.

    Raises:
        ConfigError: for fields that do not exist, unknown grids and impossible values.
    """
    chosen = dict(given or {})
    name = chosen.pop("grid", "world")
    if name not in GRAMS_PER_KWH:
        message = f"{name!r} is no grid in the table; there are {', '.join(GRAMS_PER_KWH)}, or give grams_per_kwh"
        raise ConfigError([Problem("power.grid", message)])
    grams, source = GRAMS_PER_KWH[name]
    grid = f"grid: {name}, {grams:g} g CO2-equivalent per kWh ({source})"
    found = _watts(device, measured_watts)
    found = replace(found, grams_per_kwh=grams, reasons=(*found.reasons, f"PUE {found.pue} (Uptime 2024)", grid))
    if not chosen:
        return found
    if "device_watts" in chosen:
        chosen = {"least_device_watts": chosen["device_watts"], "most_device_watts": chosen["device_watts"], **chosen}
    changed = replace(found, **_checked("power", Power, chosen))
    replaced = ", ".join(f"{name} {value}" for name, value in (given or {}).items())
    return replace(changed, reasons=(*changed.reasons, f"given instead: {replaced}"))


def _watts(device: str, measured: float | None) -> Power:
    if device.strip().lower() in ("cpu", ""):
        reason = f"{CORE_WATTS} W for each core in use (a Xeon Platinum 8280's share); memory and disks left out"
        return Power(device_watts=CORE_WATTS, least_device_watts=CORE_WATTS / 2, most_device_watts=2 * CORE_WATTS,
                     server_watts=0.0, reasons=(reason,))  # fmt: skip
    words = set(re.split(r"[^a-z0-9]+", device.lower()))
    found = [model for model in RATED_WATTS if set(model.lower().split("-")) <= words]
    model = max(found, key=lambda one: one.count("-"), default="")  # H100-NVL before H100
    rated = RATED_WATTS[model or "A100"]
    watts = SERVER_SHARE * rated
    server = f"{watts:.0f} W for the rest of the server: as in a DGX H100, for each rated watt of its GPUs"
    if measured is not None:
        reason = f"{measured:.0f} W a device, measured by NVML"
        return Power(device_watts=measured, least_device_watts=measured, most_device_watts=measured,
                     server_watts=watts, reasons=(reason, server))  # fmt: skip
    low, taken, high = (share * rated for share in UTILISATION)
    named = model or f"{device} is not in the table, so an A100's"
    reason = (
        f"{rated:.0f} W rated ({named}) × {UTILISATION[1]:.0%} utilisation, assumed, from {UTILISATION[0]:.0%} to full"
    )
    return Power(device_watts=taken, least_device_watts=low, most_device_watts=high, server_watts=watts,
                 reasons=(reason, server))  # fmt: skip


def carbon_reasons(trials: Sequence[Trial], seconds: float) -> list[str]:
    """One sentence for each trial in which codecarbon ran.

    Args:
        trials: Any.
        seconds: Of a run on as many devices as the first of them.
    """
    sentences = []
    for trial in trials:
        event = trial.event("carbon_estimated")
        if not event:
            continue
        watts = event["joules"] / event["seconds"]
        cpu, gpu, memory = (event[f"{part}_joules"] / event["joules"] for part in ("cpu", "gpu", "ram"))
        sentence = (
            f"codecarbon {event['version']} on {trial.name}: {watts:.3g} W for the whole machine ({cpu:.0%} processor, "
            f"{gpu:.0%} GPU, {memory:.0%} memory), {event['country']}'s grid"
        )
        if trial is trials[0]:
            kilowatt_hours = watts * seconds / _SECONDS_PER_HOUR / 1000
            kilograms = event["grams"] / event["seconds"] * seconds / 1000
            sentence += f"; {kilowatt_hours:.3g} kWh and {kilograms:.3g} kg for all epochs on its devices, without PUE"
        sentences.append(sentence)
    return sentences
