"""model_dials: which arguments set the size of the configured model, from where to where, and why.

An argument is a dial by its name, as models call theirs (`hidden_dim`, `d_model`, `num_layers`, `max_seq_len`,
`base_channels`, ...), and by its value, a whole number; only a quality (`sketch_quality`) may be a fraction. Arguments
that the data decides (a vocabulary, input channels) are no dials, and the answer says so. Only a class or an import
path has dials, because it is made from arguments: nothing is made here, and for an import path nothing is imported,
since the signature is read from source text. A dial is turned by changing the config,
`config.replace(dials.changes(width=384))`; `kit.predict_memory` then says what that costs.

They are in the order in which to turn them: widths first, layers only on clear underfitting (BaseModel's advice for
hidden_dim and num_layers), then what a sequence, a sketch or a factorisation adds. A model may state its own order, as
a class attribute that maps arguments to a sentence each:

    dial_order = {"hidden_dim": "the first to turn: ...", "num_layers": "only after it: ..."}

Invariant: the present value is among the marks of a dial, and every mark leaves the width divisible by its heads.
"""

from __future__ import annotations

import math
import numbers
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeGuard

from kit.arguments import takes_config
from kit.config import Config
from kit.errors import ConfigError, Problem, did_you_mean
from kit.tables import ResultRows, html_list, html_table, text_table
from kit.targets import UNKNOWN, class_constant, signature_of
from kit.trial.payload import Part

Kind = Literal["width", "channels", "layers", "depth", "sketch", "quality", "factors", "sequence", "size"]

_NAMES: dict[Kind, str] = {
    "width": r"(hidden|model|embed|embedding|emb|latent|mlp|ffn|ff|inner|intermediate)_(dim|size|width|units)"
    r"|d_(model|ff|hidden|embed)|dim(_feedforward)?|width|hidden(_channels)?|units|(n|num)_(hidden|embd|embed|units)",
    "channels": r"(base|model|init|initial|start|first)_(channels|features|filters|width|ch)|((num|n)_)?filters"
    r"|channels",
    "layers": r"(num_|n_)?((encoder|decoder|hidden)_)?(layers?|blocks?)",
    "depth": r"depth|levels|(num_|n_)(levels|stages|downs)",
    "sketch": r"sketch_(width|dim|size|depth)|(num_|n_)?(sketches|buckets)",
    "quality": r"(sketch|emde)_quality",
    "factors": r"(num_|n_)?(topics|factors|components)|(lora_)?rank",
    "sequence": r"(max_|n_)?(seq|sequence|context|ctx)(_len|_length|_size|_window)?|max_(length|len)|block_size"
    r"|(n_|max_)?positions?|max_position_embeddings",
}
"""Whole names, in the order in which dials are offered."""
_OF_THE_DATA = re.compile(
    r"vocab(ulary)?(_size)?|(num_|n_|sketched_)?(classes|labels|tokens|users|items|features|variables|values|categories"
    r"|columns|numbers|documents|terms)"
    r"|(in|out|input|output)_(channels|dim|size|features)|(in|out)_dim|history|horizon|channels_(in|out)"
)
_HEADS = re.compile(r"(num_|n_)?(attention_)?heads?|nhead")
_LIKELY_INPUT = 8
"""`channels` below this number are more likely those of an image than those of a layer."""
_EVEN = 8
"""What matrix units take at a time; a size that is a multiple of it should stay one."""
_MOST_SINGLE = 64
_QUALITIES = (0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 1, 1.25, 1.5, 2)

