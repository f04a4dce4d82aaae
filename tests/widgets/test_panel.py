"""The panel without a kernel or a browser: set a value, click, wait; real stores and real trials."""

import asyncio
import re
import threading
from contextlib import closing
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from made_runs import make_run
from properties import nightly
from torch.utils.data import DataLoader, TensorDataset
from waiting import PATIENCE_SECONDS, wait_until

import kit
from kit.config import Config
from kit.errors import ConfigError, TrialError, UnreachableStoreError
from kit.memory.prediction import predict_memory
from kit.testing import TinyModule
from kit.widgets import panel as panels
from kit.widgets.live import LatestOnlyWorker
from kit.widgets.panel import Panel, panel
from kit.widgets.parts import WAITING, error_html, progress_html
from kit.widgets.store import StoreView
from kit.widgets.trial_view import TrialView

SOURCE = '''
import numpy as np
from kit.data.build.source import VariableSpec


class Waves:
    """Two variables on a small grid, arithmetic of the indices."""

    dims = ("time", "y", "x")
    attributes = {}

    def __init__(self, size=32):
        self.shape = (8, size, size)
        self.variables = {name: VariableSpec(np.dtype("int16")) for name in ("u", "v")}
        self.coordinates = {name: np.arange(side) for name, side in zip(self.dims, self.shape)}

    def read(self, name, region):
        t, y, x = np.meshgrid(*(np.arange(side.start, side.stop) for side in region), indexing="ij")
        return (t + 2 * y + 3 * x).astype("int16")
'''
WAIT = PATIENCE_SECONDS


@pytest.fixture
def project(project):
    (project / "waves.py").write_text(SOURCE)
    return project


@pytest.fixture
def config(project):
    return Config().replace(
        {
            "name": "waves",
            "data.source": "waves.py:Waves",
            "data.url": "data/waves.zarr",
            "data.patch": {"time": 2, "y": 8, "x": 8},
            "model.target": "kit.testing:TinyModule",
            "loader.batch_size": 4,
            "trial.max_steps": 8,
            "trial.warmup_steps": 2,
            "hardware.accelerator": "cpu",
            "hardware.threads_per_rank": 1,
        }
    )


@pytest.fixture
def quick(config):
    """A panel whose trial takes a moment."""
    return Panel(config, data="kit.testing:TinyData")


@pytest.fixture
def endless(config):
    """A panel whose trial is still running when it is looked at."""
    slow = config.replace({"trial.max_steps": 5000, "model.arguments": {"seconds": 0.02}})
    return Panel(slow, data="kit.testing:TinyData")


def words(view):
    return re.search(r"role='status'[^>]*>([^<]*)<", view.progress.value)[1]


def descriptions(button):
    """What the button will have said, one after the other."""
    said = []
    button.observe(lambda change: said.append(change["new"]), "description")
    return said


def wait_for_step(panel):
    """Until the view shows a step; told by the trait, not by a clock."""
    shown = threading.Event()
    panel.view.progress.observe(lambda _: shown.set() if words(panel.view).startswith("step") else None, "value")
    assert words(panel.view).startswith("step") or shown.wait(WAIT)


def test_a_click_on_fit_runs_a_trial_and_shows_its_result(quick):
    assert words(quick.view) == "ready"
    said = descriptions(quick.button)
    quick.button.click()
    quick.wait(WAIT)
    assert quick.trial.state == "COMPLETE"
    assert said == ["Stop", "Fit"]
    assert re.match(r"complete — [\d.]+( k)? samples/s, .*wait \d+%, .*\d+ MiB host RSS", words(quick.view))
    assert "Throughput over 6 steps after warm-up" in quick.view.chart.value


@pytest.mark.slow
def test_a_second_click_stops_and_keeps_what_was_measured(endless):
    endless.button.click()
    wait_for_step(endless)
    endless.button.click()
    endless.wait(WAIT)
    assert endless.trial.state == "STOPPED"
    assert words(endless.view).startswith("stopped after step")
    assert endless.button.description == "Fit"


@pytest.mark.slow
def test_a_step_says_how_much_time_is_left(endless):
    endless.fit()
    left = threading.Event()
    endless.view.progress.observe(lambda _: left.set() if words(endless.view).endswith("left") else None, "value")
    assert left.wait(WAIT)
    assert re.match(r"step \d+/5000 · \d+ (s|min( \d+ s)?) left", words(endless.view))
    endless.stop()
    endless.wait(WAIT)


