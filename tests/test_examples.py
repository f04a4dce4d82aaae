"""The example of every public function runs as it is printed, and its docstring says what it takes, gives and raises.

The names that examples use: `config` (a small one for the CPU), `MyModule` and `MyData`, `trial` (one that has ended),
`ocean` and `store` (a config of the ocean's recipe, made smaller, and its built store), `shop` (a DuckDB file),
`topics` and `gpt` (configs of those models), `bucket` (an empty one), and in the project folder `last.ckpt` and
`trace.json`.
"""

import doctest
import functools
import importlib
import inspect
import json
import shutil
import sys

import house
import numpy
import pytest
import readme

import kit
from kit.testing import TinyData, TinyModule

PUBLIC = [f"{package}.{name}" for package, names in house.public().items() for name in names]
SMALL = {
    "hardware.accelerator": "cpu", "hardware.threads_per_rank": 1, "trial.max_steps": 4, "trial.warmup_steps": 1,
    "trial.predict_memory": False,
}  # fmt: skip
TOPICS = {"documents": 64, "terms": 16, "topics": 4}
GPT = {"vocabulary": 64, "width": 16, "heads": 2, "layers": 1, "context": 32}
TOKENS = {"vocabulary": 64, "batch_size": 1, "sequences": 8}
OCEAN = {
    "data.arguments": {"time": 4, "lat": 96, "lon": 96, "seed": 8}, "data.samples_per_epoch": 16,
    "loader.batch_size": 2, "model.arguments": {"variables": 3, "history": 1, "width": 4, "depth": 1},
}  # fmt: skip


def public(name):
    package, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(package), attribute)


FUNCTIONS = [name for name in PUBLIC if inspect.isfunction(public(name))]


def _bar(name, length):
    kind = "cpu_op" if name.startswith("aten") else "user_annotation"
    return {"ph": "X", "name": name, "cat": kind, "ts": 0, "dur": length, "pid": 1, "tid": 1}


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A project folder with the datasets, the working directory of these tests."""
    folder = tmp_path_factory.mktemp("project")
    (folder / "pyproject.toml").touch()
    (folder / "last.ckpt").write_bytes(b"weights")
    (folder / "trace.json").write_text(
        json.dumps({"traceEvents": [_bar("ProfilerStep#1", 1000), _bar("aten::mm", 610)]})
    )
    shutil.copytree(readme.ROOT / "datasets", folder / "datasets")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.syspath_prepend(folder / "datasets" / "shop")
        yield folder
        sys.modules.pop("generate", None)


@pytest.fixture(scope="module")
def names(project):
    """What examples may use."""
    config = kit.Config().replace({**SMALL, "model.target": "kit.testing:TinyModule"})
    ocean = kit.Config.load("datasets/ocean/recipe.yaml").replace({**SMALL, **OCEAN})
    kit.build(ocean, progress=False)
    importlib.import_module("generate").write_shop("data/shop", rows=400, customers=40, seed=0)
    return {
        "kit": kit, "numpy": numpy, "config": config, "MyModule": TinyModule,
        "MyData": functools.partial(TinyData, samples=64), "ocean": ocean, "store": ocean.data.url,
        "trial": kit.fit(config, TinyModule, TinyData).wait(), "shop": "data/shop/shop.duckdb",
        "topics": kit.Config.load("datasets/topics/recipe.yaml").replace({**SMALL, "model.arguments": TOPICS}),
        "gpt": config.replace({"model.target": "kit.models:GPT", "model.arguments": GPT, "data.arguments": TOKENS}),
    }  # fmt: skip


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_public_function_says_what_it_takes_gives_and_raises(name):
    function = public(name)
    text = inspect.getdoc(function)
    parameters = list(inspect.signature(function).parameters)
    assert not parameters or "\nArgs:\n" in text
    assert [parameter for parameter in parameters if f"\n    {parameter}: " not in text] == []
    for heading in ("Returns", "Raises", "Example"):
        assert f"\n{heading}:\n" in text


@pytest.mark.parametrize("name", [name for name in PUBLIC if ">>>" in (inspect.getdoc(public(name)) or "")])
def test_an_example_prints_what_it_shows(names, name, tmp_path):
    parser, runner = doctest.DocTestParser(), doctest.DocTestRunner(verbose=False)
    example = parser.get_doctest(inspect.getdoc(public(name)), {**names, "bucket": str(tmp_path)}, name, None, 0)
    told = []
    assert runner.run(example, out=told.append).failed == 0, "".join(told)
