"""Loggers of services write in a trial what they write under a plain Trainer, by their own packages and offline.

What each kept is read back by its own reader, but for W&B's, which has none for a run that was never sent.
"""

from __future__ import annotations

import csv
import importlib.util
import math

import loggers
import numpy as np
import pytest
from lightning.pytorch.loggers import CSVLogger, MLFlowLogger, TensorBoardLogger, WandbLogger
from waiting import PATIENCE_SECONDS

import kit

STEPS = 6


def of_csv(folder):
    with (folder / "mine" / "version_0" / "metrics.csv").open() as file:
        rows = [*csv.DictReader(file)]
    return {name: [float(row[name]) for row in rows if row.get(name)] for name in ("loss", "direct")}


def of_tensorboard(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder / "mine" / "version_0")).Reload()
    return {name: [event.value for event in found.Scalars(name)] for name in ("loss", "direct")}


def of_mlflow(folder):
    from mlflow.tracking import MlflowClient

    client = MlflowClient((folder / "runs").as_uri())
    (run,) = client.search_runs([client.get_experiment_by_name("mine").experiment_id])
    assert (run.info.status, run.data.params) == ("FINISHED", {"rate": "0.1"})
    names = ("loss", "direct")
    return {name: [metric.value for metric in client.get_metric_history(run.info.run_id, name)] for name in names}


def of_wandb(folder):
    from wandb.proto.wandb_internal_pb2 import Record

    (file,) = folder.glob("wandb/offline-run-*/*.wandb")
    found = {"loss": [], "direct": []}
    for text in records(file.read_bytes()):
        record = Record.FromString(text)
        for item in record.history.item if record.HasField("history") else ():
            name = item.key or ".".join(item.nested_key)
            if name in found:
                found[name].append(float(item.value_json))
    assert record.HasField("exit")
    assert record.exit.exit_code == 0
    return found


def records(written, block=1 << 15):
    """Of W&B's file, which is a log of LevelDB behind seven bytes: a checksum, a length and a kind before each part."""
    parts, place = [], 7
    while place + 7 <= len(written):
        if block - place % block < 7:
            place += block - place % block
            continue
        length, kind = int.from_bytes(written[place + 4 : place + 6], "little"), written[place + 6]
        parts.append(written[place + 7 : place + 7 + length])
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield b"".join(parts)
            parts = []


def of_trackio(folder):
    from trackio.sqlite_storage import SQLiteStorage

    rows = SQLiteStorage.get_logs("mine", "trial")
    return {name: [row[name] for row in rows if name in row] for name in ("loss", "direct")}


LOGGERS = {
    "CSV": ("lightning", lambda folder: CSVLogger(folder, name="mine"), of_csv),
    "TensorBoard": ("tensorboard", lambda folder: TensorBoardLogger(folder, name="mine"), of_tensorboard),
    "MLflow": ("mlflow", lambda folder: MLFlowLogger("mine", tracking_uri=(folder / "runs").as_uri()), of_mlflow),
    "W&B": ("wandb", lambda folder: WandbLogger(project="mine", save_dir=folder, offline=True), of_wandb),
    "Trackio": ("trackio", lambda folder: loggers.Trackio("mine"), of_trackio),
}


@pytest.mark.filterwarnings("ignore")  # of those packages
@pytest.mark.parametrize(("ranks", "strategy"), [(1, "none"), (2, "ddp")])
@pytest.mark.parametrize("name", LOGGERS)
def test_a_logger_keeps_what_a_trial_gives_it(config, tmp_path, monkeypatch, name, ranks, strategy):
    package, make, read = LOGGERS[name]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # MLflow 3 refuses its file store without
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    asked = config(ranks, strategy, max_steps=STEPS, count_work=False, measure_memory=False)
    asked = asked.replace({"model.target": "loggers:Line"})
    trial = kit.fit(asked, None, "loggers:rows", logger=make(tmp_path), trainer={"log_every_n_steps": 1})
    trial.wait(PATIENCE_SECONDS)
    assert trial.state == "COMPLETE", trial.message
    found = read(tmp_path)
    assert found["direct"] == [float(place) for place in range(STEPS)]
    losses = [event["loss"] for event in trial.steps if event["rank"] == 0]
    np.testing.assert_allclose(found["loss"], losses, rtol=1e-6)
    assert all(map(math.isfinite, losses))
