"""The slow pipeline: each of its five mistakes is found and named, and mended it has less to do.

What a rule reads from counts and from the config is taken as it is. How long parts of a step took is what other
processes leave of the cores: where a rule asks for that, it is given the peaks and the wait of a machine of its own.
"""

from dataclasses import replace
from pathlib import Path

import pytest

import kit
from kit.config import Config
from kit.speed.peaks import Peaks
from kit.studies.diagnosis.diagnose import judge
from kit.studies.diagnosis.evidence import store_layout
from kit.studies.diagnosis.gains import worth_measuring
from kit.studies.repeats import RunSource
from kit.targets import load_target

pytestmark = pytest.mark.slow
FOLDER = Path(__file__).parents[2] / "datasets" / "slow"
DATA, MODULE = "datasets/slow/parts.py:ValueByValue", "datasets/slow/parts.py:Counting"
CURES = load_target("datasets/slow/parts.py:CURES")
COUNTED = set(CURES) - {"Python in the data"}
"""Mistakes that no other process can seem to make: once mended, their values are the same however long a step takes."""
COMPANIONS = {
    "chunks that do not fit": {"chunks that do not fit", "no prefetch"},
    "Python in the data": {"Python in the data", "full precision"},
}
"""A local disk read ahead hides what tiny chunks cost; bfloat16 on a processor that has none hides what Python does."""
PEAKS = Peaks(
    device="a device", flops_per_second={"float32": 5e9, "bfloat16": 1e10},
    nominal_flops_per_second={"float32": None, "bfloat16": None}, bytes_per_second=1e10,
)  # fmt: skip
"""Of a device whose steps are arithmetic, and which is faster in 16 bits."""
FASTER = (1.5, 2.0)
VALUES = {"no prefetch": 0.3, "full precision": FASTER[0], "sync in the step": 8 * 3 * 2 * (64 // 8) ** 2}
"""Of the findings; what is asked for is one value in eight each way, of 8 samples of 3 variables at 2 times."""
WAIT = VALUES["no prefetch"]
"""Share of the time that a model waits for a slower disk."""


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
    return recipe


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
    return {path: _url(slow, "mended") if path == "data.url" else value for path, value in change.items()}


def _url(slow, name):
    return str(Path(slow.data.url).with_name(f"{name}.zarr"))


def diagnosed(module, data, config):
    """As on a device that is faster in 16 bits; whether this one is decides no test."""
    found = kit.studies.diagnose(config, module, data, peaks=PEAKS, short_trials=False).evidence
    gains = {name: FASTER for name in worth_measuring(found) if name == "full precision"}
    return judge(replace(found, measured_gains=gains), RunSource(None, None, found.config))


def with_wait(diagnosis):
    """What the rules say where the same trial waits for its data `WAIT` of the time."""
    found = diagnosis.evidence
    rest = (1 - WAIT) / (1 - found.shares["wait"])
    shares = {part: rest * share for part, share in found.shares.items()} | {"wait": WAIT}
    reading = replace(found, shares=shares, read_seconds=WAIT * found.step_seconds)
    return judge(reading, RunSource(None, None, found.config))


def test_the_readme_and_the_recipe_name_its_mistakes():
    readme = (FOLDER / "README.md").read_text()
    for name in ("tiny chunks", "no prefetch", "Python transform", "full precision", "sync in the step"):
        assert name in readme
    assert len(CURES) == 5
    for cure in CURES.values():
        for path in (cure.get("new_module"), cure.get("new_data")):
            assert path is None or load_target(path)


@pytest.mark.parametrize("mistake", CURES)
def test_each_mistake_alone_is_found_and_named_and_none_that_was_mended(slow, mistake):
    together = COMPANIONS.get(mistake, {mistake})
    module, data, config = mended(slow, left=together)
    diagnosis = diagnosed(module, data, config)
    if mistake in ("no prefetch", "chunks that do not fit"):
        diagnosis = with_wait(diagnosis)
    assert mistake in diagnosis.names
    assert diagnosis[mistake].value == pytest.approx(VALUES.get(mistake, diagnosis[mistake].value))
    assert COUNTED & set(diagnosis.names) <= together


def test_mended_it_gets_a_clean_bill_and_has_less_to_do(slow):
    before, after = diagnosed(MODULE, DATA, slow), diagnosed(*mended(slow))
    assert COUNTED & set(before.names) >= {"chunks that do not fit", "sync in the step"}
    assert not COUNTED & set(after.names)
    clean = {"no prefetch": 0.0, "full precision": 1.0, "sync in the step": 0}
    assert {name: after.values[name] for name in clean} == clean
    assert before.evidence.work.own_syncs == VALUES["sync in the step"]
    assert before.evidence.requests_per_sample > after.evidence.requests_per_sample


def test_following_the_advice_finds_one_after_the_other(slow):
    cured, found = [], set()
    while len(cured) <= len(CURES):
        module, data, config = mended(slow, left=set(CURES) - set(cured))
        diagnosis = diagnosed(module, data, config)
        # What reading ahead would hide is decided by what this machine does meanwhile: a slower disk is asked too.
        told = (*diagnosis.names, *with_wait(diagnosis).names)
        named = [name for name in told if name in CURES and name not in cured]
        found.update(named)
        if not named:
            break
        cured.append(named[0])
    assert found == set(CURES)


@pytest.mark.parametrize("batch_size", [4, 8, 16])
def test_tiny_chunks_are_told_from_planned_ones_whatever_network_is_planned_for(slow, batch_size):
    """A folder has no latency behind which the work of hundreds of requests would hide."""
    asked = slow.replace({"loader.batch_size": batch_size})
    better = asked.replace(
        {**CURES["chunks that do not fit"]["change"], "data.url": _url(slow, f"planned-{batch_size}")}
    )
    kit.build(better)
    tiny, planned = (store_layout(config) for config in (asked, better))
    assert tiny.seconds_per_batch > 5 * tiny.planned_seconds_per_batch
    assert planned.seconds_per_batch < 3 * planned.planned_seconds_per_batch  # from which the rule names it
    farther = asked.replace({"chunking.latency_seconds": 1.0})
    assert store_layout(farther).seconds_per_batch == tiny.seconds_per_batch
    assert store_layout(farther, with_network=True).seconds_per_batch > tiny.seconds_per_batch
