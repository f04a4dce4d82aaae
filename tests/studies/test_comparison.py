import contextlib
import math
import re
from pathlib import Path

import pytest
from made_runs import COMPLETE, make_run

import kit
from kit.config import Config
from kit.errors import ConfigError, KitError, TrialError
from kit.studies.comparison import Comparison, Figure, RunGroup, compare
from kit.studies.repeats import Side
from kit.testing import TinyData, TinyModule


def row(speed, world_size=1, **more):
    return {
        "run": "r", "state": "COMPLETE", "message": None, "world_size": world_size, "samples_per_second": speed,
        "data_wait_fraction": 0.1, "device_allocated_bytes_measured": None, "host_rss_peak_bytes": 1 << 20, **more,
    }  # fmt: skip


def group(name, speeds, changes=None, world_size=1):
    config = kit.Config().replace(changes or {})
    return RunGroup(name=name, config=config, rows=tuple(row(speed, world_size) for speed in speeds))


TWO_DEVICES = {"hardware.devices": 2, "hardware.strategy": "ddp"}


@pytest.fixture
def comparison():
    return Comparison(
        (
            group("one", [100.0, 110.0, 90.0]),
            group("wide", [150.0], {"loader.batch_size": 64, "name": "other"}),
            group("two", [160.0, 170.0], TWO_DEVICES, world_size=2),
        )
    )


def test_repeats_have_a_mean_and_a_spread_and_a_single_run_has_none():
    assert Figure((90.0, 110.0)).text(lambda value: f"{value:.0f}") == "100 ± 14"
    assert Figure((90.0,)).text(lambda value: f"{value:.0f}") == "90"
    assert Figure(()).text(str) == "–"
    assert math.isnan(Figure((1.0,)).spread)


def test_speeds_of_repeats_have_the_mean_that_trying_a_change_gives_them(comparison):
    side = Side(name="one", config=Config(), samples_per_second=(100.0, 110.0, 90.0), run_directories=())
    assert comparison.groups[0].figure("samples_per_second").mean == side.mean == pytest.approx(990_000 ** (1 / 3))
    assert Figure((0.0, 2.0), geometric=True).mean == 1.0


def test_only_settings_that_differ_are_shown_and_those_unlike_the_first_are_marked(comparison):
    assert list(comparison.differences) == ["hardware.devices", "hardware.strategy", "loader.batch_size"]
    assert comparison.differences["loader.batch_size"] == (16, 64, 16)
    assert comparison.changed == {(1, 4), (2, 2), (2, 3)}
    assert comparison.columns[2:5] == ("hardware.devices", "hardware.strategy", "loader.batch_size")
    assert "*64" in repr(comparison)
    assert comparison._repr_html_().count('font-weight: bold">64') == 1


def test_a_few_configs_stand_side_by_side_and_many_below_each_other(comparison):
    few, many = comparison, Comparison(comparison.groups * 2)
    for shown, head, side in ((few, "two", "loader.batch_size"), (many, "loader.batch_size", "two")):
        page = shown._repr_html_()
        assert f">{head}</th>" in page.partition("</thead>")[0]
        assert f">{side}</th>" in page.partition("</thead>")[2]
        assert page.count('font-weight: bold">64') == len(shown.groups) // 3


def test_scaling_is_told_of_groups_that_differ_in_their_devices_only(comparison):
    one, wide, two = comparison.groups
    assert comparison.scaling_efficiency(two) == pytest.approx(math.sqrt(160 * 170) / (100 * 110 * 90) ** (1 / 3) / 2)
    assert comparison.scaling_efficiency(one) is None
    assert comparison.scaling_efficiency(wide) is None
    assert comparison.columns[-1] == "scaling efficiency"
    assert [line[-1] for line in comparison.rows] == ["–", "–", "0.83"]
    slow = group("one", [12.0])
    disturbed = Comparison((slow, group("two", [160.0], TWO_DEVICES, world_size=2)))
    assert any(text.startswith("two: 6.67 ×") for text in disturbed.remarks)
    assert not any("two: " in text for text in comparison.remarks)


def test_what_nobody_measured_is_no_column(comparison):
    assert [quantity.title for quantity in comparison.quantities] == ["samples/s", "data wait", "host RSS"]


def test_the_chart_has_a_panel_for_each_quantity_and_a_row_for_each_group(comparison):
    panels = comparison.figure().axes
    assert [axes.get_title(loc="left") for axes in panels] == ["samples/s", "data wait", "host RSS"]
    assert [label.get_text() for label in panels[0].get_yticklabels()] == ["one", "wide", "two"]
    assert [len(line.get_xdata()) for line in panels[0].lines] == [3, 2], "single runs have no dots"
    for axes in panels:
        assert len(axes.patches) == 3
        assert axes.get_xlim()[0] == 0


