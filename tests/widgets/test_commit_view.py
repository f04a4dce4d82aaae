"""The panel's file and command: they follow the settings, and one click writes what is shown."""

import html
import re
from pathlib import Path

import committed_parts as parts
import pytest
from waiting import PATIENCE_SECONDS

import kit
from kit.errors import ConfigError
from kit.widgets.panel import panel

WAIT = PATIENCE_SECONDS


@pytest.fixture
def small(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return parts.make_project(tmp_path)


def shown(view):
    assert view.wait(WAIT)
    return html.unescape(re.sub("<[^>]+>", "", view.text.value))


def test_file_and_command_follow_the_settings(small):
    made = panel(small)
    assert "torchrun --standalone --nproc-per-node 2" in shown(made.committing)
    made.config = small.replace({"hardware.devices": 3, "training.max_epochs": 5})
    text = shown(made.committing)
    assert "--nproc-per-node 3" in text
    assert "max_epochs: 5" in text
    made.wait(WAIT)


def test_a_click_writes_what_is_shown(small):
    made = panel(small)
    text = shown(made.committing)
    made.committing.button.click()
    made.wait(WAIT)
    committed = made.committing.committed
    assert committed.text in text
    assert kit.Config.load(committed.file) == small
    assert committed.file.name in made.committing.words.value
    assert made.commit().file == committed.file


def test_what_cannot_be_committed_says_why_where_the_file_would_be(small):
    made = panel(small.replace({"commit.nodes": 2, "hardware.strategy": "none", "hardware.devices": 1}))
    assert "2 nodes" in shown(made.committing)
    with pytest.raises(ConfigError, match="2 nodes"):
        made.commit()
    assert "2 nodes" in made.committing.words.value
    made.wait(WAIT)


@pytest.mark.parametrize(
    ("path", "value"),
    [("hardware.strategy", "none"), ("data.patch", "time 2"), ("chunking.target_shard_bytes", "much")],
)
def test_nothing_is_committed_while_a_control_holds_what_does_not_fit(small, path, value):
    made = panel(small)
    shown(made.committing)
    control = made.form.controls[path]
    valid, control.value = control.value, value
    assert made.form.problems
    made.committing.button.click()
    assert made.committing.wait(WAIT)
    assert path in made.committing.words.value
    with pytest.raises(ConfigError, match=path):
        made.commit()
    assert not (Path.cwd() / "committed").exists()
    control.value = valid
    assert made.commit().file.exists()
    made.wait(WAIT)
