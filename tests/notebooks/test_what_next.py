"""What a notebook asks its reader to try next, tried: every code in these sentences is in the lines that try it."""

import inspect
import re
import subprocess
import sys

import nbformat
import numpy
import pytest
import readme

import kit
from kit.testing import TinyData, TinyModule

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

NOTEBOOKS = readme.ROOT / "notebooks"


def there(*names):
    """These notebooks are there."""
    assert [name for name in names if not (NOTEBOOKS / f"{name}.ipynb").exists()] == []


@pytest.fixture
def config(folder):
    """The ocean, smaller, in a project of its own."""
    return kit.Config.load("datasets/ocean/recipe.yaml").replace({
        "data.arguments": {"time": 6, "lat": 64, "lon": 64, "seed": 8}, "data.samples_per_epoch": 16,
        "data.patch": {"time": 2, "lat": 16, "lon": 16}, "loader.batch_size": 2,
        "model.arguments": {"variables": 3, "history": 1, "width": 4, "depth": 1},
        "hardware.accelerator": "cpu", "hardware.threads_per_rank": 1, "trial.max_steps": 4, "trial.warmup_steps": 1,
    })  # fmt: skip


def start(config):
    there("01_chunks")
    assert (NOTEBOOKS / "README.md").exists()
    MyModule, MyData = TinyModule, TinyData
    kit.panel(config, MyModule, MyData).close()
    kit.build(config)
    panel = kit.panel(config)
    for changes in ({}, {"devices": 2, "strategy": "ddp"}, {"patch": {"time": 2, "lat": 8, "lon": 8}}):
        section = "data" if "patch" in changes else "hardware"
        panel.config = config.replace({f"{section}.{name}": value for name, value in changes.items()})
        panel.fit()
        panel.wait()
        assert panel.trial.state == "COMPLETE"
    panel.close()
    rows = kit.results()
    assert sorted((row["world_size"], row["config"]["hardware.strategy"]) for row in rows) == [
        (1, "none"),
        (1, "none"),
        (2, "ddp"),
    ]
    assert len(kit.studies.compare("runs").groups) == 3


def chunks(config):
    there("02_streaming")
    kit.build(config)
    yours = kit.Config().replace({
        "data.url": config.data.url, "data.source": None, "data.patch": config.data.patch, "loader.batch_size": 2,
    })  # fmt: skip
    panel = kit.data.chunk_panel(yours)
    assert kit.plan_chunks(yours).chunk
    panel.close()


def streaming(config):
    there("03_memory")
    with kit.cloud.simulate("across the ocean") as cloud:
        config = config.replace({"data.url": cloud.url("bucket/ocean.zarr")})
        kit.build(config)
        cloud.turn("same region")
        slower = {"loader.batches_ahead": 6, "loader.requests_in_flight": 64}
        assert kit.fit(config).wait().state == "COMPLETE"
        cloud.turn(latency_seconds=0.2)
        assert kit.fit(config.replace(slower)).wait().state == "COMPLETE"


def memory(config):
    there("04_levers")
    MyModule, MyData = TinyModule, TinyData
    config = config.replace({"model.arguments": {}, "loader.batch_size": 4})
    assert kit.predict_memory(config, MyModule, MyData, device="H100-80GB").verdict == "fits"


def levers(config):
    there("06_profile")
    assert kit.Config.profile("long context").model.arguments["window"]


def slow(config):
    there("07_commit")
    config = config.replace({"model.target": "kit.testing:TinyModule", "model.arguments": {}})
    trial = kit.fit(config, data="kit.testing:TinyData").wait()
    assert kit.studies.diagnose(trial).values


def committed(config):
    there("08_larger_than_memory")
    config = config.replace({"model.target": "kit.testing:TinyModule", "model.arguments": {}})
    trial = kit.fit(config, data="kit.testing:TinyData").wait()
    launch = kit.commit(trial.config, trial, data="kit.testing:TinyData").launch
    assert "python -m kit.train.cli fit --config" in launch.python


def rows(config):
    there("09_topics")
    numpy.save("mine.npy", numpy.zeros((16, 4), "float32"))
    assert len(kit.data.RowData("mine.npy").train_dataloader()) == 1  # `RowData`


def tables(config):
    there("11_build")
    assert kit.data.read_sources("datasets/shop/sources.yaml")