def test_runs_of_one_config_are_repeats_wherever_they_are_kept(config, tmp_path):
    trials = [kit.fit(config(max_steps=4), TinyModule, TinyData).wait() for _ in range(2)]
    elsewhere = kit.fit(config(max_steps=4, folder=str(tmp_path / "more")), TinyModule, TinyData).wait()
    longer = kit.fit(config(max_steps=5), TinyModule, TinyData).wait()
    found = kit.studies.compare(*trials, elsewhere.run_directory, longer, names=["short"])
    assert [(group.name, len(group.rows)) for group in found.groups] == [("short", 3), ("experiment", 1)]
    assert list(found.differences) == ["trial.max_steps"]
    assert any("seed 13" in text for text in found.sentences)
    whole = kit.studies.compare(config().trial.folder)
    assert [len(group.rows) for group in whole.groups] == [2, 1]
    assert len(kit.studies.compare(kit.results(config().trial.folder)[:2]).groups) == 2


def test_before_and_after_a_change_stand_apart_though_their_config_is_the_same(config):
    tried = kit.studies.try_change(
        config(max_steps=4), TinyModule, TinyData, new_module=lambda: TinyModule(width=8), repeats=2
    )
    found = kit.studies.compare(tried)
    assert [group.name for group in found.groups] == ["before", "after"]
    assert found.differences == {}
    assert kit.studies.compare(config().trial.folder).groups, "where there are none but repeats these are compared"
    assert any(re.search("configs .*same: module or data", text) for text in found.sentences)


class Other(TinyModule):
    """The same under another name."""


def test_another_module_or_data_is_told_beside_settings(config):
    kit.fit(config(max_steps=4), TinyModule, TinyData).wait()
    tried = kit.studies.try_change(
        config(max_steps=4), TinyModule, TinyData, new_module=Other, change={"training.seed": 3}, repeats=2
    )
    found = kit.studies.compare(tried)
    assert found.differences["module"] == ("TinyModule", "Other")
    assert "model.target" not in found.differences
    assert "data" not in found.differences
    assert any("TinyModule → Other" in text for text in tried.sentences)
    whole = kit.studies.compare(config().trial.folder)
    assert [len(group.rows) for group in whole.groups] == [1]
    assert any("repeats" in text for text in whole.sentences)
    kit.fit(config(max_steps=5), Other, TinyData).wait()
    assert "module Other" in str(kit.results(config().trial.folder))


def test_a_trial_that_failed_is_named(config):
    trial = kit.fit(config().replace({"model.arguments": {"seconds": 0.0}}), "faulty:FaultyModule", TinyData)
    with pytest.raises(TrialError):
        trial.wait()
    found = kit.studies.compare(trial)
    assert any(text.startswith(f"{trial.name}: failed") for text in found.sentences)
    assert found.rows[0][-1] == "–"


def test_nothing_to_compare_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="no runs"):
        kit.studies.compare(tmp_path)
    with pytest.raises(TrialError, match="does not exist"):
        kit.studies.compare(tmp_path / "nowhere")


class Broken(TinyModule):
    def configure_optimizers(self):
        raise ValueError("not yet")


class Breaking(TinyModule):
    def __init__(self, fails: bool = True):
        super().__init__()
        self.fails = fails

    def configure_optimizers(self):
        if Path("fixed").exists():
            return super().configure_optimizers()
        raise ValueError("not yet")


def test_a_run_that_failed_early_is_grouped_with_its_own_module_only(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = kit.Config().replace(
        {"trial.max_steps": 2, "trial.warmup_steps": 1, "trial.predict_memory": False, "hardware.accelerator": "cpu"}
    )
    modules = (TinyModule, Broken, Breaking, "fixed", Breaking)
    for module in modules:
        if module == "fixed":
            (tmp_path / "fixed").touch()
            continue
        with contextlib.suppress(TrialError):
            kit.fit(config, module, TinyData).wait()
    groups = kit.studies.compare("runs").groups
    states = [[row["state"] for row in group.rows] for group in groups]
    assert states == [["COMPLETE"], ["FAILED"], ["FAILED", "COMPLETE"]]


def test_a_list_of_runs_is_as_good_as_the_runs(tmp_path):
    runs = [make_run(tmp_path / str(width), {"loader.batch_size": width}, end=COMPLETE) for width in (1, 2)]
    folders = [paths.directory for paths in runs]
    expected = repr(compare(*folders))
    assert repr(compare(folders)) == repr(compare(tuple(map(str, folders)))) == repr(compare(iter(folders))) == expected
    assert len(compare([tmp_path / "1", [tmp_path / "2"]]).groups) == 2


@pytest.mark.parametrize("odd", [None, 3, [None], b"runs"])
def test_what_is_no_run_is_refused_by_name(odd):
    with pytest.raises(KitError, match="no run"):
        compare(odd)
