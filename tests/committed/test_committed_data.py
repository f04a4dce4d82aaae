"""A committed file of rows or of events: it trains as its trial did, with loader settings that it does not name."""

import datetime

import committed_parts as parts
import pyarrow
import pyarrow.parquet
import pytest
import yaml
from lightning.pytorch import Trainer

import kit
from kit.charts.trial import loss_info
from kit.committed.job import make_job, takes_config
from kit.config import Config
from kit.errors import ConfigError, MissingRowsError
from kit.train import CommittedConfig
from kit.train.cli import CommittedCLI, check_files

pytestmark = [pytest.mark.timeout(400), pytest.mark.usefixtures("warm_runs")]
SECONDS = 300
SIZES = {"documents": 96, "terms": 60, "topics": 4}
QUICK = {
    "hardware.accelerator": "cpu", "hardware.threads_per_rank": 1, "training.seed": 99, "training.max_epochs": 2,
    "loader.drop_last": True, "trial.max_steps": 8, "trial.predict_memory": False, "trial.measure_memory": False,
}  # fmt: skip


@pytest.fixture
def rows(project):
    """The config of topics of 96 documents in a file: 4 batches of 20, and what is left is dropped."""
    corpus = kit.Corpus(**SIZES, length=80, seed=5)
    kit.data.write_rows("counts.npy", corpus.rows, corpus.shape, progress=False)
    return Config().replace({
        **QUICK, "name": "rows", "loader.batch_size": 20,
        "data.arguments": {"source": "counts.npy", "row_block": 4},
        "model.target": "kit.models:PoissonNMF", "model.arguments": SIZES,
    })  # fmt: skip


