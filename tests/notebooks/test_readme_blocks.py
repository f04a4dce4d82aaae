"""Every block of Python in README is run as it is printed, line by line, in a project of its own.

What runs for real runs on data made smaller: the recipes that come with kit, with fewer steps, a tiny module as
`MyModule`, and a simulated cloud for every bucket. `BOUND` are the lines that are only held against the signatures of
what they call, each with the reason.
"""

import ast
import functools
import inspect
import pkgutil

import pytest
import readme

import kit
from kit.config import Config
from kit.studies.diagnosis.diagnose import Finding
from kit.studies.diagnosis.rules import RULES
from kit.testing import TinyData, TinyModule

pytestmark = pytest.mark.slow

BLOCKS = readme.blocks("python")
MANY = "runs a dozen trials or more; tests/studies/ has it run"
BOUND = {
    "kit.studies.verify_levers(config, MyModule, MyData)": MANY,
    "kit.studies.find_batch_size(config, MyModule, MyData)": MANY,
    "kit.studies.back_off(config, MyModule, MyData, keep_global_batch=True)": "out of memory; tests/studies has it run",
    "kit.studies.verify_sequences(config, MyModule, MyData, lengths=[1024, 8192], chunk=512)": MANY,
    "kit.studies.open_trace('trace.json', against='before.json')": "the reader's files; tests/studies reads made ones",
    "diagnosis['no prefetch'].try_it()": "six trials, of a finding this trial may not have; tests/studies tries one",
}
SMALLER = {
    "datasets/ocean/recipe.yaml": {
        "data.arguments": {"time": 4, "lat": 96, "lon": 96, "seed": 8}, "data.samples_per_epoch": 16,
        "loader.batch_size": 2, "model.arguments": {"variables": 3, "history": 1, "width": 4, "depth": 1},
    },
    "datasets/topics/recipe.yaml": {},
}  # fmt: skip
FEW = {"hardware.accelerator": "cpu", "hardware.threads_per_rank": 1, "trial.max_steps": 6, "trial.warmup_steps": 2}


@pytest.fixture
def project(folder):
    """A project with the recipes, made smaller, where the reader is."""
    for path, changes in SMALLER.items():
        Config.load(path).replace({**FEW, **changes}).save(path)
    return folder


@pytest.fixture
def names(project):
    """What the reader has: a module, data and a config."""
    few = {"calibration.candidate_workers": [0, 1], "calibration.max_measure_batches": 10, "profiler.active_steps": 1}
    config = Config().replace({**FEW, **few, "model.target": "kit.testing:TinyModule", "loader.batch_size": 32})
    return {"kit": kit, "config": config, "MyModule": TinyModule, "MyData": functools.partial(TinyData, batch_size=32)}


def statements(heading):
    return [ast.unparse(node) for node in ast.parse(BLOCKS[heading]).body]


def run(heading, names):
    """The block, statement by statement; a bound one is bound."""
    for line in statements(heading):
        bind(line) if line in BOUND else exec(line, names)
    return names


def bind(line):
    for call in (node for node in ast.walk(ast.parse(line)) if isinstance(node, ast.Call)):
        if ast.unparse(call.func).startswith("kit."):
            given = {word.arg: object() for word in call.keywords}
            inspect.signature(pkgutil.resolve_name(ast.unparse(call.func))).bind(*call.args, **given)


def fitted(names):
    """A trial of the reader's own, ended."""
    return kit.fit(names["config"], names["MyModule"], names["MyData"]).wait()


def fit_ocean(names, changes):
    """A trial of the ocean's recipe, ended, and its config for the reader."""
    names["config"] = Config.load("datasets/ocean/recipe.yaml").replace(changes)
    kit.build(names["config"])
    return kit.fit(names["config"]).wait()


def test_the_whole_path(project, names):
    found = run("The whole path in one cell", names)
    found["trial"].wait()
    assert found["trial"].state == "COMPLETE"
    assert len(kit.results()) == 1
    assert kit.open_dataset(found["config"]).arrays


