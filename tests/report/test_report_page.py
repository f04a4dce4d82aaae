"""The report: one file that holds everything, asks nobody, hides no failure and replaces nothing of others."""

import json
import re
from html.parser import HTMLParser

import pytest
from made_runs import COMPLETE, make_run

import kit
from kit.errors import ConfigError, TrialError
from kit.records.results import Results, results
from kit.testing import TinyData, TinyModule

VOID = {"meta", "br", "path", "use"}


class Page(HTMLParser):
    """Tags with their attributes, and whether they are closed in order."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.open = [], []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag

    def all(self, tag):
        return [attributes for name, attributes in self.tags if name == tag]


@pytest.fixture
def trials(config):
    """Two configs, one of them twice, and a trial that fails."""
    asked = config()
    made = [kit.fit(asked.replace({"name": "plain"}), TinyModule, TinyData).wait() for _ in range(2)]
    more = {"name": "accumulate", "levers.accumulate_grad_batches": 2}
    made.append(kit.fit(asked.replace(more), TinyModule, TinyData).wait())
    faulty = asked.replace({"name": "faulty", "model.arguments": {"seconds": 0.0}})
    with pytest.raises(TrialError):
        kit.fit(faulty, "faulty:FaultyModule", TinyData).wait()
    return made


def test_a_report_holds_everything_and_asks_nobody(trials, config, tmp_path):
    file = kit.html_report(config().trial.folder, tmp_path / "new" / "report.html", title="Of <b>mine</b>")
    text = file.read_text()
    page = Page(text)
    assert [path.name for path in file.parent.iterdir()] == ["report.html"]
    assert page.all("script") == page.all("link") == page.all("img") == page.all("iframe") == []
    addresses = [value for _, found in page.tags for name, value in found.items() if name.endswith(("href", "src"))]
    assert all(value.startswith("#") for value in addresses)
    assert "@import" not in text
    assert re.findall(r"url\((?!#)", text) == []
    assert "default-src 'none'" in text
    assert "Of &lt;b&gt;mine&lt;/b&gt;" in text
    assert len(page.all("svg")) == 1 + 2 * 3, "one for all configs, three for each that has measured something"
    assert all(found["role"] == "img" and len(found["aria-label"]) > 30 for found in page.all("svg"))
    assert all(found["scope"] in ("col", "row", "colgroup") for found in page.all("th"))
    assert len(page.all("figcaption")) == len(page.all("svg"))


def test_a_report_says_what_was_asked_measured_and_missing(trials, config, tmp_path):
    text = kit.html_report(kit.results(config().trial.folder), tmp_path / "report.html").read_text()
    for found in (
        "4 trials of 3 configs", "kit.testing:TinyModule (9 parameters) on kit.testing:TinyData", "faults",
        "levers.accumulate_grad_batches", "mean ± standard deviation", "torch", "ratio",
        "1 trial did not end well", "Not shown:", "has no prediction of its memory",
        kit.studies.diagnose(trials[-1], peaks=False, short_trials=False).headline,
    ):  # fmt: skip
        assert found in text, found
    assert str(tmp_path) not in text
    assert re.search(r'levers.accumulate_grad_batches</th><td [^>]*>2</td><td [^>]*bold">1</td>', text), "marked"


class OtherModule(TinyModule):
    pass


def test_speeds_of_different_modules_are_no_comparison(config, tmp_path):
    for name, module in (("one", TinyModule), ("other", OtherModule)):
        kit.fit(config().replace({"name": name}), module, TinyData).wait()
    text = kit.html_report(config().trial.folder, tmp_path / "report.html").read_text()
    assert "2 experiments" in text
    assert "fastest" not in text


def test_a_report_of_one_trial_compares_nothing(trials, tmp_path):
    text = kit.html_report(trials[0], tmp_path / "report.html").read_text()
    assert "1 trial of 1 config" in text
    assert "plain processed" in text
    assert "configs differ" not in text
    again = kit.html_report([trials[0], str(trials[2].run_directory)], tmp_path / "report.html").read_text()
    assert "2 trials of 2 configs" in again


def test_settings_that_all_share_are_those_of_each(tmp_path):
    """Where the modules are known, a target that differs is no difference of theirs, and not shared either."""
    for name, target in (("a", "kit.models:GPT"), ("b", "kit.models:UNet")):
        paths = make_run(tmp_path / "runs", {"name": name, "model.target": target}, end=COMPLETE)
        lines = [json.loads(line) for line in paths.events(0).read_text().splitlines()]
        told = [line | {"module": target} if line["kind"] == "fit_started" else line for line in lines]
        paths.events(0).write_text("".join(json.dumps(line) + "\n" for line in told))
    page = kit.html_report(tmp_path / "runs", tmp_path / "r.html").read_text()
    shared = page.partition("all of them share")[2].partition("</table>")[0]
    assert "trial.max_steps" in shared
    assert "model.target" not in shared


def test_a_file_of_others_is_not_replaced_unless_asked(tmp_path):
    make_run(tmp_path / "runs", end=COMPLETE)
    found, file = results(tmp_path / "runs"), tmp_path / "index.html"
    file.write_text("<!doctype html><title>mine</title>")
    with pytest.raises(ConfigError, match="no report .*overwrite=True"):
        kit.html_report(found, file)
    assert "mine" in file.read_text()
    kit.html_report(found, file, overwrite=True)
    kit.html_report(found, file)
    assert "<title>mine</title>" not in file.read_text()


def test_a_folder_is_no_file_and_no_trial_no_report(tmp_path):
    with pytest.raises(ConfigError, match="folder; .*name the file"):
        kit.html_report(tmp_path, tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="no runs .*empty holds none yet; kit.fit"):
        kit.html_report(tmp_path / "empty", tmp_path / "report.html")
    make_run(tmp_path / "runs", end=COMPLETE)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot write"):
        kit.html_report(tmp_path / "runs", tmp_path / "file" / "report.html")
    assert not (tmp_path / "report.html").exists()


def test_a_run_that_cannot_be_read_is_named_and_hides_no_other(tmp_path):
    make_run(tmp_path / "runs", {"name": "fine"}, end=COMPLETE)
    broken = make_run(tmp_path / "runs", {"name": "broken"}, end=COMPLETE)
    broken.config.write_text("name: [")
    text = kit.html_report(tmp_path / "runs", tmp_path / "report.html").read_text()
    name = re.escape(broken.directory.name)
    assert re.search(f"{name}: unreadable: TrialError: …/{name} .*incomplete", text)
    assert "2 trials of 1 config" in text
    with pytest.raises(TrialError, match="none .*runs"):
        kit.html_report(broken.directory, tmp_path / "other.html")


def test_a_folder_in_which_no_run_has_ended_says_what_is_there_and_what_is_missing(tmp_path):
    begun = [make_run(tmp_path / "runs", {"name": "begun"}, steps=steps) for steps in (0, 1)]
    make_run(tmp_path / "runs", {"name": "failed"}, steps=0, end={"state": "FAILED", "message": "no such file"})
    text = kit.html_report(tmp_path / "runs", tmp_path / "report.html").read_text()
    assert "No trial has measured" in text
    assert "2 trials have not ended yet" in text
    assert "1 trial did not end well" in text
    for steps, paths in enumerate(begun):
        assert f"{paths.directory.name}: running, {steps} steps so far" in text
    assert "failed: no such file" in text


def test_a_report_of_very_many_configs_says_what_it_leaves_out(tmp_path, monkeypatch):
    monkeypatch.setattr("kit.report.page.MOST_CONFIGS", 3)
    monkeypatch.setattr("kit.report.page.MOST_CLOSE", 1)
    paths = make_run(tmp_path / "runs", end=COMPLETE)
    (row,) = results(tmp_path / "runs")
    rows = [
        {**row, "name": f"n{size}", "config": {**row["config"], "name": f"n{size}", "loader.batch_size": size}}
        for size in range(1, 7)
    ]
    text = kit.html_report(Results(rows), tmp_path / "report.html").read_text()
    assert "3 more configs" in text
    assert "1 of 6 configs" in text
    assert text.count("A closer look") == 1
    assert paths.directory.exists()


def test_no_secret_and_no_markup_of_a_run_is_in_a_report(tmp_path):
    asked = {"data.url": "https://host/a.zarr", "model.arguments": {"token": "hunter2"}}
    message = "<script>alert(1)</script> s3://me:hunter2@bucket/x"
    make_run(tmp_path / "runs", asked, end={"state": "FAILED", "cause": "data", "message": message})
    text = kit.html_report(tmp_path / "runs", tmp_path / "report.html").read_text()
    assert "hunter2" not in text
    assert "<script" not in text
    assert "https://host/a.zarr" in text


def test_a_run_whose_events_are_gone_is_told_by_its_row(tmp_path):
    paths = make_run(tmp_path / "runs", end=COMPLETE)
    results(tmp_path / "runs")
    for file in paths.event_files():
        file.unlink()
    text = kit.html_report(tmp_path / "runs", tmp_path / "report.html").read_text()
    assert "experiment processed 20 samples/s" in text
    assert re.search("no step .*finished", text)