@pytest.mark.slow
def test_methods_mirror_the_controls(endless):
    trial = endless.fit()
    assert endless.fit() is trial
    endless.stop()
    endless.wait(WAIT)
    assert endless.trial is trial
    assert not endless.busy


def test_a_panel_can_be_awaited(quick):
    async def run():
        quick.fit()
        await quick

    asyncio.run(run())
    assert quick.trial.state == "COMPLETE"


def test_a_changed_control_reaches_the_trial_and_the_line_of_code(quick):
    quick.form.controls["trial.max_steps"].value = 5
    quick.form.controls["hardware.precision"].value = "bf16-mixed"
    assert "kit.fit(config.replace({" in quick.code.value
    assert ", data=data)" in quick.code.value
    assert "&quot;trial.max_steps&quot;: 5" in quick.code.value
    quick.fit()
    quick.wait(WAIT)
    assert quick.trial.asked == quick.config
    assert max(event["step"] for event in quick.trial.steps) == 5


def test_what_cannot_start_is_said_beside_the_button(config):
    broken = Panel(config.replace({"model.target": "kit.testing:TinyModle"}), data="kit.testing:TinyData")
    broken.button.click()
    broken.wait(WAIT)
    assert "TinyModule" in broken.view.error.value
    assert "role='alert'" in broken.view.error.value
    assert (words(broken.view), broken.button.description) == ("not started", "Fit")
    with pytest.raises(ConfigError):
        broken.fit()


def test_edits_that_do_not_fit_refuse_to_start(quick):
    quick.form.controls["hardware.strategy"].value = "ddp"
    with pytest.raises(ConfigError, match="at least 2 devices"):
        quick.fit()
    assert quick.trial is None


def test_a_failed_trial_shows_its_root_cause_and_folds_the_traceback(config):
    failing = Panel(config.replace({"model.arguments": {"width": 3}}), data="kit.testing:TinyData")
    failing.button.click()
    with pytest.raises(TrialError):
        failing.wait(WAIT)
    assert words(failing.view).startswith("failed before")
    shown, _, folded = failing.view.error.value.partition("<details")
    assert "RuntimeError" in shown
    assert "Traceback" not in shown
    assert "Traceback" in folded
    assert failing.button.description == "Fit"


@pytest.mark.slow
def test_fit_after_a_failure_clears_the_error(config):
    again = Panel(config.replace({"model.arguments": {"width": 3}}), data="kit.testing:TinyData")
    again.fit()
    with pytest.raises(TrialError):
        again.wait(WAIT)
    again.form.controls["model.arguments"].value = ""
    again.fit()
    again.wait(WAIT)
    assert again.view.error.value == ""
    assert again.trial.state == "COMPLETE"


@pytest.mark.slow
def test_the_still_is_a_sentence_and_a_picture(quick):
    assert quick.view.still == ("no trial yet", None)
    quick.fit()
    quick.wait(WAIT)
    sentence, picture = quick.view.still
    assert "complete" in sentence
    assert picture.startswith(b"\x89PNG")


def test_save_writes_the_config_of_the_form(quick, project):
    quick.form.controls["loader.batch_size"].value = 7
    path = quick.save(project / "mine.yaml")
    assert Config.load(path) == quick.config


def test_a_store_without_a_network_to_it_is_told_and_not_called_unbuilt(config, monkeypatch):
    monkeypatch.setenv("KIT_ENDPOINTS", '{"gs://away": "http://127.0.0.1:9"}')
    mine = Panel(config.replace({"data.url": "gs://away/waves.zarr"}))
    mine.wait(WAIT)
    assert "no connection to 127.0.0.1:9" in mine.store.summary.value
    assert "not built" not in mine.store.summary.value
    with pytest.raises(UnreachableStoreError, match="no connection"):
        mine.chunks.probe()


