"""The panel's results: the trials of its experiment, written to a file by a button that says its line of code."""

import functools
import html
import re

import committed_parts as parts
import pytest
from waiting import PATIENCE_SECONDS

import kit
from kit.errors import ConfigError
from kit.testing import TinyData, TinyModule
from kit.widgets.files import ALL, FOLDER, ExportView
from kit.widgets.panel import panel

WAIT = PATIENCE_SECONDS


@pytest.fixture
def small(tmp_path, monkeypatch):
    """A config of two trials that have run."""
    monkeypatch.chdir(tmp_path)
    config = parts.make_project(tmp_path).replace(
        {"hardware.devices": 1, "hardware.strategy": "none", "model.arguments": {}, "trial.max_steps": 3}
    )
    for size in (2, 4):
        data = functools.partial(TinyData, batch_size=size)
        kit.fit(config.replace({"loader.batch_size": size}), TinyModule, data).wait()
    return config


def seen(widget):
    return html.unescape(re.sub("<[^>]+>", "", widget.value))


@pytest.mark.slow
def test_the_trials_shown_go_into_a_file_by_the_line_that_stands_there(small, tmp_path):
    view = ExportView(small)
    view.look(small)
    assert view.wait(WAIT)
    assert view.ui.layout.display == ""
    assert "2 trials of small" in seen(view.table)
    view.button.click()
    assert view.wait(WAIT)
    assert view.file == tmp_path / "small.csv"
    assert "written: small.csv" in view.words.value
    expected = view.file.read_text()
    for name, beginning in (("CSV", "run,"), ("Markdown", "| trial"), ("HTML report", "<!doctype html>")):
        view.format.value = name
        assert view.line in seen(view.code)
        file = view.export()
        assert file.read_text().startswith(beginning)
        eval(view.line, {"kit": kit})
    assert (tmp_path / "small.csv").read_text() == expected


def test_other_trials_are_shown_when_they_are_asked_for(small):
    view = ExportView(small.replace({"name": "none"}))
    view.look(view.config)
    assert view.wait(WAIT)
    assert view.ui.layout.display == "none", "there is no trial of it yet"
    view.choice.value = FOLDER
    assert view.wait(WAIT)
    assert "2 trials" in seen(view.table)
    assert view.line.startswith("kit.results().to_csv(")
    view.choice.value = ALL
    assert view.wait(WAIT)
    assert "No trials" in seen(view.table)
    assert "kind='all'" in view.line


def test_a_file_of_others_is_kept(small, tmp_path):
    (tmp_path / "small.csv").write_text("mine, not yours\n")
    view = ExportView(small)
    view.look(small)
    assert view.wait(WAIT)
    with pytest.raises(ConfigError, match="no export"):
        view.export()
    assert "no export" in view.words.value
    assert (tmp_path / "small.csv").read_text() == "mine, not yours\n"
    with pytest.raises(ConfigError, match="cannot write"):
        view.export(tmp_path / "small.csv" / "none.csv")


def test_a_panel_shows_the_trials_of_its_experiment_when_there_are_some(small, tmp_path):
    made = panel(small.replace({"name": "fresh"}), TinyModule, functools.partial(TinyData, batch_size=2))
    assert made.exporting.wait(WAIT)
    assert made.exporting.ui.layout.display == "none"
    made.fit()
    made.wait(WAIT)
    assert made.exporting.wait(WAIT)
    assert "1 trial of fresh" in seen(made.exporting.table)
    made.config = small
    assert made.exporting.wait(WAIT)
    assert "2 trials of small" in seen(made.exporting.table)
    assert made.export() == tmp_path / "small.csv"
