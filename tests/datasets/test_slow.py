"""The slow pipeline: each of its five mistakes is found and named, a mended one gets a clean bill, and is faster."""

from pathlib import Path

import pytest

import kit
from kit.config import Config
from kit.run import client
from kit.targets import load_target

FOLDER = Path(__file__).parents[2] / "datasets" / "slow"
DATA, MODULE = "datasets/slow/parts.py:ValueByValue", "datasets/slow/parts.py:Counting"
CURES = load_target("datasets/slow/parts.py:CURES")
GENERAL = {"waiting for data", "training shorter than preprocessing", "many tiny operations"}
"""Complaints that a mistake causes and that are true; no other may be heard."""
COMPANIONS = {"chunks that do not fit": {"chunks that do not fit", "no prefetch"}}
"""On a local disk reading ahead hides what tiny chunks cost."""


@pytest.fixture(scope="module")
def slow(tmp_path_factory):
    """The recipe on a store of its own."""
    folder = tmp_path_factory.mktemp("slow")
    recipe = Config.load(FOLDER / "recipe.yaml").replace(
        {
            "data.url": str(folder / "slow.zarr"),
            "trial.folder": str(folder / "runs"),
            "trial.predict_memory": False,
        }
    )
    kit.build(recipe)
    yield recipe
    client.close_supervisors()


def mended(slow, left=()):
    """(module, data, config) with every mistake mended but those left; its store is built."""
    module, data, config = MODULE, DATA, slow
    for name, cure in CURES.items():
        if name not in left:
            module, data = cure.get("new_module", module), cure.get("new_data", data)
            config = config.replace(_here(cure.get("change", {}), slow))
    if not Path(config.data.url).exists():
        kit.build(config)
    return module, data, config


def _here(change, slow):
    store = str(Path(slow.data.url).with_name("mended.zarr"))
    return {path: store if path == "data.url" else value for path, value in change.items()}


def changes(before, after):
    return {path: value for path, (_, value) in before.diff(after).items()}


def computes_in_16_bits(config):
    peaks = kit.device_peaks(config)
    return peaks.peak("bfloat16") >= 1.3 * peaks.peak("float32")


def test_the_readme_and_the_recipe_name_its_mistakes():
    readme = (FOLDER / "README.md").read_text()
    for name in ("tiny chunks", "no prefetch", "Python transform", "full precision", "sync in the step"):
        assert name in readme
    assert len(CURES) == 5
    for cure in CURES.values():
        for path in (cure.get("new_module"), cure.get("new_data")):
            assert path is None or load_target(path)


@pytest.mark.parametrize("mistake", CURES)
def test_each_mistake_alone_is_found_and_named_and_no_other(slow, mistake):
    together = COMPANIONS.get(mistake, {mistake})
    module, data, config = mended(slow, left=together)
    if mistake == "full precision" and not computes_in_16_bits(config):
        pytest.skip("this processor is no faster in 16 bits, so full precision is no mistake here")
    if mistake in ("no prefetch", "chunks that do not fit"):
        config = config.replace({"model.arguments": {**config.model.arguments, "width": 4, "depth": 1}})
    diagnosis = kit.diagnose(module, data, config)
    assert mistake in diagnosis.names
    assert set(diagnosis.names) - together <= GENERAL


def test_mended_it_gets_a_clean_bill_and_is_measurably_faster(slow):
    module, data, config = mended(slow)
    assert kit.diagnose(module, data, config).names == ()
    tried = kit.try_change(MODULE, DATA, slow, change=changes(slow, config), new_module=module, new_data=data)
    assert tried.verdict == "helps"


def test_following_the_advice_finds_one_after_the_other(slow):
    wanted = set(CURES)
    if not computes_in_16_bits(slow):
        wanted.remove("full precision")
    cured, found = [], set()
    while len(cured) <= len(CURES):
        module, data, config = mended(slow, left=set(CURES) - set(cured))
        named = [name for name in kit.diagnose(module, data, config).names if name in CURES]
        found.update(named)
        if not named:
            break
        cured.append(named[0])
    assert found == wanted