def test_the_store_is_planned_built_and_found(config):
    mine = Panel(config)
    mine.wait(WAIT)
    assert "not built yet" in mine.store.summary.value
    assert "of data, about" in mine.store.summary.value
    assert "samples/s predicted" in mine.chunks.view.headline.value
    assert mine.store.control.ui.layout.display is None
    said = descriptions(mine.store.button)
    mine.store.button.click()
    mine.wait(WAIT)
    assert said[0] == "Stop"
    assert "is built" in mine.store.summary.value
    assert mine.store.control.ui.layout.display == "none"
    card, (cost,) = mine.overview.cards["data"], mine.store.facts.costs
    assert cost.bound in card.why
    assert f"{card.value} samples/s as it is built" in mine.chunks.view.headline.value


def test_the_speed_on_a_card_is_that_of_predict_speed_with_the_loader(config):
    unet = {"variables": 2, "history": 1, "width": 4, "depth": 1}
    mine = Panel(config.replace({"model.target": "kit.models:UNet", "model.arguments": unet}))
    mine.build()
    mine.wait(WAIT)
    mine.memory.device = "A100-40GB"
    mine._wanted = True
    mine.memory.predict()
    mine.memory.wait(WAIT)
    expected = kit.predict_speed(mine.config, device="A100-40GB")
    assert expected.time.loader_seconds > 0
    assert mine._predicted_speed.time.loader_seconds == expected.time.loader_seconds
    assert mine._predicted_speed.step_seconds == expected.step_seconds
    assert "bucket" in mine.overview.cards["data"].unit


def test_what_auto_came_to_stands_beside_its_field(config):
    mine = Panel(config)
    mine.wait(WAIT)
    assert "x: " in mine.form.hints["chunking.chunk"]
    assert mine.form._notes["hardware.precision"].value != ""


def test_another_patch_makes_another_plan(config):
    mine = Panel(config)
    mine.wait(WAIT)
    before = mine.store.facts.plan
    mine.form.controls["data.patch"].value = "time: 1, y: 16, x: 16"
    mine.wait(WAIT)
    assert mine.store.facts.plan.patch == (1, 16, 16)
    assert before.patch == (2, 8, 8)


def test_other_chunks_are_chosen_from_a_list_and_go_into_the_form(config):
    mine = Panel(config)
    mine.wait(WAIT)
    choice = mine.chunks.choice
    assert choice.value == "auto"
    assert sum(words.endswith("the choice") for words in choice.options) == 1
    other = next(words for words in choice.options[1:] if not words.endswith("the choice"))
    choice.value = other
    mine.wait(WAIT)
    assert "×".join(map(str, mine.config.chunking.chunk.values())) == other.partition(":")[0]
    assert mine.store.facts.plan.chunk == tuple(mine.config.chunking.chunk.values())
    assert choice.value == other
    assert len(choice.options) > 2, "the others can still be chosen"
    choice.value = "auto"
    assert mine.config.chunking.chunk == "auto"


def test_who_builds_is_planned_once_it_is_opened(config):
    mine = Panel(config)
    mine.wait(WAIT)
    assert mine.building.view.facts is None
    mine._fold.button.click()
    mine.wait(WAIT)
    assert "threads" in mine.building.view.table.value
    assert "advise_schedule" in mine.building.advice_code.value
    mine.form.controls["build.scheduler"].value = "single-threaded"
    mine.wait(WAIT)
    assert mine.building.view.facts.plan.slots.threads == 1


def test_the_batch_size_has_a_slider_beside_its_memory(config):
    mine = Panel(config, data="kit.testing:TinyData")
    slider = mine.memory.sliders["loader.batch_size"]
    assert (slider.widget.description, slider.widget.value) == ("batch size", 4)
    slider.widget.value = 32
    assert mine.config.loader.batch_size == 32
    mine.reset_button.click()
    assert slider.widget.value == 4


def test_a_setting_changed_while_a_trial_runs_has_no_memory_until_it_ends(endless):
    endless._wanted = True
    endless.memory.predict()
    endless.memory.wait(WAIT)
    assert not endless.overview.cards["memory"].stale
    endless.fit()
    endless.form.controls["loader.batch_size"].value = 64
    card = endless.overview.cards["memory"]
    assert (card.stale, card.why) == (True, "predicted after the trial")
    assert endless.memory.view.cards_waiting
    assert "predicted after the trial" in endless.memory.view.status.value
    endless.stop()
    endless.wait(WAIT)
    endless.memory.wait(WAIT)
    assert not endless.overview.cards["memory"].stale


