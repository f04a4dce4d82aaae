"""What an earlier version wrote still opens: a store, a run directory, a recording and a committed file.

The files in `tests/kept` were written on 2026-11-23 by the last version whose modules stood in `kit/plan`, `kit/run`
and `kit/report`.
"""

import pickle
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

import kit
from kit.data.build.source import VariableSpec
from kit.data.stores.counters import Counters
from kit.memory.replay.replay import Recording
from kit.targets import load_target
from kit.yaml_text import read_yaml

KEPT = Path(__file__).parent / "kept"


@pytest.fixture
def kept(tmp_path):
    """A copy of all of them, where nothing is written beside the originals."""
    return shutil.copytree(KEPT, tmp_path / "kept")


@pytest.fixture(autouse=True)
def nothing_of_before_is_loaded():
    for name in [name for name in sys.modules if name.startswith(("kit.run", "kit.data.source", "kit.models.topics"))]:
        del sys.modules[name]


def test_a_store(kept):
    dataset = kit.open_dataset(str(kept / "store.zarr"))
    values = dataset.open_array("sst")[...]
    assert values.shape == (4, 16, 16)
    assert np.isfinite(values).all()
    assert kit.data.verify(str(kept / "store.zarr"), progress=False).faults == ()


def test_a_run_directory(kept):
    trial = kit.Trial.open(kept / "run")
    assert trial.state == "COMPLETE"
    assert [event["step"] for event in trial.steps] == [1, 2, 3]
    (row,) = kit.results(kept)
    assert row["state"] == "COMPLETE"
    assert row["samples_per_second"] > 0


def test_what_was_sent_to_the_ranks_of_a_run(kept):
    with pytest.warns(DeprecationWarning, match=r"is kit\.trial"):
        payload = pickle.loads((kept / "run" / "payload.pkl").read_bytes())
    assert payload["module"].value == "kit.models:UNet"


def test_the_topic_model_under_its_names_of_before():
    with pytest.warns(DeprecationWarning, match="is datasets/topics/topics.py now"):
        from kit.models.topics import PoissonNMF
    assert PoissonNMF is kit.models.PoissonNMF is load_target("kit.models:PoissonNMF")
    assert PoissonNMF is load_target("datasets/topics/topics.py:PoissonNMF")
    assert all(callable(getattr(kit, name)) for name in kit.BESIDE_DATASETS)


def test_what_lies_with_its_dataset_is_in_no_installed_kit(monkeypatch, tmp_path):
    monkeypatch.setattr("kit.registry.REPOSITORY", tmp_path)
    with pytest.raises(ImportError, match=r"topics\.py .*checkout"):
        kit.open_topics  # noqa: B018
    with pytest.raises(ImportError, match=r"topics\.py .*checkout"):
        kit.models.PoissonNMF  # noqa: B018


def test_a_recording(kept):
    recording = Recording.load(kept / "recording.npz")
    assert recording.blocks > 10
    assert recording.block_bytes.sum() > 0


def test_a_committed_file(kept):
    (file,) = (kept / "committed").glob("*.yaml")
    config = kit.Config.load(file)
    assert config.name == "ocean"
    assert config.get("model.target") == "kit.models:UNet"
    tree = read_yaml(file.read_text(), str(file))
    for target in class_paths(tree):
        module, _, name = target.rpartition(".")
        assert load_target(f"{module}:{name}") is not None


def test_what_files_and_pickles_name_where_it_stood_before():
    assert load_target("kit.train.callbacks:DeviceLimit") is kit.train.DeviceLimit
    assert load_target("kit.data.stores.transfer:Counters") is Counters


def class_paths(node):
    """All `class_path` of a tree."""
    if isinstance(node, dict):
        yield from ([node["class_path"]] if "class_path" in node else [])
        for value in node.values():
            yield from class_paths(value)
    elif isinstance(node, list):
        for value in node:
            yield from class_paths(value)


def test_a_source_that_a_user_wrote(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("from kit.data.source import Region, VariableSpec\n")
    with pytest.warns(DeprecationWarning, match=r"is kit\.data\.build\.source"):
        found = load_target(f"{file}:VariableSpec")
    assert found is VariableSpec


def test_a_name_of_before_is_the_module_of_today():
    with pytest.warns(DeprecationWarning, match=r"is kit\.trial"):
        import kit.run.payload as before
    import kit.trial.payload as today

    assert before is today
    assert today.__name__ == today.__spec__.name == "kit.trial.payload"
