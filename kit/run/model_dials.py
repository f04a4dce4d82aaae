"""model_dials: the arguments that set the size of the configured model, each with its range and reasons.

Nothing is made, and for an import path nothing is imported: the signature is read from source text. A dial is turned by
changing the config, `config.replace(dials.changes(width=384))`, and what that costs is for `kit.predict_memory` to say.
Only what is made from arguments has dials: a class or an import path. An instance has its size, and a function without
arguments has decided on one.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from typing import Any, overload

from kit.config import Config
from kit.errors import ConfigError, Problem
from kit.plan.memory.size_dials import Dial, find_dials
from kit.run.payload import Part
from kit.signatures import UNKNOWN, class_constant, signature_of
from kit.tables import html_list, html_table, text_table

MODEL_ARGUMENTS, DATA_ARGUMENTS = "model.arguments", "data.arguments"
ORDER = "dial_order"
"""The class attribute by which a model states its own order: arguments in that order, each with a sentence."""
_COLUMNS = ("argument", "value", "from", "to")


class ModelDials(Sequence[Dial]):
    """The dials of a config, those to turn first in front."""

    def __init__(
        self,
        config: Config,
        dials: Sequence[Dial],
        others: Mapping[str, str],
        note: str = "",
        order: Sequence[str] = (),
    ) -> None:
        self.config = config
        self._dials = tuple(dials)
        self.others = dict(others)
        """Whole numbers the model is made with that are no dials, and why not."""
        self.note = note
        """Why there are no dials at all, if so."""
        self.order = tuple(order)
        """Dials in the order in which the model itself says to turn them; empty where it says none."""

    def changes(self, **values: float) -> dict[str, Any]:
        """What `Config.replace` takes to turn these dials, for the data as well where it follows.

        Raises:
            ConfigError: for a name that is no dial, and a value that is no size: a whole number from 1 on, or for a
                quality a number above 0.
        """
        model, data = dict(self.config.model.arguments), dict(self.config.data.arguments)
        for name, value in values.items():
            dial = self._named(name)
            model[name] = _fitting(dial, value)
            if dial.follows:
                data[name] = model[name]
        follows = any(self._named(name).follows for name in values)
        return {MODEL_ARGUMENTS: model, **({DATA_ARGUMENTS: data} if follows else {})}

    def _named(self, name: str) -> Dial:
        found = next((dial for dial in self if dial.name == name), None)
        if found is None:
            names = [dial.name for dial in self]
            close = difflib.get_close_matches(name, names, n=1)
            why = f" ({self.others[name]})" if name in self.others else ""
            hint = f"did you mean {close[0]!r}?" if close else f"the dials are {', '.join(names) or 'none'}"
            raise ConfigError([Problem(f"{MODEL_ARGUMENTS}.{name}", f"is no dial{why}; {hint}")])
        return found

    @overload
    def __getitem__(self, index: int) -> Dial: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Dial, ...]: ...
    def __getitem__(self, index: int | slice) -> Dial | tuple[Dial, ...]:
        return self._dials[index]

    def __len__(self) -> int:
        return len(self._dials)

    def __repr__(self) -> str:
        table = [text_table(_COLUMNS, self._rows)] if self else []
        return "\n".join([*table, *(f"- {sentence}" for sentence in self._sentences)])

    def _repr_html_(self) -> str:
        return (html_table(_COLUMNS, self._rows) if self else "") + html_list(self._sentences)

    @property
    def order_sentence(self) -> str:
        """In which order to turn them, as far as the model says; a single one has none."""
        steps = [name if not place else f"then {name}" for place, name in enumerate(self.order)]
        return f"change {', '.join(steps)}" if len(steps) > 1 else ""

    @property
    def _rows(self) -> list[list[str]]:
        return [[dial.name, str(dial.value), str(dial.low), str(dial.high)] for dial in self]

    @property
    def _sentences(self) -> list[str]:
        reasons = dict.fromkeys(self.others.values())
        turned = [f"{dial.name}: {dial.reason}; {dial.range_reason}" for dial in self]
        others = [_no_dials([name for name in self.others if self.others[name] == why], why) for why in reasons]
        return [*filter(None, [self.note, self.order_sentence]), *turned, *others]


def model_dials(config: Config, module: Any = None, data: Any = None, *, also: Sequence[str] = ()) -> ModelDials:
    """The dials of the model that a config trains.

    Args:
        config: Its `model.arguments` say where the dials stand; else the defaults of the class do.
        module: What `kit.fit` takes as module; None takes `model.target`.
        data: What `kit.fit` takes as data. One that is made with an argument of the same name and value, such as the
            length of a sequence, is turned with the model.
        also: Arguments to be taken for sizes whatever they are called.

    Raises:
        TargetError: for an import path that leads nowhere.
    """
    part = Part.of(module)
    if part.kind in ("instance", "factory"):
        return ModelDials(config, (), {}, f"{part} has no dials: its size is settled; give a class or an import path")
    taken = signature_of(config.model.target if part.kind == "default" else part.value)
    given = dict(config.model.arguments)
    arguments = {**_known(taken or {}), **given}
    stated = _stated(config.model.target if part.kind == "default" else part.value)
    dials, others = find_dials(arguments, _data_arguments(data, config), also, stated)
    note = (
        "" if taken is not None else "the arguments of the model cannot be read: these are those that the config gives"
    )
    order = [dial.name for dial in dials if dial.name in stated]
    return ModelDials(config, dials, others, note, order)


def _no_dials(names: Sequence[str], why: str) -> str:
    return f"{', '.join(names)} {'are no dials' if len(names) > 1 else 'is no dial'}: {why}"


def _fitting(dial: Dial, value: float) -> float:
    """The value as the argument takes it."""
    if dial.whole and (type(value) is not int or value < 1):
        problem = f"{value!r} is no size; give 1 or more"
    elif isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        problem = f"{value!r} is no {dial.kind}; give a number above 0"
    else:
        return value if dial.whole else float(value)
    raise ConfigError([Problem(f"{MODEL_ARGUMENTS}.{dial.name}", problem)])


def _stated(target: Any) -> dict[str, str]:
    """What the model says of its dials, in the order in which to turn them.

    Raises:
        ConfigError: when that is no mapping of arguments to sentences.
    """
    found = class_constant(target, ORDER, until="LightningModule")
    if found is UNKNOWN:
        return {}
    if not isinstance(found, Mapping) or not all(isinstance(word, str) for pair in found.items() for word in pair):
        raise ConfigError([Problem("model", f"its {ORDER} is {found!r}; map arguments to a sentence each")])
    return dict(found)


def _known(signature: Mapping[str, Any]) -> dict[str, Any]:
    return {name: default for name, default in signature.items() if default is not UNKNOWN}


def _data_arguments(data: Any, config: Config) -> dict[str, Any]:
    """What own data is made with; nothing for data that is not made from arguments."""
    part = Part.of(data)
    if part.kind not in ("class", "path") or config.data.source is not None:
        return {}
    signature = signature_of(part.value) or {}
    return {**_known(signature), **{name: value for name, value in config.data.arguments.items() if name in signature}}