def test_a_setting_that_is_not_taken_over_turns_the_answers_grey(quick):
    quick.form.controls["hardware.devices"].value = "8"
    assert "hardware.strategy does not fit" in quick.changes.value
    assert WAITING in quick.overview.ui._dom_classes
    quick.form.reset("hardware.devices")
    assert "unchanged" in quick.changes.value
    assert WAITING not in quick.overview.ui._dom_classes


def test_what_was_refused_is_said_until_a_setting_changes_and_the_last_trial_is_there_again(quick):
    assert "no trial" in quick._no_trials.value
    assert "nothing is diagnosed" in quick._no_advice.value
    quick.fit().wait(WAIT)
    quick.wait(WAIT)
    chart = quick.view.chart.value
    quick.form.controls["hardware.devices"].value = "8"
    with pytest.raises(ConfigError):
        quick.fit()
    assert words(quick.view) == "not started"
    quick.form.reset("hardware.devices")
    assert words(quick.view).startswith("complete")
    assert quick.view.chart.value == chart
    assert quick.view.error.value == ""
    quick.exporting.wait()
    assert quick._no_trials.value == ""


def test_a_plan_that_cannot_hold_is_explained(config):
    mine = Panel(config.replace({"data.patch": {"time": 2, "y": 99}}))
    mine.wait(WAIT)
    assert "larger than" in mine.store.summary.value
    assert mine.store.control.ui.layout.display == "none"


def test_a_stopped_build_resumes(config):
    small = {"chunking.chunk": {"time": 1, "y": 8, "x": 8}, "chunking.shard": "none"}
    view = StoreView(config.replace(small))
    view.wait(WAIT)
    started = threading.Event()

    def stop(change):
        if " of " in change["new"]:
            view.stop()
            started.set()

    view.progress.observe(stop, "value")
    view.build()
    assert started.wait(WAIT)
    view.wait(WAIT)
    view.progress.unobserve_all()
    if view.facts.dataset is None:
        assert "resumes" in view.progress.value
    view.build()
    view.wait(WAIT)
    assert view.facts.dataset is not None
    assert np.array_equal(view.facts.dataset.open_array("u")[0, 0], 3 * np.arange(32))


def test_a_fresh_panel_starts_from_the_default_config(project):
    assert panel().config == Config()


def test_a_view_of_another_trial_ignores_the_first(quick, config):
    quick.fit()
    quick.wait(WAIT)
    view = TrialView(config)
    view.show(quick.trial)
    assert words(view) == "ready"


def test_the_chart_of_a_trial_that_has_ended_gets_the_prediction_that_comes_later(quick, config, tmp_path):
    quick.fit()
    quick.wait(WAIT)
    trial = quick.trial
    memory = predict_memory(trial.config, data="kit.testing:TinyData")
    trial.paths.prediction.unlink(missing_ok=True)
    trial.paths.predicting.write_text(str(make_run(tmp_path).directory))  # it has not ended
    view = TrialView(config)
    view.watch(trial)
    assert "being predicted" in view.chart.value
    trial.paths.write_prediction(memory.to_dict())
    wait_until(lambda: "being predicted" not in view.chart.value)


def test_words_that_change_quickly_are_not_spoken():
    assert "aria-live='off'" in progress_html("step 1/2", 0.5, "part done", spoken=False)
    assert "aria-live='polite'" in progress_html("complete", 1.0, "part done")


def test_errors_are_escaped_and_long_tracebacks_cut():
    shown = error_html("<b>bad</b>", "\n".join(f"line {n}" for n in range(1000)))
    assert "<b>" not in shown
    assert "line 999" in shown
    assert "line 100\n" not in shown


def test_the_newest_of_waiting_jobs_runs_and_the_others_do_not():
    background, began, first, ran = LatestOnlyWorker("test"), threading.Event(), threading.Event(), []
    background.submit(lambda: (began.set(), first.wait(WAIT)))
    assert began.wait(WAIT), "one that has not begun is itself among those that do not run"
    for number in range(3):
        background.submit(lambda number=number: ran.append(number))
    assert not background.wait(0)
    first.set()
    assert background.wait(WAIT)
    assert ran == [2]


