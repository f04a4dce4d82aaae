"""What sets the project up: one list of dependencies, one list of versions, no host named anywhere."""

import re
import tomllib
from collections import Counter
from pathlib import Path

import pytest
from ruamel.yaml import YAML

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PINS = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
NEEDED = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["dev"]]


def test_every_version_is_pinned_and_no_host_is_named():
    assert [line for line in PINS if not re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.]+", line)] == []


@pytest.mark.parametrize("requirement", NEEDED)
def test_every_dependency_has_a_pin(requirement):
    name = re.match(r"[A-Za-z0-9._-]+", requirement)[0].lower().replace("_", "-")
    assert name in {line.partition("==")[0].lower().replace("_", "-") for line in PINS}


def test_conda_installs_what_pyproject_lists_instead_of_repeating_it():
    environment = YAML(typ="safe").load((ROOT / "environment.yml").read_text())
    *packages, pip = environment["dependencies"]
    assert [package.partition("=")[0] for package in packages] == ["python", "pip"]
    assert pip["pip"] == ["--constraint constraints.txt", "--editable .[dev]"]


def test_ci_runs_what_the_readme_names():
    pages, makefile = (
        (ROOT / "README.md").read_text() + (ROOT / "CONTRIBUTING.md").read_text(),
        (ROOT / "Makefile").read_text(),
    )
    for target in ("lab", "test", "browser", "quick", "nightly", "coverage", "check"):
        assert f"make {target}" in pages
        assert f"\n{target}:" in makefile
    assert "make check" in (ROOT / ".ci" / "run").read_text()


def test_no_two_files_of_tests_share_a_name():
    """Pytest imports them by name alone: of two in folders without `__init__`, one process collects only the first."""
    names = Counter(path.name for path in (ROOT / "tests").rglob("*.py") if path.name != "conftest.py")
    assert [name for name, count in names.items() if count > 1] == []
