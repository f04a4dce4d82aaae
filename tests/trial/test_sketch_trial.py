"""SketchModel on EventData, as `kit.fit` runs it: it learns tastes, and its memory is what was predicted."""

import random
from datetime import datetime, timedelta

import pyarrow
import pytest
from pyarrow import parquet
from waiting import PATIENCE_SECONDS

import kit

CUSTOMERS, TASTES = 64, 4


def shop(folder):
    """Customers who always buy of one kind."""
    draw = random.Random(0)
    rows = [
        {
            "customer": customer, "time": datetime(2026, 1, 1) + timedelta(hours=draw.randrange(9000)),
            "kind": f"kind {customer % TASTES}", "price": draw.gauss(30, 5),
        }
        for customer in range(CUSTOMERS)
        for _ in range(12)
    ]  # fmt: skip
    parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "purchases.parquet")
    return {
        "source": {
            "type": "event", "name": "purchases", "main_entity_column": "customer", "date_column": "time",
            "connection": {"kind": "parquet", "path": str(folder / "purchases.parquet"), "threads": 1},
        },
        "sketch_quality": 0.25,
    }  # fmt: skip


@pytest.fixture
def shop_config(config, tmp_path):
    arguments = shop(tmp_path)
    made = config(max_steps=40, warmup_steps=1).replace(
        {
            "data.arguments": arguments, "loader.batch_size": 16, "training.max_epochs": 20,
            "model.target": "kit.models:SketchModel", "queries.load_query_chunks": 2,
        }
    )  # fmt: skip
    features = kit.data.EventData(**arguments, config=made).features
    sizes = {**features.model_arguments(), "hidden_dim": 64, "num_layers": 1, "learning_rate": 0.003}
    return made.replace({"model.arguments": sizes})


@pytest.mark.slow
def test_it_learns_and_measures_what_was_predicted(shop_config):
    turned = shop_config.replace(kit.memory.sizes(shop_config, data=kit.data.EventData).changes(sketch_quality=0.5))
    estimate = kit.predict_memory(turned, None, kit.data.EventData)
    trial = kit.fit(turned, None, kit.data.EventData).wait(PATIENCE_SECONDS)
    assert trial.state == "COMPLETE"
    (row,) = kit.results(turned.trial.folder)
    assert row["device_allocated_bytes_measured"] / estimate.device_allocated_bytes == pytest.approx(1, abs=0.02)
    losses = [event["loss"] for event in trial.steps]
    assert losses[-1] < 0.5 * losses[0]