def test_the_sizes_of_the_model_stand_beside_its_arguments(config):
    made = panels.panel(config.replace({"model.target": "kit.models:GPT", "model.arguments": {"width": 384}}))
    hint = made.form.hints["model.arguments"]
    assert re.search(r"width 384, layers 12, context 1024; kit\.memory\.panel", hint)
    assert panels.size_hints(config.replace({"model.target": "kit.models:Nothing"})) == {}


def test_device_hints_name_what_is_missing(config):
    hints = panels.device_hints(config.replace({"hardware.devices": 3, "hardware.strategy": "ddp"}))
    assert hints["hardware.devices"]


def test_precision_and_attention_are_those_of_the_card_asked_about(config):
    changes = {"hardware.accelerator": "cpu", "hardware.precision": "16-mixed", "levers.attention": "cudnn"}
    asked = config.replace(changes)
    assert "needs a GPU" in panels.device_hints(asked)["hardware.devices"]
    hints = panels.device_hints(asked, device="H100-80GB")
    assert hints["hardware.precision"].startswith("16-mixed on H100")
    assert "cudnn" in hints["levers.attention"]
    assert "torch chooses" not in hints["levers.attention"]


def test_the_strategy_says_what_it_means_and_a_mesh_that_does_not_fit_shows_its_arithmetic(config):
    made = panels.panel(config)
    control = made.form.controls["hardware.strategy"]
    assert "fsdp:2:2" in control.options
    control.value = "fsdp:2:2"
    made.form.controls["hardware.devices"].value = "2"
    said = [problem.message for problem in made.form.problems if problem.path == "hardware.strategy"]
    assert any("2 replicas × 2 devices each = 4" in message for message in said)
    made.form.controls["hardware.devices"].value = "4"
    assert made.config.hardware.strategy == "fsdp:2:2"
    assert "each holds 1/2 of a model" in made.form.hints["hardware.strategy"]


def test_more_devices_show_the_global_batch_and_linear_scaling_against_the_config_it_began_with(config):
    made = panels.panel(config)
    size = config.loader.batch_size
    assert "learning rate" not in made.form.hints["loader.batch_size"]
    made.config = config.replace({"hardware.devices": 2, "hardware.strategy": "ddp"})
    assert f"a step sees {2 * size} samples" in made.form.hints["loader.batch_size"]
    assert re.search("2 times .*learning rate", made.form.hints["loader.batch_size"])


@pytest.mark.slow
def test_settings_change_while_the_store_is_looked_at(config):
    made, sizes = panels.panel(config), range(1, 60, 1 if nightly() else 2)

    def change() -> None:
        for size in sizes:
            made.config = config.replace({"loader.batch_size": size})  # each has the store looked at in a thread

    changing = threading.Thread(target=change, daemon=True)
    changing.start()
    changing.join(WAIT)
    assert not changing.is_alive()
    made.wait(WAIT)
    assert made.config.loader.batch_size == 59
    assert made.form.hints.keys() >= {"loader.batch_size", "chunking.chunk"}


@pytest.mark.parametrize(("changes", "size"), [({}, 6), ({"loader.batch_size": 64}, 64)])
def test_a_panel_begins_with_the_batches_that_the_loader_makes(config, changes, size):
    """Nobody chose the default of the config; who chose another number is told that the loader's is used."""
    loader = DataLoader(TensorDataset(torch.rand(64, 8), torch.rand(64, 1)), batch_size=6)
    given = config.replace({"loader.batch_size": Config().loader.batch_size, **changes})
    with closing(Panel(given, TinyModule, loader)) as made:
        assert made.config.loader.batch_size == size
        assert not made.form.changed


def test_the_line_of_code_names_what_the_notebook_calls_it(config, monkeypatch):
    named, unnamed = TinyModule(), TinyModule()
    names = {"mine": config, "net": named, "_": unnamed}
    monkeypatch.setattr(
        "kit.widgets.live._shell", lambda: SimpleNamespace(user_ns=names, user_ns_hidden={}, displayhook=None)
    )
    with closing(Panel(config, named, "kit.testing:TinyData")) as made:
        assert made._arguments() == 'mine, net, "kit.testing:TinyData"'
    with closing(Panel(Config(), unnamed)) as made:
        assert made._arguments() == "kit.Config(), TinyModule(...)"
        names["shown"] = made
        made.form.edit({"loader.batch_size": 2})
        assert made._arguments() == 'kit.Config().replace({"loader.batch_size": 2}), shown.module'
