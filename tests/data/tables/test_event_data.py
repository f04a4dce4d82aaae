"""EventData: features of whole entities for Lightning, the same however the table is read."""

import event_tables
import pandas
import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from kit.config import Config
from kit.data.tables.fit import fit_features
from kit.data.tables.loader import EventData
from kit.data.tables.measure import measure_queries
from kit.data.tables.source import plan_partitions
from kit.errors import ConfigError


def config(folder=None, query_chunks=1, fit_chunks=1, **changes):
    cache = {} if folder is None else {"queries.cache_path": str(folder / "cache")}
    return Config().replace({
        "loader.batch_size": 8, "queries.load_query_chunks": query_chunks, "queries.fit_query_chunks": fit_chunks,
        "queries.num_concurrent_features": 1, "queries.num_cpus": 1, **cache, **changes,
    })  # fmt: skip


def by_entity(loader):
    """The features of each entity, which comes once."""
    found = {}
    for batch in loader:
        for place, entity in enumerate(batch["entity"].tolist()):
            assert entity not in found
            found[entity] = {name: values[place].numpy() for name, values in batch.items()}
    return found


@pytest.mark.parametrize("kind", ["parquet", "duckdb"])
def test_the_number_of_query_chunks_changes_neither_features_nor_batches_of_them(tmp_path, kind):
    source = event_tables.shop(tmp_path, kind)
    whole = EventData(source, config())
    expected = by_entity(whole.train_dataloader())
    assert len(expected) == 40
    parts = EventData(source, config(query_chunks=3, fit_chunks=4))
    assert parts.features == whole.features
    found = by_entity(parts.train_dataloader())
    assert found.keys() == expected.keys()
    assert all(event_tables.tensors_equal(found[entity], expected[entity]) for entity in expected)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (None, "NoneType is no table"),
        (pandas.DataFrame({"who": [1]}), r"DataFrame .*to_parquet"),
        (Config(), r"EventData\(source, config\)"),
        ("gs://bucket/shop.parquet", "download_once"),
        ("shop.csv", "Parquet"),
    ],
)
def test_what_is_no_table_is_refused_with_what_is(source, words):
    with pytest.raises(ConfigError, match=words):
        EventData(source)


def test_a_table_without_an_entity_or_config_is_refused_at_once(tmp_path):
    event_tables.shop(tmp_path)
    with pytest.raises(ConfigError, match="main_entity_column: .*customer"):
        EventData(tmp_path / "shop.parquet")
    with pytest.raises(ConfigError, match="config: str"):
        EventData(event_tables.opened(tmp_path / "shop.parquet"), "purchases")
    for asked in (plan_partitions, fit_features, measure_queries):
        with pytest.raises(ConfigError, match="open_table"):
            asked(tmp_path / "shop.parquet", *([3] if asked is plan_partitions else []))


def test_epochs_and_other_tasks_find_queries_and_features_in_the_cache(tmp_path):
    first = EventData(event_tables.shop(tmp_path), config(tmp_path, query_chunks=2))
    first.prepare_data()
    loader = first.train_dataloader()
    epochs = [by_entity(loader) for _ in range(2)]
    counts = first.table.counts
    assert counts["filled"] > 0
    other = EventData(event_tables.opened(tmp_path / "shop.parquet"), config(tmp_path, query_chunks=2))
    assert other.features == first.features
    again = by_entity(other.train_dataloader())
    assert other.table.counts == {"hit": 4, "filled": 0, "refilled": 0, "not kept": 0}  # counted and read, 2 parts each
    for epoch in (*epochs, again):
        assert all(event_tables.tensors_equal(epoch[entity], epochs[0][entity]) for entity in epochs[0])
    narrow = EventData(event_tables.opened(tmp_path / "shop.parquet"), config(tmp_path), sketch_quality=0.5)
    assert narrow.features == first.features.with_quality(0.5)
    (kept,) = (tmp_path / "cache" / "features").iterdir()
    kept.write_text(kept.read_text()[:100])
    again = EventData(event_tables.opened(tmp_path / "shop.parquet"), config(tmp_path))
    assert again.features == first.features
    assert again.table.counts["hit"] > 0  # fitted again, from what is kept of the queries


class Seen(LightningModule):
    """Notes the entities of each step."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.entities = []

    def training_step(self, batch, number):
        self.entities.append(batch["entity"].tolist())
        return self.weight**2 + batch["numeric"].sum() * 0

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


class SaveAt(Callback):
    """Saves a checkpoint after so many steps, while training goes on."""

    def __init__(self, steps, path):
        self.steps, self.path = steps, path

    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == self.steps:
            trainer.save_checkpoint(self.path)


def trainer(folder, **settings):
    return Trainer(
        accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder,
        enable_checkpointing=False, **settings,
    )  # fmt: skip


def test_a_fit_goes_on_in_the_middle_of_an_epoch_with_several_query_chunks(tmp_path):
    source = event_tables.shop(tmp_path, "duckdb")
    whole = Seen()
    trainer(tmp_path, max_epochs=2).fit(whole, EventData(source, config(query_chunks=3)))
    assert len(whole.entities) == 10
    first, path = Seen(), tmp_path / "seven.ckpt"
    data = EventData(source, config(query_chunks=3))
    trainer(tmp_path, max_epochs=2, callbacks=[SaveAt(7, path)]).fit(first, data)
    later = Seen()
    data = EventData(source, config(query_chunks=3))
    trainer(tmp_path, max_epochs=2).fit(later, data, ckpt_path=path, weights_only=False)
    assert first.entities == whole.entities
    assert later.entities == whole.entities[7:]


def test_it_is_shown_in_one_line_and_nothing_is_read(tmp_path):
    table = event_tables.shop(tmp_path)
    data = EventData(table, batch_size=8)
    assert str(data) == f"EventData: entities of {table}, 8 in a batch"
    assert data.loader is None


def test_a_yaml_file_and_a_mapping_name_the_table(tmp_path):
    event_tables.shop(tmp_path)
    declared = f"""
data_sources:
  - type: event
    name: shop
    connection: {{kind: parquet, path: {tmp_path / "shop.parquet"}}}
    main_entity_column: customer
    date_column: time
"""
    (tmp_path / "sources.yaml").write_text(declared)
    data = EventData(tmp_path / "sources.yaml", batch_size=5)
    assert data.source.name == "shop"
    assert data.config.loader.batch_size == 5
    (tmp_path / "two.yaml").write_text(declared + declared.replace("data_sources:\n", "").replace("shop\n", "other\n"))
    assert EventData(str(tmp_path / "two.yaml"), table="other").source.name == "other"
    with pytest.raises(ConfigError, match="other"):
        EventData(str(tmp_path / "two.yaml"))
