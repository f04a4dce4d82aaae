"""What kit runs for its own ends, in real processes, changes nothing of the user's: files, processes, servers."""

import json

import pytest
import torch
from hook_acts import (
    ACTS,
    CONNECTIONS,
    FILES,
    HOOKS,
    PROCESSES,
    Acting,
    WithCheckpoints,
    contents,
    counting_server,
    filled,
)
from waiting import PATIENCE_SECONDS, wait_for_prediction

import kit
from kit.memory import alongside, recordings
from kit.memory.alongside import fit
from kit.memory.prediction import predict_memory
from kit.studies.repeats import try_change
from kit.testing import TinyData, TinyModule

SECONDS = PATIENCE_SECONDS
OVERFLOWING = {"hardware.device_memory_bytes": 64 << 20}

pytestmark = pytest.mark.usefixtures("no_predictions_left")


@pytest.fixture(autouse=True)
def nothing_known():
    recordings.cache.clear()
    alongside._predicted_beside.clear()


@pytest.fixture
def user(tmp_path):
    return filled(tmp_path / "user")


def notes(estimate, hook):
    return [note for note in estimate.notes if "kept" in note and hook in note]


# -- predictions


@pytest.mark.parametrize(("act", "hook"), [(act, HOOKS[place % len(HOOKS)]) for place, act in enumerate(ACTS)])
def test_a_prediction_keeps_a_hook_from_what_it_does_to_others(config, user, act, hook):
    if act == "h5py":
        pytest.importorskip("h5py")
    before = contents(user)
    with counting_server() as (url, asked):
        found = predict_memory(config(), lambda: Acting([act], hook, user, url), TinyData)
    assert contents(user) == before
    assert not asked or act not in CONNECTIONS
    assert found.complete, found
    assert found.verdict == "fits"
    assert found.device_allocated_bytes == predict_memory(config(), TinyModule, TinyData).device_allocated_bytes
    assert notes(found, "" if act == "h5py" else hook), found.notes


@pytest.mark.parametrize("hook", HOOKS)
def test_all_of_it_together_in_each_hook(config, user, hook):
    before = contents(user)
    alone = ("open", "pathlib", "os.replace", "rmtree", "move")  # they take away what others need
    acts = [act for act in (*FILES, *PROCESSES, *CONNECTIONS) if act not in alone]
    with counting_server() as (url, asked):
        found = predict_memory(config(), lambda: Acting(acts, hook, user, url), TinyData)
    assert contents(user) == before
    assert not asked
    assert found.verdict == "fits"
    assert found.complete, found


def test_checkpoints_of_a_callback_go_nowhere(config, user):
    before = contents(user)
    assert predict_memory(config(), lambda: WithCheckpoints(user), TinyData).complete
    assert contents(user) == before


def test_a_file_written_while_the_module_is_imported_is_kept_away_too(config, user):
    target = user / "module.py"
    target.write_text(
        f"from kit.testing import TinyModule\nopen({str(user / 'at_import.txt')!r}, 'w').write('x')\n"
        "class Mine(TinyModule):\n    pass\n"
    )
    before = contents(user)
    found = predict_memory(config(), f"{target}:Mine", TinyData)
    assert contents(user) == before
    assert found.complete
    assert any("at_import.txt" in note for note in found.notes)


def test_topics_saved_by_the_model_of_the_zoo_stay(config, tmp_path):
    saved = tmp_path / "topics.npz"
    saved.write_bytes(b"an earlier result")
    arguments = {"documents": 64, "terms": 64, "topics": 4, "save_path": str(saved)}
    asked = config().replace({"model.arguments": arguments, "hardware.precision": "32-true"})
    found = predict_memory(asked, "kit.models:PoissonNMF", lambda: documents())
    assert saved.read_bytes() == b"an earlier result"
    assert found.complete, found


def documents():
    from torch.utils.data import DataLoader, TensorDataset

    return DataLoader(TensorDataset(torch.rand(64, 64), torch.arange(64)), batch_size=8)


# -- beside a fit


def test_a_file_that_a_fit_writes_is_whole_after_it_and_after_its_prediction(config, user):
    asked = config().replace({"trial.predict_memory": True})
    trial = fit(asked, lambda: Acting(["torch.save"], "on_train_end", user), TinyData).wait(SECONDS)
    whole = (user / "model.pt").read_bytes()
    assert torch.load(user / "model.pt").keys() == TinyModule().state_dict().keys()
    wait_for_prediction(trial)
    assert (user / "model.pt").read_bytes() == whole
    assert json.loads(trial.paths.prediction.read_text())["verdict"] == "fits"


# -- what trains to try something out


def acting(folder, url=""):
    calls = ["urllib"] if url else []
    return lambda: Acting(["torch.save", "open", "rmtree", "subprocess", *calls], "on_train_end", folder, url)


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2])
def test_repeats_of_a_change_leave_files_and_servers_alone(config, user, devices):
    before = contents(user)
    changes = {"hardware.devices": devices, "hardware.strategy": "none" if devices == 1 else "ddp"}
    with counting_server() as (url, asked):
        trials = []
        source = acting(user, url)
        tried = try_change(
            config().replace(changes), source, TinyData, change={"loader.batch_size": 4}, repeats=2,
            on_run=trials.append,
        )  # fmt: skip
    assert contents(user) == before
    assert not asked
    assert len(tried.before.samples_per_second) == 2
    assert any("kept on_train_end" in text for text in trials[0].warnings), trials[0].warnings


def test_a_batch_search_leaves_files_alone(config, user):
    before = contents(user)
    asked = config().replace(OVERFLOWING)
    found = kit.studies.find_batch_size(asked, acting(user), TinyData, start=1, most=2).wait()
    assert found.batch_size == 2
    assert contents(user) == before


class WritingData(TinyData):
    """Keeps a note of each time it is set up."""

    def __init__(self, folder="."):
        super().__init__()
        self.folder = folder

    def setup(self, stage):
        (self.folder / "existing.txt").write_text("set up")
        super().setup(stage)


def test_a_calibration_leaves_files_alone(config, user):
    before = contents(user)
    quick = {"calibration.candidate_workers": [0, 1], "calibration.timeout_seconds": 3.0}
    found = kit.studies.calibrate(config().replace(quick), TinyModule, lambda: WritingData(user))
    assert found.chosen is not None
    assert contents(user) == before


def test_a_trial_of_ones_own_still_writes(config, user):
    fit(config(), lambda: Acting(["open"], "on_train_end", user), TinyData).wait(SECONDS)
    assert (user / "existing.txt").read_text() == "changed"
