"""The house: imports go down only, and `import kit` stays light."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import kit

ROOT = Path(kit.__file__).parent

# From the ground up. A room may import from its own row and from the rows above it in this table.
LAYERS = [
    {"errors", "units", "tables", "processes", "secrets_in_text", "json_text"},
    {"config", "endpoints", "events", "targets", "cgroup", "nvml", "claims", "signatures"},
    {"machine", "cloud"},
    {"plan"},
    {"data"},
    {"train", "models"},
    {"memory", "confinement"},
    {"run"},
    {"report"},
    {"widgets", "testing"},
]
LEVEL = {room: level for level, rooms in enumerate(LAYERS) for room in rooms}
HEAVY = {
    "torch": {"train", "models", "memory", "testing", "data", "run"},
    "lightning": {"train", "models", "memory", "testing", "data", "run"},
}
ONLY = {
    "ipywidgets": {"widgets"},
    "anywidget": {"widgets"},
    "matplotlib": {"report", "widgets"},
    "duckdb": {"data"},
    "psycopg": {"data"},
    "pyarrow": {"data"},
}


def _imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{name.name}" for name in node.names)


def _room(path):
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


MODULES = [path for path in sorted(ROOT.rglob("*.py")) if path != ROOT / "__init__.py"]


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_down_only(path):
    room = _room(path)
    assert room in LEVEL, f"{room} has no row in LAYERS"
    for name in _imports(path):
        if name.startswith("kit."):
            other = name.split(".")[1]
            assert LEVEL.get(other, -1) <= LEVEL[room], f"{path} reaches up to {name}"
        package = name.split(".")[0]
        allowed = {**HEAVY, **ONLY}.get(package)
        assert allowed is None or room in allowed, f"{path} imports {package}"


def test_importing_kit_loads_nothing_heavy():
    heavy = ["torch", "lightning", "matplotlib", "zarr", "ipywidgets", "pydantic", "numpy"]
    code = f"import sys, kit; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("name", kit.__all__)
def test_every_public_name_is_there(name):
    assert getattr(kit, name) is not None


def test_an_unknown_public_name_is_answered_with_the_known_ones():
    with pytest.raises(AttributeError, match="Config"):
        kit.nothing  # noqa: B018


def test_the_source_never_takes_a_dangerous_short_cut():
    forbidden = ("yaml.load(", "eval(", "shell=True", "weights_only=False", "os.system", "allow_pickle=True")
    found = [(path.name, word) for path in MODULES for word in forbidden if word in path.read_text()]
    assert not [pair for pair in found if pair != ("config.py", "yaml.load(")]  # ruamel's safe loader, not PyYAML's


def test_no_public_name_is_hidden_by_a_module_of_that_name():
    # importing kit.x binds the name x in the package, over anything loaded lazily
    assert not set(kit.__all__) & {path.stem for path in ROOT.iterdir()}
