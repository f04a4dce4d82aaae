"""Import paths, found without importing and loaded."""

import functools
import subprocess
import sys

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from kit.errors import ConfigError, TargetError
from kit.targets import digest_of, find_target, load_target


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package `parts_pkg` in a project folder that is not on the path."""
    (tmp_path / "pyproject.toml").touch()
    folder = tmp_path / "parts_pkg"
    folder.mkdir()
    (folder / "__init__.py").write_text(
        "from parts_pkg.nets import Net\nfrom .more import *\nimport json as notes\n"
        "try:\n    import nothing_like_it as Extra\nexcept ImportError:\n    Extra = None\n"
        "_HOMES = {'Lazy': 'parts_pkg.nets'}\n"
        "def __getattr__(name):\n    import importlib\n"
        "    if name not in _HOMES:\n        raise AttributeError(name)\n"
        "    return getattr(importlib.import_module(_HOMES[name]), name)\n"
    )
    (folder / "nets.py").write_text(
        "class Net: ...\nclass Lazy: ...\nfirst, (second, *rest) = 1, (2, 3)\nsize: int = 3\n"
    )
    (folder / "more.py").write_text("if True:\n    def helper(): ...\n")
    (folder / "computed.py").write_text("def __getattr__(name):\n    return name.upper()\n")
    (folder / "broken.py").write_text("class Broken(:\n")
    (folder / "failing.py").write_text("class Here: ...\nraise RuntimeError('no such device')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith("parts_pkg")]:
        del sys.modules[name]


@pytest.mark.parametrize(
    "text",
    [
        "parts_pkg:Net", "parts_pkg:helper", "parts_pkg:notes", "parts_pkg:Extra", "parts_pkg:Lazy",
        "parts_pkg.nets:Net",
        "parts_pkg.nets:second", "parts_pkg.nets:rest", "parts_pkg.nets:size", "parts_pkg.computed:anything",
        "parts_pkg/nets.py:Net", "math:sin", "os.path:join",
    ],
)  # fmt: skip
def test_what_is_found_can_be_loaded(package, text):
    assert find_target(text).name == text.partition(":")[2]
    load_target(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("parts_pkg", "no import path"),
        ("parts_pkg:a.b", "no import path"),
        ("parts_pkg:1x", "no import path"),
        ("parts-pkg:Net", "no import path"),
        ("parts_pkg:Nett", "did you mean 'Net'"),
        ("parts_pkg:Lasy", "did you mean 'Lazy'"),
        ("parts_pkg.net:Net", "did you mean 'nets'"),
        ("part_pkg:Net", "did you mean 'parts_pkg'"),
        ("wholly_unknown_thing:Net", "install it"),
        ("parts_pkg/net.py:Net", "mean 'nets.py'"),
        ("parts_pkg.broken:Broken", "line 1"),
    ],
)
def test_what_is_not_there_is_refused_with_the_way_out(package, text, message):
    for look in (find_target, load_target):
        with pytest.raises(TargetError, match=message):
            look(text)


def test_an_import_that_fails_keeps_its_cause(package):
    assert find_target("parts_pkg.failing:Here").module == "parts_pkg.failing"
    with pytest.raises(TargetError, match="RuntimeError: no such device") as caught:
        load_target("parts_pkg.failing:Here")
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert isinstance(caught.value, ConfigError)


def test_a_file_is_loaded_once_and_again_when_it_changes(package):
    file = package / "own.py"
    file.write_text("class Own:\n    size = 1\n")
    first = load_target("own.py:Own")
    assert load_target(f"{file}:Own") is first
    file.write_text("class Own:\n    size = 1234\n")
    assert load_target("own.py:Own").size == 1234


def test_two_files_of_one_name_do_not_mix(package):
    for name in ("a", "b"):
        (package / name).mkdir()
        (package / name / "source.py").write_text(f"class Own:\n    name = {name!r}\n")
    assert [load_target(f"{name}/source.py:Own").name for name in ("a", "b", "a")] == ["a", "b", "a"]


def test_looking_for_a_model_imports_nothing():
    code = (
        "import sys; from kit.targets import find_target\n"
        "find_target('kit.models:UNet'); find_target('torch.nn:Linear')\n"
        "print([name for name in ('torch', 'lightning', 'kit.models') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_module_in_folders_without_init_is_found_without_importing_them(tmp_path, monkeypatch):
    folder = tmp_path / "outer_of_none" / "inner"
    folder.mkdir(parents=True)
    (folder / "parts.py").write_text("class Net: ...\n")
    (tmp_path / "pyproject.toml").touch()
    monkeypatch.chdir(tmp_path)
    assert find_target("outer_of_none.inner.parts:Net").file == folder / "parts.py"
    assert "outer_of_none" not in sys.modules
    with pytest.raises(TargetError, match=r"outer_of_none\.inner .*no module 'part'; .* 'parts'"):
        find_target("outer_of_none.inner.part:Net")


def loader(features=3, batch_size=4, **options):
    return DataLoader(TensorDataset(torch.zeros(10, features)), batch_size, **options)


def made(width):
    return lambda: torch.nn.Linear(width, 1)


def pads(samples):
    return torch.stack([sample[0] for sample in samples])


@pytest.mark.parametrize(
    ("make", "other"),
    [
        (lambda: torch.nn.Linear(3, 1), lambda: torch.nn.Linear(4, 1)),
        (lambda: torch.nn.ReLU(), lambda: torch.nn.GELU()),
        (lambda: made(3), lambda: made(4)),
        (lambda: functools.partial(torch.nn.Linear, 3), lambda: functools.partial(torch.nn.Linear, 4)),
        (loader, lambda: loader(batch_size=5)),
        (loader, lambda: loader(features=4)),
        (loader, lambda: loader(shuffle=True)),
        (loader, lambda: loader(collate_fn=pads)),
        (lambda: (loader(), loader()), lambda: (loader(), loader(batch_size=5))),
    ],
)
def test_a_digest_tells_what_is_made_otherwise_and_not_what_is_made_again(make, other):
    assert digest_of(make()) == digest_of(make())
    assert digest_of(make()) != digest_of(other())


def test_a_digest_tells_a_class_that_was_written_anew():
    def written(text):
        names = {"Module": torch.nn.Module, "__name__": "cell"}
        exec(f"class Net(Module):\n    def forward(self, x):\n        return {text}", names)
        return names["Net"]

    assert digest_of(written("x + 1")) == digest_of(written("x + 1"))
    assert digest_of(written("x + 1")) != digest_of(written("x + 2"))
    assert digest_of(written("x + 1")()) != digest_of(written("x - 1")())


def test_a_digest_ends_with_what_goes_around_in_circles_and_what_cannot_be_asked():
    class Around:
        def __init__(self):
            self.other, self.many = self, [[] for _ in range(100_000)]

        @property
        def shape(self):
            raise RuntimeError("not made yet")

    assert digest_of(Around()) == digest_of(Around())
    assert digest_of(torch.nn.LazyLinear(3)) == digest_of(torch.nn.LazyLinear(3))
