"""YAML 1.2 both ways, by ruamel.yaml: what would exhaust a reader is refused, and comments are written with values.

Refused by line and column: aliases, duplicate keys, deep nesting, and more than a page of text holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kit.errors import ConfigError, Problem
from kit.units import format_bytes

_LARGEST_YAML_BYTES = 1 << 20
_DEEPEST_YAML = 20
_MOST_YAML_VALUES = 10_000
"""Reading costs a tenth of a millisecond each, and a config of all settings has about 200."""
COMMITTED = "kit.train.CommittedConfig"
"""The callback that carries the Config in a committed file, which is otherwise LightningCLI's own."""


def read_yaml(text: str, where: str = "") -> dict[str, Any]:
    """The mapping that a YAML 1.2 text holds.

    Raises:
        ConfigError: with line and column for broken YAML, aliases, duplicate keys and what is too large or deep.
    """
    from ruamel.yaml import YAML
    from ruamel.yaml.error import MarkedYAMLError, YAMLError

    yaml = YAML(typ="safe", pure=True)
    yaml.Parser = _parser_without_bombs(where)
    try:
        if len(text.encode()) > _LARGEST_YAML_BYTES:
            raise ConfigError(f"larger than {format_bytes(_LARGEST_YAML_BYTES)}; a config is a page of text", where)
        values = yaml.load(text)
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        problem = (error.problem or error.context or "not YAML").splitlines()[0]
        problem = problem.partition(" with value ")[0]  # of a duplicate key: it may be a password
        raise ConfigError(f"{place}{problem}", where) from None
    except (YAMLError, ValueError, TypeError, RecursionError, UnicodeError, AttributeError, IndexError) as error:
        if isinstance(error, ConfigError):
            raise
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ConfigError(f"not YAML 1.2: {reason}", where) from None
    if values is None:
        return {}
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        is_path = isinstance(values, str) and values.endswith((".yaml", ".yml"))
        way_out = "; kit.Config.load reads a file" * is_path
        raise ConfigError(f"a config is a mapping of sections, such as 'loader:'{way_out}", where)
    return values


def write_yaml(values: Mapping[str, Any], comments: Mapping[str, str] | None = None) -> str:
    """YAML 1.2 that `read_yaml` reads back as equal values, with a comment above each path that has one."""
    # Top-level keys are written one by one: most are as they were in the last text, and 25 ms write a whole config.
    told = tuple((comments or {}).items())
    texts = []
    for key, value in values.items():
        known = key, repr(value), told  # of equal values 1, 1.0 and True are written differently
        text = _written.get(known)
        if text is None:
            if len(_written) >= _MOST_WRITTEN:
                _written.clear()
            text = _written[known] = _dump_part({key: value}, comments or {})
        texts.append(text)
    return "".join(texts) or "{}\n"


_MOST_WRITTEN = 512
_written: dict[tuple[str, str, tuple[tuple[str, str], ...]], str] = {}


def committed_text(values: Mapping[str, Any], where: str = "") -> str:
    """The text of the Config that a committed file carries.

    Raises:
        ConfigError: when it carries none.
    """
    trainer = values.get("trainer")
    callbacks = trainer.get("callbacks") if isinstance(trainer, dict) else None
    for entry in callbacks if isinstance(callbacks, list) else ():
        if isinstance(entry, dict) and entry.get("class_path") == COMMITTED:
            text = (entry.get("init_args") or {}).get("config")
            if isinstance(text, str):
                return text
    message = f"no {COMMITTED} with its config among trainer.callbacks; it is no file that kit.commit wrote"
    raise ConfigError([Problem("trainer.callbacks", message)], where)


def _parser_without_bombs(where: str) -> type[Any]:
    """A parser that refuses aliases, deep nesting and very many values as it meets them: all can exhaust the reader."""
    from ruamel.yaml import events as kinds
    from ruamel.yaml.parser import Parser

    class WithoutBombs(Parser):
        values = depth = 0

        def get_event(self) -> Any:
            event = super().get_event()
            line = event.start_mark.line + 1
            self.values += isinstance(event, kinds.ScalarEvent)
            if self.values > _MOST_YAML_VALUES:
                problem = f"more than {_MOST_YAML_VALUES:,} values; a config is a page of text"
                raise ConfigError(f"line {line}, column {event.start_mark.column + 1}: {problem}", where)
            if isinstance(event, kinds.AliasEvent):
                raise ConfigError(f"line {line}: YAML aliases (*name) are not accepted", where)
            self.depth += isinstance(event, kinds.CollectionStartEvent) - isinstance(event, kinds.CollectionEndEvent)
            if self.depth > _DEEPEST_YAML:
                raise ConfigError(f"line {line}: nested deeper than {_DEEPEST_YAML} levels", where)
            return event

    return WithoutBombs


def _dump_part(values: Mapping[str, Any], comments: Mapping[str, str]) -> str:
    import io

    from ruamel.yaml import YAML
    from ruamel.yaml.comments import CommentedMap

    def commented(mapping: Mapping[str, Any], prefix: str, indent: int) -> CommentedMap:
        result = CommentedMap()
        for key, value in mapping.items():
            path = f"{prefix}{key}"
            is_section = isinstance(value, Mapping) and any(known.startswith(f"{path}.") for known in comments)
            result[key] = commented(value, path + ".", indent + 2) if is_section else value
            if path in comments:
                result.yaml_set_comment_before_after_key(key, before=comments[path], indent=indent)
        return result

    yaml = YAML()
    yaml.width = 10_000
    null = "tag:yaml.org,2002:null"  # written out: an empty value reads as a slip
    yaml.representer.add_representer(type(None), lambda dumper, _: dumper.represent_scalar(null, "null"))
    stream = io.StringIO()
    yaml.dump(commented(values, "", 0), stream)
    return stream.getvalue()