_GROWTH: dict[Kind, str] = {
    "width": "weights between two layers grow with its square, activations in proportion; the first to turn",
    "channels": "weights between two layers grow with its square, activations in proportion; the first to turn",
    "layers": "weights and activations grow with every one; after the width, and on clear underfitting",
    "depth": "one more halves the resolution once more, and doubles the channels there in most designs",
    "sketch": "inputs and the first layer grow in proportion; less of it is less exact",
    "quality": "the sketches that go in, and the layers at both ends, grow in proportion; less of it is less exact",
    "factors": "factors, and what ties each sample to them, grow in proportion",
    "sequence": "activations grow in proportion, scores of attention that are kept with the square",
    "size": "named by you as a size",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Dial:
    """One argument that sets the size of a model."""

    name: str
    kind: Kind
    value: float
    """A whole number, but for a quality."""
    marks: tuple[float, ...]
    """Values to choose from, rising."""
    reason: str
    """What grows with it."""
    range_reason: str
    """Why the marks are these."""
    follows: bool = False
    """Whether the data takes the same argument, with the same value: then the two are turned together."""

    @property
    def low(self) -> float:
        return self.marks[0]

    @property
    def high(self) -> float:
        return self.marks[-1]

    @property
    def whole(self) -> bool:
        """Whether only whole numbers are values of it."""
        return self.kind != "quality"


def find_dials(
    arguments: Mapping[str, object],
    data: Mapping[str, object] | None = None,
    also: Sequence[str] = (),
    stated: Mapping[str, str] | None = None,
) -> tuple[list[Dial], dict[str, str]]:
    """The dials among the arguments of a model, and why its other whole numbers are none.

    Args:
        arguments: What the model is made with, defaults included.
        data: What its data is made with.
        also: Arguments to be taken for sizes whatever they are called.
        stated: The model's own order: arguments in the order in which to turn them, each with a sentence. They are
            dials whatever they are called, in front of all others.
    """
    first, own = dict(stated or {}), data or {}
    numbers = {name: value for name, value in arguments.items() if _is_number(value, name)}
    found, others = [], {}
    for name, value in numbers.items():
        kind = "size" if name in also else kind_of(name, value) or ("size" if name in first else None)
        if kind is None:
            others[name] = _why_none(name, value)
            continue
        marks, range_reason = _marks(kind, value, numbers)
        follows = own.get(name) == value
        reason = first.get(name, _GROWTH[kind]) + ("; the data follows" if follows else "")
        dial = Dial(
            name=name, kind=kind, value=value, marks=marks, reason=reason, range_reason=range_reason, follows=follows
        )
        found.append(dial)
    ranks, order = [*first], [*_NAMES, "size"]
    place = {name: ranks.index(name) if name in first else len(ranks) for name in numbers}
    return sorted(found, key=lambda dial: (place[dial.name], order.index(dial.kind))), others


def _is_number(value: object, name: str) -> TypeGuard[float]:
    """Whether it is a whole number from 1 on, or the fraction of a quality."""
    if type(value) is float:
        return kind_of(name, value) == "quality" and 0 < value < math.inf
    return type(value) is int and value > 0


def kind_of(name: str, value: float) -> Kind | None:
    """Which kind of size an argument of that name is; None when it is none, or not known as one."""
    plain = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()
    if _OF_THE_DATA.fullmatch(plain) or _HEADS.fullmatch(plain) or (plain == "channels" and value < _LIKELY_INPUT):
        return None
    return next((kind for kind, pattern in _NAMES.items() if re.fullmatch(pattern, plain)), None)


def _why_none(name: str, value: float) -> str:
    plain = name.lower()
    if _HEADS.fullmatch(plain):
        return "heads share the width: more of them are no more parameters"
    if _OF_THE_DATA.fullmatch(plain) or (plain == "channels" and value < _LIKELY_INPUT):
        return "the data decides it"
    return "not known as a size"


def _marks(kind: Kind, value: float, numbers: Mapping[str, float]) -> tuple[tuple[float, ...], str]:
    """The values to choose from, and why these."""
    if kind == "quality":
        shares = (float(f"{value * share:.6g}") for share in _QUALITIES)
        return tuple(sorted({value, *shares})), "an eighth to twice"
    value = int(value)
    if kind in ("layers", "depth"):
        times, words = (4, "four times") if kind == "layers" else (2, "twice")
        many = times * value > _MOST_SINGLE
        return _between(value, 8, times, 1) if many else tuple(range(1, times * value + 1)), f"up to {words} as many"
    if kind == "sequence":
        step = _EVEN if value % _EVEN == 0 else 1
        return _between(value, 2, 16, step), f"up to sixteen times as long{_in_multiples(step)}"
    heads = math.lcm(*(int(number) for name, number in numbers.items() if _HEADS.fullmatch(name.lower())))
    step = heads if kind == "width" and value % heads == 0 else 1
    even = math.lcm(step, _EVEN)
    step = even if value % even == 0 else step
    of_heads = f", which {heads} heads share" if kind == "width" and heads > 1 and step % heads == 0 else ""
    marks = _between(value, 4, 8, step)
    least = "an eighth to" if marks[0] < value else "up to"
    return marks, f"{least} eight times{_in_multiples(step)}{of_heads}"


def _in_multiples(step: int) -> str:
    return f", in multiples of {step}" if step > 1 else ""


def _between(value: int, per_doubling: int, times: int, step: int) -> tuple[int, ...]:
    """The value and marks from an eighth of it to `times` as much, so many to each doubling, in multiples of `step`."""
    doublings = range(-3, times.bit_length() - 1)
    parts = [2.0**power * (1 + part / per_doubling) for power in doublings for part in range(per_doubling)]
    found = {max(step, round(value * part / step) * step) for part in (*parts, times)}
    return tuple(sorted({value, *found}))


MODEL_ARGUMENTS, DATA_ARGUMENTS = "model.arguments", "data.arguments"
ORDER = "dial_order"
"""The class attribute by which a model states its own order: arguments in that order, each with a sentence."""
_COLUMNS = ("argument", "value", "from", "to")


class ModelDials(ResultRows[Dial]):
    """The dials of a config, those to turn first in front."""

    def __init__(
        self,
        config: Config,
        dials: Sequence[Dial],
        others: Mapping[str, str],
        note: str = "",
        order: Sequence[str] = (),
    ) -> None:
        super().__init__(dials)
        self.config = config
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
        model, followers = dict(self.config.model.arguments), {}
        for name, value in values.items():
            dial = self._named(name)
            model[name] = _fitting(dial, value)
            if dial.follows:
                followers[name] = model[name]
        data = {DATA_ARGUMENTS: {**self.config.data.arguments, **followers}} if followers else {}
        return {MODEL_ARGUMENTS: model, **data}

    def _named(self, name: str) -> Dial:
        found = next((dial for dial in self if dial.name == name), None)
        if found is None:
            why = f" ({self.others[name]})" if name in self.others else ""
            hint = did_you_mean(name, [dial.name for dial in self] or ["none"], otherwise="the dials are {}")
            raise ConfigError([Problem(f"{MODEL_ARGUMENTS}.{name}", f"is no dial{why}{hint}")])
        return found

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
        turned = [f"{dial.name}: {dial.reason}; {dial.range_reason}" for dial in self]
        reasons: dict[str, list[str]] = {}
        for name, why in self.others.items():
            reasons.setdefault(why, []).append(name)
        others = [
            f"{', '.join(names)} {'are no dials' if len(names) > 1 else 'is no dial'}: {why}"
            for why, names in reasons.items()
        ]
        return [*filter(None, [self.note, self.order_sentence]), *turned, *others]


@takes_config
def model_dials(config: Config, module: Any = None, data: Any = None, *, also: Sequence[str] = ()) -> ModelDials:
    """The arguments of a model that set its size, such as its width and depth, with their values.

    Args:
        config: Its `model.arguments` have the values; where they do not, the defaults of the class count.
        module: What is trained, as `kit.fit` takes it. None takes `model.target`.
        data: What it is trained on, as `kit.fit` takes it. An argument of the data with the same name and value, such
            as the length of a sequence, changes with the model's.
        also: Further arguments that set the size, whatever their names.

    Returns:
        The arguments by name. `changes(width=64)` gives what `config.replace` takes.

    Raises:
        TargetError: for an import path that leads nowhere.
        ConfigError: for a name in `also` that is no argument with a whole number.

    Example:
        >>> [size.name for size in kit.memory.sizes(config, "kit.models:GPT")][:2]
        ['width', 'layers']
    """
    part = Part.of(module)
    also = [also] if isinstance(also, str) else also
    if part.kind in ("instance", "factory"):
        return ModelDials(config, (), {}, f"{part} has no dials: its size is settled; give a class or an import path")
    target = config.model.target if part.kind == "default" else part.value
    signature, stated = signature_of(target), _stated(target)
    arguments = {**_known(signature or {}), **config.model.arguments}
    if absent := [name for name in also if not _is_number(arguments.get(name), name)]:
        numbers = [name for name, value in arguments.items() if _is_number(value, name)]
        message = f"{absent[0]!r} is no argument of the model with a whole number from 1 on"
        raise ConfigError([Problem("also", message + did_you_mean(absent[0], numbers))])
    dials, others = find_dials(arguments, _data_arguments(data, config), also, stated)
    unread = "the arguments of the model cannot be read: these are those that the config gives"
    order = [dial.name for dial in dials if dial.name in stated]
    return ModelDials(config, dials, others, unread if signature is None else "", order)


def _fitting(dial: Dial, value: Any) -> float:
    """The value as the argument takes it."""
    kind = numbers.Integral if dial.whole else numbers.Real
    if not isinstance(value, bool) and isinstance(value, kind) and 0 < float(value) < math.inf:
        return int(float(value)) if dial.whole else float(value)
    problem = f"{value!r} is no {dial.kind}; give a {'whole number from 1 on' if dial.whole else 'number above 0'}"
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
