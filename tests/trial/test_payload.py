import functools
import threading
from pathlib import Path

import numpy as np
import pandas
import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.compile import from_compiled
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from kit.config import Config
from kit.errors import ConfigError
from kit.trial import submit
from kit.trial.fit_job import make_module
from kit.trial.payload import Part, check_parts, pack, unpack
from kit.trial.submit import check_targets


class Held:
    def __init__(self):
        self.name = "data"
        self.guard = threading.Lock()

    def train_dataloader(self):
        return None

    def __call__(self):
        return None


class Model:
    def __init__(self, width, depth=2):
        self.width = width


class Trained(LightningModule):
    def __init__(self, width, depth=2):
        super().__init__()

    def training_step(self, batch, batch_idx):
        return None

    def configure_optimizers(self):
        return None


def made(width):
    return Model(width)


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (None, "default"),
        ("kit.models:UNet", "path"),
        (Model, "class"),
        (lambda: Model(1), "factory"),
        (functools.partial(made, 3), "factory"),
        (Held(), "instance"),
        ([1, 2], "instance"),
    ],
)
def test_what_was_given_is_recognised(value, kind):
    assert Part.of(value).kind == kind


def test_arguments_that_do_not_fit_the_class_are_refused_with_what_it_takes():
    with pytest.raises(ConfigError, match=r"model\.arguments: class Trained .*takes \(width.*'hidth'"):
        check_parts(Part.of(Trained), Part.of(None), made_with(model={"width": 3, "hidth": 3}))
    check_parts(Part.of(Trained), Part.of(None), made_with(model={"width": 3}))


def test_a_misspelt_argument_is_named_and_not_the_one_that_is_missing_instead():
    with pytest.raises(ConfigError, match=r"'hidth'.*give an instance.*did you mean 'width'") as refused:
        check_parts(Part.of(Trained), Part.of(None), made_with(model={"hidth": 3}))
    assert "missing" not in str(refused.value)


class Forwarding(Trained):
    def __init__(self, width, **more):
        super().__init__(width)


def test_a_missing_argument_is_named_where_a_class_takes_any_other():
    with pytest.raises(ConfigError, match=r"missing .*'width'"):
        check_parts(Part.of(Forwarding), Part.of(None), made_with(model={"depth": 3}))


@pytest.mark.parametrize("value", [Model, Model(3), 3.0])
def test_what_is_no_module_is_refused(value):
    with pytest.raises(ConfigError, match="module: .*no LightningModule"):
        check_parts(Part.of(value), Part.of(None), made_with(model={"width": 3}))


def test_a_module_in_the_place_of_data_is_said_to_be():
    with pytest.raises(ConfigError, match="swapped"):
        check_parts(Part.of(DataLoader([1, 2])), Part.of(Trained(3)), Config())


@pytest.mark.parametrize("settings", [{"loader.batch_size": 3}, {"loader": {"batch_size": 3}}, {"data.patch": [3]}])
def test_a_dict_of_settings_is_no_module_and_no_data(settings):
    for name, parts in (("module", (settings, None)), ("data", (Trained(3), settings))):
        with pytest.raises(ConfigError, match=rf"{name}: .*dict.*Config\(\)\.replace"):
            check_parts(*map(Part.of, parts), Config())
    loaders = {"data": DataLoader([1, 2]), "model": DataLoader([1, 2])}
    check_parts(Part.of(Trained(3)), Part.of(loaders), Config())


@pytest.mark.parametrize("value", [nn.Linear(2, 1), nn.Sequential(nn.Linear(2, 1)), nn.Linear])
def test_a_plain_module_of_torch_is_no_factory_of_one(value):
    with pytest.raises(ConfigError, match="no LightningModule.*training_step and configure_optimizers"):
        check_parts(Part.of(value), Part.of(None), Config())


def doubled(graph, _):
    """A compiler whose code gives twice of all that a graph gives."""
    return lambda *args: [2 * value for value in graph(*args)]


