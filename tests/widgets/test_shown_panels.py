"""Every panel as it is shown: each control says what it is for, and no file is written."""

import linecache
import operator
import subprocess
import sys
import types

import ipywidgets
import pytest
from waiting import PATIENCE_SECONDS

import kit
from kit.config import Config
from kit.widgets.form import ConfigForm
from kit.widgets.live import widgets_in

WAIT = PATIENCE_SECONDS
CELL = """
from kit.testing import TinyData, TinyModule
class Mine(TinyModule):
    def on_train_end(self): pass
class MyData(TinyData):
    def teardown(self, stage): pass
"""
PANELS = ("panel", "memory.panel", "data.chunk_panel", "data.build_panel")
FEWEST_WORDS = 3


@pytest.fixture
def notebook(monkeypatch):
    """A main module in which a cell has defined a module and its data."""
    main = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)
    file = "<ipython-input-1>"
    linecache.cache[file] = (len(CELL), None, CELL.splitlines(keepends=True), file)
    exec(compile(CELL, file, "exec"), vars(main))
    main.kit, main.config = kit, Config().replace({"hardware.accelerator": "cpu", "loader.batch_size": 4})
    yield main
    del linecache.cache[file]


def shown(name, notebook, own=True):
    """A panel of this kind, displayed, after everything that it looks at has been looked at."""
    given = (notebook.Mine, notebook.MyData) if own and name in ("panel", "memory.panel") else ()
    options = {"cards": ["T4"]} if name == "memory.panel" else {}
    panel = operator.attrgetter(name)(kit)(notebook.config, *given, **options)
    panel._ipython_display_()
    return panel


def settle(panel):
    try:
        panel.wait(WAIT)
    except kit.KitError:
        return  # there is no store to plan a build of


@pytest.mark.parametrize("name", PANELS)
def test_showing_a_panel_writes_no_file(name, project, notebook, capsys):
    before = sorted(project.rglob("*"))
    settle(shown(name, notebook))
    assert sorted(project.rglob("*")) == before


def test_showing_a_form_writes_no_file(project, capsys):
    before = sorted(project.rglob("*"))
    ConfigForm()._ipython_display_()
    assert sorted(project.rglob("*")) == before


def controls(box):
    """All that is to be clicked, typed into or moved."""
    return [part for part in widgets_in(box) if hasattr(part, "description") and not isinstance(part, ipywidgets.HTML)]


@pytest.mark.parametrize("name", PANELS)
def test_every_control_of_a_panel_says_in_a_sentence_what_it_is_for(name, project, notebook, capsys):
    panel = shown(name, notebook)
    found = controls(panel.ui)
    assert len(found) >= 15
    bare = [part for part in found if len((part.tooltip or "").split()) < FEWEST_WORDS]
    assert [(type(part).__name__, part.description, part.tooltip) for part in bare] == []
    assert [part.tooltip for part in found if part.tooltip == part.description] == []
    settle(panel)


def test_the_page_is_told_the_tooltip_of_every_checkbox_and_choice(project, notebook, capsys):
    panel = shown("panel", notebook)
    panel.form.search.value = "e"  # which is in all
    boxes = [part for part in controls(panel.ui) if isinstance(part, ipywidgets.Checkbox | ipywidgets.Dropdown)]
    (guard,) = (part for part in panel.ui.children if hasattr(part, "tooltips"))
    assert len(boxes) >= 10
    for box in boxes:
        (name,) = set(box._dom_classes) & set(guard.tooltips)
        assert guard.tooltips[name] == box.tooltip
    settle(panel)


@pytest.mark.slow
def test_panels_and_names_of_kit_load_no_torch_into_the_kernel(tmp_path):
    """A kernel that only asks begins four seconds sooner: what trains is in other processes."""
    (tmp_path / "pyproject.toml").touch()
    code = f"""
import operator, sys, kit
for panel in {PANELS!r}:
    operator.attrgetter(panel)(kit)(kit.Config())
for room in (kit, kit.memory, kit.studies):
    for name in dir(room):
        if name not in ("models", "checkpoints"):  # whose names are modules and callbacks of Lightning
            getattr(room, name)
print([name for name in ("torch", "lightning") if name in sys.modules])
"""
    asked = [sys.executable, "-c", code]
    told = subprocess.run(asked, capture_output=True, text=True, timeout=WAIT, cwd=tmp_path, check=True)
    assert told.stdout.strip() == "[]"
