"""What the benchmarks ask of kit is there: they are run by hand, so that nothing else would tell."""

import re
from importlib import import_module, util
from pathlib import Path

import pytest

SCRIPTS = sorted(Path(__file__).parents[1].glob("benchmarks/**/*.py"))


def names_of_kit(script: Path) -> list[tuple[str, str]]:
    """The module and the name of each `from kit… import …`, by its text: Python 3.11 parses in one thread only."""
    found = re.findall(r"^ *from (kit(?:\.\w+)*) import (\([^)]*\)|.*)$", script.read_text(), re.MULTILINE)
    names = [(module, re.sub(r"#.*|[()]", "", text).split(",")) for module, text in found]
    return [(module, name.split()[0]) for module, listed in names for name in listed if name.strip()]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_benchmark_asks_for_names_that_are_there(script):
    gone = [
        f"{module}.{name}" for module, name in names_of_kit(script)
        if not hasattr(import_module(module), name) and util.find_spec(f"{module}.{name}") is None
    ]  # fmt: skip
    assert gone == []