class Stepping(Trained):
    def __init__(self):
        super().__init__(3)
        self.layer = nn.Linear(2, 1)

    def forward(self, values):
        return values + 1

    def training_step(self, batch, batch_idx):
        return self(batch)


def in_place(module):
    module.compile(backend=doubled)
    return module


COMPILED = {
    "whole": lambda module: torch.compile(module, backend=doubled),
    "unpacked": lambda module: from_compiled(torch.compile(module, backend=doubled)),
    "in place": in_place,
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")
@pytest.mark.parametrize("way", COMPILED)
def test_a_compiled_module_is_compiled_in_the_rank_as_it_was(way):
    module = Stepping()
    given = COMPILED[way](module)
    part = Part.of(given)
    check_parts(part, Part.of(None), Config())
    assert (part.kind, type(part.value)) == ("instance", Stepping)
    sent = unpack(pack(part, Part.of(None)))["module"]
    assert sent.value.training_step(torch.ones(2), 0).tolist() == [2, 2]
    made = make_module(sent, Config())
    assert made.training_step(torch.ones(2), 0).tolist() == [4, 4]
    assert part.value.layer.weight is module.layer.weight
    assert module.training_step(torch.ones(2), 0).tolist() == ([2, 2] if way == "whole" else [4, 4])  # as it was
    torch.compiler.reset()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")
def test_what_cannot_be_compiled_in_a_rank_is_refused_with_what_to_compile_instead():
    sharded = Config().replace({"hardware.strategy": "fsdp", "hardware.devices": 2})
    words = r"torch\.compile.*self\.net = torch\.compile\(self\.net\)"
    with pytest.raises(ConfigError, match=words):
        check_parts(Part.of(torch.compile(Stepping())), Part.of(None), sharded)
    guard = threading.Lock()
    with pytest.raises(ConfigError, match=words):
        Part.of(torch.compile(Stepping(), backend=lambda graph, _: guard and graph))
    with pytest.raises(ConfigError, match=r"OptimizedModule.*torch\.compile\(self"):
        check_parts(Part.of(torch.compile(nn.Linear(2, 1))), Part.of(None), Config())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")
def test_a_factory_may_give_a_compiled_module():
    made = make_module(Part.of(lambda: torch.compile(Stepping(), backend=doubled)), Config())
    assert made.training_step(torch.ones(2), 0).tolist() == [4, 4]
    torch.compiler.reset()


@pytest.mark.parametrize("absent", ["training_step", "configure_optimizers"])
def test_a_module_without_a_step_or_an_optimizer_is_refused_by_name(absent):
    short = type("Short", (Trained,), {absent: getattr(LightningModule, absent)})
    for given in (short, short(3)):
        with pytest.raises(ConfigError, match=f"Short has no {absent},"):
            check_parts(Part.of(given), Part.of(None), made_with(model={"width": 3}))
    whole = short(3)
    setattr(whole, absent, lambda *_: None)  # as Lightning, which looks at the instance
    check_parts(Part.of(whole), Part.of(None), Config())


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (torch.zeros(8, 2), "Tensor"),
        ((torch.zeros(8, 2), torch.zeros(8)), "Tensor"),
        (np.zeros((8, 2)), "ndarray"),
        (pandas.DataFrame({"a": [1]}), "DataFrame"),
    ],
)
def test_values_that_make_no_batches_are_refused_with_what_does(value, name):
    with pytest.raises(ConfigError, match=f"data: {name} .*TensorDataset"):
        check_parts(Part.of(None), Part.of(value), Config())


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ((batch for batch in "ab"), "generator .*DataLoader"),
        ([(torch.zeros(2, 2), torch.zeros(2))] * 3, "batch_size=None"),
        ({"x": np.zeros((8, 2))}, "DataLoader"),
        ([], "nothing"),
        (3, "int .*data set"),
        (DataLoader, "'dataset'"),
    ],
)
def test_data_of_other_kinds_is_refused_with_what_is_taken(value, words):
    with pytest.raises(ConfigError, match=f"data.*{words}"):
        check_parts(Part.of(None), Part.of(value), Config())


