"""Reading the run directories of others: everything is shown, and nothing that lies in them is run."""

import contextlib
import json
import os
import pickle

import pytest
from made_runs import make_run

import kit
from kit.errors import KitError
from kit.studies.scaling.predict import predict_run


class Evil:
    """Runs a command when it is unpickled."""

    def __init__(self, canary):
        self.canary = canary

    def __reduce__(self):
        return os.system, (f"touch {self.canary}",)


@pytest.fixture
def canary(tmp_path):
    """Appears when code of the run directory was run."""
    yield tmp_path / "canary"
    assert not (tmp_path / "canary").exists()


@pytest.fixture
def foreign(tmp_path, canary):
    """Two complete runs whose payload, module and source leave a canary."""
    evil = tmp_path / "evil.py"
    evil.write_text(f"open({str(canary)!r}, 'w').close()\nclass Evil: pass\n")
    target = f"{evil}:Evil"
    changes = {"model.target": target, "data.source": target, "data.url": str(tmp_path / "store.zarr")}
    found = []
    for seed in (1, 2):
        more = {**changes, "training.seed": seed}
        paths = make_run(tmp_path / "runs", more, counters={}, end={"state": "COMPLETE"})
        environment = json.loads(paths.environment.read_text())
        paths.environment.write_text(json.dumps({**environment, "sys_path": [str(tmp_path)], "folder": str(tmp_path)}))
        paths.payload.write_bytes(pickle.dumps(Evil(canary)))
        found.append(paths.directory)
    return found


def page(directory):
    return kit.html_report(directory.parent, directory.parent / "report.html")


READERS = {
    "trial": lambda run: repr(kit.Trial.open(run)) + kit.Trial.open(run)._repr_html_(),
    "results": lambda run: repr(kit.results(run.parent)),
    "compare": lambda run: repr(kit.studies.compare(run.parent)),
    "report": page,
    "timing": lambda run: repr(kit.studies.timing(kit.Trial.open(run))),
    "diagnose": lambda run: repr(kit.studies.diagnose(run, peaks=False)),
    "predict run": lambda run: repr(predict_run([run], devices=[1, 2], epochs=1, samples_per_epoch=100)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", READERS)
def test_reading_a_foreign_run_runs_nothing_of_it(foreign, name):
    too_plain = name in ("diagnose", "predict run")  # for what these ask of a run; they end where it is read
    with contextlib.suppress(*([KitError] if too_plain else [])):
        assert READERS[name](foreign[0])


def test_memory_of_a_big_run_is_not_predicted_with_a_foreign_module(foreign):
    """The module that the config of the run names would be imported for it."""
    from types import SimpleNamespace

    from kit.studies.scaling.predict import _memories

    trial = kit.Trial.open(foreign[0])
    answers, notes = _memories(SimpleNamespace(trials=[trial], config=trial.config), [2], None, None, None)
    assert answers == {}
    assert "trust=True" in notes[0]
