"""The house: imports go down only, in no circle, folders stay small, and `import kit` stays light."""

import ast
import importlib
import pydoc
import subprocess
import sys
from pathlib import Path

import house
import pytest

import kit

ROOT, TESTS = Path(kit.__file__).parent, Path(__file__).parent

# From the ground up. A room may import from its own row and from the rows above it in this table.
LAYERS = [
    {"errors", "units", "tables", "registry", "other_configs", "secrets_in_text", "json_text"},
    {"arguments", "config", "events", "sections", "targets", "yaml_text"},
    {"machine"},
    {"cloud", "chunks", "memory/replay", "confinement"},
    {"data", "data/stores", "data/stream", "data/build", "data/patches", "data/measuring", "data/rows", "data/tables"},
    {"checkpoints"},
    {"train", "models"},
    {"memory/record"},
    {"trial"},
    {"memory"},
    {"speed"},
    {"records", "course"},
    {"studies", "studies/calibration", "studies/profiling", "studies/diagnosis", "studies/scaling"},
    {"committed"},
    {"charts"},
    {"report"},
    {"widgets", "testing"},
]
LEVEL = {room: level for level, rooms in enumerate(LAYERS) for room in rooms}
MAY_IMPORT = {
    "torch": {"checkpoints", "data", "memory", "models", "speed", "studies", "testing", "train", "trial"},
    "lightning": {"checkpoints", "data", "memory", "models", "speed", "studies", "testing", "train", "trial"},
    "ipywidgets": {"widgets"},
    "anywidget": {"widgets"},
    "matplotlib": {"charts", "report", "widgets"},
    "duckdb": {"data"},
    "psycopg": {"data"},
    "pyarrow": {"data", "studies"},
}
MOST_PUBLIC_NAMES, LINES_OF_A_SCREEN = 73, 45
PUBLIC = house.public()
MOST_FILES, MOST_FILES_OF_A_FOLDER, SAME_CLASS_NAMES = 291, 15, 2
MODULES = sorted(set(house.modules()) - set(house.MAPS))


def room(module):
    """A folder, or a file of the root."""
    return house.room(module) or module.split(".")[1]


def packages(path):
    for node in house.running(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (name.name.split(".")[0] for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module.split(".")[0]


@pytest.mark.parametrize("module", MODULES)
def test_imports_go_down_only(module):
    mine = LEVEL[room(module)]
    assert [other for other in house.imports(module) if other not in house.MAPS and LEVEL[room(other)] > mine] == []


@pytest.mark.parametrize("module", MODULES)
def test_heavy_and_optional_packages_stay_in_their_rooms(module):
    used = set(packages(house.modules()[module])) & set(MAY_IMPORT)
    assert [name for name in used if room(module).split("/")[0] not in MAY_IMPORT[name]] == []


def test_nothing_is_imported_in_a_circle():
    assert house.circles(house.between_files()) == []
    assert house.circles(house.between_rooms()) == []


def test_a_circle_is_found_also_where_it_is_closed_by_a_string(monkeypatch, tmp_path):
    (tmp_path / "a.py").write_text("from kit.b import b")
    (tmp_path / "b.py").write_text("import importlib\nb = importlib.import_module('kit.a')")
    found = {"kit.a": tmp_path / "a.py", "kit.b": tmp_path / "b.py"}
    monkeypatch.setattr(house, "modules", lambda: found)
    house.imports.cache_clear()
    try:
        assert house.circles(house.between_files()) == [["kit.a", "kit.b"]]
    finally:
        house.imports.cache_clear()


def test_folders_are_small_and_files_are_few():
    assert max(house.files_of_rooms().values()) <= MOST_FILES_OF_A_FOLDER
    assert len([*ROOT.rglob("*.py")]) <= MOST_FILES


def test_tests_lie_in_the_folder_of_the_room_that_they_test():
    folders = {path.parent.relative_to(TESTS).parts[0] for path in TESTS.glob("*/**/test_*.py")}
    assert folders - {path.name for path in ROOT.iterdir()} == {
        "browser",
        "datasets",
        "faults",
        "gpu",
        "notebooks",
        "projects",
    }


def test_the_same_class_name_does_not_stand_for_ever_more_things():
    assert sum(len(where) > 1 for where in house.public_classes().values()) <= SAME_CLASS_NAMES


def test_importing_kit_loads_nothing_heavy():
    heavy = ["torch", "lightning", "matplotlib", "zarr", "ipywidgets", "pydantic", "numpy"]
    code = f"import sys, kit; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(("package", "name"), [(package, name) for package, names in PUBLIC.items() for name in names])
def test_every_public_name_is_there(package, name):
    assert getattr(importlib.import_module(package), name).__doc__


def test_an_unknown_public_name_is_answered_with_the_known_ones():
    with pytest.raises(AttributeError, match="Config"):
        kit.nothing  # noqa: B018


def test_a_name_that_lies_below_is_answered_with_where():
    with pytest.raises(AttributeError, match=r"it is kit\.data\.prefetch"):
        kit.prefetch  # noqa: B018


def test_a_name_that_is_not_there_is_answered_without_importing_what_lies_below():
    code = "import kit, sys; print(hasattr(kit, 'prefetch'), 'torch' in sys.modules, 'kit.models' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False", "False"]


def test_the_source_never_takes_a_dangerous_short_cut():
    forbidden = ("yaml.load(", "eval(", "shell=True", "weights_only=False", "os.system", "allow_pickle=True")
    paths = [house.modules()[module] for module in MODULES]
    found = [(path.name, word) for path in paths for word in forbidden if word in path.read_text()]
    assert not [pair for pair in found if pair != ("yaml_text.py", "yaml.load(")]  # ruamel's safe loader, not PyYAML's


def test_no_public_name_is_hidden_by_a_module_of_that_name():
    # importing kit.x binds the name x in the package, over anything loaded lazily
    for package, names in PUBLIC.items():
        assert not set(names) & {path.stem for path in house.modules()[package].parent.iterdir()}


def test_the_public_face_stays_small():
    assert sum(map(len, PUBLIC.values())) <= MOST_PUBLIC_NAMES


def test_help_of_kit_fits_on_two_screens():
    assert len(pydoc.plain(pydoc.render_doc(kit)).splitlines()) <= 2 * LINES_OF_A_SCREEN


@pytest.mark.parametrize("package", sorted({*house.MAPS} - {"kit", "kit.train"}))
def test_help_of_a_package_names_what_it_has(package):
    module = importlib.import_module(package)
    named = getattr(module, "__all__", PUBLIC.get(package))
    assert [name for name in named if f"`{name}`" not in module.__doc__] == []


@pytest.mark.parametrize(("old", "new"), sorted(kit._RENAMED.items()))
def test_a_name_of_before_warns_and_works(old, new):
    package, _, name = new.partition(".")
    with pytest.warns(DeprecationWarning, match=rf"kit\.{new}"):
        found = getattr(kit, old)
    assert found is getattr(importlib.import_module(f"kit.{package}"), name)


@pytest.mark.parametrize("old", [*kit._DRAWN, *kit._NOT_PUBLIC])
def test_what_is_no_longer_public_warns_and_works(old):
    with pytest.warns(DeprecationWarning, match=old):
        assert callable(getattr(kit, old))