def published(config):
    assert (readme.ROOT / "benchmarks/published.py").exists()
    memory(config)  # kit.predict_memory(config, MyModule, MyData, device="H100-80GB")
    MyModule, MyData = TinyModule, TinyData
    config = config.replace({"model.arguments": {}, "loader.batch_size": 4})
    assert kit.studies.compare_cards(config, MyModule, MyData, prices={"L4": 0.75, "H100-80GB": 3.0}).cheapest


def cloud(config):
    there("11_build")
    with kit.cloud.simulate("no limits") as cloud:
        config = config.replace({"data.url": cloud.url("bucket/ocean.zarr")})
        kit.build(config)
        kept = {"cache.size_bytes": "64 KiB", "cache.folder": "cache"}
        evicting = {"cache.eviction": "none"}  # as `cache.eviction: none`
        for changes in (kept, {**kept, **evicting}):
            assert kit.fit(config.replace(changes)).wait().state == "COMPLETE"
        cloud.turn("throttled bucket")
        cloud.turn(requests_per_second=20)
        trial = kit.fit(config.replace({"loader.requests_in_flight": 64, "chunking.chunk": "auto"})).wait()
        assert trial.state == "COMPLETE"
    assert kit.results()[0]["retries"] is not None


def build(config):
    there("12_published")
    names = sorted(path.name for path in (readme.ROOT / "datasets" / "recipes").iterdir())
    assert names, "datasets/recipes"
    with kit.cloud.simulate("no limits") as cloud:
        config = config.replace({"data.url": cloud.url("bucket/ocean.zarr")})
        kit.build(config)
        less = {"build.memory_bytes": "64 MiB", "build.scratch": "scratch", "data.url": cloud.url("bucket/less.zarr")}
        assert kit.build(config.replace(less)).arrays.keys() == kit.open_dataset(config.data.url).arrays.keys()
    numpy.save("x.npy", numpy.zeros((4, 8, 8), "float32"))  # as an `.npy`
    array = {"data.source": "x.npy", "data.arguments": {}, "data.patch": {"dim_0": 2, "dim_1": 8, "dim_2": 8}}
    assert kit.data.plan_build(config.replace(array)).tasks


def topics(config):
    there("10_tables")
    _, path, option = ["python", "datasets/topics/train.py", "--help"]  # `python datasets/topics/train.py --help`
    told = subprocess.run([sys.executable, str(readme.ROOT / path), option], capture_output=True, text=True, check=True)
    assert "--topics" in told.stdout
    corpus = kit.Corpus(documents=200, terms=60, topics=3, length=20.0, seed=0)
    kit.data.write_rows("data/topics.npy", corpus.rows, corpus.shape)
    recipe = kit.Config.load("datasets/topics/recipe.yaml").replace({
        "data.arguments": {"source": "data/topics.npy"}, "loader.batch_size": 16, "hardware.accelerator": "cpu",
        "model.arguments": {"documents": 200, "terms": 60, "topics": 4, "save_path": "data/found.npz"},
        "trial.max_steps": 100, "trial.warmup_steps": 1,
    })  # fmt: skip
    assert kit.fit(recipe, data="kit.data:RowData").wait().state == "COMPLETE"
    assert kit.compare_topics(kit.open_topics("data/found.npz"), corpus.truth).median_cosine > 0


TRIED = {
    "00_start": start, "01_chunks": chunks, "02_streaming": streaming, "03_memory": memory, "04_levers": levers,
    "05_cloud": cloud, "06_profile": slow, "07_commit": committed, "08_larger_than_memory": rows, "09_topics": topics,
    "10_tables": tables, "11_build": build, "12_published": published,
}  # fmt: skip


def sentences():
    """{notebook: what it says of what next}."""
    found = {}
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        for cell in nbformat.read(path, as_version=4).cells:
            if cell.cell_type == "markdown" and "**What next?**" in cell.source:
                found[path.stem] = cell.source.partition("**What next?**")[2]
    return found


def test_what_is_tried_is_what_the_notebooks_say():
    said = sentences()
    assert said.keys() == TRIED.keys()
    for name, text in said.items():
        lines = inspect.getsource(TRIED[name])
        assert [code for code in re.findall(r"`([^`]+)`", text) if code not in lines] == [], name


@pytest.mark.parametrize("name", TRIED)
def test_what_a_notebook_says_to_try_next_works(name, config):
    TRIED[name](config)
