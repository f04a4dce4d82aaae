"""Signatures: what a class is made with, read from text exactly as Python would have it, or not at all."""

import inspect
import subprocess
import sys

import pytest

from kit.errors import TargetError
from kit.targets import UNKNOWN, signature_of

NETS = """
import other
from .bases import Base, Given as Renamed
SIZE = 3
class Net:
    def __init__(self, width: int = 16, *, layers=2, size=SIZE, rate=-1e-3, shape=(3, 4), must): ...
class Child(other.Thing, Base):
    pass
class Grandchild(Renamed): ...
class Alone:
    pass
class Open:
    def __init__(self, *layers, **options): ...
def made(width, depth=2): ...
Assigned = Net
"""
BASES = "class Base:\n    def __init__(self, hidden=8): ...\nclass Given(Base):\n    '''No __init__ of its own.'''\n"


@pytest.fixture
def nets(tmp_path, monkeypatch):
    (tmp_path / "pyproject.toml").touch()
    folder = tmp_path / "sized_pkg"
    folder.mkdir()
    (folder / "__init__.py").write_text("from sized_pkg.nets import Net\nfrom .nets import Child as Heir\n")
    (folder / "nets.py").write_text(NETS)
    (folder / "bases.py").write_text(BASES)
    (tmp_path / "alone.py").write_text(NETS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))


@pytest.mark.parametrize(
    ("target", "arguments"),
    [
        ("sized_pkg.nets:Child", {"hidden": 8}),
        ("sized_pkg:Heir", {"hidden": 8}),
        ("sized_pkg.nets:Grandchild", {"hidden": 8}),
        ("sized_pkg.nets:Alone", None),
        ("sized_pkg.nets:Open", {}),
        ("sized_pkg.nets:made", {"width": UNKNOWN, "depth": 2}),
        ("sized_pkg.nets:Assigned", None),
        ("alone.py:Child", None),
    ],
)
def test_a_name_is_followed_to_where_it_is_made(nets, target, arguments):
    assert signature_of(target) == arguments


def test_a_name_that_a_package_loads_lazily_is_followed_too(nets, tmp_path):
    lazy = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .nets import made as later\n"
    (tmp_path / "sized_pkg" / "__init__.py").write_text(lazy)
    assert signature_of("sized_pkg:later") == {"width": UNKNOWN, "depth": 2}


@pytest.mark.parametrize("target", ["sized_pkg:Net", "sized_pkg.nets:Net", "alone.py:Net"])
def test_defaults_are_plain_values_or_unknown(nets, target):
    assert signature_of(target) == {
        "width": 16, "layers": 2, "size": UNKNOWN, "rate": -0.001, "shape": (3, 4), "must": UNKNOWN,
    }  # fmt: skip


def test_what_is_not_there_is_refused(nets):
    with pytest.raises(TargetError, match="did you mean 'Net'"):
        signature_of("sized_pkg.nets:Nett")


@pytest.mark.parametrize("name", ["GPT", "UNet", "Encoder", "ResNet", "Recommender", "Recurrent", "Tokens"])
def test_reading_gives_what_python_gives_for_every_model_of_kit(name):
    import kit.models

    python = inspect.signature(getattr(kit.models, name)).parameters
    assert signature_of(f"kit.models:{name}") == {key: item.default for key, item in python.items()}
    assert signature_of(getattr(kit.models, name)) == signature_of(f"kit.models:{name}")


def test_reading_imports_nothing_heavy():
    code = "import sys, kit.targets as s; s.signature_of('kit.models:GPT'); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
