import functools
import threading

import pytest
from lightning.pytorch import LightningModule

from kit.config import Config
from kit.errors import ConfigError
from kit.trial.payload import Part, check_parts, pack


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
    with pytest.raises(ConfigError, match=r"model\.arguments: class Trained .*'hidth'; .*takes \(width"):
        check_parts(Part.of(Trained), Part.of(None), made_with(model={"width": 3, "hidth": 3}))
    check_parts(Part.of(Trained), Part.of(None), made_with(model={"width": 3}))


@pytest.mark.parametrize("value", [Model, Model(3), 3.0])
def test_what_is_no_module_is_refused(value):
    with pytest.raises(ConfigError, match="module: .*no LightningModule"):
        check_parts(Part.of(value), Part.of(None), made_with(model={"width": 3}))


def test_arguments_of_own_data_are_checked_unless_a_source_takes_them():
    with pytest.raises(ConfigError, match=r"data\.arguments: class Model .*'hidth'"):
        check_parts(Part.of(None), Part.of(Model), made_with(data={"width": 3, "hidth": 3}))
    check_parts(Part.of(None), Part.of(Model), made_with(data={"width": 3}))
    check_parts(Part.of(None), Part.of(Model), made_with(data={"seed": 3}, source="datasets/ocean/source.py:Ocean"))


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
    with pytest.raises(ConfigError, match=rf"data: .* sent .*{culprit}; make it inside"):
        pack(Part.of(None), Part.of(data))


def test_a_captured_variable_that_cannot_be_sent_is_named():
    guard = threading.Lock()

    def factory():
        return guard

    with pytest.raises(ConfigError, match=r"module: factory .*factory .*sent .*variable guard \(lock\)"):
        pack(Part.of(factory), Part.of(None))
