"""The recipes for public buckets: each loads as a Config, reads in place without a key, and says it needs a network."""

from pathlib import Path

import pytest

from kit.config import Config

FOLDER = Path(__file__).parents[2] / "datasets" / "recipes"
README = (FOLDER / "README.md").read_text()
RECIPES = sorted(FOLDER.glob("*.yaml"))


def test_there_are_recipes_and_the_readme_says_that_they_need_a_network():
    assert RECIPES
    assert "needs a network" in README


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_it_reads_a_public_store_in_place_without_a_key(path):
    config = Config.load(path)
    assert config.name == path.stem
    assert config.data.url.startswith(("gs://", "s3://"))
    assert config.data.credentials == "anonymous"
    assert config.data.source is None
    assert config.data.variables
    assert config.data.patch


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_it_says_that_it_needs_a_network_and_the_readme_names_it(path):
    assert "Needs a network" in path.read_text().split("name:")[0]
    assert f"`{path.name}`" in README


def test_it_asks_for_no_statistics_that_only_a_store_built_by_kit_holds():
    assert not [path.stem for path in RECIPES if Config.load(path).data.standardize]