@pytest.fixture
def events(project):
    """The config of a model of 40 customers in a Parquet file: 4 batches of 9 an epoch, read in 3 query chunks."""
    start, names = datetime.datetime(2026, 1, 1), ["tea", "cake", None, "plum jam"]
    table = pyarrow.table({
        "customer": pyarrow.array([1000 + 7 * (row % 40) for row in range(400)], "int64"),
        "time": pyarrow.array([start + datetime.timedelta(hours=row * row % 97) for row in range(400)]),
        "what": pyarrow.array([names[(row // 40 + row) % 4] for row in range(400)], "string"),
    })  # fmt: skip
    pyarrow.parquet.write_table(table, project / "shop.parquet")
    source = {
        "type": "event", "name": "shop", "connection": {"kind": "parquet", "path": "shop.parquet"},
        "main_entity_column": "customer", "date_column": "time",
    }  # fmt: skip
    (project / "sources.yaml").write_text(yaml.safe_dump({"data_sources": [source]}))
    config = Config().replace({
        **QUICK, "name": "events", "loader.batch_size": 9, "queries.load_query_chunks": 3,
        "queries.cache_path": str(project / "cache"),
        "data.arguments": {"source": "sources.yaml", "sketch_quality": 0.25},
    })  # fmt: skip
    features = kit.data.EventData(config=config, **config.data.arguments).features
    arguments = {**features.model_arguments(), "hidden_dim": 16, "num_layers": 1}
    return config.replace({"model.target": "kit.models:SketchModel", "model.arguments": arguments})


def said(committed):
    """What a file says of its data, and what of its settings was open."""
    values = committed.values
    return values["data"], values["trainer"]["callbacks"][-1]["init_args"].get("resolved", {})


@pytest.mark.slow
def test_two_ranks_read_rows_with_the_settings_that_their_trial_had(rows):
    config = rows.replace({"hardware.devices": 2, "hardware.strategy": "ddp", "loader.batch_size": 10})
    trial = kit.fit(config, None, "kit.data:RowData").wait()
    committed = kit.commit(config, trial, data="kit.data:RowData")
    assert said(committed) == ({"class_path": "kit.data.RowData", "init_args": config.data.arguments}, {})
    run = committed.run().wait(SECONDS)
    assert (run.steps, len(run.losses)) == (8, 8)
    parts.assert_exact(loss_info(trial, run), 8)


class Measured:
    """A trial whose loader was calibrated, as far as a commit asks it."""

    state, run_directory = "COMPLETE", "runs/a"

    def __init__(self, config, changes):
        self.config = self.asked = config
        self.changes = changes
        self.environment = {"accelerator": "cpu", "world_size": 1, "precision": "32-true", "reasons": []}

    def event(self, kind):
        return {"changes": self.changes, "headline": "loader calibrated: three batches ahead"}


def test_what_a_trial_measured_of_its_loader_travels_too(rows):
    config = rows.replace({"calibration.enabled": True})
    job, notes = make_job(config, Measured(config, {"loader.batches_ahead": 3}), data=kit.data.RowData)
    assert (job.resolved, notes) == ({"loader.batches_ahead": 3}, [])
    assert job.reasons["loader.batches_ahead"] == "loader calibrated: three batches ahead"
    carried = CommittedConfig(config.to_yaml(), dict(job.resolved))
    module, data = kit.models.PoissonNMF(**SIZES), kit.data.RowData("counts.npy")
    trainer = Trainer(
        accelerator="cpu", max_steps=2, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[carried],
    )  # fmt: skip
    trainer.fit(module, datamodule=data)
    loader = data.config.loader
    assert (loader.batch_size, loader.drop_last, loader.batches_ahead, data.loader.order.seed) == (20, True, 3, 99)


@pytest.mark.slow
def test_events_are_read_with_the_settings_that_their_trial_had(events, project):
    trial = kit.fit(events, None, kit.data.EventData).wait()
    kept = {*(project / "cache").rglob("*.parquet")}
    committed = kit.commit(events, trial, data=kit.data.EventData)
    assert said(committed)[0]["init_args"] == {"source": "sources.yaml", "sketch_quality": 0.25}
    run = committed.run().wait(SECONDS)
    parts.assert_exact(loss_info(trial, run), 8)
    assert {*(project / "cache").rglob("*.parquet")} == kept  # it asked as the trial did, in as many query chunks


def test_which_data_takes_the_config_is_read_from_its_source(project):
    (project / "mine.py").write_text(
        "import kit\nfrom kit.data import RowData\n"
        "class Mine(kit.data.EventData): pass\nclass Yours(RowData): pass\nclass Theirs(Yours): pass\n"
        "class Plain: pass\n"
    )
    takes = (
        "kit.data:RowData",
        "kit.data:EventData",
        "kit.data.rows.loader:RowData",
        "mine:Mine",
        "mine:Yours",
        "mine:Theirs",
    )
    assert all(takes_config(target) for target in takes)
    others = ("mine:Plain", "kit.testing:TinyData", "kit.data.patches.module:PatchData")
    assert not any(takes_config(target) for target in others)


def test_without_a_committed_config_data_keeps_what_it_was_given(rows):
    data = kit.data.RowData("counts.npy", batch_size=7)
    assert data.committed is None
    next(iter(data))
    assert (data.order().batch_size, data.config.training.seed) == (7, Config().training.seed)
    data.close()


def test_an_argument_that_rows_do_not_take_is_refused_before_anything_is_read(rows):
    committed = kit.commit(rows, data="kit.data:RowData")
    committed.file.write_text(committed.text.replace("row_block: 4", "row_blok: 4"))
    says = r"data.init_args.row_blok: kit.data.RowData takes no such.*did you mean .row_block"
    with pytest.raises(ConfigError, match=says):
        check_files(["fit", "--config", str(committed.file)])


def test_rows_that_are_not_there_are_said_as_kit_says_it(rows, project, monkeypatch):
    committed = kit.commit(rows, data="kit.data:RowData")
    (project / "counts.npy").rename(project / "count.npy")
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")  # which Lightning sets
    with pytest.raises(MissingRowsError, match=r"counts\.npy .*not exist.*'count\.npy'\?"):
        CommittedCLI(args=["fit", "--config", str(committed.file)])
