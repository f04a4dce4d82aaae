"""What the benchmarks ask of kit is there: they are run by hand, so that nothing else would tell."""

import ast
from importlib import import_module, util
from pathlib import Path

import pytest

SCRIPTS = sorted(Path(__file__).parents[1].glob("benchmarks/**/*.py"))


def names_of_kit(script: Path) -> list[tuple[str, str]]:
    """The module and the name of each `from kit… import …`."""
    found = [node for node in ast.walk(ast.parse(script.read_text())) if isinstance(node, ast.ImportFrom)]
    return [
        (node.module, alias.name) for node in found if node.module and node.module.split(".")[0] == "kit"
        for alias in node.names
    ]  # fmt: skip


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_benchmark_asks_for_names_that_are_there(script):
    gone = [
        f"{module}.{name}" for module, name in names_of_kit(script)
        if not hasattr(import_module(module), name) and util.find_spec(f"{module}.{name}") is None
    ]  # fmt: skip
    assert gone == []
