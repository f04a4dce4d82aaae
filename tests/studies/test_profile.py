"""Three passes over a trial: files under the seeds' names, tables read from them, one rank and two."""

import json

import pytest
from faulty import FaultyModule

from kit.charts.pipeline import profile_figure
from kit.errors import ConfigError, KitError, TrialError
from kit.studies.profiling.profile import Profile, profile, profile_folder
from kit.testing import TinyData, TinyModule


class Chatty(TinyModule):
    """A Python loop over numbers, as transforms have them."""

    def training_step(self, batch, batch_idx):
        for number in range(20_000):
            nothing(number)
        return super().training_step(batch, batch_idx)


def nothing(number):
    return number + number + number + number


@pytest.fixture
def small(config, tmp_path):
    def make(**options):
        changes = {"name": "mine", "profiler.folder": str(tmp_path / "profiler"), "trial.max_steps": 8}
        return config(**options).replace(changes)

    return make


@pytest.mark.slow
def test_one_call_makes_the_files_of_all_three_and_reads_them(small, tmp_path):
    found = profile(small(), Chatty, TinyData, memory=True).wait()
    folder = tmp_path / "profiler" / "mine" / "profiler_logs"
    names = {path.name for path in folder.iterdir()}
    assert names >= {f"fit-{which}_profiler_output.txt" for which in ("simple", "advanced", "pytorch")}
    assert len([name for name in names if name.endswith(".pt.trace.json")]) == 1
    calls = {row["action"]: row["calls"] for row in found.actions}
    assert calls["[Strategy]SingleDeviceStrategy.training_step"] == 8
    # Among others, perhaps: how much of the time a function took is measured.
    assert ("nothing", 8 * 20_000) in [(row["function"], row["calls"]) for row in found.many_calls]
    assert found.trace.steps == 3
    assert found.trace.memory["CPU"]
    assert "nothing, test_profile.py" in repr(found)
    assert found._repr_html_().count("<table") == 4
    assert "aten::" in found.viewer().page
    figure = profile_figure(found)
    assert len(figure.axes) == 5
    assert {"training_step", "nothing"} <= {text.get_text() for axes in figure.axes for text in axes.texts}


@pytest.mark.slow
def test_every_rank_has_files_of_its_own(small):
    found = profile(small(ranks=2), TinyModule, TinyData).wait()
    assert set(found.traces) == set(found.trace_files) == {0, 1}
    assert {row["rank"] for row in found.actions} == {row["rank"] for row in found.functions} == {0, 1}
    names = {path.name for path in found.files}
    assert {f"fit-simple_profiler_output-{rank}.txt" for rank in (0, 1)} <= names
    assert "(rank 1)" in repr(found)


def test_an_earlier_profile_is_kept_and_both_can_be_opened(small):
    first = profile(small(), TinyModule, TinyData, passes=["simple"]).wait()
    second = profile(small(), TinyModule, TinyData, passes=["simple"]).wait()
    assert second.folder == first.folder
    earlier = Profile.open(first.folder.with_name("profiler_logs.1"))
    assert earlier.passes == ("simple",)
    assert earlier.actions
    assert earlier.trace is None
    assert len(profile_figure(earlier).axes) == 1
    with pytest.raises(TrialError, match="no trace .*rank 0"):
        earlier.viewer()


def test_a_fault_in_the_module_ends_the_profile_with_its_reason(small):
    found = profile(small(), lambda: FaultyModule({(0, 3): "raise"}), TinyData, passes=["simple"])
    with pytest.raises(TrialError, match="a scripted fault"):
        found.wait()
    assert found.state == "FAILED"


def test_stopping_keeps_what_was_found(small):
    found = profile(small().replace({"trial.max_steps": 500}), lambda: TinyModule(seconds=0.02), TinyData)
    found.stop()
    found.wait()
    assert found.state == "STOPPED"
    assert len(found.trials) == 1


@pytest.mark.parametrize(
    ("changes", "passes", "said"),
    [
        ({}, ["simpel"], "'simpel' .*simple, advanced, pytorch"),
        ({"profiler.passes": ["pytroch"]}, None, "'pytroch' .*none of"),
        ({"trial.max_steps": 2}, None, "2 steps .*too few"),
    ],
)
def test_what_cannot_be_profiled_is_refused_before_anything_is_made(small, tmp_path, changes, passes, said):
    with pytest.raises(ConfigError, match=said):
        profile(small().replace(changes), TinyModule, TinyData, passes=passes)
    assert not (tmp_path / "profiler").exists()


def test_a_module_that_is_not_there_is_refused_before_an_earlier_profile_is_moved(small):
    folder = profile_folder(small())
    folder.mkdir(parents=True)
    with pytest.raises(KitError, match="nowhere"):
        profile(small(), "nowhere.at_all:Module", TinyData)
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_a_folder_without_a_profile_says_how_to_make_one(tmp_path):
    with pytest.raises(TrialError, match=r"kit\.studies\.profile"):
        Profile.open(tmp_path)


def test_numbers_come_from_json_and_not_from_text(tmp_path):
    actions = [{"action": "a", "calls": 2, "total_seconds": 3.0, "own_seconds": 1.0}]
    values = {"rank": 0, "fit_seconds": 4.0, "actions": actions}
    (tmp_path / "fit-simple_profiler_output.json").write_text(json.dumps(values))
    (row,) = Profile.open(tmp_path).actions
    assert row["own_fraction"] == 0.25