@pytest.mark.parametrize("kind", [str, Path])
@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("a/x.zarr", r"data\.url"), ("x.npy", "RowData"), ("x.parquet", "EventData"), ("gs://bucket/x", r"data\.url"),
    ],
)  # fmt: skip
def test_the_place_of_data_is_answered_with_what_reads_it(kind, place, words):
    if kind is Path and "://" in place:
        return
    with pytest.raises(ConfigError, match=f"data: .*{words}"):
        check_targets(Part.of(None), Part.of(kind(place)), Config())


@pytest.mark.parametrize(
    ("target", "argument", "words"),
    [
        ("kit.models:UNet", "widht", "mean 'width'"),
        ("kit.models:GPT", "lr", "takes .*learning_rate"),
    ],
)
def test_an_argument_that_a_module_at_a_path_does_not_take_is_refused(target, argument, words):
    config = Config().replace({"model.target": target, f"model.arguments.{argument}": 1})
    for module in (None, target):
        with pytest.raises(ConfigError, match=rf"model\.arguments: {target} .*'{argument}'.*{words}"):
            check_parts(Part.of(module), Part.of(TensorDataset(torch.zeros(2))), config)


def test_a_module_that_takes_any_argument_is_given_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "open.py").write_text("class Net:\n    def __init__(self, width=1, **more): ...\n")
    check_parts(Part.of("open.py:Net"), Part.of(TensorDataset(torch.zeros(2))), made_with({"depth": 3}))


def test_data_sets_and_loaders_over_tensors_are_taken():
    rows = TensorDataset(torch.zeros(8, 2))
    for value in (rows, (rows, rows), DataLoader(rows), [DataLoader(rows)], {"a": DataLoader(rows)}):
        check_parts(Part.of(None), Part.of(value), Config())


def test_arguments_of_own_data_are_checked_unless_a_source_takes_them():
    with pytest.raises(ConfigError, match=r"data\.arguments: class Model .*'hidth'"):
        check_parts(Part.of(None), Part.of(Model), made_with(data={"width": 3, "hidth": 3}))
    check_parts(Part.of(None), Part.of(Model), made_with(data={"width": 3}))
    check_parts(Part.of(None), Part.of(Held), made_with(data={"seed": 3}, source="datasets/ocean/source.py:Ocean"))


def made_with(model=None, data=None, source=None):
    return Config().replace({"model.arguments": model or {}, "data.arguments": data or {}, "data.source": source})


def test_a_factory_that_needs_arguments_is_refused():
    with pytest.raises(ConfigError, match=r"data: factory made .*missing .*'width'"):
        check_parts(Part.of(None), Part.of(made), Config())


@pytest.mark.parametrize(
    ("data", "culprit"),
    [
        (Held(), r"attribute guard \(lock\) cannot be pickled"),
        (functools.partial(made, threading.Lock()), r"argument 0 \(lock\) cannot be pickled"),
    ],
)
def test_an_object_that_cannot_be_sent_is_named(data, culprit):
    with pytest.raises(ConfigError, match=rf"data: .* sent .*{culprit}; give the class"):
        pack(Part.of(None), Part.of(data))


def test_a_captured_variable_that_cannot_be_sent_is_named():
    guard = threading.Lock()

    def factory():
        return guard

    with pytest.raises(ConfigError, match=r"module: factory .*factory .*sent .*variable guard \(lock\)"):
        pack(Part.of(factory), Part.of(None))


def test_a_large_payload_of_repeats_is_one_file_that_stays_what_it_was(tmp_path):
    first, second, third, small = (tmp_path / name for name in ("first", "second", "third", "small"))
    large = bytes(submit._LARGE_PAYLOAD_BYTES)
    for file in (first, second):
        submit._write_payload(file, large)
    assert first.samefile(second)
    first.write_bytes(b"other")
    submit._write_payload(third, large)
    assert third.read_bytes() == large
    assert not third.samefile(first)
    for file in (small, tmp_path / "twin"):
        submit._write_payload(file, b"small")
    assert not small.samefile(tmp_path / "twin")
