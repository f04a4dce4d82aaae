"""Controls: one widget per field of a Config, and the conversion between its text and the field's value.

A control is drawn from `FieldInfo` alone: label, tooltip and bounds are the declaration's. Sizes, devices and arguments
are edited as the short text people write (`time: 2, lat: 64`, `0, 1`, `64 MiB`) and parsed here; a text that does not
parse raises ConfigError with the field's path. Every text this module shows reads back as the same value.

ipywidgets' own bounded number fields change a number in the page without telling the kernel, and read 1e3 as 1. A
`NumberField` receives what was typed, keeps it between its bounds, and says in `correction` what it changed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import ipywidgets
import traitlets

from kit.config import Config, FieldInfo, thaw
from kit.errors import ConfigError, Problem
from kit.units import parse_bytes
from kit.widgets.parts import BESIDE_LABEL, LABEL_WIDTH, TIPPED, line, note_html, put, tip_class

_LARGEST_WHOLE = 2**53 - 1
_UNITS = ("TiB", "GiB", "MiB", "KiB", "GB", "MB", "KB")
_SHORT_UNITS = {"seconds": "s"}
_LAYOUT, _STYLE = {"width": "auto", "margin": "1px 0"}, {"description_width": LABEL_WIDTH}


def label(info: FieldInfo) -> str:
    """`requests_in_flight` -> "requests in flight", `latency_seconds` -> "latency, s"."""
    for suffix in ("_bytes_per_second", "_bytes", "_seconds"):
        if info.name.endswith(suffix):
            unit = "" if suffix == "_bytes" else f", {_SHORT_UNITS.get(info.unit, info.unit)}"
            return info.name.removesuffix(suffix).replace("_", " ") + unit
    return info.name.replace("_", " ")


def kind_of(info: FieldInfo) -> type[Any]:
    """The class of the widget that edits one field."""
    if info.kind == "choice" or info.path == "hardware.strategy":
        return ipywidgets.Dropdown  # type: ignore[no-any-return]
    if info.kind == "bool":
        return ipywidgets.Checkbox  # type: ignore[no-any-return]
    return NumberField if info.kind == "int" and not info.unit.startswith("bytes") else ipywidgets.Text


def make_control(info: FieldInfo, value: Any, looks: dict[Any, Any] | None = None) -> Any:
    """The widget that edits one field, holding `value`; those given the same `looks` share their layout and style."""
    kind, looks = kind_of(info), {} if looks is None else looks
    options: dict[str, Any] = {"value": value}
    if kind is ipywidgets.Dropdown:
        options["options"] = _options(info, value)
    elif kind is NumberField:
        options["least"] = int(info.bounds.get("ge", -_LARGEST_WHOLE))
        options["most"] = int(info.bounds.get("le", _LARGEST_WHOLE))
    elif kind is ipywidgets.Text:
        placeholder = _PLACEHOLDERS.get(info.kind, "")
        options = {"value": show(info, value), "placeholder": placeholder, "continuous_update": False}
    made = kind(
        description=label(info), tooltip=info.help, layout=looks.get("layout", _LAYOUT), style=looks.get(kind, _STYLE),
        _dom_classes=(tip_class(info.help),) if kind in TIPPED else (), **options,
    )  # fmt: skip
    looks |= {"layout": made.layout, kind: made.style}
    return made


def read_control(info: FieldInfo, control: Any) -> Any:
    """The value a control holds.

    Raises:
        ConfigError: when its text does not parse; whether the value fits the Config is not checked.
    """
    if not isinstance(control, ipywidgets.Text):
        return control.value
    try:
        return _parser(info)(control.value.strip())
    except ValueError as error:
        problem = error.problems[0].message if isinstance(error, ConfigError) else str(error)
        raise ConfigError([Problem(info.path, problem)]) from None


def write_control(info: FieldInfo, control: Any, value: Any) -> None:
    """Let a control show `value`."""
    if info.path == "hardware.strategy" and value not in control.options:
        control.options = _options(info, value)
    control.value = show(info, value) if isinstance(control, ipywidgets.Text) else value


def show(info: FieldInfo, value: Any) -> str:
    """A value as the text its control is edited in."""
    if value is None or isinstance(value, str):
        return value or ""
    if isinstance(value, Mapping):
        if info.kind == "arguments" and value:
            return json.dumps(thaw(value))
        return ", ".join(f"{name}: {size}" for name, size in value.items())
    if isinstance(value, list | tuple):
        listed = ", ".join(map(str, value))
        return f"[{listed}]" if info.kind == "devices" and len(value) == 1 else listed
    return _show_bytes(value) if info.unit.startswith("bytes") else str(value)


_PLACEHOLDERS = {
    "sizes": "such as time: 2, lat: 64",
    "layout": "auto, or time: 2, lat: 64",
    "devices": "auto, 2, or a list: 0, 1",
    "names": "all, or a list: u, v",
    "counts": "such as 0, 2, 4",
    "arguments": 'such as {"size": 3}',
    "float": "none",
}


def _parser(info: FieldInfo) -> Callable[[str], Any]:
    if info.unit.startswith("bytes"):
        return parse_bytes
    special: dict[str, Callable[[str], Any]] = {
        "sizes": _sizes, "layout": lambda text: text if text in info.choices else _sizes(text), "devices": _devices,
        "names": _names, "counts": _counts, "arguments": lambda text: _arguments(info, text), "float": _float,
    }  # fmt: skip
    empty = None if info.default is None else ""
    return special.get(info.kind, lambda text: text or empty)


def _sizes(text: str) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for part in filter(None, (part.strip() for part in text.strip("{}").split(","))):
        name, colon, size = part.partition(":")
        name, size = name.strip(), size.strip()
        if not colon or not name or not size.lstrip("-").isdecimal():
            raise ValueError(f"{part!r} is not a size; write dimensions and whole numbers, such as time: 2, lat: 64")
        if name in sizes:
            raise ValueError(f"dimension {name!r} is named twice")
        sizes[name] = int(size)
    return sizes


def _devices(text: str) -> str | int | list[int]:
    parts = [part.strip() for part in text.strip("[]").split(",")]
    if text.lstrip("-").isdecimal():
        return int(text)
    if all(part.isdecimal() for part in parts):
        return [int(part) for part in parts]
    return text


def _names(text: str) -> list[str]:
    return [name for name in (part.strip() for part in text.split(",")) if name]


def _counts(text: str) -> list[int]:
    parts = _names(text.strip("[]"))
    if not all(part.isdecimal() for part in parts):
        raise ValueError(f"{text!r} is no list of whole numbers, such as 0, 2, 4")
    return [int(part) for part in parts]


def _float(text: str) -> float | None:
    try:
        return float(text) if text else None
    except ValueError:
        raise ValueError(f"{text!r} is not a number") from None


def _arguments(info: FieldInfo, text: str) -> Any:
    """A YAML mapping on one line; JSON is one."""
    flow = text if text.startswith("{") else f"{{{text}}}"
    return Config.from_yaml(f"{info.section}:\n  {info.name}: {flow}\n").get(info.path)


def _options(info: FieldInfo, value: str) -> list[str]:
    """The words offered, and the value itself: `fsdp:2:4` is one of many."""
    return list(dict.fromkeys([*info.choices, value]))


def _show_bytes(count: int) -> str:
    """The shortest exact text: `64 MiB`, `80 MB`."""
    sizes = ((parse_bytes(f"1 {unit}"), unit) for unit in _UNITS)
    exact = [(count // size, unit) for size, unit in sizes if count and count % size == 0]
    return "{} {}".format(*min(exact)) if exact else str(count)


class NumberField(ipywidgets.FloatText):  # type: ignore[misc]
    """A field whose `value` always lies from `least` to `most`, and is an int where it is `whole`."""

    value = traitlets.Any(0).tag(sync=True)
    correction = traitlets.Unicode("")
    """What was typed and what is used in its place; empty when that is the same."""

    def __init__(self, value: float, *, least: float, most: float, whole: bool = True, **shown: Any) -> None:
        self._least, self._most, self._whole, self._last = least, most, whole, value
        super().__init__(value=value, **shown)

    @traitlets.validate("value")
    def _keep(self, proposal: Any) -> float:
        kept, correction = self._corrected(proposal["value"])
        self._last, self.correction = kept, correction
        return kept

    def _corrected(self, typed: Any) -> tuple[float, str]:
        """What is used for what was typed, and why where it differs."""
        if not isinstance(typed, int | float) or typed != typed:  # nan
            return self._last, f"that is no number between {self._least} and {self._most}; {self._last} stays"
        if typed < self._least:
            return self._least, f"{typed} is below {self._least}, the least; {self._least} is used"
        if typed > self._most:
            return self._most, f"{typed} is above {self._most}, the most; {self._most} is used"
        if self._whole and typed != int(typed):
            return int(typed), f"{typed} is no whole number; {int(typed)} is used"
        return (int(typed), "") if self._whole else (typed, "")


def correction_note(field: NumberField, margin: str = BESIDE_LABEL) -> Any:
    """A line that says how what was typed into `field` was corrected, and is hidden otherwise."""
    note = line(display="none")
    field.observe(
        lambda change: put(note, note_html(change["new"], margin=margin, role="status") if change["new"] else ""),
        "correction",
    )
    return note