def test_a_module_and_a_loader_of_ones_own(names):
    names |= {"my_loader": TinyData(samples=256).train_dataloader()}
    found = run("Your module and your DataLoader", names)
    assert found["estimate"].verdict == "fits"
    assert found["trial"].state == "COMPLETE"


def test_memory(names):
    found = run("Memory", names)
    assert found["estimate"].verdict == "fits"
    assert found["largest"] is not None
    assert found["table"] is not None


def test_levers_are_called_as_they_take_it(names):
    run("Levers", names)
    for name in ("verify_levers", "find_batch_size", "back_off", "verify_sequences"):
        assert f"kit.studies.{name}(" in BLOCKS["Levers"]


def test_streaming(project, names):
    names["config"] = Config.load("datasets/ocean/recipe.yaml")
    found = run("Streaming", names)
    assert found["config"].data.url == "gs://bucket/ocean.zarr"


def test_larger_than_memory(project, names):
    found = run("Larger than memory", names)
    assert (project / "data" / "topics.npy").exists()
    assert found["config"].name == "topics"


def test_tables(project, names, monkeypatch):
    monkeypatch.syspath_prepend(project / "datasets" / "shop")
    import generate

    generate.write_shop("data/shop", rows=400, customers=40, seed=0)
    names["config"] = Config.load("datasets/shop/recipe.yaml")
    found = run("Tables", names)
    assert len(found["chunks"]) == 8
    assert found["check"] is not None


def test_calibrating_the_loader(names):
    found = run("Calibrating the loader", names)
    assert found["config"].loader.num_workers in (0, 1)


def test_where_the_time_goes(names):
    names["trial"] = fitted(names)
    found = run("Where the time goes, and what would help", names)
    assert found["profile"].tables
    assert "no prefetch" in {rule.name for rule in RULES}
    assert callable(Finding.try_it)


def test_the_big_run(project, names):
    names["trials"] = [fit_ocean(names, {})]
    found = run("The big run from the small one", names)
    assert found["run"] is not None
    assert isinstance(found["config"], Config)


def test_from_a_trial_to_the_real_machine(project, names):
    names["trial"] = fit_ocean(names, {"hardware.devices": 2, "hardware.strategy": "ddp"})
    found = run("From a trial to the real machine", names)
    assert found["run"].ended
    assert Config.load(found["committed"].file) == found["config"]
    launch = found["committed"].launch
    assert launch.python.startswith("python")
    assert "torchrun" in launch.torchrun
    assert "torchrun" in launch.spread(2).torchrun_nodes


def test_checkpoints_in_the_cloud(project, names):
    from lightning.pytorch import Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint

    (project / "images").mkdir()
    (project / "images" / "one.png").write_bytes(b"one")
    with kit.cloud.simulate("no limits") as cloud:
        cloud.url("bucket/run-7")
        cloud.upload("images", "bucket/images")
        first, *rest = statements("Checkpoints in the cloud")
        exec(first, names)
        saved = [ModelCheckpoint(dirpath=project / "saved", every_n_train_steps=2), names["upload"]]
        quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
        names |= {"trainer": Trainer(max_steps=4, callbacks=saved, **quiet), "module": TinyModule(), "data": TinyData()}
        for line in rest:
            exec(line, names)
        assert kit.checkpoints.latest("gs://bucket/run-7") is not None
    assert (project / "data" / "images" / "one.png").read_bytes() == b"one"


def test_trials(project, names):
    fitted(names)
    found = run("Trials", names)
    assert len(found["found"]) == 1
    assert (project / "results.csv").exists()
    assert (project / "report.html").exists()


def test_every_block_is_run_here_and_every_bound_line_is_one_of_readme():
    source = inspect.getsource(inspect.getmodule(statements))
    assert [heading for heading in BLOCKS if f'"{heading}"' not in source] == []
    assert set(BOUND) <= {line for heading in BLOCKS for line in statements(heading)}
